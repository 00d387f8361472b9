// Staging: BF16 rows [M, H] to e4m3 rows and one float32 scale per 128 columns, into memory that the caller gives.
// `stage` does only that; `stage_call` also brings the routes of a call into the arena, `copy_call` takes rows that are
// already quantised.
//
// config: kHidden (a multiple of 128), kUe8m0, kGroups (groups of one half warp), kThreads.
#include "config.cuh"
#include "stage.cuh"

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
static_assert(config::kThreads % 32 == 0, "whole warps");

MEGAMOE_DEVICE void stage_rows(const staging::Rows& a, u32 warp, u32 rows, const int* num_tokens) {
  staging::stage_rows<config::kHidden, config::kGroups>(a, warp, rows, num_tokens, config::kUe8m0);
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

MEGAMOE_DEVICE void stage_routes(const CallArguments& a, u32 tokens) {
  const u32 i = (blockIdx.x - a.row_blocks) * config::kThreads + threadIdx.x;
  if (i >= tokens * a.slots) return;
  const u32 row = i / a.slots, slot = i % a.slots;
  const u8* id = a.ids + row * a.ids_stride + slot * a.ids_column;
  a.staged_ids[i] = staging::load_id(id, a.wide_ids != 0);
  a.staged_weights[i] = *reinterpret_cast<const float*>(a.weights + row * a.weights_stride + slot * a.weights_column);
}

extern "C" __global__ void __launch_bounds__(config::kThreads) stage_call(const __grid_constant__ CallArguments a) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const u32 tokens = staging::counted(a.num_tokens, a.tokens);
  if (blockIdx.x >= a.row_blocks) return stage_routes(a, tokens);
  const u32 warp = blockIdx.x * (config::kThreads / 32) + threadIdx.x / 32;
  if (warp * (2 * config::kGroups) >= tokens * kGroupsPerRow) return;  // the whole warp
  stage_rows({a.x, a.q, a.s, a.x_stride, config::kHidden, kGroupsPerRow * 4}, warp, tokens, nullptr);
}

extern "C" __global__ void __launch_bounds__(config::kThreads) copy_call(const __grid_constant__ CallArguments a) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const u32 tokens = staging::counted(a.num_tokens, a.tokens);
  if (blockIdx.x >= a.row_blocks) return stage_routes(a, tokens);
  const u32 lane = ptx::lane_index() % staging::kHalf;
  const u32 warp = blockIdx.x * (config::kThreads / 32) + threadIdx.x / 32;
  const u32 first = warp * (2 * config::kGroups) + ptx::lane_index() / staging::kHalf;
#pragma unroll
  for (int i = 0; i < config::kGroups; ++i) {
    const u32 row = (first + 2 * i) / kGroupsPerRow, group = (first + 2 * i) % kGroupsPerRow;
    if (row >= tokens) continue;
    const u32 column = group * quantize::kGroup + lane * staging::kStoreBytes;
    *reinterpret_cast<uint2*>(a.q + static_cast<long long>(row) * config::kHidden + column) =
        *reinterpret_cast<const uint2*>(a.x + row * a.x_stride + column);
    if (lane == 0) {
      *reinterpret_cast<float*>(a.s + (static_cast<long long>(row) * kGroupsPerRow + group) * 4) =
          *reinterpret_cast<const float*>(a.scales + row * a.scales_stride + group * a.scales_column);
    }
  }
}
