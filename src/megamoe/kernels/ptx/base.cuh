// Types, identity, registers, clocks and launch control.
#pragma once

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];  // NVRTC cannot parse cuda.h; the host encodes it
};

#define MEGAMOE_DEVICE __device__ __forceinline__

namespace ptx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Smem {
  u32 address;
};
MEGAMOE_DEVICE Smem operator+(Smem s, u32 bytes) { return {s.address + bytes}; }

struct ClusterSmem {
  u32 address;
};
MEGAMOE_DEVICE ClusterSmem operator+(ClusterSmem s, u32 bytes) { return {s.address + bytes}; }

MEGAMOE_DEVICE Smem shared_address(const void* p) { return {static_cast<u32>(__cvta_generic_to_shared(p))}; }

MEGAMOE_DEVICE void name(Smem, const char*, int = -1) {}
MEGAMOE_DEVICE void name(const void*, const char*, int = -1) {}
MEGAMOE_DEVICE void role(const char*) {}

// The same value in every lane, known to the compiler as warp-uniform.
MEGAMOE_DEVICE u32 warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
MEGAMOE_DEVICE u32 lane_index() { return threadIdx.x % 32; }

MEGAMOE_DEVICE u32 cluster_ctarank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
MEGAMOE_DEVICE ClusterSmem map_cluster(Smem s, u32 cta) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(s.address), "r"(cta));
  return {r};
}

template <int Registers>
MEGAMOE_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
MEGAMOE_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

MEGAMOE_DEVICE void nanosleep(u32 ns) { __nanosleep(ns); }
MEGAMOE_DEVICE void trap() { asm volatile("trap;"); }

// Clocks are for traces and deadlines only: no other control flow may depend on them.
MEGAMOE_DEVICE u64 globaltimer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
MEGAMOE_DEVICE u64 clock() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}
MEGAMOE_DEVICE u64 deadline_after(u64 ns) { return globaltimer() + ns; }
MEGAMOE_DEVICE bool deadline_passed(u64 deadline) { return globaltimer() > deadline; }

// Programmatic dependent launch.
MEGAMOE_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
MEGAMOE_DEVICE void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ptx
