"""KVarN against its released steps written out, what stays in 16 bit, and what balancing is good for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codecs.kvarn import KVarN
from packedkv.ops.bitpack import unpack

from .support import MARGIN, by_definition, error, hadamard, key_batches, normal

SIDES = ("tokens", "channels")


def balanced(tile: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The released ``variance_normalize`` of one tile in float64, in logarithms: scales of columns and of rows."""
    log_columns, log_rows = np.zeros(tile.shape[1]), np.zeros(tile.shape[0])

    def divided() -> np.ndarray:
        return tile / np.exp(log_columns)[None] / np.exp(log_rows)[:, None]

    def imbalance(now: np.ndarray) -> float:
        return sum(sd.max() / max(sd.min(), 1e-8) for sd in (now.std(0, ddof=1), now.std(1, ddof=1)))

    least, kept = imbalance(tile), (np.exp(log_columns), np.exp(log_rows))
    for _ in range(rounds):
        log_columns = np.clip(log_columns + np.log(np.clip(divided().std(0, ddof=1), 1e-3, 1e3)), -0.3, 10)
        log_rows = np.clip(log_rows + np.log(np.clip(divided().std(1, ddof=1), 1e-3, 1e3)), -0.3, 10)
        if (found := imbalance(divided())) <= least * (1 + 2.0**-30):
            least, kept = found, (np.exp(log_columns), np.exp(log_rows))
    return kept


def released(tile: np.ndarray, bits: int, rounds: int) -> np.ndarray:
    """A tile ``[rows, columns]`` as the released code writes and reads it: codes of the balanced tile, fp16 scales."""
    columns, rows = balanced(tile, rounds)
    flat = tile / columns[None] / rows[:, None]
    low, high = flat.min(1), flat.max(1)
    step = np.maximum((high - low) / (2**bits - 1), 1e-10)
    codes = np.clip(np.rint((flat - low[:, None]) / step[:, None]), 0, 2**bits - 1)
    scale, zero, balance = (a.astype(np.float16).astype(float) for a in (rows * step, rows * low, columns))
    return (codes * scale[:, None] + zero[:, None]) * balance[None]


def tile_of(codec: KVarN, y: torch.Tensor) -> np.ndarray:
    """One tile ``[1, 1, G, D]`` as rows and columns."""
    tile = y[0, 0].double().numpy()
    return tile.T if codec.along == "tokens" else tile


@by_definition
@given(
    x=key_batches(tokens=16),
    along=st.sampled_from(SIDES),
    bits=st.sampled_from((2, 3, 4)),
    rounds=st.sampled_from((0, 1, 8)),
)
def test_bytes_are_those_of_the_definition(x, along, bits, rounds):
    codec = KVarN(bits, along, 16, rounds)
    y = codec.to_code(x, {})
    torch.testing.assert_close(
        y.double(), x.double() @ hadamard(x.shape[-1]), rtol=1e-6, atol=1e-6 * float(x.abs().max())
    )
    tile, payload = tile_of(codec, y), codec.encode(y, {})
    columns, _ = balanced(tile, rounds)
    held = payload["balance"][0, 0, 0].double().numpy()
    unit = 2.0 ** max(0, math.frexp(np.abs(tile / columns).max())[1] - 15)
    assert np.all(np.abs(held - columns * unit) <= columns * unit * 2.0**-11 * 1.001)
    flat = (tile.astype(np.float32) / held.astype(np.float32)[None]).astype(float)  # float32, as GroupInt is
    zero, scale = payload["zero"][0, 0, 0].double().numpy(), payload["scale"][0, 0, 0].double().numpy()
    assert np.array_equal(zero, flat.min(1).astype(np.float16).astype(float))
    step = (flat.max(1) - zero) / (2**bits - 1)
    assert np.all(np.abs(scale - np.maximum(step, 2.0**-24)) <= np.maximum(step * 2.0**-11 * 1.001, 2.0**-25))
    codes = unpack(payload["codes"][0, 0, 0], bits, x.shape[-1]).double().numpy()  # [G, D]
    codes = codes.T if along == "tokens" else codes
    places = (flat - zero[:, None]) / scale[:, None]
    clear = np.abs(places - np.floor(places) - 0.5) > MARGIN * np.maximum(1, np.abs(places))
    assert np.array_equal(codes[clear], np.clip(np.rint(places), 0, 2**bits - 1)[clear])
    wanted = (scale[:, None] * codes + zero[:, None]) * held[None]
    decoded = tile_of(codec, codec.decode(payload, {}))
    np.testing.assert_allclose(decoded, wanted, rtol=0, atol=1e-6 * max(np.abs(wanted).max(), 1e-30))


@pytest.mark.parametrize("along", SIDES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_comes_back_is_what_the_released_code_gives(bits, along):
    """Up to the fp16 of the numbers that codes are computed with: its codes come from numbers that it does not hold."""
    x = 2 * normal(1, 1, 128, 128)
    x[..., 7] *= 10
    x[:, :, 5] *= 4
    codec = KVarN(bits, along)
    y = codec.to_code(x, {})
    theirs = released(tile_of(codec, y), bits, 8)
    ours = tile_of(codec, codec.decode(codec.encode(y, {}), {}))
    tile = tile_of(codec, y)
    errors = [np.square(z - tile).sum() / np.square(tile).sum() for z in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.005)
    # a code that flips moves by a step, whose square is 12 times the error's
    assert np.square(ours - theirs).sum() < 0.05 * np.square(theirs - tile).sum()


@pytest.mark.parametrize("along", SIDES)
def test_balanced_tiles_have_equal_variances(along):
    x = 30 * normal(1, 1, 128, 64) * torch.exp(normal(128, 1, seed=1)) * torch.exp(normal(64, seed=2))
    tile = tile_of(KVarN(4, along), x)
    columns, rows = balanced(tile, 8)
    held = KVarN(4, along).encode(x, {})["balance"][0, 0, 0].double().numpy()
    np.testing.assert_allclose(held, columns, rtol=2.0**-11 * 1.001)
    spread = (tile / held[None] / rows[:, None]).std(0, ddof=1)
    assert spread.max() / spread.min() < 1.5
    assert tile.std(0).max() / tile.std(0).min() > 10


@pytest.mark.parametrize("along", SIDES)
def test_balancing_pays_where_columns_differ_in_length(along):
    scales = torch.exp(normal(128, seed=3))
    x = 3 * normal(1, 1, 128, 128) * (scales[:, None] if along == "tokens" else scales)
    assert error(KVarN(3, along), (x.double() @ hadamard(128)).float()) < 1.6 * error(
        KVarN(3, along), 3 * normal(1, 1, 128, 128)
    )

    def in_place(rounds):
        codec = KVarN(3, along, rounds=rounds)
        columns = x.square().sum(-1 if along == "tokens" else -2, keepdim=True)  # each column counts the same
        return float(((codec.decode(codec.encode(x, {}), {}) - x).square() / columns).sum())

    assert in_place(8) < 0.35 * in_place(0)


@pytest.mark.parametrize("along", SIDES)
def test_a_tile_of_small_numbers_is_not_balanced(along):
    """Scales are at least e^-0.3 as released: the unit of the values decides whether they are balanced."""
    x = 0.1 * normal(1, 1, 128, 64) * torch.exp(0.3 * normal(128, 1, seed=1)) * torch.exp(0.3 * normal(64, seed=2))
    held = KVarN(4, along).encode(x, {})["balance"]
    assert held.unique().numel() == 1
    assert float(held[0, 0, 0, 0]) in (1.0, pytest.approx(math.exp(-0.3), rel=2**-11))
    assert KVarN(4, along).encode(100 * x, {})["balance"].unique().numel() > 30


@pytest.mark.parametrize("along", SIDES)
@pytest.mark.parametrize("rounds", [0, 8])
def test_numbers_beyond_fp16_are_balanced_into_it(along, rounds):
    x = normal(1, 1, 128, 64).clamp(-2, 2) * 3e5  # a rotated row reaches 65504 sqrt(D)
    payload = KVarN(4, along, rounds=rounds).encode(x, {})
    assert all(bool(part.isfinite().all()) for name, part in payload.items() if name != "codes")
    assert float(payload["zero"].abs().max()) < 2**15
    assert error(KVarN(4, along, rounds=rounds), x) < 0.02
