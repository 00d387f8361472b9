// The main loop of one math warpgroup: 64 rows of a tile over all k-blocks, promoted to float32 block by block.
//
// 256 wide, a k-block: wait full; product of columns 0..127; scales; wait; promote; product of columns 128..255 through
// the same accumulator; wait; release the stage; promote. The other warpgroup keeps the tensor cores busy meanwhile.
// With carried tokens, the stage is released behind their products instead.
// 192 wide: columns 0..95 and 96..191 in two accumulators; the next product is always in flight under a promotion.
//
// What ptxas needs (else it serialises WGMMA, C7510 to C7519, or spills): no product in flight across the back edge of
// the tile loop, no divergent branch between a product and its wait, first and last k-block peeled.
#pragma once
#include "math.cuh"
#include "tile.cuh"

namespace megamoe {

// Columns that are final when `under_last` of accumulate_tile runs.
template <class C>
constexpr int kColumnsUnderLast = C::kChunkColumns;

template <class C>
struct MathWarpgroup {
  static constexpr int kChunk = C::kChunkColumns, kChunkRegisters = kChunk / 2;

  // finals[4 j + 2 r + c]: row 16 w + l / 4 + 8 r, column 8 j + 2 (l % 4) + c of warp w, lane l.
  float finals[C::kColumns / 2];
  float partials[C::kAccumulators][kChunkRegisters];
  float scales[C::kScales][2];  // s_a * s_b of this k-block, for rows r = 0 and 1

  ptx::Desc a, b;
  Smem full, row_scales, tile_scales;
  ptx::ClusterSmem empty;  // the barriers of the CTA that this lane releases to
  u32 lane;
  Ring<C> ring;
  bool ready;  // the next stage was seen full (Peek)

  // `warpgroup` is 0 or 1, `base` the start of shared memory.
  MEGAMOE_DEVICE MathWarpgroup(Smem base, u32 warpgroup, u32 warp, u32 lane_)
      : a(ptx::make_desc(base + warpgroup * (kWarpgroupRows * kBlockDepth))),
        b(ptx::make_desc(base + C::kBytesA)),
        full(base + C::kFull),
        row_scales(base + (C::kRowScales + (warpgroup * kWarpgroupRows + warp * 16 + lane_ / 4) * 4)),
        tile_scales(base + C::kTileScales),
        empty(ptx::map_cluster(base + C::kEmpty, lane_ % C::kCluster)),
        lane(lane_),
        ring{0, 0},
        ready(false) {
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; ++i) finals[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < C::kAccumulators; ++n) {
#pragma unroll
      for (int i = 0; i < kChunkRegisters; ++i) partials[n][i] = 0.0f;
    }
  }

  MEGAMOE_DEVICE void wait_full() {
    if (!C::kPeek || !ready) ptx::mbarrier_wait(full + ring.stage * 8, ring.parity);
  }
  MEGAMOE_DEVICE void peek() {
    if constexpr (C::kPeek) {
      const bool wraps = ring.stage + 1 == C::kStages;
      ready = ptx::mbarrier_test_wait(full + (wraps ? 0 : ring.stage + 1) * 8, ring.parity ^ (wraps ? 1 : 0));
    }
  }
  MEGAMOE_DEVICE void release(u32 stage) {
    ptx::syncwarp();  // every lane has read its scales
    if (lane < C::kCluster) ptx::mbarrier_arrive_cluster(empty + stage * 8);
  }

  // The product of columns [Column, Column + kChunk).
  template <int Column>
  MEGAMOE_DEVICE void issue(float (&acc)[kChunkRegisters], u32 stage) {
    const ptx::Desc stage_a = a + stage * C::kStageBytes;
    const ptx::Desc stage_b = b + (stage * C::kStageBytes + Column * kBlockDepth);
    ptx::wgmma_fence(acc);
#pragma unroll
    for (int k = 0; k < kBlockDepth / 32; ++k) ptx::wgmma_e4m3(acc, stage_a + 32 * k, stage_b + 32 * k, k != 0);
    ptx::wgmma_commit();
  }

  template <int Begin = 0, int End = C::kScales>
  MEGAMOE_DEVICE void load_scales(u32 stage) {
    const Smem rows = row_scales + stage * C::kRowScaleBytes, tile = tile_scales + stage * C::kTileScaleBytes;
    const float a0 = ptx::ld_shared_f32(rows), a1 = ptx::ld_shared_f32(rows + 8 * 4);
#pragma unroll
    for (int i = Begin; i < End; ++i) {
      const float weight = ptx::ld_shared_f32(tile + i * 4);
      scales[i][0] = math::scale_product(a0, weight);
      scales[i][1] = math::scale_product(a1, weight);
    }
  }

  // Grouped by scale: neighbouring FFMAs then share that operand, which saves register reads.
  template <int Column, bool First>
  MEGAMOE_DEVICE void promote(const float (&acc)[kChunkRegisters]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < C::kScales; ++s) {
#pragma unroll
        for (int j = 0; j < kChunk / 8; ++j) {
          if (C::scale_index(Column + 8 * j) != s) continue;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = 4 * j + 2 * r + c, f = Column / 2 + i;
            const float scale = scales[s][r];
            finals[f] = First ? math::promote_first(acc[i], scale) : math::promote(acc[i], scale, finals[f]);
          }
        }
      }
    }
  }

  // One k-block of a 256 wide tile; no product is in flight before or after.
  template <bool First, class UnderFirst, class UnderLast>
  MEGAMOE_DEVICE void block_serial(UnderFirst&& under_first, UnderLast&& under_last) {
    wait_full();
    issue<0>(partials[0], ring.stage);
    load_scales(ring.stage);
    under_first();
    ptx::wgmma_wait<0>(partials[0]);
    promote<0, First>(partials[0]);
    issue<kChunk>(partials[0], ring.stage);
    peek();
    under_last();
    ptx::wgmma_wait<0>(partials[0]);
    release(ring.stage);
    promote<kChunk, First>(partials[0]);
    ring.advance();
  }

  // The same with more tokens in the stage, multiplied by `carried` behind this warpgroup's products. Fewer scales live at
  // once: that leaves it the registers.
  template <bool First, class Carried>
  MEGAMOE_DEVICE void block_carrying(Carried& carried) {
    static_assert(C::kScales == 4, "two scales for each half of the columns");
    wait_full();
    issue<0>(partials[0], ring.stage);
    load_scales<0, 2>(ring.stage);
    ptx::wgmma_wait<0>(partials[0]);
    promote<0, First>(partials[0]);
    issue<kChunk>(partials[0], ring.stage);
    load_scales<2, 4>(ring.stage);
    peek();
    ptx::wgmma_wait<0>(partials[0]);
    promote<kChunk, First>(partials[0]);
    carried.template block<First>(ring.stage);
    release(ring.stage);
    ring.advance();
  }

  // One k-block of a 192 wide tile; its first product is in flight before, that of the next k-block after (unless
  // Last).
  template <bool First, bool Last, class UnderFirst, class UnderLast>
  MEGAMOE_DEVICE void block_overlapped(UnderFirst&& under_first, UnderLast&& under_last) {
    const u32 stage = ring.stage;
    load_scales(stage);
    issue<kChunk>(partials[1], stage);
    if constexpr (!Last) peek();
    under_first();
    ptx::wgmma_wait<1>(partials[0]);
    promote<0, First>(partials[0]);
    under_last();
    ring.advance();
    if constexpr (!Last) {
      wait_full();
      issue<0>(partials[0], ring.stage);
      ptx::wgmma_wait<1>(partials[1]);
    } else {
      ptx::wgmma_wait<0>(partials[1]);
    }
    release(stage);
    promote<kChunk, First>(partials[1]);
  }

  // Computes `finals` of one tile. Two pieces of other work run under products (the second one after them where a 256
  // wide tile has a single k-block):
  //   under_first()  while `finals` still holds the previous tile
  //   under_last()   when columns 0 .. kColumnsUnderLast - 1 of this tile are final
  // Both must be free of divergent branches.
  template <class UnderFirst, class UnderLast>
  MEGAMOE_DEVICE void accumulate_tile(int kblocks, UnderFirst&& under_first, UnderLast&& under_last) {
    const auto nothing = [] {};
    // One k-block apart: a branch around the last block would turn `ready` from a predicate into a register, which costs
    // 1.5 % of the loop's speed.
    if constexpr (C::kAccumulators == 1) {
      if (kblocks == 1) {
        block_serial<true>(under_first, nothing);
        under_last();
        return;
      }
      block_serial<true>(under_first, nothing);
#pragma unroll 1
      for (int k = 1; k < kblocks - 1; ++k) block_serial<false>(nothing, nothing);
      block_serial<false>(nothing, under_last);
    } else {
      ready = false;
      wait_full();
      issue<0>(partials[0], ring.stage);
      if (kblocks == 1) {
        block_overlapped<true, true>(under_first, under_last);
        return;
      }
      block_overlapped<true, false>(under_first, nothing);
#pragma unroll 1
      for (int k = 1; k < kblocks - 1; ++k) block_overlapped<false, false>(nothing, nothing);
      block_overlapped<false, true>(nothing, under_last);
    }
  }

  // The same of a 256 wide tile that carries tokens.
  template <class Carried>
  MEGAMOE_DEVICE void accumulate_carrying(int kblocks, Carried& carried) {
    block_carrying<true>(carried);
#pragma unroll 1
    for (int k = 1; k < kblocks; ++k) block_carrying<false>(carried);
  }
};

}  // namespace megamoe
