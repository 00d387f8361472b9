// Warp collectives: every lane of the mask arrives, the last one computes all results.
#include "state.h"

namespace sim {

// Matrices of 8x8 16-bit elements; lane l names row l % 8 of matrix l / 8, and holds elements in its registers.
static constexpr u32 kMatrixRow = 16;  // bytes

struct MatrixOperand {
  u8* row;
  u32* registers;  // ldmatrix: destination, stmatrix: source
  int count;
  bool transposed;
};

static void move_matrices(const Collective& c, bool store) {
  MatrixOperand operands[32];
  for (int i = 0; i < 32; ++i) operands[i] = *reinterpret_cast<MatrixOperand*>(c.value[i]);
  for (int m = 0; m < operands[0].count; ++m) {
    for (u32 r = 0; r < 8; ++r) {
      u8* row = operands[m * 8 + r].row;
      for (u32 e = 0; e < 8; ++e) {
        const bool swap = operands[0].transposed;
        const u32 holder = swap ? e * 4 + r / 2 : r * 4 + e / 2, half = swap ? r % 2 : e % 2;
        u8* element = reinterpret_cast<u8*>(&operands[holder].registers[m]) + half * 2;
        if (store) std::memcpy(row + e * 2, element, 2);
        else std::memcpy(element, row + e * 2, 2);
      }
    }
  }
}

// The own components of all lanes, with one new block for neighbours.
static void settle_all(const Collective& c, Clock all) {
  ClockBlock* block = nullptr;
  u32 at = 0;
  for (int i = 0; i < 32; ++i) {
    if (!(c.mask >> i & 1)) continue;
    Fiber* f = c.fiber[i];
    if (!block || f->id / kBlockTicks != at) {
      at = f->id / kBlockTicks;
      block = copy_block(all[at]);
      all[at] = block;
    }
    block->tick[f->id % kBlockTicks] = f->tick;
    f->settled = f->tick;
  }
}

static void finish(Collective& c) {
  const auto in = [&c](int lane) { return c.mask >> lane & 1; };
  u64 shared_result = 0;
  switch (c.kind) {
    case CollectiveKind::ballot:
      for (int i = 0; i < 32; ++i) shared_result |= in(i) && c.value[i] ? 1ull << i : 0;
      break;
    case CollectiveKind::add:
      for (int i = 0; i < 32; ++i) shared_result += in(i) ? c.value[i] : 0;
      shared_result &= 0xffffffffu;
      break;
    case CollectiveKind::max:
      for (int i = 0; i < 32; ++i) shared_result = in(i) ? std::max(shared_result, c.value[i]) : shared_result;
      break;
    case CollectiveKind::elect: {
      // Any lane may be elected, but the same one each time, as on the hardware.
      u32 k = static_cast<u32>(machine.options.seed * 2654435761u >> 8 ^ c.mask) % static_cast<u32>(__builtin_popcount(c.mask));
      for (int i = 0; i < 32; ++i) {
        if (in(i) && !k--) shared_result = static_cast<u64>(i);
      }
      break;
    }
    case CollectiveKind::stmatrix: move_matrices(c, true); break;
    case CollectiveKind::ldmatrix: move_matrices(c, false); break;
    default: break;
  }
  if (machine.checked && c.kind == CollectiveKind::sync) {
    // The only collective that orders memory: everybody has seen what anybody had.
    Clock all = nullptr;
    for (int i = 0; i < 32; ++i) {
      if (!in(i)) continue;
      if (all) join(all, c.fiber[i]->clock);
      else all = c.fiber[i]->clock;
    }
    settle_all(c, all);
    for (int i = 0; i < 32; ++i) {
      if (!in(i)) continue;
      if (c.fiber[i]->clock != all) copy_clock(c.fiber[i]->clock, all);
      tick(c.fiber[i]);
    }
  }
  for (int i = 0; i < 32; ++i) {
    if (!in(i)) continue;
    u64 result = shared_result;
    if (c.kind == CollectiveKind::elect) {
      result = shared_result == static_cast<u64>(i);
    } else if (c.kind == CollectiveKind::shuffle) {
      const int source = static_cast<int>(c.operand[i]);
      result = in(source) ? c.value[source] : random_bits();
    } else if (c.kind == CollectiveKind::match) {
      result = 0;
      for (int j = 0; j < 32; ++j) result |= in(j) && c.value[j] == c.value[i] ? 1ull << j : 0;
    }
    c.fiber[i]->result = result;
  }
}

u64 collective(CollectiveKind kind, u32 mask, u64 value, u64 operand) {
  Fiber* f = fiber();
  Warp* w = f->warp;
  f->polls.clear();
  const auto wrong = [f](const std::string& what) {
    fail("misuse", format("warp collective: %s, %s by %s", what.c_str(), at(f->pc).c_str(), thread_name(f).c_str()));
  };
  if (!(mask >> f->lane & 1)) wrong(format("the calling lane is not in the mask %08x", mask));
  Collective* c = nullptr;
  for (auto& k : w->collectives) {
    if (!(k.mask & mask)) continue;
    if (k.mask != mask || k.kind != kind) {
      wrong(format("lanes of one warp are at different ones: mask %08x here, mask %08x at %s", mask, k.mask, at(k.pc).c_str()));
    }
    c = &k;
  }
  if (!c) {
    w->collectives.push_back({});
    c = &w->collectives.back();
    c->kind = kind;
    c->mask = mask;
    c->pc = f->pc;
  }
  c->arrived |= 1u << f->lane;
  c->value[f->lane] = value;
  c->operand[f->lane] = operand;
  c->fiber[f->lane] = f;
  if (c->arrived != mask) {
    block(Wait::collective, reinterpret_cast<const void*>(static_cast<u64>(mask)), 0);
    return f->result;
  }
  Collective done = *c;
  w->collectives.erase(w->collectives.begin() + (c - w->collectives.data()));
  finish(done);
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && done.fiber[i] != f) enqueue(done.fiber[i]);
  }
  return f->result;
}

void syncwarp(u32 mask) {
  SIM_ENTER;
  if (mutated('W')) return;
  collective(CollectiveKind::sync, mask, 0, 0);
}
u32 ballot(u32 mask, bool p) {
  SIM_ENTER;
  return static_cast<u32>(collective(CollectiveKind::ballot, mask, p, 0));
}
u64 shuffle(u32 mask, u64 v, int lane) {
  SIM_ENTER;
  return collective(CollectiveKind::shuffle, mask, v, static_cast<u64>(lane & 31));
}
bool elect(u32 mask) {
  SIM_ENTER;
  return collective(CollectiveKind::elect, mask, 0, 0) != 0;
}
u32 match_any(u32 mask, u32 v) {
  SIM_ENTER;
  return static_cast<u32>(collective(CollectiveKind::match, mask, v, 0));
}
u32 reduce_add(u32 mask, u32 v) {
  SIM_ENTER;
  return static_cast<u32>(collective(CollectiveKind::add, mask, v, 0));
}
u32 reduce_max(u32 mask, u32 v) {
  SIM_ENTER;
  return static_cast<u32>(collective(CollectiveKind::max, mask, v, 0));
}

// The lanes that name rows are the ones whose accesses count for the race checker.
static void matrix(MatrixOperand operand, CollectiveKind kind) {
  Fiber* f = fiber();
  const bool store = kind == CollectiveKind::stmatrix;
  if (f->lane < static_cast<u32>(operand.count) * 8) {
    check_shared(operand.row, kMatrixRow, kMatrixRow, store ? "stmatrix" : "ldmatrix");
    if (machine.checked) plain_access(f, operand.row, kMatrixRow, store, site_of(f->pc));
  }
  collective(kind, ~0u, reinterpret_cast<u64>(&operand), 0);
}
void stmatrix(u8* row, const u32* registers, int count, bool transposed) {
  SIM_ENTER;
  matrix({row, const_cast<u32*>(registers), count, transposed}, CollectiveKind::stmatrix);
}
void ldmatrix(u32* registers, const u8* row, int count) {
  SIM_ENTER;
  matrix({const_cast<u8*>(row), registers, count, false}, CollectiveKind::ldmatrix);
}

}  // namespace sim
