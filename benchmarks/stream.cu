// Reads a buffer once, in blocks of 32 KB, through bulk copies into shared memory, and does nothing with it.
//
// One thread of each CTA: a block is sent for when its stage is free and is done when it has arrived (`full[stage]`, one
// arrival and the block's bytes). CTA c of n reads blocks [c/n, (c + 1)/n) of all, which differ in number by one at most.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

constexpr u32 kBlock = 32768, kMostStages = 6;

struct Arguments {
  const u8* from;
  u64* stamps;  // [CTA] nanoseconds of its start, of its first block and of its last one
  u32 blocks, stages;
};

extern "C" __global__ void __launch_bounds__(128) read_once(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) u8 smem[];
  if (threadIdx.x != 0) return;
  const u64 start = ptx::globaltimer();
  const Smem base = ptx::shared_address(smem), full = base + kMostStages * kBlock;
  for (u32 i = 0; i < a.stages; ++i) ptx::mbarrier_init(full + i * 8, 1);
  ptx::fence_mbarrier_init();
  const u32 begin = static_cast<u32>(static_cast<u64>(blockIdx.x) * a.blocks / gridDim.x);
  const u32 end = static_cast<u32>((blockIdx.x + 1ull) * a.blocks / gridDim.x);
  const auto load = [&](u32 block) {
    const u32 stage = (block - begin) % a.stages;
    ptx::mbarrier_arrive_expect_tx(full + stage * 8, kBlock);
    ptx::bulk_load(base + stage * kBlock, a.from + static_cast<u64>(block) * kBlock, kBlock, full + stage * 8);
  };
  for (u32 block = begin; block < end && block - begin < a.stages; ++block) load(block);
  u64 first = start;
  for (u32 block = begin; block < end; ++block) {
    const u32 n = block - begin;
    ptx::mbarrier_wait(full + n % a.stages * 8, n / a.stages % 2);
    if (n == 0) first = ptx::globaltimer();
    if (end - block > a.stages) load(block + a.stages);
  }
  a.stamps[blockIdx.x * 3] = start;
  a.stamps[blockIdx.x * 3 + 1] = first;
  a.stamps[blockIdx.x * 3 + 2] = ptx::globaltimer();
}
