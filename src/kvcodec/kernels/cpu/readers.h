// Readers by name.
#pragma once
#include "read_around.h"

namespace kv {

struct Named {
  const char* name;
  Unpack unpack;
};

inline const Named READERS[] = {
    {"dense", unpack_dense},
    {"fp8", unpack_fp8},
    {"saw", unpack_saw},
    {"q4_0", unpack_q4_0},
    {"levels1", unpack_levels<1>},
    {"levels2", unpack_levels<2>},
    {"levels3", unpack_levels<3>},
    {"levels4", unpack_levels<4>},
    {"levels5", unpack_levels<5>},
    {"levels6", unpack_levels<6>},
    {"group levels", unpack_group_levels},
    {"int2", unpack_int<2, false>},
    {"int3", unpack_int<3, false>},
    {"int4", unpack_int<4, false>},
    {"int8", unpack_int<8, false>},
    {"int2 symmetric", unpack_int<2, true>},
    {"int3 symmetric", unpack_int<3, true>},
    {"int4 symmetric", unpack_int<4, true>},
    {"int8 symmetric", unpack_int<8, true>},
    {"tokens2", unpack_tokens<2, ASYMMETRIC>},
    {"tokens3", unpack_tokens<3, ASYMMETRIC>},
    {"tokens4", unpack_tokens<4, ASYMMETRIC>},
    {"tokens8", unpack_tokens<8, ASYMMETRIC>},
    {"tokens2 symmetric", unpack_tokens<2, SYMMETRIC>},
    {"tokens3 symmetric", unpack_tokens<3, SYMMETRIC>},
    {"tokens4 symmetric", unpack_tokens<4, SYMMETRIC>},
    {"tokens8 symmetric", unpack_tokens<8, SYMMETRIC>},
    {"tokens2 hybrid", unpack_tokens<2, HYBRID>},
    {"tokens3 hybrid", unpack_tokens<3, HYBRID>},
    {"tokens4 hybrid", unpack_tokens<4, HYBRID>},
    {"octopus", unpack_octopus},
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
    {"int2 outliers", unpack_outliers<unpack_int<2, false>>},
    {"int3 outliers", unpack_outliers<unpack_int<3, false>>},
    {"int4 outliers", unpack_outliers<unpack_int<4, false>>},
    {"int8 outliers", unpack_outliers<unpack_int<8, false>>},
};

// number of a reader, -1: there is none
inline int reader_number(const char* name) {
  int i = 0;
  for (const Named& one : READERS) {
    if (!strcmp(one.name, name)) return i;
    ++i;
  }
  return -1;
}

}  // namespace kv
