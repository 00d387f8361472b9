// Combine: a token's route results, summed in float32 in slot order and rounded to BF16.
//
// It ends when every rank has stored all of its results; this is also what lets the rank go on to the next call. Tokens whose
// experts are complete need not wait for that. Lean calls, of a rank that is a group by itself, have a simpler one.
#pragma once
#include "routing.cuh"
#include "trace.cuh"

namespace megamoe {

// All ranks have stored their results. One lane of a warp watches them all.
MEGAMOE_DEVICE bool wait_for_ranks(const Params& p, u32 epoch, const Patience& patience) {
  bool ok = true;
#pragma unroll 1
  for (u32 r = 0; r < kRanks; ++r) {
    const u32* word = arena::done(p, p.rank) + r;
    ok &= patience.spin(
        Phase::kPeers, r, epoch, [&] { return ptx::ld_acquire_sys(word); }, [&](u32 seen) { return seen == epoch; });
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
constexpr u32 kSpans = (kHidden + kWidth - 1) / kWidth;  // of kWidth columns in a row

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

// The combine of one warp, `first` of `step` warps. A piece is a token, or where there are few tokens a part of its columns: a
// warp has the loads of only kSteps * kWidth columns in flight.
//
// A warp has no tile left when it comes here. Until all ranks are done it takes pieces from a counter (kEarlyCombine), so that
// those who are early do most. A token whose experts are not all complete it keeps and looks at again; but few of them, for
// the end comes to all of them at once, and what is left then shall be dealt evenly. Piece n of those lies in lane n's `kept_`, the n-th one
// that the warp has combined early in lane n's `early_`: if the call fails, the warp takes it back.
class Combine {
 public:
  MEGAMOE_DEVICE Combine(const Params& p, u32 epoch, u32 tokens, u32 first, u32 step)
      : p_(p), epoch_(epoch), next_(first), step_(step), ahead_(0), kept_(0), early_(0), keeps_(0), earlies_(0),
        done_(false), failed_(false), more_(kEarlyCombine) {
    const u32 wanted = step * kPiecesOfWarp, sharing = tokens == 0 || tokens >= wanted ? 1 : wanted / tokens;
    spans_ = (kSpans + sharing - 1) / sharing;
    pieces_ = (kSpans + spans_ - 1) / spans_;
    all_ = tokens * pieces_;
    if (kEarlyCombine) take();
  }

  MEGAMOE_DEVICE void run(Trace& trace) {
    const Patience patience(p_);
    bool combining = false;
#pragma unroll 1
    for (;;) {
      const u32 i = find();
      if (i < all_) {
        if (!combining) trace(done_ ? Event::kPeers : Event::kExperts);
        combining = true;
        const u32 t = i / pieces_, begin = (i - t * pieces_) * spans_ * kWidth, end = begin + spans_ * kWidth;
        combine_columns(p_, t, begin, end < kHidden ? end : kHidden, failed_);
        continue;
      }
      if (combining) trace(Event::kCombined);
      combining = false;
      if (done_) break;
      if ((more_ || keeps_ > 0) && !ranks_are_done() &&
          !ptx::any(ptx::lane_index() == 0 && patience.is_over())) {
        ptx::nanosleep(200);
        continue;
      }
      failed_ = !wait(patience);
      done_ = true;
    }
  }

 private:
  static constexpr u32 kNone = 0xffffffffu;
  static constexpr u32 kKept = 2, kMostEarly = 32;
  static constexpr u32 kPiecesOfWarp = kEarlyCombine ? 4 : 1;  // at least so many, or what is left at the end is too coarse

  // A piece that can be combined now.
  MEGAMOE_DEVICE u32 find() {
    if constexpr (!kEarlyCombine) {
      const u32 i = next_;
      if (done_) next_ += step_;
      return done_ ? i : kNone;
    }
    if (failed_ && earlies_ > 0) return ptx::shfl(early_, --earlies_);
    if (!done_ && earlies_ == kMostEarly) return kNone;
    while (more_ && (done_ || keeps_ < kKept)) {
      const u32 i = take();
      more_ = i < all_;
      if (!more_) break;
      if (is_ready(i)) return i;
      if (ptx::lane_index() == keeps_) kept_ = i;
      ++keeps_;
    }
    for (u32 n = 0; n < keeps_; ++n) {
      const u32 i = ptx::shfl(kept_, n);
      if (!is_ready(i)) continue;
      const u32 last = ptx::shfl(kept_, --keeps_);
      if (ptx::lane_index() == n) kept_ = last;
      return i;
    }
    return kNone;
  }
  // Notes a piece that is combined early.
  MEGAMOE_DEVICE bool is_ready(u32 i) {
    if (done_) return true;
    if (!is_complete(i / pieces_)) return false;
    if (ptx::lane_index() == earlies_) early_ = i;
    ++earlies_;
    return true;
  }
  // The piece taken by the call before; the next one's number is on its way meanwhile.
  MEGAMOE_DEVICE u32 take() {
    const u32 i = ptx::shfl(ahead_, 0);
    if (ptx::lane_index() == 0) ahead_ = ptx::atom_inc_relaxed_gpu(barrier_word(p_, epoch_, kCombining));
    return i;
  }

  // All ranks are done, and this call has not failed.
  MEGAMOE_DEVICE bool wait(const Patience& patience) {
    bool ok = true;
    if (ptx::lane_index() == 0) {
      ok = wait_for_ranks(p_, epoch_, patience) && !aborted(p_);
      if (!ok) report_aborted(p_);
    }
    ok = ptx::all(ok);
    ptx::syncwarp();  // lane 0's acquire is for all lanes; a vote orders no memory
    return ok;
  }

  // A look, no wait.
  MEGAMOE_DEVICE bool ranks_are_done() const {
    const u32 lane = ptx::lane_index();
    return ptx::all(lane >= kRanks || ptx::ld_relaxed_sys(arena::done(p_, p_.rank) + lane) == epoch_);
  }
  MEGAMOE_DEVICE bool is_complete(u32 token) const {
    const u32 lane = ptx::lane_index();
    const int id = lane < kTopk ? arena::ids(p_, p_.rank)[token * kTopk + lane] : -1;
    const bool complete =
        ptx::all(!is_route(id) || ptx::ld_acquire_sys(arena::finished(p_, p_.rank) + id) == epoch_);
    ptx::syncwarp();  // each lane's acquire is for all lanes
    return complete;
  }

  const Params& p_;
  u32 epoch_, next_, step_, spans_, pieces_, all_;
  u32 ahead_, kept_, early_, keeps_, earlies_;
  bool done_, failed_;
  bool more_;  // pieces that nobody has taken
};

// The combine of a lean call, by the math warps of a CTA. Nobody but this rank has results for it, so one lane of each CTA that
// has columns to sum waits for the counter of result tiles itself: the last store warp's word about it would come later.
MEGAMOE_DEVICE void combine_lean(const Params& p, Smem base, u32 tokens, Trace& trace) {
  const u32 all = tokens * kSpans, warp = ptx::warp_index() - 4;
  if (blockIdx.x * kMathWarps >= all) return;
  if (threadIdx.x == kThreads - kMathThreads) {
    const u32 epoch = fact(base, kEpoch), results = fact(base, kTotalTiles) * (kTiles2 * kMathWarpgroups);
    const Patience patience(p);
    const auto wait = [&](Phase phase, Barrier which, u32 awaited) {
      const u32* const word = barrier_word(p, epoch, which);
      return patience.spin(
          phase, 0, awaited, [&] { return ptx::ld_acquire_gpu(word); }, [&](u32 seen) { return seen >= awaited; });
    };
    // `listed` for the ids: the CTA that staged them is among those that have.
    const bool ok = wait(Phase::kList, kListed, gridDim.x) && wait(Phase::kOwnResults, kStored, results) && !aborted(p);
    if (!ok) report_aborted(p);
    set_fact(base, kComplete, ok);
  }
  ptx::named_barrier_sync(kMathBarrier, kMathThreads);
  trace(Event::kPeers);
  const bool failed = fact(base, kComplete) == 0;
  for (u32 i = blockIdx.x * kMathWarps + warp; i < all; i += gridDim.x * kMathWarps) {
    const u32 token = i / kSpans, begin = (i - token * kSpans) * kWidth, end = begin + kWidth;
    combine_columns(p, token, begin, end < kHidden ? end : kHidden, failed);
  }
  trace(Event::kCombined);
}

}  // namespace megamoe
