// Flags, counters and plain accesses with stated width, semantics and scope.
#pragma once
#include "base.cuh"

namespace ptx {

MEGAMOE_DEVICE void prefetch_l2(const void*) {}

// Ordinary accesses: the compiler's hooks see them.
MEGAMOE_DEVICE u32 ld_shared_u32(Smem p) { return *reinterpret_cast<const u32*>(p.pointer); }
MEGAMOE_DEVICE void st_shared_u32(Smem p, u32 v) { *reinterpret_cast<u32*>(p.pointer) = v; }
MEGAMOE_DEVICE void st_shared_u16(Smem p, u16 v) { *reinterpret_cast<u16*>(p.pointer) = v; }
MEGAMOE_DEVICE void st_shared_u8(Smem p, u8 v) { *p.pointer = v; }
MEGAMOE_DEVICE float ld_shared_f32(Smem p) { return *reinterpret_cast<const float*>(p.pointer); }
MEGAMOE_DEVICE void st_shared_f32(Smem p, float v) { *reinterpret_cast<float*>(p.pointer) = v; }
MEGAMOE_DEVICE void st_shared_v4(Smem p, uint4 v) {
  sim::check_aligned(p.pointer, 16);
  *reinterpret_cast<uint4*>(p.pointer) = v;
}
MEGAMOE_DEVICE uint4 ld_shared_v4(Smem p) {
  sim::check_aligned(p.pointer, 16);
  return *reinterpret_cast<const uint4*>(p.pointer);
}

MEGAMOE_DEVICE uint4 ld_global_nc_v4(const void* p) {
  sim::read_only(p, 16);
  return *static_cast<const uint4*>(p);
}
MEGAMOE_DEVICE int2 ld_global_nc_int2(const void* p) {
  sim::read_only(p, 8);
  return *static_cast<const int2*>(p);
}

// The same accesses for u32 and u64 words, and for both scopes.
#define MEGAMOE_SIM_WORDS(T, scope)                                                                                      \
  MEGAMOE_DEVICE T ld_relaxed_##scope(const T* p) {                                                                      \
    return static_cast<T>(sim::load(p, sizeof(T), sim::Order::relaxed, sim::Scope::scope));                              \
  }                                                                                                                      \
  MEGAMOE_DEVICE T ld_acquire_##scope(const T* p) {                                                                      \
    return static_cast<T>(sim::load(p, sizeof(T), sim::Order::acquire, sim::Scope::scope));                              \
  }                                                                                                                      \
  MEGAMOE_DEVICE void st_relaxed_##scope(T* p, T v) { sim::store(p, v, sizeof(T), sim::Order::relaxed, sim::Scope::scope); } \
  MEGAMOE_DEVICE void st_release_##scope(T* p, T v) { sim::store(p, v, sizeof(T), sim::Order::release, sim::Scope::scope); } \
  MEGAMOE_DEVICE void red_add_relaxed_##scope(T* p, T v) {                                                               \
    sim::atomic_add(p, v, sizeof(T), sim::Order::relaxed, sim::Scope::scope);                                            \
  }                                                                                                                      \
  MEGAMOE_DEVICE void red_add_release_##scope(T* p, T v) {                                                               \
    sim::atomic_add(p, v, sizeof(T), sim::Order::release, sim::Scope::scope);                                            \
  }                                                                                                                      \
  MEGAMOE_DEVICE T atom_add_relaxed_##scope(T* p, T v) {                                                                 \
    return static_cast<T>(sim::atomic_add(p, v, sizeof(T), sim::Order::relaxed, sim::Scope::scope));                     \
  }                                                                                                                      \
  MEGAMOE_DEVICE T atom_add_release_##scope(T* p, T v) {                                                                 \
    return static_cast<T>(sim::atomic_add(p, v, sizeof(T), sim::Order::release, sim::Scope::scope));                     \
  }                                                                                                                      \
  MEGAMOE_DEVICE T atom_add_acq_rel_##scope(T* p, T v) {                                                                 \
    return static_cast<T>(sim::atomic_add(p, v, sizeof(T), sim::Order::acq_rel, sim::Scope::scope));                     \
  }
MEGAMOE_SIM_WORDS(u32, gpu)
MEGAMOE_SIM_WORDS(u32, sys)
MEGAMOE_SIM_WORDS(u64, gpu)
MEGAMOE_SIM_WORDS(u64, sys)
#undef MEGAMOE_SIM_WORDS

MEGAMOE_DEVICE u32 atom_inc_relaxed_gpu(u32* p) { return atom_add_relaxed_gpu(p, 1u); }
MEGAMOE_DEVICE u32 atom_add_shared(Smem p, u32 v) {
  return static_cast<u32>(sim::atomic_add(p.pointer, v, 4, sim::Order::relaxed, sim::Scope::gpu));
}
MEGAMOE_DEVICE void red_max_shared(Smem p, u32 v) {
  sim::atomic_max(p.pointer, v, 4, sim::Order::relaxed, sim::Scope::gpu);
}
MEGAMOE_DEVICE u32 atom_cas_acq_rel_sys(u32* p, u32 expected, u32 desired) {
  return static_cast<u32>(sim::atomic_cas(p, expected, desired, 4, sim::Order::acq_rel, sim::Scope::sys));
}
MEGAMOE_DEVICE void st_relaxed_sys_v2(u64* p, u64 a, u64 b) { sim::store_pair(p, a, b, sim::Scope::sys); }
MEGAMOE_DEVICE void ld_relaxed_sys_v2(const u64* p, u64& a, u64& b) { sim::load_pair(p, a, b, sim::Scope::sys); }

}  // namespace ptx
