// mbarriers and named barriers: what a test says after each step, and data handed from one warp to another.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;

struct BarrierArguments {
  u32* out;  // [64]: steps of thread 0; [64 + 32]: what warp 1 read; [96 + 32]: what warp 3 read
};

extern "C" __global__ void __launch_bounds__(128) barriers(const __grid_constant__ BarrierArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem base = ptx::shared_address(smem), two = base, filled = base + 8, data = base + 64;
  const u32 t = threadIdx.x, warp = ptx::warp_index(), lane = ptx::lane_index();
  if (t == 0) {
    ptx::mbarrier_init(two, 2);
    ptx::mbarrier_init(filled, 32);
    ptx::fence_mbarrier_init();
    u32 n = 0;
    const auto put = [&](bool v) { p.out[n++] = v; };
    put(ptx::mbarrier_test_wait(two, 1));  // the phase before the first counts as complete
    put(ptx::mbarrier_test_wait(two, 0));
    ptx::mbarrier_arrive(two);
    put(ptx::mbarrier_test_wait(two, 0));
    ptx::mbarrier_arrive(two);
    put(ptx::mbarrier_test_wait(two, 0));
    put(ptx::mbarrier_test_wait(two, 1));
    put(ptx::mbarrier_try_wait(two, 0));
    ptx::mbarrier_wait(two, 0);
    ptx::mbarrier_arrive(two);
    ptx::mbarrier_arrive_expect_tx(two, 0);
    put(ptx::mbarrier_test_wait(two, 1));
    put(ptx::mbarrier_test_wait(two, 0));
    ptx::mbarrier_wait(two, 1);
  }
  __syncthreads();
  // Warp 0 to warp 1 through an mbarrier, twice; warp 2 to warp 3 through a named barrier.
  if (warp == 0) {
    ptx::st_shared_u32(data + lane * 4, lane * lane);
    ptx::mbarrier_arrive(filled);
  } else if (warp == 1) {
    ptx::mbarrier_wait(filled, 0);
    p.out[64 + lane] = ptx::ld_shared_u32(data + (31 - lane) * 4);
  } else if (warp == 2) {
    ptx::st_shared_u32(data + (128 + lane * 4), lane + 1000);
    ptx::named_barrier_arrive(3, 64);
  } else {
    ptx::named_barrier_sync(3, 64);
    p.out[96 + lane] = ptx::ld_shared_u32(data + (128 + (31 - lane) * 4));
  }
  ptx::named_barrier_sync(1, 128);
}
