// The fused kernel's constants: sizes of the layer, geometry of a tile, shared memory, barriers.
//
// Every number that the host also needs (legality of a plan, bytes of shared memory) is computed by megamoe.cuda.plan and
// arrives through config.cuh; arrival counts are stated here and nowhere else.
#pragma once
#include "config.cuh"
#define MEGAMOE_PIPELINE_LIMIT_TICKS config::kPipelineLimitTicks

#include "arena_gen.cuh"
#include "tile.cuh"

namespace megamoe {

constexpr u32 kHidden = config::kHidden;
constexpr u32 kIntermediate = config::kIntermediate;
constexpr u32 kTopk = config::kTopk;
constexpr u32 kRanks = config::kRanks;
constexpr u32 kLocalExperts = config::kLocalExperts;
constexpr u32 kExperts = kRanks * kLocalExperts;

constexpr u32 kWeightRows = 256;                        // rows of w13 or w2 in one tile
constexpr u32 kWeightTileBytes = 128 * kBlockDepth;     // one swizzled block of 128 rows x 128
constexpr bool kRowMajorWeights = config::kRowMajorWeights;  // read through tensor maps; else contiguous blocks
constexpr u32 kBlocks1 = kHidden / kBlockDepth;         // k-blocks of the first GEMM
constexpr u32 kBlocks2 = kIntermediate / kBlockDepth;   // of the second
constexpr u32 kTiles1 = kIntermediate / kBlockDepth;    // weight tiles of the first GEMM: one scale group each
constexpr u32 kTiles2 = (kHidden + kWeightRows - 1) / kWeightRows;
static_assert(kHidden % 128 == 0 && kIntermediate % 128 == 0, "whole scale groups");
static_assert(kRanks <= kMaxRanks, "ranks of one NVLink domain");

// Token tiles. A wide tile has up to 128 tokens on the M side. The others have up to 64: from 33 on on the M side (half.cuh),
// up to 32 on the N side with weights on the M side (swap.cuh). kSwap: a plan has such tiles.
constexpr bool kWide = config::kWide;
constexpr bool kSwap = config::kSwap;
constexpr u32 kSwapTokens = 64;
// A wide tile carries up to kCarried tokens more on the N side, in the same pass over the weights.
constexpr u32 kCarried = config::kCarriedTokens;
constexpr u32 kStageTokens = kWide ? kTileRows + kCarried : kSwapTokens;
static_assert(kCarried % 8 == 0 && (kCarried == 0 || (kWide && kSwap)), "carried tokens are swapped");
static_assert(kWide || kSwap, "at least one kind of tile");
constexpr u32 kAmaxRows = config::kAmaxRows;  // of kSwapTokens words each, see Epilogue::swap_first
static_assert(kAmaxRows == 3, "one in use, one being cleared, one between");

// Tokens are combined as soon as their experts' results are there, by warps that have no tile left. Small calls have few
// tokens to combine, and another counter behind the last tile would cost what that gains.
constexpr bool kEarlyCombine = kWide;

// Passes. The pools hold the routes of an even load and some more. A call that needs more rows works through its token tiles
// in passes, of which each has the pools to itself: pass n has the tiles [n * kPassTiles, (n + 1) * kPassTiles).
constexpr bool kPasses = config::kPasses;
constexpr u32 kMaxPasses = config::kMaxPasses;

// Stretches: calls of a few tokens of a rank that is a group by itself may be cut between k-blocks (stretch.cuh).
constexpr bool kStretches = kRanks == 1 && !kWide && !kPasses;

// Warps. Warpgroup 0 has one role a warp; 1 and 2 are math.
enum Warp : u32 { kLoaderWarp = 0, kStoreWarp0 = 1, kStoreWarp1 = 2, kDispatchWarp = 3 };
constexpr u32 kWarps = kThreads / 32;
constexpr u32 kMathThreads = 256, kMathWarps = kMathThreads / 32;
constexpr u32 kRoleRegisters = config::kRoleRegisters;
constexpr u32 kMathRegisters = config::kMathRegisters;

// Named barriers (0 is __syncthreads).
constexpr u32 kMathBarrier = 1;  // all math threads

// The queue of tiles between the loader and the other roles.
constexpr u32 kQueueSlots = config::kQueueSlots;
constexpr u32 kQueueSlotBytes = 32;

// What MathWarpgroup asks of a tile: 128 tokens x 256 weight rows. Four weight scales a k-block, one for the even and one
// for the odd groups of 8 columns of either half: first GEMM {gate, up, gate, up}, second {first, first, second, second}.
struct FusedTile {
  static constexpr int kColumns = kWeightRows, kStages = config::kStages, kCluster = 1;
  static constexpr bool kPeek = config::kPeek;
  static constexpr int kAccumulators = 1, kChunkColumns = 128, kScales = 4;
  MEGAMOE_DEVICE static constexpr int scale_index(int column) { return column / 128 * 2 + column / 8 % 2; }

  static constexpr u32 kFullArrivals = 1;                     // the loader; plus the bytes of the stage
  static constexpr u32 kEmptyArrivals = 4 * kMathWarpgroups;  // one a math warp
  static constexpr u32 kStagedArrivals = 4;                   // the warps of one math warpgroup
  static constexpr u32 kFreeArrivals = 1;                     // its store warp
  static constexpr u32 kPulledArrivals = 1;                   // the lane of the dispatch warp; plus the bytes of the row
  static constexpr u32 kQueueFullArrivals = 1;                // the loader
  static constexpr u32 kQueueEmptyArrivals = 8 + 2;           // one a math warp and a store warp

  static constexpr u32 kStoreWarps = kStoreWarp1 - kStoreWarp0 + 1;
  static_assert(kEmptyArrivals == kMathWarps, "every math warp reads a stage");
  static_assert(kStagedArrivals * kStoreWarps == kMathWarps, "a store warp for each math warpgroup");
  static_assert(kQueueEmptyArrivals == kMathWarps + kStoreWarps, "all of them read a tile's slot");

  static constexpr u32 kBytesA = kStageTokens * kBlockDepth;  // tokens
  static constexpr u32 kBytesB = kWeightRows * kBlockDepth;  // weights
  static constexpr u32 kStageBytes = kBytesA + kBytesB;
  static constexpr u32 kRowScaleBytes = kStageTokens * 4;
  static constexpr u32 kTileScaleBytes = 16;

  static constexpr u32 kStaging = config::kStagingOffset;
  static constexpr u32 kPulled = config::kPulledRowsOffset;
  static constexpr u32 kRowScales = config::kRowScalesOffset;
  static constexpr u32 kTileScales = config::kTileScalesOffset;
  static constexpr u32 kAmax = config::kAmaxOffset;
  static constexpr u32 kTables = config::kTablesOffset;
  static constexpr u32 kQueue = config::kQueueOffset;
  static constexpr u32 kFull = config::kBarriersOffset;
  static constexpr u32 kEmpty = kFull + kStages * 8;
  static constexpr u32 kStaged = kEmpty + kStages * 8;
  static constexpr u32 kBuffers = config::kStagingBuffers;
  static constexpr u32 kFree = kStaged + kMathWarpgroups * kBuffers * 8;
  static constexpr u32 kPulledBarriers = kFree + kMathWarpgroups * kBuffers * 8;
  static constexpr u32 kQueueFull = kPulledBarriers + config::kPulledRows * 8;
  static constexpr u32 kQueueEmpty = kQueueFull + kQueueSlots * 8;
  static_assert(kQueueEmpty + kQueueSlots * 8 <= config::kSharedBytes, "the host's sum and ours");
};

// Staging: up to 64 rows of 256 bytes for each math warpgroup and buffer. Eight neighbouring rows, which a warp writes at once,
// lie in eight groups, 16 bytes of padding between two, and so in different banks.
constexpr u32 kStagingRowBytes = 256, kStagingGroup = kWarpgroupRows / 8 * kStagingRowBytes + 16;
constexpr u32 kStagingBuffer = 8 * kStagingGroup - 16;  // no padding behind the last group
MEGAMOE_DEVICE u32 staged_row(u32 row) { return row % 8 * kStagingGroup + row / 8 * kStagingRowBytes; }

// Tables: three words for each local expert, the call's facts, and the first row of each pass and the row behind the last.
constexpr u32 kCountTable = FusedTile::kTables;
constexpr u32 kBaseTable = kCountTable + kLocalExperts * 4;
constexpr u32 kTileTable = kBaseTable + kLocalExperts * 4;
constexpr u32 kFacts = kTileTable + kLocalExperts * 4;
enum Fact : u32 {
  kTotalTiles,  // first, so that it ends the table of first token tiles
  kEpoch, kTokens, kTotalRoutes, kFailed, kDirect,
  kUrgentRows, kUrgentTokens,  // pool rows of the experts of first tiles, this CTA's tokens that go there (list.cuh)
  kWave, kLag,  // the order of tiles (schedule.cuh)
  kMostRows, kStretched,  // of an expert, in a lean call; whether it is cut into stretches (stretch.cuh)
  kComplete,  // all results of a lean call are stored (combine.cuh)
  kPassCount, kPassTiles,
  kNextItem, kStepBegin, kStep, kPass, kFirstExpert, kSecondExpert,  // the loader's own (schedule.cuh)
  kFactCount
};
constexpr u32 kPassTable = kFacts + kFactCount * 4;
static_assert(kPassTable + (kPasses ? kMaxPasses + 1 : 0) * 4 <= config::kQueueOffset, "tables end before the queue");

// First token tile of a local expert; of the one behind the last: all tiles.
MEGAMOE_DEVICE u32 tiles_before(Smem base, u32 expert) {
  static_assert(kFacts == kTileTable + kLocalExperts * 4 && kTotalTiles == 0, "the table goes on in the facts");
  return ptx::ld_shared_u32(base + (kTileTable + expert * 4));
}

MEGAMOE_DEVICE u32 fact(Smem base, Fact which) { return ptx::ld_shared_u32(base + (kFacts + which * 4)); }
MEGAMOE_DEVICE void set_fact(Smem base, Fact which, u32 value) {
  ptx::st_shared_u32(base + (kFacts + which * 4), value);
}

// A row of the routing's tables, counted over all experts, from which pass `pass` has its rows: the pools' row 0 in that pass.
MEGAMOE_DEVICE u32 pass_begin(Smem base, u32 pass) {
  return kPasses ? ptx::ld_shared_u32(base + (kPassTable + pass * 4)) : 0;
}
// The pass of such a row.
MEGAMOE_DEVICE u32 pass_of(Smem base, u32 row) {
  u32 pass = 0;
  if constexpr (kPasses) {
    const u32 last = fact(base, kPassCount) - 1;
    while (pass < last && row >= pass_begin(base, pass + 1)) ++pass;
  }
  return pass;
}

}  // namespace megamoe
