// The float32 arithmetic of math.cuh on plain arrays, so that a GPU, the simulator and the oracle can be compared.
//
// Grid of `groups` CTAs of 128 threads; thread t of CTA g has element i = 128 g + t.
//   h[i]        silu(gate) * up * weight, with the clamp where it is above 0; gate itself without kActivation
//   silu[i]     silu(gate), with kActivation
//   fused[i]    promote(gate, up, weight), first[i] promote_first(gate, up)
//   q[i], s[g]  h requantised over the group's 128 elements
//
// config: kActivation, kClamp.
#include "config.cuh"
#include "math.cuh"

using ptx::u16;
using ptx::u32;
using ptx::u8;

struct ArithmeticArguments {
  const float* gate;
  const float* up;
  const float* weight;
  float* h;
  float* silu;
  float* fused;
  float* first;
  u8* q;
  float* s;
};

extern "C" __global__ void __launch_bounds__(128) arithmetic(const __grid_constant__ ArithmeticArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 t = threadIdx.x, i = blockIdx.x * 128 + t;
  const ptx::Smem row = ptx::shared_address(smem), amax_slots = row + 128 * 4;
  const float gate = p.gate[i], up = p.up[i], weight = p.weight[i];
  constexpr float kClamp = config::kClamp;
  float h = gate;
  if constexpr (config::kActivation) {
    h = kClamp > 0.0f ? math::swiglu_clamped(gate, up, weight, kClamp) : math::swiglu(gate, up, weight);
    p.silu[i] = math::silu(gate);
  }
  p.h[i] = h;
  p.fused[i] = math::promote(gate, up, weight);
  p.first[i] = math::promote_first(gate, up);

  u32 amax = math::amax_bits(0, h);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) amax = math::amax_combine(amax, ptx::shfl_xor(amax, step));
  if (ptx::lane_index() == 0) ptx::st_shared_u32(amax_slots + t / 32 * 4, amax);
  ptx::st_shared_f32(row + t * 4, h);
  __syncthreads();
#pragma unroll
  for (u32 warp = 0; warp < 4; ++warp) amax = math::amax_combine(amax, ptx::ld_shared_u32(amax_slots + warp * 4));
  const float largest = math::amax_value(amax);
  if (t == 0) p.s[blockIdx.x] = math::quantisation_scale(largest);
  if (t % 2 == 0) {
    const float next = ptx::ld_shared_f32(row + (t + 1) * 4);
    *reinterpret_cast<u16*>(p.q + i) = math::quantise_pair(h, next, math::quantisation_multiplier(largest));
  }
}
