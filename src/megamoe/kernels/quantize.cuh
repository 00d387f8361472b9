// Quantisation of groups of 128 BF16 values to e4m3, with either kind of scale.
//
// Bit-equal to megamoe.formats.fp8_block.quantize_activations. The arithmetic is math.cuh's, shared with the
// requantisation of the intermediate.
#pragma once
#include "math.cuh"

namespace quantize {

using ptx::u32;

constexpr int kGroup = 128;
constexpr u32 kInfinity = 0x7f800000u;

// `stored` goes to memory, `multiplier` to the values. The multiplier is not 1 / stored: each is rounded by itself.
struct Scale {
  float stored;
  float multiplier;
};

// Scale of a group from the bits of its largest magnitude (math::amax_bits). NaN gives NaN for both; Inf, Inf and 0.
template <bool kUe8m0>
MEGAMOE_DEVICE Scale group_scale(u32 amax_bits) {
  const float amax = math::amax_value(amax_bits);
  const float exact = math::quantisation_scale(amax);
  if constexpr (!kUe8m0) {
    return {exact, math::quantisation_multiplier(amax)};
  } else {
    // Up to the next power of two, by the bits. Of a finite group it lies in [2^-42, 2^120], so its inverse is exact:
    // the exponent mirrored.
    const u32 bits = __float_as_uint(exact);
    if (bits > kInfinity) return {exact, exact};
    if (bits == kInfinity) return {exact, 0.0f};
    const u32 power = (bits + 0x007fffffu) & kInfinity;
    return {__uint_as_float(power), __uint_as_float(0x7f000000u - power)};
  }
}

// The two BF16 values of a word as float32: a shift, exact.
MEGAMOE_DEVICE float low_bf16(u32 word) { return __uint_as_float(word << 16); }
MEGAMOE_DEVICE float high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000u); }

// Two words of BF16 values to four bytes, in order.
MEGAMOE_DEVICE u32 to_e4m3x4(u32 first, u32 second, float multiplier) {
  const u32 low = math::quantise_pair(low_bf16(first), high_bf16(first), multiplier);
  const u32 high = math::quantise_pair(low_bf16(second), high_bf16(second), multiplier);
  return low | (high << 16);
}

// Running largest magnitude of even and of odd values, by the bits without the sign: as integers NaN > Inf > finite, so
// that a NaN wins. Start from 0.
MEGAMOE_DEVICE u32 max_magnitude_bf16x2(u32 largest, u32 word) { return ptx::max_u16x2(largest, word & 0x7fff7fffu); }
// The larger of the two, as the bits of a float32.
MEGAMOE_DEVICE u32 amax_bits(u32 pair) { return math::amax_combine(pair << 16, pair & 0xffff0000u); }

}  // namespace quantize
