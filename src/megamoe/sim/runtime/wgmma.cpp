// WGMMA: products are queued per warpgroup, done in order at some time before their wait; registers are poisoned meanwhile.
#include "state.h"

namespace sim {

namespace {

constexpr u32 kRows = 64, kDepth = 32;

struct ProductEvent : Event {
  WarpGroup* group;
  bool fire() override;
};

void queue_next(WarpGroup* g) {
  const u64 head = g->done - g->base;
  if (g->queued || head >= g->products.size() || g->products[head].arrived != kWarpgroup) return;
  g->queued = true;
  auto e = std::make_unique<ProductEvent>();
  e->group = g;
  machine.events.push_back(std::move(e));
}

bool ProductEvent::fire() {
  WarpGroup* g = group;
  Product& p = g->products[g->done - g->base];
  multiply(p.tile->values.data(), g->cta->shared, p.a, p.registers.data(), p.b, p.columns, !p.accumulate);
  ++machine.counters.products;
  ++g->done;
  g->queued = false;
  changed();
  for (size_t i = 0; i < g->waiters.size();) {
    if (g->waiters[i]->wait_value > g->done) {
      ++i;
      continue;
    }
    enqueue(g->waiters[i]);
    g->waiters[i] = g->waiters.back();
    g->waiters.pop_back();
  }
  constexpr size_t kKept = 256;  // threads of a warpgroup may be this many products apart
  while (g->products.size() > kKept && g->base < g->done) {
    g->products.pop_front();
    ++g->base;
  }
  queue_next(g);
  return true;
}

// Row and column of register i of thread t: see wgmma.cuh.
void fragment(u32 t, u32 i, u32& row, u32& column) {
  row = t / 32 * 16 + t % 32 / 4 + 8 * (i >> 1 & 1);
  column = (i >> 2) * 8 + t % 4 * 2 + (i & 1);
}

// The whole tile at once, so that each thread then reads its registers in one piece.
void scatter(Tile& tile) {
  const u32 registers = tile.columns / 2;
  tile.fragments.resize(kWarpgroup * registers);
  for (u32 t = 0; t < kWarpgroup; ++t) {
    for (u32 i = 0; i < registers; ++i) {
      u32 row, column;
      fragment(t, i, row, column);
      tile.fragments[t * registers + i] = tile.values[row * tile.columns + column];
    }
  }
}

u64 checksum(const float* acc, u32 registers) {
  u64 h = 1469598103934665603ull;
  for (u32 i = 0; i < registers; ++i) {
    u32 bits;
    std::memcpy(&bits, &acc[i], 4);
    h = (h ^ bits) * 1099511628211ull;
  }
  return h;
}

void operand_reads(const WarpGroup* g, const Product& p, const u8* tile, u32 rows, u32 tick, const std::string& who) {
  const AsyncIssue how{p.clock.get(), g->component, tick, "async read (wgmma)", who, site_of(p.pc)};
  const u64 start = static_cast<u64>(tile - g->cta->shared);
  for (u32 r = 0; r < rows; ++r) {
    for (u32 half = 0; half < 2; ++half) {
      async_access(how, g->cta->shared + swizzled(start + r / 8 * 1024 + r % 8 * 128 + half * 16), 16, false);
    }
  }
}

void check_operand(const u8* tile, u32 rows, const char* which) {
  const Fiber* f = fiber();
  const u64 start = static_cast<u64>(tile - f->cta->shared);
  if (tile < f->cta->shared || start % 16 || start + (rows / 8 - 1) * 1024 + 7 * 128 + kDepth > f->cta->dynamic_bytes) {
    fail("bounds", format("wgmma: operand %s at %s is outside shared memory or not 16-aligned, %s by %s", which,
                          address_name(tile).c_str(), at(f->pc).c_str(), thread_name(f).c_str()));
  }
}

void check_fenced(Fiber* f, const float* acc, u32 registers, bool accumulate) {
  for (auto& [known, sum] : f->fenced) {
    if (known != acc) continue;
    if (accumulate && machine.checked && sum != checksum(acc, registers)) {
      report(site_of(f->pc) * 31ull + 7, "misuse", format("accumulator written after its wgmma_fence, %s by %s",
                                                          at(f->pc).c_str(), thread_name(f).c_str()));
    }
    return;
  }
  report(site_of(f->pc) * 31ull + 5, "misuse",
         format("wgmma on an accumulator without wgmma_fence, %s by %s", at(f->pc).c_str(), thread_name(f).c_str()));
}

void product(float* acc, u32 registers, const u8* a, const u32* a_registers, const u8* b, bool accumulate) {
  Fiber* f = fiber();
  WarpGroup* g = f->group;
  const u32 t = f->thread.x % kWarpgroup, columns = registers * 2;
  f->polls.clear();
  if (a) check_operand(a, kRows, "A");
  check_operand(b, columns, "B");
  const u64 number = f->next_product++;
  if (number < g->base) fail("limit", "threads of a warpgroup are too many wgmma apart");
  while (number >= g->base + g->products.size()) g->products.emplace_back();
  Product& p = g->products[number - g->base];
  InFlight* mine = nullptr;
  for (auto& l : f->in_flight) {
    if (l.acc == acc) mine = &l;
  }
  if (mine && mine->tile->columns != columns) {
    fail("misuse", format("wgmma on registers of an accumulator of another width that was not waited for, %s by %s",
                          at(f->pc).c_str(), thread_name(f).c_str()));
  }
  if (!p.arrived) {
    p.a = a;
    p.b = b;
    p.columns = columns;
    p.accumulate = accumulate;
    p.pc = f->pc;
    p.fresh = !mine;
    if (mine) {
      p.tile = mine->tile;
    } else {
      p.tile = std::make_shared<Tile>();
      p.tile->columns = columns;
      p.tile->values.resize(kRows * columns);
    }
    if (!a) p.registers.resize(kRows * kDepth);
  } else if (p.a != a || p.b != b || p.columns != columns || p.accumulate != accumulate || (mine ? mine->tile != p.tile : !p.fresh)) {
    fail("misuse", format("wgmma %llu of warpgroup %u: operands differ between threads, %s and %s, by %s", number, g->index,
                          at(f->pc).c_str(), at(p.pc).c_str(), thread_name(f).c_str()));
  }
  if (mine) {
    mine->last = number;
  } else {
    check_fenced(f, acc, registers, accumulate);
    for (u32 i = 0; i < registers; ++i) {
      u32 row, column;
      fragment(t, i, row, column);
      if (accumulate) p.tile->values[row * columns + column] = acc[i];
      std::memcpy(&acc[i], &kPoison, 4);
    }
    f->in_flight.push_back({acc, p.tile, number});
  }
  if (!a) {
    // a[i]: row l / 4 + 8 (i % 2), bytes 16 (i / 2) + 4 (l % 4) of the warp's 16 rows
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + 8 * (i % 2);
      std::memcpy(&p.registers[row * kDepth + 16 * (i / 2) + 4 * (t % 4)], &a_registers[i], 4);
    }
  }
  if (machine.checked && f->lane == 0) {
    settle(f);
    if (p.clock) meet(p.clock.get(), f->clock);
    else p.clock = clone(f->clock);
  }
  if (++p.arrived == kWarpgroup) {
    if (machine.checked) {
      const std::string who = format("wgmma %llu of warpgroup %u, rank %u cta %u", number, g->index, g->cta->rank, g->cta->id_in_grid());
      const u32 tick = static_cast<u32>(number + 1);
      if (a) operand_reads(g, p, a, kRows, tick, who);
      operand_reads(g, p, b, columns, tick, who);
      p.clock.reset();
    }
    queue_next(g);
  }
  changed();
  preempt();
}

}  // namespace

const u8* check_tile(const u8* tile) {
  Fiber* f = SIM_ENTER;
  const Cta* c = shared_owner(tile);
  if (c != f->cta || static_cast<u64>(tile - c->shared) % 1024) {
    fail("misuse", format("wgmma tile at %s is not a 1024-aligned address of this CTA, %s", address_name(tile).c_str(), at(f->pc).c_str()));
  }
  return tile;
}

void wgmma_fence(const float* acc, u32 registers) {
  Fiber* f = SIM_ENTER;
  if (mutated('F')) return;
  const u64 sum = machine.checked ? checksum(acc, registers) : 0;
  for (auto& known : f->fenced) {
    if (known.first != acc) continue;
    known.second = sum;
    return;
  }
  f->fenced.emplace_back(acc, sum);
}

void wgmma(float* acc, u32 registers, const u8* a, const u8* b, bool accumulate) {
  SIM_ENTER;
  product(acc, registers, a, nullptr, b, accumulate);
}
void wgmma_register_a(float* acc, u32 registers, const u32 (&a)[4], const u8* b, bool accumulate) {
  SIM_ENTER;
  product(acc, registers, nullptr, a, b, accumulate);
}

void wgmma_commit() {
  Fiber* f = SIM_ENTER;
  f->product_groups.push_back(f->next_product);
}

void wgmma_wait(u32 pending, const float* acc) {
  Fiber* f = SIM_ENTER;
  if (mutated('M')) return;
  if (mutated('m')) ++pending;
  WarpGroup* g = f->group;
  preempt();
  f->polls.clear();
  f->fenced.clear();
  if (f->product_groups.size() > pending) {
    const u64 need = f->product_groups[f->product_groups.size() - 1 - pending];
    if (g->done < need) {
      g->waiters.push_back(f);
      block(Wait::wgmma, nullptr, need);
    }
    f->product_groups.erase(f->product_groups.begin(), f->product_groups.end() - pending);
    if (machine.checked) raise(f->clock, g->component, static_cast<u32>(need));
    for (size_t k = 0; k < f->in_flight.size();) {
      const InFlight& l = f->in_flight[k];
      if (l.last >= need) {
        ++k;
        continue;
      }
      const u32 registers = l.tile->columns / 2;
      for (u32 i = 0; i < registers; ++i) {
        u32 bits;
        std::memcpy(&bits, &l.acc[i], 4);
        if (bits == kPoison) continue;
        report(site_of(f->pc) * 31ull + 6, "misuse", format("accumulator written while wgmma was in flight (register %u), wait %s by %s",
                                                            i, at(f->pc).c_str(), thread_name(f).c_str()));
        break;
      }
      if (l.tile->fragments.empty()) scatter(*l.tile);
      std::memcpy(l.acc, &l.tile->fragments[f->thread.x % kWarpgroup * registers], registers * sizeof(float));
      f->in_flight[k] = std::move(f->in_flight.back());
      f->in_flight.pop_back();
    }
  }
  for (auto& l : f->in_flight) {
    if (l.acc == acc) {
      report(site_of(f->pc) * 31ull + 8, "misuse", format("accumulator of wgmma_wait is still in flight, %s by %s", at(f->pc).c_str(),
                                                          thread_name(f).c_str()));
    }
  }
}

}  // namespace sim
