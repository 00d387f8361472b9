// A pair of CTAs: multicast loads, each CTA's half to both, and arrivals on each other's barriers.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u16;
using ptx::u32;
using ptx::u8;

struct ClusterArguments {
  const u8* flat;  // [64][256], seen by the map `flat`, box 128 x 16
  const u8* deep;  // [2][32][128], seen by the map `deep`, box 128 x 8 x 1
  u32* landed;     // [2][3 * 4096 / 4 + 4]: shared memory of each CTA, then its rank and its place in the grid
};

constexpr u32 kBytes = 4096, kLoad = 2048, kDeep = 1024, kBulk = 512;

extern "C" __global__ void __launch_bounds__(128, 1)
    cluster_pair(const __grid_constant__ CUtensorMap flat, const __grid_constant__ CUtensorMap deep,
         const __grid_constant__ ClusterArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem base = ptx::shared_address(smem), full = base + 3 * kBytes, empty = full + 8;
  const u32 t = threadIdx.x, cta = ptx::cluster_ctarank();
  if (t == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, 2);
    ptx::fence_mbarrier_init();
  }
  for (u32 i = t * 4; i < 3 * kBytes; i += 512) ptx::st_shared_u32(base + i, 0xeeeeeeeeu);
  ptx::fence_proxy_async_shared();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  constexpr u16 kBoth = 3;
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(full, 2 * (kLoad + kDeep + kBulk));
    ptx::tma_load_2d_multicast(base + cta * kLoad, &flat, full, 64, static_cast<int>(cta) * 16, kBoth);
    ptx::tma_load_3d_multicast(base + (kBytes + cta * kDeep), &deep, full, 0, static_cast<int>(cta) * 8, 1, kBoth);
    ptx::bulk_load_multicast(base + (2 * kBytes + cta * kBulk), p.flat + (cta + 1) * kBulk, kBulk, full, kBoth);
  }
  ptx::mbarrier_wait(full, 0);
  if (t < 2) ptx::mbarrier_arrive_cluster(ptx::map_cluster(empty, t));  // each CTA to both
  ptx::mbarrier_wait(empty, 0);
  u32* out = p.landed + cta * (3 * kBytes / 4 + 4);
  for (u32 i = t; i < 3 * kBytes / 4; i += 128) out[i] = ptx::ld_shared_u32(base + i * 4);
  if (t == 0) {
    out[3 * kBytes / 4] = cta;
    out[3 * kBytes / 4 + 1] = blockIdx.x;
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
