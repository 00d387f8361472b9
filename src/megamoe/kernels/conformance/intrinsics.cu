// Integer and float32 intrinsics that kernels use outside ptx.cuh, on arrays of any bits.
//
// integers  grid of n CTAs of 128: in: u32 [n * 128][3]. out: u32 [15][n * 128].
// floats    grid of n CTAs of 128: in: float [n * 128][3]. out: float [9][n * 128], and to integer [3][n * 128].
#include "ptx.cuh"

using ptx::u32;
using ptx::u64;

struct IntegersArguments {
  const u32* in;
  u32* out;
};

extern "C" __global__ void __launch_bounds__(128) integers(const __grid_constant__ IntegersArguments p) {
  const u32 i = blockIdx.x * 128 + threadIdx.x, n = gridDim.x * 128;
  const u32 a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
  const u64 wide = static_cast<u64>(a) << 32 | b;
  const u32 result[15] = {static_cast<u32>(__popc(a)),
                          static_cast<u32>(__ffs(static_cast<int>(a & b & c))),
                          static_cast<u32>(__clz(static_cast<int>(a & b & c))),
                          static_cast<u32>(__popcll(wide)),
                          static_cast<u32>(__ffsll(static_cast<long long>(wide & c))),
                          static_cast<u32>(__clzll(static_cast<long long>(wide & c))),
                          __brev(a),
                          __byte_perm(a, b, c),
                          __umulhi(a, b),
                          __funnelshift_l(a, b, c),
                          __funnelshift_r(a, b, c),
                          ptx::max_u16x2(a, b),
                          min(a, b),
                          static_cast<u32>(max(static_cast<int>(a), static_cast<int>(b))),
                          static_cast<u32>(__umul64hi(wide, wide ^ c))};
#pragma unroll
  for (u32 k = 0; k < 15; ++k) p.out[k * n + i] = result[k];
}

struct FloatsArguments {
  const float* in;
  float* out;
  u32* integers;
};

extern "C" __global__ void __launch_bounds__(128) floats(const __grid_constant__ FloatsArguments p) {
  const u32 i = blockIdx.x * 128 + threadIdx.x, n = gridDim.x * 128;
  const float a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
  const float result[9] = {__fadd_rn(a, b), __fsub_rn(a, b),  __fmul_rn(a, b), __fdiv_rn(a, b), __frcp_rn(a),
                           __fsqrt_rn(a),   __fmaf_rn(a, b, c), min(a, b),       max(a, b)};
#pragma unroll
  for (u32 k = 0; k < 9; ++k) p.out[k * n + i] = result[k];
  p.integers[i] = static_cast<u32>(__float2int_rn(a));
  p.integers[n + i] = static_cast<u32>(__float2int_rz(b));
  p.integers[2 * n + i] = __float2uint_rn(c);
}
