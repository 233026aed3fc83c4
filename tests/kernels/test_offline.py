"""What tells registers, spills and loops of compiled kernels tells them right."""

import pytest

from tests.kernels.offline import ARCHITECTURES, compile_kernels, mix, opcode

SOURCE = """
#include "platform.cuh"
using namespace kv;
// one loop in another: tensor core inside, a reduction outside
KV_KERNEL void KV_BOUNDS(128, 1) nested(const uint32_t* x, float* y, int n, int m) {
  KV_DYNAMIC_SHARED(shared);
  float total = 0;
  KV_NO_UNROLL
  for (int i = 0; i < n; ++i) {
    copy16(shared + thread() * 16, x + i * 512 + thread() * 4);
    copy_commit();
    copy_wait<0>();
    sync_threads();
    float d[4] = {0, 0, 0, 0};
    KV_NO_UNROLL
    for (int k = 0; k < m; ++k) {
      uint32_t a = ((const uint32_t*)shared)[(k * 32 + thread()) % 512];
      mma(d, a, a, a, a, transpose8(a), a);
    }
    total += exp2_fast(shfl_xor(d[0] + d[3], 1));
    sync_threads();
  }
  y[thread()] = total;
}
// a rare branch does more of the same; votes make the compiler provide for a warp that has diverged
KV_KERNEL void KV_BOUNDS(128, 1) branching(const uint32_t* x, float* y, int n) {
  float d[4] = {0, 0, 0, 0};
  KV_NO_UNROLL
  for (int i = 0; i < n; ++i) {
    const uint32_t a = x[i * 128 + thread()];
    if (kv::any(a == 7)) {
      KV_UNROLL
      for (int k = 0; k < 3; ++k) mma(d, a + k, a, a, a, shfl_xor(a, 1 + k), a);
    } else {
      mma(d, a, a, a, a, shfl_xor(a, 16), a);
    }
  }
  y[thread()] = d[0] + d[1] + d[2] + d[3];
}
KV_KERNEL void straight(float* y) { y[thread()] = add(mul(y[thread()], 3.0f), 1.0f); }
KV_KERNEL void fused(float* y) { y[thread()] = y[thread()] * 3.0f + 1.0f; }
// 200 numbers that live at once and 64 registers to hold them
KV_KERNEL void KV_BOUNDS(1024, 1) spilling(const float* x, float* y) {
  float r[200];
  KV_UNROLL
  for (int i = 0; i < 200; ++i) r[i] = x[i * 1024 + thread()];
  sync_threads();
  float sum = 0;
  KV_UNROLL
  for (int i = 0; i < 200; ++i) sum = sum * r[199 - i] + r[i];
  y[thread()] = sum;
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loops_and_their_instructions(arch):
    kernels = compile_kernels(SOURCE, arch)
    assert set(kernels) == {"nested", "branching", "straight", "fused", "spilling"}
    nested = kernels["nested"]
    assert len(nested.loops) == 2
    inner, outer = nested.loop_with("HMMA").code, nested.loop_with("LDGSTS").code
    assert mix(inner)["HMMA"] == 1
    assert mix(inner)["MOVM"] == 1
    assert not {"LDGSTS", "MUFU"} & set(mix(inner))
    assert {"LDGSTS", "MUFU", "SHFL", "HMMA"} <= set(mix(outer))
    assert 5 < len(inner) < len(outer) < len(nested.code)
    assert [x.code for x in nested.loops_with("HMMA", "LDGSTS")] == [outer]
    assert not nested.loops_with("DADD")
    assert not kernels["straight"].loops
    assert not kernels["straight"].loops_with()
    assert kernels["straight"].code[-1].startswith("BRA")
    assert sum(opcode(x) == "EXIT" for x in kernels["straight"].code) == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_shortest_way_around_a_loop(arch):
    loop = compile_kernels(SOURCE, arch)["branching"].loop_with("HMMA", "VOTE")
    once, often = loop.shortest("HMMA"), loop.shortest("HMMA", 2)
    assert mix(once)["HMMA"] == 1
    assert mix(often)["HMMA"] == 3
    assert mix(loop.code)["HMMA"] == 4
    assert 8 < len(once) < len(often) < len(loop.code)
    assert mix(once)["SHFL"] == 1
    assert mix(often)["SHFL"] == 3
    assert not any("COLLECTIVE" in x for x in loop.code)
    with pytest.raises(AssertionError, match="no way around the loop has 5 HMMA"):
        loop.shortest("HMMA", 5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_and_registers(arch):
    kernels = compile_kernels(SOURCE, arch)
    spilling, nested = kernels["spilling"], kernels["nested"]
    assert spilling.registers <= 64
    assert spilling.stack > 4 * 100
    assert len(spilling.spills()) > 100
    assert not nested.spills()
    assert nested.stack == 0
    assert 16 <= nested.registers <= 64
