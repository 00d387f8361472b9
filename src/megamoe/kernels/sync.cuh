// Waits between CTAs and ranks, each with a deadline and an abort word; counters banked by epoch.
//
// The epoch is a counter in the rank's workspace that the kernel itself advances when it ends, so a replayed graph needs
// nothing from the host. A call with epoch n uses bank n % 2 of every local counter and clears the other bank, which the
// call before used and the next will use. What peers write carries the epoch in the data and is never cleared.
#pragma once
#include "layout.cuh"

namespace megamoe {

// What a wait is for; part of the record of an expired one.
enum class Phase : u32 {
  kCounts = 1, kOwnCounts, kList, kRows, kIntermediate, kPeers, kFirsts, kResults, kRoom, kHandover, kOwnResults
};

// Counters of one bank. From kExpertStored on one for each local expert.
enum Barrier : u32 {
  kCounted, kListed, kTaken, kStored, kCombining, kExited, kExpertStored,
  kBarrierWords = kExpertStored + kLocalExperts
};

MEGAMOE_DEVICE u32 bank_of(u32 epoch) { return epoch % kBanks; }
MEGAMOE_DEVICE u32* barrier_word(const Params& p, u32 epoch, Barrier which) {
  return workspace::barrier(p) + bank_of(epoch) * kBarrierWords + which;
}
MEGAMOE_DEVICE u32* own_counts(const Params& p, u32 bank) { return workspace::own_counts(p) + bank * kExperts; }
MEGAMOE_DEVICE u32* arrived(const Params& p, u32 bank) { return workspace::arrived(p) + bank * p.pool_tiles; }
MEGAMOE_DEVICE u32* halves(const Params& p, u32 bank) { return workspace::halves(p) + bank * p.pool_tiles; }
// Stored halves of the intermediates of a pass (kFirsts) and of its results (kResults).
MEGAMOE_DEVICE u32* pass_done(const Params& p, u32 bank, Phase which, u32 pass) {
  return workspace::passes(p) + (bank * 2 + (which == Phase::kResults ? 1 : 0)) * kMaxPasses + pass;
}

MEGAMOE_DEVICE bool aborted(const Params& p) { return ptx::ld_relaxed_sys(arena::abort(p, p.rank)) != 0; }
// Who gave up, and in which phase; never 0. The host of a rank that refuses a call writes the same word with phase 0.
MEGAMOE_DEVICE void raise_abort(const Params& p, Phase phase) {
#pragma unroll 1  // the rarest path of every wait: registers count, speed does not, so no address is kept for it
  for (u32 r = 0; r < kRanks; ++r) {
    ptx::st_relaxed_sys(arena::abort(p, ptx::fresh(r)), static_cast<u32>(phase) << 8 | (ptx::fresh(p.rank) + 1));
  }
}

// Words of the host-visible report, and of the layer's errors. kAborted is a copy of the abort word.
enum Report : u32 { kExpired, kExpiredRank, kExpiredPhase, kExpiredIndex, kAwaited, kSeen, kAborted };
enum Errors : u32 { kBadId, kBadTokenCount };

// The first wait that expired; word kExpired becomes 1 when the others are written.
MEGAMOE_DEVICE void report_expired(const Params& p, Phase phase, u32 index, u32 awaited, u32 seen) {
  if (ptx::atom_cas_acq_rel_sys(p.report + kExpired, 0, 2) != 0) return;
  ptx::st_relaxed_sys(p.report + kExpiredRank, p.rank);
  ptx::st_relaxed_sys(p.report + kExpiredPhase, static_cast<u32>(phase));
  ptx::st_relaxed_sys(p.report + kExpiredIndex, index);
  ptx::st_relaxed_sys(p.report + kAwaited, awaited);
  ptx::st_relaxed_sys(p.report + kSeen, seen);
  ptx::st_release_sys(p.report + kExpired, 1u);
}

// Looks at the awaited word between two looks at the abort word and the deadline.
constexpr u32 kLooks = 8;

// Waits until `reached(load())`. `load` is an acquire of one word. False: the wait expired, here or elsewhere. The caller
// then goes on only as far as other roles need it to end, and counts nothing as done: so a rank that sees all ranks' done
// words has right results, and all others fill their output with NaN. Every address formed from stale data is valid.
template <class Load, class Reached>
MEGAMOE_DEVICE bool spin_before(u64 deadline, const Params& p, Phase phase, u32 index, u32 awaited, Load&& load,
                                Reached&& reached) {
#pragma unroll 1
  for (u32 looks = 1;; ++looks) {
    auto seen = load();
    if (reached(seen)) return true;
    if (looks % kLooks != 0) continue;  // the abort word and the clock take as long as the look itself
    if (aborted(p)) return false;
    if (ptx::deadline_passed(deadline)) {
      report_expired(p, phase, index, awaited, static_cast<u32>(seen));
      raise_abort(p, phase);
      return false;
    }
    ptx::nanosleep(20);
  }
}
template <class Load, class Reached>
MEGAMOE_DEVICE bool spin_until(const Params& p, Phase phase, u32 index, u32 awaited, Load&& load, Reached&& reached) {
  if (reached(load())) return true;
  return spin_before(ptx::deadline_after(p.timeout_ns), p, phase, index, awaited, load, reached);
}

// The same end for a loop that has other things to do while it waits; then it waits for what is left of the time.
class Patience {
 public:
  MEGAMOE_DEVICE explicit Patience(const Params& p) : p_(p), deadline_(ptx::deadline_after(p.timeout_ns)) {}
  MEGAMOE_DEVICE bool is_over() const { return aborted(p_) || ptx::deadline_passed(deadline_); }
  template <class Load, class Reached>
  MEGAMOE_DEVICE bool spin(Phase phase, u32 index, u32 awaited, Load&& load, Reached&& reached) const {
    return spin_before(deadline_, p_, phase, index, awaited, load, reached);
  }

 private:
  const Params& p_;
  u64 deadline_;
};

// For the host of a rank whose call ends through the abort word: its own report of an expired wait stays empty.
MEGAMOE_DEVICE void report_aborted(const Params& p) {
  ptx::st_relaxed_sys(p.report + kAborted, ptx::ld_relaxed_sys(arena::abort(p, p.rank)));
}

// Whether a wait of this CTA failed. Atomic: one role may set it while another one, an earlier tile in hand, looks.
MEGAMOE_DEVICE void set_failed(Smem base) { ptx::atom_add_shared(base + (kFacts + kFailed * 4), 1u); }
MEGAMOE_DEVICE bool failed(Smem base) { return ptx::atom_add_shared(base + (kFacts + kFailed * 4), 0u) != 0; }

// A counter on this GPU reaches `awaited`.
MEGAMOE_DEVICE bool wait_count(const Params& p, Phase phase, u32 index, const u32* counter, u32 awaited) {
  return spin_until(
      p, phase, index, awaited, [&] { return ptx::ld_acquire_gpu(counter); },
      [&](u32 seen) { return seen >= awaited; });
}

// All tiles of the pass before `pass` are through their first (kFirsts) or second GEMM (kResults), of `columns` weight tiles
// each: its rows of token rows or of the intermediate are no longer read.
MEGAMOE_DEVICE bool wait_for_pass(const Params& p, Smem base, Phase which, u32 pass, u32 columns) {
  if (pass == 0) return true;
  return wait_count(p, which, pass - 1, pass_done(p, bank_of(fact(base, kEpoch)), which, pass - 1),
                    fact(base, kPassTiles) * columns * kMathWarpgroups);
}
// A store warp has stored its half of a tile.
MEGAMOE_DEVICE void count_for_pass(const Params& p, Smem base, Phase which, u32 pass) {
  if (kPasses && fact(base, kPassCount) > 1) {
    ptx::red_add_release_gpu(pass_done(p, bank_of(fact(base, kEpoch)), which, pass), 1u);
  }
}

// This rank's results are all stored: every rank may combine.
MEGAMOE_DEVICE void announce_done(const Params& p, u32 epoch) {
#pragma unroll 1
  for (u32 r = 0; r < kRanks; ++r) ptx::st_release_sys(arena::done(p, ptx::fresh(r)) + p.rank, epoch);
}

// All results of a local expert are stored, others of this rank perhaps not yet.
MEGAMOE_DEVICE void announce_expert(const Params& p, u32 epoch, u32 expert) {
#pragma unroll 1
  for (u32 r = 0; r < kRanks; ++r) {
    ptx::st_release_sys(arena::finished(p, ptx::fresh(r)) + p.rank * kLocalExperts + expert, epoch);
  }
}

// Last act of the CTA's thread 0: the last CTA to leave advances the epoch.
MEGAMOE_DEVICE void leave(const Params& p, u32 epoch) {
  if (ptx::atom_add_acq_rel_gpu(barrier_word(p, epoch, kExited), 1u) + 1 == gridDim.x) {
    ptx::st_release_gpu(workspace::epoch(p), epoch);
  }
}

// Clears the bank of the next call.
MEGAMOE_DEVICE void clear_next_bank(const Params& p, u32 epoch) {
  const u32 bank = bank_of(epoch + 1), first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  for (u32 i = first; i < kBarrierWords; i += step) workspace::barrier(p)[bank * kBarrierWords + i] = 0;
  for (u32 i = first; i < kExperts; i += step) own_counts(p, bank)[i] = 0;
  for (u32 i = first; i < 2 * kMaxPasses; i += step) pass_done(p, bank, Phase::kFirsts, 0)[i] = 0;  // any plan may be next
  for (u32 i = first; i < p.pool_tiles; i += step) {
    arrived(p, bank)[i] = 0;
    halves(p, bank)[i] = 0;
  }
}

}  // namespace megamoe
