// The store warp of one math warpgroup: rows of a staged tile go to the intermediate pool, or to the token's rank.
//
// A lane stores whole row pieces by bulk copies: 64 or 128 bytes of the intermediate, 256 bytes of a route result. Each
// lane waits for its own copies; the counters are raised when all lanes' copies have been written.
#pragma once
#include "epilogue.cuh"
#include "trace.cuh"

namespace megamoe {

// All results of this rank are stored. Once it is done, a peer may start its next call and overwrite the counts that it
// sent here: so not before every CTA has read them.
MEGAMOE_DEVICE void finish_rank(const Params& p, Smem base) {
  const u32 epoch = fact(base, kEpoch);
  const bool listed = wait_count(p, Phase::kList, 0, barrier_word(p, epoch, kListed), gridDim.x);
  if (listed && !failed(base)) announce_done(p, epoch);
}

class Scatter {
 public:
  MEGAMOE_DEVICE Scatter(const Params& p, Smem base, u32 warpgroup)
      : p_(p), base_(base), warpgroup_(warpgroup), lane_(ptx::lane_index()), ring_(0),
        trace_(p, warpgroup == 0 ? kTraceStore0 : kTraceStore1, ptx::lane_index() == 0) {}

  MEGAMOE_DEVICE void run() {
    TileQueue queue(base_, 0);
    Tile tile;
    for (; queue.look(tile); queue.done()) {
      if (is_first_part(tile)) continue;
      if (tile.second) {
        copy_results(tile);
        if (carries(tile)) copy_results(carried_part(tile));
      } else {
        copy_intermediate(tile);
        if (carries(tile)) copy_intermediate(carried_part(tile));
      }
      finish();
      queue.read(tile);  // rather than kept: registers are few
      if (lane_ == 0 && !failed(base_)) {
        if (tile.second) {
          results_stored(tile);
        } else {
          intermediate_stored(tile);
        }
      }
    }
  }

 private:
  MEGAMOE_DEVICE u32 warpgroup() const { return ptx::fresh(warpgroup_); }  // registers are few

  // Tokens of this warpgroup: its 64 of a wide tile, all of a swapped one.
  MEGAMOE_DEVICE u32 first_token(const Tile& tile) const { return tile.wide ? warpgroup() * kWarpgroupRows : 0; }
  MEGAMOE_DEVICE u32 tokens(const Tile& tile) const {
    const u32 first = first_token(tile), left = tile.rows > first ? tile.rows - first : 0;
    return left < kWarpgroupRows ? left : kWarpgroupRows;
  }

  MEGAMOE_DEVICE void intermediate_stored(const Tile& tile) {
    // The address from its parts: kept over the loop, it would take registers that this role does not have.
    const u64 at = reinterpret_cast<u8*>(workspace::halves(p_)) - p_.workspace;
    u32* const words = reinterpret_cast<u32*>(ptx::fresh(p_.workspace) + at);
    ptx::red_add_release_gpu(words + bank_of(fact(base_, kEpoch)) * p_.pool_tiles + tile.index, 1u);
    count_for_pass(p_, base_, Phase::kFirsts, tile.pass);
  }
  MEGAMOE_DEVICE void copy_intermediate(const Tile& tile) {
    const u32 bytes = tile.wide ? 128 : 64, rows = tokens(tile), lane = ptx::fresh(lane_);
    u8* to = workspace::h_pool(p_) + static_cast<u64>(pooled_row(tile) + first_token(tile)) * kIntermediate +
             tile.column * 128 + (tile.wide ? 0 : warpgroup() * 64);
    const Smem from = wait_staged();
    for (u32 r = lane; r < rows; r += 32) {
      ptx::bulk_store(to + static_cast<u64>(r) * kIntermediate, from + staged_row(r), bytes);
    }
    release();
  }

  MEGAMOE_DEVICE void copy_results(const Tile& tile) {
    const u32 rows = tokens(tile), row = tile.row + first_token(tile), pieces = tile.wide ? 2 : 1;
    const u32 lane = ptx::fresh(lane_);
    // Columns of the first piece; a wide tile's second piece follows it, a swapped tile's belongs to the other warpgroup.
    u32 column = tile.column * kWeightRows + (tile.wide ? 0 : warpgroup() * 128);
    __nv_bfloat16* to[2];
#pragma unroll 1
    for (u32 piece = 0; piece < pieces; ++piece, column += 128) {
      const Smem from = wait_staged();
      if (piece == 0) {  // not before: only what the math warps waited for orders the route table before this read
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          const u32 r = lane + 32 * i;
          if (r >= rows) continue;
          const Route route = load_route(p_, row + r);
          to[i] = arena::y(p_, route.source) + static_cast<u64>(route.route) * kHidden;
        }
      }
      if (column < kHidden) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          const u32 r = lane + 32 * i;
          if (r < rows) ptx::bulk_store(to[i] + column, from + staged_row(r), 256);
        }
      }
      release();
    }
  }

  MEGAMOE_DEVICE Smem wait_staged() {
    ptx::mbarrier_wait(staged_barrier(base_, warpgroup_, ring_.buffer()), ring_.parity());
    return staging_buffer(base_, warpgroup_, ring_.buffer());
  }
  // The buffer may be written again when every lane's copies have read it.
  MEGAMOE_DEVICE void release() {
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(free_barrier(base_, warpgroup_, ring_.buffer()));
    ring_.advance();
  }
  MEGAMOE_DEVICE void finish() {
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    ptx::syncwarp();
    trace_(Event::kStored);  // before anybody is told
  }

  // The last of the rank's result tiles tells every rank that its routes are complete here; before it, where tokens are
  // combined early, the last of each expert that the expert's are.
  MEGAMOE_DEVICE void results_stored(const Tile& tile) {
    constexpr u32 kHalves = kTiles2 * kMathWarpgroups;
    const u32 epoch = fact(base_, kEpoch), expert = tile.expert;
    count_for_pass(p_, base_, Phase::kResults, tile.pass);
    u32 stored = 1;
    if constexpr (kEarlyCombine) {
      stored = (tiles_before(base_, expert + 1) - tiles_before(base_, expert)) * kHalves;
      if (ptx::atom_add_acq_rel_gpu(barrier_word(p_, epoch, kExpertStored) + expert, 1u) + 1 != stored) return;
    }
    const u32 all = fact(base_, kTotalTiles) * kHalves;
    if (ptx::atom_add_acq_rel_gpu(barrier_word(p_, epoch, kStored), stored) + stored == all) {
      finish_rank(p_, base_);
    } else if (kEarlyCombine) {
      announce_expert(p_, epoch, expert);
    }
  }

  const Params& p_;
  Smem base_;
  u32 warpgroup_, lane_;
  StagingRing ring_;
  Trace trace_;
};

}  // namespace megamoe
