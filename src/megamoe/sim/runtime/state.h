// The simulated machine: threads, warps, CTAs, clusters, pending asynchronous work, and the run in progress.
#pragma once

#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "clock.h"
#include "sim.h"

namespace sim {

constexpr size_t kSharedBytes = 232448;         // 227 KiB, the most a CTA can have on sm_90 and sm_100
constexpr size_t kSharedBefore = 64 << 10;      // static __shared__ variables lie below smem in the thread-local block
constexpr size_t kStackBytes = 64 << 10;        // of a fiber, its guard page included
constexpr u32 kPoison = 0x7fc0dead;             // a NaN: accumulators in flight
constexpr u32 kMbarriersPerCta = 128;
constexpr u32 kQueuesPerCta = 64;               // threads of a CTA whose bulk stores are told apart
constexpr u32 kWarpgroup = 128;

struct Cta;
struct Cluster;
struct Fiber;
struct Warp;
struct WarpGroup;

// Clock of what a release published, null while nothing was.
struct Sync {
  OwnedClock clock;
};

struct Mbarrier {
  u8* address;
  Cta* cta;
  u32 expected, pending;
  int bytes = 0;  // outstanding transaction bytes
  u64 phase = 0;
  std::vector<Fiber*> waiters;
  std::string label;
  u32 component;
  Sync arrived, published;
  u32 init_fiber = 0, init_tick = 0;
  bool live = true;
  std::map<std::string, std::vector<u32>> arrivals;  // of this phase, when recorded: warps by role
};

struct NamedBarrier {
  u32 count = 0, expected = 0;
  std::vector<Fiber*> waiters;
  Sync sync;
};

enum class CollectiveKind : u8 {
  sync,
  ballot,
  shuffle,
  elect,
  match,
  add,
  max,
  registers_dec,
  registers_inc,
  stmatrix,
  ldmatrix,
};

struct Collective {
  CollectiveKind kind;
  u32 mask = 0, arrived = 0;
  u64 value[32];
  u64 operand[32];
  Fiber* fiber[32];
  const void* pc;
};

struct Warp {
  Cta* cta;
  u32 index;
  Fiber* lane[32] = {};
  u32 runnable = 0;
  int slot = -1;  // position in Machine::active
  bool slow = false;
  std::vector<Collective> collectives;
  u32 registers = 0;
};

// An accumulator tile in flight: the products of one chain of wgmma on the same registers.
struct Tile {
  u32 columns;
  std::vector<float> values;     // [64][columns]
  std::vector<float> fragments;  // [thread][register], once the chain is complete
};
struct Product {
  const u8* a = nullptr;  // null: A from registers
  const u8* b = nullptr;
  std::vector<u8> registers;  // A of all threads, [64][32]
  u32 columns = 0;
  bool accumulate = false, fresh = false;
  u32 arrived = 0;
  const void* pc = nullptr;
  std::shared_ptr<Tile> tile;
  OwnedClock clock;
};
struct WarpGroup {
  Cta* cta;
  u32 index;
  std::deque<Product> products;
  u64 base = 0, done = 0;
  bool queued = false;
  std::vector<Fiber*> waiters;
  u32 component;
};
// A thread's registers that belong to a Tile until wgmma_wait.
struct InFlight {
  float* acc;
  std::shared_ptr<Tile> tile;
  u64 last;
};

struct BulkStore {
  bool read = false, written = false;
  u32 number;
};
struct CpAsync {
  u8* dst;
  const u8* src;
  u32 pc;
  bool landed = false;
};

enum class State : u8 { runnable, blocked, polling, done };
enum class Wait : u8 { none, mbarrier, named_barrier, collective, wgmma, bulk, cp_async, cluster, registers, flag };

struct Poll {
  const void* address;
  u64 value;
  u32 size;
  const void* pc;
};

struct Fiber : ThreadView {
  void* stack_pointer = nullptr;
  u8* stack = nullptr;
  u32 id = 0, lane = 0, warp_index = 0;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  WarpGroup* group = nullptr;
  State state = State::runnable;
  const char* role = "";
  const void* pc = nullptr;  // call site of the operation in progress

  Wait wait = Wait::none;
  const void* wait_address = nullptr;
  u64 wait_value = 0;
  u64 result = 0;
  std::vector<Poll> polls;  // loads since this thread last changed anything
  u32 cluster_phase = 0;

  u64 next_product = 0;
  std::vector<u64> product_groups;
  std::vector<InFlight> in_flight;
  std::vector<std::pair<const float*, u64>> fenced;  // accumulators fenced since the last wait, and their checksum

  std::vector<std::shared_ptr<BulkStore>> open_stores;
  std::deque<std::vector<std::shared_ptr<BulkStore>>> store_groups;
  std::vector<std::shared_ptr<CpAsync>> open_copies;
  std::deque<std::vector<std::shared_ptr<CpAsync>>> copy_groups;
  int queue_component = -1;
  u32 stores_issued = 0, stores_finished = 0;

  Clock clock = nullptr;
  u32 tick = 1, settled = 0;  // own component, and what of it is in `clock`
  OwnedClock release_fence[2];  // by scope: what a fence made releasable by later relaxed stores
  OwnedClock acquired[2];       // by scope: what relaxed loads saw, for a later fence
  OwnedClock last_acquired;
};

struct Cluster {
  std::vector<Cta*> ctas;
  u32 arrived = 0, total = 0, phase = 0;
  std::vector<Fiber*> waiters;
  Sync gathering, published;
};

// Shadow of four bytes of memory: the last write and one read since.
enum class Access : u8 { none, plain, async, strong_gpu, strong_sys };
struct Cell {
  u32 write_tick, read_tick, write_pc, read_pc;
  u16 write_component, read_component;
  u8 write_mask, read_mask;
  Access write, read;
};

struct Cta : BlockView {
  u32 id_in_grid() const { return index.x + grid.x * (index.y + grid.y * index.z); }
  u32 rank = 0, id = 0;
  u64 thread_base = 0;  // FS base of the thread-local block that is this CTA's shared memory
  u8* shared = nullptr;
  u32 dynamic_bytes = 0;
  std::vector<Fiber*> fibers;
  std::vector<Warp*> warps;
  std::vector<WarpGroup*> groups;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<Mbarrier>> mbarriers;
  Cluster* cluster = nullptr;
  u32 live = 0, launch = 0;
  u32 shared_queue = 0, queues = 0;
  int free_registers = 0;
  std::vector<Fiber*> register_waiters;
  const std::function<void()>* body = nullptr;
  Cell* cells = nullptr;  // of [shared - kSharedBefore, shared + kSharedBytes)
};

// Pending asynchronous work. fire() does a piece of it and returns true when nothing is left.
struct Event {
  virtual ~Event() = default;
  virtual bool fire() = 0;
};

struct Buffer {
  u8* begin;
  u64 bytes;
  int rank;        // owner
  bool peers;      // other ranks may touch it
  bool read_only;
  std::string label;
};

struct Launch {
  u32 rank;
  Dim3 grid, block;
  u32 cluster, dynamic_bytes;
  std::function<void()> body;
  int after = -1;  // starts when that launch has ended, as in one stream
};

// A launch of the run in progress.
struct Stage {
  u32 live = 0;  // threads that have not ended
  std::vector<Fiber*> fibers, held;
  std::vector<u32> followers;
};

enum class Expiry : u8 { never, deadlock, random };

struct Options {
  u64 seed = 1;
  bool checked = false;
  u64 step_limit = 3000000;  // without any change of state
  u32 watchdog_seconds = 10;
  Expiry expiry = Expiry::never;
  char mutation = 0;
  std::vector<u32> mutated;  // call sites, sorted
  bool record_sites = false, record_arrivals = false;
};

struct Finding {
  std::string kind, text;
};
struct Counters {
  u64 steps = 0, switches = 0, products = 0, events = 0, syncs = 0, expiries = 0;
};

struct FlagSync {
  OwnedClock sys;
  std::map<u32, OwnedClock> gpu;  // by rank
};

// The run in progress; one for the process.
struct Machine {
  Options options;
  bool checked = false, random = true, aborting = false, hooks = false, expired = false;
  u32 passing = 0;  // deadlines that the next look at one may find passed
  u64 random_state = 1, last_change = 0, last_scan = 0;
  u64 turn = 0;  // without randomness: which warp is next; a sleeping one passes its turn on
  u32 quiescent_rounds = 0;
  u64 quiescent_change = 0;
  Counters counters;
  std::vector<Finding> findings;
  std::unordered_set<u64> seen;
  std::vector<std::string> waiting;  // deadlock table

  std::vector<Buffer> buffers;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<Warp*> active;
  std::vector<Fiber*> pollers;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<WarpGroup>> groups;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Stage> stages;
  std::vector<u32> component_rank;
  std::vector<std::string> component_label;  // of components that are no thread
  std::unordered_map<const void*, std::string> names;
  std::unordered_map<const void*, FlagSync> flags;
  std::map<std::pair<char, u32>, u64> sites;
  std::map<std::pair<std::string, std::string>, u64> arrivals;  // phases by barrier and who arrived
};
extern Machine machine;
extern ThreadView* current;

inline Fiber* fiber() { return static_cast<Fiber*>(current); }

inline u64 random_bits() {
  u64& s = machine.random_state;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return s * 0x2545F4914F6CDD1Dull >> 16;
}
inline u32 random_below(u32 n) { return n ? static_cast<u32>((random_bits() & 0xffffffff) * n >> 32) : 0; }

// scheduler.cpp
void run(const std::vector<Launch>& launches, const Options& options);
void enqueue(Fiber* f);
void wake(std::vector<Fiber*>& fibers);
void block(Wait wait, const void* address, u64 value);
void yield();
void preempt();
void poll(const void* address, u32 size);
inline void changed() { machine.last_change = machine.counters.steps; }
u32 new_component(u32 rank, std::string label);

// report.cpp
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string at(const void* pc);        // call site, resolved to source lines outside
std::string at(u32 site);
u32 site_of(const void* pc);
std::string thread_name(const Fiber* f);
std::string address_name(const void* p);
std::string component_name(u32 component);
void report(u64 key, const char* kind, const std::string& text);  // once for each key; the run goes on
[[noreturn]] void fail(const char* kind, const std::string& text);  // the run ends
void report_waiting();
Buffer* find_buffer(const void* p);
Cta* shared_owner(const void* p);

// A loaded kernel library.
struct Module {
  u64 base, begin, end;
  std::string path;
  long statics = 0;  // its static __shared__ variables, from the FS base of a block
  u64 statics_bytes = 0;
};
extern std::vector<Module> modules;

// fiber.cpp
void switch_to(Fiber* f);
void switch_to_scheduler();
void use_thread_block(u64 base);
u64 scheduler_block();
void prepare_stack(Fiber* f, void (*entry)());
void bind_shared(Cta* c);

// Entry of every device call: remembers the call site.
inline Fiber* enter(const void* pc) {
  Fiber* f = fiber();
  f->pc = pc;
  return f;
}
#define SIM_ENTER ::sim::enter(__builtin_return_address(0))

// Whether the mutation under test weakens the current call site in this way.
bool mutated_site(char kind);
inline bool mutated(char kind) {
  return (machine.options.record_sites || machine.options.mutation == kind) && mutated_site(kind);
}

// sync.cpp: publish and acquire clocks
void tick(Fiber* f);
void settle(Fiber* f);
u32 seen_by(const Fiber* f, u32 index);
void release_into(Fiber* f, Sync& sync);
void acquire_from(Fiber* f, const Sync& sync);

// shadow.cpp
void plain_access(Fiber* f, const u8* p, u64 n, bool write, u32 site);
void strong_access(Fiber* f, const u8* p, u32 n, bool write, Scope scope);
struct AsyncIssue {
  const ClockBlock* const* clock;  // settled
  u32 component, tick;
  const char* what;
  std::string who;
  u32 site;
};
void async_access(const AsyncIssue& issue, const u8* p, u64 n, bool write);
void reset_shadow();

// Checks of ranges that instructions name; `what` is the instruction.
void check_shared(const void* p, u64 bytes, u32 alignment, const char* what);
void require_aligned(const void* p, u32 size);
void check_global(const void* p, u64 bytes, u32 alignment, bool write, const char* what);

Mbarrier* find_mbarrier(u8* bar);
void check_initialised(Mbarrier* m, bool by_async);
void complete_bytes(Mbarrier* m, u32 bytes);
u64 collective(CollectiveKind kind, u32 mask, u64 value, u64 operand);
void multiply(float* tile, const u8* shared, const u8* a, const u8* a_registers, const u8* b, u32 columns, bool zero);
u64 swizzled(u64 offset);

// The arena: global memory of all ranks, mapped at one address.
extern u8* arena_begin;
extern u64 arena_bytes;

}  // namespace sim
