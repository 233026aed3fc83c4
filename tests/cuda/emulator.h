// The machine of platform.cuh on a host CPU: every name of its CUDA half, for g++ (C++17 and up). A block's threads are fibers
// that run one at a time and change hands only where threads wait for one another, so that a kernel runs complete, and
// whatever it does wrong shows alike on every run:
//   warp exchange   a lane leaves its operands and waits until all 32 have come; different operations at once, a lane that
//                   left the kernel, or nobody able to go on are errors
//   copies          copy16 fills its target with 0xff and moves the bytes at the wait that covers them: a missing wait reads
//                   0xff. Targets outside the shared memory and addresses off 16 bytes are errors
//   memory          shared memory ends at a page nobody may touch, global buffers from kv_emulated_alloc too; shared memory
//                   starts every block as 0xff; a fault becomes an error with the thread's number, not the end of the process
//   order           KV_EMULATE_SEED or kv_emulated_seed(n): 0 takes lanes and warps in order, another number a random order
//                   of blocks, warps and lanes, changed at every exchange: outputs that differ between seeds are a race
// Limits: a loop that waits for another thread's store never ends (only exchanges hand over), plain a * b + c is never
// contracted, mma sums in double and rounds to fp32 once (hardware keeps fewer bits), exp2_fast and log2_fast are libm's.
// The first error stops the launch and those behind it until kv_emulated_clear(); kv_emulated_error() has its text.
// A library has one translation unit of this header, and launches from one thread at a time.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cstddef>
#include <utility>
#include <vector>

#ifdef __FAST_MATH__
#error "the emulator's arithmetic needs IEEE rounding: no -ffast-math"
#endif

#define KV_DEV inline
#define KV_CONST static constexpr
#define KV_KERNEL extern "C"
#define KV_BOUNDS(threads, blocks)
#define KV_GRID_CONSTANT const
#define KV_UNROLL
#define KV_NO_UNROLL
#define KV_DYNAMIC_SHARED(name) unsigned char* name = kv::emulated::machine.shared

// -- changing stacks -------------------------------------------------------------------------------------------------------
#if defined(__x86_64__)
namespace kv::emulated {
using Context = void*;  // the stack pointer; what a call must preserve lies on the stack
// swapcontext would do: but it asks the kernel for the signal mask each time
__attribute__((naked, noinline, noipa)) inline void change(Context*, Context) {
  asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
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
#include <ucontext.h>
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
  uint32_t ready, live, arrived, barrier;  // bit per lane: may run; has not returned; waits in an exchange; in sync_threads
  const char* name;                        // of the exchange under way
  uint32_t in[LANES][12];                  // operands. Results lie apart: all lanes have read them before the next
  uint32_t out[LANES][4];                  // exchange is complete and overwrites them
};

struct Machine {
  Fiber fibers[MAX_THREADS];
  Warp warps[MAX_THREADS / LANES];
  Context main;
  Fiber* current;
  Warp* warp;
  unsigned char* stacks;
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
    n += snprintf(text + n, sizeof text - (size_t)n, " warp %d: lanes %08x in %s, %08x in sync_threads, %08x returned;", w,
                  a.arrived, a.arrived ? a.name : "an exchange", a.barrier, ~a.live);
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
  else if (strcmp(w.name, name)) fail("%s, but lanes %08x are in %s", name, w.arrived, w.name);
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

// -- memory with an end ----------------------------------------------------------------------------------------------------
// bytes that end at a page nobody may touch, and start behind one; 'align' a power of two
inline unsigned char* guarded(size_t bytes, size_t align) {
  size_t room = (bytes + align - 1) / align * align, p = page(), pages = (room + p - 1) / p * p;
  void* at = mmap(nullptr, pages + 2 * p, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  unsigned char* first = (unsigned char*)at + p;
  if (pages && mprotect(first, pages, PROT_READ | PROT_WRITE)) return nullptr;
  memset(first, 0xff, pages);
  return first + pages - room;
}
inline void free_guarded(unsigned char* at, size_t bytes, size_t align) {
  size_t room = (bytes + align - 1) / align * align, p = page(), pages = (room + p - 1) / p * p;
  munmap(at + room - pages - p, pages + 2 * p);
}

// a fault while a kernel runs is the kernel's: leave by the launch's own stack
inline void on_fault(int signal, siginfo_t* info, void* context) {
  Machine& m = machine;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  if (!m.running) {  // not ours: die of it
    ::signal(signal, SIG_DFL);
    return;
  }
  unsigned long long pc = 0;
#if defined(__x86_64__) && defined(__linux__)
  pc = (unsigned long long)((ucontext_t*)context)->uc_mcontext.gregs[16];  // REG_RIP
#else
  (void)context;
#endif
  if (signal == SIGILL || signal == SIGTRAP) fail("undefined behaviour (misaligned, index or shift out of range) at pc %llx", pc);
  if (signal == SIGFPE) fail("integer division by zero at pc %llx", pc);
  long long at = (long long)((unsigned char*)info->si_addr - m.shared);
  if (at >= -(1 << 16) && at < (long long)m.shared_bytes + (1 << 16)) {
    fail("access outside the shared memory: byte %lld of %zu at pc %llx", at, m.shared_bytes, pc);
  }
  fail("access to memory that is not there: address %p at pc %llx", info->si_addr, pc);
}

struct FaultHandlers {
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
  struct sigaction before[5];
  stack_t stack_before;
  FaultHandlers() {
    static unsigned char room[64 << 10];  // a handler needs a stack of its own: a fiber's may be what overflowed
    stack_t stack = {};
    stack.ss_sp = room;
    stack.ss_size = sizeof room;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 5; i++) sigaction(SIGNALS[i], &action, &before[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < 5; i++) sigaction(SIGNALS[i], &before[i], nullptr);
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
    a.arrived = a.barrier = 0;
  }
  for (int t = 0; t < m.threads; t++) {
    Fiber& f = m.fibers[t];
    f.index = t;
    f.group = 0;
    f.copies.clear();
    prepare(f.context, m.stacks + (size_t)t * STACK + page(), STACK - page(), fiber_entry);
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
    snprintf(m.error, sizeof m.error, "block (%d, %d, %d): wrote byte %zu of %zu of the shared memory", m.block[0], m.block[1],
             m.block[2], m.shared_bytes + i, m.shared_bytes);
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
    void* at = mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return (void)snprintf(m.error, sizeof m.error, "no memory for stacks");
    m.stacks = (unsigned char*)at;
    for (int t = 0; t < MAX_THREADS; t++) mprotect(m.stacks + (size_t)t * STACK, page(), PROT_NONE);
  }
  m.shared = guarded(shared_bytes, PAGE_SLACK);
  if (!m.shared) return (void)snprintf(m.error, sizeof m.error, "no memory for %zu bytes of shared memory", shared_bytes);
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

#define KV_EMULATED_API extern "C" __attribute__((weak, visibility("default")))
KV_EMULATED_API const char* kv_emulated_error() { return kv::emulated::machine.error; }
KV_EMULATED_API void kv_emulated_clear() { kv::emulated::machine.error[0] = 0; }
KV_EMULATED_API void kv_emulated_seed(uint64_t seed) { kv::emulated::seed_set = seed; }
KV_EMULATED_API int64_t kv_emulated_exchanges() { return kv::emulated::machine.exchanges; }
// a global buffer that ends (up to 15 bytes of alignment) at a page nobody may touch, filled with 0xff
KV_EMULATED_API void* kv_emulated_alloc(size_t bytes) { return kv::emulated::guarded(bytes, 16); }
KV_EMULATED_API void kv_emulated_free(void* at, size_t bytes) {
  kv::emulated::free_guarded((unsigned char*)at, bytes, 16);
}

namespace kv {

inline int thread() { return emulated::machine.current->index; }
inline int block_x() { return emulated::machine.block[0]; }
inline int block_y() { return emulated::machine.block[1]; }
inline int block_z() { return emulated::machine.block[2]; }
inline int grid_x() { return emulated::machine.grid[0]; }

__attribute__((noinline)) inline void sync_threads() {
  emulated::Machine& m = emulated::machine;
  uint32_t bit = 1u << emulated::lane();
  m.warp->barrier |= bit;
  m.warp->ready &= ~bit;
  m.waiting++;
  emulated::release_if_complete();
  if (!(m.warp->ready & bit) || m.random) emulated::yield();
}
__attribute__((noinline)) inline void sync_warp() {
  emulated::exchange("sync_warp", [](emulated::Warp&) {});
}
__attribute__((noinline)) inline uint32_t ballot(bool p) {
  emulated::operands()[0] = p;
  return emulated::exchange("a vote", [](emulated::Warp& w) {
    uint32_t set = 0;
    for (int i = 0; i < 32; i++) set |= w.in[i][0] << i;
    for (int i = 0; i < 32; i++) w.out[i][0] = set;
  })[0];
}
inline bool any(bool p) { return ballot(p) != 0; }
inline bool all(bool p) { return ballot(p) == 0xffffffffu; }

namespace emulated {
__attribute__((noinline)) inline uint64_t shuffle(const char* name, uint64_t x, int from) {
  uint32_t* in = operands();
  in[0] = (uint32_t)x, in[1] = (uint32_t)(x >> 32), in[2] = (uint32_t)from & 31;
  const uint32_t* out = exchange(name, [](Warp& w) {
    for (int i = 0; i < 32; i++) w.out[i][0] = w.in[w.in[i][2]][0], w.out[i][1] = w.in[w.in[i][2]][1];
  });
  return out[0] | (uint64_t)out[1] << 32;
}
template <class To, class From> inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
}  // namespace emulated

// -- numbers -----------------------------------------------------------------------------------------------------------
inline uint32_t float_bits(float x) { return emulated::bits_as<uint32_t>(x); }
inline float bits_float(uint32_t x) { return emulated::bits_as<float>(x); }
inline uint64_t double_bits(double x) { return emulated::bits_as<uint64_t>(x); }
inline double bits_double(uint64_t x) { return emulated::bits_as<double>(x); }

inline uint32_t shfl_xor(uint32_t x, int mask) {
  return (uint32_t)emulated::shuffle("shfl_xor of 32 bits", x, emulated::lane() ^ mask);
}
inline float shfl_xor(float x, int mask) { return bits_float(shfl_xor(float_bits(x), mask)); }
inline double shfl_xor(double x, int mask) {
  return bits_double(emulated::shuffle("shfl_xor of 64 bits", double_bits(x), emulated::lane() ^ mask));
}
inline uint32_t shfl(uint32_t x, int lane) { return (uint32_t)emulated::shuffle("shfl of 32 bits", x, lane); }
inline float shfl(float x, int lane) { return bits_float(shfl(float_bits(x), lane)); }
inline double shfl(double x, int lane) { return bits_double(emulated::shuffle("shfl of 64 bits", double_bits(x), lane)); }

inline float exp2_fast(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // the instruction has no subnormal results
}
inline float log2_fast(float x) { return log2f(x); }
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float div(float a, float b) { return a / b; }
inline float sqrt(float a) { return __builtin_sqrtf(a); }
inline double add(double a, double b) { return a + b; }
inline double sub(double a, double b) { return a - b; }
inline double mul(double a, double b) { return a * b; }
inline double div(double a, double b) { return a / b; }
inline double sqrt(double a) { return __builtin_sqrt(a); }
inline float round_even(float a) { return nearbyintf(a); }
inline double round_even(double a) { return nearbyint(a); }
inline float minimum(float a, float b) { return fminf(a, b); }
inline float maximum(float a, float b) { return fmaxf(a, b); }

// -- 16-bit floating point -------------------------------------------------------------------------------------------------
inline uint16_t half_bits(double x) {
  uint64_t bits = double_bits(x), size = bits & ~(1ull << 63);
  uint16_t sign = (uint16_t)(bits >> 48 & 0x8000);
  if (size > 0x7ffull << 52) return 0x7fff;                                  // the machine's one NaN
  if (size >= (uint64_t)(1023 + 16) << 52) return sign | 0x7c00;             // 65536 and up
  if (size < (uint64_t)(1023 - 14) << 52) {                                  // a multiple of 2^-24; scaling is exact
    return sign | (uint16_t)nearbyint(bits_double(size) * 0x1p24);
  }
  size -= (uint64_t)(1023 - 15) << 52;
  return sign | (uint16_t)((size + (1ull << 41) - 1 + (size >> 42 & 1)) >> 42);  // to even; a carry moves the exponent
}
inline uint16_t half_bits(float x) { return half_bits((double)x); }
inline float half_float(uint16_t x) {
  uint32_t size = x & 0x7fffu;
  if (size > 0x7c00) return bits_float(0x7fffffff);
  float y = size == 0x7c00 ? __builtin_inff() : bits_float(size << 13) * 0x1p112f;  // exact, subnormals too
  return x & 0x8000 ? -y : y;
}
inline uint16_t bf16_bits(float x) {
  uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bf16_float(uint16_t x) { return bits_float((uint32_t)x << 16); }
inline uint32_t pack_half2(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }

namespace emulated {
inline double low(uint32_t x) { return half_float((uint16_t)x); }
inline double high(uint32_t x) { return half_float((uint16_t)(x >> 16)); }
// a * b + c of halves, rounded once. The product is exact in double. The sum may not be (bits from 2^-48 to 2^32): rounding it
// to odd first leaves the second rounding nothing to get wrong, as double has more than two bits over half.
inline uint16_t fused(double a, double b, double c) {
  double p = a * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
  if (error != 0 && std::isfinite(s)) {
    uint64_t bits = double_bits(s);
    if (!(bits & 1)) bits += (error > 0) == (s > 0) ? 1 : ~0ull;
    s = bits_double(bits);
  }
  return half_bits(s);
}
}  // namespace emulated

inline uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  using namespace emulated;
  return fused(low(a), low(b), low(c)) | (uint32_t)fused(high(a), high(b), high(c)) << 16;
}
inline uint32_t hadd2(uint32_t a, uint32_t b) {  // the sum of two halves is exact in double
  using namespace emulated;
  return half_bits(low(a) + low(b)) | (uint32_t)half_bits(high(a) + high(b)) << 16;
}
inline uint32_t hmul2(uint32_t a, uint32_t b) {
  using namespace emulated;
  return half_bits(low(a) * low(b)) | (uint32_t)half_bits(high(a) * high(b)) << 16;
}

// -- bits --------------------------------------------------------------------------------------------------------------------
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = a | (uint64_t)b << 32;
  uint32_t y = 0;
  for (int i = 0; i < 4; i++) y |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return y;
}
inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) {
  return (uint32_t)((low | (uint64_t)high << 32) >> (shift & 31));
}

// -- tensor cores and matrices of 16-bit numbers -----------------------------------------------------------------------------
__attribute__((noinline)) inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
  uint32_t* in = emulated::operands();
  in[0] = a0, in[1] = a1, in[2] = a2, in[3] = a3, in[4] = b0, in[5] = b1;
  memcpy(in + 6, d, 16);
  const uint32_t* out = emulated::exchange("mma", [](emulated::Warp& w) {
    double a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
      int g = l / 4, j = l % 4;
      for (int i = 0; i < 4; i++) {
        int row = g + i % 2 * 8, column = 2 * j + i / 2 * 8;
        a[row][column] = emulated::low(w.in[l][i]), a[row][column + 1] = emulated::high(w.in[l][i]);
      }
      for (int i = 0; i < 2; i++) {
        b[2 * j + 8 * i][g] = emulated::low(w.in[l][4 + i]), b[2 * j + 8 * i + 1][g] = emulated::high(w.in[l][4 + i]);
      }
    }
    double sum[16][8] = {};
    for (int m = 0; m < 16; m++) {
      for (int k = 0; k < 16; k++) {
        for (int n = 0; n < 8; n++) sum[m][n] += a[m][k] * b[k][n];
      }
    }
    for (int l = 0; l < 32; l++) {
      for (int i = 0; i < 4; i++) {
        double total = sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] + (double)bits_float(w.in[l][6 + i]);
        w.out[l][i] = float_bits((float)total);
      }
    }
  });
  memcpy(d, out, 16);
}
__attribute__((noinline)) inline uint32_t transpose8(uint32_t x) {
  emulated::operands()[0] = x;
  return emulated::exchange("transpose8", [](emulated::Warp& w) {
    uint16_t at[8][8];
    for (int l = 0; l < 32; l++) memcpy(&at[l / 4][l % 4 * 2], &w.in[l][0], 4);
    for (int l = 0; l < 32; l++) w.out[l][0] = at[l % 4 * 2][l / 4] | (uint32_t)at[l % 4 * 2 + 1][l / 4] << 16;
  })[0];
}

// -- copies from global to shared memory ---------------------------------------------------------------------------------
__attribute__((noinline)) inline void copy16(void* shared, const void* global) {
  emulated::Machine& m = emulated::machine;
  int64_t at = (int64_t)((uintptr_t)shared - (uintptr_t)m.shared);
  if (at < 0 || at + 16 > (int64_t)m.shared_bytes) {
    emulated::fail("copy16 to byte %lld of %zu of the shared memory", (long long)at, m.shared_bytes);
  }
  if (at % 16 || (uintptr_t)global % 16) emulated::fail("copy16 off 16 bytes: to byte %lld from %p", (long long)at, global);
  for (int i = 0; i < 2; i++) (void)((const volatile uint64_t*)global)[i];  // a fault shows here, not at the wait
  memset(shared, 0xff, 16);
  m.current->copies.push_back({shared, global, m.current->group});
}
inline void copy_commit() { emulated::machine.current->group++; }
namespace emulated {
__attribute__((noinline)) inline void wait_copies(int pending) {
  Fiber& f = *machine.current;
  size_t n = 0;
  for (; n < f.copies.size() && f.copies[n].group < f.group - pending; n++) memcpy(f.copies[n].to, f.copies[n].from, 16);
  f.copies.erase(f.copies.begin(), f.copies.begin() + (std::ptrdiff_t)n);
}
}  // namespace emulated
template <int PENDING> inline void copy_wait() { emulated::wait_copies(PENDING); }

// -- between kernels of a stream: launches run one after another here -------------------------------------------------------
inline void launch_dependents() {}
inline void wait_for_previous() {}

}  // namespace kv
