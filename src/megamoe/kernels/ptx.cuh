// The one door to the hardware: every PTX instruction that a kernel uses, one thin wrapper each, in namespace ptx.
//
// Two implementations with the same names and signatures:
//   ptx/*.cuh       the hardware (NVRTC, sm_90a; the only files of this tree that contain asm)
//   sim/ptx_sim.cuh the simulator (g++, MEGAMOE_SIM defined)
//
// Conventions
//   Smem          an address in this CTA's shared memory (32 bits on the hardware). Add byte offsets to it.
//   ClusterSmem   an address in the shared memory of some CTA of the cluster, made by map_cluster().
//   Desc          a WGMMA operand in shared memory: K-major, rows of 128 bytes, 128-byte swizzle, 1024-byte aligned tile.
//   *_gpu, *_sys  scope of a flag access: between CTAs of one GPU, between GPUs.
//   name, role    labels for the simulator's reports; nothing on the hardware.
// A wait either goes through mbarrier_wait (pipelines inside a CTA or cluster) or through sync.cuh's spin_until (flags
// between CTAs and ranks); there are no other spins.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#ifdef MEGAMOE_SIM
#include "ptx_sim.cuh"
#else
#include "ptx/base.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#endif
