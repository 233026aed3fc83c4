// Arguments of the encode kernels. One struct by value, whose fields kernels/structs.py reads from here:
// pointers, then 64-bit numbers, then 32-bit numbers, so that both compilers lay it out alike.
#pragma once
#include "platform.cuh"

namespace kv {

// new keys or values, and where their planes begin
struct EncodeSide {
  const void* x;            // [B, H, N, D] model basis; channels lie together
  const uint8_t* tables;    // constants of KV head h at tables + h * table_head, or by sequences; may be null
  const float* factor;      // [B or 1, H, D] of the role's FACTOR (FACTOR_INVERSE: float64); null without
  const uint8_t* matrix;    // of KV head h at matrix + h * 4 D D, see mixed.cuh; null without
  const int32_t* first;     // [B] slot of token 0: token n of sequence b goes to slot first[b] + n
  int64_t batch, head, token;  // strides of x in elements, multiples of 4: vectors are loaded; x at 16 bytes
  int64_t table_head;       // bytes; 0: one table for all heads, or sequences
  int64_t factor_batch;     // elements; 0: one for all sequences
  int64_t plane;            // byte of the page at which this role's first plane begins
  int64_t tokens;           // N
  int64_t rows;             // byte of the page at which the role's 16-bit rows begin, where `kept` > 0
};

// what is subtracted from keys before they are encoded: their mean before RoPE, turned to each token's position
struct EncodeMean {
  const float* mean;        // [B or 1, H, D]
  const float* cosines;     // [B or 1, N, R / 2] of the tokens' positions, times the scaling of RoPE
  const float* sines;       // strided alike
  int64_t batch;            // elements of `mean`; 0: one for all sequences
  int64_t turn_batch, turn_token;  // elements of `cosines`
  int32_t turning;          // R: channels that turn, the first ones
  int32_t interleaved;       // 1: channels 2 p and 2 p + 1 turn together, 0: p and p + R / 2
};

struct EncodeArgs {
  uint8_t* pages;           // [num_pages, H, page_bytes]
  const int32_t* page_table;  // [B, columns]
  int32_t* bad;             // raised to 1: a row that cannot be held, 2: a token past the capacity; may be null
  EncodeSide key, value;
  int64_t page_bytes;
  int64_t table_row;        // elements from one sequence's page ids to the next one's
  int32_t kind;             // of x: 0 fp16, 1 bf16, 2 fp32
  int32_t page_tokens;      // P
  int32_t capacity;         // slots that a row of the page table can hold
  int32_t heads;            // H
  EncodeMean mean;          // of the keys
  int64_t kept;             // so many tokens of a page also lie in 16 bit behind its codes, [kept, D]; 0: none
  const int64_t* slots;     // with KV_SLOTS, of one sequence: token n goes to slot slots[n] of the pool, that is place
                            // slots[n] % P of page slots[n] / P; below 0: it is not stored
};

}  // namespace kv
