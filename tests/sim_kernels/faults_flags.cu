// Flags between CTAs and ranks.
//
// One fault a kernel; tests/test_sim_faults.py says how each must be reported. Those called good_* must run clean.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

extern "C" __global__ void flag_cycle(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) {
    while (ptx::ld_acquire_gpu(f + (1 - blockIdx.x)) == 0) {
    }
    ptx::st_release_gpu(f + blockIdx.x, 1u);
  }
}

extern "C" __global__ void two_flags_never_set(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) {
    while (ptx::ld_acquire_gpu(f + 8) == 0 && ptx::ld_acquire_gpu(f + 9) == 0) ptx::nanosleep(20);
  }
}

extern "C" __global__ void voting_spin(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  while (!ptx::all(ptx::ld_acquire_gpu(f + threadIdx.x) != 0)) ptx::nanosleep(20);
}

extern "C" __global__ void good_fence_and_relaxed(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    f[100] = 7;
    ptx::fence_acq_rel_gpu();
    ptx::st_relaxed_gpu(f + 101, 1u);
  } else {
    while (ptx::ld_relaxed_gpu(f + 101) == 0) ptx::nanosleep(20);
    ptx::fence_acq_rel_gpu();
    if (f[100] != 7) ptx::trap();
  }
}

extern "C" __global__ void relaxed_load_without_fence(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    f[100] = 7;
    ptx::st_release_gpu(f + 101, 1u);
  } else {
    while (ptx::ld_relaxed_gpu(f + 101) == 0) ptx::nanosleep(20);
    if (f[100] != 7) ptx::trap();
  }
}

extern "C" __global__ void relaxed_store_ends_a_release(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  // The second store carries no release: who sees it has not acquired what the first one published.
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    f[100] = 7;
    ptx::st_release_gpu(f + 101, 1u);
    ptx::st_relaxed_gpu(f + 101, 2u);
  } else {
    while (ptx::ld_acquire_gpu(f + 101) < 2) ptx::nanosleep(20);
    if (f[100] != 7) ptx::trap();
  }
}

extern "C" __global__ void good_counter_continues_a_release(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x < 2) {
    f[100 + blockIdx.x] = 7;
    if (blockIdx.x == 0) ptx::red_add_release_gpu(f + 110, 1u);
    if (blockIdx.x == 1) ptx::atom_add_release_gpu(f + 110, 1u);
  } else {
    while (ptx::ld_acquire_gpu(f + 110) < 2) ptx::nanosleep(20);
    if (f[100] + f[101] != 14) ptx::trap();
  }
}

extern "C" __global__ void good_last_arriver(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  // Everyone writes and counts; the last one reads what all wrote.
  f[200 + blockIdx.x] = blockIdx.x;
  if (threadIdx.x == 0 && ptx::atom_add_acq_rel_gpu(f + 110, 1u) + 1 == gridDim.x) {
    u32 sum = 0;
    for (u32 i = 0; i < gridDim.x; ++i) sum += f[200 + i];
    if (sum != gridDim.x * (gridDim.x - 1) / 2) ptx::trap();
  }
}

extern "C" __global__ void last_arriver_without_acquire(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  f[200 + blockIdx.x] = blockIdx.x;
  if (ptx::atom_add_release_gpu(f + 110, 1u) + 1 == gridDim.x) {
    u32 sum = 0;
    for (u32 i = 0; i < gridDim.x; ++i) sum += f[200 + i];
    if (sum == 99) ptx::trap();
  }
}

extern "C" __global__ void good_tag_in_data(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  // Words that carry their tag need no flag: relaxed pairs, each word by itself.
  u64* words = reinterpret_cast<u64*>(f);
  if (blockIdx.x == 0) {
    const u64 a = 5ull << 32 | threadIdx.x, b = 5ull << 32 | (threadIdx.x + 100);
    ptx::st_relaxed_sys_v2(words + threadIdx.x * 2, a, b);
  } else {
    u64 a = 0, b = 0;
    do {
      ptx::ld_relaxed_sys_v2(words + threadIdx.x * 2, a, b);
    } while (a >> 32 != 5 || b >> 32 != 5);
    if (static_cast<u32>(a) != threadIdx.x || static_cast<u32>(b) != threadIdx.x + 100) ptx::trap();
  }
}

extern "C" __global__ void tag_of_one_word_only(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  // The two words of a pair may arrive apart.
  u64* words = reinterpret_cast<u64*>(f);
  if (blockIdx.x == 0) {
    ptx::st_relaxed_sys_v2(words + threadIdx.x * 2, 5ull << 32 | threadIdx.x, 100 + threadIdx.x);
  } else {
    u64 a = 0, b = 0;
    do {
      ptx::ld_relaxed_sys_v2(words + threadIdx.x * 2, a, b);
    } while (a >> 32 != 5);
    if (b != threadIdx.x + 100) ptx::trap();
  }
}

extern "C" __global__ void plain_read_of_tagged_data(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  u64* words = reinterpret_cast<u64*>(f);
  if (blockIdx.x == 0) {
    ptx::st_relaxed_sys(words + threadIdx.x, 5ull << 32);
  } else if (words[threadIdx.x] == 9) {
    ptx::trap();
  }
}

extern "C" __global__ void plain_write_of_a_flag(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    f[0] = 1;
  } else {
    while (ptx::ld_acquire_gpu(f) == 0) ptx::nanosleep(20);
  }
}

extern "C" __global__ void gpu_scope_between_ranks(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  // Run on two ranks with one flag between them.
  if (threadIdx.x != 0) return;
  if (g[0] == 0) {
    ptx::st_relaxed_gpu(f, 1u);
  } else {
    while (ptx::ld_relaxed_sys(f) == 0) ptx::nanosleep(20);
  }
}

extern "C" __global__ void good_sys_scope_between_ranks(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  if (g[0] == 0) {
    ptx::st_relaxed_sys(f, 1u);
  } else {
    while (ptx::ld_relaxed_sys(f) == 0) ptx::nanosleep(20);
  }
}

extern "C" __global__ void good_transitive_release(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  // gpu scope inside the rank, sys scope to the peer: order passes on.
  if (threadIdx.x != 0) return;
  if (g[0] == 0 && blockIdx.x == 0) {
    f[8] = 3;
    ptx::st_release_gpu(f + 1, 1u);
  } else if (g[0] == 0) {
    while (ptx::ld_acquire_gpu(f + 1) == 0) ptx::nanosleep(20);
    ptx::st_release_sys(f, 1u);
  } else {
    while (ptx::ld_acquire_sys(f) == 0) ptx::nanosleep(20);
    if (f[8] != 3) ptx::trap();
  }
}

extern "C" __global__ void deadline(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x != 0) return;
  const u64 deadline = ptx::deadline_after(1000);
  while (ptx::ld_acquire_sys(f) == 0) {
    if (ptx::deadline_passed(deadline)) {
      f[1] = 1;
      return;
    }
    ptx::nanosleep(20);
  }
}

extern "C" __global__ void bulk_store_flag_without_full_wait(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  // The flag may overtake the data: the wait only covers reading the source.
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    ptx::st_shared_u32(base, 5);
    ptx::fence_proxy_async_shared();
    ptx::bulk_store(g + 1024, base, 16);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::st_release_gpu(f, 1u);
    ptx::bulk_wait<0>();
  } else {
    while (ptx::ld_acquire_gpu(f) == 0) ptx::nanosleep(20);
    if (g[1024] == 77) ptx::trap();
  }
}

extern "C" __global__ void good_bulk_store_flag(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    ptx::st_shared_u32(base, 5);
    ptx::fence_proxy_async_shared();
    ptx::bulk_store(g + 1024, base, 16);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    ptx::st_release_gpu(f, 1u);
  } else {
    while (ptx::ld_acquire_gpu(f) == 0) ptx::nanosleep(20);
    if (g[1024] != 5) ptx::trap();
  }
}

extern "C" __global__ void shared_fence_for_global_data(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  // Global data written by threads and read by a copy needs a proxy fence over global memory.
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    g[2048] = 1;
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive_expect_tx(base, 16);
    ptx::bulk_load(base + 16, g + 2048, 16, base);
    ptx::mbarrier_wait(base, 0);
  }
}

extern "C" __global__ void good_global_fence_for_global_data(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    g[2048] = 1;
    ptx::fence_proxy_async_global();
    ptx::mbarrier_arrive_expect_tx(base, 16);
    ptx::bulk_load(base + 16, g + 2048, 16, base);
    ptx::mbarrier_wait(base, 0);
    if ((ptx::ld_shared_u32(base + 16) & 0xff) != 1) ptx::trap();
  }
}
