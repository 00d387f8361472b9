// Time stamps from inside the kernel, for megamoe trace. Without config::kTrace every call here is empty.
//
// Each role of a CTA has a row of kTraceEvents words in the workspace: nanoseconds << 8 | event, the first word the count.
// Events past the end of a row are dropped. Only one lane of a role records.
#pragma once
#include "layout.cuh"

namespace megamoe {

// An event marks the end of what its role did since its event before.
enum class Event : u32 {
  kStart = 1,   // the CTA's first instruction
  kCounted,     // own routes counted
  kLaidOut,     // counts of all ranks seen, pool laid out
  kListed,      // route table written
  kWait,        // a wait for another CTA or rank
  kRows,        // dispatch: one round of token rows
  kFeed,        // loader: copies of one tile issued
  kFirst,       // math: main loop of a first GEMM tile
  kSecond,      // math: main loop of a second GEMM tile
  kEpilogue,    // math: epilogue of a tile
  kStored,      // store warp: rows of a tile written
  kPeers,       // math: all ranks' results seen
  kCombined,    // math: tokens combined
  kExperts,     // math: a token's experts seen complete, before all ranks are done
};

enum TraceRole : u32 { kTraceLoader, kTraceStore0, kTraceStore1, kTraceDispatch, kTraceMath0, kTraceMath1, kTraceRoles };

// State is one register: the math warps have few to spare. It is the index of the next stamp in the whole array.
class Trace {
 public:
  MEGAMOE_DEVICE Trace(const Params& p, TraceRole role, bool records) : p_(p) {
    if constexpr (config::kTrace) next_ = records ? (blockIdx.x * kTraceRoles + role) * kTraceEvents + 1 : 0;
  }
  MEGAMOE_DEVICE void operator()(Event event) {
    if constexpr (config::kTrace) {
      const u32 count = next_ % kTraceEvents;  // 0: this thread does not record, or the row is full
      if (count == 0) return;
      u64* const words = workspace::trace(p_);
      words[next_] = ptx::globaltimer() << 8 | static_cast<u32>(event);
      *reinterpret_cast<u32*>(words + next_ - count) = count;  // the upper half stays zero
      ++next_;
    }
  }

 private:
  const Params& p_;
  u32 next_;
};

}  // namespace megamoe
