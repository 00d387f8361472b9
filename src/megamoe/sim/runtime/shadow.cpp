// The race checker: for every four bytes, who wrote them last and one who read them since, with the clock of each.
#include <sys/mman.h>

#include "state.h"

namespace sim {
namespace {

Cell* arena_cells;
u64 arena_cell_bytes;
std::vector<Cell*> shared_cells;  // by CTA
constexpr u64 kSharedCells = (kSharedBefore + kSharedBytes) / 4;

Cell* map_cells(u64 bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) std::abort();
  return static_cast<Cell*>(p);
}

// Null for memory that has no shadow (other stacks, constants); *shared tells which view of a clock counts.
Cell* find_cell(const u8* p, bool* shared) {
  if (p >= arena_begin && p < arena_begin + arena_bytes) {
    *shared = false;
    return arena_cells + (static_cast<u64>(p - arena_begin) >> 2);
  }
  *shared = true;
  Cta* c = shared_owner(p);
  return c ? c->cells + (static_cast<u64>(p - (c->shared - kSharedBefore)) >> 2) : nullptr;
}

bool strong(Access a) { return a == Access::strong_gpu || a == Access::strong_sys; }

const char* describe(Access kind, bool write) {
  switch (kind) {
    case Access::async: return write ? "async write" : "async read";
    case Access::strong_gpu: return write ? "relaxed write (gpu)" : "relaxed read (gpu)";
    case Access::strong_sys: return write ? "relaxed write (sys)" : "relaxed read (sys)";
    default: return write ? "write" : "read";
  }
}

struct Conflict {
  const char* what;     // of the new access
  const Fiber* thread;  // null: `issue` says who
  const AsyncIssue* issue;
  u32 site;
  const u8* address;

  std::string who() const { return thread ? thread_name(thread) : issue->who; }
};

constexpr const char* kInUse = "OVERWRITTEN while in use by a copy or product";

const char* plain_reason(Access old) {
  return old == Access::async ? "RACE with a copy" : strong(old) ? "RACE of a plain and a relaxed access" : "RACE";
}

// What drains after an expired deadline works on stale data by design, and its results are discarded.
void race(const Conflict& now, const Cell& c, bool old_write, const char* reason) {
  if (machine.expired) return;
  const u32 site = old_write ? c.write_pc : c.read_pc, other = old_write ? c.write_component : c.read_component;
  const char* old = describe(old_write ? c.write : c.read, old_write);
  const u64 key = (static_cast<u64>(now.site) << 32 | site) * 31 + static_cast<u64>(now.what[0]) * 7 + old_write;
  if (machine.seen.count(key)) return;
  report(key, "race", format("%s at %s: %s at %s by %s is not ordered after the %s at %s by %s", reason,
                             address_name(now.address).c_str(), now.what, at(now.site).c_str(), now.who().c_str(), old,
                             at(site).c_str(), component_name(other).c_str()));
}

template <class Visit>
void each_cell(const u8* p, u64 n, Visit visit) {
  const u64 begin = reinterpret_cast<u64>(p), end = begin + n;
  bool shared;
  Cell* c = find_cell(reinterpret_cast<const u8*>(begin & ~3ull), &shared);
  if (!c) return;
  // The range lies in one buffer or in one CTA's shared memory: the callers have checked its bounds.
  for (u64 a = begin & ~3ull; a < end; a += 4, ++c) {
    u8 mask = 15;
    if (a < begin) mask &= 15 << (begin - a);
    if (a + 4 > end) mask &= 15 >> (a + 4 - end);
    visit(*c, mask, shared, reinterpret_cast<const u8*>(a));
  }
}

void note_read(Cell& c, const Fiber* f, u8 mask, Access kind, u32 site) {
  const u32 tick = f->tick;
  if (c.read == kind && c.read_component == f->id && c.read_tick == tick) {
    c.read_mask |= mask;
    return;
  }
  // One reader is remembered; between two that are not ordered, chance decides.
  const bool covered = c.read == Access::none || seen_by(f, c.read_component) >= c.read_tick;
  if (!covered && !(random_bits() & 1)) return;
  c.read = kind;
  c.read_component = static_cast<u16>(f->id);
  c.read_tick = tick;
  c.read_pc = site;
  c.read_mask = mask;
}

void note_write(Cell& c, const Fiber* f, u8 mask, Access kind, u32 site) {
  const u32 tick = f->tick;
  // One write is remembered; a relaxed one must not always hide an ordinary one, which more accesses would race with.
  if (strong(kind) && c.write != Access::none && !strong(c.write) && (random_bits() & 1)) return;
  if (c.write == kind && c.write_component == f->id && c.write_tick == tick) {
    c.write_mask |= mask;
    c.write_pc = site;
    return;
  }
  c.write = kind;
  c.write_component = static_cast<u16>(f->id);
  c.write_tick = tick;
  c.write_pc = site;
  c.write_mask = mask;
}

}  // namespace

// An ordinary load or store of a thread.
void plain_access(Fiber* f, const u8* p, u64 n, bool write, u32 site) {
  each_cell(p, n, [&](Cell& c, u8 mask, bool, const u8* address) {
    const auto conflict = [&] { return Conflict{write ? "write" : "read", f, nullptr, site, address}; };
    if (c.write != Access::none && (c.write_mask & mask) && seen_by(f, c.write_component) < c.write_tick) {
      race(conflict(), c, true, plain_reason(c.write));
    }
    if (!write) {
      note_read(c, f, mask, Access::plain, site);
      return;
    }
    if (c.read != Access::none && (c.read_mask & mask) && seen_by(f, c.read_component) < c.read_tick) {
      race(conflict(), c, false, c.read == Access::async ? kInUse : plain_reason(c.read));
    }
    note_write(c, f, mask, Access::plain, site);
  });
}

// A relaxed, acquire or release access. Two of these never race when their scopes include each other.
void strong_access(Fiber* f, const u8* p, u32 n, bool write, Scope scope) {
  const u32 site = site_of(f->pc);
  const Access kind = scope == Scope::sys ? Access::strong_sys : Access::strong_gpu;
  each_cell(p, n, [&](Cell& c, u8 mask, bool, const u8* address) {
    const auto conflict = [&] { return Conflict{describe(kind, write), f, nullptr, site, address}; };
    const auto clashes = [&](Access other, u32 other_component) {
      if (!strong(other)) return true;
      return machine.component_rank[other_component] != f->cta->rank && (kind != Access::strong_sys || other != Access::strong_sys);
    };
    const auto reason = [&](Access other) { return strong(other) ? "SCOPE too narrow" : "RACE of a plain and a relaxed access"; };
    if (c.write != Access::none && (c.write_mask & mask) && seen_by(f, c.write_component) < c.write_tick &&
        clashes(c.write, c.write_component)) {
      race(conflict(), c, true, reason(c.write));
    }
    if (!write) {
      note_read(c, f, mask, kind, site);
      return;
    }
    if (c.read != Access::none && (c.read_mask & mask) && seen_by(f, c.read_component) < c.read_tick &&
        clashes(c.read, c.read_component)) {
      race(conflict(), c, false, reason(c.read));
    }
    note_write(c, f, mask, kind, site);
  });
}

// An access by the async proxy (copies, WGMMA), ordered by the clock of whoever issued it.
void async_access(const AsyncIssue& issue, const u8* p, u64 n, bool write) {
  const ClockBlock* const* seen = view_of(issue.clock, kSeen);
  each_cell(p, n, [&](Cell& c, u8, bool shared, const u8* address) {
    const ClockBlock* const* proxy = view_of(issue.clock, shared ? kAsyncShared : kAsyncGlobal);
    const auto conflict = [&] { return Conflict{issue.what, nullptr, &issue, issue.site, address}; };
    if (c.write == Access::async) {
      const bool same = c.write_component == issue.component && c.write_tick == issue.tick;
      if (tick_in(seen, c.write_component) < c.write_tick && !(write && same)) race(conflict(), c, true, "RACE of copies");
    } else if (c.write != Access::none && tick_in(proxy, c.write_component) < c.write_tick) {
      race(conflict(), c, true, tick_in(seen, c.write_component) < c.write_tick ? "RACE" : "MISSING PROXY FENCE");
    }
    if (!write) {
      c.read = Access::async;
      c.read_component = static_cast<u16>(issue.component);
      c.read_tick = issue.tick;
      c.read_pc = issue.site;
      c.read_mask = 15;
      return;
    }
    if (c.read != Access::none && tick_in(seen, c.read_component) < c.read_tick) {
      race(conflict(), c, false, c.read == Access::async ? kInUse : "OVERWRITTEN before a read");
    }
    c.write = Access::async;
    c.write_component = static_cast<u16>(issue.component);
    c.write_tick = issue.tick;
    c.write_pc = issue.site;
    c.write_mask = 15;
  });
}

void reset_shadow() {
  const u64 wanted = (arena_bytes / 4 + 1) * sizeof(Cell);
  if (arena_cell_bytes != wanted) {
    if (arena_cells) munmap(arena_cells, arena_cell_bytes);
    arena_cells = map_cells(arena_cell_bytes = wanted);
  } else {
    madvise(arena_cells, arena_cell_bytes, MADV_DONTNEED);
  }
  for (auto& c : machine.ctas) {
    if (shared_cells.size() <= c->id) shared_cells.push_back(map_cells(kSharedCells * sizeof(Cell)));
    c->cells = shared_cells[c->id];
    madvise(c->cells, kSharedCells * sizeof(Cell), MADV_DONTNEED);
  }
}

// --- Hooks that the compiler inserts before loads and stores (-fsanitize=thread; the runtime of that option is not used) ---

static bool in_module(const u8* p) {
  const u64 a = reinterpret_cast<u64>(p);
  for (auto& m : modules) {
    if (a >= m.begin && a < m.end) return true;
  }
  return false;
}

static void wrong_access(const char* kind, const char* what, const void* p, u32 n, bool write, const void* pc) {
  report(reinterpret_cast<u64>(pc), kind, format("%s: %u-byte %s of %s at %s by %s", what, n, write ? "write" : "read",
                                                 address_name(p).c_str(), at(pc).c_str(), thread_name(fiber()).c_str()));
}

static void hook(const void* address, u32 n, bool write, const void* pc) {
  if (!machine.hooks || !current) return;
  Fiber* f = fiber();
  const auto* p = static_cast<const u8*>(address);
  if (p >= f->stack && p < f->stack + kStackBytes) return;
  if (p >= arena_begin && p < arena_begin + arena_bytes) {
    const Buffer* b = find_buffer(p);
    if (!b || p + n > b->begin + b->bytes) {
      wrong_access("bounds", "OUT OF BOUNDS", p, n, write, pc);
      return;
    }
    if (b->rank != static_cast<int>(f->cta->rank) && !b->peers) {
      wrong_access("bounds", "LOCAL MEMORY OF ANOTHER RANK", p, n, write, pc);
      return;
    }
    if (write && b->read_only) {
      wrong_access("bounds", "READ-ONLY MEMORY", p, n, write, pc);
      return;
    }
    plain_access(f, p, n, write, site_of(pc));
    return;
  }
  const auto* head = reinterpret_cast<const u8*>(static_cast<const ThreadView*>(f));
  const auto* block = reinterpret_cast<const u8*>(static_cast<const BlockView*>(f->cta));
  if (static_cast<u64>(p - head) < sizeof(ThreadView) || static_cast<u64>(p - block) < sizeof(BlockView)) return;
  if (Cta* c = shared_owner(p)) {
    if (p >= c->shared + c->dynamic_bytes && p < c->shared + kSharedBytes) {
      wrong_access("bounds", "OUT OF BOUNDS", p, n, write, pc);
    } else if (c != f->cta) {
      wrong_access("misuse", "SHARED MEMORY OF ANOTHER CTA through a plain pointer", p, n, write, pc);
    } else {
      plain_access(f, p, n, write, site_of(pc));
    }
    return;
  }
  if (in_module(p)) {
    if (write) wrong_access("misuse", "MUTABLE GLOBAL (one copy for all ranks)", p, n, write, pc);
    return;
  }
  wrong_access("bounds", "OUT OF BOUNDS", p, n, write, pc);
}

// ld.global.nc: nobody may write the data during the launch.
void read_only(const void* p, u32 size) {
  Fiber* f = SIM_ENTER;
  check_global(p, size, size, false, "ld.global.nc");
  if (!machine.checked) return;
  plain_access(f, static_cast<const u8*>(p), size, false, site_of(f->pc));
  each_cell(static_cast<const u8*>(p), size, [&](Cell& c, u8, bool, const u8* address) {
    if (c.write == Access::none) return;
    race({"ld.global.nc", f, nullptr, site_of(f->pc), address}, c, true, "WRITTEN IN THIS LAUNCH, read as read-only");
  });
}

}  // namespace sim

#define SIM_HOOKS(n)                                                                                              \
  void __tsan_read##n(void* p) { sim::hook(p, n, false, __builtin_return_address(0)); }                          \
  void __tsan_write##n(void* p) { sim::hook(p, n, true, __builtin_return_address(0)); }                          \
  void __tsan_unaligned_read##n(void* p) { sim::hook(p, n, false, __builtin_return_address(0)); }                \
  void __tsan_unaligned_write##n(void* p) { sim::hook(p, n, true, __builtin_return_address(0)); }
extern "C" {
SIM_HOOKS(1)
SIM_HOOKS(2)
SIM_HOOKS(4)
SIM_HOOKS(8)
SIM_HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, unsigned long n) { sim::hook(p, static_cast<sim::u32>(n), false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { sim::hook(p, static_cast<sim::u32>(n), true, __builtin_return_address(0)); }
}
