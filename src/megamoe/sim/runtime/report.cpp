// Findings, and how threads, addresses and call sites are called in them.
#include <cstdarg>
#include <cstring>

#include "state.h"

namespace sim {

std::vector<Module> modules;
u8* arena_begin;
u64 arena_bytes;

std::string format(const char* text, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

// Module in the high byte, offset of the return address in it below; 0 is unknown.
u32 site_of(const void* pc) {
  const u64 p = reinterpret_cast<u64>(pc);
  for (size_t i = 0; i < modules.size(); ++i) {
    if (p >= modules[i].begin && p < modules[i].end) {
      return static_cast<u32>((i + 1) << 24 | ((p - modules[i].base) & 0xffffff));
    }
  }
  return 0;
}
// "@{module:offset}": the host replaces it by file and line, with the chain of inlined callers.
std::string at(u32 site) { return site ? format("@{%u:%x}", (site >> 24) - 1, site & 0xffffff) : "an unknown place"; }
std::string at(const void* pc) { return at(site_of(pc)); }

std::string thread_name(const Fiber* f) {
  return format("rank %u cta %u thread %u (warp %u lane %u%s%s)", f->cta->rank, f->cta->id_in_grid(), f->thread.x,
                f->warp_index, f->lane, *f->role ? " " : "", f->role);
}

std::string address_name(const void* p) {
  const auto it = machine.names.find(p);
  if (it != machine.names.end()) return it->second;
  const auto* q = static_cast<const u8*>(p);
  for (auto& c : machine.ctas) {
    if (q >= c->shared - kSharedBefore && q < c->shared + kSharedBytes) {
      return format("shared[rank %u cta %u]%+ld", c->rank, c->id_in_grid(), static_cast<long>(q - c->shared));
    }
  }
  if (const Buffer* b = find_buffer(p)) return format("%s+%ld", b->label.c_str(), static_cast<long>(q - b->begin));
  const Buffer* before = nullptr;  // an overrun is more likely than an underrun
  for (auto& b : machine.buffers) {
    if (b.begin <= q) before = &b;
  }
  if (before && q < arena_begin + arena_bytes) {
    return format("%s, %ld bytes past its end", before->label.c_str(), static_cast<long>(q - before->begin - before->bytes));
  }
  return format("%p", p);
}

std::string component_name(u32 component) {
  if (component < machine.fibers.size()) return thread_name(machine.fibers[component].get());
  const size_t i = component - machine.fibers.size();
  return i < machine.component_label.size() ? machine.component_label[i] : "?";
}

void report(u64 key, const char* kind, const std::string& text) {
  constexpr size_t kMost = 20;
  if (!machine.seen.insert(key).second || machine.findings.size() >= kMost) return;
  machine.findings.push_back({kind, text});
}

void fail(const char* kind, const std::string& text) {
  machine.findings.push_back({kind, text});
  machine.aborting = true;
  for (;;) switch_to_scheduler();
}

Buffer* find_buffer(const void* p) {
  static Buffer* last;
  const auto* q = static_cast<const u8*>(p);
  auto& buffers = machine.buffers;
  if (last >= buffers.data() && last < buffers.data() + buffers.size() && q >= last->begin && q < last->begin + last->bytes) {
    return last;
  }
  // Sorted by address.
  auto it = std::upper_bound(buffers.begin(), buffers.end(), q, [](const u8* a, const Buffer& b) { return a < b.begin; });
  if (it == buffers.begin()) return nullptr;
  --it;
  if (q >= it->begin + it->bytes) return nullptr;
  last = &*it;
  return last;
}

Cta* shared_owner(const void* p) {
  const auto* q = static_cast<const u8*>(p);
  if (q >= arena_begin && q < arena_begin + arena_bytes) return nullptr;
  const auto inside = [q](const Cta* c) { return q >= c->shared - kSharedBefore && q < c->shared + kSharedBytes; };
  if (current && inside(fiber()->cta)) return fiber()->cta;
  for (auto& c : machine.ctas) {
    if (inside(c.get())) return c.get();
  }
  return nullptr;
}

void check_shared(const void* p, u64 bytes, u32 alignment, const char* what) {
  const auto* q = static_cast<const u8*>(p);
  const Cta* c = shared_owner(p);
  const bool inside = c && q >= c->shared && q + bytes <= c->shared + c->dynamic_bytes;
  if (!inside) {
    fail("bounds", format("%s: shared memory %s, %llu bytes, is outside the %u bytes of the launch, %s by %s", what,
                          address_name(p).c_str(), bytes, c ? c->dynamic_bytes : 0, at(fiber()->pc).c_str(),
                          thread_name(fiber()).c_str()));
  }
  if (static_cast<u64>(q - c->shared) % alignment) {
    fail("misuse", format("%s: shared address %s is not %u-aligned, %s by %s", what, address_name(p).c_str(), alignment,
                          at(fiber()->pc).c_str(), thread_name(fiber()).c_str()));
  }
}

void check_global(const void* p, u64 bytes, u32 alignment, bool write, const char* what) {
  const Fiber* f = fiber();
  const Buffer* b = find_buffer(p);
  const auto* q = static_cast<const u8*>(p);
  const char* wrong = nullptr;
  if (!b || q + bytes > b->begin + b->bytes) {
    wrong = "outside any buffer";
  } else if (b->rank != static_cast<int>(f->cta->rank) && !b->peers) {
    wrong = "in a buffer that is local to another rank";
  } else if (write && b->read_only) {
    wrong = "in a read-only buffer";
  }
  if (wrong) {
    fail("bounds", format("%s: global memory %s, %llu bytes, is %s, %s by %s", what, address_name(p).c_str(), bytes, wrong,
                          at(f->pc).c_str(), thread_name(f).c_str()));
  }
  if (reinterpret_cast<u64>(p) % alignment || bytes % alignment) {
    fail("misuse", format("%s: global memory %s, %llu bytes, is not %u-aligned, %s by %s", what, address_name(p).c_str(), bytes,
                          alignment, at(f->pc).c_str(), thread_name(f).c_str()));
  }
}

void require_aligned(const void* p, u32 size) {
  if (reinterpret_cast<u64>(p) % size == 0) return;
  const Fiber* f = fiber();
  fail("misuse", format("%u-byte access at misaligned address %s, %s by %s", size, address_name(p).c_str(), at(f->pc).c_str(),
                        thread_name(f).c_str()));
}
void check_aligned(const void* p, u32 size) {
  SIM_ENTER;
  require_aligned(p, size);
}

namespace {

std::string waits_for(const Fiber* f) {
  const u64 id = reinterpret_cast<u64>(f->wait_address);
  switch (f->wait) {
    case Wait::mbarrier:
      for (auto& m : f->cta->mbarriers) {
        if (m->address == f->wait_address && m->live) {
          return format("mbarrier %s parity %llu, phase %llu, pending %u of %u, bytes %d", m->label.c_str(), f->wait_value,
                        m->phase, m->pending, m->expected, m->bytes);
        }
      }
      return "an mbarrier";
    case Wait::named_barrier: {
      const NamedBarrier& b = f->cta->named[id];
      return format("named barrier %llu, %u of %u arrived", id, b.count, b.expected);
    }
    case Wait::collective: {
      u32 arrived = 0;
      for (auto& c : f->warp->collectives) {
        if (c.mask == static_cast<u32>(id)) arrived = c.arrived;
      }
      return format("warp collective, lanes %08x, arrived %08x", static_cast<u32>(id), arrived);
    }
    case Wait::wgmma: {
      const WarpGroup* g = f->group;
      const u64 head = g->done - g->base;
      return format("wgmma up to product %llu, done %llu, threads arrived at the next one %u of 128", f->wait_value, g->done,
                    head < g->products.size() ? g->products[head].arrived : 0);
    }
    case Wait::bulk: return "its bulk stores";
    case Wait::cp_async: return "its cp.async copies";
    case Wait::cluster: return format("cluster barrier, %u of %u arrived", f->cta->cluster->arrived, f->cta->cluster->total);
    case Wait::registers: return format("registers: %llu wanted, %d free", f->wait_value, f->cta->free_registers);
    case Wait::flag: break;
    case Wait::none: return "nothing";
  }
  std::string text = "flag";
  for (size_t i = 0; i < f->polls.size() && i < 4; ++i) {
    text += format("%s %s == %llu", i ? "," : "", address_name(f->polls[i].address).c_str(), f->polls[i].value);
  }
  return text;
}

}  // namespace

// One line for each group of threads that wait for the same thing at the same place.
void report_waiting() {
  constexpr size_t kMost = 60;
  std::map<std::string, u32> groups;
  for (auto& p : machine.fibers) {
    const Fiber* f = p.get();
    if (f->state == State::done) continue;
    std::string line = format("rank %u cta %u warp %u%s%s: ", f->cta->rank, f->cta->id_in_grid(), f->warp_index,
                              *f->role ? " " : "", f->role);
    line += f->state == State::runnable ? "runnable" : "waits for " + waits_for(f);
    ++groups[line + " at " + at(f->pc)];
  }
  for (auto& [line, lanes] : groups) {
    if (machine.waiting.size() == kMost) {
      machine.waiting.push_back(format("... and %zu more groups", groups.size() - kMost));
      break;
    }
    machine.waiting.push_back(line + format(", %u lane%s", lanes, lanes == 1 ? "" : "s"));
  }
}

void name(const void* address, const char* text, int index) {
  const Fiber* f = fiber();
  std::string label = index >= 0 ? format("%s[%d]", text, index) : text;
  if (shared_owner(address)) label += format(" (rank %u cta %u)", f->cta->rank, f->cta->id_in_grid());
  machine.names[address] = label;
}
void role(const char* text) { fiber()->role = text; }

void trap(const char* why) {
  Fiber* f = SIM_ENTER;
  fail("trap", format("%s, %s by %s", why, at(f->pc).c_str(), thread_name(f).c_str()));
}

}  // namespace sim
