// Puts one call's inputs where the fused kernel expects them, as the staging kernel does on a GPU: for simulated streams.
#include "ptx.cuh"

using ptx::u32;

struct Inputs {
  const u32* from[4];  // rows, their scales, expert ids, route weights
  u32* to[4];
  u32 words[4];
};

extern "C" __global__ void stage_inputs(const __grid_constant__ Inputs p) {
  for (u32 n = 0; n < 4; ++n) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.words[n]; i += gridDim.x * blockDim.x) {
      p.to[n][i] = p.from[n][i];
    }
  }
}
