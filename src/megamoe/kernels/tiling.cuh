// How an expert's tokens are cut into tiles: wide ones first, of which the last ones may carry some tokens more, then
// swapped ones.
//
// A tile costs its pass over the weights, however few tokens it has. So an expert's last tokens go, where they fit, with
// its full tiles (up to kCarried each); else up to 64 become a swapped tile, more another wide one.
#pragma once
#include "layout.cuh"

namespace megamoe {

class Tiling {
 public:
  u32 rows;   // tokens of the expert
  u32 wide;   // wide tiles
  u32 tiles;  // all

  MEGAMOE_DEVICE explicit Tiling(u32 rows_) : rows(rows_) {
    if constexpr (!kWide) {
      wide = plain_ = wide_rows_ = 0;
    } else if constexpr (!kSwap) {
      wide = plain_ = (rows + kTileRows - 1) / kTileRows;
      wide_rows_ = rows;
    } else {
      const u32 full = rows / kTileRows, rest = rows % kTileRows;
      const u32 carried = rest <= (full < kCarriers ? full : kCarriers) * kCarried ? rest : 0;
      const bool another = rest - carried > kSwapTokens;
      wide = full + (another ? 1 : 0);
      plain_ = wide - (carried + kCarriedDivisor - 1) / kCarriedDivisor;
      wide_rows_ = another ? rows : full * kTileRows + carried;
    }
    tiles = wide + (rows - wide_rows_ + kSwapTokens - 1) / kSwapTokens;
  }

  // First row of tile m <= tiles, counted from the expert's first; the row behind its last one.
  MEGAMOE_DEVICE u32 start(u32 m) const {
    if (m <= plain_) return m * kTileRows;
    if (m < wide) return plain_ * kTileRows + (m - plain_) * (kTileRows + kCarried);
    return wide_rows_ + (m - wide) * kSwapTokens;
  }
  MEGAMOE_DEVICE u32 end(u32 m) const { return m + 1 < tiles ? start(m + 1) : rows; }

  // The tile of a row.
  MEGAMOE_DEVICE u32 tile_of(u32 row) const {
    if (row < plain_ * kTileRows) return row / kTileRows;
    if (row < wide_rows_) return plain_ + (row - plain_ * kTileRows) / (kTileRows + kCarried);
    return wide + (row - wide_rows_) / kSwapTokens;
  }

 private:
  // Carrying lengthens a wide tile by most of what a swapped tile takes, whatever the number of tokens, but saves a pass over
  // the weights: few carriers, or it no longer pays.
  static constexpr u32 kCarriers = 2, kCarriedDivisor = kCarried == 0 ? 1 : kCarried;

  u32 plain_;      // wide tiles that carry nothing
  u32 wide_rows_;  // tokens of the wide tiles
};

}  // namespace megamoe
