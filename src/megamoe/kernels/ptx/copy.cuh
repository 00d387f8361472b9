// Asynchronous copies: tensor maps (TMA), 1-D bulk copies, cp.async, matrix loads and stores.
#pragma once
#include "base.cuh"

namespace ptx {

MEGAMOE_DEVICE void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box of the map at (x, y[, z]), x the contiguous dimension in elements; completes `bar` with the box's bytes. x times the
// element's size must be a multiple of 16; the box may reach over any edge (zeros), a stored one only over the far edges.
MEGAMOE_DEVICE void tma_load_2d(Smem dst, const CUtensorMap* map, Smem bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          dst.address),
      "l"(map), "r"(bar.address), "r"(x), "r"(y)
      : "memory");
}
MEGAMOE_DEVICE void tma_load_3d(Smem dst, const CUtensorMap* map, Smem bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          dst.address),
      "l"(map), "r"(bar.address), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// The box lands at the same offset in every CTA of `mask`, completing each one's barrier at the same offset.
MEGAMOE_DEVICE void tma_load_2d_multicast(Smem dst, const CUtensorMap* map, Smem bar, int x, int y, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(dst.address),
      "l"(map), "r"(bar.address), "r"(x), "r"(y), "h"(mask)
      : "memory");
}
MEGAMOE_DEVICE void tma_load_3d_multicast(Smem dst, const CUtensorMap* map, Smem bar, int x, int y, int z, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(dst.address),
      "l"(map), "r"(bar.address), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}
MEGAMOE_DEVICE void tma_store_2d(const CUtensorMap* map, Smem src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(src.address), "r"(x), "r"(y)
               : "memory");
}

// 1-D copies: 16-byte aligned addresses, a multiple of 16 bytes.
MEGAMOE_DEVICE void bulk_load(Smem dst, const void* src, u32 bytes, Smem bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst.address),
      "l"(src), "r"(bytes), "r"(bar.address)
      : "memory");
}
MEGAMOE_DEVICE void bulk_load_multicast(Smem dst, const void* src, u32 bytes, Smem bar, u16 mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
          "r"(dst.address),
      "l"(src), "r"(bytes), "r"(bar.address), "h"(mask)
      : "memory");
}
// dst may lie on a peer GPU.
MEGAMOE_DEVICE void bulk_store(void* dst, Smem src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src.address), "r"(bytes)
               : "memory");
}
MEGAMOE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most Pending of this thread's groups are unfinished; _read: unfinished only in reading their source.
template <int Pending>
MEGAMOE_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}
template <int Pending>
MEGAMOE_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// 16 bytes of global memory to shared memory, past L1, by this thread.
MEGAMOE_DEVICE void cp_async_16(Smem dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst.address), "l"(src) : "memory");
}
MEGAMOE_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
MEGAMOE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
MEGAMOE_DEVICE void stmatrix_x4(Smem row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row.address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
MEGAMOE_DEVICE void stmatrix_x4_trans(Smem row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row.address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
MEGAMOE_DEVICE void stmatrix_x2_trans(Smem row, u32 r0, u32 r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(row.address), "r"(r0), "r"(r1)
               : "memory");
}
MEGAMOE_DEVICE void ldmatrix_x4(u32 (&r)[4], Smem row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.address)
               : "memory");
}

}  // namespace ptx
