// Copies into shared memory: TMA boxes, bulk copies, multicast, cp.async. They land late, in pieces, in any order.
#include "state.h"
#include "tensor_map.h"

namespace sim {

// Position of a byte under the 128-byte swizzle: bits 4..6 of the shared address are xored with bits 7..9.
u64 swizzled(u64 offset) { return offset ^ ((offset >> 3) & 0x70); }

TensorMap read_map(const CUtensorMap* map, int rank, const char* what) {
  const Fiber* f = fiber();
  TensorMap m;
  std::memcpy(&m, map, sizeof m);
  if (m.magic != kTensorMapMagic) fail("misuse", format("%s: not a tensor map, %s", what, at(f->pc).c_str()));
  if (m.rank != static_cast<u32>(rank)) {
    fail("misuse", format("%s: tensor map of rank %u, coordinates of rank %d, %s", what, m.rank, rank, at(f->pc).c_str()));
  }
  return m;
}

namespace {

struct Target {
  Cta* cta;
  Mbarrier* mbarrier;
};

struct LoadEvent : Event {
  bool linear = false;
  TensorMap map;
  const u8* source = nullptr;
  u32 bytes = 0;  // linear
  int x = 0, y = 0, z = 0;
  u64 offset = 0;  // in each target's shared memory
  u32 row = 0;
  const Fiber* issuer = nullptr;
  u32 site = 0;
  std::vector<Target> targets;

  std::string who() const { return thread_name(issuer) + ", " + at(site); }

  void write(u64 at_offset, const u8* data, u32 n) const {
    for (const Target& t : targets) std::memcpy(t.cta->shared + at_offset, data, n);
  }

  void write_row(u32 r) const {
    constexpr u32 kMostRowBytes = 4096;
    u8 line[kMostRowBytes] = {};
    const u32 row_bytes = map.row_bytes();
    const BoxRow from = box_row(map, y, z, r);
    const BoxColumns columns = box_columns(map, x);
    if (from.inside && columns.first < columns.last) {
      const long long begin = static_cast<long long>(x) + columns.first;
      std::memcpy(line + columns.first * map.element_bytes, from.address + begin * map.element_bytes,
                  (columns.last - columns.first) * map.element_bytes);
    }
    const u64 start = offset + static_cast<u64>(r) * row_bytes;
    if (!map.swizzle) {
      write(start, line, row_bytes);
      return;
    }
    for (u32 chunk = 0; chunk < row_bytes; chunk += 16) write(swizzled(start + chunk), line + chunk, 16);
  }

  bool fire() override {
    changed();
    for (const Target& t : targets) {
      if (!t.cta->live) {
        machine.findings.push_back({"misuse", "a copy lands in shared memory of a CTA that has exited: " + who()});
        machine.aborting = true;
        return true;
      }
    }
    u32 landed = bytes;
    bool finished = true;
    if (linear) {
      write(offset, source, bytes);
    } else {
      const u32 rows = map.rows(), end = machine.random ? std::min(rows, row + 1 + random_below(rows)) : rows;
      landed = (end - row) * map.row_bytes();
      for (; row < end; ++row) write_row(row);
      finished = row == rows;
    }
    for (const Target& t : targets) complete_bytes(t.mbarrier, landed);
    return finished;
  }
};

void issue(std::unique_ptr<LoadEvent> e, u8* dst, u8* bar, u32 mask, u64 total) {
  Fiber* f = fiber();
  Cta* own = f->cta;
  e->offset = static_cast<u64>(dst - own->shared);
  e->issuer = f;
  e->site = site_of(f->pc);
  for (u32 r = 0; r < own->cluster->ctas.size(); ++r) {
    if (mask ? !(mask >> r & 1) : r != own->cluster_rank) continue;
    Cta* t = own->cluster->ctas[r];
    if (!t->live) fail("misuse", format("multicast into a CTA that has exited, %s", e->who().c_str()));
    Mbarrier* m = find_mbarrier(t->shared + (bar - own->shared));
    check_initialised(m, true);
    if (machine.checked) {
      settle(f);
      const AsyncIssue how{f->clock, m->component, static_cast<u32>(m->phase + 1), "async write (load)", thread_name(f), site_of(f->pc)};
      async_access(how, t->shared + e->offset, total, true);
    }
    e->targets.push_back({t, m});
  }
  if (mask && e->targets.size() != static_cast<size_t>(__builtin_popcount(mask))) {
    fail("misuse", format("multicast mask %x names CTAs that are not in the cluster, %s", mask, e->who().c_str()));
  }
  f->polls.clear();
  changed();
  machine.events.push_back(std::move(e));
  preempt();
}

}  // namespace

void check_box(const TensorMap& m, int x, int y, int z, bool write, const char* what, const AsyncIssue* how) {
  // Both end in an illegal instruction on an H200, though no manual says so.
  if (static_cast<long long>(x) * m.element_bytes % 16 != 0) {
    fail("misuse", format("%s at column %d of %u-byte elements: not a multiple of 16 bytes, %s", what, x, m.element_bytes,
                          at(fiber()->pc).c_str()));
  }
  if (write && (x < 0 || y < 0 || z < 0)) {
    fail("misuse", format("%s at (%d, %d, %d): negative coordinates are for loads, %s", what, x, y, z,
                          at(fiber()->pc).c_str()));
  }
  const BoxColumns columns = box_columns(m, x);
  if (columns.first >= columns.last) return;
  const u32 n = (columns.last - columns.first) * m.element_bytes;
  for (u32 r = 0; r < m.rows(); ++r) {
    const BoxRow row = box_row(m, y, z, r);
    if (!row.inside) continue;
    const u8* p = row.address + (static_cast<long long>(x) + columns.first) * m.element_bytes;
    check_global(p, n, 1, write, what);
    if (how) async_access(*how, p, n, write);
  }
}

void tma_load(u8* dst, const CUtensorMap* map, u8* bar, int rank, int x, int y, int z, u32 mask) {
  Fiber* f = SIM_ENTER;
  preempt();
  auto e = std::make_unique<LoadEvent>();
  e->map = read_map(map, rank, "TMA load");
  const TensorMap& m = e->map;
  check_shared(dst, m.bytes(), m.swizzle ? 1024 : 128, "TMA load");
  e->x = x;
  e->y = y;
  e->z = z;
  if (machine.checked) settle(f);
  const AsyncIssue how{f->clock, f->cta->shared_queue, 0, "async read (load)", machine.checked ? thread_name(f) : "", site_of(f->pc)};
  check_box(m, x, y, z, false, "TMA load", machine.checked ? &how : nullptr);
  issue(std::move(e), dst, bar, mask, m.bytes());
}

void bulk_load(u8* dst, const void* src, u32 bytes, u8* bar, u32 mask) {
  Fiber* f = SIM_ENTER;
  preempt();
  check_shared(dst, bytes, 16, "bulk load");
  check_global(src, bytes, 16, false, "bulk load");
  auto e = std::make_unique<LoadEvent>();
  e->linear = true;
  e->source = static_cast<const u8*>(src);
  e->bytes = bytes;
  if (machine.checked) {
    settle(f);
    async_access({f->clock, f->cta->shared_queue, 0, "async read (load)", thread_name(f), site_of(f->pc)}, e->source, bytes, false);
  }
  issue(std::move(e), dst, bar, mask, bytes);
}

void prefetch_tensormap(const CUtensorMap* map) {
  SIM_ENTER;
  TensorMap m;
  std::memcpy(&m, map, sizeof m);
  read_map(map, static_cast<int>(m.rank), "prefetch_tensormap");
}

// --- cp.async: a copy by the thread itself, visible to it after its wait, to others after a barrier ------------------------

namespace {

struct CpAsyncEvent : Event {
  std::shared_ptr<CpAsync> copy;
  Fiber* f;
  bool fire() override {
    changed();
    std::memcpy(copy->dst, copy->src, 16);
    copy->landed = true;
    if (f->state == State::blocked && f->wait == Wait::cp_async) enqueue(f);
    return true;
  }
};

}  // namespace

void cp_async_16(u8* dst, const void* src) {
  Fiber* f = SIM_ENTER;
  preempt();
  check_shared(dst, 16, 16, "cp.async");
  check_global(src, 16, 16, false, "cp.async");
  auto copy = std::make_shared<CpAsync>(CpAsync{dst, static_cast<const u8*>(src), site_of(f->pc)});
  if (machine.checked) {
    plain_access(f, copy->src, 16, false, copy->pc);
    plain_access(f, dst, 16, true, copy->pc);
  }
  auto e = std::make_unique<CpAsyncEvent>();
  e->copy = copy;
  e->f = f;
  f->open_copies.push_back(std::move(copy));
  f->polls.clear();
  changed();
  machine.events.push_back(std::move(e));
}

void cp_async_commit() {
  Fiber* f = SIM_ENTER;
  f->copy_groups.push_back(std::move(f->open_copies));
  f->open_copies.clear();
}

void cp_async_wait(u32 pending) {
  Fiber* f = SIM_ENTER;
  if (mutated('a')) {
    f->copy_groups.clear();
    return;
  }
  preempt();
  while (f->copy_groups.size() > pending) {
    auto& group = f->copy_groups.front();
    const auto landed = [&group] {
      for (auto& copy : group) {
        if (!copy->landed) return false;
      }
      return true;
    };
    while (!landed()) block(Wait::cp_async, nullptr, pending);
    // The write counts from here on: a barrier before this wait does not publish it.
    if (machine.checked) {
      for (auto& copy : group) plain_access(f, copy->dst, 16, true, copy->pc);
    }
    f->copy_groups.pop_front();
  }
  f->polls.clear();
}

}  // namespace sim
