// Seeded scheduling: which thread runs, when pending copies and products happen, and when nothing can go on.
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

namespace sim {

Machine machine;
ThreadView* current;
ClockShape clock_shape;

const ThreadView& self() { return *current; }

void enqueue(Fiber* f) {
  f->state = State::runnable;
  Warp* w = f->warp;
  if (!w->runnable) {
    w->slot = static_cast<int>(machine.active.size());
    machine.active.push_back(w);
  }
  w->runnable |= 1u << f->lane;
}

static void dequeue(Fiber* f) {
  Warp* w = f->warp;
  w->runnable &= ~(1u << f->lane);
  if (w->runnable) return;
  auto& active = machine.active;
  active[w->slot] = active.back();
  active[w->slot]->slot = w->slot;
  active.pop_back();
  w->slot = -1;
}

void wake(std::vector<Fiber*>& fibers) {
  for (Fiber* f : fibers) enqueue(f);
  fibers.clear();
}

// Stops the calling thread until somebody enqueues it.
void block(Wait wait, const void* address, u64 value) {
  Fiber* f = fiber();
  f->wait = wait;
  f->wait_address = address;
  f->wait_value = value;
  f->state = State::blocked;
  dequeue(f);
  switch_to_scheduler();
  f->wait = Wait::none;
}

void yield() { switch_to_scheduler(); }
void preempt() {
  if (machine.random && !(random_bits() & 15)) switch_to_scheduler();
}

static u64 read_word(const void* p, u32 size) {
  u64 v = 0;
  std::memcpy(&v, p, size);
  return v;
}

// Before a load that may be part of a spin: a thread that comes round to the same load with the same value, having changed
// nothing in between, sleeps until one of the words that it looked at changes (or until nothing else can go on).
void poll(const void* address, u32 size) {
  constexpr size_t kMostWords = 64;
  constexpr u64 kVisits = 2;
  Fiber* f = fiber();
  const u64 value = read_word(address, size);
  u64 visits = 0;
  for (const Poll& p : f->polls) visits += p.address == address && p.pc == f->pc && p.value == value;
  if (visits < kVisits) {
    if (f->polls.size() >= kMostWords) f->polls.clear();
    f->polls.push_back({address, value, size, f->pc});
    yield();
    return;
  }
  f->wait = Wait::flag;
  f->state = State::polling;
  dequeue(f);
  machine.pollers.push_back(f);
  switch_to_scheduler();
  f->wait = Wait::none;
}

// Wakes the pollers that would see something new; with `all`, every one.
static bool scan_pollers(bool all) {
  auto& pollers = machine.pollers;
  bool any = false;
  machine.last_scan = machine.counters.steps;
  for (size_t i = 0; i < pollers.size();) {
    Fiber* f = pollers[i];
    bool news = all;
    for (const Poll& p : f->polls) news = news || read_word(p.address, p.size) != p.value;
    if (!news) {
      ++i;
      continue;
    }
    if (!all) f->polls.clear();
    enqueue(f);
    pollers[i] = pollers.back();
    pollers.pop_back();
    any = true;
  }
  return any;
}

u32 new_component(u32 rank, std::string label) {
  if (clock_shape.used >= clock_shape.most || clock_shape.used >= 0xffff) return ~0u;
  machine.component_rank.push_back(rank);
  machine.component_label.push_back(std::move(label));
  return clock_shape.used++;
}

u64 clock() {
  SIM_ENTER;
  return machine.counters.steps;
}
void sleep() {
  Fiber* f = SIM_ENTER;
  machine.turn = static_cast<u64>(f->warp->slot) + 1;
  yield();
}

// A deadline is only a mark; the run's options decide whether waits end by it.
u64 deadline_after(u64) {
  SIM_ENTER;
  return machine.counters.steps;
}
bool deadline_passed(u64) {
  SIM_ENTER;
  if (machine.passing) --machine.passing;
  else if (machine.options.expiry != Expiry::random || random_below(512)) return false;
  machine.expired = true;
  ++machine.counters.expiries;
  return true;
}

// The launches that wait for this one start: they see everything that it did, through every proxy.
static void end_of_launch(u32 launch) {
  for (const u32 next : machine.stages[launch].followers) {
    Stage& stage = machine.stages[next];
    if (machine.checked) {
      const OwnedClock all = new_clock();
      for (Fiber* f : machine.stages[launch].fibers) {
        settle(f);
        join(all.get(), f->clock);
      }
      for (const View view : {kAsyncShared, kAsyncGlobal}) join_view(all.get() + view * clock_shape.blocks, all.get());
      for (Fiber* f : stage.fibers) join(f->clock, all.get());
    }
    wake(stage.held);
  }
}

static void entry() {
  (*fiber()->cta->body)();
  Fiber* f = fiber();
  const auto leaves = [f](u64 kind, const char* what) {
    report(kind << 56 | f->cta->id, "misuse", format("thread exits with %s: %s", what, thread_name(f).c_str()));
  };
  if (!f->in_flight.empty()) leaves(1, "wgmma not waited for");
  if (!f->open_stores.empty()) leaves(2, "bulk stores that are not committed");
  for (auto& group : f->store_groups) {
    for (auto& store : group) {
      if (!store->read) leaves(3, "bulk stores that have not read shared memory yet");
    }
  }
  if (!f->open_copies.empty() || !f->copy_groups.empty()) leaves(4, "cp.async copies not waited for");
  f->state = State::done;
  dequeue(f);
  if (--f->cta->live == 0) {
    for (auto& m : f->cta->mbarriers) {
      if (m->live && m->bytes != 0) leaves(5, "copies into its shared memory still under way");
    }
  }
  if (--machine.stages[f->cta->launch].live == 0) end_of_launch(f->cta->launch);
  changed();
  switch_to_scheduler();
  std::abort();
}

static void build_cta(const Launch& launch, u32 index, u32 number) {
  auto c = std::make_unique<Cta>();
  Stage& stage = machine.stages[index];
  const Dim3 g = launch.grid;
  c->rank = launch.rank;
  c->id = static_cast<u32>(machine.ctas.size());
  c->index = {number % g.x, number / g.x % g.y, number / g.x / g.y};
  c->Cta::block = launch.block;
  c->grid = g;
  c->body = &launch.body;
  c->cluster_size = launch.cluster;
  c->cluster_rank = number % launch.cluster;
  c->dynamic_bytes = launch.dynamic_bytes;
  if (c->cluster_rank == 0) machine.clusters.push_back(std::make_unique<Cluster>());
  c->cluster = machine.clusters.back().get();
  c->cluster->ctas.push_back(c.get());
  const u32 threads = launch.block.x * launch.block.y * launch.block.z;
  c->cluster->total += threads;
  c->live = threads;
  c->launch = index;
  stage.live += threads;
  bind_shared(c.get());
  std::memset(c->shared, 0xff, kSharedBytes);
  for (auto& m : modules) std::memset(reinterpret_cast<u8*>(c->thread_base + static_cast<u64>(m.statics)), 0xff, m.statics_bytes);
  for (u32 t = 0; t < threads; ++t) {
    auto f = std::make_unique<Fiber>();
    f->thread = {t % launch.block.x, t / launch.block.x % launch.block.y, t / launch.block.x / launch.block.y};
    f->ThreadView::block = c.get();
    f->cta = c.get();
    f->id = static_cast<u32>(machine.fibers.size());
    f->lane = t % 32;
    f->warp_index = t / 32;
    if (t % kWarpgroup == 0) {
      auto group = std::make_unique<WarpGroup>();
      group->cta = c.get();
      group->index = t / kWarpgroup;
      c->groups.push_back(group.get());
      machine.groups.push_back(std::move(group));
    }
    if (t % 32 == 0) {
      auto w = std::make_unique<Warp>();
      w->cta = c.get();
      w->index = t / 32;
      w->registers = std::min(255u, (65536 / threads) & ~7u);
      c->warps.push_back(w.get());
      machine.warps.push_back(std::move(w));
    }
    f->group = c->groups.back();
    f->warp = c->warps.back();
    f->warp->lane[f->lane] = f.get();
    prepare_stack(f.get(), entry);
    c->fibers.push_back(f.get());
    stage.fibers.push_back(f.get());
    machine.fibers.push_back(std::move(f));
  }
  machine.ctas.push_back(std::move(c));
}

static void build_clocks() {
  const u32 fibers = static_cast<u32>(machine.fibers.size()), ctas = static_cast<u32>(machine.ctas.size());
  clock_shape.used = fibers;
  clock_shape.most = fibers + ctas * (kMbarriersPerCta + kQueuesPerCta + 8);
  clock_shape.blocks = (clock_shape.most + kBlockTicks - 1) / kBlockTicks;
  for (auto& f : machine.fibers) machine.component_rank.push_back(f->cta->rank);
  for (auto& c : machine.ctas) {
    const std::string where = format("rank %u cta %u", c->rank, c->id_in_grid());
    c->shared_queue = new_component(c->rank, "bulk stores of " + where);
    for (auto* g : c->groups) g->component = new_component(c->rank, format("wgmma of warpgroup %u, %s", g->index, where.c_str()));
  }
  static std::vector<const ClockBlock*> tables;
  forget_blocks();
  const size_t each = kViews * static_cast<size_t>(clock_shape.blocks);
  tables.assign(each * fibers, nullptr);
  for (auto& f : machine.fibers) f->clock = &tables[each * f->id];
}

// How this seed schedules: seed 0 is plain round robin, copies at once.
struct Style {
  u32 event_bias = 1024;  // of 1024: how often a pending event goes before a runnable warp
  std::vector<Fiber*> late;
  u64 late_until = 0;
  bool freezes = false;          // now and then one warp stands still until nothing else can go on
  const Warp* frozen = nullptr;
};

static Style choose_style(const std::vector<Launch>& launches) {
  Style style;
  for (auto& f : machine.fibers) {
    if (launches[f->cta->launch].after >= 0) machine.stages[f->cta->launch].held.push_back(f.get());
    else style.late.push_back(f.get());
  }
  if (machine.random) {
    constexpr u32 kBias[] = {4, 64, 400, 1024};
    style.event_bias = kBias[random_below(4)];
    const u64 seed = machine.options.seed;
    const u32 ranks = machine.ctas.back()->rank + 1;
    if (random_below(2)) {
      const u32 kind = random_below(4);
      const u32 chosen = static_cast<u32>(seed % machine.ctas.size());
      for (auto& w : machine.warps) {
        w->slow = kind == 0   ? !random_below(4)
                  : kind == 1 ? w->cta->id == chosen
                  : kind == 2 ? (w->index < 4) == (seed >> 3 & 1)
                              : w->cta->rank == seed % ranks;
      }
    }
    if (ranks > 1 && !random_below(4)) {
      const u32 rank = random_below(ranks);
      style.late_until = random_below(200000);
      std::vector<Fiber*> rest;
      for (Fiber* f : style.late) {
        if (f->cta->rank == rank) rest.push_back(f);
        else enqueue(f);
      }
      style.late = std::move(rest);
      return style;
    }
    // In streams of launches a warp may stand still while everything else goes on, even into the next launches.
    const bool streams = std::any_of(launches.begin(), launches.end(), [](auto& l) { return l.after >= 0; });
    style.freezes = streams && random_below(4);
  }
  wake(style.late);
  return style;
}

static void fire_event() {
  auto& events = machine.events;
  ++machine.counters.events;
  Event* e = events[machine.random ? random_below(static_cast<u32>(events.size())) : 0].get();
  current = nullptr;
  use_thread_block(scheduler_block());
  if (!e->fire()) return;
  for (auto& p : events) {
    if (p.get() != e) continue;
    std::swap(p, events.back());
    events.pop_back();
    return;
  }
}

// Nothing can run and nothing is under way. Pollers get another look (their loops may count), then deadlines pass if the
// options say so, then it is a deadlock. Returns false to end the run.
static bool quiescent() {
  constexpr u32 kRounds = 100;
  if (scan_pollers(false)) return true;
  if (machine.last_change != machine.quiescent_change) {
    machine.quiescent_change = machine.last_change;
    machine.quiescent_rounds = 0;
  }
  if (!machine.pollers.empty() && ++machine.quiescent_rounds <= kRounds) return scan_pollers(true);
  bool left = false;
  for (auto& f : machine.fibers) left = left || f->state != State::done;
  if (!left) return false;
  // One deadline passes, then all must be able to go on again, or the next one passes.
  if (machine.options.expiry != Expiry::never && !machine.passing) {
    machine.passing = 1;
    machine.quiescent_rounds = 0;
    return scan_pollers(true);
  }
  machine.findings.push_back({"deadlock", "no thread can go on"});
  report_waiting();
  return false;
}

static void run_warp(Warp* w) {
  const u32 first = machine.random ? random_below(32) : 0;
  for (u32 k = 0; k < 32 && !machine.aborting; ++k) {
    const u32 lane = (first + k) % 32;
    if (w->runnable >> lane & 1) switch_to(w->lane[lane]);
  }
}

static void loop(Style style) {
  auto& m = machine;
  alarm(m.options.watchdog_seconds);  // its handler starts it again while steps are made
  while (!m.aborting) {
    ++m.counters.steps;
    if (!style.late.empty() && (m.counters.steps > style.late_until || (m.active.empty() && m.events.empty()))) wake(style.late);
    if (!m.events.empty() && (m.active.empty() || random_below(1024) < style.event_bias)) {
      fire_event();
      continue;
    }
    if (m.active.empty()) {
      use_thread_block(scheduler_block());
      current = nullptr;
      if (quiescent()) continue;
      break;
    }
    if (!m.pollers.empty() && m.last_change >= m.last_scan && !random_below(32)) scan_pollers(false);
    if (m.counters.steps - m.last_change > m.options.step_limit) {
      use_thread_block(scheduler_block());
      m.findings.push_back({"livelock", format("threads run, but nothing has changed for %llu steps", m.options.step_limit)});
      report_waiting();
      break;
    }
    const u32 active = static_cast<u32>(m.active.size());
    Warp* w = m.active[m.random ? random_below(active) : m.turn % active];
    if (w->slow && random_below(16)) w = m.active[random_below(active)];
    if (style.freezes) {
      if (!style.frozen && !random_below(64)) style.frozen = w;
      if (w == style.frozen) {
        if (active > 1 || !m.events.empty()) continue;
        style.frozen = nullptr;
      }
    }
    run_warp(w);
  }
}

// Runs all launches at once, but for those that come after another one, until every thread has returned, or the run
// fails. Leaves findings and counters in `machine`.
void run(const std::vector<Launch>& launches, const Options& options) {
  auto buffers = std::move(machine.buffers);
  machine = Machine{};
  machine.buffers = std::move(buffers);
  machine.options = options;
  machine.checked = options.checked;
  machine.random = options.seed != 0;
  machine.random_state = options.seed * 0x9E3779B97F4A7C15ull | 1;
  for (int i = 0; i < 8; ++i) random_bits();
  std::sort(machine.buffers.begin(), machine.buffers.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  use_thread_block(scheduler_block());
  machine.stages.resize(launches.size());
  for (u32 i = 0; i < launches.size(); ++i) {
    const Launch& launch = launches[i];
    const u32 count = launch.grid.x * launch.grid.y * launch.grid.z;
    for (u32 n = 0; n < count; ++n) build_cta(launch, i, n);
    if (launch.after >= 0) machine.stages[launch.after].followers.push_back(i);
  }
  if (machine.checked) {
    build_clocks();
    reset_shadow();
  }
  machine.hooks = machine.checked;
  if (!machine.ctas.empty()) loop(choose_style(launches));
  use_thread_block(scheduler_block());
  current = nullptr;
  machine.hooks = false;
  machine.events.clear();
  alarm(0);
}

}  // namespace sim
