// mbarriers, named barriers, cluster barriers, proxy and memory fences.
#pragma once
#include "base.cuh"

namespace ptx {

MEGAMOE_DEVICE void mbarrier_init(Smem bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar.address), "r"(arrivals) : "memory");
}
// Makes the inits visible to the cluster and to the async proxy.
MEGAMOE_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
MEGAMOE_DEVICE void mbarrier_arrive(Smem bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar.address) : "memory");
}
MEGAMOE_DEVICE void mbarrier_arrive_expect_tx(Smem bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar.address), "r"(bytes) : "memory");
}
// Arrive on a barrier of any CTA of the cluster. Spelled without .release.cluster: with it ptxas puts a MEMBAR.GPU into
// the main loop, and what follows is only the re-use of a stage by the async proxy.
MEGAMOE_DEVICE void mbarrier_arrive_cluster(ClusterSmem bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar.address) : "memory");
}
MEGAMOE_DEVICE bool mbarrier_try_wait(Smem bar, u32 parity) {
  u32 ok;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(ok)
      : "r"(bar.address), "r"(parity)
      : "memory");
  return ok != 0;
}
// Never suspends the thread.
MEGAMOE_DEVICE bool mbarrier_test_wait(Smem bar, u32 parity) {
  u32 ok;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(ok)
      : "r"(bar.address), "r"(parity)
      : "memory");
  return ok != 0;
}
// Waits for the phase of `parity` to complete. A pipeline barrier that does not move for 20 minutes (300 ticks of 4.3 s,
// longer than any deadline of a cross-rank wait, which ends first and drains the roles) means that the drain itself
// failed: only then does the kernel trap. A kernel without such waits may define a shorter limit before it includes ptx.cuh.
#ifndef MEGAMOE_PIPELINE_LIMIT_TICKS
#define MEGAMOE_PIPELINE_LIMIT_TICKS 300
#endif
MEGAMOE_DEVICE void mbarrier_wait(Smem bar, u32 parity) {
  if (mbarrier_try_wait(bar, parity)) return;
  u32 start, now;
  asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(start));
#pragma unroll 1
  do {
    if (mbarrier_try_wait(bar, parity)) return;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(now));
  } while (now - start < MEGAMOE_PIPELINE_LIMIT_TICKS);
  asm volatile("trap;");
}

MEGAMOE_DEVICE void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
MEGAMOE_DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

MEGAMOE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
MEGAMOE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Generic-proxy accesses of this thread before, async-proxy accesses (TMA, bulk copies, WGMMA) after.
MEGAMOE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
MEGAMOE_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
MEGAMOE_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
MEGAMOE_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
MEGAMOE_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace ptx
