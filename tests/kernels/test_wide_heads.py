"""Heads of 512 channels: the whole way of a cache, what is refused, and whether programs keep to their registers."""

from typing import Any

import pytest
import torch

import kvcodec
from kvcodec.attention import BEFORE_IT
from kvcodec.cache.fused import FusedLayerCache, fused_refusal
from kvcodec.cache.host import LayerCache
from kvcodec.kernels.cuda import decode as attention
from kvcodec.kernels.cuda import launch
from kvcodec.kernels.cuda.launch import machine_of
from kvcodec.kernels.flash import by_flash
from kvcodec.kernels.spec import decode_spec
from tests.kernels.emulation import machine  # noqa: F401  a fixture
from tests.kernels.offline import ARCHITECTURES, compile_kernels

DIM = 512
OFTEN = ("turboquant-4", "octopus-3")
"""Presets tried in every run; the others are wide."""
ROWS = [
    p
    for p in kvcodec.presets()
    if kvcodec.describe(p)["kernels"]["decode"] == "cuda"
    and not p.startswith("ghost")
    and all(kvcodec.get(p).codec(role).block_tokens == 1 for role in ("key", "value"))
]
"""Presets of rows of tokens: what is dense does not depend on how calls were split."""
LEAN = ("saw-int4", "int-4", "int-8", "fp8", "turboquant-4", "ultraquant", "hqmq-s96_r4")


@pytest.mark.parametrize("preset", [pytest.param(p, marks=[] if p in OFTEN else [pytest.mark.wide]) for p in ROWS])
def test_a_cache_holds_the_same_and_attends_alike(preset: str, machine: dict[str, Any]) -> None:  # noqa: F811
    """Encoding, decode steps of groups of eight query heads, which are read four at a time, several queries at once."""
    made = kvcodec.get(preset).for_layer(8, 24)
    fused, reference = FusedLayerCache(made), LayerCache(made)
    k, v = torch.randn(2, 1, 2, 70, DIM, generator=torch.Generator().manual_seed(0)).half()
    for cache in (fused, reference):
        cache.append(k[:, :, :69], v[:, :, :69])
        cache.append(k[:, :, 69:], v[:, :, 69:])
    for queries in (1, 3):
        q = torch.randn(1, 16, queries, DIM, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(fused.attend(q), reference.attend(q), rtol=0, atol=4e-3)
    for got, wanted in zip(fused.decode(), reference.decode(), strict=True):
        assert torch.equal(got, wanted)
    assert machine["kv_encode"].launches


def test_what_is_refused_says_why(machine: dict[str, Any]) -> None:  # noqa: F811
    gpu = torch.device("cuda")
    for spec, why in (
        ("ghost-3", "the kernels number a channel of ghost in a byte: head_dim up to 256, not 512"),
        ("hqmq-s24_r3:outliers=3", "the kernels take outliers of head_dim up to 256, not 512"),
    ):
        assert why in fused_refusal(kvcodec.get(spec), DIM, gpu)
    assert fused_refusal(kvcodec.get("octopus-qjl-3"), DIM, gpu) == ""


def test_several_queries_are_scored_without_flash_attention() -> None:
    """PyTorch's takes 256 channels at most."""
    assert by_flash(BEFORE_IT, 256)
    assert not by_flash(BEFORE_IT, DIM)


@pytest.mark.parametrize(
    ("preset", "arch"),
    [
        pytest.param(p, arch, marks=[] if (p, arch) == ("saw-int4", 90) else [pytest.mark.wide])
        for p in LEAN
        for arch in ARCHITECTURES
    ],
)
def test_programs_keep_to_their_registers(preset: str, arch: int) -> None:
    scheme, there = kvcodec.get(preset), machine_of(f"sm_{arch}")
    pair = decode_spec(scheme.key, scheme.value, DIM, scheme.page_layout(DIM).page_tokens)
    assert pair.heads(8) == 4
    config = launch.config_for(pair, 256, 32768, there, heads=4)
    kernel = compile_kernels(attention.program(pair, config, heads=4).source, arch)["kv_decode"]
    assert kernel.stack == 0
    assert not kernel.spills()
