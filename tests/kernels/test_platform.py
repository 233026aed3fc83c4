"""The emulator that the CUDA kernels' tests run on: its arithmetic and exchanges are right, and it finds mistakes."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.kernels.harness import HEADERS, ROOT, EmulationError, Library, Out, build, same_for_any_order


def words(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, tuple(shape), dtype=torch.int32, generator=generator)


def halves(x: np.ndarray) -> torch.Tensor:
    """Pairs of halves as 32-bit words."""
    return torch.from_numpy(np.ascontiguousarray(x.astype(np.float16))).view(torch.int32)


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

NUMBERS = """
#include "platform.cuh"
using namespace kv;
extern "C" void from_double(const double* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = half_bits(x[i]);
}
extern "C" void to_float(const uint16_t* x, float* y, float* z, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = half_float(x[i]), z[i] = bf16_float(x[i]);
}
"""


def check_halves(found: torch.Tensor, x: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    codes = found.numpy().view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(codes[~nan], expected.view(np.uint16)[~nan])
    assert (codes[nan] == 0x7FFF).all()


def test_every_half_and_bf16():
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    half, bf16 = torch.empty(65536), torch.empty(65536)
    build(NUMBERS).call("to_float", codes, Out(half), Out(bf16), 65536)
    assert torch.equal(half.nan_to_num(1.5), codes.view(torch.float16).float().nan_to_num(1.5))
    assert torch.equal(half.isnan(), codes.view(torch.float16).isnan())
    assert torch.equal(bf16.view(torch.int32), codes.view(torch.bfloat16).float().view(torch.int32))


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
    build(NUMBERS).call("from_double", torch.from_numpy(x), Out(y), len(x))
    check_halves(y, x)
    # rounding to fp32 first is another thing: the points tell the difference
    with np.errstate(over="ignore", invalid="ignore"):
        twice = x.astype(np.float32).astype(np.float16)
    assert (twice.view(np.uint16) != y.numpy().view(np.uint16))[~np.isnan(x)].any()


# -- exchanges ---------------------------------------------------------------------------------------------------------

EXCHANGES = """
#include "platform.cuh"
using namespace kv;
KV_KERNEL void shuffles(const uint32_t* x, const double* d, uint32_t* y, double* z, int mask, const int32_t* from) {
  int l = thread() % 32;
  y += thread() * 4, z += thread() * 2;
  y[0] = kv::shfl_xor(x[thread()], mask);
  y[1] = float_bits(kv::shfl_xor(bits_float(x[thread()]), mask));
  y[2] = kv::shfl(x[thread()], from[l]);
  y[3] = float_bits(kv::shfl(bits_float(x[thread()]), from[l]));
  z[0] = kv::shfl_xor(d[thread()], mask);
  z[1] = kv::shfl(d[thread()], from[l]);
}
extern "C" void run_shuffles(const uint32_t* x, const double* d, uint32_t* y, double* z, int64_t mask,
                             const int32_t* from) {
  launch(1, 1, 1, 64, 0, shuffles, x, d, y, z, (int)mask, from);
}
KV_KERNEL void votes(const uint32_t* x, uint32_t* y) {
  bool p = x[thread()];
  y += thread() * 3;
  y[0] = kv::ballot(p), y[1] = kv::any(p), y[2] = kv::all(p);
}
extern "C" void run_votes(const uint32_t* x, uint32_t* y) { launch(1, 1, 1, 64, 0, votes, x, y); }
KV_KERNEL void multiply(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  int l = thread();
  float d[4] = {c[4 * l], c[4 * l + 1], c[4 * l + 2], c[4 * l + 3]};
  kv::mma(d, a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3], b[2 * l], b[2 * l + 1]);
  for (int i = 0; i < 4; i++) y[4 * l + i] = d[i];
}
KV_KERNEL void multiply_half(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  int l = thread();
  float d[4] = {c[4 * l], c[4 * l + 1], c[4 * l + 2], c[4 * l + 3]};
  kv::mma(d, a[4 * l], a[4 * l + 1], b[2 * l]);
  for (int i = 0; i < 4; i++) y[4 * l + i] = d[i];
}
extern "C" void run_multiply_half(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  launch(1, 1, 1, 32, 0, multiply_half, a, b, c, y);
}
extern "C" void run_multiply(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  launch(1, 1, 1, 32, 0, multiply, a, b, c, y);
}
KV_KERNEL void transpose(const uint32_t* x, uint32_t* y) { y[thread()] = kv::transpose8(x[thread()]); }
extern "C" void run_transpose(const uint32_t* x, uint32_t* y) { launch(1, 1, 1, 32, 0, transpose, x, y); }
"""


@pytest.mark.parametrize("seed", [0, 7])
def test_shuffles(seed):
    library = build(EXCHANGES)
    x, d = words((64,)), torch.randn(64, dtype=torch.float64)
    x[(x & 0x7F800000) == 0x7F800000] = 1  # a float register may not keep a NaN's bits
    source = torch.randint(0, 32, (32,), dtype=torch.int32)
    lane, warp = torch.arange(64) % 32, torch.arange(64) // 32 * 32
    for mask in (0, 1, 2, 4, 8, 16, 31, 21):
        y, z = torch.empty(64, 4, dtype=torch.int32), torch.empty(64, 2, dtype=torch.float64)
        library.call("run_shuffles", x, d, Out(y), Out(z), mask, source, seed=seed)
        other, chosen = warp + (lane ^ mask), warp + source.long()[lane]
        assert torch.equal(y, torch.stack([x[other], x[other], x[chosen], x[chosen]], dim=1))
        assert torch.equal(z, torch.stack([d[other], d[chosen]], dim=1))


def test_ballot_any_and_all_of_a_warp():
    for x in (torch.zeros(64), torch.ones(64), (torch.arange(64) % 3 == 1), torch.arange(64) == 63):
        bits = x.int()
        y = torch.empty(64, 3, dtype=torch.int32)
        build(EXCHANGES).call("run_votes", bits, Out(y))
        for warp in range(2):
            mine = bits[warp * 32 : warp * 32 + 32].tolist()
            ballot = sum(b << i for i, b in enumerate(mine))
            rows = y[warp * 32 : warp * 32 + 32].long() & 0xFFFFFFFF
            assert (rows == torch.tensor([ballot, any(mine), all(mine)])).all()


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matrices [16, 16], [16, 8], [16, 8] as the lanes hold them, by the comment in platform.cuh."""
    left, right, sums = np.empty((32, 4, 2)), np.empty((32, 2, 2)), np.empty((32, 4))
    for lane in range(32):
        g, j = divmod(lane, 4)
        for i, (row, column) in enumerate([(g, 2 * j), (g + 8, 2 * j), (g, 2 * j + 8), (g + 8, 2 * j + 8)]):
            left[lane, i] = a[row, column : column + 2]
        for i, row in enumerate([2 * j, 2 * j + 8]):
            right[lane, i] = b[row : row + 2, g]
        for i, row in enumerate([g, g + 8]):
            sums[lane, 2 * i : 2 * i + 2] = c[row, 2 * j : 2 * j + 2]
    return halves(left), halves(right), torch.from_numpy(sums.astype(np.float32))


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 60.0])
def test_mma(seed, scale):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(s).astype(np.float16).astype(np.float64) for s in ((16, 16), (16, 8)))
    a = (a * scale).astype(np.float16).astype(np.float64)  # 2^-20: subnormal halves
    c = rng.standard_normal((16, 8)).astype(np.float32).astype(np.float64)
    left, right, sums = fragments(a, b, c)
    y = torch.empty(32, 4)
    build(EXCHANGES).call("run_multiply", left, right, sums, Out(y), seed=seed)
    expected = fragments(a, b, a @ b + c)[2]
    torch.testing.assert_close(y, expected, rtol=2.0**-23, atol=0)
    transposed = fragments(a, b, (a.T @ b) + c)[2]
    assert not torch.allclose(y, transposed, rtol=1e-2) or scale < 1e-3
    build(EXCHANGES).call("run_multiply_half", left, right, sums, Out(y), seed=seed)
    expected = fragments(a, b, a[:, :8] @ b[:8] + c)[2]
    torch.testing.assert_close(y, expected, rtol=2.0**-23, atol=0)


def test_transpose8():
    matrix = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    y = torch.empty(32, dtype=torch.int32)
    build(EXCHANGES).call("run_transpose", matrix.view(torch.int32), Out(y))
    assert torch.equal(y.view(torch.int16).view(8, 8), matrix.T)


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
