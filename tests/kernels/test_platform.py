"""The emulator that the CUDA kernels' tests run on: its arithmetic and exchanges are right, and it finds mistakes."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.kernels.harness import HEADERS, ROOT, EmulationError, Library, Out, build, same_for_any_order
from tests.kernels.platform_sources import COPIES, EXCHANGES, MISTAKES, NUMBERS, RACE


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


def copies(pending: int, groups: int, library: Library | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 255, (groups, 512), dtype=torch.uint8)  # never 255
    y = torch.zeros_like(x)
    (library or build(COPIES)).call("run_copies", pending, x, Out(y), groups)
    return x, y


def test_copies_arrive_at_the_wait():
    x, y = copies(0, 4)
    assert torch.equal(x, y)


@pytest.mark.parametrize(("pending", "groups"), [(1, 1), (1, 4), (3, 4), (3, 2)])
def test_a_missing_wait_shows(pending, groups):
    x, y = copies(pending, groups)
    arrived = max(groups - pending, 0)
    assert torch.equal(x[:arrived], y[:arrived])
    assert (y[arrived:] == 255).all()


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


# -- tensors -----------------------------------------------------------------------------------------------------------
