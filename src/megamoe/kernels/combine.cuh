// Combine: a token's route results, summed in float32 in slot order and rounded to BF16.
//
// It starts when every rank has stored all of its results; this is also what lets the rank go on to the next call.
#pragma once
#include "routing.cuh"

namespace megamoe {

// All ranks have stored their results. One lane of a warp watches them all.
MEGAMOE_DEVICE bool wait_for_ranks(const Params& p, u32 epoch) {
  bool ok = true;
#pragma unroll 1
  for (u32 r = 0; r < kRanks; ++r) {
    const u32* word = arena::done(p, p.rank) + r;
    ok &= spin_until(
        p, Phase::kPeers, r, epoch, [&] { return ptx::ld_acquire_sys(word); }, [&](u32 seen) { return seen == epoch; });
  }
  return ok;
}

MEGAMOE_DEVICE void add_bf16x2(float (&sum)[2], u32 word) {
  sum[0] = __fadd_rn(sum[0], __uint_as_float(word << 16));
  sum[1] = __fadd_rn(sum[1], __uint_as_float(word & 0xffff0000u));
}

// Sums of eight columns, slot by slot. Adding +0 for an absent route changes no sum that starts from +0.
struct Sums {
  float sum[4][2] = {};

  MEGAMOE_DEVICE void add(const uint4& v) {
    add_bf16x2(sum[0], v.x);
    add_bf16x2(sum[1], v.y);
    add_bf16x2(sum[2], v.z);
    add_bf16x2(sum[3], v.w);
  }
  MEGAMOE_DEVICE uint4 rounded() const {
    return make_uint4(ptx::pack_bf16x2(sum[0][0], sum[0][1]), ptx::pack_bf16x2(sum[1][0], sum[1][1]),
                      ptx::pack_bf16x2(sum[2][0], sum[2][1]), ptx::pack_bf16x2(sum[3][0], sum[3][1]));
  }
};

// Columns of a step, and steps at once: where there are many tokens, two keep enough loads under way.
constexpr u32 kWidth = 256, kSteps = kWide && kTopk <= 16 ? 2 : 1;

// Columns [begin, end) of one token, by one warp. A failed call gives NaN.
MEGAMOE_DEVICE void combine_columns(const Params& p, u32 token, u32 begin, u32 end, bool failed) {
  const int* ids = arena::ids(p, p.rank) + token * kTopk;
  const __nv_bfloat16* y = arena::y(p, p.rank) + static_cast<u64>(token) * kTopk * kHidden;
  __nv_bfloat16* out = p.out + token * p.out_stride;
  u32 routes = 0;  // bit j: slot j has a route
#pragma unroll
  for (u32 j = 0; j < kTopk; ++j) routes |= (is_route(ids[j]) ? 1u : 0u) << j;
  for (u32 first = begin + ptx::lane_index() * 8; first < end; first += kSteps * kWidth) {
    uint4 v[kSteps][kTopk];  // all loads before the first sum
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i) {
      const u32 column = first + i * kWidth;
#pragma unroll
      for (u32 j = 0; j < kTopk; ++j) {
        v[i][j] = make_uint4(0, 0, 0, 0);
        if ((routes >> j & 1) != 0 && column < end) {
          v[i][j] = *reinterpret_cast<const uint4*>(y + static_cast<u64>(j) * kHidden + column);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i) {
      const u32 column = first + i * kWidth;
      if (column >= end) continue;
      uint4 result = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);  // NaN
      if (!failed) {
        Sums sums;
#pragma unroll
        for (u32 j = 0; j < kTopk; ++j) sums.add(v[i][j]);
        result = sums.rounded();
      }
      *reinterpret_cast<uint4*>(out + column) = result;
    }
  }
}

// Warp `first` of `step` warps. Where there are fewer tokens than warps, several share the columns of one: a warp has the
// loads of only kSteps * kWidth columns in flight.
MEGAMOE_DEVICE void combine_tokens(const Params& p, u32 tokens, u32 first, u32 step, bool failed) {
  constexpr u32 kSpans = (kHidden + kWidth - 1) / kWidth;
  const u32 sharing = tokens == 0 || tokens >= step ? 1 : step / tokens;
  const u32 spans = (kSpans + sharing - 1) / sharing, pieces = (kSpans + spans - 1) / spans;
  for (u32 i = first; i < tokens * pieces; i += step) {
    const u32 t = i / pieces, begin = (i - t * pieces) * spans * kWidth, end = begin + spans * kWidth;
    combine_columns(p, t, begin, end < kHidden ? end : kHidden, failed);
  }
}

}  // namespace megamoe
