// What device code calls when it is compiled for the simulator. ptx_sim/*.cuh wraps these under the names of ptx.cuh.
//
// Every function runs on the fiber of the calling thread and is a possible scheduling point. The call site is its return
// address: reports and mutations name it, so wrappers must be inlined into the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

// What `extern __shared__ __align__(1024) u8 smem[]` names: one copy for each thread-local block, that is for each CTA.
extern thread_local __attribute__((aligned(1024))) unsigned char smem[];

namespace sim {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Dim3 {
  u32 x = 1, y = 1, z = 1;
};
struct BlockView {
  Dim3 index, block, grid;
  u32 cluster_rank = 0, cluster_size = 1;
};
struct ThreadView {
  Dim3 thread;
  const BlockView* block = nullptr;
};

// The calling thread. Const: inside one device function it never changes.
const ThreadView& self() __attribute__((const));

enum class Scope : u8 { gpu, sys };
enum class Order : u8 { relaxed, acquire, release, acq_rel };
enum class Proxy : u8 { shared, global, both };

// Labels for reports.
void name(const void* address, const char* name, int index);
void role(const char* name);

// mbarriers
void mbarrier_init(u8* bar, u32 arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(u8* bar, u32 expect_bytes);
void mbarrier_arrive_cluster(u8* bar);
bool mbarrier_try_wait(u8* bar, u32 parity);
bool mbarrier_test_wait(u8* bar, u32 parity);
void mbarrier_wait(u8* bar, u32 parity);

// Barriers and fences
void named_barrier(u32 id, u32 threads, bool wait);
void cluster_arrive();
void cluster_wait();
void fence_proxy_async(Proxy proxy);
void fence_acq_rel(Scope scope);

// Asynchronous copies; mask 0 means this CTA only.
void tma_load(u8* dst, const CUtensorMap* map, u8* bar, int rank, int x, int y, int z, u32 mask);
void tma_store(const CUtensorMap* map, const u8* src, int rank, int x, int y, int z);
void prefetch_tensormap(const CUtensorMap* map);
void bulk_load(u8* dst, const void* src, u32 bytes, u8* bar, u32 mask);
void bulk_store(void* dst, const u8* src, u32 bytes);
void bulk_commit();
void bulk_wait(u32 pending, bool read_only);
void cp_async_16(u8* dst, const void* src);
void cp_async_commit();
void cp_async_wait(u32 pending);

// Matrix loads and stores of a warp
void stmatrix(u8* row, const u32* registers, int count, bool transposed);
void ldmatrix(u32* registers, const u8* row, int count);

// Accesses with stated width and semantics
u64 load(const void* p, u32 size, Order order, Scope scope);
void load_pair(const u64* p, u64& a, u64& b, Scope scope);
void store(void* p, u64 v, u32 size, Order order, Scope scope);
void store_pair(u64* p, u64 a, u64 b, Scope scope);
u64 atomic_add(void* p, u64 v, u32 size, Order order, Scope scope);
u64 atomic_max(void* p, u64 v, u32 size, Order order, Scope scope);
u64 atomic_or(void* p, u64 v, u32 size, Order order, Scope scope);
u64 atomic_exchange(void* p, u64 v, u32 size, Order order, Scope scope);
u64 atomic_cas(void* p, u64 expected, u64 desired, u32 size, Order order, Scope scope);
void check_aligned(const void* p, u32 size);
void read_only(const void* p, u32 size);

// Warp collectives of all lanes in `mask`
bool elect(u32 mask);
u32 ballot(u32 mask, bool p);
u64 shuffle(u32 mask, u64 v, int lane);
u32 match_any(u32 mask, u32 v);
u32 reduce_add(u32 mask, u32 v);
u32 reduce_max(u32 mask, u32 v);
void syncwarp(u32 mask);

// Shared memory of another CTA of the cluster
u8* map_cluster(u8* p, u32 cta);
void set_registers(u32 registers, bool increase);

// WGMMA: accumulators of m64 nN (N / 2 registers), operands in shared memory or, for A, in registers
void wgmma_fence(const float* acc, u32 registers);
void wgmma(float* acc, u32 registers, const u8* a, const u8* b, bool accumulate);
void wgmma_register_a(float* acc, u32 registers, const u32 (&a)[4], const u8* b, bool accumulate);
void wgmma_commit();
void wgmma_wait(u32 pending, const float* acc);
const u8* check_tile(const u8* tile);

// Time: scheduler steps. A deadline passes when the options of the run say so, never by itself.
u64 clock();
u64 deadline_after(u64 ns);
bool deadline_passed(u64 deadline);
void sleep();
[[noreturn]] void trap(const char* why);

}  // namespace sim
