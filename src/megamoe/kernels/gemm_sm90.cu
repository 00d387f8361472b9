// Grouped FP8 GEMM: D[rows of group g] = A[rows of group g] B[g]^T with scales per 128 and float32 promotion.
//
// The main loop of the fused kernel with the simplest roles around it. See tile.cuh for roles, barriers and memory.
// Constants come from the generated config.cuh: kColumns, kStages, kCluster, kBuffers, kInterleaved, kPeek,
// kFloat32Output, kClocks, kPipelineLimitTicks, kSharedBytes.
#include "config.cuh"
#define MEGAMOE_PIPELINE_LIMIT_TICKS config::kPipelineLimitTicks
#include "loader.cuh"
#include "mainloop.cuh"
#include "store.cuh"
#include "tile_list.cuh"

namespace {

using namespace megamoe;
using Config = TileConfig<config::kColumns, config::kStages, config::kCluster, config::kBuffers,
                          config::kInterleaved ? Scales::kInterleaved : Scales::kBlocks, config::kPeek>;
static_assert(Config::kSharedBytes == config::kSharedBytes, "the host's plan and the kernel disagree");
constexpr Output kOutput = config::kFloat32Output ? Output::kFloat32 : Output::kBf16;

struct GemmParams {
  const float* row_scales;   // [k-block][row_scale_stride]
  const float* tile_scales;  // [group][column tile][k-block][4]
  const int2* tiles;
  u64* clocks;  // cycles and nanoseconds of each CTA, with kClocks
  int tile_count, kblocks, row_scale_stride, column_tiles;
};

MEGAMOE_DEVICE void cluster_or_cta_barrier() {
  if constexpr (Config::kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

MEGAMOE_DEVICE void run_loader(Smem base, u32 cta, const CUtensorMap* a, const CUtensorMap* b, const GemmParams& p) {
  ptx::role("loader");
  Loader<Config> loader(base, cta);
  for (TileList list(p.tiles, p.tile_count, Config::kCluster); !list.done(); list.advance()) {
    const Tile t = list.tile();
    const int row = (t.row_block + min(static_cast<int>(cta), t.row_blocks - 1)) * kTileRows;
    const u64 scale_block = static_cast<u64>(t.group) * p.column_tiles + t.column;
    const TileSource source{a,
                            b,
                            p.row_scales,
                            p.tile_scales + scale_block * p.kblocks * (Config::kTileScaleBytes / 4),
                            static_cast<u64>(p.row_scale_stride),
                            row,
                            t.column * Config::kColumns,
                            t.group};
    loader.load_tile(source, p.kblocks);
  }
}

MEGAMOE_DEVICE void run_store(Smem base, u32 cta, u32 warpgroup, const CUtensorMap* d, const GemmParams& p) {
  ptx::role("store");
  Storer<Config, kOutput> storer(base, warpgroup);
  for (TileList list(p.tiles, p.tile_count, Config::kCluster); !list.done(); list.advance()) {
    const Tile t = list.tile();
    const int row = (t.row_block + static_cast<int>(cta)) * kTileRows + static_cast<int>(warpgroup) * kWarpgroupRows;
    storer.store_tile(d, row, t.column * Config::kColumns, static_cast<int>(cta) < t.row_blocks);
  }
}

MEGAMOE_DEVICE void run_math(Smem base, u32 warpgroup, u32 warp, u32 lane, const GemmParams& p) {
  ptx::role("math");
  using S = StoreConfig<Config, kOutput>;
  constexpr int kEarly = S::kPiecesUnderLast, kLate = S::kPieces - kEarly;
  MathWarpgroup<Config> math(base, warpgroup, warp, lane);
  Stager<Config, kOutput> stager(base, warpgroup, warp, lane);
  bool previous = false;  // a tile whose late pieces are still in `finals`
  for (TileList list(p.tiles, p.tile_count, Config::kCluster); !list.done(); list.advance()) {
    math.accumulate_tile(
        p.kblocks, [&] { if (previous) stager.template stage<kEarly, kLate>(math.finals); },
        [&] { stager.template stage<0, kEarly>(math.finals); });
    previous = true;
  }
  if (previous) stager.template stage<kEarly, kLate>(math.finals);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(megamoe::kThreads, 1)
    grouped_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 const __grid_constant__ CUtensorMap d, const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 warp = ptx::warp_index(), lane = ptx::lane_index();
  const u32 cta = Config::kCluster > 1 ? ptx::cluster_ctarank() : 0;
  u64 cycles = 0, nanoseconds = 0;
  if (threadIdx.x == 0) {
    init_barriers<Config>(base);
    ptx::prefetch_tensormap(&a);
    ptx::prefetch_tensormap(&b);
    ptx::prefetch_tensormap(&d);
    if constexpr (config::kClocks) {
      cycles = ptx::clock();
      nanoseconds = ptx::globaltimer();
    }
  }
  cluster_or_cta_barrier();

  if (warp < 4) {
    ptx::setmaxnreg_dec<40>();
    if (warp == 0 && lane == 0) run_loader(base, cta, &a, &b, p);
    if ((warp == 1 || warp == 2) && lane == 0) run_store(base, cta, warp - 1, &d, p);
    ptx::syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    run_math(base, warp / 4 - 1, warp % 4, lane, p);
    ptx::syncwarp();
  }
  cluster_or_cta_barrier();  // the pair may still write to this CTA's shared memory
  if constexpr (config::kClocks) {
    if (threadIdx.x == 0) {
      p.clocks[blockIdx.x * 2] = ptx::clock() - cycles;
      p.clocks[blockIdx.x * 2 + 1] = ptx::globaltimer() - nanoseconds;
    }
  }
}
