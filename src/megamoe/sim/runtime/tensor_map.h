// What the simulator keeps in a CUtensorMap; megamoe.sim.memory writes it with the fields of cuTensorMapEncodeTiled.
#pragma once

#include "sim.h"

namespace sim {

constexpr u64 kTensorMapMagic = 0x70614D726F736E65ull;

struct TensorMap {
  u64 magic;
  u64 base;
  u64 dims[3];     // elements, innermost first; 1 where the rank is lower
  u64 strides[2];  // bytes, of the second and third dimension
  u32 box[3];
  u32 element_bytes;
  u32 swizzle;  // 0 or 128 bytes
  u32 rank;

  u32 row_bytes() const { return box[0] * element_bytes; }
  u32 rows() const { return box[1] * box[2]; }
  u64 bytes() const { return static_cast<u64>(row_bytes()) * rows(); }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "fits the opaque words");

// Row `row` of the box at (x, y, z): its global address, and whether it is inside the tensor.
struct BoxRow {
  u8* address;  // of column x, which may be outside
  bool inside;
};
inline BoxRow box_row(const TensorMap& m, int y, int z, u32 row) {
  const long long gy = static_cast<long long>(y) + row % m.box[1], gz = static_cast<long long>(z) + row / m.box[1];
  const bool inside = gy >= 0 && gz >= 0 && gy < static_cast<long long>(m.dims[1]) && gz < static_cast<long long>(m.dims[2]);
  return {reinterpret_cast<u8*>(m.base) + gy * static_cast<long long>(m.strides[0]) + gz * static_cast<long long>(m.strides[1]),
          inside};
}

// Columns [first, last) of a box at x that are inside the tensor.
struct BoxColumns {
  u32 first, last;
};
inline BoxColumns box_columns(const TensorMap& m, int x) {
  const long long first = x < 0 ? -static_cast<long long>(x) : 0;
  const long long last = static_cast<long long>(m.dims[0]) - x;
  const auto clip = [&m](long long v) { return static_cast<u32>(v < 0 ? 0 : v > m.box[0] ? m.box[0] : v); };
  return {clip(first), clip(last)};
}

}  // namespace sim
