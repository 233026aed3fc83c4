// Readers by name.
#pragma once
#include "read_around.h"
#include "read_ghost.h"

namespace kv {

struct Named {
  const char* name;
  Unpack unpack;
  Order order = nullptr;  // null: channels lie in their own order
  bool placed = false;    // a head's codes have an order of their own: its tables begin with int16 [D], their channels
};

inline const Named READERS[] = {
    {"dense", unpack_dense},
    {"fp8", unpack_fp8},
    {"saw", unpack_saw, order_row<4>},
    {"q4_0", unpack_q4_0},
    {"levels1", unpack_levels<1>, order_row<1>},
    {"levels2", unpack_levels<2>, order_row<2>},
    {"levels3", unpack_levels<3>, order_row<3>},
    {"levels4", unpack_levels<4>, order_row<4>},
    {"levels5", unpack_levels<5>, order_row<5>},
    {"levels6", unpack_levels<6>, order_row<6>},
    {"group levels", unpack_group_levels, order_groups<4>},
    {"int2", unpack_int<2, false>, order_groups<2>},
    {"int3", unpack_int<3, false>, order_groups<3>},
    {"int4", unpack_int<4, false>, order_groups<4>},
    {"int8", unpack_int<8, false>, order_groups<8>},
    {"int2 symmetric", unpack_int<2, true>, order_groups<2>},
    {"int3 symmetric", unpack_int<3, true>, order_groups<3>},
    {"int4 symmetric", unpack_int<4, true>, order_groups<4>},
    {"int8 symmetric", unpack_int<8, true>, order_groups<8>},
    {"tokens2", unpack_tokens<2, ASYMMETRIC>, order_row<2>},
    {"tokens3", unpack_tokens<3, ASYMMETRIC>, order_row<3>},
    {"tokens4", unpack_tokens<4, ASYMMETRIC>, order_row<4>},
    {"tokens8", unpack_tokens<8, ASYMMETRIC>, order_row<8>},
    {"tokens2 symmetric", unpack_tokens<2, SYMMETRIC>, order_row<2>},
    {"tokens3 symmetric", unpack_tokens<3, SYMMETRIC>, order_row<3>},
    {"tokens4 symmetric", unpack_tokens<4, SYMMETRIC>, order_row<4>},
    {"tokens8 symmetric", unpack_tokens<8, SYMMETRIC>, order_row<8>},
    {"tokens2 hybrid", unpack_tokens<2, HYBRID>, order_row<2>},
    {"tokens3 hybrid", unpack_tokens<3, HYBRID>, order_row<3>},
    {"tokens4 hybrid", unpack_tokens<4, HYBRID>, order_row<4>},
    {"ghost4", unpack_ghost<4>, order_ghost, true},
    {"ghost5", unpack_ghost<5>, order_ghost, true},
    {"ghost6", unpack_ghost<6>, order_ghost, true},
    {"ghost7", unpack_ghost<7>, order_ghost, true},
    {"ghost8", unpack_ghost<8>, order_ghost, true},
    {"ghost9", unpack_ghost<9>, order_ghost, true},
    {"ghost10", unpack_ghost<10>, order_ghost, true},
    {"octopus", unpack_octopus, order_triplets},
    {"hqmq10 3", unpack_hqmq<10, 3>},
    {"hqmq10 4", unpack_hqmq<10, 4>},
    {"hqmq10 6", unpack_hqmq<10, 6>},
    {"hqmq11 3", unpack_hqmq<11, 3>},
    {"hqmq11 4", unpack_hqmq<11, 4>},
    {"hqmq11 6", unpack_hqmq<11, 6>},
    {"hqmq12 3", unpack_hqmq<12, 3>},
    {"hqmq12 4", unpack_hqmq<12, 4>},
    {"hqmq12 6", unpack_hqmq<12, 6>},
    {"hqmq13 3", unpack_hqmq<13, 3>},
    {"hqmq13 4", unpack_hqmq<13, 4>},
    {"hqmq13 6", unpack_hqmq<13, 6>},
    {"levels1 sketch", unpack_levels_sketch<1>},
    {"levels2 sketch", unpack_levels_sketch<2>},
    {"levels3 sketch", unpack_levels_sketch<3>},
    {"octopus sketch", unpack_octopus_sketch},
    {"hqmq10 3 outliers", unpack_outliers<unpack_hqmq<10, 3>>},
    {"hqmq10 4 outliers", unpack_outliers<unpack_hqmq<10, 4>>},
    {"hqmq10 6 outliers", unpack_outliers<unpack_hqmq<10, 6>>},
    {"hqmq11 3 outliers", unpack_outliers<unpack_hqmq<11, 3>>},
    {"hqmq11 4 outliers", unpack_outliers<unpack_hqmq<11, 4>>},
    {"hqmq11 6 outliers", unpack_outliers<unpack_hqmq<11, 6>>},
    {"hqmq12 3 outliers", unpack_outliers<unpack_hqmq<12, 3>>},
    {"hqmq12 4 outliers", unpack_outliers<unpack_hqmq<12, 4>>},
    {"hqmq12 6 outliers", unpack_outliers<unpack_hqmq<12, 6>>},
    {"hqmq13 3 outliers", unpack_outliers<unpack_hqmq<13, 3>>},
    {"hqmq13 4 outliers", unpack_outliers<unpack_hqmq<13, 4>>},
    {"hqmq13 6 outliers", unpack_outliers<unpack_hqmq<13, 6>>},
    {"int2 outliers", unpack_outliers<unpack_int<2, false>, order_groups<2>>, order_groups<2>},
    {"int3 outliers", unpack_outliers<unpack_int<3, false>, order_groups<3>>, order_groups<3>},
    {"int4 outliers", unpack_outliers<unpack_int<4, false>, order_groups<4>>, order_groups<4>},
    {"int8 outliers", unpack_outliers<unpack_int<8, false>, order_groups<8>>, order_groups<8>},
};

}  // namespace kv
