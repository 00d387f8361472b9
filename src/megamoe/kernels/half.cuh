// The main loop of a half tile: 33 to 64 tokens on the M side of WGMMA.
//
// Each math warpgroup multiplies all of the tokens with its own 128 of the tile's 256 weight rows, one product m64n128 a
// k-block: half of a wide tile's work. Swapped, as many tokens would take longer: every product reads 64 rows of shared
// memory on the M side, and there are twice as many products.
// The arithmetic of a (weight row, token) pair is that of a wide tile: the same products, scales and order.
#pragma once
#include "layout.cuh"

namespace megamoe {

constexpr u32 kHalfTokens = kWarpgroupRows;

struct HalfTile {
  // finals[4 j + 2 r + c]: token 16 w + l / 4 + 8 r, weight row 8 j + 2 (l % 4) + c of the warpgroup's; warp w, lane l. In the
  // first GEMM even j gate, odd j up.
  float finals[64];

  // Consumes `blocks` stages of `ring`.
  MEGAMOE_DEVICE void accumulate(Smem base, u32 warpgroup, u32 warp, u32 lane, u32 blocks, Ring<FusedTile>& ring) {
    float partials[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) partials[i] = finals[i] = 0.0f;
    bool ready = false;  // the next stage was seen full
    block<true>(partials, base, warpgroup, warp, lane, ring, ready);
#pragma unroll 1
    for (u32 k = 1; k < blocks; ++k) block<false>(partials, base, warpgroup, warp, lane, ring, ready);
  }

 private:
  template <bool First>
  MEGAMOE_DEVICE void block(float (&partials)[64], Smem base, u32 warpgroup, u32 warp, u32 lane, Ring<FusedTile>& ring,
                            bool& ready) {
    const u32 stage = ring.stage;
    if (!ready) ptx::mbarrier_wait(base + (FusedTile::kFull + stage * 8), ring.parity);
    const Smem at = base + stage * FusedTile::kStageBytes;
    const ptx::Desc tokens = ptx::make_desc(at);
    const ptx::Desc weights = ptx::make_desc(at + (FusedTile::kBytesA + warpgroup * kWeightTileBytes));
    ptx::wgmma_fence(partials);
#pragma unroll
    for (int k = 0; k < kBlockDepth / 32; ++k) ptx::wgmma_e4m3(partials, tokens + 32 * k, weights + 32 * k, k != 0);
    ptx::wgmma_commit();
    float scales[2][2];  // [even or odd groups of 8 weight rows][r]
    const Smem row_scales =
        base + (FusedTile::kRowScales + stage * FusedTile::kRowScaleBytes + (warp * 16 + lane / 4) * 4);
    const Smem tile_scales = base + (FusedTile::kTileScales + stage * FusedTile::kTileScaleBytes + warpgroup * 8);
    const float token[2] = {ptx::ld_shared_f32(row_scales), ptx::ld_shared_f32(row_scales + 8 * 4)};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float weight = ptx::ld_shared_f32(tile_scales + s * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) scales[s][r] = math::scale_product(token[r], weight);
    }
    ring.advance();
    if constexpr (FusedTile::kPeek) {
      ready = ptx::mbarrier_test_wait(base + (FusedTile::kFull + ring.stage * 8), ring.parity);
    }
    ptx::wgmma_wait<0>(partials);
    ptx::syncwarp();  // every lane has read its scales
    if (lane == 0) ptx::mbarrier_arrive(base + (FusedTile::kEmpty + stage * 8));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 4 * s + 2 * r; i < 64; i += 8) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& sum = finals[i + c];
            sum = First ? math::promote_first(partials[i + c], scales[s][r])
                        : math::promote(partials[i + c], scales[s][r], sum);
          }
        }
      }
    }
  }
};

}  // namespace megamoe
