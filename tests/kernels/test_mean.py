"""Keys held without their mean before RoPE: the term of the scores, unpacked keys, encoded bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcodec
from kvcodec.codec import ROLES
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels import decode as attention
from kvcodec.kernels import history as prefill
from kvcodec.kernels import spec as specs
from kvcodec.kernels.constants import constants_for
from kvcodec.kernels.mean import key_mean
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.kernels.decode_cases import CASES, Case, Geometry, Means, Side, check, check_all
from tests.kernels.test_operators import fill
from tests.kernels.test_prefill import far

SAW = Side(SawInt4(), "kv::ReadSaw<{D}>", "read_saw.cuh", order=power_of_two_divisor)


@pytest.mark.parametrize("kw", [dict(), dict(few=16), dict(few=5, each=True), dict(rotary=32), dict(neighbours=True, scaling=1.3), dict(size=350.0, first=(100000, 131072, 7))])
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


@pytest.mark.parametrize("means", [Means((3, 100000)), Means((7, 900), 350.0, few=16, rotary=32, neighbours=True)])
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
