// Decode attention over packed pages: one query token per sequence against the codes, without a decoded copy of them.
//
// Work split: CTA (split, KV head x tile of HEADS query heads, sequence) owns a run of tiles of T tokens, a piece; its
// warps take them in turn. Each warp keeps a private ring of STAGES tiles in shared memory, filled by asynchronous
// copies, and its own online softmax; warps do not synchronise in the loop. Tokens (for values: channels) are the
// 16 rows of the tensor-core tile and the heads its 8 columns (query.cuh), so the codes go from shared memory through
// registers into the tensor core and nothing decoded is written anywhere.
//
// Where look-up tables leave room for only one CTA on a multiprocessor and pieces are short, TEAMS of WARPS warps share
// the tables of a CTA. Each takes one piece after another, as a CTA of its own would, so that one team fetches its
// query or merges its warps while the others read codes, and the tables are filled once.
//
// A codec fills it with a Reader (one for keys, one for values), see read_saw.cuh for the shortest. Every reader of
// keys declares the bools K_BLOCKED and HAS_K_ZERO, every reader of values V_BLOCKED, HAS_V_SCALE and HAS_V_ZERO;
// V_BLOCK_ZERO only with V_BLOCKED.
//   BLOCK, PLANES, plane_bytes(p)   bytes of one block of BLOCK tokens in plane p, as the codec's layout
//   TABLE, fill(to, from, thread, threads)   bytes of its look-up tables in shared memory, and how they are filled;
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
//   K_BLOCKED     scale and zero belong to a channel of BLOCK tokens instead, 32 or more: k_block(planes, block, part,
//                 s, z), K_UNIT: key = s K_UNIT k_weight raw + z; K_MIDDLE: the middle of K_UNIT k_weight raw, where q
//                 s is exact. ROW_PLANES if a tile may be part of a block, see tile.cuh
//  values: a lane unpacks part g of 8 of the channels of tokens 2j, 2j+1, 2j+8, 2j+9
//   V_REGS, v_channel(part, e), v_weight(e), values(...), v_scale(planes, token) if HAS_V_SCALE,
//   v_zero(planes, token) if HAS_V_ZERO: as above, any weight
//  a reader with a SCRATCH adds the outliers held beside the codes to scores and outputs: read_outliers.cuh
//   V_BLOCKED     value = s (v_weight raw + V_OFFSET) with s of v_bscales(planes, block, part, s), one per element;
//                 V_UNEVEN: where v_uneven(planes, block, part) says so for a lane of the warp, x of
//                 v_surplus(planes, block, part, x) is to be added
//  of either role: ORDERED, CENTRED, HOLDS, NUMBERED: see tile.cuh; Mixed: see mixed.cuh
// Where a cache is decoded, unpack.cuh asks a blocked reader for the numbers of one channel; its V_BLOCK_ZERO says
// whether there is a v_bzero.
// Raw numbers are fp16, subnormal ones included (a code masked in place is code * 2^-24: the tensor core multiplies
// it exactly).
//
// Keys may be held without their mean before RoPE; what every score then gets back is a product of its own: mean.cuh.
//
// Numbers. Scores in fp32 and powers of two; q is scaled by a power of two per head and rounded to fp16 once. P is
// fp16: an online softmax whose reference may lag behind the maximum by 2^8. Scales of values join P, relative to a
// reference of their own, so that fp16 holds them.
//
// The tensor core truncates where it adds to fp32. Sums of codes of one sign, whose zero is added apart, would lose a
// part that grows with the number of products: 1 to 4 % of a diffuse head's output over 64k tokens. Every FLUSH tokens
// twice such a sum moves to a register sum, which rounds to nearest, and its negative remains as the start of the next
// products: half of them then add to sums of the other sign, whose truncation cancels that of the first half. Products
// of P with scales are rounded to either side alike, because the reference of P moves with every such step: sums.cuh.
//
// Partials (m, l, o) of every split and of the dense tokens are merged in finish.cuh.
#pragma once
#include "finish.cuh"
#include "mean.cuh"
#include "sums.cuh"

namespace kv {

#ifdef KV_QUERIES
KV_CONST bool HAS_QUERIES = true;
#else
KV_CONST bool HAS_QUERIES = false;
#endif

// how many of a sequence's tokens [.., end) the N heads of a lane do not see, as they come behind their query
template <int N> struct Behind {
  int count[HAS_QUERIES ? N : 1];
  KV_DEV Behind() {
    if constexpr (HAS_QUERIES) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) count[n] = 0;
    }
  }
  KV_DEV Behind(const DecodeArgs& a, int b, int first, int end) : Behind() {
    if constexpr (HAS_QUERIES) {
      const int newest = a.starts[b + 1] - a.starts[b] - 1, over = a.seq_lens[b] - end;
      KV_UNROLL
      for (int n = 0; n < N; ++n) {
        const int behind = newest - (first + n) / (int)a.each - over;
        count[n] = behind > 0 ? behind : 0;
      }
    }
  }
  KV_DEV int of(int n) const {
    if constexpr (HAS_QUERIES) return count[n];
    else return 0;
  }
};

template <int D, int WARPS, bool CAP, bool BF16, int HEADS> struct DensePart;
template <class Decoder, class V, int D, int WARPS, bool CAP, bool BF16, int HEADS, bool SIZED> struct DenseJoin;

// P tokens to a page, T to a tile; CAP: scores have a soft cap. DENSE: -1, or there are dense tokens, fp16 (even) or
// bf16, summed apart (0, 1) or, where values are not rotated, among the codes (2, 3), whose channels may have factors
// (4, 5). HEADS: 8, or 4 where no more query heads share a KV head. WARPS: of a team; TEAMS: of a CTA. PAIRS: keys are
// held without their mean, which this many pairs of channels have (mean.cuh); 0: with it. TIGHT: what only the start of
// a piece needs lies where later stages will be
template <class KEYS, class V, int D, int P, int T, int WARPS, int STAGES, bool CAP = false, int DENSE = -1,
          int HEADS = 8, int TEAMS = 1, int PAIRS = 0, bool TIGHT = false>
struct Decoder {
  using K = typename KeysOf<KEYS, HEADS>::Reader;
  using Sum = Sums<V, HEADS>;
  KV_CONST int N = HEADS / 4;  // heads of a lane
  KV_CONST int THREADS = TEAMS * WARPS * 32;
  KV_CONST bool HAS_TEAMS = TEAMS > 1;
  // multiples of 128: copies that straddle lines of shared memory are a sixth slower
  KV_CONST int TILE = (page_bytes<K, V>(T) + 127) / 128 * 128;
  using Mean = MeanTerm<D, PAIRS, HEADS, T, WARPS, TIGHT>;
  KV_CONST int TABLES = (align16(K::TABLE) + align16(V::TABLE) + 127) / 128 * 128;
  KV_CONST int ROWS = TEAMS == 1 && !is_wide(D) && !TIGHT ? 8 : HEADS;  // rows that fit
  KV_CONST int QUERY = (ROWS * (row_floats(query_channels<K, D>()) + 1) * 4 + 127) / 128 * 128;
  KV_CONST int SCRATCH = scratch_bytes<K>(0) > scratch_bytes<V>(0) ? scratch_bytes<K>(0) : scratch_bytes<V>(0);
  // The ring, stage by stage of all warps. Teams that share tables have their query where its last stages will be, and
  // TIGHT ones what the mean's term begins with: SOONER stages are fetched before these have been taken.
  KV_CONST bool BRIEF = TEAMS > 1 && TABLES > 0, LATER = BRIEF || TIGHT;
  KV_CONST int STAGE = WARPS * TILE, ALL = STAGES * STAGE, START = QUERY + Mean::START;
  KV_CONST int RING = !LATER ? QUERY + ALL : STAGE + START > ALL ? STAGE + START : ALL;
  KV_CONST int SOONER = LATER && RING - START < ALL ? (RING - START) / STAGE : STAGES;
  using Own = OwnTables<K, V>;
  KV_CONST int TEAM = RING + Mean::SHARED + WARPS * SCRATCH + Own::BYTES;
  // the warps' results, which overwrite everything else; those of a team, in its own memory
  KV_CONST int MERGE = (WARPS * ROWS * (row_floats(D) + 2) * 4 + 127) / 128 * 128;
  KV_CONST int SHARE = TEAM > MERGE ? TEAM : MERGE;
  KV_CONST bool APART = DENSE == 0 || DENSE == 1;
  using Join = DenseJoin<Decoder, V, D, WARPS, CAP, DENSE % 2 == 1, HEADS, (DENSE >= 4)>;
  KV_CONST int DENSE_SHARED = !APART ? 0 : DensePart<D, WARPS, CAP, DENSE == 1, HEADS>::LOOP;
  KV_CONST int OWN = TEAMS == 1 ? (TABLES + TEAM > MERGE ? TABLES + TEAM : MERGE) : TABLES + TEAMS * SHARE;
  KV_CONST int SHARED = with_reach<K, V>(OWN > DENSE_SHARED ? OWN : DENSE_SHARED);
  KV_CONST int SUBS = T / 16;
  KV_CONST bool BLOCKED = K::K_BLOCKED || V::V_BLOCKED;
  using Total = WarpSums<V, HEADS, T>;
  using State = typename Total::State;
  KV_CONST bool PAIRED = Total::PAIRED, SCALED = Total::SCALED;
  static_assert(P % T == 0 && T % 16 == 0 && (!BLOCKED || T % 32 == 0),
                "a tile is part of a page and whole runs of 32 tokens");
  static_assert((T % K::BLOCK == 0 || (K::K_BLOCKED && K::BLOCK % T == 0)) && T % V::BLOCK == 0,
                "a tile holds whole blocks; of keys, it may be part of one");
  static_assert(HEADS == 8 || (HEADS == 4 && SCRATCH == 0), "outliers are added for 8 heads");
  static_assert(TEAMS == 1 || !APART, "dense tokens apart are a CTA's piece");
  static_assert(!HAS_QUERIES || DENSE < 0, "several queries of a sequence meet no dense tokens");

  KV_DEV static void sync() {
    if constexpr (TEAMS == 1) sync_threads();
    else sync_some(1 + thread() / (32 * WARPS), 32 * WARPS);
  }

  // k_held, v_held: tables, or what of them a lane holds
  template <bool MASKED, class KH, class VH>
  KV_DEV static void tile(State& st, const Query<K, D, HEADS>& q, const DecodeArgs& a, const uint8_t* at,
                          const KH& k_held, const VH& v_held, int lane, int live_from, int live_to, const Mean& mean,
                          uint8_t* scratch = nullptr, const Behind<N>& behind = {}) {
    const Planes<K, T> keys{at};
    const Planes<V, T> values{at + planes_bytes<K>(T)};
    const TileNumbers<K, V, T> numbers(keys, values, lane);
    const int g = lane / 4;
    // In a long tile the numbers of the lane's tokens would be held throughout the loop, eight registers for the masked
    // tile alone: there the bounds meet constants, less g.
    const int less = T > 32 ? g : 0, from = live_from - less, to = live_to - less;
    float s[SUBS][2 * N], vs[SUBS][2];
    uint32_t block_q[Query<K, D, HEADS>::REGS];
    float block_zero[2] = {0.0f, 0.0f};
    bool more_keys = false, more_values = false;  // outliers to be added
    float term[SUBS][2 * N];
    if constexpr (PAIRS > 0) mean.terms(term);
    if constexpr (scratch_bytes<K>(0) > 0) more_keys = K::template has_outliers<T>(keys, lane);
    if constexpr (scratch_bytes<V>(0) > 0) more_values = V::template has_outliers<T>(values, lane);
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      if constexpr (K::K_BLOCKED) {
        constexpr int EACH = K::BLOCK / 16;
        if (sub % EACH == 0) enter_block<K, D, HEADS>(block_q, block_zero, q, keys, sub / EACH, lane);
      }
      scores<K, D, HEADS, MASKED>(s[sub], q, keys, k_held, 16 * sub, lane, block_q, block_zero,
                                  numbers);
      if constexpr (scratch_bytes<K>(0) > 0) {
        if (more_keys) K::add_scores(s[sub], q.r, q.scale, keys, scratch, 16 * sub, lane);
      }
      if constexpr (PAIRS > 0) {
        KV_UNROLL
        for (int i = 0; i < 2 * N; ++i) s[sub][i] += term[sub][i];
      }
      if (CAP) soft_cap(s[sub], a.softcap);
      KV_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int token = 16 * sub + 8 * half + g, place = token - less;
        const bool live = !MASKED || (place >= from && place < to);
        KV_UNROLL
        for (int n = 0; n < N; ++n) {
          const bool seen = live && (!MASKED || !HAS_QUERIES || place < to - behind.of(n));
          s[sub][N * half + n] = seen ? s[sub][N * half + n] : minus_infinity();
        }
        if constexpr (is_numbered<V>(0)) vs[sub][half] = live ? numbers.value_scale(2 * sub + half) : 0.0f;
        else if constexpr (V::HAS_V_SCALE) vs[sub][half] = live ? V::v_scale(values, token) : 0.0f;
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
    Total::rescale(st, top, largest);
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
          const int token = 16 * sub + 8 * half + g, place = token - less;
          const float z = !MASKED || (place >= from && place < to) ? V::v_zero(values, token) : 0.0f;
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
        add_pairs<V, HEADS, MASKED>(st.out, st.zero, p16[sub], values, 16 * sub, lane, live_from, live_to);
      } else if constexpr (!V::V_BLOCKED) {
        add_values<V, HEADS, MASKED>(st.out, p16[sub], values, v_held, 16 * sub, lane, live_from, live_to);
      } else if (sub % 2 == 1 &&  // a block without live tokens has arbitrary scales
                 (!MASKED || (live_from < 16 * sub + 16 && live_to > 16 * sub - 16))) {
        float fresh[V::V_REGS / 2][Sum::HALVES][4], mass[4];
        enter_values<V, HEADS>(fresh, mass, p16[sub - 1], p16[sub]);
        add_values<V, HEADS, MASKED>(fresh, p16[sub - 1], values, v_held, 16 * sub - 16, lane, live_from, live_to);
        add_values<V, HEADS, MASKED>(fresh, p16[sub], values, v_held, 16 * sub, lane, live_from, live_to);
        leave_values<V, HEADS>(st.out, fresh, mass, values, sub / 2, lane);
      }
    }
  }

  // merge the warps and leave their sums in a slot; `shared`, which they read their codes from, is free by now
  KV_DEV static void finish(State& st, const DecodeArgs& a, uint8_t* shared, int b, int h, int first_head,
                            int live_heads, int slot, int warp) {
    const int lane = opaque(thread() % 32), g = lane / 4, j = lane % 4;  // addresses are not held throughout the loop
    copy_wait<0>();
    sync();
    st.softmax.finish();
    float bias[N];
    KV_UNROLL
    for (int n = 0; n < N; ++n) bias[n] = V::HAS_V_ZERO ? Total::over_tokens(st.bias[n]) : 0.0f;
    float* merge = (float*)shared;
    float* merge_m = merge + WARPS * ROWS * row_floats(D);
    float* merge_l = merge_m + WARPS * ROWS;
    const float reference = SCALED ? st.reference : 1.0f;
    const uint8_t* source = source_of<V>(a.value.table, a.value.table_head, b, h);
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      if constexpr (PAIRED) {
        Total::group_zeros(bias, st, k);
        KV_UNROLL
        for (int n = 0; n < N; ++n) bias[n] *= reference;
      }
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) {
        const int e = Sum::element(k, i), n = Sum::head(i), c = V::v_channel(g, e);
        if (c < 0 || !Sum::used(i)) continue;
        float x = st.out[k][i / 4][i % 4] * (V::v_weight(e) * reference) + bias[n];
        if constexpr (is_centred<V>(0)) x += st.softmax.l[n] * V::centre(source, c);
        int to = c;
        if constexpr (is_ordered<V>(0)) to = V::model_channel(source, c);
        merge[(warp * ROWS + N * j + n) * row_floats(D) + skew(to)] = x;
      }
    }
    if (g == 0) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) {
        merge_m[warp * ROWS + N * j + n] = st.softmax.m[n];
        merge_l[warp * ROWS + N * j + n] = st.softmax.l[n];
      }
    }
    sync();
    merge_warps<D, WARPS, ROWS, is_mixed<V>(0)>(a, merge, merge_m, merge_l, b, h, first_head, live_heads, slot, warp);
  }

  KV_DEV static void fill_tables(const DecodeArgs& a, uint8_t* shared, int b, int h) {
    const uint8_t* keys = source_of<K>(a.key.table, a.key.table_head, b, h);
    const uint8_t* values = source_of<V>(a.value.table, a.value.table_head, b, h);
    const int mine = opaque(thread());  // what follows from it is not held in registers from piece to piece
    // tables of one size are filled side by side, the keys' by the first half of the warps
    constexpr int FIRST = K::TABLE && K::TABLE == V::TABLE && THREADS > 32 ? THREADS / 64 * 32 : 0;
    if constexpr (FIRST > 0) {
      if (mine < FIRST) K::fill(shared, keys, mine, FIRST);
      else V::fill(shared + align16(K::TABLE), values, mine - FIRST, THREADS - FIRST);
    } else {
      if (K::TABLE) K::fill(shared, keys, mine, THREADS);
      if (V::TABLE) V::fill(shared + align16(K::TABLE), values, mine, THREADS);
    }
  }

  // tiles [from, to) of a piece, of those that hold tokens [begin, end)
  struct Run {
    int begin, end, from, to;
    KV_DEV Run(const DecodeArgs& a, int split, int b) {
      end = a.seq_lens[b] < a.capacity ? a.seq_lens[b] : a.capacity;
      begin = a.start ? (a.start[b] > 0 ? a.start[b] : 0) : 0;
      const int first = begin / T, tiles = end > begin ? (end + T - 1) / T - first : 0;
      const int runs = (int)a.runs, each = tiles / runs, more = tiles - each * runs;  // so many runs have one tile more
      from = first + split * each + (split < more ? split : more);
      to = split < runs ? from + each + (split < more) : from;
    }
  };

  // With cold caches a page id, the tables and dense rows would be fetched one after the other: prefetch all at once.
  KV_DEV static void ask_early(const DecodeArgs& a, int h, int b, int warp, int lane) {
    if ((warp * 32 + lane) * 32 < a.capacity / P) prefetch(a.page_table + b * a.table_row + (warp * 32 + lane) * 32);
    const int at = opaque(thread()), mine = warp * 32 + lane;  // of the CTA, or of the team
    if (own_bytes<K>(0) > 0 ? mine * 128 < own_bytes<K>(0) : !BRIEF && K::TABLE && at * 128 < a.key.table_bytes)
      prefetch(source_of<K>(a.key.table, a.key.table_head, b, h) + (own_bytes<K>(0) > 0 ? mine : at) * 128);
    if (own_bytes<V>(0) > 0 ? mine * 128 < own_bytes<V>(0) : !BRIEF && V::TABLE && at * 128 < a.value.table_bytes)
      prefetch(source_of<V>(a.value.table, a.value.table_head, b, h) + (own_bytes<V>(0) > 0 ? mine : at) * 128);
  }

  // A piece: a split of a tile of heads of a sequence. `own`: the shared memory of the team, or of the CTA behind the
  // tables; `filled`: an earlier piece of the team has waited for the tables; `idle`: there is no piece for it, but
  // all teams meet at one barrier.
  KV_DEV static void run_piece(const DecodeArgs& a, uint8_t* shared, uint8_t* own, int split, int y, int b, int warp,
                               bool filled = false, bool idle = false) {
    const int lane = opaque(thread() % 32);
    const int h = y / a.tiles, first_head = h * a.group + y % a.tiles * HEADS;
    const int rest = h * a.group + heads_of(a, b) - first_head, live_heads = rest < HEADS ? rest : HEADS;
    const QueryRows<D, WARPS, HEADS> rows(a, a.key, b, h, first_head, live_heads, warp);
    ask_early(a, h, b, warp, lane);
    uint8_t* k_table = shared;
    uint8_t* v_table = shared + align16(K::TABLE);
    float* query = (float*)(own + (LATER ? RING - START : 0));
    uint8_t* ring = own + (LATER ? 0 : QUERY) + warp * TILE;
    uint8_t* means = own + RING;
    uint8_t* starts = TIGHT ? means - Mean::START : means;
    uint8_t* scratch = means + Mean::SHARED + warp * SCRATCH;
    uint8_t* own_tables = means + Mean::SHARED + WARPS * SCRATCH;
    KV_UNROLL
    for (int i = lane * 16; i < SCRATCH; i += 512) *(Words4*)(scratch + i) = Words4{0u, 0u, 0u, 0u};

    const auto dense = [&] {
      if constexpr (DENSE >= 2) return typename Join::Live(a, b, split, warp);
      else return 0;
    }();
    // the page id of the next fetch is read one fetch ahead; of whole sequences the first one before their length is
    // here
    const uint32_t row = held((uint32_t)(b * a.table_row));  // of the page table
    const bool known = a.runs == 1 && !a.start && warp * T < a.capacity;
    const int sooner = known ? a.page_table[row + warp * T / P] : 0;
    const Run own_run(a, split, b);
    const int begin = own_run.begin, end = own_run.end, from = own_run.from;
    const int to = idle || (HAS_QUERIES && live_heads <= 0) ? from : own_run.to;
    // that all heads see
    const int sure = HAS_QUERIES ? end - Behind<1>(a, b, 0, end).of(0) : end;
    const uint32_t heads = (uint32_t)a.heads, stride = (uint32_t)a.page_bytes;
    int fetched = from + warp;
    int page = known ? sooner : fetched < to ? a.page_table[row + fetched * T / P] : 0;
    auto fetch = [&](int stage) {
      if (fetched < to) {
        const int next = fetched + WARPS;
        const int ahead = next < to ? a.page_table[row + (uint32_t)next * T / P] : 0;
        const uint8_t* at = a.pages + (uint64_t)((uint32_t)page * heads + (uint32_t)h) * stride;
        fetch_tile<K, V, P, T>(ring + stage * STAGE, at, (uint32_t)fetched * T % P, lane);
        page = ahead;
        fetched = next;
      }
      copy_commit();
    };
    if constexpr (DENSE >= 2) Join::prefetch_rows(a, dense, b, h, lane);  // while the page ids are being loaded
    KV_NO_UNROLL
    for (int stage = 0; stage < SOONER; ++stage) fetch(stage);
    const bool codes = DENSE < 2 || from < to;  // else dense tokens alone
    if (codes) stage_query<K, D, WARPS>(query, rows, a, a.key, h, live_heads, warp);
    if constexpr (is_mixed<K>(0)) {
      sync();
      if (codes) mix_query<D, WARPS, HEADS>(query, MixedBy<D>(a.key.matrix, h), warp, [] { sync(); });
    }

    if (TEAMS == 1 && codes) fill_tables(a, shared, b, h);
    if constexpr (Own::BYTES > 0) {
      if (codes)
        Own::fill(own_tables, source_of<K>(a.key.table, a.key.table_head, b, h),
                  source_of<V>(a.value.table, a.value.table_head, b, h), warp * 32 + lane, WARPS * 32);
    }
    if (BRIEF && !filled) sync_threads();  // every team has filled its share of the tables
    Mean mean;
    if constexpr (PAIRS > 0) {
      if (codes) {
        Mean::stage(means, starts, a, b, h, first_head, live_heads, warp);
        Mean::start_turning(means, starts, a, b, h, (from + warp) * T, warp);
        mean.hold(means, a.mean.table + h * a.mean.table_head, warp);
      }
    }
    Query<K, D, HEADS> q;
    sync();  // for the tables as well
    if (codes) take_query<K, D>(q, query, own_tables, a);
    if constexpr (PAIRS > 0) mean.take(means, starts, warp);

    State st;
    Total::start(st, split * WARPS + warp);
    if constexpr (DENSE >= 2) {
      Join::run(st, a, query, rows, dense, b, h, live_heads, split, warp);
    }
    const auto k_held = held_of_keys<K>(k_table, own_tables, lane % 4, lane);
    const auto v_held = held_of_values<V>(v_table, own_tables + Own::VALUES, lane / 4, lane);
    int stage = 0;
    if constexpr (SOONER < STAGES) {
      sync();  // the query has been taken
      KV_NO_UNROLL
      for (int later = SOONER; later < STAGES; ++later) fetch(later);
    }
    KV_NO_UNROLL
    for (int t = from + warp; t < to; t += WARPS) {
      copy_wait<STAGES - 1>();
      sync_warp();
      const uint8_t* at = ring + stage * STAGE;
      const bool whole = t * T >= begin && t * T + T <= sure;
      if (whole) {
        tile<false>(st, q, a, at, k_held, v_held, lane, 0, T, mean, scratch);
      } else {
        const Behind<N> behind(a, b, first_head - h * a.group + N * (lane % 4), end);
        tile<true>(st, q, a, at, k_held, v_held, lane, begin - t * T, end - t * T, mean, scratch, behind);
      }
      sync_warp();  // all lanes have read this stage before it is filled again
      if constexpr (PAIRS > 0) mean.turn_on();
      fetch(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    if (!idle) finish(st, a, TEAMS == 1 ? shared : own, b, h, first_head, live_heads, split, warp);
  }

  KV_DEV static void run(const DecodeArgs& a) {
    KV_DYNAMIC_SHARED(shared);
    launch_dependents();
    if constexpr (BRIEF) {
      // Tables while the kernel before ends, which has not written them (constants.py). All else that is read here it
      // may have written: queries, codes, lengths.
      fill_tables(a, shared, 0, block_y() * (int)a.alike);
      wait_for_previous();
    }
    if constexpr (TEAMS == 1) {
      const int warp = thread() / 32, split = (int)block_x() - APART;
      if constexpr (APART) {
        if (split < 0) {  // first, so that it does not finish last
          const int h = block_y() / a.tiles, first_head = h * a.group + block_y() % a.tiles * HEADS;
          const int rest = h * a.group + a.group - first_head, live_heads = rest < HEADS ? rest : HEADS;
          DensePart<D, WARPS, CAP, DENSE == 1, HEADS>::run(a, shared, block_z(), h, first_head, live_heads);
          return;
        }
      }
      run_piece(a, shared, shared + TABLES, split, block_y(), block_z(), warp);
    } else {
      const int team = thread() / (32 * WARPS), warp = thread() / 32 - team * WARPS;
      const uint32_t splits = (uint32_t)a.splits, ys = (uint32_t)a.alike * a.tiles;
      const uint32_t first = team * grid_x() + block_x(), step = TEAMS * grid_x();
      // neighbouring pieces go to different multiprocessors, so that their counts differ by at most one
      KV_NO_UNROLL
      for (uint32_t next = first; next < step || next < (uint32_t)a.pieces; next += step) {
        const bool idle = opaque(next >= (uint32_t)a.pieces);
        const uint32_t i = idle ? 0 : next, rest = i / splits, b = rest / ys;
        run_piece(a, shared, shared + TABLES + team * SHARE, i - rest * splits, block_y() * ys + rest - b * ys, b, warp,
                  next >= step, idle);
        sync();  // the sums have been read
      }
    }
  }
};

}  // namespace kv

#include "dense.cuh"
