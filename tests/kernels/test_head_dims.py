"""Heads of 80, 192 and 512 channels: the whole way of a cache, refusals, and registers of the programs."""

from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import attend
from packedkv.codec import ROLES
from packedkv.description import kernels_for
from packedkv.kernels.choose import refusal
from tests.kernels.test_fused import PROMPT, Reference, scheme

GPU = torch.device("cuda")
OF_80 = ["dense", "fp8", "int-2", "int-4", "int-8", "saw-int4", "turboquant-2", "turboquant-4"]
READ = [p for p in packedkv.presets() if packedkv.describe(p)["kernels"]["decode"] == "cuda"]
READ_AT_ONCE = [p for p in READ if p in PROMPT]
OF_192 = [p for p in READ_AT_ONCE if packedkv.describe(p, 192)["kernels"]["decode"] == "cuda"]
OF_512 = [p for p in READ_AT_ONCE if all(packedkv.get(p).codec(role).block_tokens == 1 for role in ROLES)]
OFTEN = {
    80: {"saw-int4"},
    192: {"ultra-tq", "kivi-g64-3", "kivi-tq-4", "innerq-base", "turboquant-3", "octopus-4", "hqmq-s96_r6", "fp8"},
    512: {"turboquant-4", "octopus-3"},
}
"""Tried in every run, one preset for each kind of reader; the others are wide."""
WITH_OUTLIERS = ("hqmq-s24_r3:outliers=3", "int-4:outliers=3")


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        *(
            pytest.param(spec, dim, marks=[] if spec in OFTEN[dim] else [pytest.mark.wide])
            for dim, specs in ((80, OF_80), (192, OF_192), (512, OF_512))
            for spec in specs
        ),
        *((spec, 192) for spec in WITH_OUTLIERS),
    ],
)
def test_a_cache_holds_the_same_and_attends_alike(spec: str, dim: int, machine: dict[str, Any]) -> None:
    """Bytes, decode steps of few and many query heads, and several queries at once over unpacked pages."""
    made, generator = scheme(spec, 0, 3), torch.Generator().manual_seed(0)
    fused, reference = FusedLayerCache(made), Reference(made)
    tokens = fused.unit + 40
    k, v = torch.randn(2, 1, 2, tokens, dim, generator=generator).half()
    for cache in (fused, reference):
        for first, last in ((0, tokens - 2), (tokens - 2, tokens - 1), (tokens - 1, tokens)):
            cache.append(k[:, :, first:last], v[:, :, first:last])
    for heads, queries in ((4, 1), (4, 3), *([] if dim == 192 else [(16, 1)])):
        q = torch.randn(1, heads, queries, dim, generator=generator).half()
        torch.testing.assert_close(fused.attend(q), attend(q, reference), rtol=0, atol=4e-3)
    for got, wanted in zip(fused.decode(), reference.decode(), strict=True):
        assert torch.equal(got, wanted)
    assert {"kv_decode", "kv_unpack"} <= set(machine)
    assert ("kv_encode" in machine) == (spec != "int-4:outliers=3")  # PyTorch splits outliers off integers


def test_which_presets_have_kernels() -> None:
    """Of 80 channels without ghost-3, which its codec refuses; of 192 all but sketches."""
    found = {p: kernels_for(packedkv.get(p), 80) for p in packedkv.presets() if p != "ghost-3"}
    assert sorted(p for p, kernels in found.items() if kernels["decode"] == "cuda") == OF_80
    assert {found[p]["encode"] for p in OF_80} == {"cuda"}
    assert set(READ_AT_ONCE) - set(OF_192) == {"octopus-qjl-4", "octopus-qjl-3", "octopus-qjl-2", "turboquant-qjl-3"}


REFUSED = {
    **dict.fromkeys(
        ((p, 80) for p in ("hqmq-s24_r3", "octopus-3", "kivi-4", "innerq-base", "ghost-4", "ultraquant", "int-3")),
        "head_dim 80 is no multiple of 32",
    ),
    ("ghost-3", 512): "the kernels number a channel of ghost in a byte: head_dim up to 256, not 512",
    ("hqmq-s24_r3:outliers=3", 512): "the kernels take outliers of head_dim up to 256, not 512",
    ("octopus-qjl-3", 512): "",
}


def test_what_is_refused_says_why(machine: dict[str, Any]) -> None:
    for (spec, dim), why in REFUSED.items():
        found = refusal(packedkv.get(spec), dim, GPU)
        assert why in found if why else not found, spec
