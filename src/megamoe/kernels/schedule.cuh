// Which tile a CTA works on next: one static sequence over all tiles, dealt round robin to the CTAs.
//
// The sequence goes through waves of experts (config::kWaveExperts each, the last one partial): the first GEMM of wave s,
// then the second GEMM of wave s - kLag. kWaveExperts = all gives "all first GEMMs, then all second ones"; kLag > 0 puts
// distance between a tile and the tiles it waits for. A tile waits only for tiles that stand earlier in the sequence, and
// every CTA takes its tiles in order, so with all CTAs resident nobody waits for ever.
// Every role of a CTA walks the sequence by itself over the tables in shared memory, and sees the same tiles.
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
  MEGAMOE_DEVICE explicit Schedule(Smem base) : base_(base), item_(blockIdx.x), step_(0), second_(false) {
    expert_ = 0;
    end_ = kWave < kLocalExperts ? kWave : kLocalExperts;
    started_ = false;
  }

  // The next tile of this CTA; false at the end.
  MEGAMOE_DEVICE bool next(Tile& tile) {
    if (started_) item_ += gridDim.x;
    started_ = true;
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
    const bool exists = second_ ? step_ >= kLag : step_ < kWaves;
    const u32 wave = second_ ? step_ - kLag : step_;
    expert_ = exists ? wave * kWave : 0;
    end_ = exists ? (expert_ + kWave < kLocalExperts ? expert_ + kWave : kLocalExperts) : 0;
    return true;
  }

  Smem base_;
  u32 item_;            // position relative to the first item of expert_
  u32 step_;            // wave of the first GEMM
  u32 expert_, end_;    // experts left in this segment
  bool second_, started_;
};

}  // namespace megamoe
