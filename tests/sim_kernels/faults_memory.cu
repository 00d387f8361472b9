// Bounds, copies and the async proxy.
//
// One fault a kernel; tests/test_sim_faults.py says how each must be reported. Those called good_* must run clean.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

extern "C" __global__ void shared_out_of_bounds(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u8(base + 4096 + threadIdx.x, 1);
}

extern "C" __global__ void global_out_of_bounds(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  f[1024 + threadIdx.x] = 1;
}

extern "C" __global__ void global_far_out_of_bounds(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) f[(1u << 28) + 7] = 1;
}

extern "C" __global__ void another_ranks_memory(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (f[threadIdx.x] == 77) ptx::trap();
}

extern "C" __global__ void write_to_read_only(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) g[0] = 1;
}

extern "C" __global__ void null_pointer(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) *static_cast<volatile u32*>(nullptr) = 1;
}

extern "C" __global__ void plain_spin(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  const volatile u32* flag = f;
  while (*flag == 0) {
  }
}

extern "C" __global__ void mutable_global(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  static u32 calls;
  if (threadIdx.x == 0) ++calls;
}

extern "C" __global__ void misaligned_vector(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) ptx::st_shared_v4(base + 8, make_uint4(0, 0, 0, 0));
}

extern "C" __global__ void read_only_load_of_written_data(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  if (threadIdx.x == 0) f[0] = 1;
  __syncthreads();
  if (threadIdx.x == 40 && __ldg(f) == 3) ptx::trap();
}

extern "C" __global__ void uninitialised_shared_is_nan(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  const float v = ptx::ld_shared_f32(base + threadIdx.x * 4);
  if (v == v) f[0] = 1; else ptx::trap();
}

extern "C" __global__ void bulk_store_before_exit(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::bulk_store(g, base, 1024);
    ptx::bulk_commit();
  }
}

extern "C" __global__ void bulk_store_out_of_bounds(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::bulk_store(g + 65536 - 512, base, 1024);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

extern "C" __global__ void bulk_store_misaligned(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::bulk_store(g + 8, base, 1024);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

extern "C" __global__ void bulk_source_reused(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u32(base + threadIdx.x * 4, threadIdx.x);
  ptx::fence_proxy_async_shared();
  ptx::syncwarp();
  if (threadIdx.x == 0) {
    ptx::bulk_store(g, base, 128);
    ptx::bulk_commit();
  }
  ptx::syncwarp();
  ptx::st_shared_u32(base + threadIdx.x * 4, 5);
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}

extern "C" __global__ void good_bulk_source_reused(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u32(base + threadIdx.x * 4, threadIdx.x);
  ptx::fence_proxy_async_shared();
  ptx::syncwarp();
  if (threadIdx.x == 0) {
    ptx::bulk_store(g, base, 128);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
  ptx::syncwarp();
  ptx::st_shared_u32(base + threadIdx.x * 4, 5);
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}

extern "C" __global__ void bulk_store_of_another_thread_not_waited(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  // Thread 0 waits for its own store; that says nothing about thread 32's.
  if (threadIdx.x % 32 == 0) {
    ptx::bulk_store(g + threadIdx.x * 16, base + threadIdx.x * 16, 64);
    ptx::bulk_commit();
    if (threadIdx.x == 0) ptx::bulk_wait<0>();
  }
  __syncthreads();
  if (threadIdx.x == 1 && g[32 * 16] == 1) ptx::trap();
  if (threadIdx.x == 32) ptx::bulk_wait<0>();
}

extern "C" __global__ void cp_async_read_by_another_before_barrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::cp_async_16(base + threadIdx.x * 16, g + threadIdx.x * 16);
  ptx::cp_async_commit();
  __syncthreads();
  ptx::cp_async_wait<0>();
  if (ptx::ld_shared_u32(base + (threadIdx.x ^ 33) * 16) == 3) ptx::trap();
}

extern "C" __global__ void good_cp_async(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::cp_async_16(base + threadIdx.x * 16, g + threadIdx.x * 16);
  ptx::cp_async_commit();
  ptx::cp_async_16(base + (64 + threadIdx.x) * 16, g + (64 + threadIdx.x) * 16);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  __syncthreads();
  const u32 other = (threadIdx.x ^ 33) * 16;
  if (ptx::ld_shared_u32(base + other) != *reinterpret_cast<const u32*>(g + other)) ptx::trap();
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (ptx::ld_shared_u32(base + (1024 + other)) != *reinterpret_cast<const u32*>(g + 1024 + other)) ptx::trap();
}

extern "C" __global__ void cp_async_not_waited(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::cp_async_16(base + threadIdx.x * 16, g + threadIdx.x * 16);
  ptx::cp_async_commit();
}

extern "C" __global__ void tma_destination_misaligned(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(base, 8192);
    ptx::tma_load_2d(base + 2560, &map, base, 0, 0);
    ptx::mbarrier_wait(base, 0);
  }
}

extern "C" __global__ void tma_not_a_map(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    const CUtensorMap wrong{};
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    ptx::tma_load_2d(base + 1024, &wrong, base, 0, 0);
  }
}

extern "C" __global__ void tma_barrier_without_init_fence(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::mbarrier_arrive_expect_tx(base, 8192);
    ptx::tma_load_2d(base + 1024, &map, base, 0, 0);
    ptx::mbarrier_wait(base, 0);
  }
}

extern "C" __global__ void tma_exit_while_loading(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(base, 8192);
    ptx::tma_load_2d(base + 1024, &map, base, 0, 0);
  }
}

extern "C" __global__ void tma_read_before_wait(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(base, 8192);
    ptx::tma_load_2d(base + 1024, &map, base, 0, 0);
    if (ptx::ld_shared_u32(base + 1024) == 3) ptx::trap();
    ptx::mbarrier_wait(base, 0);
  }
}

extern "C" __global__ void generic_write_then_tma_overwrite(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  ptx::st_shared_u32(base + 1024, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    ptx::mbarrier_arrive_expect_tx(base, 8192);
    ptx::tma_load_2d(base + 1024, &map, base, 0, 0);
    ptx::mbarrier_wait(base, 0);
  }
}

extern "C" __global__ void good_tma_box(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  // Columns 0..127, rows -2..61 of a 60-row map: rows outside are zero; the 128-byte swizzle.
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(base, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(base, 8192);
    ptx::tma_load_2d(base + 1024, &map, base, 0, -2);
  }
  __syncthreads();
  ptx::mbarrier_wait(base, 0);
  for (u32 i = threadIdx.x; i < 8192; i += blockDim.x) {
    const int row = static_cast<int>(i / 128) - 2;
    const u32 wanted = row >= 0 && row < 60 ? g[row * 128 + static_cast<int>(i % 128)] : 0;
    const u32 at = i ^ (i >> 3 & 0x70);
    if ((ptx::ld_shared_u32(base + (1024 + at / 4 * 4)) >> (at % 4 * 8) & 0xff) != wanted) ptx::trap();
  }
}
