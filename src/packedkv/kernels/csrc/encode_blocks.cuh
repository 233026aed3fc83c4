// Encoding of token blocks: groups of neighbouring tokens of one channel (GroupInt and InnerQ along tokens).
//
//     #include "encode_blocks.cuh"
//     using Block = kv::EncodeTokensInt<128, 2, 32, false>;
//     KV_KERNEL void KV_BOUNDS(Block::THREADS, 1) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs args) {
//       kv::encode_blocks<Block>(args, args.key);
//     }
//
//   EncodeTokensInt<D, BITS, GROUP, SYMMETRIC>            GroupInt(BITS, GROUP, "tokens", SYMMETRIC)
//   EncodeTokensInnerq<D, BITS, READING, HYBRID>          InnerQ(BITS, "tokens", READING, HYBRID)
//   encode_blocks<Block, FACTOR>                          FACTOR as in Role
//
// Grid (x, B, 1), any x >= 1; ceil(H * tokens / GROUP) gives every block of threads one step. THREADS = 2 D threads, no
// dynamic shared memory. `tokens` and first[b] are multiples of GROUP, and so is page_tokens.
//
// A block of tokens with a row that cannot be held (NaN, Inf, above 65504) is stored as zeros, and raises *bad to 1;
// one that passes the capacity is not stored and raises *bad to 2.
//
// Four channels to a thread, tokens split into eight lots: lot l holds tokens l, l + 8, l + 16 ... That is the order in
// which ops/sums.py adds 32 squared errors by halves: within a thread first, the last three steps across lots.
#pragma once
#include "encode_innerq.cuh"

namespace kv {

constexpr int LOTS = 8;

// OTHER: the grid of the alternative to GRID, or void; the one with the smaller squared error is kept, OTHER by the
// scale's sign bit
template <int DIMENSION, int GROUP, class GRID, class OTHER> struct EncodeTokens {
  KV_CONST int D = DIMENSION, G = GROUP, THREADS = D / 4 * LOTS, EACH = (G + LOTS - 1) / LOTS;
  KV_CONST bool HYBRID = !IsVoid<OTHER>::YES;
  KV_CONST bool ZERO = GRID::HAS_ZERO || HYBRID;
  KV_CONST int PLANES = ZERO ? 3 : 2;
  using Main = GRID;
  using Other = OTHER;
  static_assert(!HYBRID || G == 32, "the order of sums is that of 32 tokens");
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? G * D * GRID::WIDTH / 8 : 2 * D; }
};

template <int D, int BITS, int GROUP, bool SYMMETRIC>
using EncodeTokensInt = EncodeTokens<D, GROUP, IntGrid<BITS, SYMMETRIC>, void>;
template <int D, int BITS, int READING, bool HYBRID>
using EncodeTokensInnerq = EncodeTokens<D, 32, InnerqGrid<BITS, READING>, either<HYBRID, IntGrid<BITS, false>, void>>;

// encoding parameters of a channel's group, in shared memory
template <class B> struct BlockShared {
  union {  // the extremes are no longer needed when the errors are computed
    struct {
      float low[LOTS][B::D], high[LOTS][B::D];
    };
    double error[B::HYBRID ? 2 : 1][LOTS][B::HYBRID ? B::D : 1];  // of Main, of Other
  };
  float scale[B::D], zero[B::D], other[B::HYBRID ? B::D : 1];
  uint32_t bad[B::THREADS / 32];
};

template <class GRID> KV_DEV float decoded(uint32_t code, float s, float z) {
  float q = (float)((int32_t)(code & ((1u << GRID::WIDTH) - 1)) - GRID::OFFSET);
  return GRID::HAS_ZERO ? add(mul(q, s), z) : mul(q, s);
}
KV_DEV double squared(float x) { return mul((double)x, (double)x); }

// tokens t, t + 8, t + 16, t + 24 as sum_by_halves adds them
KV_DEV double sum_lot(const double (&e)[4]) { return add(add(e[0], e[2]), add(e[1], e[3])); }
template <int D> KV_DEV double sum_lots(const double (&e)[LOTS][D], int c) {
  return add(add(add(e[0][c], e[4][c]), add(e[2][c], e[6][c])), add(add(e[1][c], e[5][c]), add(e[3][c], e[7][c])));
}

template <class B, int FACTOR = FACTOR_NONE> KV_DEV void encode_blocks(const EncodeArgs& a, const EncodeSide& s) {
  using Main = typename B::Main;
  using Other = either<B::HYBRID, typename B::Other, Main>;
  constexpr int D = B::D, EACH = B::EACH, WIDTH = Main::WIDTH;
  KV_SHARED(BlockShared<B>, all, 1);
  BlockShared<B>& m = all[0];
  int quad = thread() % (D / 4), lot = thread() / (D / 4), b = block_y(), c0 = 4 * quad;
#ifndef KV_SLOTS
  int64_t first_slot = s.first[b];
#endif
  int32_t per_head = (int32_t)(s.tokens / B::G);
  for (int64_t unit = block_x(); unit < (int64_t)per_head * a.heads; unit += grid_x()) {
    int head = (int)(unit / per_head);
    int64_t n = unit % per_head * B::G;
#ifdef KV_SLOTS
    const int64_t slot = a.slots[n];  // that of a group's first token counts
    if (slot < 0) continue;
#else
    const int64_t slot = first_slot + n;
    if (slot + B::G > a.capacity) {
      if (thread() == 0) raise(a.bad, 2);
      continue;
    }
#endif
    uint8_t* at[B::PLANES];
    locate<B, B::G>(at, a, s, b, head, (uint32_t)slot);
    float y[EACH][4], low[4], high[4];
    bool good = true;
    KV_UNROLL for (int j = 0; j < EACH; j++) {
      int t = lot + LOTS * j;
      if (t >= B::G) t = lot % B::G;  // repeats a token of the block, which changes neither minimum nor maximum
      int64_t at = b * s.batch + head * s.head + (n + t) * s.token;
      load_row<8>(y[j], s.x, at + c0 / 32 * 32, quad % 8, a.kind);
      KV_UNROLL for (int e = 0; e < 4; e++) good &= magnitude(y[j][e]) <= HALF_MAX;
    }
    if (FACTOR != FACTOR_NONE) {
      int64_t at = b * s.factor_batch + head * D + c0;
      KV_UNROLL for (int j = 0; j < EACH; j++) {
        KV_UNROLL for (int e = 0; e < 4; e++) y[j][e] = factored<FACTOR>(y[j][e], s.factor, at + e);
      }
    }
    KV_UNROLL for (int e = 0; e < 4; e++) {
      low[e] = high[e] = y[0][e];
      KV_UNROLL for (int j = 1; j < EACH; j++) low[e] = minimum(low[e], y[j][e]), high[e] = maximum(high[e], y[j][e]);
      m.low[lot][c0 + e] = low[e];
      m.high[lot][c0 + e] = high[e];
    }
    uint32_t wrong = ballot(!good);
    if (thread() % 32 == 0) m.bad[thread() / 32] = wrong;
    sync_threads();

    uint32_t keep = 0xffffffffu;
    KV_UNROLL for (int w = 0; w < B::THREADS / 32; w++) keep = m.bad[w] ? 0u : keep;
    if (keep == 0 && thread() == 0) raise(a.bad, 1);

    int c = thread();
    uint32_t scale = 0, zero = 0, other = 0;
    if (c < D) {  // the numbers of channel c
      float lowest = m.low[0][c], highest = m.high[0][c], z = 0.0f;
      KV_UNROLL for (int l = 1; l < LOTS; l++) {
        lowest = minimum(lowest, m.low[l][c]);
        highest = maximum(highest, m.high[l][c]);
      }
      if (B::ZERO) {
        zero = half_bits(minimum(maximum(lowest, -HALF_MAX), HALF_MAX));
        z = half_float((uint16_t)zero);
        m.zero[c] = z;
      }
      if (Main::HAS_ZERO) scale = held_scale<Main::STEPS>(sub(highest, z), z);
      else scale = held_scale<Main::STEPS>(maximum(highest, -lowest), 0.0f);
      m.scale[c] = half_float((uint16_t)scale);
      if constexpr (B::HYBRID) {
        other = held_scale<Other::STEPS>(sub(highest, z), z);
        m.other[c] = half_float((uint16_t)other);
      } else {
        ((uint16_t*)at[1])[c] = (uint16_t)(scale & keep);
        if constexpr (B::ZERO) ((uint16_t*)at[2])[c] = (uint16_t)(zero & keep);
      }
    }
    sync_threads();

    uint32_t code[EACH][4];
    KV_UNROLL for (int e = 0; e < 4; e++) {
      float held = m.scale[c0 + e], r = rcp_fast(held), z = B::ZERO ? m.zero[c0 + e] : 0.0f;
      KV_UNROLL for (int j = 0; j < EACH; j++) code[j][e] = Main::code(y[j][e], held, r, z);
    }
    if constexpr (B::HYBRID) {
      uint32_t other_code[EACH][4];
      KV_UNROLL for (int e = 0; e < 4; e++) {
        float held = m.scale[c0 + e], t = m.other[c0 + e], r = rcp_fast(t), z = m.zero[c0 + e];
        double error[EACH], other_error[EACH];
        KV_UNROLL for (int j = 0; j < EACH; j++) {
          other_code[j][e] = Other::code(y[j][e], t, r, z);
          error[j] = squared(sub(decoded<Main>(code[j][e], held, 0.0f), y[j][e]));
          other_error[j] = squared(sub(decoded<Other>(other_code[j][e] & ((1u << Other::WIDTH) - 1), t, z), y[j][e]));
        }
        m.error[0][lot][c0 + e] = sum_lot(error);
        m.error[1][lot][c0 + e] = sum_lot(other_error);
      }
      sync_threads();
      if (c < D) {
        bool better = sum_lots(m.error[1], c) < sum_lots(m.error[0], c);
        m.scale[c] = better ? -1.0f : 1.0f;
        ((uint16_t*)at[1])[c] = (uint16_t)((better ? other | 0x8000 : scale) & keep);
        ((uint16_t*)at[2])[c] = (uint16_t)(zero & keep);
      }
      sync_threads();
      KV_UNROLL for (int e = 0; e < 4; e++) {
        bool better = m.scale[c0 + e] < 0.0f;
        KV_UNROLL for (int j = 0; j < EACH; j++) code[j][e] = better ? other_code[j][e] : code[j][e];
      }
    }
    KV_UNROLL for (int j = 0; j < EACH; j++) {
      int t = lot + LOTS * j;
      uint8_t* to = at[0] + t * (D * WIDTH / 8) + c0 / 32 * 4 * WIDTH;
      store_quad<WIDTH>(to, quad % 8, code[j][0], code[j][1], code[j][2], code[j][3], keep, t < B::G);
    }
    sync_threads();  // before the next block overwrites what this one shares
  }
}

}  // namespace kv
