// Stretches: an even split of the weight stream over the CTAs, in calls of a few tokens.
//
// Such a call has little more than one tile for each CTA, and all of them read HBM at the same speed: dealt whole, its last
// tiles begin when the others end and take as long again. So the k-blocks of all of a GEMM's tiles are one sequence, of which
// each CTA has a stretch of the same length, at least a tile's: the last part of a tile, whole tiles, the first part of a
// tile. It works through them from the last to the first. Where a tile is cut, the CTA with its first part hands the sums of
// those k-blocks on to the one with the rest, which goes on adding: the order of sums is that of a tile in one piece. The first
// part is the first thing that a CTA does in a GEMM and the rest the last, so nobody waits for long, or for each other.
#pragma once
#include "routing.cuh"
#include "swap.cuh"

namespace megamoe {

constexpr u32 kStretchTokens = 8;  // of an expert at most; each has one tile
static_assert(kStretchTokens <= kSwapTokens, "one tile");

// Whether a lean call is cut into stretches: from two tiles a CTA on, an even deal of whole tiles is nearly as short, and CTAs
// that are faster take more of them.
MEGAMOE_DEVICE bool has_stretches(Smem base) {
  const u32 tiles = fact(base, kTotalTiles), firsts = tiles * kTiles1, seconds = tiles * kTiles2;
  return kStretches && fact(base, kMostRows) <= kStretchTokens && firsts >= gridDim.x && seconds >= gridDim.x &&
         firsts < 2 * gridDim.x && gridDim.x <= kMaxCtas;
}

// This CTA's stretches of a call that is cut, one for each GEMM, in k-blocks over all its tiles.
class Stretch {
 public:
  MEGAMOE_DEVICE Stretch(Smem base, bool cut) : base_(base), cut_(kStretches && cut), second_(false), begin_(0), end_(0) {
    if (cut_) begin();
  }

  MEGAMOE_DEVICE bool is_cut() const { return kStretches && cut_; }

  // The part of a tile that has the last k-block of what is left; false when nothing is.
  MEGAMOE_DEVICE bool take(Tile& tile) {
    if (begin_ == end_) {
      if (second_) return false;
      second_ = true;
      begin();
    }
    const u32 columns = second_ ? kTiles2 : kTiles1, blocks = second_ ? kBlocks2 : kBlocks1;
    const u32 item = (end_ - 1) / blocks, first = item * blocks, token_tile = item / columns;
    const u32 expert = expert_of_tile(base_, 0, token_tile);
    tile = {};
    tile.second = second_;
    tile.expert = expert;
    tile.column = item - token_tile * columns;
    tile.row = ptx::ld_shared_u32(base_ + (kBaseTable + expert * 4));
    tile.rows = ptx::ld_shared_u32(base_ + (kCountTable + expert * 4));
    tile.index = token_tile;
    tile.first_block = begin_ > first ? begin_ - first : 0;
    tile.end_block = end_ - first;
    end_ = first + tile.first_block;
    return true;
  }

 private:
  MEGAMOE_DEVICE void begin() {
    const u32 all = fact(base_, kTotalTiles) * (second_ ? kTiles2 * kBlocks2 : kTiles1 * kBlocks1);
    begin_ = blockIdx.x * all / gridDim.x;
    end_ = (blockIdx.x + 1) * all / gridDim.x;
  }

  Smem base_;
  bool cut_, second_;
  u32 begin_, end_;
};

// Sums of a tile's first k-blocks, from the CTA before to this one: warp to warp, each with a tag of its own.
class Handover {
 public:
  MEGAMOE_DEVICE Handover(const Params& p, Smem base, const Tile& tile)
      : p_(p), base_(base), second_(tile.second), epoch_(fact(base, kEpoch)) {}

  MEGAMOE_DEVICE void give(const SwapTile<kStretchTokens>& t) const {
    float4* const to = sums(blockIdx.x);
    to[0] = make_float4(t.finals[0][0], t.finals[0][1], t.finals[0][2], t.finals[0][3]);
    to[1] = make_float4(t.finals[1][0], t.finals[1][1], t.finals[1][2], t.finals[1][3]);
    ptx::syncwarp();
    if (ptx::lane_index() == 0) ptx::st_release_gpu(tag(blockIdx.x), epoch_);
  }

  MEGAMOE_DEVICE void take(SwapTile<kStretchTokens>& t) const {
    const u32 from = blockIdx.x - 1;  // the first CTA's stretch begins with a tile
    if (ptx::lane_index() == 0) {
      const u32* const word = tag(from);
      const bool ok = spin_until(
          p_, Phase::kHandover, from, epoch_, [&] { return ptx::ld_acquire_gpu(word); },
          [&](u32 seen) { return seen == epoch_; });
      if (!ok) set_failed(base_);
    }
    ptx::syncwarp();
    const float4 a = sums(from)[0], b = sums(from)[1];
    t.finals[0][0] = a.x, t.finals[0][1] = a.y, t.finals[0][2] = a.z, t.finals[0][3] = a.w;
    t.finals[1][0] = b.x, t.finals[1][1] = b.y, t.finals[1][2] = b.z, t.finals[1][3] = b.w;
  }

 private:
  static_assert(SwapTile<kStretchTokens>::kRegisters == 4, "two pieces of 16 bytes a thread");
  static_assert(kMathThreads * 8 == kHandedSums && kMathThreads / 32 == kHandedTags, "a CTA's share of the workspace");
  MEGAMOE_DEVICE u32 slot(u32 cta) const { return (second_ ? kMaxCtas : 0) + cta; }
  MEGAMOE_DEVICE float4* sums(u32 cta) const {
    return reinterpret_cast<float4*>(workspace::partial_sums(p_)) + (slot(cta) * kMathThreads + math_thread()) * 2;
  }
  MEGAMOE_DEVICE u32* tag(u32 cta) const {
    return workspace::handed(p_) + slot(cta) * (kMathThreads / 32) + math_thread() / 32;
  }
  MEGAMOE_DEVICE static u32 math_thread() { return threadIdx.x - (kThreads - kMathThreads); }

  const Params& p_;
  Smem base_;
  bool second_;
  u32 epoch_;
};

}  // namespace megamoe
