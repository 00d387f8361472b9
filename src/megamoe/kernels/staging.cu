// Staging: BF16 rows [M, H] to e4m3 rows and one float32 scale per 128 columns, into memory that the caller gives.
// `stage` does only that; `stage_call` also brings the routes of a call into the arena, `copy_call` takes rows that are
// already quantised.
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

// Rows as `stage_rows` takes them.
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

// The groups of warp `warp`. Rows from `rows` on are not read, rows from the count on are not written.
MEGAMOE_DEVICE void stage_rows(const Rows& a, u32 warp, u32 rows, const int* num_tokens) {
  constexpr int kCount = config::kGroups;
  const u32 lane = ptx::lane_index() % kHalf;
  const u32 half = ptx::lane_index() / kHalf;
  const u32 first = warp * (2 * kCount) + half;  // this half's groups: first, first + 2, ...

  uint4 v[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const u32 row = (first + 2 * i) / kGroupsPerRow, group = (first + 2 * i) % kGroupsPerRow;
    v[i] = make_uint4(0, 0, 0, 0);
    if (row < rows) {
      v[i] = ptx::ld_global_nc_v4(a.x + row * a.x_stride + group * (2 * quantize::kGroup) + lane * kLoadBytes);
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

extern "C" __global__ void __launch_bounds__(config::kThreads) stage(const __grid_constant__ StagingArguments a) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const u32 warp = blockIdx.x * (config::kThreads / 32) + threadIdx.x / 32;
  stage_rows({a.x, a.q, a.s, a.x_stride, a.q_stride, a.s_stride}, warp, a.tokens, a.num_tokens);
}

// A call's inputs. Layout shared with megamoe.cuda.call_staging. Strides in bytes; outputs are contiguous.
struct CallArguments {
  const u8* x;  // BF16 rows, or e4m3 rows for `copy_call`
  const u8* scales;
  const u8* ids;
  const u8* weights;
  u8* q;
  u8* s;
  int* staged_ids;
  float* staged_weights;
  const int* num_tokens;  // null: all of `tokens`
  long long x_stride;
  long long scales_stride, scales_column;
  long long ids_stride, ids_column;
  long long weights_stride, weights_column;
  u32 tokens;
  u32 slots;       // routes of a token
  u32 row_blocks;  // blocks that stage rows; those behind them stage routes
  u32 wide_ids;    // ids are 64-bit
};

constexpr int kNotAnId = -0x7fffffff - 1;  // stands for every id that 32 bits cannot hold: the fused kernel reports it

MEGAMOE_DEVICE void stage_routes(const CallArguments& a, u32 tokens) {
  const u32 i = (blockIdx.x - a.row_blocks) * config::kThreads + threadIdx.x;
  if (i >= tokens * a.slots) return;
  const u32 row = i / a.slots, slot = i % a.slots;
  const u8* id = a.ids + row * a.ids_stride + slot * a.ids_column;
  if (a.wide_ids != 0) {
    const long long wide = *reinterpret_cast<const long long*>(id);
    a.staged_ids[i] = wide == static_cast<int>(wide) ? static_cast<int>(wide) : kNotAnId;
  } else {
    a.staged_ids[i] = *reinterpret_cast<const int*>(id);
  }
  a.staged_weights[i] = *reinterpret_cast<const float*>(a.weights + row * a.weights_stride + slot * a.weights_column);
}

extern "C" __global__ void __launch_bounds__(config::kThreads) stage_call(const __grid_constant__ CallArguments a) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const u32 tokens = counted(a.num_tokens, a.tokens);
  if (blockIdx.x >= a.row_blocks) return stage_routes(a, tokens);
  const u32 warp = blockIdx.x * (config::kThreads / 32) + threadIdx.x / 32;
  if (warp * (2 * config::kGroups) >= tokens * kGroupsPerRow) return;  // the whole warp
  stage_rows({a.x, a.q, a.s, a.x_stride, config::kHidden, kGroupsPerRow * 4}, warp, tokens, nullptr);
}

extern "C" __global__ void __launch_bounds__(config::kThreads) copy_call(const __grid_constant__ CallArguments a) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const u32 tokens = counted(a.num_tokens, a.tokens);
  if (blockIdx.x >= a.row_blocks) return stage_routes(a, tokens);
  const u32 lane = ptx::lane_index() % kHalf;
  const u32 warp = blockIdx.x * (config::kThreads / 32) + threadIdx.x / 32;
  const u32 first = warp * (2 * config::kGroups) + ptx::lane_index() / kHalf;
#pragma unroll
  for (int i = 0; i < config::kGroups; ++i) {
    const u32 row = (first + 2 * i) / kGroupsPerRow, group = (first + 2 * i) % kGroupsPerRow;
    if (row >= tokens) continue;
    const u32 column = group * quantize::kGroup + lane * kStoreBytes;
    *reinterpret_cast<uint2*>(a.q + static_cast<long long>(row) * config::kHidden + column) =
        *reinterpret_cast<const uint2*>(a.x + row * a.x_stride + column);
    if (lane == 0) {
      *reinterpret_cast<float*>(a.s + (static_cast<long long>(row) * kGroupsPerRow + group) * 4) =
          *reinterpret_cast<const float*>(a.scales + row * a.scales_stride + group * a.scales_column);
    }
  }
}
