// The library's entry points: plain C, for ctypes. Compiled once per instruction set (compile.py).
#include "attend.h"

namespace kv {
namespace {

// splits of the tokens so that threads have a few tasks each
int64_t splits_of(int64_t tasks, int64_t tokens, int64_t threads) {
  if (threads == 1) return 1;
  const int64_t wanted = (4 * threads + tasks - 1) / tasks;
  return std::max<int64_t>(1, std::min(wanted, tokens / LEAST));
}

void attend(const Args& a) {
  const int64_t rows = a.group * a.queries, blocks = (rows + ROWS - 1) / ROWS, dim = a.dim;
  std::vector<int64_t> tokens(a.batch, 0);
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t i = 0; i < a.pieces_each; ++i) tokens[b] += a.pieces[b * a.pieces_each + i].count;
  const int64_t longest = a.batch ? *std::max_element(tokens.begin(), tokens.end()) : 0;
  const int64_t units = a.batch * a.heads * blocks, splits = splits_of(units, longest, a.threads);
  const int64_t all = a.batch * a.heads * rows;
  std::unique_ptr<float[]> sums(splits > 1 ? new float[splits * all * dim] : nullptr);
  std::unique_ptr<float[]> edges(new float[2 * splits * all]);
  std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[units]);
  for (int64_t i = 0; i < units; ++i) done[i] = 0;

  share((int)(units * splits), (int)a.threads, [&](int number) {
    const int64_t unit = number / splits, split = number % splits, head = unit / blocks;
    const int64_t b = head / a.heads, row = unit % blocks * ROWS, count = std::min<int64_t>(ROWS, rows - row);
    const int64_t first = head * rows + row;  // row of all
    const auto part = [&](int64_t s) {
      float* acc = splits > 1 ? sums.get() + (s * all + first) * dim : a.out + first * dim;
      float* edge = edges.get() + 2 * s * all + first;
      return Part{acc, edge, edge + all};
    };
    const int64_t begin = tokens[b] * split / splits, end = tokens[b] * (split + 1) / splits;
    Task{a, (int)b, (int)(head % a.heads), (int)row, (int)count, begin, end}.run(part(split));
    if (done[unit].fetch_add(1) + 1 < splits) return;

    for (int64_t r = 0; r < count; ++r) {
      const float sink = a.sinks ? a.sinks[(head % a.heads) * a.group + (row + r) / a.queries] : -INFINITY;
      float most = sink;
      for (int64_t s = 0; s < splits; ++s) most = std::max(most, part(s).most[r]);
      const float base = most == -INFINITY ? 0.0f : most;
      float total = std::exp(sink - base);
      for (int64_t s = 0; s < splits; ++s) total += part(s).total[r] * std::exp(part(s).most[r] - base);
      const float scale = total == 0 ? 0.0f : 1.0f / total;
      float* out = a.out + (first + r) * dim;
      for (int64_t s = 0; s < splits; ++s) {
        const float weight = scale * std::exp(part(s).most[r] - base);
        const float* acc = part(s).acc + r * dim;
        for (int64_t c = 0; c < dim; ++c) out[c] = (s ? out[c] : 0.0f) + acc[c] * weight;
      }
      if (a.lse) a.lse[first + r] = base + std::log(total);
    }
  });
}

}  // namespace
}  // namespace kv

#pragma GCC visibility push(default)
extern "C" {

// address of the OpenMP runtime's GOMP_parallel; null: one thread
void kv_threads(void* parallel) { kv::parallel = (kv::Parallel)parallel; }

int64_t kv_reader(const char* name) { return kv::number_of(kv::READERS, name); }

const char* kv_digest() { return KV_DIGEST; }

void kv_attend(const kv::Args* a) { kv::attend(*a); }

// tokens [first, first + count) of one page of one head as float32 [count, D]
void kv_unpack(const kv::Role* role, const uint8_t* page, int64_t head, int64_t dim, int64_t first, int64_t count,
               float* out) {
  const uint8_t* tables = role->tables ? role->tables + head * role->tables_head : nullptr;
  std::vector<float> tile(kv::TILE * dim + kv::OVER);
  for (int64_t i = 0; i < count; i += kv::TILE) {
    const int some = (int)std::min<int64_t>(kv::TILE, count - i);
    kv::READERS[role->reader].unpack(
        {page, tables, role->planes, role->options, (int)dim, (int)(first + i), some, tile.data()});
    for (int t = 0; t < some; ++t) kv::reorder(*role, tile.data() + t * dim, (int)dim, true);
    memcpy(out + i * dim, tile.data(), sizeof(float) * some * dim);
  }
}
}
#pragma GCC visibility pop
