// Lean routing: small calls of a rank that is a group by itself.
//
// Nobody else's counts are needed, and the ids are few. So each CTA reads all of them and derives the pool's layout and
// every route's place alone: no counter is raised and none waited for before the first product. Then each CTA takes
// some of the tokens: it stages the row, if the call's inputs are not staged yet, and its warps bring it to the pool, each for
// some of the slots.
#pragma once
#include "list.cuh"
#include "stretch.cuh"

namespace megamoe {

constexpr u32 kLineBytes = 128;  // of the L2

MEGAMOE_DEVICE void prefetch_lines(const void* at, u64 bytes, u32 thread, u32 threads) {
  const u64 before = reinterpret_cast<u64>(at) % kLineBytes;
#pragma unroll 1
  for (u64 offset = thread * kLineBytes; offset < before + bytes; offset += threads * kLineBytes) {
    ptx::prefetch_l2(static_cast<const u8*>(at) - before + offset);
  }
}
// What a lean call looks at first, asked into the L2 as the kernel starts: one after the other, each would be waited for. The
// kernel before may still be writing there: it writes to the L2, too, and the loads themselves wait for its end.
MEGAMOE_DEVICE void prefetch_call(const Params& p) {
  if (p.tokens * kTopk > kThreads) return;
  const u32 warp = ptx::warp_index(), lane = ptx::lane_index(), token = blockIdx.x, routes = p.tokens * kTopk;
  if (warp >= 4 && token < p.tokens) {
    const u32 thread = threadIdx.x - (kThreads - kMathThreads);
    if (p.x != nullptr) {
      prefetch_lines(p.x + 2ull * kHidden * token, 2 * kHidden, thread, kMathThreads);
    } else {
      prefetch_lines(arena::x(p, p.rank) + static_cast<u64>(kHidden) * token, kHidden, thread, kMathThreads);
    }
  }
  if (blockIdx.x != gridDim.x - 1) return;
  if (warp == 1) {
    if (p.x != nullptr) {
      prefetch_lines(p.ids, routes * (p.wide_ids != 0 ? 8 : 4), lane, 32);
    } else {
      prefetch_lines(arena::ids(p, p.rank), routes * 4, lane, 32);
    }
  } else if (warp == 2) {
    if (p.x != nullptr) prefetch_lines(p.weights, routes * 4, lane, 32);
    prefetch_lines(workspace::barrier(p), kBanks * kBarrierWords * 4, lane, 32);
  } else if (warp == 3) {
    for (u32 bank = 0; bank < kBanks; ++bank) {  // the epoch, which says which one, is not known yet
      prefetch_lines(arrived(p, bank), kLocalExperts * 4, lane, 32);
      prefetch_lines(halves(p, bank), kLocalExperts * 4, lane, 32);
    }
  }
}

// Layout of the pool. `ids`: kThreads words for the route's expert, kNoRow where there is none; then as many for its place
// among the routes of its expert.
MEGAMOE_DEVICE void lay_out_lean(const Params& p, Smem base, Smem ids, u32 tokens) {
  const u32 route = threadIdx.x;
  for (u32 e = threadIdx.x; e < kLocalExperts; e += kThreads) ptx::st_shared_u32(base + (kCountTable + e * 4), 0u);
  int id = -1;
  if (route < tokens * kTopk) {
    int* staged = arena::ids(p, p.rank);
    if (p.x != nullptr) {
      id = staging::load_id(p.ids + (p.wide_ids != 0 ? 8ull : 4ull) * route, p.wide_ids != 0);
      if (blockIdx.x == 0) {  // for the combine (`listed` and `stored` lie between), and for whoever calls on staged inputs
        staged[route] = id;
        arena::route_weights(p, p.rank)[route] = p.weights[route];
      }
    } else {
      id = staged[route];
    }
    if (blockIdx.x == 0 && id != -1 && !is_route(id)) ptx::st_relaxed_sys(p.errors + kBadId, 1u);
  }
  const u32 expert = is_route(id) ? static_cast<u32>(id) : kNoRow;
  ptx::st_shared_u32(ids + route * 4, expert);
  __syncthreads();
  u32 place = 0;
  if (expert != kNoRow) {
    ptx::atom_add_shared(base + (kCountTable + expert * 4), 1u);
    for (u32 i = 0; i < route; i += 4) {
      const uint4 v = ptx::ld_shared_v4(ids + i * 4);
      place += (v.x == expert) + (v.y == expert && i + 1 < route) + (v.z == expert && i + 2 < route) +
               (v.w == expert && i + 3 < route);
    }
  }
  ptx::st_shared_u32(ids + (kThreads + route) * 4, place);
  __syncthreads();
  for (u32 e = threadIdx.x; e < kLocalExperts; e += kThreads) {
    const u32 rows = ptx::ld_shared_u32(base + (kCountTable + e * 4));
    if (blockIdx.x == 0) p.received[e] += rows;
    if constexpr (kStretches) ptx::red_max_shared(base + (kFacts + kMostRows * 4), rows);
  }
  place_experts(p, base, base);
}

// A token's row and its routes, by a CTA.
MEGAMOE_DEVICE void bring_lean(const Params& p, Smem base, Smem ids, u32 epoch, u32 token) {
  const u32 lane = ptx::lane_index();
  if (p.x != nullptr) {
    u8* scales = reinterpret_cast<u8*>(arena::x_scales(p, p.rank));
    const staging::Rows row{p.x + 2ull * kHidden * token, arena::x(p, p.rank) + static_cast<u64>(kHidden) * token,
                            scales + static_cast<u64>(kBlocks1) * sizeof(float) * token, 0, 0, 0};
    for (u32 first = ptx::warp_index(); first * 4 < kBlocks1; first += kWarps) {
      staging::stage_rows<kHidden, 2>(row, first, 1, nullptr, p.power_scales != 0);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (u32 slot = ptx::warp_index(); slot < kTopk; slot += kWarps) {
    const u32 route = token * kTopk + slot, expert = ptx::ld_shared_u32(ids + route * 4);
    if (expert == kNoRow) continue;
    const u32 row = ptx::ld_shared_u32(base + (kBaseTable + expert * 4)) + ptx::ld_shared_u32(ids + (kThreads + route) * 4);
    const float weight = p.x != nullptr ? p.weights[route] : arena::route_weights(p, p.rank)[route];
    bring(p, base, {p.rank, token}, lane == slot ? row : kNoRow, expert, arrived(p, bank_of(epoch)), [&] {
      if (lane != slot) return;
      workspace::pool_weights(p)[row] = weight;
      store_route(p, row, p.rank, false, route, static_cast<int>(expert));
    });
  }
}

MEGAMOE_DEVICE void route_lean(const Params& p, Smem base, Smem ids, u32 epoch, u32 tokens) {
  lay_out_lean(p, base, ids, tokens);
  for (u32 token = blockIdx.x; token < tokens; token += gridDim.x) bring_lean(p, base, ids, epoch, token);
  __syncthreads();
  if (threadIdx.x == 0) {
    set_fact(base, kDirect, 1u);
    set_fact(base, kStretched, has_stretches(base));
    ptx::red_add_release_gpu(barrier_word(p, epoch, kListed), 1u);
  }
}

}  // namespace megamoe
