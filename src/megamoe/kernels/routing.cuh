// Routing: from every rank's expert ids to this rank's pool layout and route table.
//
// 0. stage   If the call's inputs are not in the arena yet, each CTA quantises a share of its rank's rows into it, and
//            takes ids and weights over as it counts them. The counter that ends step 1 says that all of it is there.
// 1. count   Each CTA counts a share of its rank's own routes by expert and gives each route its position among them.
// 2. push    When all CTAs of the rank have counted, CTA 0 pushes the counts to the experts' owners: one 8-byte word for
//            each (source, local expert), the epoch in its upper half, so that data and flag arrive together.
// 3. lay out Every CTA polls its own rank's words and derives counts, pool rows and tiles by itself (shared memory).
// 4. list    Each CTA reads the routes of a share of all ranks' tokens (list.cuh).
// A rank may go on to the next call only after every rank has finished this one (combine.cuh), so nothing here is read
// after its owner overwrites it.
#pragma once
#include "schedule.cuh"
#include "stage.cuh"
#include "sync.cuh"

namespace megamoe {

constexpr u32 kNoRow = 0xffffffffu;
constexpr u32 kFirstOfToken = 0x80000000u;

// One pool row. As stored: {source | first flag, token * k + slot at the source, local expert, 0}.
struct Route {
  u32 source;
  bool first;  // this row is the one that fetches the token
  u32 route;
  u32 expert;
};
MEGAMOE_DEVICE Route load_route(const Params& p, u32 row) {
  const uint4 v = workspace::routes(p)[row];
  return {v.x & ~kFirstOfToken, (v.x & kFirstOfToken) != 0, v.y, v.z};
}
MEGAMOE_DEVICE void store_route(const Params& p, u32 row, u32 source, bool first, u32 route, int id) {
  workspace::routes(p)[row] =
      make_uint4(first ? source | kFirstOfToken : source, route, static_cast<u32>(id) - p.rank * kLocalExperts, 0);
}
// Token tile of a pool row of this expert.
MEGAMOE_DEVICE u32 pool_tile(const Params& p, Smem base, u32 expert, u32 row) {
  const u32 within = row - ptx::ld_shared_u32(base + (kBaseTable + expert * 4));
  const Tiling tiling(ptx::ld_shared_u32(base + (kCountTable + expert * 4)));
  const u32 tile = ptx::ld_shared_u32(base + (kTileTable + expert * 4)) + tiling.tile_of(within);
  return tile < p.pool_tiles ? tile : 0;  // 0: only in a call that has failed, from an entry of an older one
}
// Pool rows of a token's slots, kNoRow where a slot has no route on this rank.
MEGAMOE_DEVICE u32* targets_of(const Params& p, u32 source, u32 token) {
  return workspace::targets(p) + (static_cast<u64>(source) * p.capacity + token) * kTopk;
}

// Whether this call lists and pulls at once: a question of how long all rows take before the first tile can start.
MEGAMOE_DEVICE bool pulls_directly(u32 all) { return all <= config::kDirectTokens; }

// Whether every CTA derives the layout from the ids (lean.cuh): a thread for each route. Plans that carry tokens are not
// for such calls, and have no registers for them.
constexpr bool kLean = kRanks == 1 && kCarried == 0;
MEGAMOE_DEVICE bool is_lean(u32 tokens) { return kLean && tokens * kTopk <= kThreads && pulls_directly(tokens); }

MEGAMOE_DEVICE bool is_route(int id) { return static_cast<u32>(id) < kExperts; }

// Tokens of this call; a count over the bound is an error and counts as the bound.
MEGAMOE_DEVICE u32 call_tokens(const Params& p) {
  if (p.num_tokens == nullptr) return p.tokens;
  const int given = *p.num_tokens;
  if (given >= 0 && static_cast<u32>(given) <= p.tokens) return static_cast<u32>(given);
  if (blockIdx.x == 0 && threadIdx.x == 0) ptx::st_relaxed_sys(p.errors + kBadTokenCount, 1u);
  return given < 0 ? 0 : p.tokens;
}

// Step 0, the rows, by all warps of the rank. Peers read them through the async proxy.
template <int kCount>
MEGAMOE_DEVICE void stage_own_rows(const Params& p, u32 tokens) {
  u8* scales = reinterpret_cast<u8*>(arena::x_scales(p, p.rank));
  const staging::Rows rows{p.x, arena::x(p, p.rank), scales, 2 * kHidden, kHidden, kBlocks1 * sizeof(float)};
  const u32 groups = tokens * kBlocks1;
#pragma unroll 1
  for (u32 warp = ptx::warp_index() * gridDim.x + blockIdx.x; warp * (2 * kCount) < groups; warp += gridDim.x * kWarps) {
    staging::stage_rows<kHidden, kCount>(rows, warp, tokens, nullptr, p.power_scales != 0);
  }
}
MEGAMOE_DEVICE void stage_own_rows(const Params& p, u32 tokens) {
  // Few groups: one for each half warp, so that every load is on its way at once. Many: enough bytes under way.
  if (tokens * kBlocks1 <= gridDim.x * kWarps * 2) {
    stage_own_rows<1>(p, tokens);
  } else {
    stage_own_rows<4>(p, tokens);
  }
  ptx::fence_proxy_async();
}

// Step 1, and the ids and weights of step 0. `histogram`: kExperts words of shared memory.
MEGAMOE_DEVICE void count_own_routes(const Params& p, Smem histogram, u32 epoch, u32 tokens) {
  const u32 routes = tokens * kTopk, share = (routes + gridDim.x - 1) / gridDim.x;
  const u32 begin = blockIdx.x * share, end = begin + share < routes ? begin + share : routes;
  int* ids = arena::ids(p, p.rank);
  u32* positions = arena::positions(p, p.rank);
  for (u32 e = threadIdx.x; e < kExperts; e += kThreads) ptx::st_shared_u32(histogram + e * 4, 0u);
  __syncthreads();
  for (u32 i = begin + threadIdx.x; i < end; i += kThreads) {
    int id = 0;
    if (p.x != nullptr) {
      id = ids[i] = staging::load_id(p.ids + (p.wide_ids != 0 ? 8ull : 4ull) * i, p.wide_ids != 0);
      arena::route_weights(p, p.rank)[i] = p.weights[i];
    } else {
      id = ids[i];
    }
    if (is_route(id)) {
      positions[i] = ptx::atom_add_shared(histogram + id * 4, 1u);
    } else if (id != -1) {
      ptx::st_relaxed_sys(p.errors + kBadId, 1u);
    }
  }
  __syncthreads();
  u32* counts = own_counts(p, bank_of(epoch));
  for (u32 e = threadIdx.x; e < kExperts; e += kThreads) {
    const u32 count = ptx::ld_shared_u32(histogram + e * 4);
    if (count != 0) ptx::st_shared_u32(histogram + e * 4, ptx::atom_add_relaxed_gpu(counts + e, count));
  }
  __syncthreads();
  for (u32 i = begin + threadIdx.x; i < end; i += kThreads) {
    const int id = ids[i];
    if (is_route(id)) positions[i] += ptx::ld_shared_u32(histogram + id * 4);
  }
}
MEGAMOE_DEVICE void announce_counted(const Params& p, u32 epoch) {
  __syncthreads();
  if (threadIdx.x == 0) ptx::red_add_release_gpu(barrier_word(p, epoch, kCounted), 1u);
}

// Step 2, CTA 0. After an expired wait nothing is pushed: the peers' own waits end through the abort word.
MEGAMOE_DEVICE void push_counts(const Params& p, Smem base, u32 epoch, u32 tokens) {
  if (threadIdx.x == 0 && !wait_count(p, Phase::kOwnCounts, 0, barrier_word(p, epoch, kCounted), gridDim.x)) {
    set_fact(base, kFailed, 1u);
  }
  __syncthreads();
  const bool failed = fact(base, kFailed) != 0;
  __syncthreads();  // a failure of lay_out_pool writes the same word
  if (failed) return;
  const u64 tag = static_cast<u64>(epoch) << 32;
  const u32* counts = own_counts(p, bank_of(epoch));
  constexpr u32 kWords = kLocalExperts + 1;
  for (u32 i = threadIdx.x; i < kRanks * kWords; i += kThreads) {
    const u32 owner = i / kWords, e = i % kWords;
    const u32 value = e == kLocalExperts ? tokens : ptx::ld_relaxed_gpu(counts + owner * kLocalExperts + e);
    ptx::st_release_sys(arena::counts(p, owner) + p.rank * kWords + e, tag | value);
  }
}

// Of an expert's `count` routes, those from this rank; `places` as after step 3.
MEGAMOE_DEVICE u32 own_count(const Params& p, Smem places, u32 expert, u32 count) {
  const Smem place = places + (p.rank * kLocalExperts + expert) * 4;
  return (p.rank + 1 < kRanks ? ptx::ld_shared_u32(place + kLocalExperts * 4) : count) - ptx::ld_shared_u32(place);
}

// Row of the tables at which a token tile begins; of the one behind the last, `rows`. For rising tiles, `expert` the last
// one's.
MEGAMOE_DEVICE u32 tile_begin(Smem base, u32 tile, u32 tiles, u32 rows, u32& expert) {
  if (tile >= tiles) return rows;
  while (expert + 1 < kLocalExperts && ptx::ld_shared_u32(base + (kTileTable + (expert + 1) * 4)) <= tile) ++expert;
  const Tiling tiling(ptx::ld_shared_u32(base + (kCountTable + expert * 4)));
  return ptx::ld_shared_u32(base + (kBaseTable + expert * 4)) +
         tiling.start(tile - ptx::ld_shared_u32(base + (kTileTable + expert * 4)));
}

// The passes of a call with `tiles` token tiles, which take `rows` rows: as few as have room, all with the same number of
// tiles but for the last.
MEGAMOE_DEVICE void lay_out_passes(Smem base, u32 pool_rows, u32 rows, u32 tiles) {
  const u32 room = pool_rows - kTileRows, least = rows <= room ? 1 : (rows + room - 1) / room;
  bool fits = false;
#pragma unroll 1
  for (u32 passes = least < kMaxPasses ? least : kMaxPasses; !fits; ++passes) {
    const u32 in_pass = (tiles + passes - 1) / passes;
    set_fact(base, kPassCount, passes);
    set_fact(base, kPassTiles, in_pass);
    fits = true;
    u32 expert = 0, begin = 0;
#pragma unroll 1
    for (u32 pass = 0; pass <= passes; ++pass) {
      const u32 end = tile_begin(base, pass * in_pass, tiles, rows, expert);
      ptx::st_shared_u32(base + (kPassTable + pass * 4), end);
      fits &= end - begin <= room || passes == kMaxPasses;  // so many always fit
      begin = end;
    }
  }
}

// The rest of the tables and the facts, from the counts; a barrier lies behind. `places` as after step 3.
MEGAMOE_DEVICE void place_experts(const Params& p, Smem base, Smem places) {
  if (threadIdx.x < 32) {  // exclusive sums over the experts by one warp
    u32 row = 0, tile = 0, routes = 0, own = 0;
    u32 urgent = 0;  // experts of which some CTA's first tile is
    for (u32 first = 0; first < kLocalExperts; first += 32) {
      const u32 e = first + threadIdx.x;
      const u32 count = e < kLocalExperts ? ptx::ld_shared_u32(base + (kCountTable + e * 4)) : 0;
      const u32 rows = (count + kRowAlignment - 1) / kRowAlignment * kRowAlignment, tiles = Tiling(count).tiles;
      u32 row_sum = rows, tile_sum = tiles;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const u32 r = ptx::shfl_up(row_sum, d), t = ptx::shfl_up(tile_sum, d);
        if (threadIdx.x >= static_cast<u32>(d)) {
          row_sum += r;
          tile_sum += t;
        }
      }
      if (e < kLocalExperts) {
        ptx::st_shared_u32(base + (kBaseTable + e * 4), row + row_sum - rows);
        ptx::st_shared_u32(base + (kTileTable + e * 4), tile + tile_sum - tiles);
      }
      urgent += static_cast<u32>(
          __popc(ptx::ballot(e < kLocalExperts && (tile + tile_sum - tiles) * kTiles1 < gridDim.x)));
      row += ptx::shfl(row_sum, 31);
      tile += ptx::shfl(tile_sum, 31);
      routes += ptx::reduce_add(count);
      if constexpr (kRanks > 1) own += ptx::reduce_add(e < kLocalExperts ? own_count(p, places, e, count) : 0);
    }
    ptx::syncwarp();
    if (!kPasses && row + kTileRows > p.pool_rows) {
      // More than the bound of this call allows: the ranks do not agree about it. Nothing of the call is run.
      for (u32 e = threadIdx.x; e < kLocalExperts; e += 32) {
        ptx::st_shared_u32(base + (kCountTable + e * 4), 0u);
        ptx::st_shared_u32(base + (kBaseTable + e * 4), 0u);
        ptx::st_shared_u32(base + (kTileTable + e * 4), 0u);
      }
      if (threadIdx.x == 0) {
        report_expired(p, Phase::kRoom, p.rank, p.pool_rows - kTileRows, row);
        raise_abort(p, Phase::kRoom);
        set_failed(base);
      }
      row = tile = routes = own = urgent = 0;
      ptx::syncwarp();
    }
    if (threadIdx.x == 0) {
      set_fact(base, kTotalRoutes, routes);
      set_fact(base, kTotalTiles, tile);
      set_fact(base, kUrgentRows,
               urgent < kLocalExperts ? ptx::ld_shared_u32(base + (kBaseTable + urgent * 4)) : row);
      set_fact(base, kUrgentTokens, 0u);
      choose_order(base, tile, routes - own);
      if constexpr (kPasses) lay_out_passes(base, p.pool_rows, row, tile);
    }
  }
  __syncthreads();
}

// Step 3. Fills the tables and facts. `places`: kRanks * kLocalExperts words, the place of each source's first route
// within an expert; `sources`: kRanks words, the tokens of each.
MEGAMOE_DEVICE void lay_out_pool(const Params& p, Smem base, Smem places, Smem sources, u32 epoch) {
  constexpr u32 kWords = kLocalExperts + 1;
  for (u32 i = threadIdx.x; i < kRanks * kWords; i += kThreads) {
    const u64* word = arena::counts(p, p.rank) + i;
    u64 value = 0;
    const bool ok = spin_until(
        p, Phase::kCounts, i, epoch,
        [&] {
          value = ptx::ld_acquire_sys(word);
          return static_cast<u32>(value >> 32);
        },
        [&](u32 seen) { return seen == epoch; });
    if (!ok) set_failed(base);
    const u32 source = i / kWords, e = i % kWords, count = static_cast<u32>(value);
    if (e == kLocalExperts) {
      ptx::st_shared_u32(sources + source * 4, count);
    } else {
      ptx::st_shared_u32(places + (source * kLocalExperts + e) * 4, count);
    }
  }
  __syncthreads();
  const bool failed = fact(base, kFailed) != 0;
  for (u32 e = threadIdx.x; e < kLocalExperts; e += kThreads) {
    u32 total = 0;
#pragma unroll 1
    for (u32 s = 0; s < kRanks; ++s) {
      const Smem place = places + (s * kLocalExperts + e) * 4;
      const u32 count = failed ? 0 : ptx::ld_shared_u32(place);
      ptx::st_shared_u32(place, total);
      total += count;
    }
    ptx::st_shared_u32(base + (kCountTable + e * 4), total);
    if (blockIdx.x == 0) p.received[e] += total;
  }
  __syncthreads();
  place_experts(p, base, places);
}

}  // namespace megamoe
