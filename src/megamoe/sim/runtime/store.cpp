// Copies out of shared memory: TMA stores and bulk stores, in groups. Source read and destination written at different times.
#include "state.h"
#include "tensor_map.h"

namespace sim {

TensorMap read_map(const CUtensorMap* map, int rank, const char* what);
void check_box(const TensorMap& m, int x, int y, int z, bool write, const char* what, const AsyncIssue* how);

namespace {

struct StoreEvent : Event {
  Fiber* f;
  std::shared_ptr<BulkStore> store;
  TensorMap map;
  int x = 0, y = 0, z = 0;
  const u8* source = nullptr;
  u8* destination = nullptr;  // linear; null for a box
  u32 bytes = 0;
  std::vector<u8> data;

  void write_box() const {
    const BoxColumns columns = box_columns(map, x);
    const u64 offset = static_cast<u64>(source - f->cta->shared);
    for (u32 r = 0; r < map.rows(); ++r) {
      const BoxRow row = box_row(map, y, z, r);
      if (!row.inside) continue;
      for (u32 c = columns.first; c < columns.last; ++c) {
        u64 from = offset + static_cast<u64>(r) * map.row_bytes() + c * map.element_bytes;
        if (map.swizzle) from = swizzled(from);
        std::memcpy(row.address + (static_cast<long long>(x) + c) * map.element_bytes, data.data() + (from - offset), map.element_bytes);
      }
    }
  }

  bool fire() override {
    changed();
    const bool first = !store->read;
    if (first) {
      data.assign(source, source + bytes);
      store->read = true;
    } else {
      if (destination) std::memcpy(destination, data.data(), bytes);
      else write_box();
      store->written = true;
    }
    if (f->state == State::blocked && f->wait == Wait::bulk) enqueue(f);
    return !first;
  }
};

// Clock component of this thread's bulk stores: its own while there are some left, else one shared by the CTA.
u32 queue_of(Fiber* f) {
  if (f->queue_component < 0) {
    u32 q = ~0u;
    if (f->cta->queues < kQueuesPerCta) q = new_component(f->cta->rank, "bulk stores of " + thread_name(f));
    if (q == ~0u) q = f->cta->shared_queue;
    else ++f->cta->queues;
    f->queue_component = static_cast<int>(q);
  }
  return static_cast<u32>(f->queue_component);
}

// Ticks of store n of a queue: 2n once its source is read, 2n + 1 once it is written.
u32 next_number(Fiber* f) {
  const bool own = queue_of(f) != f->cta->shared_queue;
  u32& counter = own ? f->stores_issued : f->cta->fibers[0]->stores_issued;
  return ++counter;
}

AsyncIssue how_of(Fiber* f, u32 tick, const char* what) {
  settle(f);
  return {f->clock, queue_of(f), tick, what, thread_name(f), site_of(f->pc)};
}

void issue(std::unique_ptr<StoreEvent> e, u32 number) {
  Fiber* f = fiber();
  e->f = f;
  e->store = std::make_shared<BulkStore>();
  e->store->number = number;
  if (machine.checked) async_access(how_of(f, number * 2, "async read (store)"), e->source, e->bytes, false);
  f->open_stores.push_back(e->store);
  f->polls.clear();
  changed();
  machine.events.push_back(std::move(e));
  preempt();
}

}  // namespace

void tma_store(const CUtensorMap* map, const u8* src, int rank, int x, int y, int z) {
  Fiber* f = SIM_ENTER;
  preempt();
  auto e = std::make_unique<StoreEvent>();
  e->map = read_map(map, rank, "TMA store");
  e->bytes = static_cast<u32>(e->map.bytes());
  check_shared(src, e->bytes, e->map.swizzle ? 1024 : 128, "TMA store");
  e->source = src;
  e->x = x;
  e->y = y;
  e->z = z;
  const u32 number = machine.checked ? next_number(f) : 0;
  const AsyncIssue how = machine.checked ? how_of(f, number * 2 + 1, "async write (store)") : AsyncIssue{};
  check_box(e->map, x, y, z, true, "TMA store", machine.checked ? &how : nullptr);
  issue(std::move(e), number);
}

void bulk_store(void* dst, const u8* src, u32 bytes) {
  Fiber* f = SIM_ENTER;
  preempt();
  check_shared(src, bytes, 16, "bulk store");
  check_global(dst, bytes, 16, true, "bulk store");
  auto e = std::make_unique<StoreEvent>();
  e->source = src;
  e->destination = static_cast<u8*>(dst);
  e->bytes = bytes;
  const u32 number = machine.checked ? next_number(f) : 0;
  if (machine.checked) async_access(how_of(f, number * 2 + 1, "async write (store)"), e->destination, bytes, true);
  issue(std::move(e), number);
}

void bulk_commit() {
  Fiber* f = SIM_ENTER;
  f->store_groups.push_back(std::move(f->open_stores));
  f->open_stores.clear();
}

void bulk_wait(u32 pending, bool read_only) {
  Fiber* f = SIM_ENTER;
  if (mutated('K')) return;
  if (!read_only && mutated('k')) read_only = true;
  preempt();
  const size_t count = f->store_groups.size() > pending ? f->store_groups.size() - pending : 0;
  const auto finished = [&] {
    for (size_t i = 0; i < count; ++i) {
      for (auto& s : f->store_groups[i]) {
        if (!(read_only ? s->read : s->written)) return false;
      }
    }
    return true;
  };
  while (!finished()) block(Wait::bulk, nullptr, pending);
  f->polls.clear();
  for (size_t i = 0; i < count && machine.checked; ++i) {
    for (auto& s : f->store_groups[i]) raise(f->clock, queue_of(f), s->number * 2 + (read_only ? 0 : 1));
  }
  // Groups that are done need no more looking at; their writes count from the next full wait on.
  for (size_t i = 0; i < count; ++i) {
    const auto& group = f->store_groups.front();
    if (read_only && !std::all_of(group.begin(), group.end(), [](auto& s) { return s->written; })) break;
    for (auto& s : group) f->stores_finished = s->number;
    f->store_groups.pop_front();
  }
  if (machine.checked && !read_only && f->stores_finished) raise(f->clock, queue_of(f), f->stores_finished * 2 + 1);
}

}  // namespace sim
