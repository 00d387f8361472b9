// One CTA tile of a grouped FP8 GEMM: its geometry, its shared memory and its barriers.
//
// D = A B^T over k-blocks of 128: 128 rows of A (tokens), kColumns rows of B (weights), both e4m3 and K-major. A CTA
// has 384 threads; with kCluster = 2, two CTAs work on two row blocks of the same weights and each loads half of them
// for both.
//
// Roles
//   warpgroup 0  warp 0, lane 0        loader        every copy into the stages
//                warps 1 and 2, lane 0 store warps   TMA stores of math warpgroup 0 and 1
//   warpgroups 1, 2                    math          64 rows each: WGMMA, promotion, epilogue
//
// Pipelines (arrival counts are the constants below; parity of the first wait: consumer 0, producer 1)
//   barrier       producer -> consumer                  arrivals            bytes
//   full[stage]   loader -> math warpgroups             kFullArrivals       kStageTraffic: own A, all of B, scales
//   empty[stage]  math warps of the cluster -> loader   kEmptyArrivals
//   staged[w][b]  warps of math warpgroup w -> store w  kStagedArrivals
//   free[w][b]    store warp w -> math warpgroup w      kFreeArrivals
//
// Memory
//   stages        written by the copies of the cluster's loaders from empty to full, read by WGMMA and (scales) by the
//                 math threads from full to empty
//   staging[w]    written by math warpgroup w from free to staged, read by TMA stores from staged to free
#pragma once
#include "ptx.cuh"

namespace megamoe {

using ptx::Smem;
using ptx::u16;
using ptx::u32;
using ptx::u64;

constexpr int kTileRows = 128;
constexpr int kBlockDepth = 128;  // bytes and elements of a k-block, also the swizzle span of a row
constexpr int kMathWarpgroups = 2;
constexpr int kWarpgroupRows = 64;
constexpr int kThreads = 384;
constexpr int kStagingBytes = 8192;  // 64 rows of 128 bytes

// Which of a tile's weight scales belongs to a column.
enum class Scales {
  kBlocks,       // one for each 128 columns (256 wide), or for each 64 columns (192 wide, which straddles blocks)
  kInterleaved,  // gate and up rows alternate by 8: scale 0 for gate, 1 for up
};

// Columns      256: two m64n128 products through one 64-register accumulator.
//              192: two m64n96 products in two accumulators, one always in flight.
// Stages       depth of the operand ring.
// Cluster      CTAs that share weights, 1 or 2.
// Buffers      staging buffers of a math warpgroup.
// Peek         test the next stage's full barrier while the last product of the current one runs.
template <int Columns, int Stages, int Cluster, int Buffers, Scales ScaleMap, bool Peek>
struct TileConfig {
  static_assert(Columns == 256 || Columns == 192, "tile widths that have a main loop");
  static_assert(Cluster == 1 || Cluster == 2, "one CTA or a pair");
  static_assert(ScaleMap == Scales::kBlocks || Columns == 256, "an interleaved tile holds whole scale groups");

  static constexpr int kColumns = Columns, kStages = Stages, kCluster = Cluster, kBuffers = Buffers;
  static constexpr bool kPeek = Peek;
  static constexpr int kAccumulators = Columns == 256 ? 1 : 2;
  static constexpr int kChunkColumns = Columns / 2;  // N of one product
  static constexpr int kScales = Columns == 256 ? 2 : 3;
  static constexpr int kClusterColumns = Columns / Cluster;  // rows of B that one CTA loads

  MEGAMOE_DEVICE static constexpr int scale_index(int column) {
    return ScaleMap == Scales::kInterleaved ? column / 8 % 2 : column / (Columns == 256 ? 128 : 64);
  }

  // Arrivals
  static constexpr u32 kFullArrivals = 1;
  static constexpr u32 kEmptyArrivals = 4 * kMathWarpgroups * Cluster;
  static constexpr u32 kStagedArrivals = 4;
  static constexpr u32 kFreeArrivals = 1;

  // Shared memory, offsets and sizes in bytes
  static constexpr u32 kBytesA = kTileRows * kBlockDepth;
  static constexpr u32 kBytesB = Columns * kBlockDepth;
  static constexpr u32 kStageBytes = kBytesA + kBytesB;
  static constexpr u32 kRowScaleBytes = kTileRows * 4;
  static constexpr u32 kTileScaleBytes = 16;  // four weight scales of a tile and k-block, those past kScales unused
  static constexpr u32 kStageTraffic = kStageBytes + kRowScaleBytes + kTileScaleBytes;

  static constexpr u32 kStaging = Stages * kStageBytes;
  static constexpr u32 kRowScales = kStaging + kMathWarpgroups * Buffers * kStagingBytes;
  static constexpr u32 kTileScales = kRowScales + Stages * kRowScaleBytes;
  static constexpr u32 kFull = kTileScales + Stages * kTileScaleBytes;
  static constexpr u32 kEmpty = kFull + Stages * 8;
  static constexpr u32 kStaged = kEmpty + Stages * 8;
  static constexpr u32 kFree = kStaged + kMathWarpgroups * Buffers * 8;
  static constexpr u32 kSharedBytes = kFree + kMathWarpgroups * Buffers * 8;
  static_assert(kSharedBytes <= 232448, "shared memory of one CTA");
};

// One thread of the CTA; a cluster (or CTA) barrier follows before anybody uses them.
template <class C>
MEGAMOE_DEVICE void init_barriers(Smem base) {
  for (int i = 0; i < C::kStages; ++i) {
    ptx::name(base + (C::kFull + i * 8), "full", i);
    ptx::name(base + (C::kEmpty + i * 8), "empty", i);
    ptx::mbarrier_init(base + (C::kFull + i * 8), C::kFullArrivals);
    ptx::mbarrier_init(base + (C::kEmpty + i * 8), C::kEmptyArrivals);
  }
  for (int i = 0; i < kMathWarpgroups * C::kBuffers; ++i) {
    ptx::name(base + (C::kStaged + i * 8), "staged", i);
    ptx::name(base + (C::kFree + i * 8), "free", i);
    ptx::mbarrier_init(base + (C::kStaged + i * 8), C::kStagedArrivals);
    ptx::mbarrier_init(base + (C::kFree + i * 8), C::kFreeArrivals);
  }
  ptx::fence_mbarrier_init();
}

// Position in the operand ring, kept by each role for itself.
template <class C>
struct Ring {
  u32 stage = 0, parity;

  MEGAMOE_DEVICE void advance() {
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace megamoe
