// The worker process: reads a job as lines of words, runs it, answers with one line of JSON.
//
//   arena PATH BASE BYTES KIND     map the file of global memory; KIND private leaves the file as it is
//   module PATH                    load a kernel library
//   option NAME VALUE              of the next run, see set_option
//   buffer RANK BEGIN BYTES PEERS READONLY LABEL
//   launch MODULE ENTRY RANK AFTER GX GY GZ BX BY BZ CLUSTER SHARED COUNT ARGUMENT...   (addresses of the arguments)
//   sizes MODULE ENTRY             sizes of the kernel's parameters
//   run                            options, buffers and launches are forgotten afterwards
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <iostream>
#include <sstream>

#include "state.h"

extern "C" void* __tls_get_addr(size_t*);

namespace sim {
namespace {

using Entry = void (*)(const void* const*);
using Sizes = const u32* (*)(u32*);

std::vector<void*> handles;
Options options;
std::vector<Launch> launches;
double started, started_cpu;

double now(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
    else out += format("\\u%04x", c);
  }
  return out + "\"";
}

// `last`: the worker ends behind this answer.
void answer(bool last) {
  std::string out = format("{\"last\":%s,\"findings\":[", last ? "true" : "false");
  for (size_t i = 0; i < machine.findings.size(); ++i) {
    const Finding& f = machine.findings[i];
    out += (i ? ",[" : "[") + quoted(f.kind) + "," + quoted(f.text) + "]";
  }
  out += "],\"waiting\":[";
  for (size_t i = 0; i < machine.waiting.size(); ++i) out += (i ? "," : "") + quoted(machine.waiting[i]);
  out += "],\"sites\":[";
  bool first = true;
  for (auto& [site, count] : machine.sites) {
    out += format("%s[\"%c\",%u,%llu]", first ? "" : ",", site.first, site.second, count);
    first = false;
  }
  out += "],\"arrivals\":[";
  first = true;
  for (auto& [phase, count] : machine.arrivals) {
    out += (first ? "[" : ",[") + quoted(phase.first) + "," + quoted(phase.second) + format(",%llu]", count);
    first = false;
  }
  const Counters& c = machine.counters;
  out += format("],\"seconds\":%.6f,\"cpu_seconds\":%.6f,\"threads\":%zu,\"steps\":%llu,\"switches\":%llu,\"products\":%llu,\"events\":%llu,\"syncs\":%llu,\"expiries\":%llu}\n",
                now(CLOCK_MONOTONIC) - started, now(CLOCK_PROCESS_CPUTIME_ID) - started_cpu, machine.fibers.size(), c.steps, c.switches, c.products, c.events, c.syncs, c.expiries);
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = write(STDOUT_FILENO, out.data() + done, out.size() - done);
    if (n <= 0) _exit(4);
    done += static_cast<size_t>(n);
  }
}

void on_signal(int signal, siginfo_t* info, void* context) {
  static u64 steps_before;
  if (signal == SIGALRM && steps_before != machine.counters.steps) {
    steps_before = machine.counters.steps;
    alarm(machine.options.watchdog_seconds);
    return;
  }
  use_thread_block(scheduler_block());
  const auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const void* pc = reinterpret_cast<const void*>(registers[REG_RIP] + 1);
  if (current) {
    const char* kind = signal == SIGALRM ? "watchdog" : "crash";
    const std::string what = signal == SIGALRM ? format("no scheduling point for %u seconds (a plain spin?)", machine.options.watchdog_seconds)
                             : signal == SIGFPE ? std::string("integer division by zero")
                             : signal == SIGILL ? std::string("a place that the compiler holds for unreachable")
                                                : "access of " + address_name(info->si_addr);
    machine.findings.push_back({kind, format("%s, %s by %s", what.c_str(), at(pc).c_str(), thread_name(fiber()).c_str())});
    answer(true);
  }
  _exit(3);
}

void install_signals() {
  static u8 stack[64 << 10];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int s : {SIGSEGV, SIGBUS, SIGALRM, SIGFPE, SIGILL}) sigaction(s, &action, nullptr);
}

[[noreturn]] void refuse(const std::string& why) {
  std::cout << "{\"error\":" << quoted(why) << "}" << std::endl;
  _exit(2);
}

void load_module(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) refuse(dlerror());
  link_map* map = nullptr;
  dlinfo(handle, RTLD_DI_LINKMAP, &map);
  Module m{static_cast<u64>(map->l_addr), 0, 0, path};
  const auto visit = [](dl_phdr_info* info, size_t, void* p) {
    auto* found = static_cast<Module*>(p);
    if (info->dlpi_addr != found->base || found->path != info->dlpi_name) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& h = info->dlpi_phdr[i];
      if (h.p_type == PT_TLS) found->statics_bytes = h.p_memsz;
      if (h.p_type == PT_LOAD) found->end = std::max(found->end, static_cast<u64>(info->dlpi_addr + h.p_vaddr + h.p_memsz));
    }
    return 1;
  };
  m.begin = m.base;
  dl_iterate_phdr(visit, &m);
  if (m.statics_bytes) {
    size_t index[2] = {0, 0};
    dlinfo(handle, RTLD_DI_TLS_MODID, &index[0]);
    m.statics = static_cast<long>(reinterpret_cast<u64>(__tls_get_addr(index)) - scheduler_block());
    if (m.statics >= 0 || -m.statics > static_cast<long>(kSharedBytes + kSharedBefore)) {
      refuse("static shared memory of " + path + " is too large");
    }
  }
  modules.push_back(m);
  handles.push_back(handle);
}

void* symbol(size_t module, const std::string& name) {
  if (module >= handles.size()) refuse("no such module");
  void* p = dlsym(handles[module], name.c_str());
  if (!p) refuse("no such kernel in the library: " + name);
  return p;
}

void map_arena(const std::string& path, u64 base, u64 bytes, bool keep_file) {
  const int file = open(path.c_str(), O_RDWR);
  if (file < 0) refuse("cannot open the arena");
  if (arena_begin) munmap(arena_begin, arena_bytes);
  void* p = mmap(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE, (keep_file ? MAP_PRIVATE : MAP_SHARED) | MAP_FIXED_NOREPLACE, file, 0);
  close(file);
  if (p != reinterpret_cast<void*>(base)) refuse("the arena's address is taken");
  arena_begin = static_cast<u8*>(p);
  arena_bytes = bytes;
}

void set_option(const std::string& name, const std::string& value) {
  const auto number = [&value] { return std::stoull(value); };
  if (name == "seed") options.seed = number();
  else if (name == "checked") options.checked = number() != 0;
  else if (name == "step_limit") options.step_limit = number();
  else if (name == "watchdog") options.watchdog_seconds = static_cast<u32>(number());
  else if (name == "expiry") options.expiry = value == "deadlock" ? Expiry::deadlock : value == "random" ? Expiry::random : Expiry::never;
  else if (name == "record_sites") options.record_sites = number() != 0;
  else if (name == "record_arrivals") options.record_arrivals = number() != 0;
  else if (name == "mutation") options.mutation = value[0];
  else if (name == "mutated") options.mutated.push_back(static_cast<u32>(number()));
  else refuse("unknown option " + name);
}

void read_launch(std::istringstream& words) {
  Launch launch;
  size_t module = 0, count = 0;
  std::string entry;
  words >> module >> entry >> launch.rank >> launch.after >> launch.grid.x >> launch.grid.y >> launch.grid.z >> launch.block.x >>
      launch.block.y >> launch.block.z >> launch.cluster >> launch.dynamic_bytes >> count;
  std::vector<const void*> arguments(count);
  for (auto& a : arguments) {
    u64 address = 0;
    words >> address;
    a = reinterpret_cast<const void*>(address);
  }
  if (!words) refuse("incomplete launch");
  if (launch.after >= static_cast<int>(launches.size())) refuse("a launch after one that comes later");
  const auto call = reinterpret_cast<Entry>(symbol(module, "sim_entry_" + entry));
  launch.body = [call, arguments = std::move(arguments)] { call(arguments.data()); };
  launches.push_back(std::move(launch));
}

void read_buffer(std::istringstream& words) {
  Buffer b{};
  u64 begin = 0;
  words >> b.rank >> begin >> b.bytes >> b.peers >> b.read_only >> b.label;
  if (!words) refuse("incomplete buffer");
  b.begin = reinterpret_cast<u8*>(begin);
  machine.buffers.push_back(std::move(b));
}

void answer_sizes(std::istringstream& words) {
  size_t module = 0;
  std::string entry;
  words >> module >> entry;
  u32 count = 0;
  const u32* sizes = reinterpret_cast<Sizes>(symbol(module, "sim_sizes_" + entry))(&count);
  std::string out = "{\"sizes\":[";
  for (u32 i = 0; i < count; ++i) out += format("%s%u", i ? "," : "", sizes[i]);
  std::cout << out << "]}" << std::endl;
}

void run_job() {
  started = now(CLOCK_MONOTONIC);
  started_cpu = now(CLOCK_PROCESS_CPUTIME_ID);
  std::sort(options.mutated.begin(), options.mutated.end());
  run(launches, options);
  answer(false);
  launches.clear();
  machine.buffers.clear();
  options = Options{};
}

}  // namespace

bool mutated_site(char kind) {
  const u32 site = site_of(fiber()->pc);
  if (machine.options.record_sites) ++machine.sites[{kind, site}];
  const auto& chosen = machine.options.mutated;
  return machine.options.mutation == kind && std::binary_search(chosen.begin(), chosen.end(), site);
}

}  // namespace sim

int main() {
  mallopt(M_ARENA_MAX, 1);  // fibers allocate under other threads' identities
  sim::scheduler_block();
  sim::install_signals();
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb.empty() || verb[0] == '#') continue;
    if (verb == "arena") {
      std::string path, kind;
      sim::u64 base = 0, bytes = 0;
      words >> path >> base >> bytes >> kind;
      sim::map_arena(path, base, bytes, kind == "private");
    } else if (verb == "module") {
      std::string path;
      words >> path;
      sim::load_module(path);
    } else if (verb == "option") {
      std::string name, value;
      words >> name >> value;
      sim::set_option(name, value);
    } else if (verb == "buffer") {
      sim::read_buffer(words);
    } else if (verb == "launch") {
      sim::read_launch(words);
    } else if (verb == "sizes") {
      sim::answer_sizes(words);
    } else if (verb == "run") {
      sim::run_job();
    } else {
      sim::refuse("unknown line: " + verb);
    }
  }
  return 0;
}
