// ldmatrix and stmatrix: one warp, fragments made of the lane number, the shared memory behind them.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;

struct MatrixArguments {
  const u32* words;  // [256], 32 rows of 32 bytes
  u32* stored;       // [3][256] shared memory after each stmatrix
  u32* loaded;       // [4][32]
};

constexpr u32 kRowBytes = 32, kBytes = 32 * kRowBytes;

extern "C" __global__ void __launch_bounds__(32) matrices(const __grid_constant__ MatrixArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 lane = ptx::lane_index();
  const Smem row = base + lane * kRowBytes;
  u32 r[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) r[i] = (lane * 8 + i * 2) | (lane * 8 + i * 2 + 1) << 16;
#pragma unroll 1
  for (u32 kind = 0; kind < 3; ++kind) {
    for (u32 i = 0; i < kRowBytes; i += 4) ptx::st_shared_u32(row + i, 0xeeeeeeeeu);
    ptx::syncwarp();
    if (kind == 0) ptx::stmatrix_x4(row, r[0], r[1], r[2], r[3]);
    if (kind == 1) ptx::stmatrix_x4_trans(row, r[0], r[1], r[2], r[3]);
    if (kind == 2) ptx::stmatrix_x2_trans(row, r[0], r[1]);
    ptx::syncwarp();
    for (u32 i = 0; i < kRowBytes / 4; ++i) {
      p.stored[kind * kBytes / 4 + lane * 8 + i] = ptx::ld_shared_u32(row + i * 4);
    }
    ptx::syncwarp();
  }
  for (u32 i = 0; i < kRowBytes / 4; ++i) ptx::st_shared_u32(row + i * 4, p.words[lane * 8 + i]);
  ptx::syncwarp();
  ptx::ldmatrix_x4(r, base + ((lane * 5 % 32) * kRowBytes + lane % 2 * 16));
#pragma unroll
  for (u32 i = 0; i < 4; ++i) p.loaded[i * 32 + lane] = r[i];
}
