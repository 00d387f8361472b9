// Which tile a CTA works on next: one static sequence over all tiles, from which free CTAs take the next one.
//
// The sequence goes through waves of experts (config::kWaveExperts each, the last one partial): the first GEMM of wave s,
// then the second GEMM of wave s - kLag. kWaveExperts = all gives "all first GEMMs, then all second ones"; kLag > 0 puts
// distance between a tile and the tiles it waits for. A tile waits only for tiles that stand earlier in the sequence, which
// somebody took before it, so with all CTAs resident nobody waits for ever.
// The loader takes tiles (the first by its CTA's index, the others from a counter) and posts them in a queue in shared
// memory, from which math and store warps read them.
#pragma once
#include "layout.cuh"

namespace megamoe {

struct Tile {
  bool second;  // second GEMM
  bool wide;    // up to 128 tokens on the M side; else up to 64 on the N side
  u32 expert;   // local
  u32 column;   // weight tile: rows [256 column, 256 column + 256) of w13 or w2
  u32 row;      // first pool row
  u32 rows;     // tokens, at least 1
  u32 index;    // token tile, counted over all experts
};

MEGAMOE_DEVICE u32 token_tiles(u32 rows) { return (rows + kTileTokens - 1) / kTileTokens; }
MEGAMOE_DEVICE bool is_wide(u32 rows) { return kWide && (!kSwap || rows > kSwapTokens); }

class Schedule {
 public:
  MEGAMOE_DEVICE explicit Schedule(Smem base)
      : base_(base), last_(0), item_(0), step_(0), expert_(0), end_(kWave < kLocalExperts ? kWave : kLocalExperts) {
    second_ = false;
  }

  // Tile number `item` of the sequence, for rising items; false behind the end.
  MEGAMOE_DEVICE bool find(u32 item, Tile& tile) {
    item_ += item - last_;
    last_ = item;
    while (true) {
      while (expert_ == end_) {
        if (!next_segment()) return false;
      }
      const u32 rows = ptx::ld_shared_u32(base_ + (kCountTable + expert_ * 4)), tiles = token_tiles(rows);
      const u32 items = tiles * (second_ ? kTiles2 : kTiles1);
      if (item_ < items) {
        const u32 column = item_ / tiles, m = item_ - column * tiles, left = rows - m * kTileTokens;
        tile.second = second_;
        tile.expert = expert_;
        tile.column = column;
        tile.rows = left < kTileTokens ? left : kTileTokens;
        tile.wide = is_wide(tile.rows);
        tile.row = ptx::ld_shared_u32(base_ + (kBaseTable + expert_ * 4)) + m * kTileTokens;
        tile.index = ptx::ld_shared_u32(base_ + (kTileTable + expert_ * 4)) + m;
        return true;
      }
      item_ -= items;
      ++expert_;
    }
  }

 private:
  static constexpr u32 kWave = config::kWaveExperts, kLag = config::kLag;
  static constexpr u32 kWaves = (kLocalExperts + kWave - 1) / kWave;

  // Order: step 0 first, step 0 second, step 1 first, ... where a half without a wave is empty.
  MEGAMOE_DEVICE bool next_segment() {
    if (second_) ++step_;
    second_ = !second_;
    if (step_ == kWaves + kLag) return false;
    const bool exists = second_ ? step_ + 1 > kLag : step_ < kWaves;  // not >=: kLag may be 0
    const u32 wave = second_ ? step_ - kLag : step_;
    expert_ = exists ? wave * kWave : 0;
    end_ = exists ? (expert_ + kWave < kLocalExperts ? expert_ + kWave : kLocalExperts) : 0;
    return true;
  }

  Smem base_;
  u32 last_;          // the item before
  u32 item_;          // position relative to the first item of expert_
  u32 step_;          // wave of the first GEMM
  u32 expert_, end_;  // experts left in this segment
  bool second_;
};

// One side's position in the queue of tiles. The loader starts with parity 1, readers with 0.
class TileQueue {
 public:
  MEGAMOE_DEVICE TileQueue(Smem base, u32 parity) : base_(base), count_(parity * kQueueSlots) {}

  // Loader: posts a tile, or the end.
  MEGAMOE_DEVICE void post(const Tile& tile, bool end) {
    ptx::mbarrier_wait(base_ + (FusedTile::kQueueEmpty + slot() * 8), parity());
    const u32 flags = (tile.second ? kSecondFlag : 0) | (tile.wide ? kWideFlag : 0) | (end ? kEndFlag : 0);
    const Smem at = base_ + (FusedTile::kQueue + slot() * kQueueSlotBytes);
    ptx::st_shared_v4(at, make_uint4(flags, tile.expert, tile.column, tile.row));
    ptx::st_shared_v4(at + 16, make_uint4(tile.rows, tile.index, 0, 0));
    ptx::mbarrier_arrive(base_ + (FusedTile::kQueueFull + slot() * 8));
    ++count_;
  }

  // A whole reader warp: the next tile; false at the end.
  MEGAMOE_DEVICE bool take(Tile& tile) {
    ptx::mbarrier_wait(base_ + (FusedTile::kQueueFull + slot() * 8), parity());
    const Smem at = base_ + (FusedTile::kQueue + slot() * kQueueSlotBytes);
    const uint4 a = ptx::ld_shared_v4(at), b = ptx::ld_shared_v4(at + 16);
    ptx::syncwarp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(base_ + (FusedTile::kQueueEmpty + slot() * 8));
    ++count_;
    tile = {(a.x & kSecondFlag) != 0, (a.x & kWideFlag) != 0, a.y, a.z, a.w, b.x, b.y};
    return (a.x & kEndFlag) == 0;
  }

 private:
  enum Flag : u32 { kSecondFlag = 1, kWideFlag = 2, kEndFlag = 4 };

  MEGAMOE_DEVICE u32 slot() const { return count_ % kQueueSlots; }
  MEGAMOE_DEVICE u32 parity() const { return count_ / kQueueSlots % 2; }

  Smem base_;
  u32 count_;  // tiles so far, from kQueueSlots on for the loader: its first wait has parity 1
};

}  // namespace megamoe
