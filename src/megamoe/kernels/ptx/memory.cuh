// Flags, counters and plain accesses with stated width, semantics and scope.
#pragma once
#include "base.cuh"

namespace ptx {

// A hint: the line at `at` shall be in the L2. Orders nothing.
MEGAMOE_DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Shared memory by 32-bit address.
MEGAMOE_DEVICE u32 ld_shared_u32(Smem p) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p.address) : "memory");
  return v;
}
MEGAMOE_DEVICE void st_shared_u32(Smem p, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(p.address), "r"(v) : "memory");
}
MEGAMOE_DEVICE float ld_shared_f32(Smem p) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(p.address) : "memory");
  return v;
}
MEGAMOE_DEVICE void st_shared_f32(Smem p, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(p.address), "f"(v) : "memory");
}
MEGAMOE_DEVICE void st_shared_u16(Smem p, u16 v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(p.address), "h"(v) : "memory");
}
MEGAMOE_DEVICE void st_shared_u8(Smem p, u8 v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(p.address), "r"(static_cast<u32>(v)) : "memory");
}
// Relaxed, among the threads of the CTA.
MEGAMOE_DEVICE u32 atom_add_shared(Smem p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(p.address), "r"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE void red_max_shared(Smem p, u32 v) {
  asm volatile("red.relaxed.cta.shared.max.u32 [%0], %1;" ::"r"(p.address), "r"(v) : "memory");
}
MEGAMOE_DEVICE void st_shared_v4(Smem p, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p.address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
MEGAMOE_DEVICE uint4 ld_shared_v4(Smem p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(p.address)
               : "memory");
  return v;
}

// Read-only data of this launch: 16 bytes past L1, and 8 bytes.
MEGAMOE_DEVICE uint4 ld_global_nc_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
MEGAMOE_DEVICE int2 ld_global_nc_int2(const void* p) {
  int2 v;
  asm volatile("ld.global.nc.v2.s32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// Flags and counters in global memory, own or peer.
MEGAMOE_DEVICE u32 ld_relaxed_gpu(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE u32 ld_relaxed_sys(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE u32 ld_acquire_gpu(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE u32 ld_acquire_sys(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE void st_relaxed_gpu(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_relaxed_gpu(u32* p, u32 v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void st_relaxed_sys(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_relaxed_sys(u32* p, u32 v) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void st_release_gpu(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_release_gpu(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void st_release_sys(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_release_sys(u32* p, u32 v) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE u32 atom_add_relaxed_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
// Adds one, as long as the word is small. For an answer that is not needed at once: ptxas 13.0.88 makes one addition of a
// warp's atom.add and hands its answer round with a shuffle, which waits for it.
MEGAMOE_DEVICE u32 atom_inc_relaxed_gpu(u32* p) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(0x7fffffffu) : "memory");
  return old;
}
MEGAMOE_DEVICE u32 atom_add_relaxed_sys(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u32 atom_add_release_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u32 atom_add_release_sys(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.release.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u32 atom_add_acq_rel_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u32 atom_add_acq_rel_sys(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u64 ld_relaxed_gpu(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE u64 ld_relaxed_sys(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE u64 ld_acquire_gpu(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE u64 ld_acquire_sys(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MEGAMOE_DEVICE void st_relaxed_gpu(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_relaxed_gpu(u64* p, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void st_relaxed_sys(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_relaxed_sys(u64* p, u64 v) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void st_release_gpu(u64* p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_release_gpu(u64* p, u64 v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void st_release_sys(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE void red_add_release_sys(u64* p, u64 v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
MEGAMOE_DEVICE u64 atom_add_relaxed_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u64 atom_add_relaxed_sys(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u64 atom_add_release_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u64 atom_add_release_sys(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.release.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u64 atom_add_acq_rel_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u64 atom_add_acq_rel_sys(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
MEGAMOE_DEVICE u32 atom_cas_acq_rel_sys(u32* p, u32 expected, u32 desired) {
  u32 old;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return old;
}
// Two 8-byte words in one access; each word is atomic by itself, the pair is not.
MEGAMOE_DEVICE void st_relaxed_sys_v2(u64* p, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
MEGAMOE_DEVICE void ld_relaxed_sys_v2(const u64* p, u64& a, u64& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}

}  // namespace ptx
