// Memory of clock blocks: handed out one after the other, given back all at once.
#include "clock.h"

#include <vector>

namespace sim {

namespace {

constexpr size_t kChunk = 16384;  // blocks, 4 MiB
std::vector<ClockBlock*> chunks;
size_t chunk = 0, next = kChunk;

}  // namespace

ClockBlock* new_block() {
  if (next == kChunk) {
    if (chunk == chunks.size()) {
      auto* p = static_cast<ClockBlock*>(std::aligned_alloc(64, kChunk * sizeof(ClockBlock)));
      if (!p) std::abort();
      chunks.push_back(p);
    }
    ++chunk;
    next = 0;
  }
  return &chunks[chunk - 1][next++];
}

void forget_blocks() {
  chunk = 0;
  next = kChunk;
}

}  // namespace sim
