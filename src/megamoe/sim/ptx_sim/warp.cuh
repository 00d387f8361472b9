// Warp collectives over all 32 lanes, and conversions.
#pragma once
#include "base.cuh"

namespace ptx {

constexpr u32 kFullMask = 0xffffffffu;

MEGAMOE_DEVICE bool elect_one() { return sim::elect(kFullMask); }
MEGAMOE_DEVICE void syncwarp() { sim::syncwarp(kFullMask); }
MEGAMOE_DEVICE u32 fresh(u32 v) { return v; }
template <class T>
MEGAMOE_DEVICE T* fresh(T* v) {
  return v;
}
MEGAMOE_DEVICE u32 ballot(bool p) { return sim::ballot(kFullMask, p); }
MEGAMOE_DEVICE bool any(bool p) { return sim::ballot(kFullMask, p) != 0; }
MEGAMOE_DEVICE bool all(bool p) { return sim::ballot(kFullMask, p) == kFullMask; }

template <class T>
MEGAMOE_DEVICE T shuffle_from(T v, int lane) {
  static_assert(sizeof(T) <= sizeof(u64), "one register or two");
  u64 bits = 0;
  __builtin_memcpy(&bits, &v, sizeof(T));
  bits = sim::shuffle(kFullMask, bits, lane);
  __builtin_memcpy(&v, &bits, sizeof(T));
  return v;
}
template <class T>
MEGAMOE_DEVICE T shfl(T v, int lane) {
  return shuffle_from(v, lane);
}
template <class T>
MEGAMOE_DEVICE T shfl_xor(T v, int mask) {
  return shuffle_from(v, static_cast<int>(lane_index()) ^ mask);
}
template <class T>
MEGAMOE_DEVICE T shfl_up(T v, int delta) {
  const int lane = static_cast<int>(lane_index());
  return shuffle_from(v, lane < delta ? lane : lane - delta);
}
MEGAMOE_DEVICE u32 match_any(u32 v) { return sim::match_any(kFullMask, v); }
MEGAMOE_DEVICE u32 reduce_add(u32 v) { return sim::reduce_add(kFullMask, v); }
MEGAMOE_DEVICE u32 reduce_max(u32 v) { return sim::reduce_max(kFullMask, v); }

MEGAMOE_DEVICE u32 max_u16x2(u32 a, u32 b) {
  const u32 low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
  const u32 high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return low | high << 16;
}

MEGAMOE_DEVICE u32 bf16_bits(float v) {
  const u32 bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
MEGAMOE_DEVICE u32 pack_bf16x2(float lo, float hi) { return bf16_bits(lo) | bf16_bits(hi) << 16; }
// NVIDIA's own host conversion, but for the sign of NaN.
MEGAMOE_DEVICE u16 e4m3_bits(float v) { return v != v ? 0x7f : __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); }
MEGAMOE_DEVICE u16 pack_e4m3x2(float lo, float hi) {
  return static_cast<u16>(e4m3_bits(lo) | e4m3_bits(hi) << 8);
}
// The hardware's approximations are within 2 ulp of these; docs/simulator.md states the measured difference.
MEGAMOE_DEVICE float flush(float v) { return __builtin_fabsf(v) < 1.17549435e-38f ? __builtin_copysignf(0.0f, v) : v; }
MEGAMOE_DEVICE float ex2_approx(float x) { return flush(__builtin_exp2f(flush(x))); }
MEGAMOE_DEVICE float rcp_approx(float x) { return flush(1.0f / flush(x)); }

}  // namespace ptx
