// OCTOPUS keys (codecs/octopus.py): triplets of a rotated unit vector, the direction by octahedral coordinates, the
// length along it.
#pragma once
#include "encode_sums.cuh"
#include "encode_table.cuh"
#include "split_words.cuh"

namespace kv {

// A row's codes in the bytes of codecs/octopus.py: lanes of a team take a word at a time.
template <int COUNT, int BITS, int LOW> struct StoreParts {
  using Order = SplitWords<COUNT, BITS, LOW>;

  // 32 bits of a part from bit `from` on, zeros behind its end
  KV_DEV static uint32_t word(const uint16_t* codes, int part, int from) {
    const uint16_t* mine = codes + Order::first(part);
    const int n = Order::LEAST + Order::longer(part), whole = LOW ? 0 : n;
    uint32_t bits = 0;
    auto put = [&](uint32_t x, int at) {
      int d = at - from;
      if (d >= 0 && d < 32) bits |= x << d;
      if (d < 0 && d > -16) bits |= x >> -d;
    };
    KV_NO_UNROLL for (int k = from / BITS; k < whole && BITS * k < from + 32; k++) put(mine[k], BITS * k);
    if constexpr (LOW > 0) {
      constexpr int UPPER = Order::UPPER, AFTER = UPPER * Order::LEAST;
      KV_NO_UNROLL for (int k = from / UPPER; k < Order::LEAST && UPPER * k < from + 32; k++) {
        put(mine[k] >> LOW, UPPER * k);
      }
      int k = from > AFTER ? (from - AFTER) / LOW : 0;
      KV_NO_UNROLL for (; k < Order::LEAST && AFTER + LOW * k < from + 32; k++) {
        put(mine[k] & ((1u << LOW) - 1), AFTER + LOW * k);
      }
      if (n > Order::LEAST) put(mine[Order::LEAST], BITS * Order::LEAST);
    }
    return bits;
  }
  KV_DEV static uint32_t tail_word(const uint16_t* codes, int w) {
    uint32_t bits = 0;
    KV_NO_UNROLL for (int part = 0; part < 4; part++) {
      int d = Order::tail_bit(part) - 32 * w;
      if (d >= 32) break;
      uint32_t x = word(codes, part, 32 * Order::WORDS + (d < 0 ? -d : 0));
      bits |= d > 0 ? x << d : x;
    }
    return bits;
  }

  template <int N>
  KV_DEV static void row(uint8_t* const (&at)[N], const uint16_t* codes, int part, uint32_t keep, bool live) {
    constexpr int WORDS = Order::WORDS, ALL = 4 * WORDS + (Order::TAIL + 3) / 4;
    KV_NO_UNROLL for (int w = part; w < ALL && live; w += 8) {
      if (w < 4 * WORDS) {
        ((uint32_t*)at[0])[w] = word(codes, w / (WORDS > 0 ? WORDS : 1), w % (WORDS > 0 ? WORDS : 1) * 32) & keep;
      } else if constexpr (Order::TAIL > 0) {
        store_word<Order::TAIL>(at[WORDS > 0], w - 4 * WORDS, tail_word(codes, w - 4 * WORDS) & keep);
      }
    }
  }
};

enum Rounding { ROUND_SCALAR, ROUND_2X2, ROUND_3X3, ROUND_FULL };  // codecs/octopus.py, Octopus.rounding

// Table: Levels<DIR> of an octahedral coordinate (ROUND_3X3: the walls are the levels but the outer two), Levels<NRM>
// of a length, float directions[2^DIR / 2][2^DIR / 2][COPIES][4]: those of positive coordinates, the fourth float 0.
// Levels are symmetric, so the other directions differ in signs; eight copies have no bank conflicts.
template <int D, int DIR, int NRM, bool WIDE, int ROUNDING> struct OctopusRow : TableRow {
  KV_CONST int DIM = D;
  KV_CONST int TRIPLETS = (D + 2) / 3;
  KV_CONST int BITS = 2 * DIR + NRM;
  using Store = StoreParts<TRIPLETS, BITS, (BITS > JOINT_BITS ? NRM : 0)>;
  using Order = typename Store::Order;
  KV_CONST int PLANES = Order::PLANES + 1;
  KV_FUNCTION int plane_bytes(int p) { return p < Order::PLANES ? Order::plane_bytes(p) : WIDE ? 4 : 2; }
  KV_CONST int LEVELS = 1 << DIR;
  KV_CONST int LENGTHS = Levels<DIR>::BYTES;
  KV_CONST int DIRECTIONS = LENGTHS + Levels<NRM>::BYTES;
  KV_CONST int HALF = LEVELS / 2;
  KV_CONST int COPIES = DIR <= 5 ? 8 : DIR == 6 ? 4 : 1;
  KV_CONST int BYTES = DIRECTIONS + 16 * COPIES * HALF * HALF;
  KV_CONST int TABLE = BYTES;
  // a row of floats; the 24 spread the rows' triplets over all banks, and hold the zeros behind the last channel
  KV_CONST int STRIDE = D + 24;
  KV_CONST int ROOM = stream_room(TRIPLETS);
  KV_CONST int ROWS = 4 * 4 * STRIDE;
  KV_CONST int SCRATCH = ROWS + 4 * 2 * ROOM;

  struct alignas(16) Four { float x, y, z, w; };

  KV_DEV static void quad(const float (&y)[D / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES],
                          const uint8_t* table, uint8_t* scratch) {
    uint16_t* codes = round_row(y, part, keep, live, at, table, scratch);
    Store::row(at, codes, part, keep, live);
    sync_warp();
  }

  // codes of the row in shared memory, and its norm
  template <int N>
  KV_DEV static uint16_t* round_row(const float (&y)[D / 8], int part, uint32_t keep, bool live,
                                    uint8_t* const (&at)[N], const uint8_t* table, uint8_t* scratch) {
    int row = thread() % 32 / 8;
    float* mine = (float*)scratch + row * STRIDE;
    uint16_t* codes = (uint16_t*)(scratch + ROWS) + row * ROOM;
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      // + 0: -0 becomes +0, whose sign is the reference's
      *(Four*)(mine + 32 * i + 4 * part) = {add(y[4 * i], 0.0f), add(y[4 * i + 1], 0.0f), add(y[4 * i + 2], 0.0f),
                                            add(y[4 * i + 3], 0.0f)};
    }
    if (part < 3 * TRIPLETS - D) mine[D + part] = 0.0f;
    double gamma = sqrt(sum_of_squares(y));
    store_norm<WIDE>(at[PLANES - 1], div(gamma, root(D)), part, keep, live);
    float wide = (float)gamma;
    float inverse = wide > TINY_ROW ? rcp_fast(wide) : bits_float(0x7fffffffu);  // a NaN: never sure
    sync_warp();
    KV_NO_UNROLL for (int first = 0; first < TRIPLETS; first += 8) {
      int i = first + part;
      uint32_t code = 0;
      if (i < TRIPLETS) {
        float t[3] = {mine[3 * i], mine[3 * i + 1], mine[3 * i + 2]};
        bool sure = ROUNDING == ROUND_3X3;
        if (sure) code = guess(table, t, inverse, sure);
        if (!sure) code = exact(table, t, gamma);
      }
      codes[i] = (uint16_t)code;
    }
    sync_warp();
    return codes;
  }

  // that of the levels HALF + i and HALF + j
  KV_DEV static Four positive(const uint8_t* table, uint32_t i, uint32_t j) {
    return ((const Four*)(table + DIRECTIONS))[(i * HALF + j) * COPIES + (uint32_t)thread() % COPIES];
  }
  // row `at` of the reference's table
  KV_DEV static Four direction(const uint8_t* table, uint32_t at) {
    uint32_t i = at >> DIR, j = at & (LEVELS - 1);
    Four n = positive(table, i < HALF ? HALF - 1 - i : i - HALF, j < HALF ? HALF - 1 - j : j - HALF);
    n.x = i < HALF ? -n.x : n.x;
    n.y = j < HALF ? -n.y : n.y;
    return n;
  }

  // as to_square of codecs/octopus.py; the sum of magnitudes is not 0
  template <class T> KV_DEV static void square(T px, T py, bool lower, T& xi, T& eta) {
    T a = sub((T)1, magnitude(py)), b = sub((T)1, magnitude(px));
    xi = lower ? (px >= (T)0 ? a : -a) : px;
    eta = lower ? (py >= (T)0 ? b : -b) : py;
  }

  // The code in fp32. Errors, to be compared with the bounds used:
  //   xi, eta   two additions, a reciprocal within an ulp, a product, a difference: 2^-21.4   2^-20 (Levels)
  //   scores    three roundings of at most 2^-24 |t| each; of two: 2^-21.4 |t|                2^-21 (|x| + |y| + |z|)
  //   length    a score, a reciprocal and two roundings: 2^-20.8 of it                        2^-20 of the largest wall
  // With |x| and |y| the levels next to (xi, eta) are positive ones, or the first on both sides of 0.
  KV_DEV static uint32_t guess(const uint8_t* table, const float (&t)[3], float inverse, bool& sure) {
    float x = magnitude(t[0]), y = magnitude(t[1]), z = t[2];
    float size = add(add(x, y), magnitude(z));
    sure = size > TINY_ROW;  // below that a reciprocal is inaccurate
    float over = rcp_fast(size), xi, eta;
    square(mul(x, over), mul(y, over), z < 0.0f, xi, eta);
    uint32_t a = Levels<DIR>::guess(table, xi, sure), b = Levels<DIR>::guess(table, eta, sure);
    a = a < HALF - 1 ? HALF - 1 : a;  // for NaN
    b = b < HALF - 1 ? HALF - 1 : b;
    bool first_a = a == HALF - 1, first_b = b == HALF - 1;
    uint32_t i = first_a ? 0 : a - HALF, j = first_b ? 0 : b - HALF;
    float x_a = first_a ? -x : x, y_b = first_b ? -y : y;
    float s[4];
    KV_UNROLL for (int c = 0; c < 4; c++) {
      Four n = positive(table, c / 2 ? a + 1 - HALF : i, c % 2 ? b + 1 - HALF : j);
      s[c] = fma(n.z, z, fma(n.y, c % 2 ? y : y_b, mul(n.x, c / 2 ? x : x_a)));
    }
    bool right = s[1] > s[0], lower_right = s[3] > s[2];
    float upper = maximum(s[0], s[1]), lower = maximum(s[2], s[3]);
    bool down = lower > upper;
    float best = maximum(upper, lower);
    float second = maximum(minimum(upper, lower), down ? minimum(s[2], s[3]) : minimum(s[0], s[1]));
    sure = sure && sub(best, second) > mul(size, 0x1p-21f);
    a += down ? 1 : 0;
    b += (down ? lower_right : right) ? 1 : 0;
    a = t[0] < 0.0f ? LEVELS - 1 - a : a;
    b = t[1] < 0.0f ? LEVELS - 1 - b : b;
    uint32_t length = Levels<NRM>::guess(table + LENGTHS, mul(best, inverse), sure);
    return (a << DIR | b) << NRM | length;
  }

  // the code as the reference finds it
  KV_DEV static uint32_t exact(const uint8_t* table, const float (&t)[3], double gamma) {
    double x = 0.0, y = 0.0, z = 0.0;
    if (gamma > 0.0) x = div((double)t[0], gamma), y = div((double)t[1], gamma), z = div((double)t[2], gamma);
    double size = add(add(magnitude(x), magnitude(y)), magnitude(z));
    if (size < 1e-300) size = 1e-300;
    double xi, eta;
    square(div(x, size), div(y, size), z < 0.0, xi, eta);
    uint32_t a = Levels<DIR>::find(table, xi), b = Levels<DIR>::find(table, eta), chosen = a << DIR | b;
    double length;
    if (ROUNDING == ROUND_SCALAR) {
      length = sqrt(add(add(mul(x, x), mul(y, y)), mul(z, z)));
    } else {
      constexpr uint32_t LAST = LEVELS - 1, SIDE = ROUNDING == ROUND_FULL ? LEVELS : 2;
      if (ROUNDING == ROUND_FULL) a = b = 0;
      double best = -1e300;
      KV_NO_UNROLL for (uint32_t c = 0; c < SIDE * SIDE; c++) {
        uint32_t i = a + c / SIDE, j = b + c % SIDE;
        i = i < LAST ? i : LAST;
        j = j < LAST ? j : LAST;
        Four n = direction(table, i << DIR | j);
        double score = add(add(mul((double)n.x, x), mul((double)n.y, y)), mul((double)n.z, z));
        if (score > best) best = score, chosen = i << DIR | j;
      }
      length = best < 0.0 ? 0.0 : best > 1.0 ? 1.0 : best;
    }
    return chosen << NRM | Levels<NRM>::find(table + LENGTHS, length);
  }
};

}  // namespace kv
