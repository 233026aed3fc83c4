// Arguments of the decode kernels. One struct by value, whose fields kernels/structs.py reads from here:
// pointers, then 64-bit strides, then 32-bit numbers, so that both compilers lay it out alike.
#pragma once
#include "platform.cuh"

namespace kv {

// constants and tables of the keys, or of the values
struct Side {
  const uint8_t* table;     // look-up tables of KV head h at table + h * table_head, or as source_of; may be null
  // [B or 1, H, D] keys: multiplies q before the rotation; values: the output after it; null: ones
  const float* factor;
  const uint8_t* matrix;    // of KV head h at matrix + h * MixedBy<D>::BYTES, see mixed.cuh; null: none
  int64_t table_head;       // bytes; 0: one table for all heads, or sequences
  int64_t table_bytes;      // of a head
  int64_t factor_batch;     // elements; 0: one for all sequences
  int64_t block;            // order of the Hadamard rotation, 1 for none
};

// Keys that are held without their mean before RoPE, of the sequences of a call. See mean.cuh
struct KeyMean {
  const float* mean;        // [B or 1, H, D], its turning channels times the scaling of RoPE
  const uint8_t* table;     // of KV head h at table + h * table_head
  const int32_t* placed;    // [B] position of slot 0; those of later slots follow
  int64_t batch;            // elements of `mean`; 0: one for all sequences
  int64_t table_head;       // bytes; 0: one table for all heads
};

struct DecodeArgs {
  const void* q;            // [B, HQ, D] model basis
  const uint8_t* pages;     // [num_pages, H, page_bytes]
  const int32_t* page_table;  // [B, columns]
  const int32_t* seq_lens;  // [B]
  const int32_t* start;     // [B] first live token; null: 0
  const void* dense_k;      // [B, H, W, D]; null: none
  const void* dense_v;
  const int32_t* dense_lens;   // [B] null: W
  const int32_t* dense_start;  // [B] null: 0
  const int32_t* dense_at;  // [B], dense_step apart: which of dense_k and dense_v are a sequence's; null: b
  const float* sinks;       // [HQ] learned logits; null: none
  float* part_o;            // [B * HQ, slots, D] partial outputs, code basis (the dense slot: model basis)
  float* part_m;            // [B * HQ, slots] reference exponent, log2
  float* part_l;            // [B * HQ, slots]
  void* out;                // [B, HQ, D]
  float* lse;               // [B, HQ]
  Side key, value;
  int64_t q_batch, q_head;  // strides in elements
  int64_t table_row;
  int64_t page_bytes;       // from one page to the next; its codes may take less
  int64_t dense_step;
  int64_t dense_k_batch, dense_k_head, dense_k_token;
  int64_t dense_v_batch, dense_v_head, dense_v_token;
  int64_t out_batch, out_head;
  int64_t runs;             // splits of the packed tokens; a further split has the dense tokens alone
  int64_t alike;            // teams of warps: KV heads of a CTA, which have the same tables, H or 1
  int64_t pieces;           // and the pieces that CTAs of as many heads share out
  int32_t q_kind, dense_kind, out_kind;  // 0 fp16, 1 bf16, 2 fp32
  int32_t heads;            // KV heads H
  int32_t group;            // query heads per KV head
  int32_t tiles;            // ceil(group / HEADS): CTAs per KV head and split
  int32_t splits;           // runs of tokens a sequence is cut into
  int32_t slots;            // splits, and one more for the dense tokens if there are any
  int32_t capacity;         // tokens that a row of the page table can hold
  int32_t dense_width;      // W
  float scale2;             // softmax scale * log2(e)
  float softcap;            // scores become softcap * tanh(score / softcap); 0: off
  KeyMean mean;
  // With KV_QUERIES a sequence has several query tokens, its newest: q, out and lse are [queries, HQ, ..], and `group`
  // counts the query heads of a KV head of as many of them as a sequence may have, those of the first one first
  const int32_t* starts;    // [B + 1] first query of each sequence
  int64_t each;             // query heads per KV head of one query
};

// where a sequence's query head lies in q and out, and whether it is there
struct QueryHead {
  int64_t row;
  int32_t head;
  bool live;
  KV_DEV QueryHead(const DecodeArgs& a, int b, int of) : row(b), head(of), live(true) {
#ifdef KV_QUERIES
    const int each = (int)a.each, h = of / a.group, i = of - h * a.group, token = i / each;
    live = a.starts[b] + token < a.starts[b + 1];
    row = live ? a.starts[b] + token : 0;
    head = h * each + i - token * each;
#endif
  }
};

// query heads of a KV head that a sequence has
KV_DEV int heads_of(const DecodeArgs& a, int b) {
#ifdef KV_QUERIES
  const int count = (a.starts[b + 1] - a.starts[b]) * (int)a.each;
  return count < a.group ? count : a.group;
#else
  return a.group;
#endif
}

}  // namespace kv
