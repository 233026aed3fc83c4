// The machine below emulator.h: a block's threads as fibers on one CPU, see there.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

// one machine per library: else the dynamic linker merges those of two tests
#pragma GCC visibility push(hidden)

// -- changing stacks --------------------------------------------------------------------------------------------------
#if defined(__x86_64__) && !defined(KV_EMULATE_UCONTEXT)
namespace kv::emulated {
using Context = void*;  // the stack pointer; what a call must preserve lies on the stack
// swapcontext would do: but it asks the kernel for the signal mask each time
__attribute__((naked, noinline, noipa)) inline void change(Context*, Context) {
  asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; popq %rdx; jmpq *%rdx");
}
inline void change(Context& from, Context& to) { change(&from, to); }
inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  void** top = (void**)(stack + bytes - 64);  // 16-byte aligned; entry sees it as after a call: 8 off 16
  *--top = nullptr;                           // entry never returns
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  context = top;
}
}  // namespace kv::emulated
#else
namespace kv::emulated {
using Context = ucontext_t;
inline void change(Context& from, Context& to) { swapcontext(&from, &to); }
inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
}  // namespace kv::emulated
#endif

namespace kv::emulated {

constexpr size_t STACK = 128 << 10, PAGE_SLACK = 128;
constexpr int MAX_THREADS = 1024, LANES = 32;
constexpr uint32_t ALL = 0xffffffffu;

struct Copy {
  void* to;
  const void* from;
  int group;
};

struct Fiber {
  Context context;
  int index;
  int group;                 // copies go to this group until the next commit
  std::vector<Copy> copies;  // not yet performed, oldest first
};

struct Warp {
  // bit per lane: may run; has not returned; waits in an exchange; waits in sync_threads; waits in sync_some
  uint32_t ready, live, arrived, barrier, some;
  int some_id;                             // the barrier of sync_some
  const char* name;                        // of the exchange under way
  uint32_t in[LANES][12];                  // operands. Results lie apart: all lanes have read them before the next
  uint32_t out[LANES][4];                  // exchange is complete and overwrites them
};

struct Range {
  void* at;
  size_t bytes;
};

struct Machine {
  Fiber fibers[MAX_THREADS];
  Warp warps[MAX_THREADS / LANES];
  Context main;
  Fiber* current;
  Warp* warp;
  unsigned char* stacks;
  int guards;                        // stacks with a page before them that nobody may touch
  unsigned char* shared;
  size_t shared_bytes, shared_room;  // asked for; up to the guard page
  int threads, live, waiting;        // in sync_threads
  int block[3], grid[3];
  uint64_t random;                   // 0: in order
  void (*body)(void*);
  void* body_data;
  bool running;
  int64_t exchanges;
  char error[1024];
  std::vector<Range> buffers;        // global ones
};

inline Machine machine;
inline uint64_t seed_set = ~0ull;  // by kv_emulated_seed; else the environment's

inline uint64_t page() { return (uint64_t)sysconf(_SC_PAGESIZE); }

inline uint32_t draw(uint32_t below) {
  uint64_t& x = machine.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return (uint32_t)((x >> 32) * below >> 32);
}

// stops the launch: its fibers are never resumed
[[noreturn]] inline void leave() {
  machine.running = false;
  Context dead;
  change(dead, machine.main);
  abort();
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  Machine& m = machine;
  if (!m.running) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    abort();
  }
  int n = snprintf(m.error, sizeof m.error, "block (%d, %d, %d) thread %d (warp %d lane %d): ", m.block[0], m.block[1],
                   m.block[2], m.current->index, m.current->index / LANES, m.current->index % LANES);
  va_list list;
  va_start(list, format);
  vsnprintf(m.error + n, sizeof m.error - (size_t)n, format, list);
  va_end(list);
  leave();
}

[[noreturn]] inline void deadlock() {
  Machine& m = machine;
  char text[600];
  int n = 0;
  for (int w = 0; w < m.threads / LANES && n < 500; w++) {
    Warp& a = m.warps[w];
    n += snprintf(text + n, sizeof text - (size_t)n,
                  " warp %d: lanes %08x in %s, %08x in sync_threads, %08x in sync_some, %08x returned;", w, a.arrived,
                  a.arrived ? a.name : "an exchange", a.barrier, a.some, ~a.live);
  }
  fail("deadlock:%s", text);
}

inline int lowest_or_random(uint32_t set) {
  if (machine.random) {
    for (int skip = (int)draw((uint32_t)__builtin_popcount(set)); skip > 0; skip--) set &= set - 1;
  }
  return __builtin_ctz(set);
}

// hands over to a fiber that may run; returns when this one is resumed
__attribute__((noinline)) inline void yield() {
  Machine& m = machine;
  Fiber* from = m.current;
  int warps = m.threads / LANES, at = (int)(m.warp - m.warps);
  if (m.random) at = (int)draw((uint32_t)warps);
  for (int i = 0; i < warps; i++, at = at + 1 == warps ? 0 : at + 1) {
    if (!m.warps[at].ready) continue;
    m.warp = &m.warps[at];
    m.current = &m.fibers[at * LANES + lowest_or_random(m.warp->ready)];
    if (m.current != from) change(from->context, m.current->context);
    return;
  }
  if (m.live) deadlock();
  change(from->context, m.main);
}

inline int lane() { return machine.current->index % LANES; }
inline uint32_t* operands() { return machine.warp->in[lane()]; }

// waits for all lanes of the warp; the last to come computes what all of them get
template <class F> inline const uint32_t* exchange(const char* name, F&& finish) {
  Warp& w = *machine.warp;
  int me = lane();
  if (w.live != ALL) fail("%s, but lanes %08x have returned", name, ~w.live);
  if (!w.arrived) w.name = name;
  else if (w.name != name && strcmp(w.name, name)) fail("%s, but lanes %08x are in %s", name, w.arrived, w.name);
  w.arrived |= 1u << me;
  w.ready &= ~(1u << me);
  if (w.arrived == ALL) {
    finish(w);
    machine.exchanges++;
    w.arrived = 0;
    w.ready = ALL;
    if (machine.random) yield();
  } else {
    yield();
  }
  return w.out[me];
}

inline void release_if_complete() {
  Machine& m = machine;
  if (m.waiting < m.live) return;
  for (int w = 0; w < m.threads / LANES; w++) {
    m.warps[w].ready |= m.warps[w].barrier;
    m.warps[w].barrier = 0;
  }
  m.waiting = 0;
}

inline void fiber_entry() {
  Machine& m = machine;
  m.body(m.body_data);
  Warp& w = *m.warp;
  uint32_t bit = 1u << lane();
  if (w.arrived) fail("returns, but lanes %08x are in %s", w.arrived, w.name);
  w.live &= ~bit;
  w.ready &= ~bit;
  m.live--;
  release_if_complete();  // the hardware's barrier counts threads that have not returned
  yield();
  abort();
}

// -- memory with an end -----------------------------------------------------------------------------------------------
constexpr size_t GUARD = 1ull << 30;  // addresses only, no memory: on either side

// bytes in 'align', a power of two, that end where nobody may touch for a while, and start behind such a place
inline unsigned char* guarded(size_t bytes, size_t align) {
  size_t room = (bytes + align - 1) / align * align, p = page(), pages = (room + p - 1) / p * p;
  int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap(nullptr, pages + 2 * GUARD, PROT_NONE, kind, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  unsigned char* first = (unsigned char*)at + GUARD;
  if (pages && mprotect(first, pages, PROT_READ | PROT_WRITE)) return nullptr;
  memset(first, 0xff, pages);
  return first + pages - room;
}
inline void free_guarded(unsigned char* at, size_t bytes, size_t align) {
  size_t room = (bytes + align - 1) / align * align, p = page(), pages = (room + p - 1) / p * p;
  munmap(at + room - pages - GUARD, pages + 2 * GUARD);
}

// a fault while a kernel runs is the kernel's: leave by the launch's own stack
inline void on_fault(int signal, siginfo_t* info, void* context) {
  Machine& m = machine;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  if (!m.running && signal == SIGVTALRM) {  // between two blocks
    snprintf(m.error, sizeof m.error, "the launch takes longer than KV_EMULATE_SECONDS of processor time");
    return;
  }
  if (!m.running) {  // not ours: die of it
    ::signal(signal, SIG_DFL);
    return;
  }
  uintptr_t pc = 0;
#if defined(__x86_64__) && defined(__linux__)
  pc = (uintptr_t)((ucontext_t*)context)->uc_mcontext.gregs[16];  // the instruction pointer
#else
  (void)context;
#endif
  Dl_info from = {};
  dladdr((void*)pc, &from);
  unsigned long long code = pc - (uintptr_t)from.dli_fbase;  // what addr2line asks for
  if (signal == SIGILL || signal == SIGTRAP) {
    fail("undefined behaviour (alignment, index, shift, overflow) at code %#llx", code);
  }
  if (signal == SIGVTALRM) {
    fail("longer than KV_EMULATE_SECONDS of processor time: an endless loop? at code %#llx", code);
  }
  if (signal == SIGFPE) fail("integer division by zero at code %#llx", code);
  unsigned char* address = (unsigned char*)info->si_addr;
  long long at = (long long)((uintptr_t)address - (uintptr_t)m.shared);
  if (at >= -(long long)(GUARD + page()) && at < (long long)(m.shared_room + GUARD)) {
    fail("access outside the shared memory: byte %lld of %zu at code %#llx", at, m.shared_bytes, code);
  }
  if (address >= m.stacks && address < m.stacks + MAX_THREADS * STACK) {
    fail("a thread's stack is full at code %#llx", code);
  }
  for (const Range& r : m.buffers) {
    long long byte = (long long)((uintptr_t)address - (uintptr_t)r.at);
    if (byte < -(long long)(GUARD + page()) || byte >= (long long)(r.bytes + GUARD)) continue;
    bool inside = byte >= 0 && byte < (long long)r.bytes;
    fail("%s a global buffer: byte %lld of %zu at code %#llx", inside ? "write to read-only" : "access outside", byte,
         r.bytes, code);
  }
  fail("access outside any buffer: address %p at code %#llx", (void*)address, code);
}

struct FaultHandlers {
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGVTALRM}, COUNT = 6;
  struct sigaction before[COUNT];
  stack_t stack_before;
  itimerval timer_before;
  FaultHandlers() {
    static unsigned char room[64 << 10];  // a handler needs a stack of its own: a fiber's may be what overflowed
    stack_t stack = {};
    stack.ss_sp = room;
    stack.ss_size = sizeof room;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < COUNT; i++) sigaction(SIGNALS[i], &action, &before[i]);
    const char* text = getenv("KV_EMULATE_SECONDS");
    itimerval timer = {};
    timer.it_value.tv_sec = text ? atoi(text) : 120;
    setitimer(ITIMER_VIRTUAL, &timer, &timer_before);
  }
  ~FaultHandlers() {
    setitimer(ITIMER_VIRTUAL, &timer_before, nullptr);
    for (int i = 0; i < COUNT; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

inline void run_block() {
  Machine& m = machine;
  m.live = m.threads;
  m.waiting = 0;
  for (int w = 0; w < m.threads / LANES; w++) {
    Warp& a = m.warps[w];
    a.ready = a.live = ALL;
    a.arrived = a.barrier = a.some = 0;
    a.some_id = 0;
  }
  size_t p = page();
  for (int t = 0; t < m.threads; t++) {
    Fiber& f = m.fibers[t];
    f.index = t;
    f.group = 0;
    f.copies.clear();
    // tops at different distances from a page's end: else all of them share the sets of a cache
    prepare(f.context, m.stacks + (size_t)t * STACK + p, STACK - p - (size_t)(t % 16 * 192), fiber_entry);
  }
  size_t slack = m.shared_room - m.shared_bytes;
  memset(m.shared, 0xff, m.shared_room);
  m.current = &m.fibers[0];
  m.warp = &m.warps[0];
  m.running = true;
  change(m.main, m.fibers[0].context);
  m.running = false;
  for (size_t i = 0; i < slack && !m.error[0]; i++) {
    if (m.shared[m.shared_bytes + i] == 0xff) continue;
    snprintf(m.error, sizeof m.error, "block (%d, %d, %d): access outside the shared memory: byte %zu of %zu written",
             m.block[0], m.block[1], m.block[2], m.shared_bytes + i, m.shared_bytes);
  }
}

inline void run_grid(int x, int y, int z, int threads, size_t shared_bytes, void (*body)(void*), void* data) {
  Machine& m = machine;
  if (m.error[0]) return;
  if (threads <= 0 || threads > MAX_THREADS || threads % LANES || x <= 0 || y <= 0 || z <= 0) {
    snprintf(m.error, sizeof m.error, "cannot launch %d x %d x %d blocks of %d threads", x, y, z, threads);
    return;
  }
  if (!m.stacks) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (at == MAP_FAILED) return (void)snprintf(m.error, sizeof m.error, "no memory for stacks");
    m.stacks = (unsigned char*)at;
  }
  // no more of them than are used: a process has a limited number of mappings, and many libraries
  for (; m.guards < threads; m.guards++) mprotect(m.stacks + (size_t)m.guards * STACK, page(), PROT_NONE);
  m.shared = guarded(shared_bytes, PAGE_SLACK);
  if (!m.shared) return (void)snprintf(m.error, sizeof m.error, "no memory for %zu shared bytes", shared_bytes);
  m.shared_bytes = shared_bytes;
  m.shared_room = (shared_bytes + PAGE_SLACK - 1) / PAGE_SLACK * PAGE_SLACK;
  m.threads = threads;
  m.body = body;
  m.body_data = data;
  m.grid[0] = x, m.grid[1] = y, m.grid[2] = z;
  const char* text = getenv("KV_EMULATE_SEED");
  uint64_t seed = seed_set != ~0ull ? seed_set : text ? strtoull(text, nullptr, 10) : 0;
  m.random = seed * 0x9e3779b97f4a7c15ull;
  std::vector<int> order((size_t)x * y * z);
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  for (size_t i = order.size(); m.random && i > 1; i--) std::swap(order[i - 1], order[draw((uint32_t)i)]);
  {
    FaultHandlers handlers;
    for (size_t i = 0; i < order.size() && !m.error[0]; i++) {
      m.block[0] = order[i] % x, m.block[1] = order[i] / x % y, m.block[2] = order[i] / x / y;
      run_block();
    }
  }
  free_guarded(m.shared, shared_bytes, PAGE_SLACK);
  // each guarded stack is two of the 65,530 mappings that a process may have, and a test run loads hundreds of libraries
  munmap(m.stacks, STACK * MAX_THREADS);
  m.stacks = nullptr;
  m.guards = 0;
}

}  // namespace kv::emulated

namespace kv {

// runs every block of a grid; on an error it returns early: see kv_emulated_error()
template <class... P, class... A>
inline void launch(int x, int y, int z, int threads, size_t shared_bytes, void (*kernel)(P...), A&&... args) {
  auto call = [&] { kernel(args...); };
  emulated::run_grid(x, y, z, threads, shared_bytes, [](void* at) { (*(decltype(call)*)at)(); }, &call);
}

}  // namespace kv

#pragma GCC visibility pop

#define KV_EMULATED_API extern "C" __attribute__((weak, visibility("default")))
KV_EMULATED_API const char* kv_emulated_error() { return kv::emulated::machine.error; }
KV_EMULATED_API void kv_emulated_clear() { kv::emulated::machine.error[0] = 0; }
KV_EMULATED_API void kv_emulated_seed(uint64_t seed) { kv::emulated::seed_set = seed; }
KV_EMULATED_API int64_t kv_emulated_exchanges() { return kv::emulated::machine.exchanges; }
// a global buffer that ends (up to 15 bytes of alignment) at a page nobody may touch, filled with 0xff
KV_EMULATED_API void* kv_emulated_alloc(size_t bytes) {
  void* at = kv::emulated::guarded(bytes, 16);
  if (at) kv::emulated::machine.buffers.push_back({at, bytes});
  return at;
}
// makes it read-only
KV_EMULATED_API void kv_emulated_protect(void* at, size_t bytes) {
  uintptr_t p = kv::emulated::page(), first = (uintptr_t)at / p * p;
  mprotect((void*)first, ((uintptr_t)at + bytes + p - 1) / p * p - first, PROT_READ);
}
KV_EMULATED_API void kv_emulated_free(void* at, size_t bytes) {
  std::vector<kv::emulated::Range>& all = kv::emulated::machine.buffers;
  for (size_t i = 0; i < all.size(); i++) {
    if (all[i].at == at) all[i] = all.back(), all.pop_back();
  }
  kv::emulated::free_guarded((unsigned char*)at, bytes, 16);
}

