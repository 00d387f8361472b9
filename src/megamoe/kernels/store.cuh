// From a math warpgroup's finals to global memory: pieces of 64 rows x 128 bytes through staging buffers, copied out by
// a store warp. The math warps only wait for a free buffer, write it and arrive; nothing of it diverges.
#pragma once
#include "mainloop.cuh"
#include "tile.cuh"

namespace megamoe {

// Element of the output: BF16, or float32 for inspection.
enum class Output { kBf16, kFloat32 };

template <class C, Output Type>
struct StoreConfig {
  static constexpr int kPieceColumns = Type == Output::kBf16 ? 64 : 32;
  static constexpr int kPieces = C::kColumns / kPieceColumns;
  static constexpr int kPiecesUnderLast = kColumnsUnderLast<C> / kPieceColumns;  // those that are final by then
  static_assert(kPieces % C::kBuffers == 0, "a buffer's use must not depend on the tile");
};

// Math side of one warpgroup. Pieces are staged in ascending order, tile after tile.
template <class C, Output Type>
struct Stager {
  using S = StoreConfig<C, Type>;
  Smem buffers, staged, free;
  u32 row, lane;  // row of the piece that this lane addresses
  u32 parity;

  MEGAMOE_DEVICE Stager(Smem base, u32 warpgroup, u32 warp, u32 lane_)
      : buffers(base + (C::kStaging + warpgroup * (C::kBuffers * kStagingBytes))),
        staged(base + (C::kStaged + warpgroup * (C::kBuffers * 8))),
        free(base + (C::kFree + warpgroup * (C::kBuffers * 8))),
        row(warp * 16 + lane_ % 16),
        lane(lane_),
        parity(0) {}

  template <int Piece>
  MEGAMOE_DEVICE void write(const float (&finals)[C::kColumns / 2]) {
    const Smem buffer = buffers + Piece % C::kBuffers * kStagingBytes;
    if constexpr (Type == Output::kBf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 columns: matrices of rows 0..7 and 8..15, columns 0..7, then 8..15
        const int f = (Piece * 8 + i * 2) * 4;
        const u32 unit = static_cast<u32>(i) * 2 + lane / 16;  // 16 bytes
        ptx::stmatrix_x4(buffer + (row * 128 + ((unit ^ (row % 8)) * 16)), ptx::pack_bf16x2(finals[f], finals[f + 1]),
                         ptx::pack_bf16x2(finals[f + 2], finals[f + 3]), ptx::pack_bf16x2(finals[f + 4], finals[f + 5]),
                         ptx::pack_bf16x2(finals[f + 6], finals[f + 7]));
      }
    } else {
      const u32 top = row - lane % 16 + lane / 4;  // of the warp's 16 rows, the one of this lane's r = 0
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 r = top + i / 2 * 8, byte = (j * 8 + lane % 4 * 2 + i % 2) * 4;
          ptx::st_shared_f32(buffer + (r * 128 + (byte ^ (r % 8 * 16))), finals[Piece * 16 + j * 4 + i]);
        }
      }
    }
  }

  // Pieces First .. First + Count - 1.
  template <int First, int Count>
  MEGAMOE_DEVICE void stage(const float (&finals)[C::kColumns / 2]) {
    if constexpr (Count > 0) {
      constexpr int kBuffer = First % C::kBuffers;
      ptx::mbarrier_wait(free + kBuffer * 8, parity ^ 1);
      write<First>(finals);
      ptx::fence_proxy_async_shared();
      ptx::syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(staged + kBuffer * 8);
      if constexpr (kBuffer + 1 == C::kBuffers) parity ^= 1;
      stage<First + 1, Count - 1>(finals);
    }
  }
};

// Store side, one lane for each math warpgroup.
template <class C, Output Type>
struct Storer {
  using S = StoreConfig<C, Type>;
  Smem buffers, staged, free;
  u32 parity;

  MEGAMOE_DEVICE Storer(Smem base, u32 warpgroup)
      : buffers(base + (C::kStaging + warpgroup * (C::kBuffers * kStagingBytes))),
        staged(base + (C::kStaged + warpgroup * (C::kBuffers * 8))),
        free(base + (C::kFree + warpgroup * (C::kBuffers * 8))),
        parity(0) {}

  // All pieces of one tile at (row, column) of the map, box 64 rows x kPieceColumns; nothing is written unless `valid`.
  // Their last reads of shared memory are over afterwards; they are in global memory when the kernel has ended.
  MEGAMOE_DEVICE void store_tile(const CUtensorMap* map, int row, int column, bool valid) {
#pragma unroll 1
    for (int piece = 0; piece < S::kPieces; piece += C::kBuffers) {
#pragma unroll 1
      for (u32 buffer = 0; buffer < C::kBuffers; ++buffer) {
        ptx::mbarrier_wait(staged + buffer * 8, parity);
        if (valid) {
          const int x = column + (piece + static_cast<int>(buffer)) * S::kPieceColumns;
          ptx::tma_store_2d(map, buffers + buffer * kStagingBytes, x, row);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::mbarrier_arrive(free + buffer * 8);
      }
      parity ^= 1;
    }
  }
};

}  // namespace megamoe
