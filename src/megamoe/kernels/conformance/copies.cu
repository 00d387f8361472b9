// TMA boxes, bulk copies, cp.async and multicast: where the bytes land.
//
// boxes       one CTA of 128 threads. swizzled, linear: uint8 maps [60][512] over `image`, boxes 64 x 128 with the 128-byte
//             swizzle and 32 x 64 without; cube: [3][20][256] over `image`, box 1 x 16 x 128, swizzled; halves: BF16 map
//             [24][96] over `halves`, box 8 x 64, swizzled. out: shared memory after each load of kLoads.
// stores      one CTA. Boxes stored at places that reach over the far edges (an H200 faults on negative coordinates of a
//             store, and on columns that are no multiple of 16 bytes): floats: float32 map [40][48] over `floats`, box
//             16 x 32, swizzled; plain: uint8 map [40][64] over `plain`, box 16 x 32, linear. `bulk` gets bulk stores.
// bulk_loads  one CTA. Bulk loads of several sizes, and cp.async in two groups.
// pair        a cluster of two CTAs: each multicasts its half of a 2-D and a 3-D box and of a bulk copy. out[cta].
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u8;

constexpr u32 kThreads = 128, kBarrier = 0, kTile = 1024, kTileBytes = 8192;

MEGAMOE_DEVICE void init(Smem base) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base + kBarrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}
MEGAMOE_DEVICE void clear(Smem base, u32 bytes) {
  for (u32 i = threadIdx.x; i < bytes / 4; i += kThreads) ptx::st_shared_u32(base + (kTile + i * 4), 0xC7C7C7C7u);
  ptx::fence_proxy_async_shared();
  __syncthreads();
}
MEGAMOE_DEVICE void dump(Smem base, u8* out, u32 bytes) {
  for (u32 i = threadIdx.x; i < bytes / 16; i += kThreads) {
    *reinterpret_cast<uint4*>(out + i * 16) = ptx::ld_shared_v4(base + (kTile + i * 16));
  }
  __syncthreads();
}

struct BoxesArguments {
  const u8* image;
  const u8* halves;
  u8* out;  // [loads][8192]
};

extern "C" __global__ void __launch_bounds__(128, 1)
    boxes(const __grid_constant__ CUtensorMap swizzled, const __grid_constant__ CUtensorMap linear,
          const __grid_constant__ CUtensorMap cube, const __grid_constant__ CUtensorMap halves,
          const __grid_constant__ BoxesArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  init(base);
  constexpr int kPlaces[4][2] = {{0, 0}, {384, 16}, {-64, -9}, {448, 40}};
  u32 parity = 0;
  for (int n = 0; n < 16; ++n) {
    const int kind = n / 4, x = kPlaces[n % 4][0], y = kPlaces[n % 4][1];
    clear(base, kTileBytes);
    if (threadIdx.x == 0) {
      const u32 bytes = kind == 0 ? 64 * 128 : kind == 1 ? 32 * 64 : kind == 2 ? 16 * 128 : 8 * 64 * 2;
      ptx::mbarrier_arrive_expect_tx(base + kBarrier, bytes);
      if (kind == 0) ptx::tma_load_2d(base + kTile, &swizzled, base + kBarrier, x, y);
      if (kind == 1) ptx::tma_load_2d(base + kTile, &linear, base + kBarrier, x, y);
      if (kind == 2) ptx::tma_load_3d(base + kTile, &cube, base + kBarrier, x / 2, y / 2, n % 4 - 1);
      if (kind == 3) ptx::tma_load_2d(base + kTile, &halves, base + kBarrier, x / 8, y / 2);
    }
    ptx::mbarrier_wait(base + kBarrier, parity);
    parity ^= 1;
    dump(base, p.out + n * kTileBytes, kTileBytes);
  }
}

struct StoresArguments {
  float* floats;
  u8* plain;
  u8* bulk;
};

extern "C" __global__ void __launch_bounds__(128, 1)
    stores(const __grid_constant__ CUtensorMap floats, const __grid_constant__ CUtensorMap plain,
           const __grid_constant__ StoresArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  for (u32 i = threadIdx.x; i < 16 * 32; i += kThreads) {
    ptx::st_shared_f32(base + (kTile + i * 4), static_cast<float>(i) * 0.25f);
    ptx::st_shared_u8(base + (kTile + 2048 + i), static_cast<u8>(i * 5));
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    constexpr int kPlaces[4][2] = {{0, 0}, {32, 30}, {16, 27}, {48, 3}};
    for (const auto& at : kPlaces) {
      ptx::tma_store_2d(&floats, base + kTile, at[0], at[1]);
      ptx::tma_store_2d(&plain, base + (kTile + 2048), at[0], at[1]);
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
    }
    for (u32 n = 1; n <= 4; ++n) ptx::bulk_store(p.bulk + n * 256, base + (kTile + 64 * n), 16 * n * n);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::bulk_wait<0>();
  }
}

struct BulkLoadsArguments {
  const u8* image;
  u8* bulk;   // [8192]
  u8* async;  // [4096]
};

extern "C" __global__ void __launch_bounds__(128, 1) bulk_loads(const __grid_constant__ BulkLoadsArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  init(base);
  clear(base, kTileBytes);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(base + kBarrier, 16 + 272 + 4096);
    ptx::bulk_load(base + (kTile + 48), p.image + 16, 16, base + kBarrier);
    ptx::bulk_load(base + (kTile + 512), p.image + 1040, 272, base + kBarrier);
    ptx::bulk_load(base + (kTile + 4096), p.image + 4000, 4096, base + kBarrier);
  }
  while (!ptx::mbarrier_test_wait(base + kBarrier, 0)) {
  }
  dump(base, p.bulk, kTileBytes);
  clear(base, 4096);
  const u32 at = threadIdx.x * 16;
  ptx::cp_async_16(base + (kTile + (at ^ 48)), p.image + at);
  ptx::cp_async_commit();
  ptx::cp_async_16(base + (kTile + 2048 + at), p.image + 8192 - at);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  ptx::cp_async_wait<0>();
  __syncthreads();
  dump(base, p.async, 4096);
}

struct PairArguments {
  const u8* image;
  u8* out;  // [cta][3][4096]
};

extern "C" __global__ void __launch_bounds__(128, 1)
    pair(const __grid_constant__ CUtensorMap flat, const __grid_constant__ CUtensorMap cube, const __grid_constant__ PairArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 cta = ptx::cluster_ctarank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base + kBarrier, 1);
    ptx::mbarrier_init(base + 8, 2);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0) {
    const u32 half = kTile + cta * 2048;
    const int row = static_cast<int>(cta) * 16;
    ptx::mbarrier_arrive_expect_tx(base + kBarrier, 3 * 4096);
    ptx::tma_load_2d_multicast(base + half, &flat, base + kBarrier, 128, 8 + row, 3);
    ptx::tma_load_3d_multicast(base + (half + 4096), &cube, base + kBarrier, 0, 4, 1 + static_cast<int>(cta), 3);
    ptx::bulk_load_multicast(base + (half + 8192), p.image + 2048 * (3 - cta), 2048, base + kBarrier, 3);
  }
  ptx::mbarrier_wait(base + kBarrier, 0);
  dump(base, p.out + cta * 3 * 4096, 3 * 4096);
  // Each CTA tells both that it is done; the second barrier counts two.
  if (threadIdx.x < 2) ptx::mbarrier_arrive_cluster(ptx::map_cluster(base + 8, threadIdx.x));
  ptx::mbarrier_wait(base + 8, 0);
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
