// Dispatch: the dispatch warp of each CTA fetches token rows from their ranks and lays them into the expert-major pool. In
// calls with few tokens list.cuh has done so already, in others the math warps bring those of the first tiles.
//
// Rows are taken in pool order, dealt round robin to the CTAs, so that the experts fill up in the order in which the
// schedule wants them. A row that several local experts use is fetched once, by its lowest pool row, and stored to all:
// the warp looks at 32 pool rows at a time and goes through those that fetch.
// config::kPulledRows rows are in flight a CTA: about 1 MB over the GPU saturates NVLink, more only adds latency.
// Lane d < kPulledRows fetches the d-th row of a round; lane d * k + j stores it for slot j.
// A round has rows of one pass. The first one of a pass waits until the first GEMMs of the pass before have read the pool.
#pragma once
#include "list.cuh"
#include "trace.cuh"

namespace megamoe {

// Walks the routes of this CTA in pool order.
class PoolRows {
 public:
  MEGAMOE_DEVICE explicit PoolRows(Smem base) : base_(base), expert_(0), item_(0) {}

  // Pool row of the i-th route (in expert-major order), for rising i.
  MEGAMOE_DEVICE u32 row(u32 i) {
    u32 count = ptx::ld_shared_u32(base_ + (kCountTable + expert_ * 4));
    while (i - item_ >= count) {
      item_ += count;
      ++expert_;
      count = ptx::ld_shared_u32(base_ + (kCountTable + expert_ * 4));
    }
    return ptx::ld_shared_u32(base_ + (kBaseTable + expert_ * 4)) + (i - item_);
  }

 private:
  Smem base_;
  u32 expert_;
  u32 item_;  // routes of the experts before
};

class Dispatch {
 public:
  static constexpr u32 kInFlight = config::kPulledRows;
  static_assert(kInFlight * kTopk <= 32, "a lane for each slot of each row in flight");

  MEGAMOE_DEVICE Dispatch(const Params& p, Smem base)
      : p_(p),
        base_(base),
        arrived_(arrived(p, bank_of(fact(base, kEpoch)))),
        lane_(ptx::lane_index()),
        total_(fact(base, kTotalRoutes)),
        batch_(blockIdx.x),
        pending_(0),
        later_(0),
        pass_(0),
        seen_{0, kNoRow},
        rows_(base) {}

  MEGAMOE_DEVICE void run() {
    if (total_ == 0 || fact(base_, kDirect) != 0) return;
    Trace trace(p_, kTraceDispatch, lane_ == 0);
    bool listed = true;
    if (lane_ == 0) listed = wait_count(p_, Phase::kList, 0, barrier_word(p_, fact(base_, kEpoch), kListed), gridDim.x);
    if (!ptx::all(listed)) return;
    ptx::syncwarp();  // lane 0's acquire is for all lanes; a vote orders no memory
    trace(Event::kWait);

    const Smem bar = base_ + (FusedTile::kPulledBarriers + lane_ * 8);
    u32 parity = 0;
    do {
      bring_pass(bar, parity, trace);
    } while (next_pass(trace));
  }

 private:
  struct Row {
    u32 source, token;  // token kNoRow: nothing to fetch
  };
  struct Target {
    u32 row, tile;  // row of the pool
  };

  MEGAMOE_DEVICE void bring_pass(Smem bar, u32& parity, Trace& trace) {
    Row row = take();
    Target target = find_target(row);
#pragma unroll 1
    while (ptx::shfl(row.token, 0) != kNoRow) {
      const bool fetches = row.token != kNoRow;
      if (fetches) {
        ptx::mbarrier_arrive_expect_tx(bar, kHidden);
        ptx::bulk_load(buffer(lane_), arena::x(p_, row.source) + static_cast<u64>(row.token) * kHidden, kHidden, bar);
      }
      // While the rows are on their way: the next round's rows, then this round's scales.
      const Row next = take();
      copy_scales(row, target);
      const Target next_target = find_target(next);
      if (fetches) {
        ptx::mbarrier_wait(bar, parity);
        parity ^= 1;
      }
      ptx::syncwarp();
      if (target.row != kNoRow) {
        ptx::bulk_store(workspace::x_pool(p_) + static_cast<u64>(target.row) * kHidden, buffer(lane_ / kTopk), kHidden);
      }
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async();  // rows and scales, for readers through the async proxy
      ptx::syncwarp();
      if (target.row != kNoRow) ptx::red_add_release_gpu(arrived_ + target.tile, 1u);
      ptx::syncwarp();
      row = next;
      target = next_target;
      trace(Event::kRows);
    }
  }

  // Goes on to the next pass that has rows of this CTA, once its rows may be written. False: there is none, or the call fails.
  MEGAMOE_DEVICE bool next_pass(Trace& trace) {
    if (!kPasses || later_ == 0) return false;
    const u32 i = batch_ - 32 * gridDim.x + lane_ * gridDim.x;  // the batch that later_ is of
    const u32 pass = i < total_ ? pass_of(base_, rows_.row(i)) : kMaxPasses;
    pass_ = ptx::shfl(pass, static_cast<u32>(__ffs(static_cast<int>(later_))) - 1);  // passes rise with the lanes
    pending_ = later_ & ptx::ballot(pass == pass_);
    later_ ^= pending_;
    bool read = true;
    if (lane_ == 0) read = wait_for_pass(p_, base_, Phase::kFirsts, pass_, kTiles1);
    if (!ptx::all(read)) return false;
    ptx::syncwarp();
    ptx::fence_proxy_async();  // rows are written by copies
    trace(Event::kWait);
    return true;
  }

  MEGAMOE_DEVICE Smem buffer(u32 d) const { return base_ + (FusedTile::kPulled + d * kHidden); }

  // What this lane fetches in the next round; behind the last one of the pass, nothing in any lane.
  MEGAMOE_DEVICE Row take() {
    while (pending_ == 0) {
      if ((kPasses && later_ != 0) || batch_ >= total_) return {0, kNoRow};
      const u32 i = batch_ + lane_ * gridDim.x;
      batch_ += 32 * gridDim.x;
      bool fetches = false, later = false;
      if (i < total_) {
        const u32 row = rows_.row(i);
        const Route route = load_route(p_, row);
        seen_ = {route.source, route.route / kTopk};
        later = kPasses && route.first && row >= pass_begin(base_, pass_ + 1);
        fetches = route.first && !later;
      }
      pending_ = ptx::ballot(fetches);
      if constexpr (kPasses) later_ = ptx::ballot(later);
    }
    u32 from = 32;  // lane d: the lane that saw the d-th of the pending rows
#pragma unroll
    for (u32 d = 0; d < kInFlight; ++d) {
      if (lane_ == d && pending_ != 0) from = static_cast<u32>(__ffs(static_cast<int>(pending_))) - 1;
      pending_ &= pending_ - 1;
    }
    const u32 source = ptx::shfl(seen_.source, from % 32), token = ptx::shfl(seen_.token, from % 32);
    return {source, from < 32 ? token : kNoRow};
  }

  // Where this lane stores: slot lane % k of the row that lane lane / k fetches.
  MEGAMOE_DEVICE Target find_target(const Row& row) const {
    const u32 d = lane_ / kTopk;
    const u32 source = ptx::shfl(row.source, d), token = ptx::shfl(row.token, d);
    if (d >= kInFlight || token == kNoRow) return {kNoRow, 0};
    const u32 to = targets_of(p_, source, token)[lane_ % kTopk];
    // No row, one of another pass, or, in a call that has failed, an entry of an older one: the tables have more rows than
    // the pools.
    const u32 begin = pass_begin(base_, pass_), end = kPasses ? pass_begin(base_, pass_ + 1) : p_.pool_rows;
    if (to < begin || to >= end) return {kNoRow, 0};
    return {to - begin, pool_tile(p_, base_, workspace::routes(p_)[to].z, to)};
  }

  // By the whole warp, [row][block] at the source to [block][row] in the pool.
  MEGAMOE_DEVICE void copy_scales(const Row& row, const Target& target) const {
#pragma unroll
    for (u32 d = 0; d < kInFlight; ++d) {
      const u32 source = ptx::shfl(row.source, d), token = ptx::shfl(row.token, d);
      if (token == kNoRow) continue;
      const float* from = arena::x_scales(p_, source) + static_cast<u64>(token) * kBlocks1;
#pragma unroll 1
      for (u32 b = lane_; b - lane_ < kBlocks1; b += 32) {
        const float scale = b < kBlocks1 ? from[b] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < kTopk; ++j) {
          const u32 to = ptx::shfl(target.row, d * kTopk + j);
          if (to != kNoRow && b < kBlocks1) {
            workspace::x_pool_scales(p_)[static_cast<u64>(b) * p_.pool_rows + to] = scale;
          }
        }
      }
    }
  }

  const Params& p_;
  Smem base_;
  u32* arrived_;
  u32 lane_, total_;
  u32 batch_;    // first route of the next batch
  u32 pending_;  // lanes whose row of the batch is still to be fetched
  u32 later_;    // the same, of later passes
  u32 pass_;
  Row seen_;     // this lane's row of the batch
  PoolRows rows_;
};

}  // namespace megamoe
