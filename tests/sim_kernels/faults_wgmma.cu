// WGMMA and matrices: 128 threads.
//
// One fault a kernel; tests/test_sim_faults.py says how each must be reported. Those called good_* must run clean.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

// Both operand tiles, 64 rows of 128 ones (e4m3 0x38).
MEGAMOE_DEVICE void fill(Smem base) {
  for (u32 i = threadIdx.x; i < 4096; i += 128) ptx::st_shared_u32(base + i * 4, 0x38383838);
}
MEGAMOE_DEVICE void zero(float (&acc)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] = 0.0f;
}

extern "C" __global__ void good_product(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
  for (int i = 0; i < 32; ++i) {
    if (acc[i] != 128.0f) ptx::trap();
  }
}

extern "C" __global__ void missing_proxy_fence(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void missing_barrier(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void missing_wgmma_fence(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void accumulator_written_in_flight(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  acc[3] = 0.0f;
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void accumulator_read_in_flight(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  const float early = acc[5];
  ptx::wgmma_wait<0>(acc);
  if (!(early == early)) ptx::trap();
}

extern "C" __global__ void accumulator_written_after_fence(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  acc[0] = 3.0f;
  ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 8192), true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void exit_without_wait(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
}

extern "C" __global__ void operands_overwritten_in_flight(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  for (u32 k = 0; k < 4; ++k) ptx::wgmma_e4m3(acc, ptx::make_desc(base) + 32 * k, ptx::make_desc(base + 8192) + 32 * k, k != 0);
  ptx::wgmma_commit();
  ptx::st_shared_u32(base + threadIdx.x * 4, 0);
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void operands_differ(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 8192) + (threadIdx.x < 64 ? 0 : 32), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void tile_misaligned(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  ptx::wgmma_e4m3(acc, ptx::make_desc(base + 128), ptx::make_desc(base + 8192), false);
}

extern "C" __global__ void operand_out_of_bounds(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 61440), false);
}

extern "C" __global__ void wait_for_the_wrong_accumulator(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  float other[32];
  zero(other);
  ptx::wgmma_fence(acc);
  ptx::wgmma_fence(other);
  ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 8192), false);
  ptx::wgmma_commit();
  ptx::wgmma_e4m3(other, ptx::make_desc(base), ptx::make_desc(base + 8192), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>(other);
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void another_width_in_flight(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  ptx::wgmma_fence(acc);
  ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 8192), false);
  ptx::wgmma_commit();
  ptx::wgmma_e4m3(*reinterpret_cast<float(*)[16]>(acc), ptx::make_desc(base), ptx::make_desc(base + 8192), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void good_two_in_flight(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  float other[32];
  zero(other);
  ptx::wgmma_fence(acc);
  ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 8192), false);
  ptx::wgmma_commit();
  for (int i = 0; i < 3; ++i) {
    ptx::wgmma_fence(other);
    ptx::wgmma_e4m3(other, ptx::make_desc(base), ptx::make_desc(base + 8192), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>(acc);
    if (acc[7] != 32.0f * (i + 1)) ptx::trap();
    ptx::wgmma_fence(acc);
    ptx::wgmma_e4m3(acc, ptx::make_desc(base), ptx::make_desc(base + 8192), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>(other);
    if (other[7] != 32.0f * (i + 1)) ptx::trap();
  }
  ptx::wgmma_wait<0>(acc);
}

extern "C" __global__ void good_a_from_registers(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  fill(base);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[32];
  zero(acc);
  u32 a[4];
  const u32 row = ptx::warp_index() * 16 + ptx::lane_index() % 16, unit = ptx::lane_index() / 16;
  ptx::ldmatrix_x4(a, base + (row * 128 + (unit ^ row % 8) * 16));
  ptx::wgmma_fence(acc);
  ptx::wgmma_e4m3(acc, a, ptx::make_desc(base + 8192), true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(acc);
  if (acc[9] != 32.0f) ptx::trap();
}

extern "C" __global__ void good_matrices(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 lane = ptx::lane_index();
  // Element (r, c) of matrix m is 64 m + 8 r + c; lane l holds columns 2 (l % 4) and the next of row l / 4.
  u32 r[4];
  for (u32 m = 0; m < 4; ++m) {
    const u32 first = 64 * m + lane / 4 * 8 + lane % 4 * 2;
    r[m] = first | (first + 1) << 16;
  }
  ptx::stmatrix_x4(base + lane * 16, r[0], r[1], r[2], r[3]);
  ptx::stmatrix_x4_trans(base + (512 + lane * 16), r[0], r[1], r[2], r[3]);
  ptx::stmatrix_x2_trans(base + (1024 + lane * 16), r[2], r[3]);
  ptx::syncwarp();
  u32 back[4];
  ptx::ldmatrix_x4(back, base + lane * 16);
  bool ok = true;
  for (u32 m = 0; m < 4; ++m) ok = ok && back[m] == r[m];
  for (u32 i = lane; i < 256; i += 32) {
    const u32 m = i / 64, row = i / 8 % 8, column = i % 8;
    const auto element = [&](u32 at) { return ptx::ld_shared_u32(base + at / 4 * 4) >> (at % 4 * 8) & 0xffff; };
    ok = ok && element(i * 2) == i && element(512 + i * 2) == 64 * m + column * 8 + row;
    if (m < 2) ok = ok && element(1024 + i * 2) == 64 * (m + 2) + column * 8 + row;
  }
  if (!ok) ptx::trap();
}

extern "C" __global__ void matrix_store_read_without_syncwarp(const __grid_constant__ CUtensorMap map, u8* g, u32* f) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 lane = ptx::lane_index();
  ptx::stmatrix_x4(base + lane * 16, lane, lane, lane, lane);
  if (ptx::ld_shared_u32(base + (lane ^ 5) * 16) == 99) ptx::trap();
}
