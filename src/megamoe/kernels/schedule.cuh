// Which tile a CTA works on next: one sequence over all tiles of the call, from which free CTAs take the next one.
//
// The sequence goes through the passes, and in each through waves of experts (the last one partial): the first GEMM of wave
// s and the second GEMM of wave s - lag. A wave of all experts gives "all first GEMMs, then all second ones". A lag puts
// distance between a tile and the tiles it waits for; the tiles of both GEMMs then alternate, so that results leave for
// other ranks evenly over the call. A tile waits only for tiles that stand earlier in the sequence, which somebody took
// before it, so with all CTAs resident nobody waits for ever.
// The loader takes tiles (the first by its CTA's index, see first_item, the others from a counter) and posts them in a queue
// in shared memory, from which math and store warps read them.
#pragma once
#include "tiling.cuh"

namespace megamoe {

struct Tile {
  bool second;  // second GEMM
  bool wide;    // up to 128 tokens, those past them carried; else up to 64
  u32 expert;   // local
  u32 column;   // weight tile: rows [256 column, 256 column + 256) of w13 or w2
  u32 row;      // first row of the routing's tables
  u32 rows;     // tokens, at least 1
  u32 index;    // token tile, counted over all experts
  u32 pass;     // whose pools they are
  u32 pooled;   // first row of the pools
  u32 first_block, end_block;  // k-blocks [first_block, end_block) of it, where plans have stretches
};
MEGAMOE_DEVICE u32 all_blocks(const Tile& tile) { return tile.second ? kBlocks2 : kBlocks1; }
MEGAMOE_DEVICE u32 first_block(const Tile& tile) { return kStretches ? tile.first_block : 0; }
MEGAMOE_DEVICE u32 end_block(const Tile& tile) { return kStretches ? tile.end_block : all_blocks(tile); }
// The rest of the tile is another CTA's.
MEGAMOE_DEVICE bool is_first_part(const Tile& tile) { return kStretches && tile.end_block < all_blocks(tile); }

// First row of a tile in the pools; without passes the same as in the tables.
MEGAMOE_DEVICE u32 pooled_row(const Tile& tile) { return kPasses ? tile.pooled : tile.row; }

MEGAMOE_DEVICE bool carries(const Tile& tile) { return kCarried > 0 && tile.rows > kTileRows; }
// The carried tokens of a wide tile, as a swapped one.
MEGAMOE_DEVICE Tile carried_part(const Tile& tile) {
  return {tile.second,           false,      tile.expert, tile.column,            tile.row + kTileRows,
          tile.rows - kTileRows, tile.index, tile.pass,   tile.pooled + kTileRows, 0, 0};
}

// The local expert of a token tile, `from` or a later one.
MEGAMOE_DEVICE u32 expert_of_tile(Smem base, u32 from, u32 token_tile) {
  if (tiles_before(base, from + 1) > token_tile) return from;  // mostly
  u32 low = from + 1, high = kLocalExperts;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (tiles_before(base, middle) <= token_tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A CTA's first tile. With fewer first GEMMs than CTAs, those that have one are spread over all: neighbouring CTAs share a way
// to memory.
MEGAMOE_DEVICE u32 first_item(Smem base) {
  if constexpr (!kWide) {
    const u32 firsts = fact(base, kTotalTiles) * kTiles1;
    if (firsts < gridDim.x) {
      const u32 before = blockIdx.x * firsts / gridDim.x, has_one = (blockIdx.x + 1) * firsts / gridDim.x - before;
      return has_one != 0 ? before : firsts + (blockIdx.x - before);
    }
  }
  return blockIdx.x;
}

// Whether the plan leaves the order of tiles to the call. Calls with swapped tiles only are too short for it to matter.
constexpr bool kOrderOpen = kRanks > 1 && kWide && config::kOrderOpen;

// Wave and lag of this call. The plan's, or, where it leaves that open: results of `remote` routes go to other ranks, and if
// that takes longer than the second GEMM of all `tiles`, both GEMMs alternate.
MEGAMOE_DEVICE void choose_order(Smem base, u32 tiles, u32 remote) {
  u32 wave = config::kWaveExperts, lag = config::kLag;
  if constexpr (kOrderOpen) {
    const u64 sent = static_cast<u64>(remote) * (kHidden * 2);
    if (sent > static_cast<u64>(tiles) * (kTiles2 * kBlocks2) * config::kLinkBytes) {
      // Two rounds of the CTAs in a wave: less, and second tiles wait for first ones; more, and results leave later.
      const u32 whole = tiles * kTiles1;
      wave = (2 * gridDim.x * kLocalExperts + whole - 1) / whole;
      wave = wave < kLocalExperts ? wave : kLocalExperts;
      lag = 1;
    }
  }
  set_fact(base, kWave, wave);
  set_fact(base, kLag, lag);
}

// Its state lies in shared memory, touched by the loader only, once a tile: registers are few.
class Schedule {
 public:
  MEGAMOE_DEVICE explicit Schedule(Smem base) : base_(base) {
#pragma unroll
    for (u32 i = kStepBegin; i < kFactCount; ++i) set_fact(base, static_cast<Fact>(i), 0u);
  }

  // Tile number `item` of the sequence, for rising items; false behind the end.
  MEGAMOE_DEVICE bool find(u32 item, Tile& tile) {
    u32 begins = fact(base_, kStepBegin), step = fact(base_, kStep);  // the step's first item
    u32 pass = kPasses ? fact(base_, kPass) : 0;
    const u32 wave = kOrderOpen ? fact(base_, kWave) : config::kWaveExperts;
    const u32 lag = kOrderOpen ? fact(base_, kLag) : config::kLag, steps = (kLocalExperts + wave - 1) / wave + lag;
    u32 first = 0, second = 0;  // token tiles of the step's two halves
#pragma unroll 1
    for (;; ++step) {
      if (step == steps) {
        if (!kPasses || ++pass == fact(base_, kPassCount)) return false;
        step = 0;
      }
      first = in_pass_before((step + 1) * wave, pass) - in_pass_before(step * wave, pass);
      second = step >= lag ? in_pass_before((step - lag + 1) * wave, pass) - in_pass_before((step - lag) * wave, pass) : 0;
      const u32 items = first * kTiles1 + second * kTiles2;
      if (item - begins < items) break;
      begins += items;
    }
    set_fact(base_, kStepBegin, begins);
    set_fact(base_, kStep, step);
    if constexpr (kPasses) set_fact(base_, kPass, pass);
    u32 index = place(item - begins, first, second, lag, tile.second);
    const u32 begin = (tile.second ? step - lag : step) * wave, columns = tile.second ? kTiles2 : kTiles1;
    const u32 before_wave = in_pass_before(begin, pass), token_tile = before_wave + index / columns;
    const Fact cursor = tile.second ? kSecondExpert : kFirstExpert;
    const u32 expert = expert_of_tile(base_, fact(base_, cursor), token_tile);
    set_fact(base_, cursor, expert);
    const u32 expert_first = in_pass_before(expert, pass);
    index -= (expert_first - before_wave) * columns;  // among the expert's tiles of this pass, column by column
    const Tiling tiling(ptx::ld_shared_u32(base_ + (kCountTable + expert * 4)));
    const u32 tiles = kPasses ? in_pass_before(expert + 1, pass) - expert_first : tiling.tiles, column = index / tiles;
    const u32 all_first = tiles_before(base_, expert);
    const u32 m = index - column * tiles + (kPasses ? expert_first - all_first : 0), row = tiling.start(m);
    tile.wide = m < tiling.wide;
    tile.expert = expert;
    tile.column = column;
    tile.row = ptx::ld_shared_u32(base_ + (kBaseTable + expert * 4)) + row;
    tile.rows = tiling.end(m) - row;
    tile.index = all_first + m;
    if constexpr (kPasses) {
      tile.pass = pass;
      tile.pooled = tile.row - pass_begin(base_, pass);
    }
    tile.first_block = 0;
    tile.end_block = all_blocks(tile);
    return true;
  }

 private:
  // First token tile of an expert, or of a wave's end past the last one; none before the first tile of this pass and none
  // behind its last one.
  MEGAMOE_DEVICE u32 in_pass_before(u32 expert, u32 pass) const {
    u32 tiles = tiles_before(base_, expert < kLocalExperts ? expert : kLocalExperts);
    if constexpr (kPasses) {
      const u32 in_pass = fact(base_, kPassTiles), begin = pass * in_pass, end = begin + in_pass;
      tiles = tiles < begin ? begin : tiles > end ? end : tiles;
    }
    return tiles;
  }

  // Which half the tile at place `at` of a step belongs to, and which one of it it is. Without a lag one half follows the
  // other; with it they alternate, in rounds of one token tile's columns of each, as long as both have tiles.
  MEGAMOE_DEVICE u32 place(u32 at, u32 first, u32 second, u32 lag, bool& is_second) const {
    u32 rounds = 0;
    if (lag > 0) {
      constexpr u32 kRound = kTiles1 + kTiles2;
      rounds = first < second ? first : second;
      if (at < rounds * kRound) {
        const u32 round = at / kRound, in_round = at - round * kRound, before = in_round * kTiles1 / kRound;
        is_second = (in_round + 1) * kTiles1 / kRound == before;
        return is_second ? round * kTiles2 + in_round - before : round * kTiles1 + before;
      }
    }
    is_second = at >= first * kTiles1 + rounds * kTiles2;
    return at - (is_second ? first * kTiles1 : rounds * kTiles2);
  }

  Smem base_;
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
    ptx::st_shared_v4(at + 16, make_uint4(tile.rows, tile.index, kPasses ? tile.pass : first_block(tile),
                                          kPasses ? tile.pooled : end_block(tile)));
    ptx::mbarrier_arrive(base_ + (FusedTile::kQueueFull + slot() * 8));
    ++count_;
  }

  // A whole reader warp: the next tile, whose slot may be read again until `done`; false at the end.
  MEGAMOE_DEVICE bool look(Tile& tile) {
    ptx::mbarrier_wait(base_ + (FusedTile::kQueueFull + slot() * 8), parity());
    return read(tile);
  }
  MEGAMOE_DEVICE bool read(Tile& tile) const {
    const Smem at = base_ + (FusedTile::kQueue + slot() * kQueueSlotBytes);
    const uint4 a = ptx::ld_shared_v4(at), b = ptx::ld_shared_v4(at + 16);
    tile = {(a.x & kSecondFlag) != 0, (a.x & kWideFlag) != 0, a.y, a.z, a.w, b.x, b.y, b.z, b.w, b.z, b.w};
    return (a.x & kEndFlag) == 0;
  }
  MEGAMOE_DEVICE void done() {
    ptx::syncwarp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(base_ + (FusedTile::kQueueEmpty + slot() * 8));
    ++count_;
  }

 private:
  enum Flag : u32 { kSecondFlag = 1, kWideFlag = 2, kEndFlag = 4 };

  MEGAMOE_DEVICE u32 slot() const { return count_ % kQueueSlots; }
  MEGAMOE_DEVICE u32 parity() const { return count_ / kQueueSlots % 2; }

  Smem base_;
  u32 count_;  // tiles so far, from kQueueSlots on for the loader: its first wait has parity 1
};

}  // namespace megamoe
