// Small kernels that show which launches run at the same time. Every wait in them has a deadline; one thread of a block works.
#include "ptx.cuh"

using ptx::u32;
using ptx::u64;

struct ProbeArguments {
  u32* flag;     // device memory, or pinned memory of the host
  u32* outcome;  // of each block: 1 what was waited for came, 2 the deadline passed
  u64 limit_ns;
  u32 wanted;
};

namespace {

// Leaves `flag >= wanted` or the deadline in `outcome`.
MEGAMOE_DEVICE void await(const ProbeArguments& a) {
  const u64 deadline = ptx::deadline_after(a.limit_ns);
  u32 outcome = 1;
  while (ptx::ld_acquire_sys(a.flag) < a.wanted) {
    if (ptx::deadline_passed(deadline)) {
      outcome = 2;
      break;
    }
  }
  a.outcome[blockIdx.x] = outcome;
}

}  // namespace

// Counts its blocks in and waits until `wanted` blocks of any kernels are there: all of them, if they run side by side.
extern "C" __global__ void __launch_bounds__(32) meet(const __grid_constant__ ProbeArguments a) {
  if (threadIdx.x != 0) return;
  ptx::grid_dependency_wait();
  ptx::red_add_release_sys(a.flag, 1);
  await(a);
}

// The first of two kernels of a stream: lets the second start, and waits for a sign of it.
extern "C" __global__ void __launch_bounds__(32) first(const __grid_constant__ ProbeArguments a) {
  if (threadIdx.x != 0) return;
  ptx::grid_launch_dependents();
  await(a);
}

// The second: gives its sign before it waits for the first.
extern "C" __global__ void __launch_bounds__(32) second(const __grid_constant__ ProbeArguments a) {
  if (threadIdx.x != 0) return;
  ptx::st_release_sys(a.flag, a.wanted);
  ptx::grid_dependency_wait();
  a.outcome[blockIdx.x] = 1;
}

// Holds the SMs that its blocks are on until the host sets the flag.
extern "C" __global__ void __launch_bounds__(32) hold(const __grid_constant__ ProbeArguments a) {
  if (threadIdx.x == 0) await(a);
}

// Holds its SMs for `limit_ns`; the kernel behind it may start meanwhile.
extern "C" __global__ void __launch_bounds__(32) pause(const __grid_constant__ ProbeArguments a) {
  if (threadIdx.x != 0) return;
  ptx::grid_launch_dependents();
  const u64 deadline = ptx::deadline_after(a.limit_ns);
  while (!ptx::deadline_passed(deadline)) {
  }
  a.outcome[blockIdx.x] = 1;
}
