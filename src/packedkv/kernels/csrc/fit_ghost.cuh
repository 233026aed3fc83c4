// Constants of ghost (codecs/ghost.py, transform=channels) for one head of one sequence, fitted on its first tokens:
// the mean of keys before RoPE, what channels usually measure, their places, widths and weights, and the tables and
// factors that read_ghost.cuh and encode_ghost.cuh take. In double and operation by operation as the reference does it,
// sums by halves, so the numbers are the reference's.
//
//     KV_KERNEL void KV_BOUNDS(512, 1) kv_fit(KV_GRID_CONSTANT kv::FitGhostLayers a) {
//       if (kv::block_z() % 2 == 0) kv::FitGhost<128, 6, false>::fit(a.key, a, a.keys);
//       if (kv::block_z() % 2 == 1) kv::FitGhost<128, 6, true>::fit(a.value, a, a.values);
//     }
//
// Grid (H, B, 2 layers).
#pragma once
#include "basis.cuh"
#include "encode_ghost.cuh"
#include "read_ghost.cuh"

namespace kv {

// A role of all layers of a launch. What is written is that of the first of them. Read by kernels/structs.py
struct FitGhostArgs {
  const int32_t* padding;   // [B] tokens before the sample; null: none
  const float *cosines, *sines;            // [1 or B, n, R / 2] of RoPE, from x's first token on;
                                           // null: the mean stays in the tokens
  const float *back_cosines, *back_sines;  // of the inverse rotation; null: the same angles, mirrored
  const float* same;        // levels [256], cuts [256], walls of one channel [14], scales [16]
  float* rows;              // [layers, B, H, tokens, D] scratch
  float* mean;              // [B, H, D] before RoPE; null without
  int16_t* order;           // [B, H, D] by place, and so are factor, weight, centre (null for keys)
  float *factor, *weight, *centre;
  uint8_t* widths;          // [B, H, D]
  float *sizes, *inverse;   // [B, H, D] of the model's channels: what the kernels multiply by
  uint8_t *read, *write;    // tables, [B, H, bytes] each
  int64_t batch, head, token;          // strides of x in numbers
  int64_t turn_batch, turn_token;      // of the cosines and sines
  int64_t every;            // what is taken behind the padding: every token, every second, and so on
  double errors[8];         // d(w)
  double trim, smallest;    // TRIM D, SMALLEST
  int32_t kind;             // of x: 0 fp16, 1 bf16
  int32_t tokens;           // how many are taken
  int32_t heads;
  int32_t turning, interleaved;        // R; 1: channels 2 p and 2 p + 1 turn together, 0: p and p + R / 2
  int32_t rounds;           // in which tokens are left out
};

struct FitGhostLayers {
  FitGhostArgs key, value;
  int64_t step;             // bytes from what is written of a layer to that of the next one
  // of each layer: tokens [B, H, n, D], model basis, channels contiguous, n > padding + every (tokens - 1), null: the
  // role is not fitted; mean squares of the queries [H, D], null: keys alone say what an error costs
  const void *keys[128], *values[128];
  const double* energies[128];
};
static_assert(sizeof(FitGhostLayers) <= 4096, "arguments of a kernel");

template <int D, int TWICE, bool VALUES> struct FitGhost {
  using Reader = ReadGhost<D, TWICE, VALUES>;
  using Row = GhostRow<D, TWICE>;
  KV_CONST int PARTS = D <= 64 ? 8 : D <= 128 ? 4 : 2, THREADS = PARTS * D, WARPS = THREADS / 32;
  using Pairs = GhostPairs<TWICE>;
  KV_CONST int PAIRS = D / 2, FULL = PAIRS - 4;  // pairs, and those that give no bit to the scale
  KV_CONST int RUNS = D <= 64 ? 2 : D <= 128 ? 4 : 8;  // of 32 channels, a power of two
  KV_CONST int MOST_TOKENS = 256;

  // sum of leaf(token) over the tokens of a channel, by halves. Thread part * D + channel sums every PARTS-th token.
  // The tree has no loop, so that its loads are under way together; tokens behind the last are zeros
  template <int FIRST, int STEP, int COUNT, class Leaf>
  KV_DEV static double tree(int tokens, int part, const Leaf& leaf) {
    if constexpr (COUNT == 1) {
      const int i = FIRST * PARTS + part;
      return i < tokens ? leaf(i) : 0.0;
    } else {
      return add(tree<FIRST, 2 * STEP, COUNT / 2>(tokens, part, leaf),
                 tree<FIRST + STEP, 2 * STEP, COUNT / 2>(tokens, part, leaf));
    }
  }
  template <class Leaf> KV_DEV static double over_tokens(int tokens, double* sums, const Leaf& leaf) {
    const int part = thread() / D;
    sums[thread()] = tree<0, 1, MOST_TOKENS / PARTS>(tokens, part, leaf);
    for (int half = PARTS / 2; half; half /= 2) {
      sync_threads();
      if (part < half) sums[thread()] = add(sums[thread()], sums[thread() + half * D]);
    }
    sync_threads();
    const double total = sums[thread() % D];
    sync_threads();
    return total;
  }

  // sums of leaf(n, channel) over the channels, by halves, of N rows at once, in every lane of a warp
  template <int N, class Leaf> KV_DEV static void over_channels(double (&sum)[N], const Leaf& leaf) {
    const int lane = thread() % 32;
    double run[N][RUNS];
    KV_UNROLL
    for (int n = 0; n < N; ++n) {
      KV_UNROLL
      for (int i = 0; i < RUNS; ++i) run[n][i] = 32 * i < D ? leaf(n, 32 * i + lane) : 0.0;
    }
    KV_UNROLL
    for (int n = 0; n < N; ++n) {
      KV_UNROLL
      for (int half = RUNS / 2; half; half /= 2) {
        KV_UNROLL
        for (int i = 0; i < half; ++i) run[n][i] = add(run[n][i], run[n][i + half]);
      }
      sum[n] = run[n][0];
    }
    KV_UNROLL
    for (int mask = 16; mask; mask /= 2) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) sum[n] = add(sum[n], shfl_xor(sum[n], mask));
    }
  }

  // without a branch, so that loads are under way together
  KV_DEV static float number(const void* x, int64_t at, int kind) {
    const uint16_t bits = ((const uint16_t*)x)[at];
    const float half = half_float(bits), bf16 = bf16_float(bits);
    return kind ? bf16 : half;
  }

  // whether a comes before b where numbers fall, the first of equals first; NaN before all, so that places are distinct
  KV_DEV static bool before(double a, int i, double b, int j) {
    const bool alike = a == b || (a != a && b != b);
    return alike ? i < j : a > b || (a != a && b == b);
  }

  // RoPE of channel c: a mean, or the inverse of a key
  struct Turn {
    int other, pair;  // the channel that turns with c; its pair, below 0: none
    bool second;
    KV_DEV Turn(int c, int turning, bool interleaved) {
      const int half = turning / 2;
      second = interleaved ? c % 2 : c >= half;
      other = interleaved ? c ^ 1 : second ? c - half : c + half;
      pair = c >= turning ? -1 : interleaved ? c / 2 : second ? c - half : c;
    }
    KV_DEV float of(float x, float with, float cosine, float sine) const {
      return second ? add(mul(x, cosine), mul(with, sine)) : sub(mul(x, cosine), mul(with, sine));
    }
  };

  // where a layer's part of what is written begins
  template <class T> KV_DEV static T* at_layer(T* first, int64_t behind) { return (T*)((uint8_t*)first + behind); }

  KV_DEV static void fit(const FitGhostArgs& a, const FitGhostLayers& all, const void* const (&tokens)[128]) {
    const int layer = block_z() / 2;
    if (tokens[layer]) run(a, tokens[layer], VALUES ? nullptr : all.energies[layer], layer, layer * all.step);
  }

  KV_DEV static void run(const FitGhostArgs& a, const void* x_of, const double* energy, int layer, int64_t behind) {
    KV_SHARED(double, sums, THREADS);
    KV_SHARED(double, means, D);
    KV_SHARED(double, variances, D);
    KV_SHARED(double, costs, D);
    KV_SHARED(double, sorted, D);
    KV_SHARED(int32_t, rises, 8);
    KV_SHARED(double, level, 2);
    KV_SHARED(float, mu, D);
    KV_SHARED(uint8_t, kept, MOST_TOKENS);
    KV_SHARED(uint8_t, order, D);
    KV_SHARED(uint8_t, place_of, D);
    KV_SHARED(uint8_t, kinds, PAIRS);
    KV_SHARED(float, factors, D);
    KV_SHARED(float, centres, D);
    KV_SHARED(float, weights, D);
    const int h = block_x(), b = block_y(), c = thread() % D, part = thread() / D, warp = thread() / 32;
    const int tokens = a.tokens, skip = a.padding ? a.padding[b] : 0;
    const int64_t head = (int64_t)b * a.heads + h;
    const int64_t from = b * a.batch + h * a.head + skip * a.token, angle = b * a.turn_batch + skip * a.turn_token;
    const int64_t next = a.every * a.token, next_angle = a.every * a.turn_token;  // from one token to the other
    float* rows = a.rows + ((int64_t)layer * grid_y() * a.heads + head) * tokens * D;
    const Turn turn(c, a.turning, a.interleaved);

    // -- the mean before RoPE, and the tokens without it
    if (a.cosines) {
      const bool own = a.back_cosines != nullptr;  // or the same angles, mirrored
      const float *cosines = own ? a.back_cosines : a.cosines, *sines = own ? a.back_sines : a.sines;
      const float sign = own ? 1.0f : -1.0f;
      KV_UNROLL_8
      for (int i = part; i < tokens; i += PARTS) {
        float x = number(x_of, from + i * next + c, a.kind);
        if (turn.pair >= 0) {
          const int64_t at = angle + i * next_angle + turn.pair;
          x = turn.of(x, number(x_of, from + i * next + turn.other, a.kind), cosines[at], mul(sign, sines[at]));
        }
        rows[i * D + c] = x;
      }
      const double sum = over_tokens(tokens, sums, [&](int i) { return (double)rows[i * D + c]; });
      if (part == 0) at_layer(a.mean, behind)[head * D + c] = mu[c] = (float)div(sum, (double)tokens);
      sync_threads();
    }
    KV_UNROLL_8
    for (int i = part; i < tokens; i += PARTS) {
      float x = number(x_of, from + i * next + c, a.kind);
      if (a.cosines) {
        float own = mu[c];
        if (turn.pair >= 0) {
          const int64_t at = angle + i * next_angle + turn.pair;
          own = turn.of(own, mu[turn.other], a.cosines[at], a.sines[at]);
        }
        x = sub(x, own);
      }
      rows[i * D + c] = x;
    }
    for (int i = thread(); i < MOST_TOKENS; i += THREADS) kept[i] = i < tokens;
    sync_threads();

    // -- mean and variance of each channel, without tokens unlike all others
    double mean = 0.0, variance = 1.0;
    KV_NO_UNROLL
    for (int round = 0; round <= a.rounds; ++round) {
      uint32_t some = 0;
      KV_UNROLL
      for (int i = 0; i < MOST_TOKENS / 16; ++i) {
        const Words4 four = ((const Words4*)kept)[i];
        some = dot4(four.a, 0x01010101u, dot4(four.b, 0x01010101u, some));
        some = dot4(four.c, 0x01010101u, dot4(four.d, 0x01010101u, some));
      }
      const double count = some > 1 ? (double)some : 1.0;
      if (VALUES) {
        mean = over_tokens(tokens, sums, [&](int i) { return mul((double)rows[i * D + c], (double)kept[i]); });
        mean = div(mean, count);
      }
      variance = div(over_tokens(tokens, sums, [&](int i) {
        const double x = sub((double)rows[i * D + c], mean);
        return mul(mul(x, x), (double)kept[i]);
      }), count);
      if (part == 0) means[c] = mean, variances[c] = variance;
      sync_threads();
      if (!VALUES) {
        variance = mul(add(variances[c % (D / 2)], variances[c % (D / 2) + D / 2]), 0.5);
        sync_threads();
        if (part == 0) variances[c] = variance;
        sync_threads();
      }
      if (warp == 0) {
        double sum[1];
        over_channels(sum, [&](int, int k) { return variances[k]; });
        if (thread() == 0) level[0] = div(sum[0], (double)D);
      }
      sync_threads();
      variance = level[0] > 0.0 ? maximum(variance, div(level[0], count)) : 1.0;
      if (part == 0) variances[c] = variance;
      sync_threads();
      if (round == a.rounds) break;
      constexpr int AT_ONCE = D <= 128 ? 4 : 2;
      KV_NO_UNROLL
      for (int i = AT_ONCE * warp; i < tokens; i += AT_ONCE * WARPS) {
        double sum[AT_ONCE];
        over_channels(sum, [&](int n, int k) {
          const int own = i + n < tokens ? i + n : i;
          const double x = sub((double)rows[own * D + k], means[k]);
          return div(mul(x, x), variances[k]);
        });
        KV_UNROLL
        for (int n = 0; n < AT_ONCE; ++n)
          if (thread() % 32 == 0 && i + n < tokens) kept[i + n] = sum[n] <= a.trim;
      }
      sync_threads();
    }

    // -- channels by what their errors cost
    const double deviation = sqrt(variance), size = maximum(deviation, a.smallest);
    double cost = mul(size, size);
    if (!VALUES && energy) {
      const double *own = energy + h * D + c % (D / 2), root = sqrt(mul(add(own[0], own[D / 2]), 0.5));
      cost = mul(cost, mul(root, sqrt(root)));
    } else if (!VALUES) {
      cost = mul(cost, deviation);
    }
    if (part == 0) costs[c] = cost;
    sync_threads();
    int rank = 0;
    for (int k = 0; k < D; ++k) rank += before(costs[k], k, cost, c);
    if (part == 0) sorted[rank] = cost;
    sync_threads();

    // -- pairs of the loudest with the quietest channel: how far each kind goes, which is whose, and where it stands
    for (int k = thread() + 1; k < Pairs::FULL; k += THREADS) {
      const double gain = sub(a.errors[Pairs::high(k - 1)], a.errors[Pairs::high(k)]);
      const double loss = sub(a.errors[Pairs::low(k)], a.errors[Pairs::low(k - 1)]);
      int count = 0;
      for (int i = 0; i < FULL; ++i) count += mul(sorted[i], gain) > mul(sorted[D - 1 - i], loss);
      rises[k] = count;
    }
    sync_threads();
    for (int i = thread(); i < PAIRS; i += THREADS) {
      const int first = TWICE % 2 == 0 ? rises[1] : FULL;  // of the short pairs
      const int behind = i < first ? i : i - 4;
      const bool brief = i >= first && i < first + 4;
      int kind = 0;
      for (int k = 1; k < Pairs::FULL; ++k) kind += behind < rises[k];
      const int field = brief ? FULL + i - first : field_of(behind);
      kinds[field] = (uint8_t)(brief ? Pairs::FULL : kind);
      place_of[i] = (uint8_t)(2 * field), place_of[D - 1 - i] = (uint8_t)(2 * field + 1);
    }
    sync_threads();
    if (part == 0) {
      const int place = place_of[rank];
      order[place] = (uint8_t)c, factors[place] = (float)div(1.0, size), centres[place] = (float)div(mean, size);
      weights[place] = sorted[0] > 0.0 ? (float)div(cost, sorted[0]) : 1.0f;
    }
    sync_threads();
    put(a, behind, head, order, kinds, factors, centres, weights);
  }

  // the field of a pair, one of those that are not short: the quarters of a row in turn
  KV_DEV static int field_of(int i) {
    const int turns = D / 8 - 4, left = i - 4 * turns;  // in the last four turns the last quarter has short pairs
    return left < 0 ? i % 4 * (D / 8) + i / 4 : left % 3 * (D / 8) + turns + left / 3;
  }

  // the constants, and the tables and factors of the kernels
  KV_DEV static void put(const FitGhostArgs& a, int64_t behind, int64_t head, const uint8_t* order,
                         const uint8_t* kinds, const float* factors, const float* centres, const float* weights) {
    uint8_t *read = a.read + behind + head * Reader::SOURCE, *write = a.write + behind + head * Row::TABLE;
    int16_t* orders = at_layer(a.order, behind);
    uint8_t* widths = a.widths + behind;
    float *factor_of = at_layer(a.factor, behind), *weight_of = at_layer(a.weight, behind);
    float *sizes = at_layer(a.sizes, behind), *inverse = at_layer(a.inverse, behind);
    int coded = 0;  // places with bits
    for (int p = 0; p < PAIRS; ++p) coded += 1 + (Pairs::low(kinds[p]) > 0);
    for (int i = thread(); i < D; i += THREADS) {
      const int64_t at = head * D + i, model = head * D + order[i];
      const int width = i % 2 ? Pairs::low(kinds[i / 2]) : Pairs::high(kinds[i / 2]);
      orders[at] = order[i], factor_of[at] = factors[i], weight_of[at] = weights[i], widths[at] = (uint8_t)width;
      inverse[model] = factors[i], sizes[model] = div(1.0f, factors[i]);
      read[i] = write[Row::ORDER + i] = order[i], write[Row::WIDTHS + i] = (uint8_t)width;
      ((float*)(write + Row::WEIGHT))[i] = weights[i];
      ((float*)(write + Row::CENTRE))[i] = VALUES ? centres[i] : 0.0f;
      if (VALUES) at_layer(a.centre, behind)[at] = ((float*)(read + Reader::CENTRE))[i] = centres[i];
    }
    for (int i = thread(); i < Reader::CENTRE - D; i += THREADS) read[D + i] = i < PAIRS ? kinds[i] : 0;
    for (int i = thread(); i < Row::TABLE - Row::WIDTHS - D; i += THREADS) write[Row::WIDTHS + D + i] = 0;
    for (int i = thread(); i < 512; i += THREADS) ((float*)write)[i] = a.same[i];
    for (int i = thread(); i < 16; i += THREADS) {
      ((float*)(write + Row::WALLS))[i] = i < 14 ? mul((float)coded, a.same[512 + i]) : bits_float(0x7f800000u);
      ((float*)(write + Row::SCALES))[i] = a.same[526 + i];
    }
  }
};

}  // namespace kv
