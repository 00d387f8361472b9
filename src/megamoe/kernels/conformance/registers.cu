// What happens inside a warp: matrix loads and stores, collectives, conversions, integer and float operations, flags.
//
// matrices     one warp. in: u32 [4][32], the registers of lane l. out: u32 words of shared memory after stmatrix x4, x4
//              transposed and x2 transposed, then what ldmatrix x4 reads from `in` as bytes.
// collectives  one warp. in: u32 [32]. out: u32 [12][32].
// conversions  grid of n CTAs of 128: in: float [n * 512][2]; e4m3, bf16 pairs; ex2, rcp of the first.
// integers     grid of n CTAs of 128: in: u32 [n * 128][3]. out: u32 [15][n * 128].
// floats       grid of n CTAs of 128: in: float [n * 128][3]. out: float [9][n * 128], and to integer [3][n * 128].
// flags        one CTA of 64. words: u32 [16] and wide: u64 [8], zero before; old: u64 [8] values that were returned.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u16;
using ptx::u32;
using ptx::u64;
using ptx::u8;

struct WordsArguments {
  const u32* in;
  u32* out;
};

extern "C" __global__ void __launch_bounds__(32, 1) matrices(const __grid_constant__ WordsArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 lane = ptx::lane_index();
  for (u32 i = lane; i < 640; i += 32) ptx::st_shared_u32(base + i * 4, 0);
  ptx::syncwarp();
  u32 r[4];
  for (u32 m = 0; m < 4; ++m) r[m] = p.in[m * 32 + lane];
  // Rows in scattered places: 48 bytes apart.
  ptx::stmatrix_x4(base + lane * 16, r[0], r[1], r[2], r[3]);
  ptx::stmatrix_x4_trans(base + (512 + (lane ^ 5) * 16), r[0], r[1], r[2], r[3]);
  ptx::stmatrix_x2_trans(base + (1024 + lane % 16 * 48), r[0], r[1]);
  for (u32 m = 0; m < 4; ++m) ptx::st_shared_u32(base + (2048 + (m * 32 + lane) * 4), r[m]);
  ptx::syncwarp();
  u32 back[4];
  ptx::ldmatrix_x4(back, base + (2048 + (lane ^ 9) * 16));
  for (u32 i = lane; i < 512; i += 32) p.out[i] = ptx::ld_shared_u32(base + i * 4);
  for (u32 m = 0; m < 4; ++m) p.out[512 + m * 32 + lane] = back[m];
}

extern "C" __global__ void __launch_bounds__(32, 1) collectives(const __grid_constant__ WordsArguments p) {
  const u32 lane = ptx::lane_index(), v = p.in[lane];
  const u32 result[12] = {ptx::ballot(v % 3 == 1),
                          ptx::any(v == p.in[7]),
                          ptx::all(v != 0),
                          ptx::shfl(v, 11),
                          ptx::shfl(v, static_cast<int>(v % 32)),
                          ptx::shfl_xor(v, 5),
                          ptx::shfl_up(v, 3),
                          ptx::match_any(v % 5),
                          ptx::reduce_add(v),
                          ptx::reduce_max(v),
                          static_cast<u32>(__popc(ptx::ballot(ptx::elect_one()))),
                          __float_as_uint(ptx::shfl_xor(__uint_as_float(v), 16))};
#pragma unroll
  for (u32 i = 0; i < 12; ++i) p.out[i * 32 + lane] = result[i];
}

struct ConversionsArguments {
  const float* in;
  u16* e4m3;
  u32* bf16;
  float* ex2;
  float* rcp;
};

extern "C" __global__ void __launch_bounds__(128) conversions(const __grid_constant__ ConversionsArguments p) {
  for (u32 k = 0; k < 4; ++k) {
    const u32 i = blockIdx.x * 512 + k * 128 + threadIdx.x;
    const float a = p.in[2 * i], b = p.in[2 * i + 1];
    p.e4m3[i] = ptx::pack_e4m3x2(a, b);
    p.bf16[i] = ptx::pack_bf16x2(a, b);
    p.ex2[i] = ptx::ex2_approx(a);
    p.rcp[i] = ptx::rcp_approx(a);
  }
}

extern "C" __global__ void __launch_bounds__(128) integers(const __grid_constant__ WordsArguments p) {
  const u32 i = blockIdx.x * 128 + threadIdx.x, n = gridDim.x * 128;
  const u32 a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
  const u64 wide = static_cast<u64>(a) << 32 | b;
  const u32 result[15] = {static_cast<u32>(__popc(a)),
                          static_cast<u32>(__ffs(static_cast<int>(a & b & c))),
                          static_cast<u32>(__clz(static_cast<int>(a & b & c))),
                          static_cast<u32>(__popcll(wide)),
                          static_cast<u32>(__ffsll(static_cast<long long>(wide & c))),
                          static_cast<u32>(__clzll(static_cast<long long>(wide & c))),
                          __brev(a),
                          __byte_perm(a, b, c),
                          __umulhi(a, b),
                          __funnelshift_l(a, b, c),
                          __funnelshift_r(a, b, c),
                          ptx::max_u16x2(a, b),
                          min(a, b),
                          static_cast<u32>(max(static_cast<int>(a), static_cast<int>(b))),
                          static_cast<u32>(__umul64hi(wide, wide ^ c))};
#pragma unroll
  for (u32 k = 0; k < 15; ++k) p.out[k * n + i] = result[k];
}

struct FloatsArguments {
  const float* in;
  float* out;
  u32* integers;
};

extern "C" __global__ void __launch_bounds__(128) floats(const __grid_constant__ FloatsArguments p) {
  const u32 i = blockIdx.x * 128 + threadIdx.x, n = gridDim.x * 128;
  const float a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
  const float result[9] = {__fadd_rn(a, b), __fsub_rn(a, b),  __fmul_rn(a, b), __fdiv_rn(a, b), __frcp_rn(a),
                           __fsqrt_rn(a),   __fmaf_rn(a, b, c), min(a, b),       max(a, b)};
#pragma unroll
  for (u32 k = 0; k < 9; ++k) p.out[k * n + i] = result[k];
  p.integers[i] = static_cast<u32>(__float2int_rn(a));
  p.integers[n + i] = static_cast<u32>(__float2int_rz(b));
  p.integers[2 * n + i] = __float2uint_rn(c);
}

struct FlagsArguments {
  u32* words;
  u64* wide;
  u64* old;
};

extern "C" __global__ void __launch_bounds__(64, 1) flags(const __grid_constant__ FlagsArguments p) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
  const Smem base = ptx::shared_address(smem);
  if (threadIdx.x < 16) ptx::st_relaxed_gpu(p.words + threadIdx.x, 0u);
  if (threadIdx.x < 8) ptx::st_relaxed_sys(p.wide + threadIdx.x, u64{0});
  if (threadIdx.x < 8) ptx::st_shared_u32(base + threadIdx.x * 4, 0);
  __syncthreads();
  ptx::red_add_relaxed_gpu(p.words + 0, threadIdx.x);
  ptx::red_add_relaxed_sys(p.words + 1, 1u);
  ptx::red_add_release_gpu(p.words + 2, 2u);
  ptx::red_add_release_sys(p.words + 3, 3u);
  ptx::red_add_relaxed_gpu(p.wide + 0, u64{1} << 32);
  ptx::red_add_release_sys(p.wide + 1, u64{1} << 33 | 1);
  ptx::atom_add_shared(base, 7);
  __syncthreads();
  if (threadIdx.x == 0) {
    p.old[0] = ptx::atom_add_relaxed_gpu(p.words + 4, 5u);
    p.old[1] = ptx::atom_add_acq_rel_sys(p.words + 4, 0xffffffffu);
    p.old[2] = ptx::atom_cas_acq_rel_sys(p.words + 4, 4, 77);
    p.old[3] = ptx::atom_cas_acq_rel_sys(p.words + 4, 4, 78);
    p.old[4] = ptx::atom_add_release_gpu(p.wide + 2, u64{9} << 40);
    p.old[5] = ptx::atom_add_acq_rel_gpu(p.wide + 2, u64{1});
    ptx::st_release_gpu(p.words + 5, 11u);
    ptx::st_release_sys(p.words + 6, ptx::ld_acquire_gpu(p.words + 5) + ptx::ld_acquire_sys(p.words + 4));
    ptx::st_relaxed_sys_v2(p.wide + 4, u64{21} << 36, u64{22});
    u64 a = 0, b = 0;
    ptx::ld_relaxed_sys_v2(p.wide + 4, a, b);
    p.old[6] = a + b;
    ptx::st_shared_u16(base + 6, static_cast<u16>(0x1234));
    ptx::st_shared_u8(base + 9, static_cast<u8>(0x56));
    p.old[7] = ptx::ld_shared_u32(base) + (static_cast<u64>(ptx::ld_shared_u32(base + 4) ^ ptx::ld_shared_u32(base + 8)) << 32);
  }
}
