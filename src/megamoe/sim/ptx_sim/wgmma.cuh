// WGMMA: asynchronous e4m3 matrix products of one warpgroup, float32 accumulators in registers.
#pragma once
#include "base.cuh"

namespace ptx {

struct Desc {
  const u8* pointer;
};
MEGAMOE_DEVICE Desc make_desc(Smem tile) { return {sim::check_tile(tile.pointer)}; }
MEGAMOE_DEVICE Desc operator+(Desc d, u32 bytes) { return {d.pointer + bytes}; }

template <int R>
MEGAMOE_DEVICE void pin(float (&)[R]) {}

template <int R>
MEGAMOE_DEVICE void wgmma_fence(float (&acc)[R]) {
  sim::wgmma_fence(acc, R);
}
MEGAMOE_DEVICE void wgmma_commit() { sim::wgmma_commit(); }
template <int Pending, int R>
MEGAMOE_DEVICE void wgmma_wait(float (&acc)[R]) {
  sim::wgmma_wait(Pending, acc);
}

// N = 2 R must be one that wgmma_gen.cuh has.
template <int R>
constexpr bool kWidthInUse = (R % 4 == 0 && R <= 32) || R == 48 || R == 64 || R == 96 || R == 128;

template <int R>
MEGAMOE_DEVICE void wgmma_e4m3(float (&acc)[R], Desc a, Desc b, bool accumulate) {
  static_assert(kWidthInUse<R>, "add the width to tools/generate_wgmma.py");
  sim::wgmma(acc, R, a.pointer, b.pointer, accumulate);
}
template <int R>
MEGAMOE_DEVICE void wgmma_e4m3(float (&acc)[R], const u32 (&a)[4], Desc b, bool accumulate) {
  static_assert(kWidthInUse<R>, "add the width to tools/generate_wgmma.py");
  sim::wgmma_register_a(acc, R, a, b.pointer, accumulate);
}

}  // namespace ptx
