// Context switches, stacks, and the thread-local blocks that serve as shared memory.
//
// `__shared__` is `thread_local` in device code. Each CTA owns the thread-local block of a parked thread; switching to a
// fiber sets the FS base to its CTA's block, so that `smem` and static shared variables mean this CTA's copy.
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

thread_local __attribute__((aligned(1024))) unsigned char smem[sim::kSharedBytes];

extern "C" void sim_switch(void** save, void* to);
asm(R"(
.text
.globl sim_switch
.type sim_switch,@function
sim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size sim_switch,.-sim_switch
)");

namespace sim {
namespace {

struct Block {
  u64 base;
  u8* shared;
};
std::vector<Block> blocks;
std::vector<u8*> stacks;
void* scheduler_pointer;
u64 own_block;
sem_t parked;

u64 read_base() {
  u64 v;
  asm volatile("rdfsbase %0" : "=r"(v));
  return v;
}

void* park(void* slot) {
  *static_cast<Block*>(slot) = {read_base(), smem};
  sem_post(&parked);
  for (;;) pause();
}

Block make_block() {
  Block block{};
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 512 << 10);  // static thread-local data, smem included, lies in it
  sem_init(&parked, 0, 0);
  if (pthread_create(&thread, &attributes, park, &block)) {
    std::printf("{\"error\":\"the system gives no thread for CTA number %zu: use a smaller grid\"}\n", blocks.size());
    std::fflush(stdout);
    _exit(2);
  }
  while (sem_wait(&parked)) {
  }
  pthread_attr_destroy(&attributes);
  return block;
}

void grow_stacks(size_t count) {
  constexpr size_t kChunk = 64;
  while (stacks.size() < count) {
    auto* p = static_cast<u8*>(mmap(nullptr, kChunk * kStackBytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (p == MAP_FAILED) std::abort();
    for (size_t i = 0; i < kChunk; ++i) {
      mprotect(p + i * kStackBytes, 4096, PROT_NONE);
      stacks.push_back(p + i * kStackBytes);
    }
  }
}

}  // namespace

void use_thread_block(u64 base) { asm volatile("wrfsbase %0" ::"r"(base) : "memory"); }

u64 scheduler_block() {
  if (!own_block) own_block = read_base();
  return own_block;
}

void bind_shared(Cta* c) {
  scheduler_block();
  while (blocks.size() <= c->id) blocks.push_back(make_block());
  c->thread_base = blocks[c->id].base;
  c->shared = blocks[c->id].shared;
}

void prepare_stack(Fiber* f, void (*entry)()) {
  grow_stacks(f->id + 1);
  f->stack = stacks[f->id];
  // Tops at different offsets: equal ones would share a few cache sets, and every switch would miss.
  const size_t colour = f->id % 97 * 128;
  auto* top = reinterpret_cast<u64*>(f->stack + kStackBytes - 64 - colour);
  *--top = 0;
  *--top = reinterpret_cast<u64>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  f->stack_pointer = top;
}

void switch_to(Fiber* f) {
  current = f;
  ++machine.counters.switches;
  use_thread_block(f->cta->thread_base);
  sim_switch(&scheduler_pointer, f->stack_pointer);
}

void switch_to_scheduler() { sim_switch(&fiber()->stack_pointer, scheduler_pointer); }

}  // namespace sim
