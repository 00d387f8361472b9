// A 256 x 256 x 128 e4m3 product with WGMMA of one width, with either matrix on the M side and with A from shared
// memory or from registers. Invariance across plans rests on all of them, for every width in use, having the same bits.
//
// One CTA of 128 threads. x, y: e4m3 [256, 128]. out: float32 [order][source][256][256], order 0 = x on the M side
// ([x row][y row]), 1 = y on the M side ([y row][x row]); source 0 = shared memory, 1 = registers.
//
// config: kWidth.
#include "config.cuh"
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u8;

struct WidthsArguments {
  const u8* x;
  const u8* y;
  float* out;
};

constexpr int kRows = 256, kDepth = 128, kMatrixBytes = kRows * kDepth;

// Rows of 128 bytes, 16-byte units exchanged as the 128-byte swizzle does.
MEGAMOE_DEVICE void load_swizzled(Smem to, const u8* from) {
  for (u32 unit = threadIdx.x; unit < kMatrixBytes / 16; unit += 128) {
    const u32 row = unit / 8, column = unit % 8;
    ptx::st_shared_v4(to + (row * kDepth + ((column ^ (row % 8)) * 16)), ptx::ld_global_nc_v4(from + unit * 16));
  }
}

template <int N, bool FromRegisters>
MEGAMOE_DEVICE void product(Smem m_side, Smem n_side, float* out) {
  const u32 warp = ptx::warp_index(), lane = ptx::lane_index();
#pragma unroll 1
  for (u32 m = 0; m < kRows; m += 64) {
#pragma unroll 1
    for (u32 step = 0; step < kRows; step += N) {
      const u32 n = min(step, static_cast<u32>(kRows - N));  // the last one overlaps where N does not divide
      float acc[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
      const ptx::Desc a = ptx::make_desc(m_side + m * kDepth), b = ptx::make_desc(n_side + n * kDepth);
      u32 fragment[4][4];
      if constexpr (FromRegisters) {
        const u32 row = m + warp * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const u32 unit = static_cast<u32>(k) * 2 + lane / 16;
          ptx::ldmatrix_x4(fragment[k], m_side + (row * kDepth + ((unit ^ (row % 8)) * 16)));
        }
      }
      ptx::wgmma_fence(acc);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (FromRegisters) {
          ptx::wgmma_e4m3(acc, fragment[k], b + 32 * k, k != 0);
        } else {
          ptx::wgmma_e4m3(acc, a + 32 * k, b + 32 * k, k != 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>(acc);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const u32 row = m + warp * 16 + lane / 4 + i / 2 % 2 * 8, column = n + i / 4 * 8 + lane % 4 * 2 + i % 2;
        out[row * kRows + column] = acc[i];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 1) wgmma_widths(const __grid_constant__ WidthsArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem x = ptx::shared_address(smem), y = x + kMatrixBytes;
  load_swizzled(x, p.x);
  load_swizzled(y, p.y);
  ptx::fence_proxy_async_shared();
  __syncthreads();
#pragma unroll 1
  for (int order = 0; order < 2; ++order) {
    float* out = p.out + order * 2 * kRows * kRows;
    const Smem m_side = order == 0 ? x : y, n_side = order == 0 ? y : x;
    product<config::kWidth, false>(m_side, n_side, out);
    product<config::kWidth, true>(m_side, n_side, out + kRows * kRows);
  }
}
