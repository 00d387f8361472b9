// Relaxed, acquire and release accesses, atomics, and what they publish to whom.
#include "state.h"

namespace sim {

namespace {

u64 read_word(const void* p, u32 size) {
  u64 v = 0;
  std::memcpy(&v, p, size);
  return v;
}

bool releases(Order o) { return o == Order::release || o == Order::acq_rel; }
bool acquires(Order o) { return o == Order::acquire || o == Order::acq_rel; }

void check_word(const void* p, u32 size, bool write) {
  const Fiber* f = fiber();
  if (!shared_owner(p)) {
    check_global(p, size, size, write, "flag access");
  } else if (reinterpret_cast<u64>(p) % size) {
    fail("misuse", format("flag %s is misaligned, %s", address_name(p).c_str(), at(f->pc).c_str()));
  }
}

// A store replaces what a reader of the word acquires; a read-modify-write adds to it (it continues a release sequence).
void publish(Fiber* f, const void* p, Order order, Scope scope, bool update) {
  if (!machine.checked) return;
  if (releases(order)) settle(f);
  const OwnedClock now = releases(order) ? clone(f->clock) : nullptr;
  const OwnedClock own[2] = {now ? now : f->release_fence[0], now ? now : f->release_fence[1]};
  const u32 rank = f->cta->rank;
  if (!update) {
    const bool nothing = !own[0] && !own[1];
    const auto known = machine.flags.find(p);
    if (nothing && known == machine.flags.end()) return;
    FlagSync& flag = machine.flags[p];
    flag.gpu.clear();
    if (own[0]) flag.gpu[rank] = own[0];
    flag.sys = scope == Scope::sys ? own[1] : nullptr;
  } else {
    FlagSync& flag = machine.flags[p];
    const auto add = [](OwnedClock& into, const OwnedClock& clock) {
      if (!clock) return;
      if (!into) {
        into = clock;
        return;
      }
      into = clone(into.get());
      join(into.get(), clock.get());
    };
    add(flag.gpu[rank], own[0]);
    if (scope == Scope::sys) add(flag.sys, own[1]);
  }
  tick(f);
}

void observe(Fiber* f, const void* p, Order order, Scope scope) {
  if (!machine.checked) return;
  const auto it = machine.flags.find(p);
  if (it == machine.flags.end()) return;
  const auto take = [&](const OwnedClock& clock, Scope from) {
    if (!clock) return;
    if (acquires(order)) {
      if (f->last_acquired == clock) return;  // a spin that came round
      join(f->clock, clock.get());
      f->last_acquired = clock;
      return;
    }
    OwnedClock& seen = f->acquired[static_cast<int>(from)];
    if (!seen) seen = new_clock();
    join(seen.get(), clock.get());
  };
  const auto own = it->second.gpu.find(f->cta->rank);
  if (own != it->second.gpu.end()) take(own->second, Scope::gpu);
  if (scope == Scope::sys) take(it->second.sys, Scope::sys);
}

void weaken_load(Order& order, Scope& scope) {
  if (acquires(order) && mutated('Q')) order = order == Order::acq_rel ? Order::release : Order::relaxed;
  if (scope == Scope::sys && mutated('s')) scope = Scope::gpu;
}
// Returns true when the whole store is dropped.
bool weaken_store(Order& order, Scope& scope) {
  if (mutated('D')) return true;
  if (releases(order) && mutated('R')) order = order == Order::acq_rel ? Order::acquire : Order::relaxed;
  if (scope == Scope::sys && mutated('S')) scope = Scope::gpu;
  return false;
}

template <class Operation>
u64 update(void* p, u32 size, Order order, Scope scope, Operation operation) {
  Fiber* f = fiber();
  if (weaken_store(order, scope)) return 0;
  preempt();
  check_word(p, size, true);
  const u64 old = read_word(p, size), next = operation(old);
  if (acquires(order)) observe(f, p, order, scope);
  else observe(f, p, Order::relaxed, scope);
  publish(f, p, order, scope, true);
  if (machine.checked) strong_access(f, static_cast<const u8*>(p), size, true, scope);
  std::memcpy(p, &next, size);
  f->polls.clear();
  changed();
  preempt();
  return old;
}

}  // namespace

u64 load(const void* p, u32 size, Order order, Scope scope) {
  Fiber* f = SIM_ENTER;
  weaken_load(order, scope);
  check_word(p, size, false);
  poll(p, size);
  const u64 v = read_word(p, size);
  if (machine.checked) strong_access(f, static_cast<const u8*>(p), size, false, scope);
  observe(f, p, order, scope);
  return v;
}

void load_pair(const u64* p, u64& a, u64& b, Scope scope) {
  Fiber* f = SIM_ENTER;
  Order order = Order::relaxed;
  weaken_load(order, scope);
  check_word(p, 8, false);
  check_word(p + 1, 8, false);
  require_aligned(p, 16);
  // Either word may be seen before a write that the other one is seen after.
  const bool second_first = machine.random && (random_bits() & 1);
  for (int i = 0; i < 2; ++i) {
    const bool second = second_first != (i == 1);
    const u64* q = p + second;
    poll(q, 8);
    (second ? b : a) = read_word(q, 8);
    if (machine.checked) strong_access(f, reinterpret_cast<const u8*>(q), 8, false, scope);
    observe(f, q, order, scope);
  }
}

static void store_word(Fiber* f, void* p, u64 v, u32 size, Order order, Scope scope) {
  check_word(p, size, true);
  publish(f, p, order, scope, false);
  if (machine.checked) strong_access(f, static_cast<const u8*>(p), size, true, scope);
  std::memcpy(p, &v, size);
  f->polls.clear();
  changed();
  preempt();
}

void store(void* p, u64 v, u32 size, Order order, Scope scope) {
  Fiber* f = SIM_ENTER;
  if (weaken_store(order, scope)) return;
  preempt();
  store_word(f, p, v, size, order, scope);
}

void store_pair(u64* p, u64 a, u64 b, Scope scope) {
  Fiber* f = SIM_ENTER;
  Order order = Order::relaxed;
  if (weaken_store(order, scope)) return;
  require_aligned(p, 16);
  preempt();
  const bool second_first = machine.random && (random_bits() & 1);
  store_word(f, p + second_first, second_first ? b : a, 8, order, scope);
  if (machine.random && (random_bits() & 1)) yield();
  store_word(f, p + !second_first, second_first ? a : b, 8, order, scope);
}

u64 atomic_add(void* p, u64 v, u32 size, Order order, Scope scope) {
  SIM_ENTER;
  return update(p, size, order, scope, [v](u64 old) { return old + v; });
}
u64 atomic_max(void* p, u64 v, u32 size, Order order, Scope scope) {
  SIM_ENTER;
  return update(p, size, order, scope, [v](u64 old) { return std::max(old, v); });
}
u64 atomic_or(void* p, u64 v, u32 size, Order order, Scope scope) {
  SIM_ENTER;
  return update(p, size, order, scope, [v](u64 old) { return old | v; });
}
u64 atomic_exchange(void* p, u64 v, u32 size, Order order, Scope scope) {
  SIM_ENTER;
  return update(p, size, order, scope, [v](u64) { return v; });
}
u64 atomic_cas(void* p, u64 expected, u64 desired, u32 size, Order order, Scope scope) {
  SIM_ENTER;
  return update(p, size, order, scope, [=](u64 old) { return old == expected ? desired : old; });
}

}  // namespace sim
