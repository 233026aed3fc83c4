// Work shared out to threads: those of the OpenMP runtime that PyTorch has loaded.
//
// Two runtimes in a process spin against each other after every region, so this library brings none: the host passes
// the address of `GOMP_parallel` of PyTorch's (library.py). Without one, or with one thread, the caller does all of it.
#pragma once
#include <atomic>

namespace kv {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

inline Parallel parallel = nullptr;

// work(i) for i in [0, count), on up to `threads` threads
template <class Work> inline void share(int count, int threads, const Work& work) {
  struct Job {
    const Work& work;
    int count;
    std::atomic<int> next;
  } job{work, count, {0}};
  const auto run = [](void* p) {
    Job& job = *(Job*)p;
    for (int i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.work(i);
  };
  if (threads > count) threads = count;
  if (threads > 1 && parallel) parallel(run, &job, (unsigned)threads, 0);
  else run(&job);
}

}  // namespace kv
