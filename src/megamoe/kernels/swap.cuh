// The main loop of a swapped tile: weights on the M side of WGMMA, up to 64 tokens on the N side.
//
// Each math warpgroup has 128 of the tile's 256 weight rows as two products m64nN, N the tokens rounded up to 8. Thread
// (warp w, lane l) holds finals[b][4 j + 2 r + c]: weight row 64 b + 16 w + l / 4 + 8 r of its warpgroup, token
// 8 j + 2 (l % 4) + c. In the first GEMM r = 0 is a gate row and r = 1 the matching up row.
// The arithmetic of a (weight row, token) pair is that of a wide tile: the same products, scales and order.
#pragma once
#include "layout.cuh"

namespace megamoe {

template <int Tokens>
struct SwapTile {
  static constexpr int kRegisters = Tokens / 2;
  float finals[2][kRegisters];

  // Consumes `blocks` stages of `ring`.
  MEGAMOE_DEVICE void accumulate(Smem base, u32 warpgroup, u32 lane, int blocks, Ring<FusedTile>& ring) {
    float partials[2][kRegisters];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        partials[b][i] = 0.0f;
        finals[b][i] = 0.0f;
      }
    }
    block<true>(partials, base, warpgroup, lane, ring);
#pragma unroll 1
    for (int k = 1; k < blocks; ++k) block<false>(partials, base, warpgroup, lane, ring);
  }

 private:
  template <bool First>
  MEGAMOE_DEVICE void block(float (&partials)[2][kRegisters], Smem base, u32 warpgroup, u32 lane, Ring<FusedTile>& ring) {
    const u32 stage = ring.stage;
    ptx::mbarrier_wait(base + (FusedTile::kFull + stage * 8), ring.parity);
    const Smem at = base + stage * FusedTile::kStageBytes;
    const ptx::Desc tokens = ptx::make_desc(at);
    const ptx::Desc weights = ptx::make_desc(at + (FusedTile::kBytesA + warpgroup * kWeightTileBytes));
    ptx::wgmma_fence(partials[0]);
    ptx::wgmma_fence(partials[1]);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int k = 0; k < kBlockDepth / 32; ++k) {
        ptx::wgmma_e4m3(partials[b], weights + (b * kWarpgroupRows * kBlockDepth + 32 * k), tokens + 32 * k, k != 0);
      }
    }
    ptx::wgmma_commit();
    const Smem row_scales = base + (FusedTile::kRowScales + stage * FusedTile::kRowScaleBytes + lane % 4 * 8);
    const Smem tile_scales = base + (FusedTile::kTileScales + stage * FusedTile::kTileScaleBytes + warpgroup * 8);
    const float weight[2] = {ptx::ld_shared_f32(tile_scales), ptx::ld_shared_f32(tile_scales + 4)};
    float token[Tokens / 4];
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
      token[2 * j] = ptx::ld_shared_f32(row_scales + j * 32);
      token[2 * j + 1] = ptx::ld_shared_f32(row_scales + (j * 32 + 4));
    }
    ptx::wgmma_wait<0>(partials[0]);
    ptx::pin(partials[1]);
    ptx::syncwarp();  // every lane has read its scales
    if (lane == 0) ptx::mbarrier_arrive(base + (FusedTile::kEmpty + stage * 8));
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        const float scale = math::scale_product(token[i / 4 * 2 + i % 2], weight[i / 2 % 2]);
        finals[b][i] = First ? math::promote_first(partials[b][i], scale)
                             : math::promote(partials[b][i], scale, finals[b][i]);
      }
    }
    ring.advance();
  }
};

}  // namespace megamoe
