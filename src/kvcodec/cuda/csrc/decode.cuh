// Decode attention over packed pages: one query token per sequence against the codes, without a decoded copy of them.
//
// Work split. CTA (split, KV head x tile of HEADS query heads, sequence) owns a run of tiles of T tokens; its warps
// take them in turn. Each warp keeps a private ring of STAGES tiles in shared memory, filled by asynchronous copies,
// and its own online softmax; nothing in the loop waits for another warp. Tokens (for values: channels) are the 16
// rows of the tensor-core tile and the heads its 8 columns (query.cuh), so the codes go from shared memory through
// registers into the tensor core and nothing decoded is written anywhere.
//
// A codec fills it with a Reader (one for keys, one for values), see read_saw.cuh for the shortest:
//   BLOCK, PLANES, plane_bytes(p)   bytes of one block of BLOCK tokens in plane p, as the codec's layout
//   TABLE, fill(to, from, thread, threads)   bytes of its look-up tables in shared memory, and how they get there;
//                 may have REACH and Bounded, see tile.cuh
//  keys, lane = 4 g + j: a lane unpacks part j of 4 of the channels of tokens g and g + 8
//   GROUPS        groups of channels with a scale of their own; group i has the i-th run of K_REGS / GROUPS registers
//   K_REGS        half2 registers of a token and lane, a multiple of 2 GROUPS
//   k_channel(part, e), k_weight(e)   channel of element e (register e / 2, half e % 2), -1 for padding; a power of two
//                 that goes into q
//   keys(planes, table, token, part, lane, r)   raw numbers
//   k_scale(planes, token, group), k_zero(planes, token, group) if HAS_K_ZERO:   key = k_scale k_weight raw + k_zero
//   may have K_OFFSET: as k_zero = k_scale K_OFFSET, at no cost; k_scales(planes, token, s): k_scale of all groups at
//                 once, without its factor K_SCALE_UNIT
//   K_BLOCKED     scale and zero belong to a channel of 32 tokens instead: k_block(planes, block, part, s, z), K_UNIT:
//                 key = s K_UNIT k_weight raw + z; K_MIDDLE: the middle of K_UNIT k_weight raw, where q s is exact
//  values: a lane unpacks part g of 8 of the channels of tokens 2j, 2j+1, 2j+8, 2j+9
//   V_REGS, v_channel(part, e), v_weight(e), values(...), v_scale(planes, token), v_zero(planes, token) if HAS_V_ZERO:
//                 as above, any weight
//  a reader with a SCRATCH adds what is held beside the codes to scores and outputs: read_med.cuh
//   V_BLOCKED     value = s (v_weight raw + V_OFFSET) with s of v_bscales(planes, block, part, s), one per element;
//                 V_UNEVEN: where v_uneven(planes, block, part) says so for a lane of the warp, x of
//                 v_surplus(planes, block, part, x) is to be added
// Raw numbers are fp16, subnormal ones included (a code masked in place is code * 2^-24: the tensor core multiplies
// it exactly).
//
// Numbers. Scores in fp32 and powers of two; q is scaled by a power of two per head and rounded to fp16 once. P is
// fp16: an online softmax whose reference may lag behind the maximum by 2^8. Scales of values join P, relative to a
// reference of their own, so that fp16 holds them.
//
// Partials (m, l, o) of every split and of the dense tokens are merged in finish.cuh.
#pragma once
#include "finish.cuh"
#include "products.cuh"

namespace kv {

template <int D, int WARPS, bool CAP, bool BF16, int HEADS> struct DensePart;
template <class Decoder, class V, int D, int WARPS, bool CAP, bool BF16, int HEADS> struct DenseJoin;

// P tokens to a page, T to a tile; CAP: scores have a soft cap. DENSE: -1, or there are dense tokens, fp16 (even) or
// bf16, summed apart (0, 1) or, where values are not rotated, among the codes (2, 3). HEADS: 8, or 4 where no more
// query heads share a KV head
template <class KEYS, class V, int D, int P, int T, int WARPS, int STAGES, bool CAP = false, int DENSE = -1,
          int HEADS = 8>
struct Decoder {
  using K = typename KeysOf<KEYS, HEADS>::Reader;
  using Sum = Sums<V, HEADS>;
  KV_CONST int N = HEADS / 4;  // heads of a lane
  // multiples of 128: copies that straddle the lines of shared memory cost a sixth of the speed
  KV_CONST int TILE = (page_bytes<K, V>(T) + 127) / 128 * 128;
  KV_CONST int TABLES = (align16(K::TABLE) + align16(V::TABLE) + 127) / 128 * 128;
  KV_CONST int QUERY = (8 * (row_floats(query_channels<K, D>()) + 1) * 4 + 127) / 128 * 128;
  KV_CONST int SCRATCH = scratch_bytes<K>(0) > scratch_bytes<V>(0) ? scratch_bytes<K>(0) : scratch_bytes<V>(0);
  KV_CONST int LOOP = TABLES + QUERY + WARPS * (STAGES * TILE + SCRATCH);
  KV_CONST int MERGE = WARPS * 8 * (row_floats(D) + 2) * 4;  // the warps' results, in the place of all else
  KV_CONST bool APART = DENSE == 0 || DENSE == 1;
  KV_CONST int DENSE_SHARED = !APART ? 0 : DensePart<D, WARPS, CAP, DENSE == 1, HEADS>::LOOP;
  KV_CONST int OWN = LOOP > MERGE ? LOOP : MERGE;
  KV_CONST int SHARED = with_reach<K, V>(OWN > DENSE_SHARED ? OWN : DENSE_SHARED);
  KV_CONST int SUBS = T / 16;
  KV_CONST bool BLOCKED = K::K_BLOCKED || V::V_BLOCKED;
  static_assert(P % T == 0 && T % 16 == 0 && (!BLOCKED || T % 32 == 0),
                "a tile is part of a page and holds whole blocks");
  static_assert(HEADS == 8 || (HEADS == 4 && SCRATCH == 0), "outliers are added for 8 heads");

  struct State {
    Softmax<N> softmax;
    float bias[N];   // sum of p times the values' zeros
    float reference, inverse;  // of the values' scales, and one over it
    float out[V::V_REGS / 2][Sum::HALVES][4];
    float zero[4];   // paired values: sums of p times the zeros, a row for each group
  };
  KV_CONST bool PAIRED = is_paired<V>(0);
  KV_CONST bool SCALED = V::HAS_V_SCALE || PAIRED;

  // let the references follow where they lag: behind the scores' maximum, or the values' largest scale
  KV_DEV static void rescale(State& st, float (&top)[N], float largest) {
    if (!any(st.softmax.lags(top) || (SCALED && largest > 16.0f * st.reference))) return;
    float factor[N];
    st.softmax.raise(top, factor);
    if constexpr (V::HAS_V_ZERO) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) st.bias[n] *= factor[n];
    }
    if constexpr (SCALED) {
      float biggest = warp_max(largest);
      if (biggest > 16.0f * st.reference) {
        // where P is divided by the reference before scales are multiplied, both must fit fp16: 2^8 P, all scales
        if (PAIRED) biggest = minimum(maximum(biggest, 0.0078125f), 512.0f);
        // a power of two, so that scaling by it rounds nothing; not below 2^-100, whose inverse is a number as well
        const float next = bits_float(float_bits(maximum(biggest, 7.9e-31f)) & 0x7f800000u);
        st.inverse = bits_float(0x7f000000u - float_bits(next));
        KV_UNROLL
        for (int n = 0; n < N; ++n) factor[n] *= st.reference * st.inverse;
        st.reference = next;
      }
    }
    if constexpr (PAIRED) st.zero[0] *= factor[0], st.zero[1] *= factor[N - 1];
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) st.out[k][i / 4][i % 4] *= factor[Sum::head(i)];
    }
  }

  template <bool MASKED>
  KV_DEV static void tile(State& st, const Query<K, D, HEADS>& q, const DecodeArgs& a, const uint8_t* at,
                          const uint8_t* k_table, const uint8_t* v_table, int lane, int live_from,
                          int live_to, uint8_t* scratch = nullptr) {
    const Planes<K, T> keys{at};
    const Planes<V, T> values{at + planes_bytes<K>(T)};
    const int g = lane / 4;
    float s[SUBS][2 * N], vs[SUBS][2];
    uint32_t block_q[K::K_REGS];
    float block_zero[2] = {0.0f, 0.0f};
    bool more_keys = false, more_values = false;  // outliers to be added
    if constexpr (scratch_bytes<K>(0) > 0) more_keys = K::template has_outliers<T>(keys, lane);
    if constexpr (scratch_bytes<V>(0) > 0) more_values = V::template has_outliers<T>(values, lane);
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      if constexpr (K::K_BLOCKED) {
        if (sub % 2 == 0) enter_block<K, D, HEADS>(block_q, block_zero, q, keys, sub / 2, lane);
      }
      scores<K, D, HEADS, MASKED>(s[sub], q, keys, k_table, 16 * sub, lane, block_q, block_zero);
      if constexpr (scratch_bytes<K>(0) > 0) {
        if (more_keys) K::add_scores(s[sub], q.r, q.scale, keys, scratch, 16 * sub, lane);
      }
      if (CAP) soft_cap(s[sub], a.softcap);
      KV_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int token = 16 * sub + 8 * half + g;
        const bool live = !MASKED || (token >= live_from && token < live_to);
        KV_UNROLL
        for (int n = 0; n < N; ++n) s[sub][N * half + n] = live ? s[sub][N * half + n] : minus_infinity();
        if constexpr (V::HAS_V_SCALE) vs[sub][half] = live ? V::v_scale(values, token) : 0.0f;
        else vs[sub][half] = 1.0f;
      }
    }
    float top[N], largest = 0.0f;
    KV_UNROLL
    for (int n = 0; n < N; ++n) top[n] = s[0][n];
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) top[n] = maximum(top[n], maximum(s[sub][n], s[sub][N + n]));
      if (V::HAS_V_SCALE) largest = maximum(largest, maximum(vs[sub][0], vs[sub][1]));
    }
    if constexpr (PAIRED) largest = V::template largest<T, MASKED>(values, lane, live_from, live_to);
    rescale(st, top, largest);
    uint32_t p16[SUBS][2];
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      float p[2 * N];
      st.softmax.weigh(s[sub], p);
      if constexpr (scratch_bytes<V>(0) > 0) {
        if (more_values) {
          V::template add_outputs<MASKED>(st.out, p, st.reference, st.inverse, values, scratch, 16 * sub, lane,
                                          live_from, live_to);
        }
      }
      if constexpr (V::HAS_V_ZERO) {
        KV_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int token = 16 * sub + 8 * half + g;
          const float z = !MASKED || (token >= live_from && token < live_to) ? V::v_zero(values, token) : 0.0f;
          KV_UNROLL
          for (int n = 0; n < N; ++n) st.bias[n] += p[N * half + n] * z;
        }
      }
      if constexpr (V::HAS_V_SCALE) {
        const float x = vs[sub][0] * st.inverse, y = vs[sub][1] * st.inverse;
        KV_UNROLL
        for (int i = 0; i < 2 * N; ++i) p[i] *= i < N ? x : y;
      }
      if constexpr (PAIRED) {
        KV_UNROLL
        for (int i = 0; i < 2 * N; ++i) p[i] *= st.inverse;
      }
      weights(p16[sub], p);
      if constexpr (PAIRED) {
        add_pairs<V, MASKED>(st.out, st.zero, p16[sub], values, 16 * sub, lane, live_from, live_to);
      } else if constexpr (!V::V_BLOCKED) {
        add_values<V, HEADS, MASKED>(st.out, p16[sub], values, v_table, 16 * sub, lane, live_from, live_to);
      } else if (sub % 2 == 1 &&  // a block without live tokens has arbitrary scales
                 (!MASKED || (live_from < 16 * sub + 16 && live_to > 16 * sub - 16))) {
        float fresh[V::V_REGS / 2][Sum::HALVES][4], mass[4];
        enter_values<V, HEADS>(fresh, mass, p16[sub - 1], p16[sub]);
        add_values<V, HEADS, MASKED>(fresh, p16[sub - 1], values, v_table, 16 * sub - 16, lane, live_from, live_to);
        add_values<V, HEADS, MASKED>(fresh, p16[sub], values, v_table, 16 * sub, lane, live_from, live_to);
        leave_values<V, HEADS>(st.out, fresh, mass, values, sub / 2, lane);
      }
    }
  }

  KV_DEV static void start(State& st) {
    st.softmax.start();
    st.bias[0] = st.bias[N - 1] = st.reference = st.inverse = 0.0f;
    st.zero[0] = st.zero[1] = st.zero[2] = st.zero[3] = 0.0f;
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) st.out[k][i / 4][i % 4] = 0.0f;
    }
  }

  // merge the warps and leave their sums in a slot; all of shared memory is free by now
  KV_DEV static void finish(State& st, const DecodeArgs& a, uint8_t* shared, int b, int h, int first_head,
                            int live_heads, int slot) {
    const int warp = thread() / 32, lane = thread() % 32, g = lane / 4, j = lane % 4;
    copy_wait<0>();
    sync_threads();
    st.softmax.finish();
    float bias[N];
    KV_UNROLL
    for (int n = 0; n < N; ++n) {
      bias[n] = V::HAS_V_ZERO ? st.bias[n] : 0.0f;
      if constexpr (V::HAS_V_ZERO) {
        KV_UNROLL
        for (int bit = 4; bit < 32; bit *= 2) bias[n] += shfl_xor(bias[n], bit);
      }
    }
    float* merge = (float*)shared;
    float* merge_m = merge + WARPS * 8 * row_floats(D);
    float* merge_l = merge_m + WARPS * 8;
    const float reference = SCALED ? st.reference : 1.0f;
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      if constexpr (PAIRED) {  // group k is row k
        KV_UNROLL
        for (int n = 0; n < N; ++n) bias[n] = shfl(st.zero[n], 4 * k + j) * reference;
      }
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) {
        const int e = Sum::element(k, i), n = Sum::head(i), c = V::v_channel(g, e);
        if (c < 0 || !Sum::used(i)) continue;
        merge[(warp * 8 + N * j + n) * row_floats(D) + skew(c)] =
            st.out[k][i / 4][i % 4] * (V::v_weight(e) * reference) + bias[n];
      }
    }
    if (g == 0) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) {
        merge_m[warp * 8 + N * j + n] = st.softmax.m[n];
        merge_l[warp * 8 + N * j + n] = st.softmax.l[n];
      }
    }
    sync_threads();
    merge_warps<D, WARPS>(a, merge, merge_m, merge_l, b, h, first_head, live_heads, slot);
  }

  KV_DEV static void run(const DecodeArgs& a) {
    KV_DYNAMIC_SHARED(shared);
    launch_dependents();
    const int warp = thread() / 32, lane = opaque(thread() % 32);
    const int split = (int)block_x() - APART, b = block_z();
    const int h = block_y() / a.tiles, first_head = h * a.group + block_y() % a.tiles * HEADS;
    const int rest = h * a.group + a.group - first_head, live_heads = rest < HEADS ? rest : HEADS;
    if constexpr (APART) {
      if (split < 0) {  // first of all, so that it does not come last
        DensePart<D, WARPS, CAP, DENSE == 1, HEADS>::run(a, shared, b, h, first_head, live_heads);
        return;
      }
    }
    const QueryRows<D, WARPS, HEADS> rows(a, a.key, b, h, first_head, live_heads);
    uint8_t* k_table = shared;
    uint8_t* v_table = shared + align16(K::TABLE);
    float* query = (float*)(shared + TABLES);
    uint8_t* ring = shared + TABLES + QUERY + warp * (STAGES * TILE + SCRATCH);
    uint8_t* scratch = ring + STAGES * TILE;
    KV_UNROLL
    for (int i = lane * 16; i < SCRATCH; i += 512) *(Words4*)(scratch + i) = Words4{0u, 0u, 0u, 0u};

    const int end = a.seq_lens[b] < a.capacity ? a.seq_lens[b] : a.capacity;
    const int begin = a.start ? (a.start[b] > 0 ? a.start[b] : 0) : 0;
    const int first = begin / T, tiles = end > begin ? (end + T - 1) / T - first : 0;
    const int from = first + (int)((int64_t)split * tiles / a.splits);
    const int to = first + (int)((int64_t)(split + 1) * tiles / a.splits);

    // the page id of the next fetch is read one fetch ahead
    const int32_t* row = a.page_table + b * a.table_row;
    const int64_t stride = page_bytes<K, V>(P);
    int fetched = from + warp;
    int page = fetched < to ? row[fetched * T / P] : 0;
    auto fetch = [&](int stage) {
      if (fetched < to) {
        const int next = fetched + WARPS;
        const int ahead = next < to ? row[next * T / P] : 0;
        const uint8_t* at = a.pages + ((int64_t)page * a.heads + h) * stride;
        fetch_tile<K, V, P, T>(ring + stage * TILE, at, fetched * T % P, lane);
        page = ahead;
        fetched = next;
      }
      copy_commit();
    };
    // while the page ids are on their way
    stage_query<K, D, WARPS>(query, rows, a, a.key, h, live_heads);
    KV_NO_UNROLL
    for (int stage = 0; stage < STAGES; ++stage) fetch(stage);

    if (K::TABLE) K::fill(k_table, a.key.table + h * a.key.table_head, thread(), WARPS * 32);
    if (V::TABLE) V::fill(v_table, a.value.table + h * a.value.table_head, thread(), WARPS * 32);
    Query<K, D, HEADS> q;
    sync_threads();  // for the tables as well
    take_query<K, D>(q, query, a);

    State st;
    start(st);
    if constexpr (DENSE >= 2) {
      DenseJoin<Decoder, V, D, WARPS, CAP, DENSE == 3, HEADS>::run(st, a, query, rows, b, h, live_heads, split);
    }
    int stage = 0;
    KV_NO_UNROLL
    for (int t = from + warp; t < to; t += WARPS) {
      copy_wait<STAGES - 1>();
      sync_warp();
      const uint8_t* at = ring + stage * TILE;
      if (t * T >= begin && t * T + T <= end) tile<false>(st, q, a, at, k_table, v_table, lane, 0, T, scratch);
      else tile<true>(st, q, a, at, k_table, v_table, lane, begin - t * T, end - t * T, scratch);
      sync_warp();  // everyone has read this stage before it is filled again
      fetch(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    finish(st, a, shared, b, h, first_head, live_heads, split);
  }
};

}  // namespace kv

#include "dense.cuh"
