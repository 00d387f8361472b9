// Barriers, collectives, registers, shared memory.
//
// One fault a kernel; tests/test_sim_faults.py says how each must be reported. Those called good_* must run clean.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

extern "C" __global__ void uninitialised_mbarrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::mbarrier_wait(base, 0);
}

extern "C" __global__ void overwritten_mbarrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::mbarrier_init(base, 32);
  __syncthreads();
  if (threadIdx.x == 3) ptx::st_shared_u32(base, 1);
  ptx::syncwarp();
  ptx::mbarrier_arrive(base);
}

extern "C" __global__ void lost_arrival(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::name(base, "mine");
    ptx::mbarrier_init(base, 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::mbarrier_arrive(base);
  ptx::mbarrier_wait(base, 0);
}

extern "C" __global__ void too_many_arrivals(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::mbarrier_init(base, 2);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(base, 16);
    ptx::mbarrier_arrive(base);
    ptx::mbarrier_arrive(base);
  }
}

extern "C" __global__ void init_without_barrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::mbarrier_init(base, 64);
  if (threadIdx.x == 0) ptx::st_relaxed_gpu(f, 1u);
  while (ptx::ld_relaxed_gpu(f) == 0) ptx::nanosleep(20);
  ptx::mbarrier_arrive(base);
}

extern "C" __global__ void test_wait_spin_that_never_ends(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    while (!ptx::mbarrier_test_wait(base, 0)) ptx::nanosleep(20);
  }
}

extern "C" __global__ void good_test_wait(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::mbarrier_init(base, 1);
  __syncthreads();
  if (threadIdx.x == 0) ptx::mbarrier_arrive(base);
  if (threadIdx.x == 32) {
    while (!ptx::mbarrier_test_wait(base, 0)) ptx::nanosleep(20);
  }
}

extern "C" __global__ void collective_mismatch(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x < 16) {
    ptx::ballot(true);
  } else {
    ptx::syncwarp();
  }
}

extern "C" __global__ void collective_without_exited_lanes(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x < 30) ptx::ballot(true);
}

extern "C" __global__ void warp_index_of_some_lanes(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) f[0] = ptx::warp_index();  // a shuffle
  ptx::syncwarp();
}

extern "C" __global__ void named_barrier_count_mismatch(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  ptx::named_barrier_sync(3, threadIdx.x < 64 ? 128 : 64);
}

extern "C" __global__ void named_barrier_lost_warp(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x >= 32) ptx::named_barrier_sync(2, 128);
}

extern "C" __global__ void good_named_barrier_arrive(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x < 32) {
    ptx::st_shared_u32(base + threadIdx.x * 4, threadIdx.x);
    ptx::named_barrier_arrive(1, 64);
  } else {
    ptx::named_barrier_sync(1, 64);
    if (ptx::ld_shared_u32(base + (threadIdx.x - 32) * 4) != threadIdx.x - 32) ptx::trap();
  }
}

extern "C" __global__ void read_before_arrive_only_barrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x < 32) {
    ptx::named_barrier_arrive(1, 64);
    f[threadIdx.x] = ptx::ld_shared_u32(base + threadIdx.x * 4);
  } else {
    ptx::st_shared_u32(base + (threadIdx.x - 32) * 4, threadIdx.x);
    ptx::named_barrier_sync(1, 64);
  }
}

extern "C" __global__ void registers_never_free(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x >= 128) ptx::setmaxnreg_inc<232>();
}

extern "C" __global__ void good_registers(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
  } else {
    ptx::setmaxnreg_inc<232>();
  }
}

extern "C" __global__ void cluster_barrier_missed(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (ptx::cluster_ctarank() == 0 || threadIdx.x < 32) ptx::cluster_arrive();
  if (ptx::cluster_ctarank() == 0) ptx::cluster_wait();
}

extern "C" __global__ void arrive_at_exited_cta(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::mbarrier_init(base, 1);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (ptx::cluster_ctarank() == 1) return;
  if (threadIdx.x != 0) return;
  while (ptx::ld_relaxed_gpu(f) == 0) {
    for (int i = 0; i < 64; ++i) ptx::nanosleep(20);
    ptx::st_relaxed_gpu(f, 1u);
  }
  ptx::mbarrier_arrive_cluster(ptx::map_cluster(base, 1));
}

extern "C" __global__ void good_cluster_handover(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_cluster(ptx::map_cluster(base, 1 - ptx::cluster_ctarank()));
    ptx::mbarrier_wait(base, 0);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

extern "C" __global__ void plain_trap(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 5) ptx::trap();
}

extern "C" __global__ void intra_warp_race(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u32(base + threadIdx.x * 4, threadIdx.x);
  if (ptx::ld_shared_u32(base + (threadIdx.x ^ 1) * 4) == 77) ptx::trap();
}

extern "C" __global__ void good_intra_warp(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u32(base + threadIdx.x * 4, threadIdx.x);
  ptx::syncwarp();
  if (ptx::ld_shared_u32(base + (threadIdx.x ^ 1) * 4) != (threadIdx.x ^ 1)) ptx::trap();
}

extern "C" __global__ void shuffle_orders_nothing(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::st_shared_u32(base, 7);
  if (ptx::shfl(1, 0) == 1 && threadIdx.x == 9 && ptx::ld_shared_u32(base) == 3) ptx::trap();
}

extern "C" __global__ void vote_orders_nothing(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::st_shared_u32(base, 7);
  if (ptx::all(true) && threadIdx.x == 9 && ptx::ld_shared_u32(base) == 3) ptx::trap();
}

extern "C" __global__ void static_shared_race(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  __shared__ float x[4];
  if (threadIdx.x == 0) x[1] = 1;
  if (threadIdx.x == 63 && x[1] == 5) ptx::trap();
}

extern "C" __global__ void good_static_shared(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  __shared__ u32 x[64];
  x[threadIdx.x] = blockIdx.x;
  __syncthreads();
  if (x[63 - threadIdx.x] != blockIdx.x) ptx::trap();
}

extern "C" __global__ void good_bytes_of_one_word(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u8(base + threadIdx.x, 1);
  __syncthreads();
  ptx::st_shared_u8(base + threadIdx.x, 2);
}

extern "C" __global__ void good_collectives(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  const u32 t = threadIdx.x;
  bool ok = ptx::ballot(t % 3 == 0) == 0x49249249u && ptx::any(t == 4) && !ptx::all(t == 4);
  ok = ok && ptx::shfl(t * 2, 5) == 10 && ptx::shfl_xor(t, 3) == (t ^ 3) && ptx::shfl_up(t, 2) == (t < 2 ? t : t - 2);
  ok = ok && ptx::match_any(t / 8) == 0xffu << (t / 8 * 8) && ptx::reduce_add(t) == 496 && ptx::reduce_max(t) == 31;
  ok = ok && ptx::shfl(1.5 * t, 31) == 46.5 && __popc(ptx::ballot(ptx::elect_one())) == 1;
  if (!ok) ptx::trap();
}

extern "C" __global__ void good_shared_counter(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::st_shared_u32(base, 0);
  __syncthreads();
  ptx::atom_add_shared(base, 2);
  __syncthreads();
  if (ptx::ld_shared_u32(base) != 2 * blockDim.x) ptx::trap();
}

extern "C" __global__ void shared_counter_without_barrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::st_shared_u32(base, 0);
  ptx::atom_add_shared(base, 2);
}
