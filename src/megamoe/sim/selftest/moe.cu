// A fused two-rank MoE layer in one page: dispatch by bulk copies to the peer, first GEMM with SwiGLU and requantisation,
// second GEMM, results stored into the token's rank, combine; one persistent kernel a rank.
//
// Sizes are fixed: H 512, I 256, 8 experts on two ranks, 40 tokens a rank, top-2; scales of the intermediate per 64.
// `bug` plants one mistake: 1 no proxy fence on the intermediate, 2 read wait before the peer's flag, 3 gpu scope to the peer.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

constexpr int kHidden = 512, kInter = 256, kExperts = 8, kTokens = 40, kTopk = 2, kLocal = kExperts / 2;
constexpr int kPairs = kTokens * kTopk, kTile = 128, kStages = 4, kBytes = kTile * 128;
constexpr int kColumns1 = 2 * kInter / kTile, kColumns2 = kHidden / kTile, kBlocks1 = kHidden / 128, kBlocks2 = kInter / 128;
constexpr int kTiles1 = kLocal * kColumns1, kTiles = kTiles1 + kLocal * kColumns2, kRegisters = kTile / 2;
constexpr int kRow = 2 * kStages * kBytes, kFull = kRow + kHidden, kEmpty = kFull + kStages * 8, kPulled = kEmpty + kStages * 8;

struct MoeRank {  // what the peer may touch
  u8* x;
  float* x_scales;
  u32* meta;
  u32* counts;
  u32* arrived;
  __nv_bfloat16* y;
  u32* y_done;
};
struct MoeArguments {
  MoeRank ranks[2];
  const u8* x;
  const float* x_scales;
  const int* ids;
  const float* weights;
  const float* w1_scales;
  const float* w2_scales;
  u8* h;
  float* h_scales;
  u32* h_done;
  __nv_bfloat16* out;
  int rank, bug;
};
struct MoeMaps {
  CUtensorMap x, w1, h, w2;
};
struct Position {
  u32 stage, parity;
  MEGAMOE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};
struct Work {
  bool first;
  int expert, column;
  MEGAMOE_DEVICE explicit Work(int t)
      : first(t < kTiles1), expert(first ? t / kColumns1 : (t - kTiles1) / kColumns2), column(first ? t % kColumns1 : (t - kTiles1) % kColumns2) {}
  MEGAMOE_DEVICE int blocks() const { return first ? kBlocks1 : kBlocks2; }
};

MEGAMOE_DEVICE void wait_sys(const u32* p, u32 value) {
  while (ptx::ld_acquire_sys(p) < value) ptx::nanosleep(32);
}

MEGAMOE_DEVICE void load(Smem base, const MoeMaps& maps, const MoeArguments& p) {
  Position at{0, 1};
  const MoeRank& own = p.ranks[p.rank];
  for (int t = static_cast<int>(blockIdx.x); t < kTiles; t += static_cast<int>(gridDim.x)) {
    const Work w(t);
    if (w.first) {
      u32 wanted = 0;
      for (int source = 0; source < 2; ++source) {
        const u32* count = own.counts + w.expert * 2 + source;
        wait_sys(count, 1);
        wanted += ptx::ld_acquire_sys(count) - 1;
      }
      wait_sys(own.arrived + w.expert, wanted);
    } else {
      while (ptx::ld_acquire_gpu(p.h_done + w.expert) < static_cast<u32>(kColumns1 * 2)) ptx::nanosleep(32);
      if (p.bug != 1) ptx::fence_proxy_async_global();
    }
    for (int k = 0; k < w.blocks(); ++k) {
      const Smem full = base + (kFull + at.stage * 8);
      ptx::mbarrier_wait(base + (kEmpty + at.stage * 8), at.parity);
      ptx::mbarrier_arrive_expect_tx(full, 2 * kBytes);
      ptx::tma_load_2d(base + at.stage * kBytes, w.first ? &maps.x : &maps.h, full, k * 128, w.expert * kTile);
      const int row = (w.expert * (w.first ? kColumns1 : kColumns2) + w.column) * kTile;
      ptx::tma_load_2d(base + (kStages + at.stage) * kBytes, w.first ? &maps.w1 : &maps.w2, full, k * 128, row);
      at.advance();
    }
  }
}

// Each warp-wide step sends one route's row to its expert's rank.
MEGAMOE_DEVICE void dispatch(Smem base, const MoeArguments& p) {
  const int lane = static_cast<int>(ptx::lane_index());
  const Smem row = base + kRow, bar = base + kPulled;
  u32 parity = 0;
  for (int q = static_cast<int>(blockIdx.x); q < kPairs; q += static_cast<int>(gridDim.x)) {
    const int token = q / kTopk, expert = p.ids[q], local = expert % kLocal;
    int place = 0;
    for (int j = 0; j < kPairs; j += 32) place += __popc(ptx::ballot(j + lane < q && p.ids[j + lane] == expert));
    const int to = local * kTile + p.rank * 64 + place;
    const MoeRank& d = p.ranks[expert / kLocal];
    if (lane < kBlocks1) d.x_scales[to * kBlocks1 + lane] = p.x_scales[token * kBlocks1 + lane];
    if (lane == 0) {
      d.meta[to] = static_cast<u32>(q + 1);
      ptx::mbarrier_arrive_expect_tx(bar, kHidden);
      ptx::bulk_load(row, p.x + token * kHidden, kHidden, bar);
      ptx::mbarrier_wait(bar, parity);
      ptx::bulk_store(d.x + to * kHidden, row, kHidden);
      ptx::bulk_commit();
      if (p.bug == 2) {
        ptx::bulk_wait_read<0>();
      } else {
        ptx::bulk_wait<0>();
      }
      ptx::fence_proxy_async();
    }
    parity ^= 1;
    ptx::syncwarp();
    if (lane == 0 && p.bug == 3) ptx::red_add_release_gpu(d.arrived + local, 1u);
    if (lane == 0 && p.bug != 3) ptx::red_add_release_sys(d.arrived + local, 1u);
  }
}

MEGAMOE_DEVICE void send_counts(const MoeArguments& p) {
  const int lane = static_cast<int>(ptx::lane_index());
  for (int expert = 0; expert < kExperts; ++expert) {
    u32 n = 0;
    for (int j = 0; j < kPairs; j += 32) n += static_cast<u32>(__popc(ptx::ballot(j + lane < kPairs && p.ids[j + lane] == expert)));
    if (lane == 0) ptx::st_release_sys(p.ranks[expert / kLocal].counts + expert % kLocal * 2 + p.rank, n + 1);
  }
}

// Columns alternate: 8 of gate, 8 of up.
MEGAMOE_DEVICE void first_epilogue(const MoeArguments& p, const Work& w, int row, const float (&acc)[kRegisters]) {
  const int lane = static_cast<int>(ptx::lane_index());
  float value[kRegisters / 2], scale[2] = {0.0f, 0.0f};
  for (int i = 0; i < kRegisters / 2; ++i) {
    const float gate = acc[i / 4 * 8 + i % 4], up = acc[i / 4 * 8 + 4 + i % 4];
    value[i] = gate * ptx::rcp_approx(1.0f + ptx::ex2_approx(gate * -1.44269504f)) * up;
    scale[i % 4 / 2] = max(scale[i % 4 / 2], fabsf(value[i]));
  }
  for (int r = 0; r < 2; ++r) {
    for (int step = 1; step < 4; step *= 2) scale[r] = max(scale[r], ptx::shfl_xor(scale[r], step));
    scale[r] = __fdiv_rn(max(scale[r], 1e-8f), 448.0f);
    if (lane % 4 == 0) p.h_scales[(row + r * 8) * (kInter / 64) + w.column] = scale[r];
  }
  for (int i = 0; i < kRegisters / 2; i += 2) {
    const int r = i % 4 / 2, column = w.column * 64 + i / 4 * 8 + lane % 4 * 2;
    const float inverse = __fdiv_rn(1.0f, scale[r]);
    *reinterpret_cast<ptx::u16*>(p.h + (row + r * 8) * kInter + column) = ptx::pack_e4m3x2(value[i] * inverse, value[i + 1] * inverse);
  }
}

MEGAMOE_DEVICE void second_epilogue(const MoeArguments& p, const Work& w, int row, u32 source, const float (&acc)[kRegisters]) {
  const int lane = static_cast<int>(ptx::lane_index());
  for (int r = 0; r < 2; ++r) {
    const u32 pair = p.ranks[p.rank].meta[row + r * 8];
    if (pair == 0) continue;
    __nv_bfloat16* to = p.ranks[source].y + static_cast<u64>(pair - 1) * kHidden + w.column * kTile + lane % 4 * 2;
    for (int i = 0; i < kRegisters; i += 4) {
      *reinterpret_cast<u32*>(to + i / 4 * 8) = ptx::pack_bf16x2(acc[i + r * 2], acc[i + r * 2 + 1]);
    }
  }
}

MEGAMOE_DEVICE void compute(Smem base, const MoeArguments& p, u32 warpgroup) {
  const u32 lane = ptx::lane_index();
  const MoeRank& own = p.ranks[p.rank];
  Position at{0, 0};
  for (int t = static_cast<int>(blockIdx.x); t < kTiles; t += static_cast<int>(gridDim.x)) {
    const Work w(t);
    const int row = w.expert * kTile + static_cast<int>(warpgroup * 64 + ptx::warp_index() % 4 * 16 + lane / 4);
    float acc[kRegisters], part[kRegisters];
    for (int i = 0; i < kRegisters; ++i) acc[i] = part[i] = 0.0f;
    for (int k = 0; k < w.blocks(); ++k) {
      const float* weight_scales = w.first ? p.w1_scales + (w.expert * kColumns1 + w.column) * kBlocks1 : p.w2_scales + (w.expert * kColumns2 + w.column) * kBlocks2;
      const float b_scale = __ldg(weight_scales + k);
      ptx::mbarrier_wait(base + (kFull + at.stage * 8), at.parity);
      const ptx::Desc a = ptx::make_desc(base + (at.stage * kBytes + warpgroup * (kBytes / 2)));
      const ptx::Desc b = ptx::make_desc(base + (kStages + at.stage) * kBytes);
      for (u32 half = 0; half < 2; ++half) {  // promotion every 64 of the depth, the intermediate's scale group
        float scale[2];
        for (int r = 0; r < 2; ++r) {
          scale[r] = b_scale * (w.first ? own.x_scales[(row + r * 8) * kBlocks1 + k] : p.h_scales[(row + r * 8) * (kInter / 64) + k * 2 + static_cast<int>(half)]);
        }
        ptx::wgmma_fence(part);
        for (u32 i = 0; i < 2; ++i) ptx::wgmma_e4m3(part, a + (half * 2 + i) * 32, b + (half * 2 + i) * 32, i != 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>(part);
        for (int i = 0; i < kRegisters; ++i) acc[i] = __fmaf_rn(part[i], scale[i / 2 % 2], acc[i]);
      }
      ptx::syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(base + (kEmpty + at.stage * 8));
      at.advance();
    }
    if (w.first) {
      first_epilogue(p, w, row, acc);
      if (p.bug != 1) ptx::fence_proxy_async_global();
    } else {
      second_epilogue(p, w, row, warpgroup, acc);  // warpgroup c has the rows that came from rank c
    }
    ptx::named_barrier_sync(1 + warpgroup, 128);
    if (threadIdx.x % 128 == 0 && w.first) ptx::red_add_release_gpu(p.h_done + w.expert, 1u);
    if (threadIdx.x % 128 == 0 && !w.first) ptx::red_add_release_sys(p.ranks[warpgroup].y_done, 1u);
  }
}

MEGAMOE_DEVICE void combine(const MoeArguments& p, u32 warp) {
  const MoeRank& own = p.ranks[p.rank];
  for (int t = static_cast<int>(blockIdx.x * 8 + warp); t < kTokens; t += static_cast<int>(gridDim.x) * 8) {
    if (ptx::lane_index() == 0) wait_sys(own.y_done, kExperts * kColumns2);
    ptx::syncwarp();
    for (int n = static_cast<int>(ptx::lane_index()); n < kHidden; n += 32) {
      float sum = 0.0f;
      for (int k = 0; k < kTopk; ++k) {
        sum += p.weights[t * kTopk + k] * __bfloat162float(own.y[static_cast<u64>(t * kTopk + k) * kHidden + n]);
      }
      p.out[t * kHidden + n] = __float2bfloat16(sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    selftest_moe(const __grid_constant__ MoeMaps maps, const __grid_constant__ MoeArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kStages; ++i) {
      ptx::name(base + (kFull + i * 8), "full", static_cast<int>(i));
      ptx::name(base + (kEmpty + i * 8), "empty", static_cast<int>(i));
      ptx::mbarrier_init(base + (kFull + i * 8), 1);
      ptx::mbarrier_init(base + (kEmpty + i * 8), 8);
    }
    ptx::name(base + kPulled, "pulled");
    ptx::mbarrier_init(base + kPulled, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const u32 warp = ptx::warp_index();
  if (warp < 4) {
    ptx::setmaxnreg_dec<40>();
    if (warp == 0) {
      ptx::role("loader");
      if (ptx::elect_one()) load(base, maps, p);
    } else if (warp == 1) {
      ptx::role("dispatch");
      dispatch(base, p);
    } else if (warp == 2 && blockIdx.x == 0) {
      ptx::role("counts");
      send_counts(p);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    ptx::role("math");
    compute(base, p, warp / 4 - 1);
    combine(p, warp - 4);
  }
}
