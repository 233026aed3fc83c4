// Encoders by name.
#pragma once
#include "encode_around.h"
#include "encode_chunks.h"
#include "encode_ghost.h"
#include "encode_groups.h"

namespace kv {

struct NamedEncoder {
  const char* name;
  Encode encode;
};

inline const NamedEncoder ENCODERS[] = {
    {"dense", encode_dense},
    {"saw", encode_saw},
    {"levels1", encode_levels<1>},
    {"levels2", encode_levels<2>},
    {"levels3", encode_levels<3>},
    {"levels4", encode_levels<4>},
    {"levels5", encode_levels<5>},
    {"levels6", encode_levels<6>},
    {"fp8", encode_fp8},
    {"e2m1", encode_e2m1},
    {"group levels", encode_group_levels},
    {"q4_0", encode_q4_0},
    {"ghost", encode_ghost},
    {"octopus", encode_octopus},
    {"hqmq", encode_hqmq},
    {"levels1 sketch", encode_levels_sketch<1>},
    {"levels2 sketch", encode_levels_sketch<2>},
    {"levels3 sketch", encode_levels_sketch<3>},
    {"octopus sketch", encode_octopus_sketch},
    {"int2", encode_int<2, false>},
    {"int3", encode_int<3, false>},
    {"int4", encode_int<4, false>},
    {"int8", encode_int<8, false>},
    {"int2 symmetric", encode_int<2, true>},
    {"int3 symmetric", encode_int<3, true>},
    {"int4 symmetric", encode_int<4, true>},
    {"int8 symmetric", encode_int<8, true>},
    {"tokens2", encode_tokens_int<2, false>},
    {"tokens3", encode_tokens_int<3, false>},
    {"tokens4", encode_tokens_int<4, false>},
    {"tokens8", encode_tokens_int<8, false>},
    {"tokens2 symmetric", encode_tokens_int<2, true>},
    {"tokens3 symmetric", encode_tokens_int<3, true>},
    {"tokens4 symmetric", encode_tokens_int<4, true>},
    {"tokens8 symmetric", encode_tokens_int<8, true>},
};

}  // namespace kv
