// The routed experts of one MoE layer, expert-parallel, as one persistent kernel a rank (sm_90a).
//
// A token's way: its row is staged (e4m3) in its rank's arena, here or before the launch -> routing tells the experts' rank
// where it goes -> a dispatch warp, the warp that lists it in small calls, or a math warp for the first tiles brings it over
// NVLink into the expert-major pool -> first GEMM, SwiGLU, requantisation -> intermediate pool -> second GEMM -> BF16 row
// stored into the combine buffer of the token's rank -> combine -> output.
//
// A CTA has 384 threads. All of them route; then each warp has its role:
//   warp 0        loader    takes tiles, fills their stages (feed.cuh)
//   warps 1, 2    store     take staged rows of math warpgroup 0 and 1 (scatter.cuh)
//   warp 3        dispatch  fetches token rows (dispatch.cuh), unless they were brought while listing (list.cuh)
//   warps 4 - 11  math      two warpgroups: the first tiles' token rows (list.cuh), WGMMA, promotion, epilogues, then combine
//
// Pipelines inside the CTA (layout.cuh has the counts; first wait of a consumer parity 0, of a producer 1)
//   barrier        producer -> consumer              arrivals          bytes
//   full[stage]    loader -> math                    kFullArrivals     token rows, 256 weight rows, scales
//   empty[stage]   math warps -> loader              kEmptyArrivals
//   staged[w][b]   warps of warpgroup w -> store w   kStagedArrivals
//   free[w][b]     store w -> warpgroup w            kFreeArrivals
//   pulled[lane]   copy engine -> dispatch lane      kPulledArrivals   one token row
//   tile[slot]     loader -> math, store             kQueueFullArrivals
//   taken[slot]    math, store warps -> loader       kQueueEmptyArrivals
// Between CTAs and ranks (sync.cuh; counters banked by epoch, tags carry it)
//   counted        every CTA -> CTA 0                own inputs staged, own routes counted and positioned
//   counts[s][e]   rank s -> every CTA of this rank  tag and count in one word
//   listed         every CTA -> dispatch warps       counts read and routes listed; also awaited before done
//   taken          loaders                           tiles given out
//   arrived[t]     dispatch, listing, math warps -> loaders  pool rows of token tile t
//   halves[t]      store warps -> loaders            intermediate of token tile t, two a weight tile
//   handed[g][c]   math warps -> those of CTA c + 1  sums of a tile that is cut between two CTAs (stretch.cuh)
//   results[e]     store warps -> the last of them   result tiles of expert e, where tokens are combined early
//   stored         store warps -> the last of them   result tiles of this rank; in lean calls also to the math warps
//   finished[e]    rank of e -> math warps           all results of expert e are stored
//   passes         store warps -> dispatch, loaders  tiles of a pass through their first, their second GEMM
//   done[r]        rank r -> math warps              all results of rank r are stored; not awaited in lean calls
// Memory: the list of the first tiles' tokens lies in a staging buffer until the math warps have brought them (a barrier of
// theirs lies behind). Stages belong to the loader between empty and full, to math between full and empty; a staging buffer
// to its warpgroup between free and staged, to its store warp between staged and free; the tables are written before the
// roles start. Before that, shared memory from offset 0 holds the routing's histogram and places (a barrier lies between).
#include "combine.cuh"
#include "dispatch.cuh"
#include "feed.cuh"
#include "lean.cuh"
#include "scatter.cuh"

using namespace megamoe;

namespace megamoe {

MEGAMOE_DEVICE void init_fused_barriers(Smem base) {
  const auto init = [&](u32 offset, u32 count, u32 arrivals, const char* label) {
    for (u32 i = 0; i < count; ++i) {
      ptx::name(base + (offset + i * 8), label, i);
      ptx::mbarrier_init(base + (offset + i * 8), arrivals);
    }
  };
  init(FusedTile::kFull, FusedTile::kStages, FusedTile::kFullArrivals, "full");
  init(FusedTile::kEmpty, FusedTile::kStages, FusedTile::kEmptyArrivals, "empty");
  init(FusedTile::kStaged, kMathWarpgroups * FusedTile::kBuffers, FusedTile::kStagedArrivals, "staged");
  init(FusedTile::kFree, kMathWarpgroups * FusedTile::kBuffers, FusedTile::kFreeArrivals, "free");
  init(FusedTile::kPulledBarriers, config::kPulledRows, FusedTile::kPulledArrivals, "pulled");
  init(FusedTile::kQueueFull, kQueueSlots, FusedTile::kQueueFullArrivals, "tile");
  init(FusedTile::kQueueEmpty, kQueueSlots, FusedTile::kQueueEmptyArrivals, "taken");
  ptx::fence_mbarrier_init();
}

// A tile of a call that is cut into stretches, or a part of one.
MEGAMOE_DEVICE void stretch_tile(const Params& p, const Tile& tile, Smem base, u32 warpgroup, u32 lane,
                                 Ring<FusedTile>& ring, Epilogue& epilogue, Trace& trace) {
  SwapTile<kStretchTokens> t;
  const Handover handover(p, base, tile);
  const int blocks = tile.end_block - tile.first_block;
  if (tile.first_block == 0) {
    t.accumulate(base, warpgroup, lane, blocks, ring);
  } else {
    handover.take(t);
    t.accumulate_more(base, warpgroup, lane, blocks, ring);
  }
  trace(tile.second ? Event::kSecond : Event::kFirst);
  if (is_first_part(tile)) {
    handover.give(t);
  } else if (tile.second) {
    epilogue.swap_second(t);
  } else {
    epilogue.swap_first(tile, t);
  }
  trace(Event::kEpilogue);
}

template <int Tokens>
MEGAMOE_DEVICE void swap_tile(const Tile& tile, Smem base, u32 warpgroup, u32 lane, Ring<FusedTile>& ring,
                              Epilogue& epilogue, Trace& trace) {
  SwapTile<Tokens> t;
  t.accumulate(base, warpgroup, lane, tile.second ? kBlocks2 : kBlocks1, ring);
  trace(tile.second ? Event::kSecond : Event::kFirst);
  if (tile.second) {
    epilogue.swap_second(t);
  } else {
    epilogue.swap_first(tile, t);
  }
  trace(Event::kEpilogue);
}

MEGAMOE_DEVICE void half_tile(const Tile& tile, Smem base, u32 warpgroup, u32 warp, u32 lane, Ring<FusedTile>& ring,
                              Epilogue& epilogue, Trace& trace) {
  HalfTile t;
  t.accumulate(base, warpgroup, warp, lane, tile.second ? kBlocks2 : kBlocks1, ring);
  trace(tile.second ? Event::kSecond : Event::kFirst);
  if (tile.second) {
    epilogue.half_second(t);
  } else {
    epilogue.half_first(tile, t);
  }
  trace(Event::kEpilogue);
}

// With what it carries, or without.
template <bool Carrying>
MEGAMOE_DEVICE void wide_tile(TileQueue& queue, Tile& tile, Smem base, u32 warpgroup, u32 warp, u32 lane,
                              Ring<FusedTile>& ring, Epilogue& epilogue, Trace& trace) {
  MathWarpgroup<FusedTile> math(base, warpgroup, warp, ptx::fresh(lane));
  math.ring = ring;
  CarriedTokens carried{base, warpgroup, lane};
  const auto nothing = [] {};
  const int blocks = tile.second ? kBlocks2 : kBlocks1;
  if constexpr (Carrying) {
    math.accumulate_carrying(blocks, carried);
  } else {
    math.accumulate_tile(blocks, nothing, nothing);
  }
  ring = math.ring;
  queue.read(tile);  // rather than kept: registers are few
  trace(tile.second ? Event::kSecond : Event::kFirst);
  if (tile.second) {
    epilogue.wide_second(math.finals);
    if constexpr (Carrying) epilogue.swap_second(carried.tile);
  } else {
    epilogue.wide_first(tile, math.finals);
    if constexpr (Carrying) epilogue.swap_first(carried_part(tile), carried.tile);
  }
  trace(Event::kEpilogue);
}

MEGAMOE_DEVICE void math_role(const Params& p, Smem base, u32 warpgroup, Trace& trace) {
  const u32 warp = ptx::warp_index() % 4, lane = ptx::lane_index();
  TileQueue queue(base, 0);
  Epilogue epilogue(p, base, warpgroup, warp, lane);
  Ring<FusedTile> ring{0, 0};
  Tile tile;
  for (; queue.look(tile); queue.done()) {
    if constexpr (kWide) {
      if (tile.wide) {
        if (carries(tile)) {
          wide_tile<true>(queue, tile, base, warpgroup, warp, lane, ring, epilogue, trace);
        } else {
          wide_tile<false>(queue, tile, base, warpgroup, warp, lane, ring, epilogue, trace);
        }
        continue;
      }
    }
    if constexpr (kSwap) {
      if (kStretches && tile.rows <= kStretchTokens && fact(base, kStretched) != 0) {
        if constexpr (kStretches) stretch_tile(p, tile, base, warpgroup, lane, ring, epilogue, trace);
      } else if (tile.rows <= 8) {
        swap_tile<8>(tile, base, warpgroup, lane, ring, epilogue, trace);
      } else if (tile.rows <= 16) {
        swap_tile<16>(tile, base, warpgroup, lane, ring, epilogue, trace);
      } else if (tile.rows <= 32) {
        swap_tile<32>(tile, base, warpgroup, lane, ring, epilogue, trace);
      } else {
        half_tile(tile, base, warpgroup, warp, lane, ring, epilogue, trace);
      }
    }
  }
}

}  // namespace megamoe

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mega(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  Trace trace(p, static_cast<TraceRole>(kTraceMath0 + (threadIdx.x >= 256)), threadIdx.x == 128 || threadIdx.x == 256);
  trace(Event::kStart);
  if constexpr (kLean) prefetch_call(p);
  for (u32 i = threadIdx.x; i < (kSwap ? kAmaxRows * kSwapTokens : 0); i += kThreads) {
    ptx::st_shared_u32(base + (FusedTile::kAmax + i * 4), 0u);
  }
  if (threadIdx.x == 0) {
    init_fused_barriers(base);
    ptx::grid_dependency_wait();  // launched while the kernel before drains: nothing global is read or written before
    set_fact(base, kEpoch, ptx::ld_relaxed_gpu(workspace::epoch(p)) + 1);
    set_fact(base, kTokens, call_tokens(p));
    set_fact(base, kFailed, 0u);
    set_fact(base, kMostRows, 0u);
    set_fact(base, kStretched, 0u);
  }
  __syncthreads();
  {  // Routing. Histogram and places lie where the stages will be.
    const u32 epoch = fact(base, kEpoch), tokens = fact(base, kTokens);
    const Smem places = base, sources = base + kRanks * kLocalExperts * 4;
    clear_next_bank(p, epoch);
    if (is_lean(tokens)) {
      route_lean(p, base, places, epoch, tokens);
    } else {
      if (p.x != nullptr) stage_own_rows(p, tokens);
      count_own_routes(p, places, epoch, tokens);
      trace(Event::kCounted);  // before anybody is told, so that clocks can be compared
      announce_counted(p, epoch);
      if (blockIdx.x == 0) push_counts(p, base, epoch, tokens);
      lay_out_pool(p, base, places, sources, epoch);
      trace(Event::kLaidOut);
      list_all(p, base, places, sources, epoch);
    }
    trace(Event::kListed);
  }
  ptx::fence_proxy_async_shared();  // the stages are written by the copy engine from here on
  __syncthreads();  // routing is over

  const u32 warp = ptx::warp_index();
  if (warp < 4) {
    ptx::setmaxnreg_dec<kRoleRegisters>();
    if (warp == kLoaderWarp) {
      ptx::role("loader");
      if (ptx::lane_index() == 0) Feed(maps, p, base).run();
      ptx::syncwarp();
    } else if (warp == kDispatchWarp) {
      ptx::role("dispatch");
      Dispatch(p, base).run();
    } else {
      ptx::role("store");
      if (blockIdx.x == 0 && warp == kStoreWarp0 && fact(base, kTotalTiles) == 0 && ptx::lane_index() == 0) {
        finish_rank(p, base);  // no route came here
      }
      Scatter(p, base, warp - kStoreWarp0).run();
    }
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    ptx::role("math");
    if (fact(base, kDirect) == 0) {
      bring_urgent(p, base, warp - 4, kMathThreads / 32);
      ptx::named_barrier_sync(kMathBarrier, kMathThreads);  // the list is read: staging buffers may be written
    }
    math_role(p, base, warp / 4 - 1, trace);
    if (is_lean(fact(base, kTokens))) {
      combine_lean(p, base, fact(base, kTokens), trace);
    } else {
      Combine(p, fact(base, kEpoch), fact(base, kTokens), blockIdx.x * 8 + warp - 4, gridDim.x * 8).run(trace);
    }
  }
  __syncthreads();  // all roles have ended
  if (threadIdx.x == 0) leave(p, fact(base, kEpoch));
}
