// Small kernels that show, by what they write, that each launch feature and each wrapper used by staging does its work.
#include "ptx.cuh"

using ptx::u16;
using ptx::u32;
using ptx::u8;

struct ProbeArguments {
  u32* out;
  const u32* in;
  u32 count;
};

// out[i] of every wrapper, `count` results each: max_u16x2, pack_e4m3x2, shfl_xor, shfl, ld_global_nc_v4.
extern "C" __global__ void __launch_bounds__(128) wrappers(const __grid_constant__ ProbeArguments a) {
  ptx::grid_dependency_wait();
  const u32 i = blockIdx.x * 128 + threadIdx.x;
  const u32 first = a.in[2 * i], second = a.in[2 * i + 1];
  a.out[i] = ptx::max_u16x2(first, second);
  a.out[a.count + i] = ptx::pack_e4m3x2(__uint_as_float(first), __uint_as_float(second));
  a.out[2 * a.count + i] = ptx::shfl_xor(first, 5);
  a.out[3 * a.count + i] = ptx::shfl(first, (ptx::lane_index() * 7) % 32);
  const uint4 v = ptx::ld_global_nc_v4(a.in + 4 * (i / 2));
  a.out[4 * a.count + i] = i % 2 ? v.z ^ v.w : v.x ^ v.y;
}

// The rank of each block in its cluster, and the last word of `count` words of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(32) shape(const __grid_constant__ ProbeArguments a) {
  extern __shared__ u32 shared[];
  if (threadIdx.x == 0) shared[a.count - 1] = blockIdx.x * 3 + 1;
  __syncwarp();
  if (threadIdx.x == 1) {
    a.out[2 * blockIdx.x] = ptx::cluster_ctarank();
    a.out[2 * blockIdx.x + 1] = shared[a.count - 1];
  }
}

// One box of a tensor map, 64 x 32 bytes, to `out`; parameters of three kinds beside each other.
extern "C" __global__ void __launch_bounds__(32)
    box(const __grid_constant__ ProbeArguments a, const __grid_constant__ CUtensorMap map) {
  __shared__ alignas(128) u8 tile[32 * 64];
  __shared__ alignas(8) unsigned long long barrier;
  const ptx::Smem bar = ptx::shared_address(&barrier), dst = ptx::shared_address(tile);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, 32 * 64);
    ptx::tma_load_2d(dst, &map, bar, 64, static_cast<int>(a.count));
  }
  __syncwarp();
  ptx::mbarrier_wait(bar, 0);
  for (u32 i = threadIdx.x; i < 32 * 16; i += 32) a.out[i] = ptx::ld_shared_u32(dst + 4 * i);
}
