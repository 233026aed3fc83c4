"""Keys held without their mean before RoPE: the term of the scores, and an engine.

``test_gpu_cases.py`` has the bytes and the attention of every reader, ``test_prefill.py`` unpacked keys.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.codec import Role
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.kernels.cuda import encode, launch, prefill
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.mean import MOST_POSITIONS, key_mean
from packedkv.kernels.tokens import NewTokens, Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore
from packedkv.store.site import LayerSite
from tests.kernels import gpu_cases
from tests.kernels.decode_cases import Case, Geometry, Means, check_all

SAW = SawInt4()
LAST = MOST_POSITIONS


# -- the term of the scores --------------------------------------------------------------------------------------------


def cases(dim: int) -> tuple[Case, ...]:
    """Query heads, positions, pairs and options together, as ``decode_cases.CASES`` without a mean."""
    half = Means((1, 2, 3), rotary=dim // 2, interleaved=True)
    return (
        Case((130, 7, 64), heads=2, group=1, means=Means((0, 5, 100_000))),
        Case((33, 96, 31), start=(3, 95, 0), group=12, splits=2, softcap=20.0, dense=(0, 2, 0),
             means=Means((-3, 50, 131_000), few=16, each=True)),
        Case((200, 190, 10), start=(130, 150, 10), heads=2, splits=3, group=3, order=3,
             means=Means((0, 8, 99_990), size=10.0, base=1e6)),
        Case((250, 17, 0), splits=13, group=6, softcap=20.0, dense=(3, 0, 1), means=half),
        Case((65, 0, 100), dense=(5, 1, 9), dense_start=(2, 0, 3), sinks=True, splits=2, group=8, softcap=20.0,
             means=Means((9, 9, 9), scaling=1.3, each=True)),
        Case((128, 40), heads=2, sinks=True, scale=0.3, group=4, means=Means((0, 262_000), few=5)),
        Case((70, 64), group=6, spread=6, seed=1, means=Means((2**21 - 70, 4096), size=30.0)),
    )  # fmt: skip


@pytest.mark.parametrize("dim", [96, 128, 256, *(pytest.param(d, marks=pytest.mark.wide) for d in (64, 80, 192))])
def test_scores_get_the_mean_back(dim: int) -> None:
    check_all(SAW, SAW, dim, cases(dim))


@pytest.mark.parametrize("few", [0, 7])
def test_teams_share_the_tile(few: int) -> None:
    """Where each head has pairs of its own, heads have tables of their own."""
    case = Case((100, 7, 64, 33), heads=2, group=3, means=Means((0, 5, 100_000, 17), few=few))
    check_all(SAW, SAW, 64, [case], Geometry(teams=2, warps=1))
    check_all(SAW, SAW, 64, [replace(case, group=6, order=2)], Geometry(teams=2))


@pytest.mark.parametrize("geometry", [Geometry(tile=16, warps=1), Geometry(tile=64, warps=3, stages=3)])
def test_angles_are_turned_on_over_many_tiles(geometry: Geometry) -> None:
    check_all(SAW, SAW, 64, [Case((2050,), group=5, means=Means((98_765,), size=4.0))], geometry)


def turned_back(means: Means, mean: Tensor, theta: Tensor, tokens: int) -> Tensor:
    """``R_t mu`` of the first tokens of each sequence, float64 ``[B, H, tokens, D]``."""
    return torch.stack(
        [means.turned(own, theta, at + torch.arange(tokens)) for own, at in zip(mean, means.first, strict=True)]
    )


@pytest.mark.parametrize(
    ("group", "config"),
    [
        (7, launch.Config(16, 2, 2, 1, 1, 1, 1, 1)),
        (3, launch.Config(16, 3, 2, 1, 1, 2, 1, 1)),
        (7, launch.Config(32, 2, 1, 1, 1, 1, 2, 1)),
    ],
)
def test_what_only_the_start_needs_may_lie_in_the_ring(
    group: int, config: launch.Config, machine: dict[str, Any]
) -> None:
    """With many tiles, dense tokens among the codes and, of teams, several pieces each: the same numbers."""
    lens, starts, dim, rng, gen = [75, 133, 0, 40], [0] * 4, 128, random.Random(8), torch.Generator().manual_seed(8)
    mean = gpu_cases.mean_of(dim // 2, dim, rng, gen, len(lens), 2, max(lens))
    layer = gpu_cases.fill(gpu_cases.Combination("ghost-4", dim, 64), rng, gen, len(lens), 2, 192, mean, kernels=False)
    q = torch.randn(len(lens), 2 * group, 1, dim, generator=gen)
    dense = torch.randn(2, len(lens), 2, 4, dim, generator=gen).half()
    for beside in ((None, None), dense):
        got, tight = (
            layer.attend(q, lens, starts, dense=beside, config=c) for c in (config._replace(overlap_prologue=0), config)
        )
        assert all(map(torch.equal, got, tight))
    out, _ = layer.attend(q, lens, starts, config=config)
    for b, n in enumerate(lens):
        want = gpu_cases.truth(q[b], layer.keys[b, :, :n], layer.values[b, :, :n], dim**-0.5, 0.0, None)
        assert gpu_cases.distance(out[b], want) < 4e-3 if n else not out[b].any()


@pytest.mark.parametrize("group", [4, 7])
@pytest.mark.parametrize(
    ("dim", "last"),
    [(128, 123_000), *(pytest.param(d, n, marks=pytest.mark.gpu) for d in (64, 128, 256) for n in (123_000, LAST))],
)
def test_large_means_lose_less_than_keys_in_bf16(group: int, dim: int, last: int, device: torch.device) -> None:
    """Means as Qwen2.5's: the error of a score is a third of that of a cache in bf16."""
    batch, tokens, gen = 24, 64, torch.Generator(device).manual_seed(8)
    rotary = Rotary(1e6 ** -(torch.arange(dim // 2, device=device) / (dim // 2)))
    mean = 350 * torch.randn(1, 2, dim, generator=gen, device=device)
    placed = torch.tensor([last - 997 * i - tokens for i in range(batch)], dtype=torch.int32, device=device)
    held = gpu_cases.Mean(mean, rotary, placed, key_mean(mean, rotary.radians))
    layer = gpu_cases.fill(
        gpu_cases.Combination("dense", dim, 64), random.Random(8), gen, batch, 2, tokens, held, False, torch.float16
    )
    q = torch.randn(batch, 2 * group, 1, dim, generator=gen, device=device).half()
    ends = [2 * i + 17 for i in range(batch)]  # one live token each
    tile = 64 if dim <= 128 else 16  # dense tiles of 64 tokens do not fit
    _, scores = layer.attend(q, ends, [n - 1 for n in ends], config=launch.Config(tile, 2, 2, 1, 1))
    keys = torch.stack([x[:, end - 1] for x, end in zip(layer.keys.double(), ends, strict=True)])
    keys = keys.repeat_interleave(group, 1)
    want, rounded = ((q[:, :, 0].double() * x).sum(-1) * dim**-0.5 for x in (keys, keys.bfloat16().double()))
    assert float(want.abs().max()) > 500
    assert float((scores - want).square().mean()) < float((rounded - want).square().mean()) / 9


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, *(pytest.param(d, marks=pytest.mark.gpu) for d in (128, 256))])
def test_an_engine_holds_keys_without_their_mean(dim: int, device: torch.device) -> None:
    """Written without the mean, read with it, by one query token and by several; other means come in place."""
    last = LAST if device.type == "cuda" else 100_070
    heads, tokens, means = 2, 70, Means((last - 70, 3), size=40.0, each=True)
    site = LayerSite(packedkv.get("int-8"))
    roles = site.roles(heads, (dim, dim), torch.float32, device)
    engine = CudaEngine(site.scheme.key, site.scheme.value, dim, 64)
    for seed in (4, 5):
        rng = torch.Generator().manual_seed(seed)
        _, mean, theta = means.made(Case((tokens,) * 2, heads=heads), dim, rng)
        engine.hold_without(mean.float().to(device), Rotary(theta.to(device)))
        engine.prepare(roles)
        turned = turned_back(means, mean, theta, tokens)
        keys, values = torch.randn(2, 2, heads, tokens, dim, generator=rng) + torch.stack([turned, turned * 0]).float()
        store = PageStore(site.scheme.page_layout(dim), 2, heads, device, tokens)
        angle = (torch.tensor(means.first)[:, None, None] + torch.arange(tokens)[:, None]) * theta
        turns = (x.float().contiguous().to(device) for x in (mean, angle.cos(), angle.sin()))
        new: dict[Role, Tensor] = {"key": keys.to(device), "value": values.to(device)}
        zeros, bad = (torch.zeros(n, dtype=torch.int32, device=device) for n in (2, 1))
        engine.encode(NewTokens(new, zeros, bad, encode.RotatedMean(*turns)), store)
        assert not bad.item()
        q = torch.randn(2, 4, 5, dim, generator=rng)
        placed = torch.tensor(means.first, dtype=torch.int32, device=device)
        scale = 0.02  # of scores that differ by a few
        seen = torch.arange(tokens) <= torch.arange(tokens - 5, tokens)[:, None]
        want = torch.stack([gpu_cases.truth(*x, scale, 0.0, None, ~seen) for x in zip(q, keys, values, strict=True)])
        one = engine.attend_step(
            q[:, :, 4:].to(device), StepTokens(store.pages, store.table, zeros + tokens, placed=placed), Rules(scale)
        )
        torch.testing.assert_close(one.double().cpu(), want[:, :, 4:], rtol=0, atol=2e-2)
        packed = engine.packed(store.pages, store.table, placed)
        many = prefill.attend_pages(q.to(device), packed, 0, tokens, scale, causal=True)
        torch.testing.assert_close(many.out.double().cpu(), want, rtol=0, atol=2e-2)
        if seed == 4:
            first = engine.tensors()
    assert [x.data_ptr() for x in engine.tensors()] == [x.data_ptr() for x in first]
