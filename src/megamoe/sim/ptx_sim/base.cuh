// Types, identity, registers, clocks and launch control.
#pragma once
#include "language.cuh"

namespace ptx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Both are pointers of this process; map_cluster moves into another CTA's shared memory.
struct Smem {
  u8* pointer;
};
MEGAMOE_DEVICE Smem operator+(Smem s, u32 bytes) { return {s.pointer + bytes}; }

struct ClusterSmem {
  u8* pointer;
};
MEGAMOE_DEVICE ClusterSmem operator+(ClusterSmem s, u32 bytes) { return {s.pointer + bytes}; }

MEGAMOE_DEVICE Smem shared_address(const void* p) { return {static_cast<u8*>(const_cast<void*>(p))}; }

MEGAMOE_DEVICE void name(Smem s, const char* text, int index = -1) { sim::name(s.pointer, text, index); }
MEGAMOE_DEVICE void name(const void* p, const char* text, int index = -1) { sim::name(p, text, index); }
MEGAMOE_DEVICE void role(const char* text) { sim::role(text); }

// Collective, as the shuffle of the real one is.
MEGAMOE_DEVICE u32 warp_index() { return static_cast<u32>(sim::shuffle(0xffffffffu, threadIdx.x / 32, 0)); }
MEGAMOE_DEVICE u32 lane_index() { return threadIdx.x % 32; }

MEGAMOE_DEVICE u32 cluster_ctarank() { return sim::self().block->cluster_rank; }
MEGAMOE_DEVICE ClusterSmem map_cluster(Smem s, u32 cta) { return {sim::map_cluster(s.pointer, cta)}; }

template <int Registers>
MEGAMOE_DEVICE void setmaxnreg_inc() {
  sim::set_registers(Registers, true);
}
template <int Registers>
MEGAMOE_DEVICE void setmaxnreg_dec() {
  sim::set_registers(Registers, false);
}

MEGAMOE_DEVICE void nanosleep(u32) { sim::sleep(); }
MEGAMOE_DEVICE void trap() { sim::trap("trap"); }

MEGAMOE_DEVICE u64 globaltimer() { return sim::clock(); }
MEGAMOE_DEVICE u64 clock() { return sim::clock(); }
MEGAMOE_DEVICE u64 deadline_after(u64 ns) { return sim::deadline_after(ns); }
MEGAMOE_DEVICE bool deadline_passed(u64 deadline) { return sim::deadline_passed(deadline); }

// All kernels of a run are concurrent; order between runs is the host's.
MEGAMOE_DEVICE void grid_dependency_wait() {}
MEGAMOE_DEVICE void grid_launch_dependents() {}

}  // namespace ptx
