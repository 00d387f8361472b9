// Tile scheduler of the standalone GEMM: a list in global memory, dealt round robin to the clusters.
#pragma once
#include "tile.cuh"

namespace megamoe {

struct Tile {
  int row_block;   // of 128 rows, the cluster's first
  int row_blocks;  // that exist: 1 or kCluster; a CTA past them computes the last one again and stores nothing
  int column;      // tile of kColumns columns
  int group;
};

// Each role walks the list for itself.
struct TileList {
  const int2* entries;  // x = row_block | row_blocks << 24, y = column | group << 12
  int index, step, count;

  MEGAMOE_DEVICE TileList(const int2* entries_, int count_, int cluster)
      : entries(entries_),
        index(static_cast<int>(blockIdx.x) / cluster),
        step(static_cast<int>(gridDim.x) / cluster),
        count(count_) {}
  MEGAMOE_DEVICE bool done() const { return index >= count; }
  MEGAMOE_DEVICE void advance() { index += step; }
  MEGAMOE_DEVICE Tile tile() const {
    const int2 e = ptx::ld_global_nc_int2(entries + index);
    return {e.x & 0xffffff, e.x >> 24, e.y & 0xfff, e.y >> 12};
  }
};

}  // namespace megamoe
