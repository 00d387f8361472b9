// The float32 arithmetic between the tensor core and a store, shared by every plan.
//
// Each operation is explicitly rounded (__fmul_rn, __fmaf_rn, ...), so that no compiler contracts two plans
// differently: a token's bits must not depend on the plan. Inputs may be anything, NaN and Inf included.
#pragma once
#include "ptx.cuh"

namespace math {

using ptx::u16;
using ptx::u32;

// --- Promotion: acc = fma(partial, s_a * s_b, acc), k-blocks in ascending order --------------------------------------

MEGAMOE_DEVICE float scale_product(float scale_a, float scale_b) { return __fmul_rn(scale_a, scale_b); }

// The first k-block, where acc is +0. fma(p, s, +0) and p * s round the same exact product, NaN and Inf included; they
// differ in one case, an exact zero product of negative sign (-0 here, +0 there), which the next fma absorbs unless
// every k-block gives it. Every plan starts a chain here, so plans agree in that case too.
MEGAMOE_DEVICE float promote_first(float partial, float scale) { return __fmul_rn(partial, scale); }
MEGAMOE_DEVICE float promote(float partial, float scale, float acc) { return __fmaf_rn(partial, scale, acc); }

// --- Activation function ---------------------------------------------------------------------------------------------

// Minimum and maximum that keep a NaN in `x` (fminf and fmaxf drop it).
MEGAMOE_DEVICE float clamp_above(float x, float limit) { return x > limit ? limit : x; }
MEGAMOE_DEVICE float clamp_below(float x, float limit) { return x < limit ? limit : x; }

// x * sigmoid(x) = x / (1 + 2^(-x log2 e)). Relative error at most 2^-17 for |x| <= 87, where the rounding of x log2 e
// dominates. Below -87.3 the reciprocal is flushed and the result is -0 (exact: above -1.1e-36); +Inf gives +Inf; -Inf
// gives NaN (-Inf * 0), as x / (1 + exp(-x)) does; NaN stays NaN.
MEGAMOE_DEVICE float silu(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  const float power = ptx::ex2_approx(__fmul_rn(x, kMinusLog2E));
  return __fmul_rn(x, ptx::rcp_approx(__fadd_rn(1.0f, power)));
}

// silu(gate) * up * route_weight, products from left to right.
MEGAMOE_DEVICE float swiglu(float gate, float up, float route_weight) {
  return __fmul_rn(__fmul_rn(silu(gate), up), route_weight);
}
// The same with a clamp c > 0: gate <= c and -c <= up <= c first.
MEGAMOE_DEVICE float swiglu_clamped(float gate, float up, float route_weight, float c) {
  return swiglu(clamp_above(gate, c), clamp_above(clamp_below(up, -c), c), route_weight);
}

// --- Quantisation to e4m3, one scale for 128 columns -----------------------------------------------------------------

constexpr float kE4m3Max = 448.0f;
constexpr float kAmaxFloor = 1e-10f;

// Running max(|x|) as bits: without the sign bit, float32 bits order like unsigned integers, with Inf above every
// finite value and NaN above Inf, so that an integer maximum propagates NaN. Start from 0.
MEGAMOE_DEVICE u32 amax_bits(u32 bits, float x) {
  const u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
  return magnitude > bits ? magnitude : bits;
}
MEGAMOE_DEVICE u32 amax_combine(u32 a, u32 b) { return a > b ? a : b; }
MEGAMOE_DEVICE float amax_value(u32 bits) { return __uint_as_float(amax_combine(bits, __float_as_uint(kAmaxFloor))); }

// Stored scale and multiplier of a group; NaN gives NaN and NaN, Inf gives Inf and 0.
MEGAMOE_DEVICE float quantisation_scale(float amax) { return __fdiv_rn(amax, kE4m3Max); }
MEGAMOE_DEVICE float quantisation_multiplier(float amax) { return __fdiv_rn(kE4m3Max, amax); }

// Two neighbouring columns, `lo` in the low byte: round to nearest even, saturating, NaN gives 0x7f.
MEGAMOE_DEVICE u16 quantise_pair(float lo, float hi, float multiplier) {
  return ptx::pack_e4m3x2(__fmul_rn(lo, multiplier), __fmul_rn(hi, multiplier));
}

}  // namespace math
