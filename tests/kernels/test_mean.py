"""Keys held without their mean before RoPE: the term of the scores, unpacked keys, encoded bytes.

What is checked of an operator is a function of the device: on the emulated machine, and on a GPU where there is one.
"""

import importlib
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.codec import ROLES, Params, Role
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.kernels import spec as specs
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda import basis, encode, launch, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.mean import MOST_POSITIONS, KeyMean
from packedkv.kernels.tokens import NewTokens, Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore
from packedkv.store.site import LayerSite
from tests.kernels.decode_cases import Case, Geometry, Means, check_all, each_in_turn
from tests.kernels.test_basis import into_codes
from tests.kernels.test_operators import fill, reference, target_of
from tests.kernels.test_prefill import attended, far

SAW = SawInt4()
LAST = MOST_POSITIONS


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The emulated machine, and a GPU, where tests reach the last position that there may be."""
    if request.param == "cpu":
        request.getfixturevalue("machine")
    return torch.device(request.param)


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


READERS = (
    *("saw-int4", "int-3:symmetric=true", "int-8:outliers=3", "turboquant-3", "turboquant-qjl-3", "fp8", "octopus-3"),
    *("octopus-qjl-2", "hqmq-s24_r3", "hqmq-s24_r3:outliers=3", "ultraquant", "ultra-tq", "dense", "innerq-base"),
)


def turned_back(means: Means, mean: Tensor, theta: Tensor, tokens: int) -> Tensor:
    """``R_t mu`` of the first tokens of each sequence, float64 ``[B, H, tokens, D]``."""
    return torch.stack(
        [means.turned(own, theta, at + torch.arange(tokens)) for own, at in zip(mean, means.first, strict=True)]
    )


class Layer(NamedTuple):
    """Encoded random keys and values of ``lens`` tokens on a device, keys without their mean, and what reads them."""

    store: PageStore
    spec: str
    key: Constants
    value: Constants
    held: KeyMean
    placed: Tensor
    whole: Tensor
    """Decoded keys ``[B, H, t, D]`` with their mean, float64."""
    values: Tensor

    def attend(
        self, q: Tensor, lens: Any, config: launch.Config | None = None, **read: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Decode attention of ``q [B, HQ, 1, D]``, back on the CPU; ``read``: of ``StepTokens``."""
        device = self.store.pages.device
        lens = torch.as_tensor(lens, dtype=torch.int32, device=device)
        o, lse = attention.decode_attention(
            q.to(device), StepTokens(self.store.pages, self.store.table, lens, placed=self.placed, **read),
            Rules(q.shape[3] ** -0.5), spec=self.spec, key=self.key, value=self.value, mean=self.held, config=config,
        )  # fmt: skip
        return o.cpu(), lse.cpu()


def moved(params: dict[str, Params], device: torch.device) -> dict[str, Params]:
    return {role: {name: x.to(device) for name, x in own.items()} for role, own in params.items()}


def layer_of(spec: str, dim: int, lens: list[int], means: Means, device: torch.device) -> Layer:
    scheme, heads = packedkv.get(spec), 2
    page = scheme.page_layout(dim).page_tokens
    held, mean, theta = means.made(Case(tuple(lens), heads=heads), dim, torch.Generator().manual_seed(4))
    pair = specs.decode_spec(scheme.key, scheme.value, dim, page, held.pairs)
    store, params, (k, v) = fill(scheme.key, scheme.value, dim, heads, lens, page)
    store.pages, store.table = store.pages.to(device), store.table.to(device)
    params = moved(params, device)
    held = held._replace(mean=held.mean.to(device), table=held.table.to(device))
    return Layer(
        store, specs.text_of(pair), constants_for(pair.key, params["key"], heads, dim),
        constants_for(pair.value, params["value"], heads, dim), held,
        torch.tensor(means.first, dtype=torch.int32, device=device),
        k.double() + turned_back(means, mean, theta, k.shape[2]), v,
    )  # fmt: skip


BLOCK = launch.Config(32, 2, 2, 1, 1)
NEAR = Means((100_000, 3), size=3.0)


@pytest.mark.parametrize(("spec", "dim"), each_in_turn(READERS, (64, 128, 256)))
def test_every_reader_gets_the_mean_back(spec: str, dim: int, device: torch.device) -> None:
    """Decode attention of two sequences against float64 over keys with their mean.

    On a GPU with the launch constants that a cache would take, too.
    """
    lens, far_away = [75, 33], Means((LAST - 75, 3), size=3.0)
    for means in (NEAR,) if device.type == "cpu" else (far_away, replace(far_away, few=16)):
        layer = layer_of(spec, dim, lens, means, device)
        q = torch.randn(2, 6, 1, dim, generator=torch.Generator().manual_seed(8))
        want, want_lse = reference(q, layer.whole, layer.values, None, lens, [0, 0], None, 0.0)
        for config in (BLOCK,) if device.type == "cpu" else (None, BLOCK):
            got, lse = layer.attend(q, lens, config=config)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=8e-3)
            torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=8e-3)


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
    lens = [75, 133, 0, 40]
    layer = layer_of("ghost-4", 128, lens, replace(NEAR, first=(100_000, 3, 0, 77)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(8)
    q = torch.randn(len(lens), 2 * group, 1, 128, generator=generator)
    dense = {name: torch.randn(len(lens), 2, 4, 128, generator=generator).half() for name in ("dense_k", "dense_v")}
    for more in ({}, dense):
        got, tight = (layer.attend(q, lens, config=c, **more) for c in (config._replace(overlap_prologue=0), config))
        assert all(map(torch.equal, got, tight))
    want, _ = reference(q, layer.whole, layer.values, None, lens, [0] * len(lens), None, 0.0)
    torch.testing.assert_close(layer.attend(q, lens, config=config)[0].double(), want, rtol=0, atol=8e-3)


@pytest.mark.parametrize("group", [4, 7])
@pytest.mark.parametrize(
    ("dim", "last"),
    [(128, 123_000), *(pytest.param(d, n, marks=pytest.mark.gpu) for d in (64, 128, 256) for n in (123_000, LAST))],
)
def test_large_means_lose_less_than_keys_in_bf16(group: int, dim: int, last: int, device: torch.device) -> None:
    """Means as Qwen2.5's: the error of a score is a third of that of a cache in bf16."""
    batch, tokens = 24, 64
    means = Means(tuple(last - 997 * i - tokens for i in range(batch)), size=350.0, base=1e6)
    ends = torch.arange(batch, dtype=torch.int32) * 2 + 17
    layer = layer_of("dense", dim, [tokens] * batch, means, device)
    q = torch.randn(batch, 2 * group, 1, dim, generator=torch.Generator().manual_seed(8)).half()
    start = (ends - 1).to(device)  # one live token each
    tile = 64 if dim <= 128 else 16  # dense tiles of 64 tokens do not fit
    _, scores = layer.attend(q, ends, start=start, config=launch.Config(tile, 2, 2, 1, 1))
    keys = torch.stack([x[:, end - 1] for x, end in zip(layer.whole, ends.tolist(), strict=True)])
    keys = keys.repeat_interleave(group, 1)
    want, rounded = ((q[:, :, 0].double() * x).sum(-1) * dim**-0.5 for x in (keys, keys.bfloat16().double()))
    assert float(want.abs().max()) > 500
    assert float((scores - want).square().mean()) < float((rounded - want).square().mean()) / 9


# -- unpacked keys -----------------------------------------------------------------------------------------------------

UNPACKED = (
    *("saw-int4", "int-4:group=32", "fp8", "turboquant-4", "octopus-3", "octopus-qjl-2", "ultraquant", "ultra-tq"),
    *("hqmq-s24_r3:outliers=3", "innerq-base"),
)


TURNS = (Means((3, 100_000)), Means((7, 900), 350.0, few=16, rotary=32, interleaved=True))


# 80 channels are no whole runs of 32, and 40 pairs no whole products
@pytest.mark.parametrize(
    ("spec", "dim"), [*each_in_turn(UNPACKED, (64, 128, 256)), pytest.param("saw-int4", 80, marks=pytest.mark.wide)]
)
def test_unpacked_keys_have_their_mean(spec: str, dim: int, device: torch.device) -> None:
    tokens, every = 128, (*TURNS, Means((LAST - 128, 5), 20.0))
    for means, (begin, count) in itertools.product(
        every if device.type == "cuda" else (every[dim == 128],), ((0, tokens), (32, 77))
    ):
        layer = layer_of(spec, dim, [tokens, tokens], means, device)
        packed = prefill.Packed(layer.store.pages, layer.store.table, *layer[1:6])
        found = prefill.unpack(packed, begin, count)
        part = slice(begin, begin + count)
        units = into_codes(torch.eye(dim, device=device).expand(2, 2, dim, dim), layer.key).float()
        assert far((units @ found[0].float().mT).mT.cpu(), layer.whole[:, :, part]) < 1e-3
        assert far(basis.out_of_codes(found[1], layer.value).cpu(), layer.values[:, :, part]) < 1e-3
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


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        *each_in_turn(ENCODED, (64, 128, 256)),
        *(pytest.param(spec, 80, marks=pytest.mark.wide) for spec in ("saw-int4", "int-8")),
    ],
)
def test_encoded_keys_are_the_references_without_their_mean(spec: str, dim: int, device: torch.device) -> None:
    """Bytes of tokens 32 to 68 of two sequences, one at position 7 and one that ends far away."""
    last = LAST if device.type == "cuda" else 100_037
    heads, tokens, first, interleaved = 2, 37, 32, spec in ("fp8", "octopus-3", "hqmq-s24_r3")
    scheme, width = packedkv.get(spec), 32 if spec in ("int-3", "fp8", "ultra-tq") else dim
    page = scheme.page_layout(dim).page_tokens
    store, (_, _, params) = target_of(scheme, dim, heads, 2, first + 64, page)
    store.pages, store.table, params = store.pages.to(device), store.table.to(device), moved(params, device)
    target = specs.encode_spec(scheme.key, scheme.value, dim, page, mean=True)
    key, value = (
        Constants(None, None, 1) if (side := target.encoder(role)) is None
        else constants_for(side, params[role], heads, dim)
        for role in ROLES
    )  # fmt: skip
    rng = torch.Generator().manual_seed(5)
    mean = torch.randn(1, heads, dim, generator=rng) * 350 ** torch.rand(1, heads, dim, generator=rng)
    angle = torch.tensor([[7], [last - tokens]])[..., None] + torch.arange(tokens)[:, None]
    angle = angle.float() * 1e4 ** (-torch.arange(0, width, 2) / width)
    less = encode.Turned(*(x.to(device) for x in (mean, angle.cos() * 1.2, angle.sin() * 1.2)), interleaved)
    mean = less.mean
    turned = turned_by("glm" if interleaved else "llama", mean, less.cosines, less.sines)
    x = torch.randn(2, 2, tokens, heads, dim, generator=rng).to(device)
    rows = [(x[0].transpose(1, 2) + turned).bfloat16(), x[1].transpose(1, 2).bfloat16()]
    before, bad = store.pages.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    values = rows[1] if scheme.value.block_tokens == 1 else None
    new: dict[Role, Tensor] = {role: x for role, x in zip(ROLES, (rows[0], values), strict=True) if x is not None}
    encode.encode_to_pages(
        NewTokens(new, torch.full((2,), first, dtype=torch.int32, device=device), bad, less), store.pages, store.table,
        spec=specs.text_of(target), key=key, value=value,
    )  # fmt: skip
    expected = PageStore(store.layout, 2, heads, device)
    expected.pages, expected.table = before, store.table
    for role, part in zip(ROLES, (rows[0].float() - turned, values), strict=True):
        if part is not None:
            codec = scheme.codec(role)
            expected.write(role, first, codec.encode(codec.to_code(part.float(), params[role]), params[role]))
    assert torch.equal(store.pages, expected.pages)
    assert not bad.item()


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
        engine.encode(NewTokens(new, zeros, bad, encode.Turned(*turns)), store)
        assert not bad.item()
        q = torch.randn(2, 4, 5, dim, generator=rng)
        placed = torch.tensor(means.first, dtype=torch.int32, device=device)
        scale = 0.02  # of scores that differ by a few
        seen = torch.arange(tokens) <= torch.arange(tokens - 5, tokens)[:, None]
        want, _ = attended(q, keys, values, scale, seen)
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
