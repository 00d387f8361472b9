// Asynchronous copies of one CTA: tensor maps with swizzle and clipping, 1-D bulk copies, cp.async. What lands in
// shared memory is written out byte by byte, what is stored goes to `stored` and `row`.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u8;

struct CopyArguments {
  const u8* flat;   // [70][320], seen by the map `flat`, box 128 x 64
  const u8* deep;   // [3][40][256], seen by the map `deep`, box 128 x 32 x 1
  const u8* plain;  // [20][64], seen by the map `plain` without swizzle, box 32 x 16
  u32* landed;      // [8][2048] words: shared memory after each load
  u8* stored;       // [70][320], seen by the map `stored`, box 128 x 64
  u8* row;          // [4096]
};

constexpr u32 kBox = 8192;

extern "C" __global__ void __launch_bounds__(128, 1)
    copies(const __grid_constant__ CUtensorMap flat, const __grid_constant__ CUtensorMap deep,
           const __grid_constant__ CUtensorMap plain, const __grid_constant__ CUtensorMap stored,
           const __grid_constant__ CopyArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem box = ptx::shared_address(smem), bar = box + kBox;
  const u32 t = threadIdx.x;
  if (t == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&flat);
  }
  __syncthreads();
#pragma unroll 1
  for (u32 step = 0; step < 8; ++step) {
    for (u32 i = t * 4; i < kBox; i += 512) ptx::st_shared_u32(box + i, 0xeeeeeeeeu);
    ptx::fence_proxy_async_shared();
    __syncthreads();
    if (t == 0) {
      const u32 bytes = step < 3 ? 8192 : step < 5 ? 4096 : step == 5 ? 512 : step == 6 ? 2048 : 0;
      ptx::mbarrier_arrive_expect_tx(bar, bytes);
      if (step == 0) ptx::tma_load_2d(box, &flat, bar, 0, 0);
      if (step == 1) ptx::tma_load_2d(box, &flat, bar, 256, 32);  // past the right and the lower edge: zeros
      if (step == 2) ptx::tma_load_2d(box, &flat, bar, -64, -8);  // past the left and the upper edge
      if (step == 3) ptx::tma_load_3d(box + 1024, &deep, bar, 128, 16, 1);  // past the group's last row: zeros
      if (step == 4) ptx::tma_load_3d(box, &deep, bar, 64, 0, 2);
      if (step == 5) ptx::tma_load_2d(box + 128, &plain, bar, 16, 8);
      if (step == 6) ptx::bulk_load(box + 512, p.flat + 1024, 2048, bar);
    }
    if (step == 7) {
      ptx::cp_async_16(box + t * 32, p.flat + t * 16);
      ptx::cp_async_commit();
      ptx::cp_async_16(box + (4096 + t * 16), p.flat + 4096 + t * 16);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
      ptx::cp_async_wait<0>();
    }
    ptx::mbarrier_wait(bar, step % 2);
    __syncthreads();
    for (u32 i = t; i < kBox / 4; i += 128) p.landed[step * kBox / 4 + i] = ptx::ld_shared_u32(box + i * 4);
    __syncthreads();
  }
  // Shared memory with known bytes: two clipped tensor stores, then two bulk stores.
  for (u32 i = t * 4; i < kBox; i += 512) ptx::st_shared_u32(box + i, (i >> 2) * 2654435761u);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (t == 0) {
    ptx::tma_store_2d(&stored, box, 256, 40);
    ptx::tma_store_2d(&stored, box, 0, 2);
    ptx::bulk_commit();
    ptx::bulk_store(p.row + 16, box + 32, 1024);
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    ptx::bulk_store(p.row + 2048, box + 4096, 16);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}
