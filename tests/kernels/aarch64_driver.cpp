// The CPU kernels in a process of their own, for a machine of another kind: calls come on standard input.
//
// A call: how many numbers, regions and pointers; the numbers, which hold the arguments' struct; for each region of
// the caller's memory its address, bytes and content; the places of pointers among the numbers. Pointers are moved to
// copies of their regions, each of which ends where a protected page begins. The answer: the regions' contents
// afterwards.
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
void kv_attend(const void*);
void kv_encode(const void*);
void kv_unpack(const void*, const uint8_t*, int64_t, int64_t, int64_t, int64_t, float*);
}

namespace {

constexpr size_t PAGE = 65536;  // a multiple of any machine's

struct Region {
  uint64_t address, bytes;
  uint8_t *mapped, *begin;
  size_t size() const { return (bytes + PAGE - 1) / PAGE * PAGE + PAGE; }
};

bool read_all(void* to, size_t bytes) { return fread(to, 1, bytes, stdin) == bytes; }

void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

}  // namespace

int main() {
  for (uint64_t head[4]; read_all(head, sizeof head);) {  // which function, numbers, regions, pointers
    std::vector<uint64_t> numbers(head[1]);
    std::vector<Region> regions(head[2]);
    if (!read_all(numbers.data(), 8 * head[1])) fail("a call ends early");
    for (Region& r : regions) {
      if (!read_all(&r.address, 16)) fail("a region ends early");
      r.mapped = (uint8_t*)mmap(nullptr, r.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (r.mapped == MAP_FAILED) fail("out of memory");
      mprotect(r.mapped + r.size() - PAGE, PAGE, PROT_NONE);
      r.begin = r.mapped + r.size() - PAGE - r.bytes;
      if (!read_all(r.begin, r.bytes)) fail("a region's content ends early");
    }
    for (uint64_t i = 0, at; i < head[3]; ++i) {
      if (!read_all(&at, 8)) fail("a pointer ends early");
      uint64_t& pointer = numbers[at];
      const Region* in = nullptr;
      for (const Region& r : regions)
        if (pointer >= r.address && pointer < r.address + r.bytes) in = &r;
      if (!in) fail("a pointer is in no region");
      pointer = (uint64_t)(in->begin + (pointer - in->address));
    }
    if (head[0] == 0) kv_attend(numbers.data());
    if (head[0] == 1) kv_encode(numbers.data());
    if (head[0] == 2) {  // the struct of a role comes last
      const uint64_t* n = numbers.data();
      kv_unpack(n + 6, (const uint8_t*)n[0], (int64_t)n[1], (int64_t)n[2], (int64_t)n[3], (int64_t)n[4], (float*)n[5]);
    }
    for (const Region& r : regions) {
      fwrite(r.begin, 1, r.bytes, stdout);
      munmap(r.mapped, r.size());
    }
    fflush(stdout);
  }
}
