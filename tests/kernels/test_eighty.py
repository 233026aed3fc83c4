"""Heads of 80 channels (Phi-2, StableLM 3B), no multiple of 32: the whole way of a cache, refusals, machine code."""

from typing import Any

import pytest
import torch

import kvcodec
from kvcodec.cache.fused import FusedLayerCache, fused_refusal
from kvcodec.cache.host import LayerCache
from kvcodec.kernels.cuda import decode as attention
from kvcodec.kernels.cuda import history, launch
from kvcodec.kernels.cuda.launch import machine_of
from kvcodec.kernels.spec import decode_spec, kernels_for
from tests.kernels.emulation import machine  # noqa: F401  a fixture
from tests.kernels.offline import ARCHITECTURES, compile_kernels

DIM = 80
SERVED = ["dense", "fp8", "int-2", "int-4", "int-8", "saw-int4", "turboquant-2", "turboquant-4"]
OFTEN = ("saw-int4",)
"""Tried in every run; the others are wide."""


def test_which_presets_have_kernels() -> None:
    """Of those whose reference takes 80 channels: ghost-3 does not."""
    found = {p: kernels_for(kvcodec.get(p), DIM) for p in kvcodec.presets() if p != "ghost-3"}
    assert sorted(p for p, kernels in found.items() if kernels["decode"] == "cuda") == SERVED
    assert {found[p]["encode"] for p in SERVED} == {"cuda"}


@pytest.mark.parametrize("preset", [pytest.param(p, marks=[] if p in OFTEN else [pytest.mark.wide]) for p in SERVED])
def test_a_cache_holds_the_same_and_attends_alike(preset: str, machine: dict[str, Any]) -> None:  # noqa: F811
    """Encoding, decode steps, several queries at once over unpacked pages."""
    made = kvcodec.get(preset)
    fused, reference = FusedLayerCache(made), LayerCache(made)
    k, v = torch.randn(2, 1, 2, 70, DIM, generator=torch.Generator().manual_seed(0)).half()
    for cache in (fused, reference):
        cache.append(k[:, :, :69], v[:, :, :69])
        cache.append(k[:, :, 69:], v[:, :, 69:])
    for heads, queries in ((8, 1), (16, 1), (8, 3)):
        q = torch.randn(1, heads, queries, DIM, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(fused.attend(q), reference.attend(q), rtol=0, atol=4e-3)
    for got, wanted in zip(fused.decode(), reference.decode(), strict=True):
        assert torch.equal(got, wanted)
    assert machine["kv_encode"].launches


@pytest.mark.parametrize(
    "preset", ["hqmq-s24_r3", "octopus-3", "kivi-4", "innerq-base", "ghost-4", "ultraquant", "turboquant-3", "int-3"]
)
def test_what_is_refused_says_why(preset: str, machine: dict[str, Any]) -> None:  # noqa: F811
    assert "head_dim 80 is no multiple of 32" in fused_refusal(kvcodec.get(preset), DIM, torch.device("cuda"))


@pytest.mark.wide
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("preset", SERVED)
def test_programs_keep_to_their_registers(preset: str, arch: int) -> None:
    scheme, there = kvcodec.get(preset), machine_of(f"sm_{arch}")
    pair = decode_spec(scheme.key, scheme.value, DIM, scheme.page_layout(DIM).page_tokens)
    config = launch.config_for(pair, 256, 32768, there, heads=4)
    found = compile_kernels(attention.program(pair, config, heads=4).source, arch)
    found |= compile_kernels(history.program(pair, *history.config_for(pair, there)).source, arch)
    for kernel in found.values():
        assert kernel.stack == 0, kernel.name
        assert not kernel.spills(), kernel.name
