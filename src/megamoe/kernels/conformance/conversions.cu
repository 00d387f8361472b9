// Conversions and approximations on one float a thread.
#include "ptx.cuh"

using ptx::u16;
using ptx::u32;

struct ConversionArguments {
  const float* x;  // [n], a multiple of 128
  u32* bf16;       // [n] pair of x[i] and x[i ^ 1]
  u16* e4m3;       // [n] the same pair
  float* ex2;      // [n]
  float* rcp;      // [n]
};

extern "C" __global__ void __launch_bounds__(128) conversions(const __grid_constant__ ConversionArguments p) {
  const u32 i = blockIdx.x * 128 + threadIdx.x;
  const float x = p.x[i], other = p.x[i ^ 1];
  p.bf16[i] = ptx::pack_bf16x2(x, other);
  p.e4m3[i] = ptx::pack_e4m3x2(x, other);
  p.ex2[i] = ptx::ex2_approx(x);
  p.rcp[i] = ptx::rcp_approx(x);
}
