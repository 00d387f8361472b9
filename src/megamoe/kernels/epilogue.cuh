// What a math warpgroup does with a finished tile: SwiGLU and requantisation after the first GEMM, rounding to BF16 after
// the second; the rows go into a staging buffer and the warpgroup's store warp takes them from there (scatter.cuh).
//
// A buffer holds up to 64 rows (tokens), see staged_row:
//   wide, first    its 64 tokens x 128 columns of the intermediate, e4m3
//   wide, second   its 64 tokens x 128 of the 256 output columns, BF16; two buffers' worth a tile
//   others, first  all tokens x its 64 columns of the intermediate, e4m3
//   others, second all tokens x its 128 output columns, BF16
#pragma once
#include "half.cuh"
#include "mainloop.cuh"
#include "routing.cuh"
#include "swap.cuh"

namespace megamoe {

// Position in the ring of one warpgroup's staging buffers; its math warps and its store warp each keep one, in one
// register: uses so far, from kBuffers on for the math warps, whose first wait has parity 1.
class StagingRing {
 public:
  MEGAMOE_DEVICE explicit StagingRing(u32 parity) : count_(parity * FusedTile::kBuffers) {}
  MEGAMOE_DEVICE u32 buffer() const { return count_ % FusedTile::kBuffers; }
  MEGAMOE_DEVICE u32 parity() const { return count_ / FusedTile::kBuffers % 2; }
  MEGAMOE_DEVICE void advance() { ++count_; }

 private:
  u32 count_;
};
MEGAMOE_DEVICE Smem staging_buffer(Smem base, u32 warpgroup, u32 buffer) {
  return base + (FusedTile::kStaging + (warpgroup * FusedTile::kBuffers + buffer) * kStagingBuffer);
}
MEGAMOE_DEVICE Smem staged_barrier(Smem base, u32 warpgroup, u32 buffer) {
  return base + (FusedTile::kStaged + (warpgroup * FusedTile::kBuffers + buffer) * 8);
}
MEGAMOE_DEVICE Smem free_barrier(Smem base, u32 warpgroup, u32 buffer) {
  return base + (FusedTile::kFree + (warpgroup * FusedTile::kBuffers + buffer) * 8);
}

class Epilogue {
 public:
  MEGAMOE_DEVICE Epilogue(const Params& p, Smem base, u32 warpgroup, u32 warp, u32 lane)
      : p_(p), base_(base), warpgroup_(warpgroup), warp_(warp), lane_(lane), exchange_(0), ring_(1) {}

  // finals[4 j + 2 r + c]: row 16 w + l / 4 + 8 r, weight row 8 j + 2 (l % 4) + c; even j gate, odd j up.
  MEGAMOE_DEVICE void wide_first(const Tile& tile, float (&finals)[128]) {
    const u32 lane = ptx::fresh(lane_);
    const Smem buffer = acquire();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 row = warp_ * 16 + lane / 4 + 8 * r, token = warpgroup_ * kWarpgroupRows + row;
      const float largest = math::amax_value(activate(tile, token, 0, finals, r, lane));
      if (lane % 4 == 0 && token < tile.rows) store_scale(tile, token, largest);
      quantise(buffer, row, finals, r, math::quantisation_multiplier(largest), lane);
    }
    publish();
  }

  MEGAMOE_DEVICE void wide_second(const float (&finals)[128]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) stage_results(finals + half * 64);
  }

  // The scale group of a token lies over both warpgroups (see `Exchange`).
  MEGAMOE_DEVICE void half_first(const Tile& tile, HalfTile& t) {
    const u32 lane = ptx::fresh(lane_);
    const Exchange exchange = next_exchange();
    const Smem buffer = acquire();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 token = warp_ * 16 + lane / 4 + 8 * r;
      const u32 amax = activate(tile, token, warpgroup_ * 64, t.finals, r, lane);
      if (lane % 4 == 0) ptx::red_max_shared(exchange.row + token * 4, amax);
    }
    meet(exchange, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 token = warp_ * 16 + lane / 4 + 8 * r;
      const float largest = math::amax_value(ptx::ld_shared_u32(exchange.row + token * 4));
      if (warpgroup_ == 0 && lane % 4 == 0 && token < tile.rows) store_scale(tile, token, largest);
      quantise(buffer, token, t.finals, r, math::quantisation_multiplier(largest), lane);
    }
    publish();
  }

  MEGAMOE_DEVICE void half_second(const HalfTile& t) { stage_results(t.finals); }

  template <int Tokens>
  MEGAMOE_DEVICE void swap_first(const Tile& tile, SwapTile<Tokens>& t) {
    const u32 lane = ptx::fresh(lane_);
    const Exchange exchange = next_exchange();
    const Smem buffer = acquire();
#pragma unroll
    for (int i = 0; i < Tokens / 4; ++i) {
      const u32 j = i / 2, c = i % 2, token = 8 * j + 2 * (lane % 4) + c;
      const float weight = route_weight(tile, token);
      u32 amax = 0;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float& h = t.finals[b][4 * j + c];
        h = math::swiglu_clamped(h, t.finals[b][4 * j + 2 + c], weight, p_.clamp);
        amax = math::amax_bits(amax, h);
        if (token < tile.rows) keep_intermediate(tile, token, warpgroup_ * 64 + b * 32 + 8 * warp_ + lane / 4, h);
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) amax = math::amax_combine(amax, ptx::shfl_xor(amax, d));
      if (lane < 4) ptx::red_max_shared(exchange.row + token * 4, amax);
    }
    meet(exchange, lane);
#pragma unroll
    for (int i = 0; i < Tokens / 4; ++i) {
      const u32 j = i / 2, c = i % 2, token = 8 * j + 2 * (lane % 4) + c;
      const u32 amax = ptx::ld_shared_u32(exchange.row + token * 4);
      const float largest = math::amax_value(amax), multiplier = math::quantisation_multiplier(largest);
      if (warpgroup_ == 0 && warp_ == 0 && lane < 4 && token < tile.rows) store_scale(tile, token, largest);
      const u32 both = math::quantise_pair(t.finals[0][4 * j + c], t.finals[1][4 * j + c], multiplier);
      const Smem at = buffer + (staged_row(token) + 8 * warp_ + lane / 4);
      ptx::st_shared_u8(at, static_cast<ptx::u8>(both));
      ptx::st_shared_u8(at + 32, static_cast<ptx::u8>(both >> 8));
    }
    publish();
  }

  template <int Tokens>
  MEGAMOE_DEVICE void swap_second(const SwapTile<Tokens>& t) {
    const u32 lane = ptx::fresh(lane_);
    const Smem buffer = acquire();
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      // Matrices of 8 weight rows x 8 tokens, transposed: a lane addresses 8 columns of one token.
      const u32 columns = b * 128 + warp_ * 32 + lane / 8 % 2 * 16;
#pragma unroll
      for (int j = 0; j < Tokens / 8; j += 2) {
        const float* f = t.finals[b] + 4 * j;
        const u32 lo0 = ptx::pack_bf16x2(f[0], f[1]), hi0 = ptx::pack_bf16x2(f[2], f[3]);
        if (j + 1 < Tokens / 8) {
          const u32 lo1 = ptx::pack_bf16x2(f[4], f[5]), hi1 = ptx::pack_bf16x2(f[6], f[7]);
          ptx::stmatrix_x4_trans(buffer + (staged_row(8 * j + lane / 16 * 8 + lane % 8) + columns), lo0, hi0, lo1,
                                 hi1);
        } else {
          ptx::stmatrix_x2_trans(buffer + (staged_row(8 * j + lane % 8) + columns), lo0, hi0);
        }
      }
    }
    publish();
  }

 private:
  // Where the largest magnitudes of both warpgroups meet in shared memory: one of three rows of words that start from zero.
  // Behind the barrier everybody is done with the row of the tile before; it is cleared there and used again two tiles
  // later, and the next tile's barrier lies between.
  struct Exchange {
    Smem row, before;
  };
  MEGAMOE_DEVICE Exchange next_exchange() {
    const Exchange exchange{amax_row(exchange_), amax_row(exchange_ == 0 ? kAmaxRows - 1 : exchange_ - 1)};
    exchange_ = exchange_ + 1 == kAmaxRows ? 0 : exchange_ + 1;
    return exchange;
  }
  MEGAMOE_DEVICE void meet(const Exchange& exchange, u32 lane) {
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
    if (const u32 thread = (warpgroup_ * 4 + warp_) * 32 + lane; thread < kSwapTokens) {
      ptx::st_shared_u32(exchange.before + thread * 4, 0u);
    }
  }

  // Rows r of finals as in wide_first, of which every second group of 8 becomes columns of the intermediate, from `column`
  // on among the tile's. Returns the bits of the row's largest magnitude.
  template <int Finals>
  MEGAMOE_DEVICE u32 activate(const Tile& tile, u32 token, u32 column, float (&finals)[Finals], int r, u32 lane) {
    const float weight = route_weight(tile, token);
    u32 amax = 0;
#pragma unroll
    for (int j = 0; j < Finals / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& h = finals[8 * j + 2 * r + c];
        h = math::swiglu_clamped(h, finals[8 * j + 4 + 2 * r + c], weight, p_.clamp);
        amax = math::amax_bits(amax, h);
        if (token < tile.rows) keep_intermediate(tile, token, column + 8 * j + 2 * (lane % 4) + c, h);
      }
    }
    amax = math::amax_combine(amax, ptx::shfl_xor(amax, 1));
    return math::amax_combine(amax, ptx::shfl_xor(amax, 2));
  }
  template <int Finals>
  MEGAMOE_DEVICE void quantise(Smem buffer, u32 row, const float (&finals)[Finals], int r, float multiplier, u32 lane) {
#pragma unroll
    for (int j = 0; j < Finals / 8; ++j) {
      const u32 pair = math::quantise_pair(finals[8 * j + 2 * r], finals[8 * j + 2 * r + 1], multiplier);
      ptx::st_shared_u16(buffer + (staged_row(row) + 8 * j + 2 * (lane % 4)), static_cast<ptx::u16>(pair));
    }
  }
  // 64 tokens x 128 columns.
  MEGAMOE_DEVICE void stage_results(const float* finals) {
    const u32 lane = ptx::fresh(lane_);
    const Smem at = acquire() + (staged_row(warp_ * 16 + lane % 16) + lane / 16 * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* f = finals + i * 8;
      ptx::stmatrix_x4(at + i * 32, ptx::pack_bf16x2(f[0], f[1]), ptx::pack_bf16x2(f[2], f[3]),
                       ptx::pack_bf16x2(f[4], f[5]), ptx::pack_bf16x2(f[6], f[7]));
    }
    publish();
  }

  // Not of a row past the tile's: nothing orders its writing before this tile.
  MEGAMOE_DEVICE float route_weight(const Tile& tile, u32 token) const {
    return token < tile.rows ? workspace::pool_weights(p_)[tile.row + token] : 0.0f;
  }
  MEGAMOE_DEVICE Smem amax_row(u32 which) const { return base_ + (FusedTile::kAmax + which * kSwapTokens * 4); }

  MEGAMOE_DEVICE Smem acquire() {
    ptx::mbarrier_wait(free_barrier(base_, warpgroup_, ring_.buffer()), ring_.parity());
    return staging_buffer(base_, warpgroup_, ring_.buffer());
  }
  MEGAMOE_DEVICE void publish() {
    ptx::fence_proxy_async_shared();
    ptx::syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(staged_barrier(base_, warpgroup_, ring_.buffer()));
    ring_.advance();
  }
  // Before requantisation, for tests; only with a debugging plan.
  MEGAMOE_DEVICE void keep_intermediate(const Tile& tile, u32 token, u32 column, float h) {
    if constexpr (config::kKeepIntermediate) {
      workspace::h_float(p_)[(tile.row + token) * kIntermediate + tile.column * 128 + column] = h;
    }
  }
  MEGAMOE_DEVICE void store_scale(const Tile& tile, u32 token, float amax) {
    workspace::h_pool_scales(p_)[static_cast<u64>(tile.column) * p_.pool_rows + pooled_row(tile) + token] =
        math::quantisation_scale(amax);
    ptx::fence_proxy_async_global();  // read by bulk copies
  }

  const Params& p_;
  Smem base_;
  u32 warpgroup_, warp_, lane_, exchange_;
  StagingRing ring_;
};

}  // namespace megamoe
