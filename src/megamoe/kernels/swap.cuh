// The main loop of a swapped tile: weights on the M side of WGMMA, up to 32 tokens on the N side.
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
    clear(partials);
    clear(finals);
    block<true>(partials, base, warpgroup, lane, ring);
#pragma unroll 1
    for (int k = 1; k < blocks; ++k) block<false>(partials, base, warpgroup, lane, ring);
  }
  // The same on top of what the finals are.
  MEGAMOE_DEVICE void accumulate_more(Smem base, u32 warpgroup, u32 lane, int blocks, Ring<FusedTile>& ring) {
    float partials[2][kRegisters];
    clear(partials);
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) block<false>(partials, base, warpgroup, lane, ring);
  }

  // The products of one k-block, of the stage's tokens from kFirstToken on, added to the finals; one after the other through
  // one accumulator, because a second one would be spilled. `partials` are overwritten.
  template <bool First, u32 kFirstToken>
  MEGAMOE_DEVICE void multiply_serial(float (&partials)[kRegisters], Smem base, u32 warpgroup, u32 lane, u32 stage) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      ptx::wgmma_fence(partials);
      issue<kFirstToken>(partials, base, warpgroup, stage, b);
      ptx::wgmma_commit();
      const Scales scales = load_scales<kFirstToken>(base, warpgroup, lane, stage);
      ptx::wgmma_wait<0>(partials);
      promote<First>(finals[b], partials, scales);
    }
  }

 private:
  MEGAMOE_DEVICE static void clear(float (&values)[2][kRegisters]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) values[b][i] = 0.0f;
    }
  }

  template <bool First>
  MEGAMOE_DEVICE void block(float (&partials)[2][kRegisters], Smem base, u32 warpgroup, u32 lane, Ring<FusedTile>& ring) {
    const u32 stage = ring.stage;
    ptx::mbarrier_wait(base + (FusedTile::kFull + stage * 8), ring.parity);
    ptx::wgmma_fence(partials[0]);
    ptx::wgmma_fence(partials[1]);
    issue<0>(partials[0], base, warpgroup, stage, 0);
    issue<0>(partials[1], base, warpgroup, stage, 1);
    ptx::wgmma_commit();
    const Scales scales = load_scales<0>(base, warpgroup, lane, stage);
    ptx::wgmma_wait<0>(partials[0]);
    ptx::pin(partials[1]);
    ptx::syncwarp();  // every lane has read its scales
    if (lane == 0) ptx::mbarrier_arrive(base + (FusedTile::kEmpty + stage * 8));
    promote<First>(finals[0], partials[0], scales);
    promote<First>(finals[1], partials[1], scales);
    ring.advance();
  }

  struct Scales {
    float token[Tokens / 4], weight[2];
  };
  template <u32 kFirstToken>
  MEGAMOE_DEVICE static Scales load_scales(Smem base, u32 warpgroup, u32 lane, u32 stage) {
    const Smem row_scales =
        base + (FusedTile::kRowScales + stage * FusedTile::kRowScaleBytes + kFirstToken * 4 + lane % 4 * 8);
    const Smem tile_scales = base + (FusedTile::kTileScales + stage * FusedTile::kTileScaleBytes + warpgroup * 8);
    Scales scales;
#pragma unroll
    for (int r = 0; r < 2; ++r) scales.weight[r] = ptx::ld_shared_f32(tile_scales + r * 4);
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
      scales.token[2 * j] = ptx::ld_shared_f32(row_scales + j * 32);
      scales.token[2 * j + 1] = ptx::ld_shared_f32(row_scales + (j * 32 + 4));
    }
    return scales;
  }

  // The product of 64 of the warpgroup's weight rows, `b` 0 or 1.
  template <u32 kFirstToken>
  MEGAMOE_DEVICE static void issue(float (&partials)[kRegisters], Smem base, u32 warpgroup, u32 stage, u32 b) {
    const Smem at = base + stage * FusedTile::kStageBytes;
    const ptx::Desc tokens = ptx::make_desc(at + kFirstToken * kBlockDepth);
    const ptx::Desc weights = ptx::make_desc(at + (FusedTile::kBytesA + warpgroup * kWeightTileBytes));
#pragma unroll
    for (int k = 0; k < kBlockDepth / 32; ++k) {
      ptx::wgmma_e4m3(partials, weights + (b * (kWarpgroupRows * kBlockDepth) + 32 * k), tokens + 32 * k, k != 0);
    }
  }

  template <bool First>
  MEGAMOE_DEVICE static void promote(float (&sums)[kRegisters], const float (&partials)[kRegisters],
                                     const Scales& scales) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const float scale = math::scale_product(scales.token[i / 4 * 2 + i % 2], scales.weight[i / 2 % 2]);
      sums[i] = First ? math::promote_first(partials[i], scale) : math::promote(partials[i], scale, sums[i]);
    }
  }
};

// What a wide tile carries beyond its 128 tokens: a swapped tile in the same stages. Its partials are made anew for each
// k-block: an accumulator that products of different widths share costs ptxas its register allocation.
struct CarriedTokens {
  static constexpr int kTokens = kCarried == 0 ? 8 : kCarried;  // without, none of this is used

  Smem base;
  u32 warpgroup, lane;
  SwapTile<kTokens> tile = {};

  template <bool First>
  MEGAMOE_DEVICE void block(u32 stage) {
    float partials[kTokens / 2] = {};
    tile.template multiply_serial<First, kTileRows>(partials, base, warpgroup, ptx::fresh(lane), stage);
  }
};

}  // namespace megamoe
