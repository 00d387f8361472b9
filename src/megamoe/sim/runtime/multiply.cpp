// The arithmetic of one m64 nN k32 product. The order of the sum does not depend on N or on which operand is A, so that the
// same dot product has the same bits in every plan, as on the hardware; the bits themselves differ from the hardware's.
#include <cmath>
#include <cstring>

#include "state.h"

namespace sim {

namespace {

struct Table {
  float value[256];
  Table() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      float v = exponent ? std::ldexp(1 + static_cast<float>(mantissa) / 8, exponent - 7) : std::ldexp(static_cast<float>(mantissa) / 8, -6);
      if ((i & 127) == 127) v = NAN;
      value[i] = i & 128 ? -v : v;
    }
  }
};
const Table e4m3;

}  // namespace

void multiply(float* __restrict tile, const u8* shared, const u8* a, const u8* a_registers, const u8* b, u32 columns, bool zero) {
  static float left[64][32], right[32][256];
  const auto element_row = [shared](const u8* operand, u32 row, u32 half) {
    const u64 start = static_cast<u64>(operand - shared);
    return shared + swizzled(start + row / 8 * 1024 + row % 8 * 128 + half * 16);
  };
  for (u32 r = 0; r < 64; ++r) {
    for (u32 half = 0; half < 2; ++half) {
      const u8* p = a ? element_row(a, r, half) : a_registers + r * 32 + half * 16;
      for (u32 k = 0; k < 16; ++k) left[r][half * 16 + k] = e4m3.value[p[k]];
    }
  }
  for (u32 r = 0; r < columns; ++r) {
    for (u32 half = 0; half < 2; ++half) {
      const u8* p = element_row(b, r, half);
      for (u32 k = 0; k < 16; ++k) right[half * 16 + k][r] = e4m3.value[p[k]];
    }
  }
  if (zero) std::memset(tile, 0, 64 * columns * sizeof(float));
  for (u32 m = 0; m < 64; m += 2) {
    float* c0 = tile + m * columns;
    float* c1 = c0 + columns;
    for (u32 k = 0; k < 32; k += 4) {
      const float *x = left[m] + k, *y = left[m + 1] + k;
      for (u32 j = 0; j < columns; ++j) {
        const float b0 = right[k][j], b1 = right[k + 1][j], b2 = right[k + 2][j], b3 = right[k + 3][j];
        c0[j] += std::fma(x[3], b3, std::fma(x[2], b2, std::fma(x[1], b1, x[0] * b0)));
        c1[j] += std::fma(y[3], b3, std::fma(y[2], b2, std::fma(y[1], b1, y[0] * b0)));
      }
    }
  }
}

}  // namespace sim
