// A small persistent FP8 GEMM with a hand-over between CTAs, the shape of the project's pipelines in one page.
//
// out[m, n] = sum over k-blocks of a_scales[kb][m] * b_scales[n / 128][kb] * (A_kb B_kb^T), BF16; then row_sums[m], by
// whichever CTA the row falls to, once all tiles of its row block are flagged done.
// Warp 0 of warpgroup 0 loads (4 stages); warpgroups 1 and 2 compute 64 rows each, promote and store through TMA.
// config: kColumns (64 or 128), kCluster (1 or 2: CTA pairs share B by multicast). `bug` plants one mistake, see `Bug`.
#include "config.cuh"
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

enum Bug {
  kNone,
  kNoEmptyWait,
  kEmptyCountLow,
  kEmptyCountHigh,
  kReadBeforeWait,
  kReleaseBeforeWait,
  kNoProxyFence,
  kNoReadWait,  // harmless here: a full wait follows later
  kNoStagingBarrier,
  kShortExpect,
  kWrongParity,
  kReadWaitBeforeFlag,
  kRelaxedFlag,
  kNoSyncBeforeRelease,
  kNoSyncAfterAcquire,
  kReleaseOwnOnly,
  kNoFinalClusterBarrier,  // harmless here: the flags order the exits
};

struct GemmArguments {
  const float* a_scales;
  const float* b_scales;
  const __nv_bfloat16* out;
  float* row_sums;
  u32* done;
  int row_tiles, column_tiles, kblocks, rows, columns, bug;
};

constexpr int kRows = 128, kDepth = 128, kStages = 4, kColumns = config::kColumns, kCluster = config::kCluster;
constexpr int kBytesA = kRows * kDepth, kBytesB = kColumns * kDepth, kBytesScales = kRows * 4;
constexpr int kStaging = kStages * (kBytesA + kBytesB), kScales = kStaging + kRows * kColumns * 2;
constexpr int kFull = kScales + kStages * kBytesScales, kEmpty = kFull + kStages * 8, kSums = kEmpty + kStages * 8;
constexpr int kRegisters = kColumns / 2;

struct Position {
  u32 stage, parity;
  MEGAMOE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

MEGAMOE_DEVICE void cta_or_cluster_barrier() {
  if constexpr (kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

MEGAMOE_DEVICE void load(Smem base, const CUtensorMap* a, const CUtensorMap* b, const GemmArguments& p, int cta) {
  Position at{0, p.bug == kWrongParity ? 0u : 1u};
  const int tiles = p.row_tiles / kCluster * p.column_tiles;
  for (int t = static_cast<int>(blockIdx.x) / kCluster; t < tiles; t += static_cast<int>(gridDim.x) / kCluster) {
    const int row = (t / p.column_tiles * kCluster + cta) * kRows, column = t % p.column_tiles * kColumns;
    for (int k = 0; k < p.kblocks; ++k) {
      const Smem full = base + (kFull + at.stage * 8), to_b = base + (kStages * kBytesA + at.stage * kBytesB);
      if (p.bug != kNoEmptyWait) ptx::mbarrier_wait(base + (kEmpty + at.stage * 8), at.parity);
      ptx::mbarrier_arrive_expect_tx(full, kBytesA + kBytesB + kBytesScales - (p.bug == kShortExpect ? 16 : 0));
      ptx::tma_load_2d(base + at.stage * kBytesA, a, full, k * kDepth, row);
      if constexpr (kCluster > 1) {
        const int part = cta * (kColumns / kCluster);
        ptx::tma_load_2d_multicast(to_b + static_cast<u32>(part * kDepth), b, full, k * kDepth, column + part, (1 << kCluster) - 1);
      } else {
        ptx::tma_load_2d(to_b, b, full, k * kDepth, column);
      }
      ptx::bulk_load(base + (kScales + at.stage * kBytesScales), p.a_scales + k * p.rows + row, kBytesScales, full);
      at.advance();
    }
  }
}

MEGAMOE_DEVICE void release(Smem base, u32 stage, u32 lane, int bug) {
  if (bug != kNoSyncBeforeRelease) ptx::syncwarp();
  const Smem empty = base + (kEmpty + stage * 8);
  if constexpr (kCluster > 1) {
    if (lane < (bug == kReleaseOwnOnly ? 1 : kCluster)) ptx::mbarrier_arrive_cluster(ptx::map_cluster(empty, lane));
  } else {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  }
}

// BF16 into 64-column atoms with the 128-byte swizzle, one TMA store each, then the row block's flag.
MEGAMOE_DEVICE void store(Smem base, u32 warpgroup, u32 row, const float (&acc)[kRegisters], const CUtensorMap* out,
                          const GemmArguments& p, int first_row, int first_column) {
  const u32 thread = threadIdx.x % 128, lane = ptx::lane_index();
  const Smem staging = base + (kStaging + warpgroup * (64 * kColumns * 2));
  if (thread == 0 && p.bug != kNoReadWait) ptx::bulk_wait_read<0>();
  ptx::named_barrier_sync(1 + warpgroup, 128);
#pragma unroll
  for (int i = 0; i < kRegisters; i += 2) {
    const u32 r = row + (i & 2 ? 8 : 0), c = static_cast<u32>(i / 4 * 8) + lane % 4 * 2, offset = r * 128 + c % 64 * 2;
    ptx::st_shared_u32(staging + (c / 64 * 64 * 128 + (offset ^ (offset >> 3 & 0x70))), ptx::pack_bf16x2(acc[i], acc[i + 1]));
  }
  if (p.bug != kNoProxyFence) ptx::fence_proxy_async_shared();
  if (p.bug != kNoStagingBarrier) ptx::named_barrier_sync(1 + warpgroup, 128);
  if (thread != 0) return;
  for (int j = 0; j < kColumns / 64; ++j) {
    ptx::tma_store_2d(out, staging + static_cast<u32>(j * 64 * 128), first_column + j * 64, first_row);
  }
  ptx::bulk_commit();
  if (p.bug == kReadWaitBeforeFlag) {
    ptx::bulk_wait_read<0>();
  } else {
    ptx::bulk_wait<0>();
  }
  u32* flag = p.done + first_row / kRows;
  if (p.bug == kRelaxedFlag) {
    ptx::red_add_relaxed_gpu(flag, 1u);
  } else {
    ptx::red_add_release_gpu(flag, 1u);
  }
}

MEGAMOE_DEVICE void compute(Smem base, const CUtensorMap* out, const GemmArguments& p, u32 warpgroup, int cta) {
  const u32 lane = ptx::lane_index(), row = ptx::warp_index() % 4 * 16 + lane / 4;
  Position at{0, 0};
  const int tiles = p.row_tiles / kCluster * p.column_tiles;
  for (int t = static_cast<int>(blockIdx.x) / kCluster; t < tiles; t += static_cast<int>(gridDim.x) / kCluster) {
    const int row_tile = t / p.column_tiles * kCluster + cta, column_tile = t % p.column_tiles;
    float acc[kRegisters], part[kRegisters];
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) acc[i] = part[i] = 0.0f;
    for (int k = 0; k < p.kblocks; ++k) {
      const float b_scale = __ldg(p.b_scales + column_tile * kColumns / 128 * p.kblocks + k);
      ptx::mbarrier_wait(base + (kFull + at.stage * 8), at.parity);
      const ptx::Desc a = ptx::make_desc(base + (at.stage * kBytesA + warpgroup * (64 * kDepth)));
      const ptx::Desc b = ptx::make_desc(base + (kStages * kBytesA + at.stage * kBytesB));
      ptx::wgmma_fence(part);
#pragma unroll
      for (u32 i = 0; i < kDepth / 32; ++i) ptx::wgmma_e4m3(part, a + 32 * i, b + 32 * i, i != 0);
      ptx::wgmma_commit();
      const Smem scales = base + (kScales + at.stage * kBytesScales + (warpgroup * 64 + row) * 4);
      const float scale[2] = {__fmul_rn(ptx::ld_shared_f32(scales), b_scale), __fmul_rn(ptx::ld_shared_f32(scales + 32), b_scale)};
      if (p.bug == kReleaseBeforeWait) release(base, at.stage, lane, p.bug);
      if (p.bug == kReadBeforeWait) {
        ptx::wgmma_wait<1>(part);
      } else {
        ptx::wgmma_wait<0>(part);
      }
      if (p.bug != kReleaseBeforeWait) release(base, at.stage, lane, p.bug);
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) acc[i] = __fmaf_rn(part[i], scale[i / 2 % 2], acc[i]);
      if (p.bug == kReadBeforeWait) ptx::wgmma_wait<0>(part);
      at.advance();
    }
    store(base, warpgroup, row, acc, out, p, row_tile * kRows + static_cast<int>(warpgroup) * 64, column_tile * kColumns);
  }
}

MEGAMOE_DEVICE void sum_rows(Smem base, const GemmArguments& p, u32 warp) {
  const u32 lane = ptx::lane_index();
  for (int m = static_cast<int>(blockIdx.x * 8 + warp); m < p.rows; m += static_cast<int>(gridDim.x) * 8) {
    if (lane == 0) {
      while (ptx::ld_acquire_gpu(p.done + m / kRows) < static_cast<u32>(2 * p.column_tiles)) ptx::nanosleep(32);
    }
    if (p.bug != kNoSyncAfterAcquire) ptx::syncwarp();
    float sum = 0.0f;
    for (int n = static_cast<int>(lane); n < p.columns; n += 32) sum += __bfloat162float(p.out[static_cast<u64>(m) * p.columns + n]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
    if (lane == 0) {
      ptx::st_shared_f32(base + (kSums + warp * 4), sum);
      p.row_sums[m] = ptx::ld_shared_f32(base + (kSums + warp * 4));
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    selftest_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                  const __grid_constant__ CUtensorMap out, const __grid_constant__ GemmArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      const Smem full = base + static_cast<u32>(kFull + i * 8), empty = base + static_cast<u32>(kEmpty + i * 8);
      ptx::name(full, "full", i);
      ptx::name(empty, "empty", i);
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(empty, static_cast<u32>(kCluster * (8 + (p.bug == kEmptyCountHigh) - (p.bug == kEmptyCountLow))));
    }
    ptx::fence_mbarrier_init();
  }
  cta_or_cluster_barrier();
  const u32 warp = ptx::warp_index(), warpgroup = warp / 4;
  const int cta = kCluster > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0;
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (warp == 0) {
      ptx::role("loader");
      if (ptx::elect_one()) load(base, &a, &b, p, cta);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    ptx::role("math");
    compute(base, &out, p, warpgroup - 1, cta);
    sum_rows(base, p, warp - 4);
  }
  if constexpr (kCluster > 1) {
    // No CTA leaves while its pair may still write to it.
    if (p.bug != kNoFinalClusterBarrier) cta_or_cluster_barrier();
  }
}
