// Dispatch: the dispatch warp of each CTA fetches token rows from their ranks and lays them into the expert-major pool.
//
// Rows are taken in pool order, dealt round robin to the CTAs, so that the experts fill up in the order in which the
// schedule wants them. A row that several local experts use is fetched once, by its lowest pool row, and stored to all.
// config::kPulledRows rows are in flight a CTA: about 1 MB over the GPU saturates NVLink, more only adds latency.
#pragma once
#include "routing.cuh"
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

MEGAMOE_DEVICE void dispatch_rows(const Params& p, Smem base, u32 epoch) {
  constexpr u32 kInFlight = config::kPulledRows;
  const u32 lane = ptx::lane_index(), total = fact(base, kTotalRoutes);
  Trace trace(p, kTraceDispatch, lane == 0);
  if (total == 0) return;
  if (lane == 0) wait_count(p, Phase::kList, 0, barrier_word(p, epoch, kListed), gridDim.x);
  ptx::syncwarp();
  trace(Event::kWait);

  const Smem buffer = base + (FusedTile::kPulled + lane * kHidden);
  const Smem bar = base + (FusedTile::kPulledBarriers + lane * 8);
  PoolRows rows(base);
  u32 parity = 0;
  for (u32 first = blockIdx.x; first < total; first += gridDim.x * kInFlight) {
    const u32 i = first + lane * gridDim.x;
    u32 row = kNoRow;
    Route route{};
    if (lane < kInFlight && i < total) {
      row = rows.row(i);
      route = load_route(p, row);
      if (!route.first) row = kNoRow;  // its token comes with another row
    }
    const u32 token = route.route / kTopk;
    if (row != kNoRow) {
      ptx::mbarrier_arrive_expect_tx(bar, kHidden);
      ptx::bulk_load(buffer, arena::x(p, route.source) + static_cast<u64>(token) * kHidden, kHidden, bar);
    }
    // Scales meanwhile, by the whole warp: [row][block] at the source, [block][row] in the pool.
#pragma unroll 1
    for (u32 d = 0; d < kInFlight; ++d) {
      const u32 source = ptx::shfl(route.source, d), t = ptx::shfl(token, d);
      for (u32 r = ptx::shfl(row, d); r != kNoRow; r = workspace::routes(p)[r].z) {
        for (u32 b = lane; b < kBlocks1; b += 32) {
          workspace::x_pool_scales(p)[static_cast<u64>(b) * p.pool_rows + r] =
              arena::x_scales(p, source)[static_cast<u64>(t) * kBlocks1 + b];
        }
      }
    }
    if (row != kNoRow) {
      ptx::mbarrier_wait(bar, parity);
      parity ^= 1;
      for (u32 r = row; r != kNoRow; r = workspace::routes(p)[r].z) {
        ptx::bulk_store(workspace::x_pool(p) + static_cast<u64>(r) * kHidden, buffer, kHidden);
      }
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
    }
    ptx::fence_proxy_async();  // scales and rows, for readers through the async proxy
    ptx::syncwarp();
    for (u32 r = row; r != kNoRow;) {
      const uint4 v = workspace::routes(p)[r];
      ptx::red_add_release_gpu(arrived(p, bank_of(epoch)) + v.w, 1u);
      r = v.z;
    }
    ptx::syncwarp();
    trace(Event::kRows);
  }
}

}  // namespace megamoe
