"""A layer of keys without their mean before RoPE, on the kernels, against the same layer on the reference."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import packedkv
import packedkv.integrations.transformers.cache  # registers the attention named "packedkv"
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.host import LayerCache, attend
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.choose import Kernels
from packedkv.ops.rope import Rotary
from packedkv.store.site import LayerSite, MeanRemoval
from tests.conftest import tiny_model
from tests.integrations.test_generate import padded, prompt
from tests.test_key_bias import biased

DIM, HEADS, BATCH = 64, 2, 2
PADDED = torch.tensor([[5], [0]])
"""Left padding of the two sequences."""


@pytest.fixture(params=["cuda", "cpu"])
def served(request: pytest.FixtureRequest) -> str:
    """The kernels of GPUs, emulated, or those of CPUs."""
    request.getfixturevalue("machine" if request.param == "cuda" else "compiled")
    name: str = request.param
    return name


def rotary(**changed: Any) -> Rotary:
    return Rotary(10_000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), **changed)


def mean_of_keys() -> Tensor:
    mean = 3 * torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(5))
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
    k, v = torch.randn(2, BATCH, HEADS, n, DIM, generator=torch.Generator().manual_seed(seed))
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
        q = torch.randn(BATCH, 3 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(9)).half()
        near = {"rtol": 0, "atol": 6e-3}
        torch.testing.assert_close(self.fused.attend(q), attend(q, self.plain), **near)
        torch.testing.assert_close(self.plain.attend(q), attend(q, self.plain), **near)
        n = min(5, len(self.fused))
        q = torch.randn(BATCH, 3 * HEADS, n, DIM, generator=torch.Generator().manual_seed(9)).half()
        torch.testing.assert_close(self.fused.attend(q), attend(q, self.plain), **near)
        torch.testing.assert_close(self.plain.attend(q), attend(q, self.plain), **near)


@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-3:sink=4", "octopus-3:window=16", "kivi-4:window=32"])
def test_every_operation_keeps_the_term_right(spec: str, served: str) -> None:
    """Left padding, chunks, steps, beams, crops and evictions, with pages that are freed."""
    pair = Pair(spec, rotary())
    pair.append(90)
    pair.agree()
    for n in (1, 1, 7):
        pair.append(n)
    pair.agree()
    for cache in (pair.fused, pair.plain):
        cache.crop(80)
    pair.at = 80
    pair.append(70)
    pair.agree()
    for cache in (pair.fused, pair.plain):
        cache.evict(100)  # a page of 64 tokens and more
    pair.append(1)
    pair.agree()
    for cache in (pair.fused, pair.plain):
        cache.evict(len(cache))  # slots begin again
    pair.append(40)
    pair.agree()
    pair.fused.check()


def test_positions_that_are_left_out_follow_the_tokens_held(served: str) -> None:
    """Behind left padding, and after an eviction; one of no tokens changes nothing."""
    told, untold = Pair("saw-int4", rotary()), Pair("saw-int4", rotary())
    k, v = rows(5, 40, told.turn, mean_of_keys(), placed(40, 45))
    for pair in (told, untold):
        pair.append(40)
    for a, b in ((told.fused, untold.fused), (told.plain, untold.plain)):
        for cache in (a, b):
            cache.evict(0, keep=7)
            cache.evict(11)
        a.append(k, v, placed(40, 45))
        b.append(k, v)
        for x, y in zip(a.decode(), b.decode(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.usefixtures("compiled")
def test_a_static_cache_stays_empty_until_tokens_are_taken() -> None:
    """By an append without tokens, or one that is refused, before the first one and after a reset."""
    for given in (True, False):
        site = both("saw-int4", rotary(), given=given)[1].site
        cache = FusedLayerCache(site, capacity=256, kernels=Kernels(static=False))
        for _ in range(2):
            positions = torch.arange(200) - PADDED
            k, v = rows(200, 1, rotary(), mean_of_keys(), positions)
            cache.append(k[:, :, :0], v[:, :, :0])
            for _ in range(0 if given else 2):
                with pytest.raises(UnsupportedError, match="a static cache does not wait"):
                    cache.append(k[:, :, :1], v[:, :, :1], positions[:, :1])
            first = 1 if given else 150
            for part in (slice(0, first), slice(first, 200)):
                cache.append(k[:, :, part], v[:, :, part], positions[:, part])
            cache.check()
            whole = LayerCache(site)
            whole.append(k, v, positions)
            for x, y in zip(cache.decode(), whole.decode(), strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0)
            cache.reset()


@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-3:sink=4", "octopus-3:window=16", "kivi-4", "ghost-3"])
def test_constants_of_the_first_tokens(spec: str, served: str) -> None:
    """Tokens stay dense until a mean, or all constants, can be taken of them; then the bytes are the reference's."""
    pair = Pair(spec, rotary(), given=False)
    wanted = pair.fused.site.fit_tokens
    assert wanted == (512 if spec == "ghost-3" else 128)
    assert isinstance(pair.fused, FusedLayerCache)
    pair.append(60)
    pair.append(1)
    pair.agree()
    assert pair.fused.holds_dense
    assert not pair.fused.roles["key"].encoded
    before = pair.fused.state()
    pair.fused.append(*torch.ones(2, BATCH, HEADS, wanted, DIM).half(), placed(61, 61 + wanted))
    assert pair.fused.roles["key"].encoded
    pair.fused.go_back(before)  # its constants as well
    assert not pair.fused.is_fitted
    pair.append(wanted - 60)
    pair.append(30)
    assert pair.fused.is_fitted
    pair.agree()
    pair.append(1)
    for cache in (pair.fused, pair.plain):
        cache.select(torch.tensor([1, 0]))
    pair.agree()  # each with its own mean
    pair.fused.check()


def test_beams_take_their_positions_along(served: str) -> None:
    pair = Pair("saw-int4", rotary())
    pair.append(40)
    for cache in (pair.fused, pair.plain):
        cache.select(torch.tensor([1, 1]))
    pair.agree()
    more = placed(40, 43, torch.zeros(2, 1, dtype=torch.long))
    k, v = rows(3, 7, pair.turn, mean_of_keys(), more)
    pair.fused.append(k, v, more)
    pair.plain.append(k, v, more)
    pair.agree()
    pair.fused.check()


@pytest.mark.parametrize("changed", [{"interleaved": True}, {"scaling": 1.3}])
def test_rotary_embeddings(changed: dict[str, Any], served: str) -> None:
    pair = Pair("saw-int4", rotary(**changed))
    pair.append(70)
    pair.append(1)
    pair.agree()


def test_a_model_with_key_biases_runs_on_kernels(served: str) -> None:
    """Prefill, steps and a second turn by default, the mean from the weights; steps agree with the reference."""
    model = biased()
    model.set_attn_implementation("packedkv")
    found = []
    for attention in ("fused", "streamed"):
        cache = packedkv.cache_for(model, "saw-int4", attention=attention)  # type: ignore[arg-type]
        with torch.no_grad():
            model(prompt(1, 40), **passing(model, cache))
            found.append([model(prompt(1, 1), **passing(model, cache)).logits for _ in range(3)])
            assert model(prompt(1, 9), **passing(model, cache)).logits.isfinite().all()
        paths = cache.report()["paths"]
        assert set(paths) == ({"exact", "fused", "staged"} if attention == "fused" else {"exact", "streamed"})
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * float(b.std()))


@pytest.mark.parametrize(("spec", "near"), [("saw-int4:mean=pre", 0.02), ("ghost-4", 0.3)])
def test_a_model_whose_constants_are_fitted(spec: str, near: float, served: str) -> None:
    """A short prompt stays dense, a second turn brings enough tokens; attention agrees with the reference.

    Of ghost up to widths: a rounding of the tokens may give a channel one bit more.
    """
    model = tiny_model("llama-gqa", vocab_size=256)
    model.set_attn_implementation("packedkv")
    found = []
    for attention in ("fused", "streamed"):
        cache = packedkv.cache_for(model, spec, attention=attention)  # type: ignore[arg-type]
        with torch.no_grad():
            for n in (40, 1, 490, 1, 1):
                found.append(model(prompt(1, n), **passing(model, cache)).logits[:, -1])
        paths, layer = cache.report()["paths"], cache.report()["layers"][0]
        assert set(paths) == ({"exact", "fused", "staged"} if attention == "fused" else {"exact", "streamed"})
        assert layer["mean_from"] == "first tokens"
        assert layer["bytes"]["key.codes"] > layer["bytes"].get("key.window", 0)
    for a, b in zip(found[:5], found[5:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=near * float(b.std()))


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


def test_positions_that_do_not_go_on_are_refused(served: str) -> None:
    for wrong in (placed(41, 44), placed(40, 43)[:, [0, 2, 1]]):
        pair = Pair("saw-int4", rotary())
        pair.append(40)
        assert isinstance(pair.fused, FusedLayerCache)
        before = pair.fused.state()
        k, v = torch.randn(2, BATCH, HEADS, 3, DIM).half()
        with pytest.raises(UnsupportedError, match="are not consecutive"):
            pair.fused.append(k, v, wrong)
        pair.agree()  # nothing was stored
        pair.fused.append(k, v, wrong, flag=torch.zeros(1, dtype=torch.int32))  # who defers the look
        with pytest.raises(UnsupportedError, match="are not consecutive"):
            pair.fused.check()
        pair.fused.go_back(before)
    pair = Pair("saw-int4", rotary())
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
    pair.append(90)
    held = pair.fused._placed()["placed"].data_ptr(), [x.data_ptr() for x in pair.fused.engine.tensors()]
    pair.agree()
    for n in (1, 1, 7, 1):
        pair.append(n)
    pair.agree()
    for cache in (pair.fused, pair.plain):
        cache.crop(80)
    pair.at = 80
    pair.append(70)
    pair.append(1)
    pair.agree()
    for cache in (pair.fused, pair.plain):
        cache.select(torch.tensor([1, 0]))
    pair.agree()
    pair.fused.check()
    for cache in (pair.fused, pair.plain):
        cache.reset()
    pair.at = 0
    for n in (30, 1):
        pair.append(n)
    pair.agree()
    assert held == (pair.fused._placed()["placed"].data_ptr(), [x.data_ptr() for x in pair.fused.engine.tensors()])


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


@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-3:sink=4", "octopus-3:window=16"])
def test_a_step_of_a_static_cache_is_one_graph(spec: str, machine: dict[str, Any]) -> None:
    k, v = rows(60, 3, rotary(), mean_of_keys(), placed(0, 60))
    (traced, _), (plain, _) = (both(spec, rotary(), 128) for _ in range(2))
    q = torch.randn(BATCH, 2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(5))

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


def test_positions_that_do_not_go_on_are_refused_by_a_static_cache(machine: dict[str, Any]) -> None:
    for wrong in (placed(41, 44), placed(40, 43)[:, [0, 2, 1]]):
        pair = Pair("saw-int4", rotary(), 64)
        pair.append(40)
        k, v = torch.randn(2, BATCH, HEADS, 3, DIM).half()
        with pytest.raises(UnsupportedError, match="are not consecutive"):
            pair.fused.append(k, v, wrong)
        pair.agree()  # nothing was stored
    pair.fused.append(k[:, :, :1], v[:, :, :1], placed(50, 51))
    with pytest.raises(UnsupportedError, match="are not consecutive"):
        pair.fused.check()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3:window=16,sink=2", "kivi-4"])
def test_means_after_rope(spec: str, given: bool, served: str) -> None:
    made = packedkv.get(spec + (":" if ":" not in spec else ",") + "mean=post")
    site = LayerSite(made, mean=MeanRemoval("post", None, mean_of_keys() if given else None))
    fused, plain = FusedLayerCache(site), LayerCache(site)
    for n in (150, 1, 1, 40):
        k, v = torch.randn(2, BATCH, HEADS, n, DIM, generator=torch.Generator().manual_seed(n))
        for cache in (fused, plain):
            cache.append(k + mean_of_keys()[:, :, None], v)
    for cache in (fused, plain):
        cache.evict(32)
    assert all(torch.equal(a, b) for a, b in zip(fused.decode(0, 100), plain.decode(0, 100), strict=True))
    for n in (1, 7):
        q = torch.randn(BATCH, 3 * HEADS, n, DIM, generator=torch.Generator().manual_seed(n))
        want = attend(q, plain)
        assert plain.unfused() == ""
        torch.testing.assert_close(plain.attend(q), want, rtol=0, atol=3e-5)
        torch.testing.assert_close(fused.attend(q), want, rtol=0, atol=6e-3 if served == "cuda" else 3e-5)


@pytest.mark.parametrize("spec", ["saw-int4", "int-4:mean=pre", "octopus-3:sink=3,mean=none", "kivi-4", "ghost-4"])
@pytest.mark.parametrize("kind", ["reference", "growing", "static"])
@pytest.mark.parametrize("refused", ["one NaN", "several NaN", "positions"])
def test_refused_first_tokens_leave_no_batch_and_no_dtype_behind(
    served: str, spec: str, kind: str, refused: str
) -> None:
    """Also where kernels find the fault only when there are pages for the tokens."""
    scheme = packedkv.get(spec)
    needs_order = scheme.mean == "pre" or (scheme.mean == "auto" and scheme.key.without_mean)
    site = LayerSite(scheme, mean=MeanRemoval("pre", rotary()) if needs_order else None)
    layer = partial(FusedLayerCache, capacity=1024 if kind == "static" else 0)
    cache, fresh = (LayerCache(site) if kind == "reference" else layer(site) for _ in range(2))
    k, v = torch.randn(2, 1, HEADS, 1 if refused == "one NaN" else 3, DIM, generator=torch.Generator().manual_seed(0))
    if kind == "static" and served == "cpu":
        return  # for CUDA graphs
    if refused == "one NaN" and kind != "reference" and served == "cuda":
        return  # the flag of a single token is read by the next check
    if refused == "positions" and needs_order:
        with pytest.raises(UnsupportedError, match="not consecutive"):
            cache.append(k, v, torch.tensor([[0, 5, 9]]))
    else:
        with pytest.raises(ValueError, match="finite"):
            cache.append(k * torch.nan, v)
    assert len(cache) == 0
    k, v = torch.randn(2, 2, HEADS, 600, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    for each in (cache, fresh):
        each.append(k, v)
    assert all(map(torch.equal, cache.decode(), fresh.decode()))
