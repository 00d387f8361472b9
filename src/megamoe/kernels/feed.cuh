// The loader: one lane that takes this CTA's tiles and fills their stages, k-block by k-block.
//
// A stage holds the tokens' rows (A of a wide tile, B of a swapped one), 256 rows of weights, the tokens' scales and the
// four weight scales of the k-block. Weights come as contiguous, already swizzled blocks; tokens through tensor maps.
#pragma once
#include "routing.cuh"
#include "trace.cuh"

namespace megamoe {

// Tensor maps of the two pools: boxes of 128 rows x 128 for full wide tiles, of 8 rows x 128
// for all others.
struct Maps {
  CUtensorMap x_tile, h_tile, x_slice, h_slice;
};

class Feed {
 public:
  MEGAMOE_DEVICE Feed(const Maps& maps, const Params& p, Smem base)
      : maps_(maps), p_(p), base_(base), ring_{0, 1}, trace_(p, kTraceLoader, true) {}

  MEGAMOE_DEVICE void run() {
    Schedule schedule(base_);
    TileQueue queue(base_, 1);
    Tile tile{};
    set_fact(base_, kNextItem, blockIdx.x);
    while (schedule.find(fact(base_, kNextItem), tile)) {
      queue.post(tile, false);
      // Asked for early, so that the answer is there when this tile is done; kept in shared memory: registers are few.
      set_fact(base_, kNextItem, gridDim.x + ptx::atom_add_relaxed_gpu(barrier_word(p_, epoch(), kTaken), 1u));
      wait_for_tokens(tile);
      trace_(Event::kWait);
      const u32 blocks = tile.second ? kBlocks2 : kBlocks1;
      const u8* weights = weight_tile(tile, blocks);
      const bool both = tile.column * kWeightRows + 128 < (tile.second ? kHidden : 2 * kIntermediate);
      const u32 next_half = both ? blocks * kWeightTileBytes : 0;
      u32 weight_scale = (tile.expert * (tile.second ? kTiles2 : kTiles1) + tile.column) * blocks * 4;
      u32 token_scale = tile.row;
      // Never a row of another expert: it may be in the making.
      const u32 token_rows = (tile.rows + kSliceRows - 1) / kSliceRows * kSliceRows;
      const u32 bytes = token_rows * (kBlockDepth + 4) + (both ? 2 : 1) * kWeightTileBytes + FusedTile::kTileScaleBytes;
#pragma unroll 1
      for (u32 k = 0; k < blocks; ++k) {
        const u32 stage = ring_.stage;
        const Smem full = base_ + (FusedTile::kFull + stage * 8), to = base_ + stage * FusedTile::kStageBytes;
        ptx::mbarrier_wait(base_ + (FusedTile::kEmpty + stage * 8), ring_.parity);
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        ptx::bulk_load(to + FusedTile::kBytesA, weights, kWeightTileBytes, full);
        if (next_half != 0) {
          ptx::bulk_load(to + (FusedTile::kBytesA + kWeightTileBytes), weights + next_half, kWeightTileBytes, full);
        }
        load_tokens(tile, to, full, k, token_rows);
        const float* token_scales = tile.second ? workspace::h_pool_scales(p_) : workspace::x_pool_scales(p_);
        ptx::bulk_load(base_ + (FusedTile::kRowScales + stage * FusedTile::kRowScaleBytes), token_scales + token_scale,
                       token_rows * 4, full);
        ptx::bulk_load(base_ + (FusedTile::kTileScales + stage * FusedTile::kTileScaleBytes),
                       (tile.second ? p_.w2_scales : p_.w13_scales) + weight_scale, FusedTile::kTileScaleBytes, full);
        weights += kWeightTileBytes;
        weight_scale += 4;
        token_scale += p_.pool_rows;
        ring_.advance();
      }
      trace_(Event::kFeed);
    }
    queue.post(tile, true);
  }

 private:
  // Rows of the pool for the first GEMM, the whole intermediate of the token tile for the second.
  MEGAMOE_DEVICE void wait_for_tokens(const Tile& tile) {
    if (tile.second) {
      const u32* stored = halves(p_, bank_of(epoch())) + tile.index;
      wait_count(p_, Phase::kIntermediate, tile.index, stored, 2 * kTiles1);
    } else {
      const u32* rows = arrived(p_, bank_of(epoch())) + tile.expert;
      wait_count(p_, Phase::kRows, tile.expert, rows, ptx::ld_shared_u32(base_ + (kCountTable + tile.expert * 4)));
    }
    ptx::fence_proxy_async();
  }

  MEGAMOE_DEVICE const u8* weight_tile(const Tile& tile, u32 blocks) const {
    const u32 halves_per_expert = tile.second ? kHidden / 128 : 2 * kIntermediate / 128;
    const u64 half = static_cast<u64>(tile.expert) * halves_per_expert + tile.column * 2;
    return (tile.second ? p_.w2 : p_.w13) + half * blocks * kWeightTileBytes;
  }

  MEGAMOE_DEVICE void load_tokens(const Tile& tile, Smem to, Smem full, u32 k, u32 token_rows) const {
    if (token_rows == 128) {
      ptx::tma_load_2d(to, tile.second ? &maps_.h_tile : &maps_.x_tile, full, k * kBlockDepth, tile.row);
    } else {
      const CUtensorMap* map = tile.second ? &maps_.h_slice : &maps_.x_slice;
#pragma unroll 1
      for (u32 r = 0; r < token_rows; r += kSliceRows) {
        ptx::tma_load_2d(to + r * kBlockDepth, map, full, k * kBlockDepth, tile.row + r);
      }
    }
  }

  MEGAMOE_DEVICE u32 epoch() const { return fact(base_, kEpoch); }  // read again rather than kept: registers are few

  const Maps& maps_;
  const Params& p_;
  Smem base_;
  Ring<FusedTile> ring_;
  Trace trace_;
};

}  // namespace megamoe
