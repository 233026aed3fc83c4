"""Geometries of all model families on the kernels of CPUs and of GPUs, emulated, against the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.description import kernels_for
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.kernels.mean import chosen_pairs, pairs_of
from packedkv.scheme import KVScheme
from packedkv.store.site import LayerSite, MeanRemoval
from tests.geometries import GEOMETRIES, Geometry
from tests.kernels.conftest import ABLE, normal, use
from tests.kernels.gpu_cases import truth

OFTEN = ("StableLM 3B", "Qwen2.5 0.5B", "GLM-4 9B", "Phi-4 mini")
"""Tried on the emulator in every run: uneven numbers of pairs, interleaved ones, partial rotary, 7 query heads."""
NAMES = [geometry.model for geometry in GEOMETRIES]
STRIDE = 7
"""From one geometry's first preset to the next one's."""
PADDING = torch.tensor([[5], [0]])


def cpus_read(scheme: KVScheme, dim: int) -> bool:
    try:
        cpu_spec(scheme.key, scheme.value, dim, scheme.page_layout(dim).page_tokens)
    except (UnsupportedError, ShapeError):
        return False
    return True


def gpus_read(scheme: KVScheme, dim: int) -> bool:
    try:
        return kernels_for(scheme, dim)["decode"] == "cuda"
    except ShapeError:
        return False


def in_turn(
    read: Callable[[KVScheme, int], bool], often: Sequence[str] = (), wide: int | None = None
) -> pytest.MarkDecorator:
    """Each geometry with presets that kernels read: one in every run, or of those in ``often``; others ``wide``."""
    found = []
    presets = [(preset, packedkv.get(preset).for_layer(8, 24)) for preset in packedkv.presets()]
    for at, geometry in enumerate(GEOMETRIES):
        served = [preset for preset, scheme in presets if read(scheme, geometry.head_dim)]
        for i in range(len(served))[:wide]:
            preset, ran = served[(STRIDE * at + i) % len(served)], i == 0 and geometry.model in (often or NAMES)
            marks = [] if ran else [pytest.mark.wide]
            found.append(pytest.param(preset, geometry, marks=marks, id=f"{preset}-{geometry.model}"))
    return pytest.mark.parametrize(("preset", "geometry"), found)


class Pair:
    """A cache on kernels and one on the reference, fed alike; keys without their mean before RoPE, or with it."""

    def __init__(self, preset: str, geometry: Geometry, *, less: bool, size: float = 2.0) -> None:
        self.geometry, self.rotary = geometry, geometry.rotary
        self.heads = 1 if geometry.group > 8 else 2
        self.mean = size * normal(1, self.heads, geometry.head_dim, seed=5)
        scheme = packedkv.get(preset).for_layer(8, 24)
        if less:
            scheme = packedkv.get(preset + ("," if ":" in preset else ":") + "mean=pre").for_layer(8, 24)
        mean = MeanRemoval("pre", self.rotary, self.mean) if less else None
        site = LayerSite(scheme, 8, mean=mean, most=64)
        self.fused, self.plain, self.at = FusedLayerCache(site), LayerCache(site), 0

    def append(self, n: int) -> None:
        shape = 2, self.heads, n, self.geometry.head_dim
        positions = (1000 + self.at + torch.arange(n) - PADDING).clamp_min(-1)
        k, v = normal(*shape, seed=self.at), normal(*shape, seed=self.at + 1)
        k = k + self.rotary.turn(self.mean[:, :, None], positions)
        k, v = k.half().float(), v.half().float()
        for cache in (self.fused, self.plain):
            cache.append(k, v, positions)
        self.at += n

    def error(self, cache: FusedLayerCache | LayerCache, n: int) -> float:
        """Largest difference of attention by n query tokens from float64 over decoded ones, of the largest value.

        With learned sinks, which tell a score that is off by the same number for all tokens.
        """
        heads, dim = self.heads * self.geometry.group, self.geometry.head_dim
        q, sinks = normal(2, heads, n, dim, seed=n + self.at), 6 + normal(heads, seed=n)
        hidden = torch.arange(self.at) > self.at - n + torch.arange(n)[:, None]
        each = zip(q, *cache.decode(), strict=True)
        want = torch.stack([truth(*x, dim**-0.5, 0.0, sinks, hidden) for x in each])
        return float((cache.attend(q, sinks=sinks) - want).abs().max() / want.abs().max())

    def check(self, cache: FusedLayerCache | LayerCache, near: float) -> None:
        """Attention of one and of several query tokens; where values and keys are encoded at once, equal tokens."""
        for n in (1, 5):
            assert self.error(cache, n) < near
        if self.fused.unit == 1:
            assert all(map(torch.equal, self.fused.decode(), self.plain.decode()))


@pytest.mark.parametrize("less", [False, True], ids=["whole", "less"])
@in_turn(cpus_read)
def test_cpu(preset: str, geometry: Geometry, less: bool, compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(preset, geometry, less=less)
    for n in (90, 1, 40):
        pair.append(n)
    for variant in ABLE:
        use(variant, monkeypatch)
        for cache in (pair.fused, pair.plain):
            pair.check(cache, 1e-5)


@pytest.mark.parametrize("less", [False, True], ids=["whole", "less"])
@in_turn(gpus_read, OFTEN, wide=3)
def test_cuda(preset: str, geometry: Geometry, less: bool, machine: dict[str, Any]) -> None:
    pair = Pair(preset, geometry, less=less)
    for n in (90, 1, 40):
        pair.append(n)
    pair.check(pair.fused, 1e-2)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=NAMES)
def test_each_pair_is_counted_once(geometry: Geometry) -> None:
    """Of all pairs of a head (GPUs), of those that RoPE rotates (CPUs), and where few have a mean."""
    dim, rotated = geometry.head_dim, geometry.rotated
    channels = pairs_of(dim, rotated, geometry.interleaved)
    assert sorted(c for pair in channels for c in pair) == list(range(dim))
    for some in (channels, channels[: rotated // 2]):
        for every in (1, 3, dim):
            mean = torch.ones(1, 2, dim)
            mean[..., torch.arange(dim) % every > 0] = 0
            for row in chosen_pairs(mean, some) if some else ():
                assert len(set(row)) == len(row)
                assert {p for p, pair in enumerate(some) if any(c % every == 0 for c in pair)} <= set(row)
