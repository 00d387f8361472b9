// Flags, counters and plain accesses: what each returns and what it leaves, for both widths and both scopes.
#include "ptx.cuh"

using ptx::Smem;
using ptx::u32;
using ptx::u64;
using ptx::u8;

struct MemoryArguments {
  const u8* bytes;  // [512], read only
  u32* words;       // [64] scratch of thread 0, then [1] counter of all threads
  u64* longs;       // [64], likewise
  u32* out;         // [256]
  u64* out_long;    // [64]
  u32* shared;      // [160]
};

// One of each operation on its own word; `put` takes what it returned.
template <class T, class Put>
MEGAMOE_DEVICE void one_of_each(T* w, T big, Put&& put) {
  ptx::st_relaxed_gpu(w + 0, big + 1);
  put(ptx::ld_relaxed_gpu(w + 0));
  ptx::st_release_gpu(w + 1, big + 2);
  put(ptx::ld_acquire_gpu(w + 1));
  ptx::st_relaxed_sys(w + 2, big + 3);
  put(ptx::ld_relaxed_sys(w + 2));
  ptx::st_release_sys(w + 3, big + 4);
  put(ptx::ld_acquire_sys(w + 3));
  ptx::st_relaxed_gpu(w + 4, big);
  ptx::red_add_relaxed_gpu(w + 4, 5);
  ptx::red_add_release_gpu(w + 4, 6);
  ptx::red_add_relaxed_sys(w + 4, 7);
  ptx::red_add_release_sys(w + 4, 8);
  put(ptx::atom_add_relaxed_gpu(w + 4, 9));
  put(ptx::atom_add_release_gpu(w + 4, 10));
  put(ptx::atom_add_acq_rel_gpu(w + 4, 11));
  put(ptx::atom_add_relaxed_sys(w + 4, 12));
  put(ptx::atom_add_release_sys(w + 4, 13));
  put(ptx::atom_add_acq_rel_sys(w + 4, static_cast<T>(0) - 14));
  put(ptx::ld_relaxed_gpu(w + 4));
}

extern "C" __global__ void __launch_bounds__(128) memory_accesses(const __grid_constant__ MemoryArguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Smem base = ptx::shared_address(smem);
  const u32 t = threadIdx.x;
  if (t == 0) {
    u32 n = 0;
    one_of_each(p.words, 0xfffffff0u, [&](u32 v) { p.out[n++] = v; });
    ptx::st_relaxed_sys(p.words + 8, 100u);
    p.out[n++] = ptx::atom_cas_acq_rel_sys(p.words + 8, 100, 200);
    p.out[n++] = ptx::atom_cas_acq_rel_sys(p.words + 8, 100, 300);
    p.out[n++] = ptx::ld_relaxed_sys(p.words + 8);
    p.out[n++] = ptx::atom_inc_relaxed_gpu(p.words + 8);
    p.out[n++] = ptx::ld_relaxed_sys(p.words + 8);
    u32 m = 0;
    one_of_each(p.longs, 0xfffffffffffffff0ull, [&](u64 v) { p.out_long[m++] = v; });
    ptx::st_relaxed_sys_v2(p.longs + 8, 0x0123456789abcdefull, 0xfedcba9876543210ull);
    ptx::ld_relaxed_sys_v2(p.longs + 8, p.out_long[m], p.out_long[m + 1]);
    ptx::st_relaxed_gpu(p.words + 64, 0u);
    ptx::st_relaxed_gpu(p.longs + 64, static_cast<u64>(0));
    ptx::st_shared_u32(base + 1024, 0);
    ptx::st_shared_u32(base + 1028, 17);
  }
  __syncthreads();
  // All threads on one counter: the sum does not depend on the order.
  ptx::red_add_relaxed_gpu(p.words + 64, t + 1);
  ptx::red_add_relaxed_sys(p.longs + 64, static_cast<u64>(t) << 30);
  ptx::atom_add_shared(base + 1024, t * 3);
  ptx::red_max_shared(base + 1028, t % 2 == 0 ? t : 0x80000000u + t * 5 % 64);  // unsigned
  // Read-only loads, and shared memory in every width.
  const uint4 v = ptx::ld_global_nc_v4(p.bytes + t % 32 * 16);
  const int2 pair = ptx::ld_global_nc_int2(p.bytes + t % 64 * 8);
  p.out[64 + t] = v.x ^ v.y * 3 ^ v.z * 5 ^ v.w * 7 ^ static_cast<u32>(pair.x) * 11 ^ static_cast<u32>(pair.y) * 13;
  if (t < 16) ptx::st_shared_v4(base + t * 16, v);
  if (t >= 16 && t < 32) ptx::st_shared_f32(base + (256 + t * 4), __uint_as_float(v.x & 0x7effffffu));
  if (t >= 32 && t < 64) ptx::st_shared_u16(base + (320 + t * 2), static_cast<ptx::u16>(v.y));
  if (t >= 64) ptx::st_shared_u8(base + (384 + t), static_cast<u8>(v.z));
  __syncthreads();
  if (t < 16) {
    const uint4 back = ptx::ld_shared_v4(base + t * 16);
    p.shared[t * 4] = back.x;
    p.shared[t * 4 + 1] = back.y;
    p.shared[t * 4 + 2] = back.z;
    p.shared[t * 4 + 3] = back.w;
    p.shared[64 + t] = __float_as_uint(ptx::ld_shared_f32(base + (320 + t * 4)));
    p.shared[80 + t] = ptx::ld_shared_u32(base + (384 + t * 4));
    p.shared[96 + t] = ptx::ld_shared_u32(base + (448 + t * 4));
  }
  if (t < 2) p.shared[112 + t] = ptx::ld_shared_u32(base + (1024 + t * 4));
}
