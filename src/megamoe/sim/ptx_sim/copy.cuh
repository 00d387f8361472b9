// Asynchronous copies: tensor maps (TMA), 1-D bulk copies, cp.async, matrix loads and stores.
#pragma once
#include "base.cuh"

namespace ptx {

MEGAMOE_DEVICE void prefetch_tensormap(const CUtensorMap* map) { sim::prefetch_tensormap(map); }

MEGAMOE_DEVICE void tma_load_2d(Smem dst, const CUtensorMap* map, Smem bar, int x, int y) {
  sim::tma_load(dst.pointer, map, bar.pointer, 2, x, y, 0, 0);
}
MEGAMOE_DEVICE void tma_load_3d(Smem dst, const CUtensorMap* map, Smem bar, int x, int y, int z) {
  sim::tma_load(dst.pointer, map, bar.pointer, 3, x, y, z, 0);
}
MEGAMOE_DEVICE void tma_load_2d_multicast(Smem dst, const CUtensorMap* map, Smem bar, int x, int y, u16 mask) {
  sim::tma_load(dst.pointer, map, bar.pointer, 2, x, y, 0, mask);
}
MEGAMOE_DEVICE void tma_load_3d_multicast(Smem dst, const CUtensorMap* map, Smem bar, int x, int y, int z, u16 mask) {
  sim::tma_load(dst.pointer, map, bar.pointer, 3, x, y, z, mask);
}
MEGAMOE_DEVICE void tma_store_2d(const CUtensorMap* map, Smem src, int x, int y) {
  sim::tma_store(map, src.pointer, 2, x, y, 0);
}

MEGAMOE_DEVICE void bulk_load(Smem dst, const void* src, u32 bytes, Smem bar) {
  sim::bulk_load(dst.pointer, src, bytes, bar.pointer, 0);
}
MEGAMOE_DEVICE void bulk_load_multicast(Smem dst, const void* src, u32 bytes, Smem bar, u16 mask) {
  sim::bulk_load(dst.pointer, src, bytes, bar.pointer, mask);
}
MEGAMOE_DEVICE void bulk_store(void* dst, Smem src, u32 bytes) { sim::bulk_store(dst, src.pointer, bytes); }
MEGAMOE_DEVICE void bulk_commit() { sim::bulk_commit(); }
template <int Pending>
MEGAMOE_DEVICE void bulk_wait() {
  sim::bulk_wait(Pending, false);
}
template <int Pending>
MEGAMOE_DEVICE void bulk_wait_read() {
  sim::bulk_wait(Pending, true);
}

MEGAMOE_DEVICE void cp_async_16(Smem dst, const void* src) { sim::cp_async_16(dst.pointer, src); }
MEGAMOE_DEVICE void cp_async_commit() { sim::cp_async_commit(); }
template <int Pending>
MEGAMOE_DEVICE void cp_async_wait() {
  sim::cp_async_wait(Pending);
}

MEGAMOE_DEVICE void stmatrix_x4(Smem row, u32 r0, u32 r1, u32 r2, u32 r3) {
  const u32 r[4] = {r0, r1, r2, r3};
  sim::stmatrix(row.pointer, r, 4, false);
}
MEGAMOE_DEVICE void stmatrix_x4_trans(Smem row, u32 r0, u32 r1, u32 r2, u32 r3) {
  const u32 r[4] = {r0, r1, r2, r3};
  sim::stmatrix(row.pointer, r, 4, true);
}
MEGAMOE_DEVICE void stmatrix_x2_trans(Smem row, u32 r0, u32 r1) {
  const u32 r[2] = {r0, r1};
  sim::stmatrix(row.pointer, r, 2, true);
}
MEGAMOE_DEVICE void ldmatrix_x4(u32 (&r)[4], Smem row) { sim::ldmatrix(r, row.pointer, 4); }

}  // namespace ptx
