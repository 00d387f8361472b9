// Vector clocks of the happens-before checker.
//
// One component for each thread, mbarrier (its copies), warpgroup (its WGMMA) and bulk-store queue. A clock has three
// views: what its owner has seen, and which of that the async proxy has seen in shared and in global memory (only proxy
// fences and completed asynchronous operations advance these two).
//
// A clock is a table of blocks that never change once made, so clocks that agree share them: to join two clocks is mostly
// to find that their pointers are equal. Blocks live until the run ends. A thread's own component is kept beside its clock
// (Fiber::tick) and written into it by settle().
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "sim.h"

namespace sim {

enum View : u32 { kSeen = 0, kAsyncShared = 1, kAsyncGlobal = 2, kViews = 3 };

constexpr u32 kBlockTicks = 64;
struct ClockBlock {
  u32 tick[kBlockTicks];
};

// Components in use and at most, and blocks of one view.
struct ClockShape {
  u32 used = 0, most = 0, blocks = 0;
};
extern ClockShape clock_shape;

using Clock = const ClockBlock**;  // [view][block]; null is all zeros
using OwnedClock = std::shared_ptr<const ClockBlock*[]>;

ClockBlock* new_block();
void forget_blocks();

inline u32 tick_in(const ClockBlock* const* view, u32 index) {
  const ClockBlock* b = view[index / kBlockTicks];
  return b ? b->tick[index % kBlockTicks] : 0;
}
inline const ClockBlock* const* view_of(const ClockBlock* const* clock, View view) { return clock + view * clock_shape.blocks; }
inline u32 component(const ClockBlock* const* clock, View view, u32 index) { return tick_in(view_of(clock, view), index); }

inline ClockBlock* copy_block(const ClockBlock* b) {
  ClockBlock* made = new_block();
  if (b) *made = *b;
  else std::memset(made, 0, sizeof *made);
  return made;
}
inline void set_component(Clock clock, View view, u32 index, u32 value) {
  const ClockBlock*& b = clock[view * clock_shape.blocks + index / kBlockTicks];
  ClockBlock* made = copy_block(b);
  made->tick[index % kBlockTicks] = value;
  b = made;
}
inline void raise(Clock clock, u32 index, u32 value) {
  for (const View view : {kSeen, kAsyncShared, kAsyncGlobal}) {
    if (component(clock, view, index) < value) set_component(clock, view, index, value);
  }
}

inline const ClockBlock* join_blocks(const ClockBlock* a, const ClockBlock* b) {
  if (a == b || !b) return a;
  if (!a) return b;
  bool a_covers = true, b_covers = true;
  for (u32 i = 0; i < kBlockTicks; ++i) {
    a_covers &= a->tick[i] >= b->tick[i];
    b_covers &= b->tick[i] >= a->tick[i];
  }
  if (a_covers) return a;
  if (b_covers) return b;
  ClockBlock* made = new_block();
  for (u32 i = 0; i < kBlockTicks; ++i) made->tick[i] = std::max(a->tick[i], b->tick[i]);
  return made;
}
inline const ClockBlock* meet_blocks(const ClockBlock* a, const ClockBlock* b) {
  if (a == b || !a) return a;
  if (!b) return nullptr;
  ClockBlock* made = new_block();
  for (u32 i = 0; i < kBlockTicks; ++i) made->tick[i] = std::min(a->tick[i], b->tick[i]);
  return made;
}

inline void join_view(const ClockBlock** a, const ClockBlock* const* b) {
  for (u32 i = 0; i < clock_shape.blocks; ++i) a[i] = join_blocks(a[i], b[i]);
}
inline void join(Clock a, const ClockBlock* const* b) {
  for (u32 i = 0; i < kViews * clock_shape.blocks; ++i) a[i] = join_blocks(a[i], b[i]);
}
inline void meet(Clock a, const ClockBlock* const* b) {
  for (u32 i = 0; i < kViews * clock_shape.blocks; ++i) a[i] = meet_blocks(a[i], b[i]);
}
inline void copy_clock(Clock a, const ClockBlock* const* b) {
  std::memcpy(a, b, kViews * clock_shape.blocks * sizeof *a);
}
inline OwnedClock new_clock() {
  auto* p = static_cast<Clock>(std::calloc(kViews * static_cast<size_t>(clock_shape.blocks), sizeof(ClockBlock*)));
  return OwnedClock(p, [](Clock q) { std::free(q); });
}
inline OwnedClock clone(const ClockBlock* const* b) {
  OwnedClock a = new_clock();
  copy_clock(a.get(), b);
  return a;
}

}  // namespace sim
