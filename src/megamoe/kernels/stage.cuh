// Quantising BF16 rows: to e4m3 rows and one float32 scale per 128 columns. Shared by the staging kernels and by the fused
// kernel, which stages its rank's inputs itself.
//
// A group of 128 columns belongs to half a warp: a lane loads 16 bytes (8 columns), four shuffles find the group's
// largest magnitude, and the lane stores 8 bytes. A warp takes 2 * kCount consecutive groups, all their loads issued
// before the first is used; there is no shared memory and no barrier.
#pragma once
#include "quantize.cuh"

namespace staging {

using ptx::u32;
using ptx::u8;

constexpr u32 kHalf = 16;       // lanes of one group
constexpr u32 kLoadBytes = 16;  // a lane's columns in BF16
constexpr u32 kStoreBytes = 8;  // the same in e4m3

MEGAMOE_DEVICE u32 largest_magnitude(const uint4& v) {
  u32 m = quantize::max_magnitude_bf16x2(0, v.x);
  m = quantize::max_magnitude_bf16x2(m, v.y);
  m = quantize::max_magnitude_bf16x2(m, v.z);
  return quantize::max_magnitude_bf16x2(m, v.w);
}

MEGAMOE_DEVICE uint2 to_e4m3x8(const uint4& v, float multiplier) {
  return {quantize::to_e4m3x4(v.x, v.y, multiplier), quantize::to_e4m3x4(v.z, v.w, multiplier)};
}

// Where rows come from and go to. Strides are bytes from one row to the next. The rows may be overwritten later in the same
// launch (`out` may be `x`), so they are read by ordinary loads.
struct Rows {
  const u8* x;
  u8* q;
  u8* s;
  long long x_stride, q_stride, s_stride;
};

// A count on the device, held in [0, rows]; null: all rows.
MEGAMOE_DEVICE u32 counted(const int* num_tokens, u32 rows) {
  if (num_tokens == nullptr) return rows;
  const int count = *num_tokens;
  return count < 0 ? 0 : (static_cast<u32>(count) < rows ? static_cast<u32>(count) : rows);
}

constexpr int kNotAnId = -0x7fffffff - 1;  // stands for every id that 32 bits cannot hold: the fused kernel reports it

// The expert id at `at`, which has 64 bits or 32.
MEGAMOE_DEVICE int load_id(const u8* at, bool wide) {
  if (!wide) return *reinterpret_cast<const int*>(at);
  const long long id = *reinterpret_cast<const long long*>(at);
  return id == static_cast<int>(id) ? static_cast<int>(id) : kNotAnId;
}

// The groups of warp `warp`. Rows from `rows` on are not read, rows from the count on are not written: a caller that knows
// the count already gives it as `rows`. `power_scales`: scales are powers of two.
template <u32 kHidden, int kCount>
MEGAMOE_DEVICE void stage_rows(const Rows& a, u32 warp, u32 rows, const int* num_tokens, bool power_scales) {
  static_assert(kHidden % quantize::kGroup == 0, "a row must be whole groups");
  static_assert(kCount >= 1 && kCount <= 16, "one lane of a half stores one scale");
  constexpr u32 kGroupsPerRow = kHidden / quantize::kGroup;
  const u32 lane = ptx::lane_index() % kHalf;
  const u32 half = ptx::lane_index() / kHalf;
  const u32 first = warp * (2 * kCount) + half;  // this half's groups: first, first + 2, ...

  uint4 v[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const u32 row = (first + 2 * i) / kGroupsPerRow, group = (first + 2 * i) % kGroupsPerRow;
    v[i] = make_uint4(0, 0, 0, 0);
    if (row < rows) {
      v[i] = *reinterpret_cast<const uint4*>(a.x + row * a.x_stride + group * (2 * quantize::kGroup) + lane * kLoadBytes);
    }
  }
  // Read behind the rows' loads: rows past the count are read (they exist) but not written.
  const u32 tokens = counted(num_tokens, rows);

  // Lane i of a half computes the scale of its half's i-th group, so that one pair of divisions serves all of them.
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    u32 m = largest_magnitude(v[i]);
#pragma unroll
    for (u32 step = kHalf / 2; step > 0; step /= 2) m = ptx::max_u16x2(m, ptx::shfl_xor(m, step));
    if (lane % kCount == i) own = m;
  }
  const u32 amax = quantize::amax_bits(own);
  const quantize::Scale scale = power_scales ? quantize::group_scale<true>(amax) : quantize::group_scale<false>(amax);

#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float multiplier = ptx::shfl(scale.multiplier, half * kHalf + i);
    const uint2 bytes = to_e4m3x8(v[i], multiplier);
    const u32 row = (first + 2 * i) / kGroupsPerRow, group = (first + 2 * i) % kGroupsPerRow;
    if (row < tokens) {
      *reinterpret_cast<uint2*>(a.q + row * a.q_stride + group * quantize::kGroup + lane * kStoreBytes) = bytes;
    }
  }
  const u32 row = (first + 2 * lane) / kGroupsPerRow, group = (first + 2 * lane) % kGroupsPerRow;
  if (lane < kCount && row < tokens) {
    *reinterpret_cast<float*>(a.s + row * a.s_stride + group * sizeof(float)) = scale.stored;
  }
}

}  // namespace staging
