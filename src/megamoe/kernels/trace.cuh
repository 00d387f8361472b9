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
};

enum TraceRole : u32 { kTraceLoader, kTraceStore0, kTraceStore1, kTraceDispatch, kTraceMath0, kTraceMath1, kTraceRoles };

class Trace {
 public:
  MEGAMOE_DEVICE Trace(const Params& p, TraceRole role, bool records) {
    if constexpr (config::kTrace) {
      row_ = records ? workspace::trace(p) + (blockIdx.x * kTraceRoles + role) * kTraceEvents : nullptr;
      count_ = 0;
    }
  }
  MEGAMOE_DEVICE void operator()(Event event) {
    if constexpr (config::kTrace) {
      if (row_ != nullptr && count_ + 1 < kTraceEvents) {
        row_[++count_] = ptx::globaltimer() << 8 | static_cast<u32>(event);
        row_[0] = count_;
      }
    }
  }

 private:
  u64* row_;
  u32 count_;
};

}  // namespace megamoe
