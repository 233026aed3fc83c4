"""Keys held without their mean before RoPE: the term of the scores, unpacked keys, encoded bytes."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcodec
from kvcodec.cache.pages import PageStore
from kvcodec.codec import ROLES
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels import decode as attention
from kvcodec.kernels import encode
from kvcodec.kernels import history as prefill
from kvcodec.kernels import spec as specs
from kvcodec.kernels.constants import constants_for
from kvcodec.kernels.mean import key_mean
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.kernels.decode_cases import CASES, Case, Geometry, Means, Side, check, check_all
from tests.kernels.test_operators import fill, target_of
from tests.kernels.test_prefill import far

SAW = Side(SawInt4(), "kv::ReadSaw<{D}>", "read_saw.cuh", order=power_of_two_divisor)


@pytest.mark.parametrize("kw", [dict(), dict(few=16), dict(few=5, each=True), dict(rotary=32), dict(interleaved=True, scaling=1.3), dict(size=350.0, first=(100000, 131072, 7))])
@pytest.mark.parametrize("group", [1, 3, 4, 6, 12])
@pytest.mark.parametrize("dim", [64, 128])
def test_kinds(kw, group, dim):
    kw = {"first": (0, 5, 100000), **kw}
    check(SAW, SAW, dim, Case((130, 7, 64), heads=2, group=group, means=Means(**kw)))


# -- unpacked keys -----------------------------------------------------------------------------------------------------

UNPACKED = (
    *("saw-int4", "int-4:group=32", "fp8", "turboquant-4", "octopus-3", "octopus-qjl-2", "ultraquant", "ultra-tq"),
    *("hqmq-s24_r3:outliers=3", "innerq-base"),
)


@pytest.mark.parametrize("means", [Means((3, 100000)), Means((7, 900), 350.0, few=16, rotary=32, interleaved=True)])
@pytest.mark.parametrize("spec", UNPACKED)
def test_unpacked_keys_have_their_mean(spec: str, means: Means, machine: dict[str, Any]) -> None:
    made, heads, tokens, dim = kvcodec.get(spec), 2, 128, 128 if means.few else 64
    page = made.page_layout(dim).page_tokens
    case = Case((tokens, tokens), heads=heads)
    held, mean, theta = means.made(case, dim, torch.Generator().manual_seed(4))
    pair = specs.decode_spec(made.key, made.value, dim, page, held.pairs)
    store, params, (k, v) = fill(made.key, made.value, dim, heads, [tokens, tokens], page)
    key, value = (
        constants_for(side, params[role], heads, dim) for side, role in zip((pair.key, pair.value), ROLES, strict=True)
    )
    first = torch.tensor(means.first, dtype=torch.int32)
    packed = prefill.Packed(store.pages, store.table, attention.text_of(pair), key, value, held, first)
    turned = torch.stack([means.turned(mean[b], theta, means.first[b] + torch.arange(tokens)) for b in range(2)])
    want = k.double() + turned
    for begin, count in ((0, tokens), (32, 77)):
        found = prefill.unpack(packed, begin, count)
        part = slice(begin, begin + count)
        units = prefill.into_codes(torch.eye(dim).expand(2, heads, dim, dim), key).float()
        assert far((units @ found[0].float().mT).mT, want[:, :, part]) < 1e-3
        assert far(prefill.out_of_codes(found[1], value), v[:, :, part]) < 1e-3
        short, _ = prefill.unpack(packed, begin, count, torch.bfloat16)
        assert far(short.float(), found[0].float()) < 8e-3


# -- encoded keys ------------------------------------------------------------------------------------------------------

ENCODED = (
    *("saw-int4", "saw-int4:rotate=kv,zero=float", "int-3", "int-4:group=32", "fp8", "fp8:scale=none", "dense"),
    *("turboquant-3", "turboquant-qjl-3", "octopus-3", "octopus-qjl-2", "ultraquant", "ultra-tq"),
    *("hqmq-s24_r3", "hqmq-s24_r3:outliers=3", "innerq-base"),
)


def turned_by(model: str, mean: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The mean ``[1, H, D]`` turned by a model's own function, float32 ``[B, H, n, D]``."""
    turn = importlib.import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    width = 2 * cosines.shape[2]
    x = mean[:, :, None].expand(cosines.shape[0], -1, cosines.shape[1], -1)
    both = [torch.cat([y, y], -1) for y in (cosines, sines)]
    return torch.cat([turn(x[..., :width], x[..., :width], *both)[1], x[..., width:]], -1)


@pytest.mark.parametrize("spec", ENCODED)
def test_encoded_keys_are_the_references_without_their_mean(spec: str, machine: dict[str, Any]) -> None:
    dim, heads, tokens, first, interleaved = 64, 2, 37, 32, spec in ("fp8", "octopus-3", "hqmq-s24_r3")
    scheme, width = kvcodec.get(spec), 32 if spec in ("int-3", "fp8", "ultra-tq") else dim
    page = scheme.page_layout(dim).page_tokens
    store, (_, given, params) = target_of(scheme, dim, heads, 2, first + 64, page)
    target = specs.encode_spec(scheme.key, scheme.value, dim, page, mean=True)
    rng = torch.Generator().manual_seed(5)
    mean = torch.randn(1, heads, dim, generator=rng) * 350 ** torch.rand(1, heads, dim, generator=rng)
    angle = torch.tensor([[7], [100000]])[..., None] + torch.arange(tokens)[:, None]
    angle = angle.float() * 1e4 ** (-torch.arange(0, width, 2) / width)
    less = encode.Turned(mean, angle.cos() * 1.2, angle.sin() * 1.2, interleaved)
    turned = turned_by("glm" if interleaved else "llama", mean, less.cosines, less.sines)
    x = torch.randn(2, 2, tokens, heads, dim, generator=rng)
    rows = [(x[0].transpose(1, 2) + turned).bfloat16(), x[1].transpose(1, 2).bfloat16()]
    before, bad = store.pages.clone(), torch.zeros(1, dtype=torch.int32)
    values = rows[1] if scheme.value.block_tokens == 1 else None
    encode.encode_to_pages(
        rows[0], values, store.pages, store.table, torch.full((2,), first, dtype=torch.int32),
        spec=encode.text_of(target), key=given["key"], value=given["value"], bad=bad, less=less,
    )  # fmt: skip
    expected = PageStore(store.layout, 2, heads, torch.device("cpu"))
    expected.pages, expected.table = before, store.table
    for role, part in zip(ROLES, (rows[0].float() - turned, values), strict=True):
        if part is not None:
            codec = scheme.codec(role)
            expected.write(role, first, codec.encode(codec.to_code(part.float(), params[role]), params[role]))
    assert torch.equal(store.pages, expected.pages)
    assert not bad.item()
