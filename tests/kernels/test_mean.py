"""Keys held without their mean before RoPE: scores, and a layer on kernels against the same on the reference.

``test_gpu_cases.py`` has the bytes and the attention of every reader, ``test_fused.py`` unpacked keys,
``test_readers.py`` decode attention.
"""

import random
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import packedkv
import packedkv.integrations.transformers.cache  # registers the attention named "packedkv"
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.cuda import launch
from packedkv.kernels.mean import MOST_POSITIONS, key_mean
from packedkv.ops.rope import Rotary
from packedkv.store.site import LayerSite, MeanRemoval
from tests.conftest import tiny_model
from tests.integrations.test_generate import padded
from tests.kernels import gpu_cases
from tests.kernels.conftest import Server, normal
from tests.kernels.test_fused import WINDOWED
from tests.test_key_bias import biased

DIM, HEADS, BATCH = 64, 2, 2
PADDED = torch.tensor([[5], [0]])
"""Left padding of the two sequences."""


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
    [
        (128, 123_000),
        *(pytest.param(d, n, marks=pytest.mark.gpu) for d in (64, 128, 256) for n in (123_000, MOST_POSITIONS)),
    ],
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


def rotary(**changed: Any) -> Rotary:
    return Rotary(10_000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), **changed)


def mean_of_keys() -> Tensor:
    mean = 3 * normal(1, HEADS, DIM, seed=5)
    mean[..., ::3] = 0
    return mean


def both(
    spec: str, turn: Rotary, capacity: int = 0, *, given: bool = True, kind: Literal["pre", "post"] = "pre"
) -> tuple[FusedLayerCache, LayerCache]:
    made = packedkv.get(spec + (":" if ":" not in spec else ",") + f"mean={kind}")
    mean = MeanRemoval(kind, turn if kind == "pre" else None, mean_of_keys() if given else None)
    site = LayerSite(made, mean=mean)
    return FusedLayerCache(site, capacity=capacity), LayerCache(site)  # type: ignore[arg-type]


def placed(first: int, last: int, padding: Tensor = PADDED) -> Tensor:
    return (torch.arange(first, last) - padding).clamp_min(-1)


def rows(n: int, seed: int, turn: Rotary, mean: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    k, v = normal(2, BATCH, HEADS, n, DIM, seed=seed)
    return (k + turn.turn(mean[:, :, None], positions)).half(), v.half()


class Pair:
    """Both caches, fed alike."""

    def __init__(self, spec: str, turn: Rotary, capacity: int = 0, **options: Any) -> None:
        self.turn, (self.fused, self.plain) = turn, both(spec, turn, capacity, **options)
        self.at = 0

    def append(self, n: int) -> None:
        positions = placed(self.at, self.at + n)
        k, v = rows(n, self.at, self.turn, mean_of_keys(), positions)
        self.fused.append(k, v, positions)
        self.plain.append(k, v, positions)
        self.at += n

    def agree(self) -> None:
        found, want = self.fused.decode(), self.plain.decode()
        torch.testing.assert_close(found[0], want[0], rtol=0, atol=0)  # the same bytes, the same mean
        if self.fused.unit > 1:  # values stay dense until the keys of their block are encoded
            return
        torch.testing.assert_close(found[1], want[1], rtol=0, atol=0)
        for n in (1, min(5, len(self.fused))):
            q = normal(BATCH, 3 * HEADS, n, DIM, seed=9).half()
            for cache in (self.fused, self.plain):
                torch.testing.assert_close(cache.attend(q), attend(q, self.plain), rtol=0, atol=6e-3)


@pytest.mark.parametrize("spec", ["saw-int4", "ghost-3:sink=4"])
def test_a_static_cache_of_a_model(spec: str, machine: dict[str, Any]) -> None:
    """With left padding, eager and compiled, against the cache that grows."""
    model = biased() if spec == "saw-int4" else tiny_model("llama-gqa", vocab_size=256)
    model.set_attn_implementation("packedkv")
    n = 348 if spec == "saw-int4" else 540
    ids, mask = padded(n, n - 15)
    found = []
    for way in ("grows", "static", "compiled"):
        cache = packedkv.cache_for(model, spec, attention="fused", max_len=None if way == "grows" else n + 36)
        run = model
        with torch.no_grad():
            steps = []
            for ahead in range(4):
                part = ids[:, ahead - 1 : ahead] if ahead else ids
                seen = torch.cat([mask, mask.new_ones(len(mask), ahead)], 1)
                place = (seen.cumsum(1) - 1).clamp_min(0)[:, -part.shape[1] :]
                given = {"attention_mask": seen, "position_ids": place, **passing(model, cache)}
                if way == "compiled" and ahead == 1:
                    torch._dynamo.reset()
                    run = torch.compile(model, backend="eager")
                steps.append(run(part, **given).logits[:, -1])
            found.append(steps)
        layer = cache.report()["layers"][0]
        assert layer["mean_from"] == ("weights" if spec == "saw-int4" else "first tokens")
    for way in found[1:]:
        for a, b in zip(way, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.02 * float(b.std()))


@pytest.mark.parametrize("capacity", [0, 64])
def test_positions_that_do_not_go_on_are_refused(capacity: int, machine: dict[str, Any]) -> None:
    k, v = torch.randn(2, BATCH, HEADS, 3, DIM).half()
    for wrong in (placed(41, 44), placed(40, 43)[:, [0, 2, 1]]):
        pair = Pair("saw-int4", rotary(), capacity)
        pair.append(40)
        with pytest.raises(UnsupportedError, match="are not consecutive"):
            pair.fused.append(k, v, wrong)
        pair.agree()  # nothing was stored
        if not pair.fused.static:
            pair.fused.append(k, v, wrong, flag=torch.zeros(1, dtype=torch.int32))  # checked later
            with pytest.raises(UnsupportedError, match="are not consecutive"):
                pair.fused.check()
    pair = Pair("saw-int4", rotary(), capacity)
    pair.append(40)
    pair.fused.append(k[:, :, :1], v[:, :, :1], placed(50, 51))
    with pytest.raises(UnsupportedError, match="are not consecutive"):
        pair.fused.check()


@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-3:sink=4", "octopus-3:window=16"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_static_cache_keeps_the_mean_and_its_addresses(
    kind: Literal["pre", "post"], spec: str, machine: dict[str, Any]
) -> None:
    """Left padding, steps, chunks, crops, beams and a second filling; addresses stay."""
    pair = Pair(spec, rotary(), 256, kind=kind)

    def addresses() -> list[int]:
        return [x.data_ptr() for x in (pair.fused._origin()["origin"], *pair.fused.engine.tensors())]

    pair.append(90)
    held = addresses()
    changes: list[tuple[Any, int, tuple[int, ...]]] = [
        (lambda cache: cache.crop(80), 80, (1, 1, 70, 1)),
        (lambda cache: cache.select(torch.tensor([1, 0])), 0, ()),
        (lambda cache: cache.reset(), 0, (30, 1)),
    ]
    for change, at, tokens in changes:
        change(pair.fused)
        change(pair.plain)
        pair.at = at
        for n in tokens:
            pair.append(n)
        pair.agree()
    pair.fused.check()
    assert held == addresses()


@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3:window=16", "ghost-3"])
def test_a_static_cache_fits_on_the_call_that_fills_it(spec: str, machine: dict[str, Any]) -> None:
    """On as many tokens as constants take, each sequence's own; fewer are refused, and captured graphs stay valid."""
    pair = Pair(spec, rotary(), 640, given=False)
    wanted = pair.fused.site.fit_tokens
    k, v = rows(wanted, 0, pair.turn, mean_of_keys(), placed(0, wanted))
    with pytest.raises(UnsupportedError, match=rf"on the first {wanted} tokens.* static cache does not wait .*fit`"):
        pair.fused.append(k, v, placed(0, wanted))  # five of them are padding
    pair.append(wanted + 30)
    pair.append(1)
    pair.agree()
    held = [x.data_ptr() for x in pair.fused.engine.tensors()]
    for cache in (pair.fused, pair.plain):
        cache.select(torch.tensor([1, 0]))
    pair.agree()
    pair.append(1)
    for cache in (pair.fused, pair.plain):
        cache.reset()
    pair.at = 0
    pair.append(wanted + 20)
    pair.append(1)
    pair.agree()
    assert held == [x.data_ptr() for x in pair.fused.engine.tensors()]


@pytest.mark.parametrize(
    "spec", ["saw-int4", "turboquant-3:sink=4", "octopus-3:window=16", "innerq", "octopus", "hqmq"]
)
def test_a_step_of_a_static_cache_is_one_graph(spec: str, machine: dict[str, Any]) -> None:
    """Traced without a break, and once: tokens leave the window, or not, by what the device knows."""
    k, v = rows(60, 3, rotary(), mean_of_keys(), placed(0, 60))
    if spec in WINDOWED:  # keys with their mean
        traced, plain = (FusedLayerCache(WINDOWED[spec], capacity=192) for _ in range(2))
    else:
        (traced, _), (plain, _) = (both(spec, rotary(), 128) for _ in range(2))
    q = normal(BATCH, 2 * HEADS, 1, DIM, seed=5)

    def step(cache: FusedLayerCache, k: Tensor, v: Tensor, positions: Tensor, q: Tensor) -> Tensor:
        cache.append(k, v, positions)
        return cache.attend(q)

    for cache in (traced, plain):
        cache.append(k[:, :, :20], v[:, :, :20], placed(0, 20))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.no_grad():
        for at in range(20, 60):
            new = k[:, :, at : at + 1], v[:, :, at : at + 1], placed(at, at + 1)
            assert torch.equal(compiled(traced, *new, q), step(plain, *new, q))
    assert len(traced) == len(plain) == 60
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("spec", ["saw-int4", "int-4:mean=pre", "octopus-3:sink=3,mean=none", "kivi-4", "ghost-4"])
@pytest.mark.parametrize("kind", ["reference", "growing", "static"])
@pytest.mark.parametrize("refused", ["one NaN", "several NaN", "positions"])
def test_refused_first_tokens_leave_no_batch_and_no_dtype_behind(
    served_by: Server, spec: str, kind: str, refused: str
) -> None:
    """Also where kernels find the fault only when there are pages for the tokens."""
    scheme = packedkv.get(spec)
    needs_order = scheme.mean == "pre" or (scheme.mean == "auto" and scheme.key.without_mean)
    site = LayerSite(scheme, mean=MeanRemoval("pre", rotary()) if needs_order else None)
    layer = partial(FusedLayerCache, capacity=1024 if kind == "static" else 0)
    cache, fresh = (LayerCache(site) if kind == "reference" else layer(site) for _ in range(2))
    k, v = normal(2, 1, HEADS, 1 if refused == "one NaN" else 3, DIM)
    if kind == "static" and served_by.name == "cpu":
        return  # for CUDA graphs
    if refused == "one NaN" and kind != "reference" and served_by.name == "cuda":
        return  # the flag of a single token is read by the next check
    if refused == "positions" and needs_order:
        with pytest.raises(UnsupportedError, match="not consecutive"):
            cache.append(k, v, torch.tensor([[0, 5, 9]]))
    else:
        with pytest.raises(ValueError, match="finite"):
            cache.append(k * torch.nan, v)
    assert len(cache) == 0
    k, v = normal(2, 2, HEADS, 600, DIM, seed=1).bfloat16()
    for each in (cache, fresh):
        each.append(k, v)
    assert all(map(torch.equal, cache.decode(), fresh.decode()))


@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3:window=16", "ghost-3"])
def test_tokens_taken_back_take_their_constants_along(spec: str, served_by: Server) -> None:
    """Those that made enough for a fit; the next ones make others."""
    pair = Pair(spec, rotary(), given=False)
    wanted = pair.fused.site.fit_tokens
    assert wanted == (512 if spec == "ghost-3" else 128)
    pair.append(61)
    pair.agree()
    assert pair.fused.holds_dense
    before = pair.fused.state()
    pair.fused.append(*torch.ones(2, BATCH, HEADS, wanted, DIM).half(), placed(61, 61 + wanted))
    assert pair.fused.roles["key"].encoded
    pair.fused.go_back(before)
    assert not pair.fused.is_fitted
    pair.append(wanted - 30)
    assert pair.fused.is_fitted
    pair.agree()
    pair.append(1)
    for cache in (pair.fused, pair.plain):
        cache.select(torch.tensor([1, 0]))
    pair.agree()  # each with its own mean
