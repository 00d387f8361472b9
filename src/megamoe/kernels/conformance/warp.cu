// Warp collectives: one warp, one row of 32 words for each result.
#include "ptx.cuh"

using ptx::u32;
using ptx::u64;

struct WarpArguments {
  const u32* words;  // [32]
  u32* out;          // [rows][32]
};

extern "C" __global__ void __launch_bounds__(32) warp_collectives(const __grid_constant__ WarpArguments p) {
  const u32 lane = ptx::lane_index(), v = p.words[lane];
  u32 row = 0;
  const auto put = [&](u32 value) { p.out[row++ * 32 + lane] = value; };
  put(ptx::ballot(v % 3 == 0));
  put(ptx::any(v == p.words[7]));
  put(ptx::any(v % 2 > 1));
  put(ptx::all(v % 2 < 2));
  put(ptx::all(v == p.words[7]));
  put(ptx::shfl(v, 5));
  put(ptx::shfl(v, static_cast<int>(31 - lane)));
  put(ptx::shfl(v, static_cast<int>(lane * 7 % 32)));
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) put(ptx::shfl_xor(v, mask));
  put(ptx::shfl_xor(v, 21));
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) put(ptx::shfl_up(v, delta));
  put(__float_as_uint(ptx::shfl_xor(__uint_as_float(v & 0x7effffffu), 3)));
  const u64 wide = ptx::shfl_xor(static_cast<u64>(v) << 32 | lane, 9);
  put(static_cast<u32>(wide));
  put(static_cast<u32>(wide >> 32));
  put(ptx::match_any(v % 5));
  put(ptx::reduce_add(v));
  put(ptx::reduce_max(v));
  put(ptx::max_u16x2(v, ptx::shfl_xor(v, 1)));
  put(ptx::reduce_add(ptx::elect_one() ? 1 : 0));
  put(ptx::warp_index());
  ptx::syncwarp();
}
