// Warp collectives over all 32 lanes, and conversions.
#pragma once
#include "base.cuh"

namespace ptx {

constexpr u32 kFullMask = 0xffffffffu;

// True in exactly one lane; which one is the hardware's choice.
MEGAMOE_DEVICE bool elect_one() {
  u32 r;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(r)::"memory");
  return r != 0;
}
MEGAMOE_DEVICE void syncwarp() { __syncwarp(); }
// The same value; what is derived from it is computed here, not kept in registers over a loop around.
MEGAMOE_DEVICE u32 fresh(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
template <class T>
MEGAMOE_DEVICE T* fresh(T* v) {
  asm volatile("" : "+l"(v));
  return v;
}
MEGAMOE_DEVICE u32 ballot(bool p) { return __ballot_sync(kFullMask, p); }
MEGAMOE_DEVICE bool any(bool p) { return __any_sync(kFullMask, p) != 0; }
MEGAMOE_DEVICE bool all(bool p) { return __all_sync(kFullMask, p) != 0; }
template <class T>
MEGAMOE_DEVICE T shfl(T v, int lane) {
  return __shfl_sync(kFullMask, v, lane);
}
template <class T>
MEGAMOE_DEVICE T shfl_xor(T v, int mask) {
  return __shfl_xor_sync(kFullMask, v, mask);
}
template <class T>
MEGAMOE_DEVICE T shfl_up(T v, int delta) {
  return __shfl_up_sync(kFullMask, v, delta);
}
MEGAMOE_DEVICE u32 match_any(u32 v) { return __match_any_sync(kFullMask, v); }
MEGAMOE_DEVICE u32 reduce_add(u32 v) { return __reduce_add_sync(kFullMask, v); }
MEGAMOE_DEVICE u32 reduce_max(u32 v) { return __reduce_max_sync(kFullMask, v); }

// Two BF16 in one word, `lo` in the low half, round to nearest even.
MEGAMOE_DEVICE u32 pack_bf16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// Two e4m3 in one half word, `lo` in the low byte, round to nearest even, saturating; NaN gives 0x7f.
MEGAMOE_DEVICE u16 pack_e4m3x2(float lo, float hi) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
// Larger of the two unsigned halves, each half by itself.
MEGAMOE_DEVICE u32 max_u16x2(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// 2^x, hardware approximation; the same instruction in every plan.
MEGAMOE_DEVICE float ex2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
MEGAMOE_DEVICE float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace ptx
