// Staging: BF16 rows [M, H] to e4m3 rows and one float32 scale per 128 columns, into memory that the caller gives.
//
// A group of 128 columns belongs to half a warp: a lane loads 16 bytes (8 columns), four shuffles find the group's
// largest magnitude, and the lane stores 8 bytes. A warp takes 2 * kGroups consecutive groups, all their loads issued
// before the first is used; there is no shared memory and no barrier.
//
// config: kHidden (a multiple of 128), kUe8m0, kGroups (groups of one half warp), kThreads.
#include "config.cuh"
#include "quantize.cuh"

using ptx::u32;
using ptx::u8;

// Layout shared with megamoe.cuda.staging. Strides are bytes from one row to the next.
struct StagingArguments {
  const u8* x;
  u8* q;
  u8* s;
  const int* num_tokens;  // null: all of `tokens`
  long long x_stride;
  long long q_stride;
  long long s_stride;
  u32 tokens;  // rows of x; *num_tokens is held in [0, tokens]
};

constexpr u32 kGroupsPerRow = config::kHidden / quantize::kGroup;
constexpr u32 kHalf = 16;       // lanes of one group
constexpr u32 kLoadBytes = 16;  // a lane's columns in BF16
constexpr u32 kStoreBytes = 8;  // the same in e4m3
static_assert(config::kHidden % quantize::kGroup == 0, "a row must be whole groups");
static_assert(config::kGroups >= 1 && config::kGroups <= 16, "one lane of a half stores one scale");
static_assert(config::kThreads % 32 == 0, "whole warps");

MEGAMOE_DEVICE u32 largest_magnitude(const uint4& v) {
  u32 m = quantize::max_magnitude_bf16x2(0, v.x);
  m = quantize::max_magnitude_bf16x2(m, v.y);
  m = quantize::max_magnitude_bf16x2(m, v.z);
  return quantize::max_magnitude_bf16x2(m, v.w);
}

MEGAMOE_DEVICE uint2 to_e4m3x8(const uint4& v, float multiplier) {
  return {quantize::to_e4m3x4(v.x, v.y, multiplier), quantize::to_e4m3x4(v.z, v.w, multiplier)};
}

extern "C" __global__ void __launch_bounds__(config::kThreads) stage(const __grid_constant__ StagingArguments a) {
  constexpr int kCount = config::kGroups;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const u32 lane = ptx::lane_index() % kHalf;
  const u32 half = ptx::lane_index() / kHalf;
  const u32 warp = blockIdx.x * (config::kThreads / 32) + threadIdx.x / 32;
  const u32 first = warp * (2 * kCount) + half;  // this half's groups: first, first + 2, ...

  uint4 v[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const u32 row = (first + 2 * i) / kGroupsPerRow, group = (first + 2 * i) % kGroupsPerRow;
    v[i] = make_uint4(0, 0, 0, 0);
    if (row < a.tokens) {
      v[i] = ptx::ld_global_nc_v4(a.x + row * a.x_stride + group * (2 * quantize::kGroup) + lane * kLoadBytes);
    }
  }
  // Read behind the rows' loads: rows past the count are read (they exist) but not written.
  u32 tokens = a.tokens;
  if (a.num_tokens != nullptr) {
    const int count = *a.num_tokens;
    tokens = count < 0 ? 0 : (static_cast<u32>(count) < tokens ? static_cast<u32>(count) : tokens);
  }

  // Lane i of a half computes the scale of its half's i-th group, so that one pair of divisions serves all of them.
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    u32 m = largest_magnitude(v[i]);
#pragma unroll
    for (u32 step = kHalf / 2; step > 0; step /= 2) m = ptx::max_u16x2(m, ptx::shfl_xor(m, step));
    if (lane % kCount == i) own = m;
  }
  const quantize::Scale scale = quantize::group_scale<config::kUe8m0>(quantize::amax_bits(own));

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
