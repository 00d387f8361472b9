// CUDA C++ for g++: keywords, thread indices, and the intrinsics that kernels use outside ptx.cuh.
//
// Arithmetic intrinsics round as on the hardware; the build has -ffp-contract=off.
#pragma once

#include <math.h>

#include <type_traits>
#include <utility>

#include "../runtime/sim.h"

#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#undef __align__
#define __shared__ thread_local  // one thread-local block for each CTA
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define MEGAMOE_DEVICE inline __attribute__((always_inline))

#define threadIdx (::sim::self().thread)
#define blockIdx (::sim::self().block->index)
#define blockDim (::sim::self().block->block)
#define gridDim (::sim::self().block->grid)

MEGAMOE_DEVICE void __syncthreads() { sim::named_barrier(0, blockDim.x * blockDim.y * blockDim.z, true); }

// --- Bits ------------------------------------------------------------------------------------------------------------------

template <class To, class From>
MEGAMOE_DEVICE To sim_bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  __builtin_memcpy(&r, &v, sizeof r);
  return r;
}
MEGAMOE_DEVICE unsigned __float_as_uint(float v) { return sim_bit_cast<unsigned>(v); }
MEGAMOE_DEVICE int __float_as_int(float v) { return sim_bit_cast<int>(v); }
MEGAMOE_DEVICE float __uint_as_float(unsigned v) { return sim_bit_cast<float>(v); }
MEGAMOE_DEVICE float __int_as_float(int v) { return sim_bit_cast<float>(v); }
MEGAMOE_DEVICE long long __double_as_longlong(double v) { return sim_bit_cast<long long>(v); }
MEGAMOE_DEVICE double __longlong_as_double(long long v) { return sim_bit_cast<double>(v); }
MEGAMOE_DEVICE int __popc(unsigned v) { return __builtin_popcount(v); }
MEGAMOE_DEVICE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
MEGAMOE_DEVICE int __ffs(int v) { return __builtin_ffs(v); }
MEGAMOE_DEVICE int __ffsll(long long v) { return __builtin_ffsll(v); }
MEGAMOE_DEVICE int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
MEGAMOE_DEVICE int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
MEGAMOE_DEVICE unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
  return r;
}
// Only three bits of each selector count (prmt's fourth, the sign, is not in the intrinsic; measured on an H200).
MEGAMOE_DEVICE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 7;
    r |= (static_cast<unsigned>(bytes >> (8 * s)) & 0xff) << (8 * i);
  }
  return r;
}
MEGAMOE_DEVICE unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
MEGAMOE_DEVICE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
MEGAMOE_DEVICE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31) >> 32);
}
MEGAMOE_DEVICE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}

// --- float32, each operation rounded by itself -----------------------------------------------------------------------------

MEGAMOE_DEVICE float __fadd_rn(float a, float b) { return a + b; }
MEGAMOE_DEVICE float __fsub_rn(float a, float b) { return a - b; }
MEGAMOE_DEVICE float __fmul_rn(float a, float b) { return a * b; }
MEGAMOE_DEVICE float __fdiv_rn(float a, float b) { return a / b; }
MEGAMOE_DEVICE float __frcp_rn(float a) { return 1.0f / a; }
MEGAMOE_DEVICE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
MEGAMOE_DEVICE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MEGAMOE_DEVICE float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
MEGAMOE_DEVICE float __int2float_rn(int v) { return static_cast<float>(v); }
MEGAMOE_DEVICE float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
// Out of range saturates, NaN gives 0, as cvt does.
MEGAMOE_DEVICE int __float2int_rn(float v) {
  if (v != v) return 0;
  if (v >= 2147483648.0f) return 2147483647;
  if (v <= -2147483648.0f) return -2147483647 - 1;
  return static_cast<int>(__builtin_rintf(v));
}
MEGAMOE_DEVICE int __float2int_rz(float v) {
  if (v != v) return 0;
  if (v >= 2147483648.0f) return 2147483647;
  if (v <= -2147483648.0f) return -2147483647 - 1;
  return static_cast<int>(v);
}
MEGAMOE_DEVICE unsigned __float2uint_rn(float v) {
  if (!(v > 0.0f)) return 0;
  if (v >= 4294967296.0f) return 0xffffffffu;
  return static_cast<unsigned>(__builtin_rintf(v));
}

// --- min and max of CUDA's global namespace; mixed signs compare as unsigned there too ---------------------------------------

MEGAMOE_DEVICE int min(int a, int b) { return a < b ? a : b; }
MEGAMOE_DEVICE int max(int a, int b) { return a > b ? a : b; }
MEGAMOE_DEVICE unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
MEGAMOE_DEVICE unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
MEGAMOE_DEVICE unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
MEGAMOE_DEVICE unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
MEGAMOE_DEVICE unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
MEGAMOE_DEVICE unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
MEGAMOE_DEVICE long long min(long long a, long long b) { return a < b ? a : b; }
MEGAMOE_DEVICE long long max(long long a, long long b) { return a > b ? a : b; }
MEGAMOE_DEVICE unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
MEGAMOE_DEVICE unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
// The other operand of any NaN, a signaling one included (libm's fminf does not).
MEGAMOE_DEVICE float min(float a, float b) { return a != a ? b : b != b ? a : __builtin_fminf(a, b); }
MEGAMOE_DEVICE float max(float a, float b) { return a != a ? b : b != b ? a : __builtin_fmaxf(a, b); }

// --- Memory ----------------------------------------------------------------------------------------------------------------

template <class T>
MEGAMOE_DEVICE T __ldg(const T* p) {
  sim::read_only(p, sizeof(T));
  return *p;
}

// --- The kernel's entry for the host: arguments by address, and their sizes ----------------------------------------------------

namespace sim {

template <class Function>
struct Entry;
template <class... Arguments>
struct Entry<void (*)(Arguments...)> {
  template <class Kernel>
  __attribute__((no_sanitize_thread)) static void call(Kernel kernel, const void* const* arguments) {
    call_with(kernel, arguments, std::index_sequence_for<Arguments...>());
  }
  static const u32* sizes(u32* count) {
    static const u32 each[] = {static_cast<u32>(sizeof(Arguments))..., 0};
    *count = sizeof...(Arguments);
    return each;
  }

 private:
  template <class Kernel, size_t... I>
  __attribute__((no_sanitize_thread)) static void call_with(Kernel kernel, const void* const* arguments, std::index_sequence<I...>) {
    kernel(*static_cast<const std::remove_cv_t<Arguments>*>(arguments[I])...);
  }
};

}  // namespace sim

// One for each kernel, in the library's own source.
#define MEGAMOE_SIM_KERNEL(kernel)                                                                                    \
  extern "C" void sim_entry_##kernel(const void* const* arguments) {                                                  \
    ::sim::Entry<decltype(&::kernel)>::call(&::kernel, arguments);                                                    \
  }                                                                                                                   \
  extern "C" const ::sim::u32* sim_sizes_##kernel(::sim::u32* count) {                                                \
    return ::sim::Entry<decltype(&::kernel)>::sizes(count);                                                           \
  }
