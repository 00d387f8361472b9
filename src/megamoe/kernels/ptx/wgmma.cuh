// WGMMA: asynchronous e4m3 matrix products of one warpgroup, float32 accumulators in registers.
//
// One product is m64 nN k32. Fragment of thread t (warp w = t / 32 % 4, lane l): d[4 j + 2 r + c] is row
// 16 w + l / 4 + 8 r, column 8 j + 2 (l % 4) + c. Order of a group: fill or zero accumulators, wgmma_fence(acc), products,
// wgmma_commit(), wgmma_wait<pending>(acc). The accumulator must not be touched or copied between fence and wait.
#pragma once
#include "base.cuh"
#include "wgmma_gen.cuh"

namespace ptx {

// Low word of the 64-bit descriptor; the high word is the same for every tile (1024-byte groups of 8 rows, 128 B swizzle).
struct Desc {
  u32 low;
};
MEGAMOE_DEVICE Desc make_desc(Smem tile) { return {((tile.address & 0x3FFFF) >> 4) | (1u << 16)}; }
// `bytes` a multiple of 16: along a row (32 per product of k32), or whole groups of 8 rows (1024), or whole stages.
MEGAMOE_DEVICE Desc operator+(Desc d, u32 bytes) { return {d.low + (bytes >> 4)}; }
MEGAMOE_DEVICE u64 descriptor_bits(Desc d) { return (static_cast<u64>(64u | (1u << 30)) << 32) | d.low; }

// Keeps the compiler from moving accesses of `d` across this point.
template <int R>
MEGAMOE_DEVICE void pin(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int R>
MEGAMOE_DEVICE void wgmma_fence(float (&acc)[R]) {
  pin(acc);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
MEGAMOE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most Pending groups are unfinished afterwards; `acc` belongs to a finished one.
template <int Pending, int R>
MEGAMOE_DEVICE void wgmma_wait(float (&acc)[R]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
  pin(acc);
}

// acc[64 x 2R] (+)= A[64 x 32] B[2R x 32]^T; `accumulate` false overwrites. A and B K-major in shared memory.
template <int R>
MEGAMOE_DEVICE void wgmma_e4m3(float (&acc)[R], Desc a, Desc b, bool accumulate) {
  wgmma_ss(acc, descriptor_bits(a), descriptor_bits(b), accumulate);
}
// The same with A from registers: a[4] as ldmatrix_x4 gives it.
template <int R>
MEGAMOE_DEVICE void wgmma_e4m3(float (&acc)[R], const u32 (&a)[4], Desc b, bool accumulate) {
  wgmma_rs(acc, a, descriptor_bits(b), accumulate);
}

}  // namespace ptx
