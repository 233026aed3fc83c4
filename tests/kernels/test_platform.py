"""The emulator that the CUDA kernels' tests run on: it rounds right and finds mistakes."""

import re

import numpy as np
import pytest
import torch

from tests.kernels.harness import HEADERS, ROOT, EmulationError, Library, Out, build, same_for_any_order

# -- names -------------------------------------------------------------------------------------------------------------


def test_the_emulator_has_every_name():
    cuda = (HEADERS / "platform.cuh").read_text().split("#ifdef KV_EMULATE")[1].split("\n#endif\n\nnamespace kv {")[0]
    emulator = (ROOT / "tests/kernels/emulator.h").read_text()
    macros = set(re.findall(r"#define (KV_\w+)", cuda))
    functions = set(re.findall(r"^(?:template <.*?> )?KV_DEV \w+ (\w+)\(", cuda, re.M))
    assert {"KV_DEV", "KV_KERNEL"} <= macros
    assert {"mma", "copy16", "copy_wait", "half_bits", "shfl_xor"} <= functions
    assert not macros - set(re.findall(r"#define (KV_\w+)", emulator))
    assert not functions - set(
        re.findall(r"^(?:.*> |__attribute__\(\(noinline\)\) )?inline \w+ (\w+)\(", emulator, re.M)
    )


# -- numbers -----------------------------------------------------------------------------------------------------------

HALVES = """
#include "platform.cuh"
extern "C" void from_double(const double* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = kv::half_bits(x[i]);
}
"""


def points_to_round() -> np.ndarray:
    """Midpoints of neighbouring halves and their neighbours in double, and random bits."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    finite = np.append(finite, 65536.0)
    ties = (finite[1:] + finite[:-1]) / 2
    near = np.concatenate([finite, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9)])
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(100_000) * 2.0 ** rng.integers(-30, 20, 100_000)
    bits = rng.integers(0, 2**64, 100_000, dtype=np.uint64).view(np.float64)
    one = np.concatenate([near, spread, bits, [0.0, 5e-324, 1e-300, 2.0**-25, np.inf, np.nan]])
    return np.concatenate([one, -one])


def test_half_from_double_is_rounded_once():
    x = points_to_round()
    y = torch.empty(len(x), dtype=torch.int16)
    build(HALVES).call("from_double", torch.from_numpy(x), Out(y), len(x))
    found, nan = y.numpy().view(np.uint16), np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        once, twice = (held.astype(np.float16).view(np.uint16) for held in (x, x.astype(np.float32)))
    np.testing.assert_array_equal(found[~nan], once[~nan])
    assert (found[nan] == 0x7FFF).all()
    # rounding to fp32 first is another thing: the points tell the difference
    assert (twice != found)[~nan].any()


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES = """
#include "platform.cuh"
using namespace kv;
KV_DEV int depth(volatile int* at, int n) {
  volatile int room[256];
  room[n % 256] = n;
  return n ? depth(at, n - 1) + room[n % 256] : *at;
}
KV_KERNEL void mistake(int kind, int32_t* in, int32_t* out) {
  KV_DYNAMIC_SHARED(shared);
  const int t = thread();
  if (kind == 1 && t == 3) sync_threads();
  if (kind == 2 && t == 5) any(true);
  if (kind == 3 && t == 7) return;
  if (kind == 4 && t == 9) shared[500] = 1;
  if (kind == 5 && t == 9) shared[in[0]] = 1;
  if (kind == 6 && t == 40) copy16(shared + 8, in);
  if (kind == 7 && t == 40) copy16(shared + 496, in);
  if (kind == 8) out[1] = ((const int32_t*)(shared + t))[0];
  if (kind == 9 && t == 33) out[0] = in[64];
  if (kind == 10 && t == 33) in[1] = 2;
  if (kind == 11 && t == 33) out[13] = 2;
  if (kind == 12 && t == 33) out[0] = depth(out, 100000);
  if (kind == 13 && t == 33) out[0] = in[0] / in[1];
  if (kind == 14 && t == 33) out[0] = 1 << in[2];
  if (kind == 15 && t == 33) out[in[0] * 1000] = 1;
  if (kind == 16 && t == 3) shfl_xor(1.0, 1);
  else if (kind == 16) shfl_xor(1.0f, 1);
  if (kind == 17 && t == 33) copy16(shared, out);
  for (volatile int i = 0; kind == 19 && t == 33; i = i) {}
  if (kind == 18 && t >= 32) return;  // allowed
  if (kind == 18) sync_threads();
  sync_warp();
}
extern "C" void run_mistake(int64_t kind, int32_t* in, int32_t* out) {
  launch(1, 1, 2, 64, 500, mistake, (int)kind, in, out);
}
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (1, r"deadlock: warp 0: lanes fffffff7 in sync_warp, 00000008 in sync_threads"),
        (2, r"thread 5 .*a vote, but lanes 0000001f are in sync_warp"),
        (3, r"thread 7 .*returns, but lanes 0000007f are in sync_warp"),
        (4, r"outside the shared memory: byte 500 of 500"),
        (5, r"thread 9 .*outside the shared memory: byte 700 of 500"),
        (6, r"thread 40 .*copy16 off 16 bytes: to byte 8"),
        (7, r"thread 40 .*copy16 to byte 496 of 500"),
        (8, r"thread 1 .*undefined behaviour"),
        (9, r"thread 33 .*outside a global buffer: byte 256 of 256"),
        (10, r"thread 33 .*write to read-only a global buffer: byte 4 of 256"),
        (11, r"behind the end of buffer 1: \(13,\)"),
        (12, r"thread 33 .*stack is full"),
        (13, r"thread 33 .*(undefined behaviour|division by zero)"),
        (14, r"thread 33 .*undefined behaviour"),
        (15, r"outside a global buffer: byte 2800000 of 52"),
        (16, r"shfl_xor of (32|64) bits, but lanes"),
        (17, r"thread 33 .*copy16 off 16 bytes: to byte 0"),
    ],
)
def test_mistakes_are_found(kind, message):
    values = torch.zeros(64, dtype=torch.int32)
    values[0], values[2] = 700, 40
    out = torch.zeros(14, dtype=torch.int32)[1:] if kind == 17 else torch.zeros(13, dtype=torch.int32)
    with pytest.raises(EmulationError, match=message):
        build(MISTAKES).call("run_mistake", kind, values, Out(out))


def test_an_endless_loop_ends(monkeypatch):
    monkeypatch.setenv("KV_EMULATE_SECONDS", "1")
    with pytest.raises(EmulationError, match=r"thread 33 .*an endless loop"):
        build(MISTAKES).call("run_mistake", 19, torch.zeros(64, dtype=torch.int32), None)


def test_fibers_of_other_processors():
    """The portable way of changing stacks, which x86-64 does not take."""
    library = build(MISTAKES, ("-DKV_EMULATE_UCONTEXT",))
    values, out = torch.zeros(64, dtype=torch.int32), torch.zeros(13, dtype=torch.int32)
    for kind, message in ((1, "deadlock"), (10, r"thread 33 .*read-only"), (12, "stack is full")):
        with pytest.raises(EmulationError, match=message):
            library.call("run_mistake", kind, values, Out(out))
    library.call("run_mistake", 0, values, Out(out), seed=2)
    x, y = copies(0, 4, build(COPIES, ("-DKV_EMULATE_UCONTEXT",)))
    assert torch.equal(x, y)


# -- copies and barriers -----------------------------------------------------------------------------------------------

COPIES = """
#include "platform.cuh"
using namespace kv;
template <int PENDING> KV_DEV void body(const uint8_t* x, uint8_t* y, int groups) {
  KV_DYNAMIC_SHARED(shared);
  for (int i = 0; i < groups; i++) {
    copy16(shared + (i * 32 + thread()) * 16, x + (i * 32 + thread()) * 16);
    copy_commit();
  }
  copy_wait<PENDING>();
  sync_warp();
  // what the neighbour's copies brought
  for (int i = 0; i < groups * 16; i++) {
    int at = (i / 16 * 32 + (thread() + 1) % 32) * 16 + i % 16;
    y[at] = shared[at];
  }
}
KV_KERNEL void wait0(const uint8_t* x, uint8_t* y, int groups) { body<0>(x, y, groups); }
KV_KERNEL void wait1(const uint8_t* x, uint8_t* y, int groups) { body<1>(x, y, groups); }
KV_KERNEL void wait3(const uint8_t* x, uint8_t* y, int groups) { body<3>(x, y, groups); }
extern "C" void run_copies(int64_t pending, const uint8_t* x, uint8_t* y, int64_t n) {
  launch(1, 1, 1, 32, n * 512, pending == 0 ? wait0 : pending == 1 ? wait1 : wait3, x, y, (int)n);
}
"""


def copies(pending: int, groups: int, library: Library | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 255, (groups, 512), dtype=torch.uint8)  # never 255
    y = torch.zeros_like(x)
    (library or build(COPIES)).call("run_copies", pending, x, Out(y), groups)
    return x, y


@pytest.mark.parametrize(("pending", "groups"), [(0, 4), (1, 1), (1, 4), (3, 4), (3, 2)])
def test_copies_arrive_at_the_wait_and_a_missing_wait_shows(pending, groups):
    x, y = copies(pending, groups)
    arrived = max(groups - pending, 0)
    assert torch.equal(x[:arrived], y[:arrived])
    assert (y[arrived:] == 255).all()


RACE = """
#include "platform.cuh"
using namespace kv;
KV_KERNEL void reverse(const int32_t* x, int32_t* y, int sync) {
  KV_DYNAMIC_SHARED(shared);
  int32_t* at = (int32_t*)shared;
  at[thread()] = x[thread()];
  if (sync == 2) sync_threads();
  if (sync == 1) sync_warp();
  y[thread()] = at[127 - thread()];
}
extern "C" void run_reverse(const int32_t* x, int32_t* y, int64_t sync) {
  launch(1, 1, 1, 128, 512, reverse, x, y, (int)sync);
}
"""


def test_a_missing_barrier_shows_as_a_race():
    library = build(RACE)
    x = torch.arange(128, dtype=torch.int32)

    def run(sync):
        def once(seed):
            y = torch.zeros(128, dtype=torch.int32)
            library.call("run_reverse", x, Out(y), sync, seed=seed)
            return [y]

        return once

    same_for_any_order(run(2))
    assert torch.equal(run(2)(0)[0], x.flip(0))
    for sync in (0, 1):
        with pytest.raises(AssertionError, match="a race"):
            same_for_any_order(run(sync))
