// Vector clocks of the happens-before checker.
//
// One component for each thread, mbarrier (its copies), warpgroup (its WGMMA) and bulk-store queue. A clock has three
// views: what its owner has seen, and which of that the async proxy has seen in shared and in global memory (only proxy
// fences and completed asynchronous operations advance these two).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "sim.h"

namespace sim {

enum View : u32 { kSeen = 0, kAsyncShared = 1, kAsyncGlobal = 2, kViews = 3 };

// Components in use, and the distance between two views of one clock.
struct ClockShape {
  u32 used = 0, stride = 0;
};
extern ClockShape clock_shape;

using Clock = u32*;
using OwnedClock = std::shared_ptr<u32[]>;

inline u32 component(const u32* clock, View view, u32 index) { return clock[view * clock_shape.stride + index]; }

inline void raise(u32* clock, u32 index, u32 value) {
  for (u32 v = 0; v < kViews; ++v) {
    u32& c = clock[v * clock_shape.stride + index];
    c = std::max(c, value);
  }
}

inline void join_view(u32* __restrict a, const u32* __restrict b) {
  const u32 n = clock_shape.used;
  for (u32 i = 0; i < n; ++i) a[i] = std::max(a[i], b[i]);
}
inline void join(u32* a, const u32* b) {
  if (a == b) return;
  for (u32 v = 0; v < kViews; ++v) join_view(a + v * clock_shape.stride, b + v * clock_shape.stride);
}
inline void meet(u32* a, const u32* b) {
  const u32 n = clock_shape.used;
  for (u32 v = 0; v < kViews; ++v) {
    u32* x = a + v * clock_shape.stride;
    const u32* y = b + v * clock_shape.stride;
    for (u32 i = 0; i < n; ++i) x[i] = std::min(x[i], y[i]);
  }
}
inline void copy_clock(u32* a, const u32* b) {
  for (u32 v = 0; v < kViews; ++v) {
    std::memcpy(a + v * clock_shape.stride, b + v * clock_shape.stride, clock_shape.used * sizeof(u32));
  }
}
// Components that come into use later are zero in every clock.
inline OwnedClock new_clock() {
  auto* p = static_cast<u32*>(std::calloc(kViews * static_cast<size_t>(clock_shape.stride), sizeof(u32)));
  return OwnedClock(p, [](u32* q) { std::free(q); });
}
inline OwnedClock clone(const u32* b) {
  OwnedClock a = new_clock();
  copy_clock(a.get(), b);
  return a;
}

}  // namespace sim
