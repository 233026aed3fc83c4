"""The first token of a new cache: constants are built once in a process, no number is looked at in a prefill's middle.

Times are a GPU's to tell (``packedkv bench``); what costs them is counted here: operations, and looks at numbers.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import packedkv
from packedkv import probe
from packedkv.attention import Partial
from packedkv.cache.fused import FusedLayerCache, fused_refusal
from packedkv.cache.host import LayerCache
from packedkv.codec import ROLES, Dense, Site
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.outliers import Med
from packedkv.errors import PackedKVWarning
from packedkv.integrations.transformers import cache_for, deferred, layers
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.choose import refusal
from packedkv.kernels.codecs import ghost, innerq
from packedkv.kernels.codecs.hqmq import cell_tables
from packedkv.kernels.constants import constants_for
from packedkv.kernels.cuda import basis, build, encode, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.fit import FitBuffers
from packedkv.kernels.spec import encoder, reader
from packedkv.probe import OutlierProbe
from packedkv.registry import method_of
from packedkv.scheme import KVScheme
from packedkv.shared import SHARED, Shared, drawn
from tests.conftest import tiny_config, tiny_model
from tests.kernels.conftest import unsynchronised
from tests.kernels.decode_cases import each_in_turn
from tests.kernels.emulation import forget

DIM, HEADS, LAYERS = 64, 4, 5
CPU = torch.device("cpu")
FIRST_OF_METHODS = [next(iter(method_of(name).presets)) for name in packedkv.names()]
VIEWS = (
    "view",
    "as_strided",
    "slice",
    "select",
    "expand",
    "detach",
    "unsqueeze",
    "transpose",
    "alias",
    "unbind",
    "permute",
)
LOOKS = ("_local_scalar_dense", "nonzero", "equal", "unique_dim")
"""Operations that wait for a GPU."""
SERVED = [s for s in packedkv.presets() if packedkv.describe(s)["kernels"]["decode"] == "cuda"]
PROMPT = [s for s in SERVED if packedkv.get(s).key.fit_tokens == 1]
"""Without those that wait for more tokens than a first call may bring."""


class Counted(TorchDispatchMode):
    """Counts the operations that torch is asked for, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.update([] if name in VIEWS else [name])
        return func(*args, **(kwargs or {}))


class Idle:
    def launch(self, *args: Any, **options: Any) -> None:
        """Do nothing: what the host does is counted."""


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that do nothing, on a machine where every look at a number waits."""
    for module in (attention, basis, encode, ghost, innerq, prefill):
        monkeypatch.setattr(module, "load", lambda program, names, device, label="": [Idle() for _ in names])
    monkeypatch.setattr(build, "refusal", lambda device: "")
    forget()
    yield
    forget()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer encodes its tokens when they come."""
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a look at a number waits, as a GPU's does."""
    for module in (deferred, probe):
        monkeypatch.setattr(module, "synchronizes", lambda x: True)


def rows(tokens: int, seed: int = 0, bias: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, 1, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()
    k[..., 5::16] += bias
    return k, v


def model_cache(spec: str, **options: Any) -> Any:
    config = tiny_config("llama-gqa", head_dim=DIM, num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    return cache_for(config, spec, attention="fused", **options)


@pytest.mark.parametrize(
    ("spec", "max_len"),
    [
        pytest.param(spec, max_len, marks=pytest.mark.wide if max_len and i % 3 else [])
        for i, spec in enumerate([*PROMPT, "hqmq-s24_r3:outliers=3", "int-4:outliers=3"])
        for max_len in (None, 512)
    ],
)
def test_a_second_cache_costs_few_operations_and_no_look(
    spec: str, max_len: int | None, idle: None, at_once: None, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)  # kernels that do nothing break on all keys
    k, v = rows(300)
    if max_len and (why := refusal(packedkv.get(spec), DIM, CPU, static=True)):
        pytest.skip(why)
    for _turn in range(2):
        cache = model_cache(spec, max_len=max_len)
        counts = []
        for layer in range(LAYERS):
            with Counted() as counted:
                cache.update(k, v, layer)
            counts.append(counted.seen)
        packed = [c for c in cache.layer_caches if not isinstance(c.roles["key"].codec, Dense)]
        assert len(cache.probe.found) == len(packed)
    middle, settled = counts[LAYERS // 2], counts[-1].total() - counts[0].total()
    assert settled <= (140 if "outliers" in spec else 80)  # thresholds are medians of each layer's keys
    if "torch" in cache.layer_caches[0].kernels().values():
        return  # PyTorch encodes
    assert not [name for name in LOOKS if middle[name]]
    assert not any(seen["lift_fresh"] for seen in counts)  # a host's numbers as a tensor: their copy to a GPU waits
    one = cache.layer_caches[LAYERS // 2]
    sampled = any("tensor" in state.codec.needs for state in one.roles.values())
    dense = (10 if max_len is None else 23) * one.holds_dense  # sink, window and unfinished block
    medians = 35 * ("outliers" in spec)  # of the prefill's chunks
    fits = (15 if max_len or "outliers" in spec else 2) * sampled  # in a growing cache by a kernel
    assert middle.total() <= (2 if max_len is None else 7) + dense + fits + medians, middle


def test_constants_of_all_layers_are_fitted_by_one_launch(
    idle: None, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is encoded with them, and nothing of the prompt is kept for it behind."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    monkeypatch.setattr(FitBuffers, "layers", LAYERS)  # as a model's cache counts them
    cache, grids = model_cache("ghost-3"), list[tuple[int, int]]()
    monkeypatch.setattr(Idle, "launch", lambda own, grid, *given, **more: grids.append((grid[2], *given[:1])))
    turn(cache, 600)
    engines = [layer.cache.engine for layer in cache.packed_layers]
    fits = [i for i, (z, threads) in enumerate(grids) if z == 2 * LAYERS and threads == ghost.fit_threads(64)]
    assert fits == [0]
    assert len(grids) > LAYERS
    assert not any(engine.buffers.waiting for engine in engines if isinstance(engine, CudaEngine))


@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-3", "hqmq-s24_r3", "octopus-3", "kivi-2"])
def test_a_layer_of_a_second_cache_asks_once_for_its_constants(
    spec: str, idle: None, at_once: None, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And launches what encodes; a later turn and a step ask for nothing, a step makes no tensor in any layer."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    asked, launched = Counter[str](), Counter[str]()
    get, launch = Shared.get, Idle.launch
    monkeypatch.setattr(Shared, "get", lambda *given, **more: asked.update(["x"]) or get(*given, **more))
    monkeypatch.setattr(Idle, "launch", lambda *given, **more: launched.update(["x"]) or launch(*given, **more))
    for second in (False, True):
        cache = model_cache(spec)
        for tokens, most in ((300, 1), (128, 0), (1, 0), (1, 0)):
            k, v = rows(tokens)
            for layer in range(LAYERS):
                asked.clear()
                launched.clear()
                with Counted() as counted:
                    cache.update(k, v, layer)
                if second and layer == LAYERS // 2:
                    assert asked.total() == most
                    assert launched.total() <= 2
                    assert tokens != 128 or counted.seen.total() <= (12 if cache.layer_caches[layer].holds_dense else 2)
    if not cache.layer_caches[0].holds_dense:
        assert counted.seen.total() == 0


@pytest.mark.parametrize(("spec", "most"), [("octopus-3", 8), ("innerq-base", 8), ("kivi-4", 8), ("saw-int4", 8)])
def test_many_queries_take_three_launches_beside_attention(
    spec: str, most: int, idle: None, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacking; queries and dense tokens into the basis of the codes; outputs out of it. Few tensors are made."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    monkeypatch.setattr(prefill, "score", lambda q, *_, **__: Partial(q, torch.empty(0)))
    cache, launched = model_cache(spec), Counter[str]()
    for tokens in (300, 128):
        for layer in range(LAYERS):
            cache.update(*rows(tokens), layer)
    one = cache.layer_caches[0]
    launch = Idle.launch
    monkeypatch.setattr(Idle, "launch", lambda *given, **more: launched.update(["x"]) or launch(*given, **more))
    q = torch.randn(1, 2 * HEADS, 128, DIM).bfloat16()
    one.attend_chunk(q)
    launched.clear()
    with Counted() as counted:
        one.attend_chunk(q)
    assert launched.total() <= 3
    assert counted.seen.total() <= most, counted.seen


@pytest.mark.parametrize("spec", ["ghost-3", "ghost-2:sink=0"])
def test_constants_of_the_first_tokens_cost_few_operations(
    spec: str, idle: None, at_once: None, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel fits ghost; layers share angles; the first layer alone looks at the positions."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    monkeypatch.setattr(deferred.Deferred, "_refuse", lambda *_: None)  # nobody wrote the means
    model = tiny_model("llama-gqa", head_dim=DIM, num_hidden_layers=LAYERS)
    model.set_attn_implementation("packedkv")
    launched, counts = Counter[str](), []
    launch, update = Idle.launch, layers.PackedCacheLayer.update
    monkeypatch.setattr(Idle, "launch", lambda *given, **more: launched.update(["x"]) or launch(*given, **more))

    def counted(*given: Any, **more: Any) -> Any:
        launched.clear()
        with Counted() as mode:
            found = update(*given, **more)
        counts.append((mode.seen, launched.total()))
        return found

    monkeypatch.setattr(layers.PackedCacheLayer, "update", counted)
    for _turn in range(2):
        cache = cache_for(model, spec, attention="fused")
        counts.clear()
        with torch.no_grad():
            model(torch.arange(600)[None] % 100, **passing(model, cache))
        assert cache.layer_caches[0].roles["key"].encoded
    seen, kernels = counts[LAYERS // 2]
    assert not [name for name in LOOKS if seen[name]], seen
    assert sum(counts[0][0][name] for name in LOOKS) <= 1
    assert seen.total() <= 20, seen
    assert kernels == 2  # a fit of both, and both are encoded
    assert counts[-1][0].total() - seen.total() <= 80  # the probe, by kernels


def test_hqmqs_tables_take_few_operations_for_all_heads() -> None:
    params = Hqmq(24, 3).fit(Site(0, "key", 8, DIM))
    cell_tables(params["secondary"][0])
    with Counted() as counted:
        cell_tables(params["secondary"][0])
    assert counted.seen.total() < 200


def test_constants_are_shared_and_never_written(machine: dict[str, Any]) -> None:
    k, v = rows(80)
    for made in (packedkv.get("octopus-3"), packedkv.get("hqmq-s24_r3"), KVScheme(Med(Hqmq(24, 3)), Med(Hqmq(24, 3)))):
        made = replace(made, window=0, spec="")
        caches = [FusedLayerCache(made, layer=layer, capacity=128) for layer in (1, 1, 2)]
        for cache in caches:
            cache.append(k, v)
        one, two, other = (cache.engine for cache in caches)
        assert isinstance(one, CudaEngine)
        assert isinstance(two, CudaEngine)
        assert isinstance(other, CudaEngine)
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
        for x, held in zip(one.tensors(), before, strict=True):
            assert torch.equal(x, held)


@pytest.mark.parametrize("spec", SERVED)
def test_tables_that_are_called_alike_are_the_same_in_all_layers(spec: str) -> None:
    scheme = packedkv.get(spec)
    for role in ROLES:
        codec = scheme.codec(role)
        for side in (reader(codec, DIM, role), encoder(codec, DIM, role)):
            if side.tables is None or "tensor" in codec.needs:
                continue
            sites = Site(0, role, 2, DIM), Site(7, role, 3, DIM, seed=5)
            one, other = (constants_for(side, codec.fit(site), site.num_heads, DIM).tables for site in sites)
            assert one is not None
            assert other is not None
            assert side.layer_invariant == (one.shape == other.shape and torch.equal(one, other))


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
    assert drawn(Octopus(3, 1), site) is drawn(Octopus(3, 1), replace(site))
    assert drawn(Octopus(3, 1), site) is not drawn(Octopus(3, 1), replace(site, seed=1))
    assert SHARED.limit >= 1 << 28


@pytest.mark.parametrize(
    ("spec", "bias"),
    each_in_turn([*FIRST_OF_METHODS, "hqmq-s24_r3:outliers=3", "saw-int4:hessian=true"], (0.0, 60.0)),
)
def test_layers_judged_together_are_judged_as_alone(
    spec: str, bias: float, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels and without them; some layers are of other keys."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    scheme = packedkv.get(spec)
    if "queries" in scheme.key.needs:
        scheme = replace(scheme, key=packedkv.get("polarquant-4").key, spec="")
    kinds: list[type[LayerCache]] = [LayerCache]
    if not fused_refusal(scheme, DIM, CPU):
        kinds.append(FusedLayerCache)
    found = []
    for kind in kinds:
        alone, together = OutlierProbe(scheme), OutlierProbe(scheme)
        for number in range(LAYERS):
            cache, (k, v) = kind(scheme.for_layer(8, 24), layer=number), rows(192, number, bias * (number > 0))
            cache.append(k, v)
            alone(number, cache, k)
            with monkeypatch.context() as patch:
                patch.setattr(probe, "synchronizes", lambda x: True)
                together(number, cache, k)
        assert not together.found
        together.settle()
        assert alone.found.keys() == together.found.keys()
        for number, one in alone.found.items():
            both = (one.outlier_ratio, one.channel_error), (
                together.found[number].outlier_ratio, together.found[number].channel_error,
            )  # fmt: skip
            assert both[0] == pytest.approx(both[1], rel=1e-5)
        found.append(alone.found)
    for one, other in zip(found[0].values(), found[-1].values(), strict=True):  # kernels unpack to fp16
        assert one.channel_error == pytest.approx(other.channel_error, rel=1e-2, abs=2e-6)


@pytest.mark.parametrize("attention", ["fused", "streamed"])
def test_a_prefill_is_judged_when_its_last_layer_is_full(
    attention: str, machine: dict[str, Any], waiting: None
) -> None:
    (k, v), cache = rows(100, bias=60.0), model_cache("int-4", probe="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in range(LAYERS - 1):
            cache.update(k, v, layer)
        assert cache.probe.found == {}
    with pytest.warns(PackedKVWarning, match="int-4 breaks on this model's keys: in layer 0") as seen:
        cache.update(k, v, LAYERS - 1)
    assert len(seen) == 1
    assert set(cache.report()["keys"]) == set(range(LAYERS))
    # a model that leaves layers out is judged at its next step
    cache = model_cache("int-4", probe="warn")
    cache.update(k, v, 0)
    with pytest.warns(PackedKVWarning, match="int-4 breaks"):
        cache.update(k[:, :, :1], v[:, :, :1], 0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 66_000.0])
@pytest.mark.parametrize("max_len", [None, 256])
def test_a_prefill_that_no_codec_holds_is_taken_back(
    value: float, max_len: int | None, machine: dict[str, Any], waiting: None
) -> None:
    (k, v), cache = rows(100), model_cache("saw-int4", max_len=max_len)
    wrong = v.clone()
    wrong[0, 1, 70, 9] = value
    for layer in range(LAYERS - 1):
        cache.update(k, wrong if layer == 1 else v, layer)
    with pytest.raises(ValueError, match="layer 1: a key or value of the prefill is not finite or above 65504"):
        cache.update(k, v, LAYERS - 1)
    assert not any(layer.filled for layer in cache.packed_layers)
    assert cache.probe.found == {}
    for layer in range(LAYERS):
        cache.update(k, v, layer)
    good = model_cache("saw-int4", max_len=max_len)
    for layer in range(LAYERS):
        good.update(k, v, layer)
    for one, other in zip(cache.layer_caches, good.layer_caches, strict=True):
        for a, b in zip(one.decode(), other.decode(), strict=True):
            assert torch.equal(a, b)
    assert cache.report()["keys"].keys() == good.report()["keys"].keys()


def contents(cache: Any) -> list[Any]:
    held = []
    for layer in cache.packed_layers:
        held += [len(layer.cache), layer.get_seq_length(), layer.cache.nbytes(), layer.cache.seq_lens.tolist()]
        held += [x.clone() for x in layer.cache.decode()]
    return held


def alike(one: list[Any], other: list[Any]) -> bool:
    same = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))
    return all(same)


def turn(cache: Any, tokens: int, seed: int = 0, wrong: tuple[int, float] = (-1, 0.0), last: int = LAYERS) -> None:
    """Give several tokens to the first layers; of one of them, with a number that no codec holds."""
    k, v = rows(tokens, seed)
    bad = k.clone()
    bad[0, 1, tokens // 2, 9] = wrong[1]
    for layer in range(last):
        cache.update(bad if layer == wrong[0] else k, v, layer)


@pytest.mark.parametrize("max_len", [None, 512])
@pytest.mark.parametrize("spec", ["int-4", "octopus-3", "kivi-2:sink=4"])
def test_what_waits_for_a_passes_end_holds_no_tokens(
    spec: str, max_len: int | None, idle: None, at_once: None, waiting: None
) -> None:
    """A prefill would have every layer's keys and values in memory."""
    cache = model_cache(spec, max_len=max_len, probe=False)
    k, v = (x.clone() for x in rows(300))  # with memory of their own
    for layer in range(LAYERS - 1):
        cache.update(k, v, layer)
    noted = [note for layer in cache.layers for note in layer.deferred.checks.values()]
    assert len(noted) >= LAYERS - 1
    for note in noted:
        for x in (*note.largest, *note.dense):
            assert x.untyped_storage().data_ptr() not in {y.untyped_storage().data_ptr() for y in (k, v)}


@pytest.mark.parametrize("value", [float("nan"), 70_000.0])
@pytest.mark.parametrize(("spec", "place"), [("octopus-3", -1), ("saw-int4:sink=4", 0)])
def test_a_fixed_cache_refuses_what_it_would_hold_dense(
    spec: str, place: int, value: float, machine: dict[str, Any], waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel looks at these tokens, and the buffers in which they lie have empty places."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    cache, (k, v) = model_cache(spec, max_len=256), rows(90)
    bad = k.clone()
    bad[0, 1, place, 9] = value
    for layer in range(LAYERS - 1):
        cache.update(bad if layer == 1 else k, v, layer)
    with pytest.raises(ValueError, match=r"layer 1: a key or value of the prefill .* The cache is empty again"):
        cache.update(k, v, LAYERS - 1)
    turn(cache, 90)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 70_000.0])
@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-4", "octopus-3", "kivi-2", "innerq-base"])
def test_a_later_turn_that_no_codec_holds_is_taken_back(
    spec: str, value: float, machine: dict[str, Any], waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    cache, good = model_cache(spec), model_cache(spec)
    for one in (cache, good):
        turn(one, 100)
    before = contents(cache)
    turn(cache, 150, 1, (2, value), last=2)
    with Counted() as counted:
        k, v = rows(150, 1)
        k[0, 1, 75, 9] = value
        cache.update(k, v, 2)
    assert not [name for name in LOOKS if counted.seen[name]]
    cache.update(*rows(150, 1), 3)
    with pytest.raises(ValueError, match=r"layer 2: a key or value of the call .* as it was before the call"):
        cache.update(*rows(150, 1), 4)
    assert alike(contents(cache), before)
    for one in (cache, good):
        turn(one, 70, 2)
        for layer in range(LAYERS):
            one.update(*rows(1, 3), layer)
    assert alike(contents(cache), contents(good))


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
def test_a_pass_that_stopped_in_its_middle_is_looked_at_first(act: Any, machine: dict[str, Any], waiting: None) -> None:
    cache = model_cache("saw-int4")
    turn(cache, 100)
    before = contents(cache)
    turn(cache, 40, 1, (1, float("nan")), last=3)
    with pytest.raises(ValueError, match="layer 1: a key or value of the call"):
        act(cache)
    assert alike(contents(cache), before)
    act(cache)
    turn(cache := model_cache("saw-int4"), 100)
    turn(cache, 40, 1, (1, float("nan")), last=3)
    cache.reset()
    turn(cache, 100)
    turn(cache := model_cache("saw-int4"), 100)
    turn(cache, 40, 1, last=3)  # nothing is wrong with these
    act(cache)


@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3:window=20", "kivi-2:sink=4", "innerq-base"])
def test_tokens_that_fill_a_cache_wait_for_the_passs_end(
    spec: str, machine: dict[str, Any], waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are the same bytes as without."""
    monkeypatch.setattr(OutlierProbe, "_warn_or_refuse", lambda *_: None)
    cache, (k, v) = model_cache(spec), rows(150)
    with Counted() as counted:
        for layer in range(LAYERS - 1):
            cache.update(k, v, layer)
    assert not machine
    assert counted.seen.total() <= 2  # the flags of all layers
    assert [layer.has_deferred for layer in cache.packed_layers] == [True] * (LAYERS - 1) + [False]
    cache.update(*rows(150), LAYERS - 1)
    assert not any(layer.has_deferred for layer in cache.packed_layers)
    with monkeypatch.context() as patch:
        patch.setattr(deferred, "DEFERRED_BYTES", 0)
        turn(other := model_cache(spec), 150, last=LAYERS - 1)
        assert [len(layer._cache) for layer in other.packed_layers] == [150] * (LAYERS - 1) + [0]
        other.update(*rows(150), LAYERS - 1)
    assert alike(contents(cache), contents(other))
    assert cache.report()["keys"] == other.report()["keys"] != {}


@pytest.mark.parametrize(
    "look",
    [
        lambda cache: cache.layers[1].get_seq_length() == 90,
        lambda cache: len(cache.layers[1].cache) == 90,
        lambda cache: cache.layers[1].batch_size == 1,
        lambda cache: cache.report()["layers"][1]["tokens"] == 90,
    ],
)
def test_who_looks_at_tokens_that_wait_sees_them(look: Any, machine: dict[str, Any], waiting: None) -> None:
    cache = model_cache("saw-int4")
    turn(cache, 90, last=3)
    assert look(cache)
    for layer in (3, 4):
        cache.update(*rows(90), layer)
    turn(other := model_cache("saw-int4"), 90)
    assert alike(contents(cache), contents(other))


def test_tokens_that_wait_take_a_bounded_number_of_bytes(
    idle: None, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = rows(90)
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 2 * (k.nbytes + v.nbytes))
    cache = model_cache("saw-int4", probe=False)
    waits = []
    for layer in range(LAYERS):
        cache.update(k, v, layer)
        waits.append(sum(one.has_deferred for one in cache.packed_layers))
    assert waits == [1, 2, 0, 1, 0]


def test_tokens_that_wait_are_dropped_with_their_cache(machine: dict[str, Any], waiting: None) -> None:
    cache = model_cache("saw-int4")
    turn(cache, 90, last=3)
    cache.reset()
    assert not cache.packed_layers[0].deferred.appends
    assert len(cache.layers[1].cache) == 0
    turn(cache, 60, 1)
    turn(other := model_cache("saw-int4"), 60, 1)
    assert alike(contents(cache), contents(other))


@pytest.mark.parametrize(("half", "held"), [("begin_append", 0), ("end_append", 2)])
def test_layers_behind_one_that_fails_are_empty(
    half: str, held: int, machine: dict[str, Any], waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, append = model_cache("saw-int4"), getattr(FusedLayerCache, half)
    with monkeypatch.context() as patch:

        def fail(own: FusedLayerCache, *given: Any, **more: Any) -> Any:
            if own.layer == 2:
                raise MemoryError
            return append(own, *given, **more)

        patch.setattr(FusedLayerCache, half, fail)
        with pytest.raises(MemoryError):
            turn(cache, 90)
    assert [len(layer.cache) for layer in cache.packed_layers] == [90] * held + [0] * (LAYERS - held)
    assert [layer.filled for layer in cache.packed_layers] == [True] * held + [False] * (LAYERS - held)
    cache.reset()
    turn(cache, 90)
    turn(other := model_cache("saw-int4"), 90)
    assert alike(contents(cache), contents(other))


def test_what_a_decode_step_could_not_hold_is_told_by_the_next_turn(machine: dict[str, Any], waiting: None) -> None:
    cache = model_cache("saw-int4")
    turn(cache, 100)
    for layer in range(LAYERS):
        k, v = rows(1)
        cache.update(k * (float("nan") if layer == 3 else 1.0), v, layer)
    for _turn in range(2):
        with pytest.raises(ValueError, match="layer 3: a key or value appended in a decode step"):
            turn(cache, 40, 1)
        assert [len(layer.cache) for layer in cache.packed_layers] == [101] * LAYERS
    cache.reset()
    turn(cache, 100)


@pytest.mark.parametrize("fresh", [40, 200])
def test_a_windows_tokens_come_back(fresh: int, machine: dict[str, Any], waiting: None) -> None:
    """Of a layer that attended already, and dropped what no later query sees."""
    noted, scheme = deferred.Deferred(2), packedkv.get("saw-int4")
    window = layers.PackedCacheLayer(
        FusedLayerCache(scheme, layer=0), 0, "fused", "exact", noted, window=96, kind="sliding_attention"
    )
    full = layers.PackedCacheLayer(FusedLayerCache(scheme, layer=1), 1, "fused", "exact", noted)
    for layer in (window, full):
        layer.update(*rows(150))
    before = [window.get_seq_length(), window.cache.start, *window.cache.decode(), window.cache.nbytes()]
    k, v = rows(fresh, 1)
    window.update(k, v)
    window.attended("staged", lambda: 0)
    with pytest.raises(ValueError, match="layer 1"):
        full.update(k, v * float("inf"))
    now = [window.get_seq_length(), window.cache.start, *window.cache.decode(), window.cache.nbytes()]
    assert alike(now, before)
    assert len(full.cache) == 150


@pytest.mark.gpu
@pytest.mark.parametrize("spec", PROMPT)
def test_nothing_waits_for_the_gpu_in_a_prefills_middle(spec: str) -> None:
    k, v = (x.cuda() for x in rows(700))
    config = tiny_config("llama-gqa", head_dim=DIM, num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    for turn in range(2):
        cache = cache_for(config, spec, attention="fused")
        with unsynchronised() if turn else nullcontext():
            for layer in range(LAYERS - 1):
                cache.update(k, v, layer)
        cache.update(k, v, LAYERS - 1)
    packed = [c for c in cache.layer_caches if not isinstance(c.roles["key"].codec, Dense)]
    assert len(cache.report()["keys"]) == len(packed)
