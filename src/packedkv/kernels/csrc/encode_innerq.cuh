// InnerQ along channels: symmetric codes in groups of 32, of the three readings of "b bits". Norms are the role's
// factor: Role<EncodeInnerq<D, BITS, READING>, 1, FACTOR_INVERSE>.
//
// Planes: codes [D w / 8], scale fp16 [D / 32], with w = BITS + 1 bits a code for the literal reading, BITS for the
// others.
#pragma once
#include "encode_int.cuh"

namespace kv {

enum Reading { LITERAL, SIGNED, FULL };

constexpr int innerq_width(int bits, int reading) { return bits + (reading == LITERAL); }
constexpr int innerq_steps(int bits, int reading) {
  return reading == LITERAL ? (1 << bits) - 1 : reading == SIGNED ? (1 << (bits - 1)) - 1 : 1 << (bits - 1);
}
template <int BITS, int READING, int STEPS = innerq_steps(BITS, READING), int WIDTH = innerq_width(BITS, READING)>
using InnerqGrid = Grid<WIDTH, STEPS, -STEPS, STEPS - (READING == FULL), 1 << (WIDTH - 1), false>;

template <int D, int BITS, int READING> using EncodeInnerq = EncodeGroups<D, 32, InnerqGrid<BITS, READING>>;

}  // namespace kv
