"""Facts of KIVI: what leaves the window when, bits, and why keys are grouped along tokens."""

import numpy as np
import pytest
import torch

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.turboquant import TurboQuant
from packedkv.ops.lloyd_max import unit_levels

from .support import normal


def encoded_counts(spec: str, prefill: int, steps: int) -> list[tuple[int, int]]:
    """Encoded keys and values after the prefill and after each decode step."""
    k, v = normal(2, 1, 1, prefill + steps, 64).half()
    cache = LayerCache(packedkv.get(spec))
    cache.append(k[:, :, :prefill], v[:, :, :prefill])
    counts = []
    for step in range(steps + 1):
        if step:
            at = prefill + step - 1
            cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        counts.append((cache.roles["key"].encoded, cache.roles["value"].encoded))
    return counts


@pytest.mark.parametrize("spec", ["kivi-2", "kivi-4", "kivi-sink-2", "innerq-base"])
@pytest.mark.parametrize("prefill", [0, 1, 127, 128, 159, 160, 161, 300])
def test_the_window_never_falls_short_whatever_the_prefill(spec, prefill):
    scheme = packedkv.get(spec)
    assert scheme.sink + scheme.window == 128
    for step, counts in enumerate(encoded_counts(spec, prefill, 100)):
        for role, encoded in zip(ROLES, counts, strict=True):
            block = scheme.codec(role).block_tokens
            assert encoded == block * max(0, (prefill + step - 128) // block)


def test_groups_of_keys_start_behind_the_sink():
    # tokens 32..63 are one group: making token 40 huge in a channel spoils that channel there and nowhere else
    k = normal(1, 1, 256, 64).half()
    loud = k.clone()
    loud[0, 0, 40, 3] = 1000
    quiet = packedkv.compress("kivi-sink-2", k, k).decode()[0]
    spoiled = packedkv.compress("kivi-sink-2", loud, k).decode()[0]
    changed = (quiet != spoiled)[0, 0].nonzero()
    assert changed[:, 1].unique().tolist() == [3]
    assert changed[:, 0].min() >= 32
    assert changed[:, 0].max() <= 63


def test_an_outlier_channel_of_the_keys_costs_its_neighbours_nothing_along_tokens():
    k = normal(1, 1, 1024, 128)
    k[..., 17] += 30
    rest = [c for c in range(128) if c != 17]

    def error(codec: GroupInt) -> float:
        y = codec.decode(codec.encode(k, {}), {})
        return float((y - k)[..., rest].square().mean())

    along_tokens = error(GroupInt(2, 32, "tokens"))
    assert along_tokens == pytest.approx(0.1544, rel=0.03)  # as if there were no outlier
    assert error(GroupInt(2, 0, "channels")) > 5 * along_tokens
    assert error(GroupInt(2, 32, "channels")) > 2 * along_tokens


# -- groups of 64 and 128, TurboQuant values ---------------------------------------------------------------------------

LONG = {
    "kivi-g64-4": (4, 64),
    "kivi-g64-3": (3, 64),
    "kivi-g128-4": (4, 128),
    "kivi-tq-4": (4, 128),
    "kivi-tq-3": (3, 128),
}


def by_definition(x: np.ndarray, bits: int, group: int, axis: int) -> np.ndarray:
    """``x [N, D]`` in asymmetric groups along an axis as the module's text says, one group after the other."""
    out, top = np.empty_like(x), 2**bits - 1
    for first in range(0, x.shape[axis], group):
        part = [slice(None), slice(None)]
        part[axis] = slice(first, first + group)
        own = x[tuple(part)]
        zero = own.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
        scale = ((own.max(axis, keepdims=True) - zero) / np.float32(top)).astype(np.float16).astype(np.float32)
        code = np.clip(np.rint((own - zero) / scale), 0, top)
        out[tuple(part)] = scale * code + zero
    return out


def turboquant_by_definition(x: np.ndarray, bits: int, signs: np.ndarray) -> np.ndarray:
    """``gamma s H c[nearest(H (s x / gamma))]`` in float64, H by its definition, gamma / sqrt(D) as fp16."""
    dim = x.shape[1]
    order = dim & -dim  # of the Hadamard blocks along the diagonal
    bit = np.array([[bin(i & j).count("1") % 2 for j in range(order)] for i in range(order)])
    h = np.kron(np.eye(dim // order), (1 - 2 * bit) / np.sqrt(order))
    gamma = np.linalg.norm(x, axis=1, keepdims=True)
    u = (x * signs / gamma) @ h.T
    levels = unit_levels(dim, 2**bits).numpy()
    nearest = levels[np.abs(u[..., None] - levels).argmin(-1)]
    held = (gamma / np.sqrt(dim)).astype(np.float16).astype(np.float64) * np.sqrt(dim)
    return held * signs * (nearest @ h)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("spec", LONG)
def test_long_groups_agree_with_an_encoder_written_from_the_definition(spec: str, head_dim: int):
    bits, group = LONG[spec]
    k, v = normal(2, 1, 2, 256, head_dim, seed=3).half().float()
    k[..., 5] = (k[..., 5] * 30 + 100).half().float()
    held = packedkv.compress(packedkv.get(spec).without_windows(), k, v, layer=2, seed=7)
    keys, values = held.decode()
    signs = TurboQuant(bits).fit(Site(2, "value", 2, head_dim, 7))["signs"]
    for head in range(2):
        want = by_definition(k[0, head].numpy(), bits, group, 0)
        np.testing.assert_array_equal(keys[0, head].numpy(), want)
        if "tq" not in spec:
            np.testing.assert_array_equal(values[0, head].numpy(), by_definition(v[0, head].numpy(), bits, group, 1))
            continue
        want = turboquant_by_definition(v[0, head].double().numpy(), bits, signs[0, head].double().numpy())
        np.testing.assert_allclose(values[0, head].numpy(), want, rtol=0, atol=1e-4)


def test_keys_in_long_groups_with_turboquant_values_beat_turboquant_where_channels_differ():
    k, v = normal(2, 1, 2, 512, 128)
    k = k * 2.0 ** torch.linspace(-3, 3, 128)  # every channel of another size, as keys of models have
    ours, theirs = packedkv.fake_quant("kivi-tq-4", k, v), packedkv.fake_quant("turboquant-4", k, v)

    def error(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x - y).square().mean(2).div(x.square().mean(2)).mean())  # of each channel, in its own size

    assert error(k, ours[0]) < error(k, theirs[0]) / 20
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)
