// mbarriers, named barriers, cluster barriers, proxy and memory fences.
#pragma once
#include "base.cuh"

namespace ptx {

MEGAMOE_DEVICE void mbarrier_init(Smem bar, u32 arrivals) { sim::mbarrier_init(bar.pointer, arrivals); }
MEGAMOE_DEVICE void fence_mbarrier_init() { sim::fence_mbarrier_init(); }
MEGAMOE_DEVICE void mbarrier_arrive(Smem bar) { sim::mbarrier_arrive(bar.pointer, 0); }
MEGAMOE_DEVICE void mbarrier_arrive_expect_tx(Smem bar, u32 bytes) { sim::mbarrier_arrive(bar.pointer, bytes); }
MEGAMOE_DEVICE void mbarrier_arrive_cluster(ClusterSmem bar) { sim::mbarrier_arrive_cluster(bar.pointer); }
MEGAMOE_DEVICE bool mbarrier_try_wait(Smem bar, u32 parity) { return sim::mbarrier_try_wait(bar.pointer, parity); }
MEGAMOE_DEVICE bool mbarrier_test_wait(Smem bar, u32 parity) { return sim::mbarrier_test_wait(bar.pointer, parity); }
MEGAMOE_DEVICE void mbarrier_wait(Smem bar, u32 parity) { sim::mbarrier_wait(bar.pointer, parity); }

MEGAMOE_DEVICE void named_barrier_sync(u32 id, u32 threads) { sim::named_barrier(id, threads, true); }
MEGAMOE_DEVICE void named_barrier_arrive(u32 id, u32 threads) { sim::named_barrier(id, threads, false); }

MEGAMOE_DEVICE void cluster_arrive() { sim::cluster_arrive(); }
MEGAMOE_DEVICE void cluster_wait() { sim::cluster_wait(); }

MEGAMOE_DEVICE void fence_proxy_async() { sim::fence_proxy_async(sim::Proxy::both); }
MEGAMOE_DEVICE void fence_proxy_async_shared() { sim::fence_proxy_async(sim::Proxy::shared); }
MEGAMOE_DEVICE void fence_proxy_async_global() { sim::fence_proxy_async(sim::Proxy::global); }
MEGAMOE_DEVICE void fence_acq_rel_gpu() { sim::fence_acq_rel(sim::Scope::gpu); }
MEGAMOE_DEVICE void fence_acq_rel_sys() { sim::fence_acq_rel(sim::Scope::sys); }

}  // namespace ptx
