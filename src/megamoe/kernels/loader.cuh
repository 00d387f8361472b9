// The loader role: one lane that keeps the operand ring full.
#pragma once
#include "tile.cuh"

namespace megamoe {

// Where the operands of one tile lie.
struct TileSource {
  const CUtensorMap* a;      // e4m3 [rows, depth], box 128 rows x 128 columns, 128-byte swizzle
  const CUtensorMap* b;      // e4m3 [group, columns, depth], box kClusterColumns x 128, 128-byte swizzle
  const float* row_scales;   // [k-block][row_scale_stride], scales of A; 128 floats from `row` on may be read
  const float* tile_scales;  // [k-block][4], scales of B in the order of TileConfig::scale_index
  u64 row_scale_stride;      // floats, a multiple of 4
  int row, column, group;    // first row of A of this CTA (a multiple of 4), first row of B, third coordinate of B
};

template <class C>
struct Loader {
  Smem base;
  u32 cta;  // rank in the cluster
  Ring<C> ring;

  MEGAMOE_DEVICE Loader(Smem base_, u32 cta_) : base(base_), cta(cta_), ring{0, 1} {}

  // Copies of the k-blocks of one tile, each as soon as its stage is free in every CTA of the cluster.
  MEGAMOE_DEVICE void load_tile(const TileSource& t, int kblocks) {
    const float* row_scales = t.row_scales + t.row;
    const float* tile_scales = t.tile_scales;
#pragma unroll 1
    for (int k = 0; k < kblocks; ++k) {
      const Smem full = base + (C::kFull + ring.stage * 8);
      const Smem a = base + ring.stage * C::kStageBytes, b = a + C::kBytesA;
      ptx::mbarrier_wait(base + (C::kEmpty + ring.stage * 8), ring.parity);
      ptx::mbarrier_arrive_expect_tx(full, C::kStageTraffic);
      if constexpr (C::kCluster > 1) {
        const int first = static_cast<int>(cta) * C::kClusterColumns;
        ptx::tma_load_3d_multicast(b + first * kBlockDepth, t.b, full, k * kBlockDepth, t.column + first, t.group,
                                   (1 << C::kCluster) - 1);
      } else {
        ptx::tma_load_3d(b, t.b, full, k * kBlockDepth, t.column, t.group);
      }
      ptx::tma_load_2d(a, t.a, full, k * kBlockDepth, t.row);
      ptx::bulk_load(base + (C::kRowScales + ring.stage * C::kRowScaleBytes), row_scales, C::kRowScaleBytes, full);
      ptx::bulk_load(base + (C::kTileScales + ring.stage * C::kTileScaleBytes), tile_scales, C::kTileScaleBytes, full);
      row_scales += t.row_scale_stride;
      tile_scales += C::kTileScaleBytes / 4;
      ring.advance();
    }
  }
};

}  // namespace megamoe
