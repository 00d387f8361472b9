// The tiles of the fused kernel by themselves: how experts are cut (tiling.cuh), in which passes (routing.cuh) and in which
// order (schedule.cuh).
#include "routing.cuh"

using namespace megamoe;

// out[rows]: tiles, wide ones, first row of tile 0, 1, .., kTiles; then the rows whose tile_of is not the tile that has them.
constexpr u32 kTiles = 20, kRow = 2 + kTiles + 1 + 1;

extern "C" __global__ void tilings(u32* out, u32 count) {
  for (u32 rows = threadIdx.x; rows < count; rows += blockDim.x) {
    const Tiling tiling(rows);
    u32* to = out + rows * kRow;
    to[0] = tiling.tiles;
    to[1] = tiling.wide;
    u32 wrong = 0;
    for (u32 m = 0; m < tiling.tiles && m < kTiles; ++m) {
      to[2 + m] = tiling.start(m);
      for (u32 row = tiling.start(m); row < tiling.end(m); ++row) wrong += tiling.tile_of(row) == m ? 0 : 1;
    }
    for (u32 m = tiling.tiles; m <= kTiles; ++m) to[2 + m] = rows;
    to[kRow - 1] = wrong;
  }
}

// counts: routes of each local expert. out: {second, expert, column, row, rows, wide, index, pass, row in the pools, 1} of each
// tile in order, from every `step`-th item on as a CTA that takes some of them would ask; facts: wave, lag, tiles of a pass.
extern "C" __global__ void sequence(const u32* counts, u32* out, u32* facts, u32 remote, u32 step, u32 pool_rows) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x != 0) return;
  u32 row = 0, tiles = 0;
  for (u32 e = 0; e < kLocalExperts; ++e) {
    ptx::st_shared_u32(base + (kCountTable + e * 4), counts[e]);
    ptx::st_shared_u32(base + (kBaseTable + e * 4), row);
    ptx::st_shared_u32(base + (kTileTable + e * 4), tiles);
    row += (counts[e] + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
    tiles += Tiling(counts[e]).tiles;
  }
  set_fact(base, kTotalTiles, tiles);
  choose_order(base, tiles, remote);
  facts[0] = fact(base, kWave);
  facts[1] = fact(base, kLag);
  if constexpr (kPasses) {
    lay_out_passes(base, pool_rows, row, tiles);
    facts[2] = fact(base, kPassTiles);
  }
  for (u32 first = 0; first < step; ++first) {
    Schedule schedule(base);
    Tile tile{};
    for (u32 item = first; schedule.find(item, tile); item += step) {
      const u32 values[10] = {tile.second, tile.expert, tile.column,           tile.row,         tile.rows,
                              tile.wide,   tile.index,  kPasses ? tile.pass : 0, pooled_row(tile), 1};
      for (u32 i = 0; i < 10; ++i) out[item * 10 + i] = values[i];
    }
  }
}
