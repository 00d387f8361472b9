// The loader: one lane that takes this CTA's tiles and fills their stages, k-block by k-block.
//
// A stage holds the tokens' rows (A of a wide tile, B of a swapped one), 256 rows of weights, the tokens' scales and the
// four weight scales of the k-block. Tokens come through tensor maps, weights as contiguous, already swizzled blocks or,
// where they are row-major, through tensor maps too.
#pragma once
#include "stretch.cuh"
#include "trace.cuh"

namespace megamoe {

// Tensor maps of the two pools: boxes of 128 >> i rows x 128, so that any multiple of 8 rows takes few copies. Then of
// row-major weights, boxes of 128 rows x 128; unused where they are tiles.
constexpr u32 kBoxes = 5;
constexpr u32 kLargestBoxZeros = 24;  // before the first digit of 128 as a 32-bit number
static_assert(kTileRows == 0x80000000u >> kLargestBoxZeros, "the largest box");
struct Maps {
  CUtensorMap x[kBoxes], h[kBoxes];
  CUtensorMap w13, w2;
};

class Feed {
 public:
  MEGAMOE_DEVICE Feed(const Maps& maps, const Params& p, Smem base)
      : maps_(maps), p_(p), base_(base), ring_{0, 1}, trace_(p, kTraceLoader, true) {}

  // Nothing of a tile is loaded before its tokens are there: weights sent for ahead of them fill the stages no sooner, and
  // keep the memory from those who still bring tokens.
  MEGAMOE_DEVICE void run() {
    Schedule schedule(base_);
    TileQueue queue(base_, 1);
    Tile tile{};
    set_fact(base_, kNextItem, first_item(base_));
    Stretch stretch(base_, fact(base_, kStretched) != 0);
    while (stretch.is_cut() ? stretch.take(tile) : schedule.find(fact(base_, kNextItem), tile)) {
      queue.post(tile, false);
      const Copy copy(*this, tile);
      const u32 begin = first_block(tile), end = end_block(tile);
      wait_for_tokens(tile);
      trace_(Event::kWait);
      // Not asked for before the wait: a CTA that waits takes no tile that another one could begin.
      const u32 taken = ptx::atom_inc_relaxed_gpu(barrier_word(p_, ptx::fresh(epoch()), kTaken));
#pragma unroll 1
      for (u32 k = begin; k < end; ++k) {
        ptx::mbarrier_wait(base_ + (FusedTile::kEmpty + ring_.stage * 8), ring_.parity);
        copy.load(k, ring_.stage);
        ring_.advance();
        // By now the answer is there. `fresh`, or the compiler waits for it before the loop; kept in shared memory: registers
        // are few.
        if (k == 1 || copy.blocks == 1) set_fact(base_, kNextItem, gridDim.x + ptx::fresh(taken));
      }
      trace_(Event::kFeed);
    }
    queue.post(tile, true);
  }

 private:
  // The copies of one tile.
  struct Copy {
    const Maps& maps;
    const Params& p;
    Smem base;
    bool second;
    u32 blocks, row, token_rows;
    u32 half;          // weight tiles before this one's first; weight rows where they are row-major
    u32 weight_scale;  // floats before this tile's
    bool last;         // the second GEMM's last tile, which may have 128 weight rows only
    static constexpr bool kWholeTiles = kHidden % kWeightRows == 0;

    MEGAMOE_DEVICE Copy(const Feed& feed, const Tile& tile)
        : maps(feed.maps_), p(feed.p_), base(feed.base_), second(tile.second), row(pooled_row(tile)) {
      blocks = second ? kBlocks2 : kBlocks1;
      last = !kWholeTiles && second && tile.column == kTiles2 - 1;
      // Never a row of another expert: it may be in the making.
      token_rows = (tile.rows + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
      half = (tile.expert * (second ? kHidden / 128 : 2 * kIntermediate / 128) + tile.column * 2) *
             (kRowMajorWeights ? 128 : blocks);
      weight_scale = (tile.expert * (second ? kTiles2 : kTiles1) + tile.column) * blocks * 4;
    }

    MEGAMOE_DEVICE Smem full(u32 stage) const { return base + (FusedTile::kFull + stage * 8); }

    // K-block k into an empty stage. The loader's arrival announces all bytes, and through it the math warps, too, see what
    // this lane waited for.
    MEGAMOE_DEVICE void load(u32 k, u32 stage) const {
      ptx::mbarrier_arrive_expect_tx(full(stage), token_rows * (kBlockDepth + 4) + (last ? 1 : 2) * kWeightTileBytes +
                                                      FusedTile::kTileScaleBytes);
      weights(k, stage);
      tokens(k, stage);
    }

    MEGAMOE_DEVICE void weights(u32 k, u32 stage) const {
      const Smem to = base + (stage * FusedTile::kStageBytes + FusedTile::kBytesA);
      if constexpr (kRowMajorWeights) {
        const CUtensorMap* map = second ? &maps.w2 : &maps.w13;
        ptx::tma_load_2d(to, map, full(stage), k * kBlockDepth, half);
        if (!last) ptx::tma_load_2d(to + kWeightTileBytes, map, full(stage), k * kBlockDepth, half + 128);
      } else {
        const u8* from = (second ? p.w2 : p.w13) + static_cast<u64>(half + k) * kWeightTileBytes;
        ptx::bulk_load(to, from, kWeightTileBytes, full(stage));
        if (!last) ptx::bulk_load(to + kWeightTileBytes, from + blocks * kWeightTileBytes, kWeightTileBytes, full(stage));
      }
      ptx::bulk_load(base + (FusedTile::kTileScales + stage * FusedTile::kTileScaleBytes),
                     (second ? p.w2_scales : p.w13_scales) + weight_scale + k * 4, FusedTile::kTileScaleBytes,
                     full(stage));
    }

    MEGAMOE_DEVICE void tokens(u32 k, u32 stage) const {
      const Smem to = base + stage * FusedTile::kStageBytes;
      const CUtensorMap* boxes = second ? maps.h : maps.x;
      u32 r = 0;
#pragma unroll 1
      do {  // the binary digits of token_rows
        const u32 smaller = static_cast<u32>(__clz(static_cast<int>(token_rows - r))) - kLargestBoxZeros;
        ptx::tma_load_2d(to + r * kBlockDepth, boxes + smaller, full(stage), k * kBlockDepth, row + r);
        r += kTileRows >> smaller;
      } while (r < token_rows);
      const float* scales = second ? workspace::h_pool_scales(p) : workspace::x_pool_scales(p);
      // 32-bit arithmetic (Plan.check proves that it suffices): from a 64-bit index ptxas 13.0.88 made an address without
      // its upper half in layers of two k-blocks.
      ptx::bulk_load(base + (FusedTile::kRowScales + stage * FusedTile::kRowScaleBytes),
                     scales + (k * p.pool_rows + row), token_rows * 4, full(stage));
    }
  };

  // Rows of the token tile for the first GEMM, its whole intermediate for the second. The first GEMM writes the intermediate
  // pool: what the pass before had there must have been read.
  MEGAMOE_DEVICE void wait_for_tokens(const Tile& tile) {
    const u32 bank = bank_of(epoch());
    bool ok = true;
    if constexpr (kPasses) ok = tile.second || wait_for_pass(p_, base_, Phase::kResults, tile.pass, kTiles2);
    ok &=
        wait_count(p_, tile.second ? Phase::kIntermediate : Phase::kRows, tile.index,
                   (tile.second ? halves(p_, bank) : arrived(p_, bank)) + tile.index, tile.second ? 2 * kTiles1 : tile.rows);
    if (!ok) set_failed(base_);
    ptx::fence_proxy_async();
  }

  MEGAMOE_DEVICE u32 epoch() const { return fact(base_, kEpoch); }  // read again rather than kept: registers are few

  const Maps& maps_;
  const Params& p_;
  Smem base_;
  Ring<FusedTile> ring_;
  Trace trace_;
};

}  // namespace megamoe
