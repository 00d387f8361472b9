// mbarriers, named barriers, cluster barriers, fences, register pools, and the clocks that they carry.
#include "state.h"

namespace sim {

void tick(Fiber* f) {
  ++f->tick;
}

void settle(Fiber* f) {
  if (f->settled == f->tick) return;
  set_component(f->clock, kSeen, f->id, f->tick);
  f->settled = f->tick;
}

u32 seen_by(const Fiber* f, u32 index) { return index == f->id ? f->tick : component(f->clock, kSeen, index); }

void release_into(Fiber* f, Sync& sync) {
  ++machine.counters.syncs;
  if (!machine.checked) return;
  settle(f);
  if (!sync.clock) sync.clock = new_clock();
  join(sync.clock.get(), f->clock);
  tick(f);
}

void acquire_from(Fiber* f, const Sync& sync) {
  if (machine.checked && sync.clock) join(f->clock, sync.clock.get());
}

// --- mbarriers: the word in memory is a cookie with the number of the simulator's record -----------------------------------

static constexpr u64 kCookie = 0xE3B0A50000000000ull, kCookieMask = ~0xffffffull;

Mbarrier* find_mbarrier(u8* bar) {
  const Fiber* f = fiber();
  Cta* c = shared_owner(bar);
  if (!c) {
    fail("misuse", format("mbarrier operation on %s, which is not shared memory, %s by %s", address_name(bar).c_str(),
                          at(f->pc).c_str(), thread_name(f).c_str()));
  }
  u64 word = 0;
  std::memcpy(&word, bar, sizeof word);
  const u64 number = word & ~kCookieMask;
  if ((word & kCookieMask) != kCookie || number >= c->mbarriers.size() || c->mbarriers[number]->address != bar) {
    fail("misuse", format("mbarrier at %s used before init or overwritten, %s by %s", address_name(bar).c_str(),
                          at(f->pc).c_str(), thread_name(f).c_str()));
  }
  return c->mbarriers[number].get();
}

// Who arrived in the phase that ends, as "role arrivals/warps" for each role.
static void record_phase(Mbarrier* m) {
  std::string who;
  for (auto& [role, warps] : m->arrivals) {
    const size_t all = warps.size();
    std::sort(warps.begin(), warps.end());
    const auto different = std::unique(warps.begin(), warps.end()) - warps.begin();
    who += format("%s%s %zu/%td", who.empty() ? "" : ", ", role.c_str(), all, different);
  }
  m->arrivals.clear();
  ++machine.arrivals[{m->label.substr(0, m->label.find('[')), who}];
}

static void complete_if_done(Mbarrier* m) {
  if (m->pending || m->bytes) return;
  if (machine.options.record_arrivals) record_phase(m);
  ++m->phase;
  m->pending = m->expected;
  changed();
  if (machine.checked) {
    if (!m->published.clock) m->published.clock = new_clock();
    if (m->arrived.clock) join(m->published.clock.get(), m->arrived.clock.get());
    raise(m->published.clock.get(), m->component, static_cast<u32>(m->phase));
  }
  wake(m->waiters);
}

void mbarrier_init(u8* bar, u32 arrivals) {
  Fiber* f = SIM_ENTER;
  constexpr u32 kMostArrivals = 0xfffff;
  if (mutated('N')) ++arrivals;
  if (arrivals > 1 && mutated('n')) --arrivals;
  check_shared(bar, 8, 8, "mbarrier.init");
  if (!arrivals || arrivals > kMostArrivals) {
    fail("misuse", format("mbarrier.init with %u arrivals, %s", arrivals, at(f->pc).c_str()));
  }
  Cta* c = shared_owner(bar);
  if (c->mbarriers.size() >= kMbarriersPerCta) fail("limit", "too many mbarriers in one CTA");
  for (auto& old : c->mbarriers) {
    if (old->address == bar) old->live = false;
  }
  auto m = std::make_unique<Mbarrier>();
  m->address = bar;
  m->cta = c;
  m->expected = m->pending = arrivals;
  m->label = address_name(bar);
  machine.names[&m->phase] = "phase of " + m->label;
  if (machine.checked) {
    m->component = new_component(c->rank, "copies that complete " + m->label);
    m->init_fiber = f->id;
    m->init_tick = f->tick;
    plain_access(f, bar, 8, true, site_of(f->pc));
  }
  const u64 word = kCookie | c->mbarriers.size();
  std::memcpy(bar, &word, sizeof word);
  c->mbarriers.push_back(std::move(m));
  f->polls.clear();
  preempt();
}

void check_initialised(Mbarrier* m, bool by_async) {
  if (!machine.checked) return;
  const Fiber* f = fiber();
  const bool seen = seen_by(f, m->init_fiber) >= m->init_tick;
  if (by_async ? component(f->clock, kAsyncShared, m->init_fiber) >= m->init_tick : seen) return;
  report(site_of(f->pc) * 31ull + 9, "race",
         format("mbarrier %s: its init is not ordered before %s (missing %s), %s by %s", m->label.c_str(),
                by_async ? "its use by a copy" : "this use", by_async && seen ? "fence_mbarrier_init" : "barrier",
                at(f->pc).c_str(), thread_name(f).c_str()));
}

static void arrive(Mbarrier* m, Fiber* f) {
  if (!m->pending) {
    fail("misuse", format("mbarrier %s: more arrivals than its count %u (phase %llu, bytes %d), %s by %s", m->label.c_str(),
                          m->expected, m->phase, m->bytes, at(f->pc).c_str(), thread_name(f).c_str()));
  }
  if (machine.options.record_arrivals) m->arrivals[f->role].push_back(f->warp_index);
  --m->pending;
  f->polls.clear();
  changed();
  complete_if_done(m);
}

void complete_bytes(Mbarrier* m, u32 bytes) {
  m->bytes -= static_cast<int>(bytes);
  complete_if_done(m);
}

void mbarrier_arrive(u8* bar, u32 expect_bytes) {
  Fiber* f = SIM_ENTER;
  constexpr int kMostBytes = 0xfffff;
  if (mutated('A')) return;
  if (expect_bytes && mutated('E')) expect_bytes -= 16;
  preempt();
  Mbarrier* m = find_mbarrier(bar);
  check_initialised(m, false);
  release_into(f, m->arrived);
  m->bytes += static_cast<int>(expect_bytes);
  if (m->bytes > kMostBytes) fail("misuse", format("mbarrier %s: transaction count overflow, %s", m->label.c_str(), at(f->pc).c_str()));
  arrive(m, f);
}

void mbarrier_arrive_cluster(u8* bar) {
  Fiber* f = SIM_ENTER;
  if (mutated('A')) return;
  preempt();
  Mbarrier* m = find_mbarrier(bar);
  if (!m->cta->live) {
    fail("misuse", format("arrival at %s of a CTA that has exited, %s by %s", m->label.c_str(), at(f->pc).c_str(),
                          thread_name(f).c_str()));
  }
  check_initialised(m, false);
  release_into(f, m->arrived);
  arrive(m, f);
}

static bool phase_done(const Mbarrier* m, u32 parity) { return (m->phase & 1) != (parity & 1); }

static Mbarrier* begin_wait(u8* bar) {
  Fiber* f = fiber();
  Mbarrier* m = find_mbarrier(bar);
  check_initialised(m, false);
  if (m->cta != f->cta) fail("misuse", format("wait on %s of another CTA, %s", m->label.c_str(), at(f->pc).c_str()));
  return m;
}

static void end_wait(Mbarrier* m) {
  Fiber* f = fiber();
  f->polls.clear();
  acquire_from(f, m->published);
}

static bool wait_once(u8* bar, u32 parity, bool may_give_up) {
  Fiber* f = fiber();
  if (mutated('w')) return true;
  preempt();
  Mbarrier* m = begin_wait(bar);
  if (!phase_done(m, parity)) {
    if (may_give_up && !(random_bits() & 3)) {
      yield();
      return false;
    }
    m->waiters.push_back(f);
    block(Wait::mbarrier, bar, parity);
    if (!phase_done(m, parity)) return false;
  }
  end_wait(m);
  return true;
}

bool mbarrier_try_wait(u8* bar, u32 parity) {
  SIM_ENTER;
  return wait_once(bar, parity, true);
}
void mbarrier_wait(u8* bar, u32 parity) {
  SIM_ENTER;
  while (!wait_once(bar, parity, false)) {
  }
}
bool mbarrier_test_wait(u8* bar, u32 parity) {
  SIM_ENTER;
  if (mutated('w')) return true;
  Mbarrier* m = begin_wait(bar);
  if (!phase_done(m, parity)) {
    poll(&m->phase, sizeof m->phase);
    if (!phase_done(m, parity)) return false;
  }
  end_wait(m);
  return true;
}

// --- Named and cluster barriers ------------------------------------------------------------------------------------------

void named_barrier(u32 id, u32 threads, bool wait) {
  Fiber* f = SIM_ENTER;
  if (mutated('B')) return;
  preempt();
  f->polls.clear();
  const auto wrong = [&](const std::string& what) {
    fail("misuse", format("named barrier %u: %s, %s by %s", id, what.c_str(), at(f->pc).c_str(), thread_name(f).c_str()));
  };
  if (id > 15 || threads == 0 || threads % 32) wrong(format("%u threads", threads));
  NamedBarrier& b = f->cta->named[id];
  if (b.count && b.expected != threads) wrong(format("count %u here, %u elsewhere", threads, b.expected));
  b.expected = threads;
  release_into(f, b.sync);
  changed();
  if (++b.count == threads) {
    if (machine.checked) {
      for (Fiber* w : b.waiters) acquire_from(w, b.sync);
      if (wait) acquire_from(f, b.sync);
      b.sync.clock.reset();
    }
    b.count = 0;
    wake(b.waiters);
  } else if (wait) {
    b.waiters.push_back(f);
    block(Wait::named_barrier, reinterpret_cast<const void*>(static_cast<u64>(id)), threads);
  }
}

void cluster_arrive() {
  Fiber* f = SIM_ENTER;
  preempt();
  f->polls.clear();
  Cluster* c = f->cta->cluster;
  release_into(f, c->gathering);
  f->cluster_phase = c->phase;
  if (++c->arrived == c->total) {
    c->arrived = 0;
    ++c->phase;
    c->published = c->gathering;
    c->gathering.clock.reset();
    changed();
    wake(c->waiters);
  }
}

void cluster_wait() {
  Fiber* f = SIM_ENTER;
  if (mutated('C')) return;
  preempt();
  f->polls.clear();
  Cluster* c = f->cta->cluster;
  if (c->phase == f->cluster_phase) {
    c->waiters.push_back(f);
    block(Wait::cluster, nullptr, c->phase);
  }
  acquire_from(f, c->published);
}

// --- Fences ----------------------------------------------------------------------------------------------------------------

static void proxy_fence(Fiber* f, Proxy proxy) {
  if (!machine.checked) return;
  settle(f);
  const auto see = [f](View view) { join_view(f->clock + view * clock_shape.blocks, f->clock); };
  if (proxy != Proxy::global) see(kAsyncShared);
  if (proxy != Proxy::shared) see(kAsyncGlobal);
}

void fence_proxy_async(Proxy proxy) {
  Fiber* f = SIM_ENTER;
  if (mutated('P')) return;
  proxy_fence(f, proxy);
  preempt();
}

void fence_mbarrier_init() {
  Fiber* f = SIM_ENTER;
  if (mutated('I')) return;
  proxy_fence(f, Proxy::shared);
  preempt();
}

// Release: later relaxed stores publish what was seen up to here. Acquire: what earlier relaxed loads saw counts now.
void fence_acq_rel(Scope scope) {
  Fiber* f = SIM_ENTER;
  if (mutated('G')) return;
  if (scope == Scope::sys && mutated('g')) scope = Scope::gpu;
  if (machine.checked) {
    for (int s = 0; s <= static_cast<int>(scope); ++s) {
      if (f->acquired[s]) join(f->clock, f->acquired[s].get());
    }
    settle(f);
    const OwnedClock now = clone(f->clock);
    for (int s = 0; s <= static_cast<int>(scope); ++s) f->release_fence[s] = now;
    tick(f);
  }
  preempt();
}

// --- Registers -------------------------------------------------------------------------------------------------------------

void set_registers(u32 registers, bool increase) {
  Fiber* f = SIM_ENTER;
  const auto wrong = [&](u32 now) {
    fail("misuse", format("setmaxnreg.%s %u with %u registers, %s by %s", increase ? "inc" : "dec", registers, now,
                          at(f->pc).c_str(), thread_name(f).c_str()));
  };
  if (registers % 8 || registers < 24 || registers > 256) wrong(f->warp->registers);
  collective(increase ? CollectiveKind::registers_inc : CollectiveKind::registers_dec, ~0u, 0, 0);
  if (f->lane) return;
  Warp* w = f->warp;
  Cta* c = f->cta;
  if (increase ? registers < w->registers : registers > w->registers) wrong(w->registers);
  const int more = (static_cast<int>(registers) - static_cast<int>(w->registers)) * 32;
  while (c->free_registers < more) {
    c->register_waiters.push_back(f);
    block(Wait::registers, nullptr, registers);
  }
  c->free_registers -= more;
  w->registers = registers;
  wake(c->register_waiters);
  changed();
}

u8* map_cluster(u8* p, u32 cta) {
  Fiber* f = SIM_ENTER;
  auto& ctas = f->cta->cluster->ctas;
  if (cta >= ctas.size()) {
    fail("misuse", format("map_cluster: no CTA %u in a cluster of %zu, %s by %s", cta, ctas.size(), at(f->pc).c_str(),
                          thread_name(f).c_str()));
  }
  return ctas[cta]->shared + (p - f->cta->shared);
}

}  // namespace sim
