// Entry points of encoding: plain C, for ctypes, in the same library as attend.cpp.
#include "encode.h"

#pragma GCC visibility push(default)
extern "C" {

int64_t kv_encoder(const char* name) { return kv::number_of(kv::ENCODERS, name); }

void kv_encode(const kv::EncodeArgs* a) { kv::encode(*a); }
}
#pragma GCC visibility pop
