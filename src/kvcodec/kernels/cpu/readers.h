// Readers by name.
#pragma once
#include <cstring>

#include "read_linear.h"

namespace kv {

struct Named {
  const char* name;
  Unpack unpack;
};

inline const Named READERS[] = {
    {"saw", unpack_saw},
    {"int2", unpack_int<2, false>},
    {"int3", unpack_int<3, false>},
    {"int4", unpack_int<4, false>},
    {"int8", unpack_int<8, false>},
    {"int2s", unpack_int<2, true>},
    {"int3s", unpack_int<3, true>},
    {"int4s", unpack_int<4, true>},
    {"int8s", unpack_int<8, true>},
    {"turboquant1", unpack_turboquant<1>},
    {"turboquant2", unpack_turboquant<2>},
    {"turboquant3", unpack_turboquant<3>},
    {"turboquant4", unpack_turboquant<4>},
    {"turboquant5", unpack_turboquant<5>},
    {"turboquant6", unpack_turboquant<6>},
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
