"""Models that run under autocast: bytes and attention are those without it."""

from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *((LayerCache, spec) for spec in ("saw-int4", "turboquant-2", "polarquant-3", "octopus-qjl-2", "ghost-3")),
        (FusedLayerCache, "octopus-qjl-2"),
    ],
)
def test_a_cache_does_not_see_it(kind: Any, spec: str) -> None:
    k, v, q = torch.randn(3, 1, 2, 1100 if spec == "ghost-3" else 70, 64, generator=torch.Generator().manual_seed(0))
    scheme, found = packedkv.get(spec).for_layer(1, 3), []
    for enabled in (False, True):
        cache = kind(scheme)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            cache.append(k, v)
            found.append((*cache.decode(), cache.attend(q), cache.attend(q[:, :, :1]), cache.store.pages))
    for plain, cast in zip(*found, strict=True):
        assert plain.dtype == cast.dtype
        assert torch.equal(plain, cast)


def test_bare_tensors_do_not_see_it() -> None:
    k, v = torch.randn(2, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    plain = packedkv.fake_quant("turboquant-3", k, v)
    with torch.autocast("cpu", torch.bfloat16):
        for mine, theirs in zip(packedkv.fake_quant("turboquant-3", k, v), plain, strict=True):
            assert torch.equal(mine, theirs)
