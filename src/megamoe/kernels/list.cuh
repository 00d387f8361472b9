// Listing: from ids, positions and the pool's layout to the route table, step 4 of the routing.
//
// Each CTA reads the routes of a share of all ranks' tokens and writes two tables: what each row holds, and where each token
// goes. A token's lowest row is the one that fetches it, for all its rows at once (dispatch.cuh), but for those below. Where
// a call has several passes, the lowest row in each of them.
// In a call with few tokens a warp brings a token's row in the same step, the second table is not needed, and the dispatch
// warps have nothing to do. In larger ones the math warps, which have nothing to multiply yet, bring the tokens of the first
// tiles.
#pragma once
#include "routing.cuh"

namespace megamoe {

// Tokens of all ranks; none in a call that has failed.
MEGAMOE_DEVICE u32 all_tokens(Smem base, Smem sources) {
  u32 all = 0;
#pragma unroll 1
  for (u32 s = 0; s < kRanks; ++s) all += fact(base, kFailed) != 0 ? 0 : ptx::ld_shared_u32(sources + s * 4);
  return all;
}

// The i-th token of all ranks.
struct Token {
  u32 source, token;
};
MEGAMOE_DEVICE Token token_of(Smem sources, u32 i) {
  u32 s = 0;
  for (u32 n = ptx::ld_shared_u32(sources); i >= n; n = ptx::ld_shared_u32(sources + s * 4)) {
    i -= n;
    ++s;
  }
  return {s, i};
}

// Pool row of a route with this id and position, kNoRow if its expert is not here.
MEGAMOE_DEVICE u32 pool_row(const Params& p, Smem base, Smem places, u32 source, int id, u32 position) {
  const u32 expert = static_cast<u32>(id) - p.rank * kLocalExperts;
  if (!is_route(id) || expert >= kLocalExperts) return kNoRow;
  const u32 row = ptx::ld_shared_u32(base + (kBaseTable + expert * 4)) +
                  ptx::ld_shared_u32(places + (source * kLocalExperts + expert) * 4) + position;
  // A peer that gave the call up may be writing its next one there: such a call fails, but stays inside tables and pools.
  return row < (kPasses ? pass_begin(base, fact(base, kPassCount)) : p.pool_rows) ? row : kNoRow;
}

// The CTA's urgent tokens, {source, token} each, where the math warps' staging buffers will be.
constexpr u32 kMaxUrgent = config::kUrgentTokens;
static_assert(kMaxUrgent * 8 <= kStagingBuffer, "the list fits into one buffer");
MEGAMOE_DEVICE Smem urgent_token(Smem base, u32 i) { return base + (FusedTile::kStaging + i * 8); }
// False where the list is full: the token then waits for a dispatch warp.
MEGAMOE_DEVICE bool note_urgent(Smem base, const Token& t) {
  const u32 i = ptx::atom_add_shared(base + (kFacts + kUrgentTokens * 4), 1u);
  if (i >= kMaxUrgent) return false;
  ptx::st_shared_u32(urgent_token(base, i), t.source);
  ptx::st_shared_u32(urgent_token(base, i) + 4, t.token);
  return true;
}

// Whether slot j's row fetches the token: no other of its rows in that pass is lower.
MEGAMOE_DEVICE bool fetches(Smem base, const u32 (&rows)[kTopk], u32 j, u32 lowest) {
  if (!kPasses || rows[j] == lowest || fact(base, kPassCount) == 1) return rows[j] == lowest;
  const u32 begin = pass_begin(base, pass_of(base, rows[j]));
  bool is_lowest = true;
#pragma unroll
  for (u32 i = 0; i < kTopk; ++i) is_lowest &= rows[i] >= rows[j] || rows[i] < begin;
  return is_lowest;
}

// Step 4.
MEGAMOE_DEVICE void list_routes(const Params& p, Smem base, Smem places, Smem sources, u32 all) {
  // Tokens are dealt to the CTAs in small groups: with few tokens, each CTA's chain of loads is then short.
  constexpr u32 kGroup = 8;
  const u32 first = (threadIdx.x / kGroup * gridDim.x + blockIdx.x) * kGroup + threadIdx.x % kGroup;
  for (u32 i = first; i < all; i += gridDim.x * kThreads) {
    const Token t = token_of(sources, i);
    const int* ids = arena::ids(p, t.source) + t.token * kTopk;
    const u32* positions = arena::positions(p, t.source) + t.token * kTopk;
    const float* weights = arena::route_weights(p, t.source) + t.token * kTopk;
    // Each word is read once: a peer that gave the call up may be writing its next one there, and what is checked must be
    // what is used.
    int id[kTopk];
    float weight[kTopk];
    u32 rows[kTopk], lowest = kNoRow;
#pragma unroll
    for (u32 j = 0; j < kTopk; ++j) {
      id[j] = ids[j];
      weight[j] = weights[j];
    }
#pragma unroll
    for (u32 j = 0; j < kTopk; ++j) {
      rows[j] = pool_row(p, base, places, t.source, id[j], positions[j]);
      lowest = rows[j] < lowest ? rows[j] : lowest;
    }
    const bool urgent = lowest < fact(base, kUrgentRows) && note_urgent(base, t);
    u32* targets = targets_of(p, t.source, t.token);
#pragma unroll
    for (u32 j = 0; j < kTopk; ++j) {
      targets[j] = rows[j];
      if (rows[j] == kNoRow) continue;
      workspace::pool_weights(p)[rows[j]] = weight[j];
      store_route(p, rows[j], t.source, fetches(base, rows, j, lowest) && !(urgent && pass_of(base, rows[j]) == 0),
                  t.token * kTopk + j, id[j]);
    }
  }
}

// A warp brings one token's row and scales to all of its pool rows; lane j < kTopk has that of slot j, or kNoRow, and its
// local expert. `meanwhile` runs while the row is on its way.
template <class Meanwhile>
MEGAMOE_DEVICE void bring(const Params& p, Smem base, const Token& t, u32 row, u32 expert, u32* arrivals,
                          Meanwhile&& meanwhile) {
  constexpr u32 kPieces = (kHidden / 16 + 31) / 32, kScalePieces = (kBlocks1 + 31) / 32;
  const u32 lane = ptx::lane_index();
  const u8* from = arena::x(p, t.source) + static_cast<u64>(t.token) * kHidden;
  const float* from_scales = arena::x_scales(p, t.source) + static_cast<u64>(t.token) * kBlocks1;
  uint4 v[kPieces];
  float scales[kScalePieces];
#pragma unroll
  for (u32 c = 0; c < kPieces; ++c) {
    const u32 at = (c * 32 + lane) * 16;
    v[c] = at < kHidden ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (u32 c = 0; c < kScalePieces; ++c) {
    const u32 b = c * 32 + lane;
    scales[c] = b < kBlocks1 ? from_scales[b] : 0.0f;
  }
  meanwhile();
#pragma unroll 1
  for (u32 j = 0; j < kTopk; ++j) {
    const u32 to = ptx::shfl(row, j);
    if (to == kNoRow) continue;
    u8* pool = workspace::x_pool(p) + static_cast<u64>(to) * kHidden;
#pragma unroll
    for (u32 c = 0; c < kPieces; ++c) {
      const u32 at = (c * 32 + lane) * 16;
      if (at < kHidden) *reinterpret_cast<uint4*>(pool + at) = v[c];
    }
#pragma unroll
    for (u32 c = 0; c < kScalePieces; ++c) {
      const u32 b = c * 32 + lane;
      if (b < kBlocks1) workspace::x_pool_scales(p)[static_cast<u64>(b) * p.pool_rows + to] = scales[c];
    }
  }
  ptx::fence_proxy_async();  // rows and scales, for readers through the async proxy
  ptx::syncwarp();
  if (row != kNoRow) ptx::red_add_release_gpu(arrivals + pool_tile(p, base, expert, row), 1u);
}

// Step 4 of a call with few tokens. A warp lists one token, a lane each slot, and brings its row and scales: every row is
// under way at the same time, and none waits for the table to be complete.
MEGAMOE_DEVICE void list_and_pull(const Params& p, Smem base, Smem places, Smem sources, u32 epoch, u32 all) {
  const u32 lane = ptx::lane_index();
#pragma unroll 1
  for (u32 i = ptx::warp_index() * gridDim.x + blockIdx.x; i < all; i += gridDim.x * kWarps) {
    const Token t = token_of(sources, i);
    const u32 slot = t.token * kTopk + (lane < kTopk ? lane : 0);
    const int id = arena::ids(p, t.source)[slot];
    const u32 position = arena::positions(p, t.source)[slot];
    const float weight = arena::route_weights(p, t.source)[slot];
    const u32 row = lane < kTopk ? pool_row(p, base, places, t.source, id, position) : kNoRow;
    if (!ptx::any(row != kNoRow)) continue;
    bring(p, base, t, row, static_cast<u32>(id) - p.rank * kLocalExperts, arrived(p, bank_of(epoch)), [&] {
      if (row == kNoRow) return;
      workspace::pool_weights(p)[row] = weight;
      store_route(p, row, t.source, false, slot, id);
    });
  }
}

// What list_routes noted, by math warp `warp` of `warps`: the rows of the first pass, to which the first tiles belong.
MEGAMOE_DEVICE void bring_urgent(const Params& p, Smem base, u32 warp, u32 warps) {
  const u32 noted = fact(base, kUrgentTokens), count = noted < kMaxUrgent ? noted : kMaxUrgent, lane = ptx::lane_index();
#pragma unroll 1
  for (u32 i = warp; i < count; i += warps) {
    const Token t{ptx::ld_shared_u32(urgent_token(base, i)), ptx::ld_shared_u32(urgent_token(base, i) + 4)};
    u32 row = lane < kTopk ? targets_of(p, t.source, t.token)[lane] : kNoRow;
    if (kPasses && row != kNoRow && pass_of(base, row) != 0) row = kNoRow;
    const u32 expert = row != kNoRow ? load_route(p, row).expert : 0;
    bring(p, base, t, row, expert, arrived(p, bank_of(fact(base, kEpoch))), [] {});
  }
}

// Steps 4 and, of a call with few tokens, the whole dispatch.
MEGAMOE_DEVICE void list_all(const Params& p, Smem base, Smem places, Smem sources, u32 epoch) {
  const u32 all = all_tokens(base, sources);
  const bool direct = pulls_directly(all);
  if (direct) {
    list_and_pull(p, base, places, sources, epoch, all);
  } else {
    list_routes(p, base, places, sources, all);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    set_fact(base, kDirect, direct);
    if (fact(base, kFailed) == 0) ptx::red_add_release_gpu(barrier_word(p, epoch, kListed), 1u);
  }
}

}  // namespace megamoe
