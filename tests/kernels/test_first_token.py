"""The first token of a new cache: constants are built once in a process; a prefill's middle never waits for a GPU.

``packedkv bench`` measures times. These tests count operations that a GPU would have to wait for.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import packedkv
from packedkv import probe
from packedkv.cache.fused import FusedLayerCache
from packedkv.codec import ROLES, Dense, Site
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.outliers import Med
from packedkv.errors import PackedKVWarning
from packedkv.integrations.transformers import cache_for, deferred, layers
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.constants import constants_for
from packedkv.kernels.spec import encoder, reader
from packedkv.probe import OutlierProbe
from packedkv.scheme import KVScheme
from packedkv.shared import SHARED, Shared, seeded_params
from packedkv.store.site import LayerSite
from tests.conftest import tiny_config, tiny_model
from tests.kernels.conftest import normal, unsynchronised
from tests.kernels.emulation import loaded_by

DIM, HEADS, LAYERS = 64, 4, 5
CPU = torch.device("cpu")
VIEWS = {*("view", "as_strided", "slice", "select", "expand", "detach", "unsqueeze", "transpose", "alias", "unbind")}
LOOKS = ("_local_scalar_dense", "nonzero", "equal", "unique_dim", "lift_fresh")
"""Operations that wait for a GPU; the last copies numbers of the host to it."""
SERVED = [s for s in packedkv.presets() if packedkv.describe(s)["kernels"]["decode"] == "cuda"]
PROMPT = [s for s in SERVED if packedkv.get(s).key.fit_tokens == 1]
"""Presets that encode from the first token on."""


class Counted(TorchDispatchMode):
    """Counts the operations of torch, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.update([] if name in VIEWS else [name])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Kernels that do nothing; the grids of their launches."""
    grids: list[Any] = []
    idle = SimpleNamespace(launch=lambda grid, *_, **__: grids.append(grid))
    with loaded_by(lambda program, names, device, label="": [idle for _ in names], monkeypatch):
        yield grids


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer encodes its tokens when they are appended."""
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which reading a number waits, as it does on a GPU."""
    for module in (deferred, probe):
        monkeypatch.setattr(module, "synchronizes", lambda x: True)


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe measures the keys of every codec and refuses none."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)


def rows(tokens: int, seed: int = 0, bias: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = normal(2, 1, HEADS, tokens, DIM, seed=seed).bfloat16()
    k[..., 5::16] += bias
    return k, v


def model_cache(spec: str, attention: str = "fused", **options: Any) -> Any:
    config = tiny_config("llama-gqa", head_dim=DIM, num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    return cache_for(config, spec, attention=attention, **options)


def turn(
    cache: Any, tokens: int, seed: int = 0, wrong: tuple[int, float] = (-1, 0.0), last: int = LAYERS, place: int = 40
) -> None:
    """Append tokens to the first layers; ``wrong``: a layer and a number that no codec holds, in token ``place``."""
    k, v = rows(tokens, seed)
    bad = k.clone()
    bad[0, 1, min(place, tokens - 1), 9] = wrong[1]
    for layer in range(last):
        cache.update(bad if layer == wrong[0] else k, v, layer)


def contents(cache: Any) -> list[Any]:
    held = []
    for layer in cache.packed_layers:
        held += [len(layer.cache), layer.get_seq_length(), layer.cache.nbytes(), [*layer.cache.roles["key"].runs]]
        held += [x.clone() for x in layer.cache.decode()]
    return held


def alike(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


# -- what a second cache costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "max_len"),
    [
        *(("saw-int4", None), ("saw-int4", 1024), ("octopus-3", None), ("innerq-base", 1024), ("kivi-2", None)),
        *(("turboquant-3", 1024), ("hqmq-s24_r3", None), ("hqmq-s24_r3:outliers=3", None)),
    ],
)
def test_a_layer_of_a_second_cache_waits_for_nothing(
    spec: str, max_len: int | None, launched: list[Any], at_once: None, waiting: None, unjudged: None
) -> None:
    """Few operations in the middle of a prefill and of a second turn, and few launches; none of them reads a number."""
    for second in (False, True):
        cache = model_cache(spec, max_len=max_len)
        turns = ((600, 80), (128, 40), (1, 16), (1, 16))
        for tokens, most in turns if max_len is None else turns[:1]:
            counts = []
            for layer in range(LAYERS):
                k, v = rows(tokens)
                launched.clear()
                with Counted() as counted:
                    cache.update(k, v, layer)
                counts.append((counted.seen, len(launched)))
            seen, launches = counts[LAYERS // 2]
            if second:
                assert not [name for name in LOOKS if seen[name]], seen
                assert seen.total() <= most, seen
                assert launches <= 2
    if tokens == 1 and not cache.layer_caches[0].holds_dense:
        assert seen.total() == 0  # a decode step makes no tensor
    packed = [one for one in cache.layer_caches if not isinstance(one.roles["key"].codec, Dense)]
    assert len(cache.probe.results) == len(packed)


def test_constants_of_all_layers_are_fitted_by_one_launch(
    launched: list[Any], waiting: None, unjudged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share the angles of RoPE, and the first layer alone reads the positions."""
    monkeypatch.setattr(deferred.Deferred, "_refuse", lambda *_: None)  # kernels that do nothing wrote the means
    model = tiny_model("llama-gqa", head_dim=DIM, num_hidden_layers=LAYERS)
    model.set_attn_implementation("packedkv")
    looks, update = [], layers.PackedCacheLayer.update

    def watched(*given: Any, **more: Any) -> Any:
        with Counted() as mode:
            found = update(*given, **more)
        looks.append(sum(mode.seen[name] for name in LOOKS))
        return found

    monkeypatch.setattr(layers.PackedCacheLayer, "update", watched)
    for _ in range(2):
        cache = cache_for(model, "ghost-3", attention="fused")
        launched.clear()
        looks.clear()
        with torch.no_grad():
            model(torch.arange(600)[None] % 100, **passing(model, cache))
    assert [grid[2] for grid in launched].count(2 * LAYERS) == 1  # keys and values
    assert looks[0] <= 1
    assert not any(looks[1 : LAYERS - 1])
    assert cache.layer_caches[0].roles["key"].encoded


@pytest.mark.gpu
@pytest.mark.parametrize("spec", PROMPT)
def test_nothing_waits_for_the_gpu_in_a_prefills_middle(spec: str) -> None:
    k, v = (x.cuda() for x in rows(700))
    for turn in range(2):
        cache = model_cache(spec)
        with unsynchronised() if turn else nullcontext():
            for layer in range(LAYERS - 1):
                cache.update(k, v, layer)
        cache.update(k, v, LAYERS - 1)
    packed = [c for c in cache.layer_caches if not isinstance(c.roles["key"].codec, Dense)]
    assert len(cache.report()["keys"]) == len(packed)


def test_constants_are_shared_and_never_written(machine: dict[str, Any]) -> None:
    k, v = rows(80)
    for made in (packedkv.get("octopus-3"), packedkv.get("hqmq-s24_r3"), KVScheme(Med(Hqmq(24, 3)), Med(Hqmq(24, 3)))):
        made = replace(made, window=0, spec="")
        caches = [FusedLayerCache(LayerSite(made, layer), capacity=128) for layer in (1, 1, 2)]
        for cache in caches:
            cache.append(k, v)
        one, two, other = (cache.engine for cache in caches)
        assert one.writing["key"].tables is two.writing["key"].tables
        assert one.reading["key"].tables is two.reading["key"].tables
        alike = isinstance(made.key, Octopus)  # its tables know no layer, its signs do
        assert (one.writing["key"].tables is other.writing["key"].tables) == alike
        assert one.writing["key"].factor is not other.writing["key"].factor or isinstance(made.key, Hqmq)
        if isinstance(made.key, Med):  # thresholds are the prefill's
            assert one.writing["key"].factor is not two.writing["key"].factor
        else:
            assert caches[0].roles["key"].params is caches[1].roles["key"].params
        before = [x.clone() for x in one.tensors()]
        caches[1].select(torch.tensor([0, 0]))
        caches[1].append(*(x.repeat(2, 1, 1, 1)[:, :, :5] for x in (k, v)))
        caches[1].reset()
        caches[1].append(*(2 * x for x in (k, v)))
        assert all(map(torch.equal, one.tensors(), before))


def test_tables_that_are_called_alike_are_the_same_in_all_layers() -> None:
    for spec in SERVED:
        for role in ROLES:
            codec = packedkv.get(spec).codec(role)
            for side in (reader(codec, DIM, role), encoder(codec, DIM, role)):
                if side.tables is None or "tensor" in codec.needs:
                    continue
                sites = Site(0, role, 2, DIM), Site(7, role, 3, DIM, seed=5)
                one, other = (constants_for(side, codec.fit(site), site.num_heads, DIM).tables for site in sites)
                assert side.layer_invariant == (one.shape == other.shape and torch.equal(one, other)), spec


def test_what_is_shared_is_bounded_and_serves_every_mode() -> None:
    built: list[int] = []

    def build(number: int) -> dict[str, torch.Tensor]:
        built.append(number)
        return {"x": torch.full((256,), float(number))}  # 1 KiB

    shared = Shared(3 << 10)
    for number in (0, 1, 2, 0, 3, 0, 1):
        shared.get(number, CPU, lambda number=number: build(number))
    assert built == [0, 1, 2, 3, 1]  # 1 had to leave for 3; 0 had been asked for since
    with torch.inference_mode():
        weight = shared.get("in inference mode", CPU, lambda: build(9))["x"]
    (weight * torch.ones(256, requires_grad=True)).sum().backward()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(shared.get("raced", CPU, lambda: build(5)))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]
    shared.clear()
    assert shared.get(9, CPU, lambda: build(9))["x"][0] == 9
    site = Site(0, "key", 2, DIM)
    assert seeded_params(Octopus(3, 1), site) is seeded_params(Octopus(3, 1), replace(site))
    assert seeded_params(Octopus(3, 1), site) is not seeded_params(Octopus(3, 1), replace(site, seed=1))
    assert SHARED.limit >= 1 << 28


# -- what a pass refuses at its end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["fused", "streamed"])
def test_a_prefill_is_judged_when_its_last_layer_is_full(
    attention: str, machine: dict[str, Any], waiting: None
) -> None:
    (k, v), cache = rows(100, bias=60.0), model_cache("int-4", attention, probe="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in range(LAYERS - 1):
            cache.update(k, v, layer)
        assert cache.probe.results == {}
    with pytest.warns(PackedKVWarning, match="int-4 breaks on this model's keys: in layer 0") as seen:
        cache.update(k, v, LAYERS - 1)
    assert len(seen) == 1
    assert set(cache.report()["keys"]) == set(range(LAYERS))
    # a model that leaves layers out is judged at its next step
    cache = model_cache("int-4", attention, probe="warn")
    cache.update(k, v, 0)
    with pytest.warns(PackedKVWarning, match="int-4 breaks"):
        cache.update(k[:, :, :1], v[:, :, :1], 0)


@pytest.mark.parametrize("attention", ["fused", "streamed"])
@pytest.mark.parametrize("spec", ["int-4", "saw-int4", "kivi-2", "octopus-3", "hqmq-s24_r3:outliers=3"])
def test_layers_measured_together_are_measured_as_alone(
    spec: str, attention: str, machine: dict[str, Any], unjudged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a pass's end on a GPU; some layers are of other keys."""
    found = []
    for together in (False, True):
        for module in (deferred, probe):
            monkeypatch.setattr(module, "synchronizes", lambda x, together=together: together)
        cache = model_cache(spec, attention)
        for layer in range(LAYERS):
            cache.update(*rows(192, layer, 60.0 * (layer > 0)), layer)
        found.append(cache.report()["keys"])
    alone, together = found
    assert alone.keys() == together.keys() != set()
    for layer, own in alone.items():
        assert together[layer] == pytest.approx(own, rel=1e-5), layer


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 70_000.0])
@pytest.mark.parametrize(
    ("spec", "max_len", "first", "place"),
    [
        *(("saw-int4", None, 0, 40), ("saw-int4", 256, 0, 40)),
        *(("octopus-3", 256, 0, 89), ("saw-int4:sink=4", 256, 0, 0)),  # tokens in 16 bit, which no kernel encodes
        *((spec, None, 100, 40) for spec in ("saw-int4", "turboquant-4", "octopus-3", "kivi-2", "innerq-base")),
    ],
)
def test_tokens_that_no_codec_holds_are_taken_back(
    spec: str, max_len: int | None, first: int, place: int, value: float, machine: dict[str, Any], waiting: None,
    unjudged: None,
) -> None:  # fmt: skip
    """Of all layers, at the end of the pass that brings them: a prefill, or a second turn behind ``first`` tokens."""
    cache, good = model_cache(spec, max_len=max_len), model_cache(spec, max_len=max_len)
    for one in (cache, good) if first else ():
        turn(one, first)
    before = contents(cache) if first else []
    of, after = ("call", "as it was before the call") if first else ("prefill", "The cache is empty again")
    with pytest.raises(ValueError, match=rf"layer 1: a key or value of the {of} is not finite .*{after}"):
        turn(cache, 90, 1, (1, value), place=place)
    assert all(bool(layer.filled) == bool(first) for layer in cache.packed_layers)
    assert not first or alike(contents(cache), before)
    for one in (cache, good):
        turn(one, 70, 2)
        turn(one, 1, 3)
    assert alike(contents(cache), contents(good))
    assert cache.report()["keys"].keys() == good.report()["keys"].keys()


@pytest.mark.parametrize(
    "act",
    [
        lambda cache: cache.report(),
        lambda cache: cache.crop(50),
        lambda cache: cache.layer_caches[0].decode(),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.update(*rows(1), 0),
        lambda cache: cache.update(*rows(5), 0),
    ],
)
def test_a_pass_that_stopped_in_its_middle_is_checked_first(act: Any, machine: dict[str, Any], waiting: None) -> None:
    cache = model_cache("saw-int4")
    turn(cache, 100)
    before = contents(cache)
    turn(cache, 60, 1, (1, float("nan")), last=3)
    with pytest.raises(ValueError, match="layer 1: a key or value of the call"):
        act(cache)
    assert alike(contents(cache), before)
    act(cache)
    turn(cache := model_cache("saw-int4"), 100)
    turn(cache, 60, 1, (1, float("nan")), last=3)
    cache.reset()
    turn(cache, 100)
    turn(cache, 40, 1, last=3)  # nothing is wrong with these
    act(cache)


def test_a_token_of_a_decode_step_is_refused_by_the_next_turn(machine: dict[str, Any], waiting: None) -> None:
    cache = model_cache("saw-int4")
    turn(cache, 100)
    turn(cache, 1, wrong=(3, float("nan")))
    for _turn in range(2):
        with pytest.raises(ValueError, match="layer 3: a key or value appended in a decode step"):
            turn(cache, 40, 1)
        assert [len(layer.cache) for layer in cache.packed_layers] == [101] * LAYERS
    cache.reset()
    turn(cache, 100)


@pytest.mark.parametrize("fresh", [40, 200])
def test_a_windows_tokens_come_back(fresh: int, machine: dict[str, Any], waiting: None) -> None:
    """In a layer that has attended already, and dropped what no later query sees."""
    noted, scheme = deferred.Deferred(2), packedkv.get("saw-int4")
    window = layers.PackedCacheLayer(
        FusedLayerCache(LayerSite(scheme, 0)), 0, "fused", "exact", noted, window=96, kind="sliding_attention"
    )
    full = layers.PackedCacheLayer(FusedLayerCache(LayerSite(scheme, 1)), 1, "fused", "exact", noted)

    def state() -> list[Any]:
        return [window.get_seq_length(), window.cache.start, *window.cache.decode(), window.cache.nbytes()]

    for layer in (window, full):
        layer.update(*rows(150))
    before, (k, v) = state(), rows(fresh, 1)
    window.update(k, v)
    window.attended("staged", lambda: 0)
    with pytest.raises(ValueError, match="layer 1"):
        full.update(k, v * float("inf"))
    assert alike(state(), before)
    assert len(full.cache) == 150


# -- tokens that wait for the end of a pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3:window=20", "kivi-2:sink=4", "innerq-base"])
def test_tokens_that_wait_are_the_same_bytes(
    spec: str, machine: dict[str, Any], waiting: None, unjudged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = model_cache(spec)
    turn(cache, 150, last=LAYERS - 1)
    assert not machine  # nothing was launched
    assert [layer.has_deferred for layer in cache.packed_layers] == [True] * (LAYERS - 1) + [False]
    cache.update(*rows(150), LAYERS - 1)
    assert not any(layer.has_deferred for layer in cache.packed_layers)
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    turn(other := model_cache(spec), 150, last=LAYERS - 1)
    assert not any(layer.has_deferred for layer in other.packed_layers)
    other.update(*rows(150), LAYERS - 1)
    assert alike(contents(cache), contents(other))
    assert cache.report()["keys"] == other.report()["keys"] != {}


def test_tokens_that_wait_are_seen_and_dropped_as_others(machine: dict[str, Any], waiting: None) -> None:
    for look in (
        lambda cache: cache.layers[1].get_seq_length() == 90,
        lambda cache: len(cache.layers[1].cache) == 90,
        lambda cache: cache.layers[1].batch_size == 1,
        lambda cache: cache.report()["layers"][1]["tokens"] == 90,
    ):
        cache = model_cache("saw-int4")
        turn(cache, 90, last=3)
        assert look(cache)
        for layer in (3, 4):
            cache.update(*rows(90), layer)
        turn(other := model_cache("saw-int4"), 90)
        assert alike(contents(cache), contents(other))
    turn(cache := model_cache("saw-int4"), 90, last=3)
    cache.reset()
    assert len(cache.layers[1].cache) == 0
    for one in (cache, other := model_cache("saw-int4")):
        turn(one, 60, 1)
    assert alike(contents(cache), contents(other))


def test_tokens_that_wait_take_a_bounded_number_of_bytes(
    launched: list[Any], waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the end of a pass checks of encoded layers holds none of their keys and values."""
    k, v = (x.clone() for x in rows(90))  # with memory of their own
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 2 * (k.nbytes + v.nbytes))
    cache, waits = model_cache("saw-int4", probe=False), []
    for layer in range(LAYERS):
        cache.update(k, v, layer)
        waits.append(sum(one.has_deferred for one in cache.packed_layers))
    assert waits == [1, 2, 0, 1, 0]
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    for spec, max_len in (("int-4", None), ("octopus-3", 512), ("kivi-2:sink=4", None)):
        cache = model_cache(spec, max_len=max_len, probe=False)
        for layer in range(LAYERS - 1):
            cache.update(k, v, layer)
        noted = [note for layer in cache.layers for note in layer.deferred.checks.values()]
        assert len(noted) >= LAYERS - 1
        held = {x.untyped_storage().data_ptr() for note in noted for x in (*note.largest, *note.dense)}
        assert held.isdisjoint({k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()})


@pytest.mark.parametrize(("half", "held"), [("begin_append", 0), ("end_append", 2)])
def test_layers_behind_one_that_fails_are_empty(
    half: str, held: int, machine: dict[str, Any], waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, append = model_cache("saw-int4"), getattr(FusedLayerCache, half)
    with monkeypatch.context() as patch:

        def fail(own: FusedLayerCache, *given: Any, **more: Any) -> Any:
            if own.site.layer == 2:
                raise MemoryError
            return append(own, *given, **more)

        patch.setattr(FusedLayerCache, half, fail)
        with pytest.raises(MemoryError):
            turn(cache, 90)
    assert [len(layer.cache) for layer in cache.packed_layers] == [90] * held + [0] * (LAYERS - held)
    assert [layer.filled for layer in cache.packed_layers] == [True] * held + [False] * (LAYERS - held)
    cache.reset()
    for one in (cache, other := model_cache("saw-int4")):
        turn(one, 90)
    assert alike(contents(cache), contents(other))
