// Codes of a row in four parts (packedkv/codecs/octopus.py): words of each part, and a tail of the bits that fill no
// word.
#pragma once
#include "platform.cuh"

namespace kv {

constexpr int JOINT_BITS = 10;  // codecs/octopus.py: longer codes are held in two fields

// COUNT codes of BITS bits, the lowest LOW of which are a field of their own
template <int COUNT, int BITS, int LOW> struct SplitWords {
  KV_CONST int LEAST = COUNT / 4, MORE = COUNT % 4;     // codes of a part; that many parts have one more
  KV_CONST int MOST = LEAST + (MORE > 0);
  KV_CONST int WORDS = LEAST * BITS / 32;               // of a part
  KV_CONST int TAIL = (COUNT * BITS + 7) / 8 - 16 * WORDS;  // bytes of a row
  KV_CONST int LAST = MOST * BITS - 32 * WORDS;         // bits of a longer part in the tail
  KV_CONST int PLANES = (WORDS > 0) + (TAIL > 0);
  KV_CONST int UPPER = BITS - LOW;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 && WORDS > 0 ? 16 * WORDS : TAIL; }
  KV_FUNCTION int longer(int part) { return part < MORE ? 1 : 0; }
  KV_FUNCTION int first(int part) { return part * LEAST + (part < MORE ? part : MORE); }
  // where a part's bits begin in the tail
  KV_FUNCTION int tail_bit(int part) { return part * (LEAST * BITS - 32 * WORDS) + (part < MORE ? part : MORE) * BITS; }
  // where the fields of its code k lie among its bits
  KV_FUNCTION int lower_bit(int k) { return k < LEAST ? UPPER * LEAST + LOW * k : BITS * LEAST; }
  KV_FUNCTION int upper_bit(int k) { return k < LEAST ? UPPER * k : BITS * LEAST + LOW; }
};

}  // namespace kv
