"""Orders of calls around a model: copies, threads, pickles and modes of PyTorch; masks that change between passes.

Every test compares with the same calls made one after the other by one cache of its own.
"""

import ast
import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import packedkv
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers import attention_hooks, rope, source_check
from packedkv.integrations.transformers.argument import passing
from tests.conftest import tiny_model
from tests.integrations.test_generate import prompt
from tests.kernels.decode_cases import each_in_turn
from tests.test_key_bias import biased

ATTENTIONS = {"decoded": "sdpa", "streamed": "packedkv", "fused": "packedkv"}
SPECS = ("kivi-4", "saw-int4:mean=pre", "int-4:mean=post", "ghost-4")
LONG = 560  # ghost calibrates on its first 516 tokens


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return biased()


@pytest.fixture(params=list(ATTENTIONS))
def attention(request: pytest.FixtureRequest, shared_model: Any) -> Iterator[str]:
    with attention_hooks.implementation(shared_model, ATTENTIONS[request.param]):
        yield request.param


@torch.no_grad()
def logits(model: Any, cache: Any, ids: Tensor, **more: Any) -> Tensor:
    out: Tensor = model(ids, **passing(model, cache), **more).logits
    return out


def new_cache(model: Any, spec: str, attention: str) -> Any:
    return packedkv.cache_for(model, spec, attention=attention, probe="off")


def keys_of(cache: Any) -> list[Tensor]:
    return [layer.decode()[0] for layer in cache.layer_caches]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- copies and pickles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("way", "tokens"), [("deepcopy", 30), ("pickle", LONG), ("deepcopy in inference mode", LONG), ("pickle in it", 30)]
)
def test_a_copy_goes_on_as_the_original(shared_model: Any, attention: str, spec: str, tokens: int, way: str) -> None:
    """A prefix is filled once and copied for several continuations of different lengths."""
    prefix, turns = prompt(1, tokens), [prompt(1, 7, seed=1), prompt(1, 1, seed=2), prompt(1, 1, seed=3)]
    original = new_cache(shared_model, spec, attention)
    logits(shared_model, original, prefix)
    with torch.inference_mode() if " in " in way else contextlib.nullcontext():
        copied = copy.deepcopy(original) if "deepcopy" in way else pickle.loads(pickle.dumps(original))
    logits(shared_model, original, prompt(1, 3, seed=9))  # the original goes elsewhere first
    fresh = new_cache(shared_model, spec, attention)
    logits(shared_model, fresh, prefix)
    del original
    for turn in turns:
        assert torch.equal(logits(shared_model, copied, turn), logits(shared_model, fresh, turn))
    assert same(keys_of(copied), keys_of(fresh))


@pytest.mark.parametrize("spec", packedkv.presets())
def test_caches_of_all_presets_are_copied_and_pickled(shared_model: Any, spec: str) -> None:
    with attention_hooks.implementation(shared_model, "packedkv"):
        cache = packedkv.cache_for(shared_model, spec, probe="off")  # fused where kernels serve it
    attention = cache.options["attention"]
    with attention_hooks.implementation(shared_model, ATTENTIONS[attention]):
        logits(shared_model, cache, prompt(1, 40))
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            step = prompt(1, 1, seed=4)
            twin = copy.deepcopy(cache)
            assert torch.equal(logits(shared_model, copied, step), logits(shared_model, twin, step))
        empty = pickle.loads(pickle.dumps(new_cache(shared_model, spec, attention)))
        logits(shared_model, empty, prompt(1, 40))
        assert same(keys_of(empty), keys_of(cache))


@pytest.mark.parametrize("spec", ["kivi-4", "int-4:mean=post", "ghost-4"])
@pytest.mark.parametrize("name", ["gemma3", "llama-gqa"])
def test_positions_of_another_models_pass_are_not_taken(shared_model: Any, spec: str, name: str) -> None:
    """Its cache is alive, its last pass ran without it, and this model's layers may not tell positions at all."""
    model, ids = tiny_model(name), prompt(1, LONG)
    expected = new_cache(model, spec, "decoded")
    wanted = logits(model, expected, ids)
    other = new_cache(shared_model, "saw-int4:mean=pre", "decoded")
    mask = torch.ones(2, LONG, dtype=torch.long)
    mask[1, :100] = 0
    with torch.no_grad():
        shared_model(prompt(2, LONG), attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    cache = new_cache(model, spec, "decoded")
    assert torch.equal(logits(model, cache, ids), wanted)
    assert same(keys_of(cache), keys_of(expected))
    assert len(other.layer_caches[0]) == 0


@pytest.mark.parametrize("attention", ["packedkv", "eager"])
def test_a_cache_made_while_another_thread_records_is_that_of_the_models_attention(
    shared_model: Any, attention: str
) -> None:
    inside, done = threading.Event(), threading.Event()

    def record() -> None:
        with contextlib.suppress(UnsupportedError), attention_hooks.watched(shared_model, lambda *_: None):
            inside.set()
            done.wait()

    with attention_hooks.implementation(shared_model, attention):
        alone = packedkv.cache_for(shared_model, "kivi-4", probe="off").options["attention"]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(record)
            inside.wait()
            try:
                beside = packedkv.cache_for(shared_model, "kivi-4", probe="off").options["attention"]
            finally:
                done.set()
    assert beside == alone == {"packedkv": "fused", "eager": "decoded"}[attention]


def test_two_models_tell_the_positions_of_their_own_pass(shared_model: Any) -> None:
    """With one tensor of positions; a copied model tells them to caches of the original as well as to its own."""
    ids, places, spec = prompt(1, 40), torch.arange(40)[None], "saw-int4:mean=pre"
    caches = [new_cache(shared_model, spec, "decoded") for _ in range(3)]
    wanted = logits(shared_model, caches[0], ids)
    copied, other = copy.deepcopy(shared_model), biased()
    caches += [new_cache(model, spec, "decoded") for model in (copied, other)]
    for model, cache in zip((shared_model, copied, copied, other), caches[1:], strict=True):
        assert torch.equal(logits(model, cache, ids, position_ids=places), wanted)


def test_a_pickled_cache_of_a_copied_model_outlives_the_original() -> None:
    ids, spec, original = prompt(1, 40), "saw-int4:mean=pre", biased()
    first = new_cache(original, spec, "decoded")
    wanted, copied = logits(original, first, ids), copy.deepcopy(original)
    pickled = pickle.dumps(new_cache(copied, spec, "decoded"))
    del original, first
    gc.collect()
    assert torch.equal(logits(copied, pickle.loads(pickled), ids), wanted)


def test_a_cache_made_while_the_last_one_is_freed_has_a_hook_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has freed the name of the hook's owner, but not yet removed the hook."""
    model, ids, spec = biased(), prompt(1, 40), "saw-int4:mean=pre"
    last = new_cache(model, spec, "decoded")
    wanted = logits(model, last, ids)
    with monkeypatch.context() as freed:
        freed.setattr(rope, "_by_name", weakref.WeakValueDictionary())
        cache = new_cache(model, spec, "decoded")
    del last
    gc.collect()
    assert torch.equal(logits(model, cache, ids), wanted)


def test_caches_leave_a_model_as_they_found_it() -> None:
    """No hook, no attribute and no implementation of attention stays behind; the model can be saved meanwhile too."""
    model = biased()
    state = [dict(vars(module)) for module in model.modules()]
    cache = new_cache(model, "ghost-4", "decoded")
    logits(model, cache, prompt(1, 5))
    torch.save(model, io.BytesIO())
    del cache
    assert state == [dict(vars(module)) for module in model.modules()]
    torch.save(model, io.BytesIO())


def test_a_cache_that_misses_its_model_is_refused() -> None:
    """Positions of another model's pass are never taken for those of this one."""
    shared_model, other = biased(), biased()
    mine, beside = (new_cache(shared_model, "saw-int4:mean=pre", "decoded") for _ in range(2))
    logits(shared_model, beside, prompt(1, 12))
    with pytest.raises(UnsupportedError, match="another model"):
        logits(other, mine, prompt(1, 12))
    assert not mine.get_seq_length()
    assert torch.isfinite(logits(shared_model, mine, prompt(1, 12))).all()


# -- threads -----------------------------------------------------------------------------------------------------------


def run_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that begin at once, each in a thread of its own."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.mark.parametrize("spec", SPECS)
def test_a_pass_within_a_pass_of_another_thread(shared_model: Any, attention: str, spec: str) -> None:
    """Before each layer of one thread's pass another thread runs a whole pass of other length: as one after another."""
    mine, other = prompt(1, 37), [prompt(1, n, seed=n) for n in (20, 1, 3, 1, 2, 1, 1, 4)]
    alone, beside = new_cache(shared_model, spec, attention), new_cache(shared_model, spec, attention)
    expected = [logits(shared_model, alone, ids) for ids in (mine, mine[:, :1], mine[:, :5])]
    cache, left = new_cache(shared_model, spec, attention), list(other)

    def between(module: Any, args: Any) -> None:
        if threading.current_thread() is threading.main_thread() and left:
            run_threads(lambda: logits(shared_model, beside, left.pop(0)))

    handles = [layer.self_attn.register_forward_pre_hook(between) for layer in shared_model.model.layers]
    found = [logits(shared_model, cache, ids) for ids in (mine, mine[:, :1], mine[:, :5])]
    for handle in handles:
        handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = new_cache(shared_model, spec, attention)
    for ids in other[: len(other) - len(left)]:
        logits(shared_model, again, ids)
    assert same(keys_of(beside), keys_of(again))


def test_threads_that_make_the_first_caches_of_a_model() -> None:
    for _ in range(3):
        model = biased()
        made = run_threads(*[lambda model=model: new_cache(model, "ghost-4", "decoded")] * 6)
        assert model.config._attn_implementation == "sdpa"
        energies = [cache.layers[0].cache.site.energy for cache in made]
        assert all(torch.equal(one, energies[0]) for one in energies)
        assert torch.isfinite(logits(model, made[0], prompt(1, 5))).all()


def test_implementations_are_restored_by_the_last_block(shared_model: Any) -> None:
    """Blocks of two threads overlap: the first to begin ends first."""
    packedkv.restore_attention(shared_model)
    for names in (("eager", "packedkv"), ("packedkv", "eager")):
        first, second = (attention_hooks.implementation(shared_model, name) for name in names)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert shared_model.config._attn_implementation == names[1]
        second.__exit__(None, None, None)
        assert shared_model.config._attn_implementation == "sdpa"


def test_a_recording_sees_its_own_thread_only(shared_model: Any) -> None:
    lengths: dict[str, list[int]] = {"one": [], "other": []}

    def record(name: str) -> Callable[..., None]:
        return lambda module, query, *_: lengths[name].append(query.shape[2])

    with attention_hooks.watched(shared_model, record("one")):

        def other() -> None:
            with attention_hooks.watched(shared_model, record("other")):
                logits(shared_model, None, prompt(1, 4))

        run_threads(other)
        logits(shared_model, None, prompt(1, 9))
    layers = len(shared_model.model.layers)
    assert lengths == {"one": [9] * layers, "other": [4] * layers}


def test_threads_that_read_the_source_of_models_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 raises SystemError where two threads parse at once: one of ours parses, and others are survived."""
    parse, inside, most, failures = ast.parse, [0], [0], iter([True] * 3)

    def slow(source: str, *args: Any, **options: Any) -> ast.Module:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        if next(failures, False):
            raise SystemError("AST constructor recursion depth mismatch (before=54, after=46)")
        return parse(source, *args, **options)

    monkeypatch.setattr(ast, "parse", slow)
    source_check._use_in.cache_clear()
    model = biased()
    assert run_threads(*[lambda: source_check.check_use_of_cached(model)] * 8) == [None] * 8
    assert most[0] == 1


def test_threads_look_up_the_first_spec_of_a_process() -> None:
    code = (
        "import threading, packedkv\n"
        "gate, found = threading.Barrier(8), []\n"
        "def look():\n"
        "    gate.wait()\n"
        "    found.append(str(packedkv.get('saw-int4')) + str(len(packedkv.presets())))\n"
        "threads = [threading.Thread(target=look) for _ in range(8)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\n"
        "print(len(found), len(set(found)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "1"], done.stderr


# -- modes of PyTorch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "modes"),
    each_in_turn(
        SPECS,
        [
            (torch.inference_mode, torch.no_grad),
            (torch.no_grad, torch.inference_mode),
            (torch.inference_mode, torch.enable_grad),
        ],
    ),
)
def test_modes_may_change_between_passes(shared_model: Any, attention: str, spec: str, modes: Any) -> None:
    outside, inside = modes
    turns = [prompt(2, LONG), prompt(2, 1, seed=1), prompt(2, 5, seed=2), prompt(2, 1, seed=3)]

    def run(first: Any, others: Any) -> list[Tensor]:
        cache = new_cache(shared_model, spec, attention)
        found = []
        for i, ids in enumerate(turns):
            with (first if i % 2 == 0 else others)():
                found.append(shared_model(ids, **passing(shared_model, cache)).logits.detach())
                cache.reorder_cache(torch.tensor([1, 0]))
                cache.crop(-2 if i == 2 else 0)
        return found

    assert same(run(outside, inside), run(torch.no_grad, torch.no_grad))


# -- masks and positions -----------------------------------------------------------------------------------------------


def rows(model: Any, cache: Any, turns: list[Tensor], masks: list[Tensor], held: Tensor | None = None) -> list[Tensor]:
    """Logits of passes over a batch whose mask grows by these parts, with the positions that ``generate`` gives.

    ``held``: the mask of what the cache holds already.
    """
    found, seen = [], torch.zeros(turns[0].shape[0], 0, dtype=torch.long) if held is None else held
    for ids, mask in zip(turns, masks, strict=True):
        seen = torch.cat([seen, mask], 1)
        places = (seen.cumsum(1) - 1).masked_fill(seen == 0, 0)[:, -ids.shape[1] :]
        found.append(logits(model, cache, ids, attention_mask=seen, position_ids=places)[mask.bool()])
    return found


TOLERANCE = 0.06
"""Of logits and keys, in standard deviations: large biases cost 0.03 even in 16 bit. A hidden token costs 0.2."""


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).std() / b.std())


def same_rows(model: Any, cache: Any, plain: Any, *rest: Any) -> None:
    for a, b in zip(rows(model, cache, *rest), rows(model, plain, *rest), strict=True):
        assert off(a, b) < TOLERANCE


ONES = torch.ones(2, 1, dtype=torch.long)


def left_padded(n: int, padding: int) -> Tensor:
    """Mask ``[2, n]``: the second row has so much padding at its left."""
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, :padding] = 0
    return mask


@pytest.mark.parametrize("second", [left_padded(6, 3), left_padded(6, 6), left_padded(1, 1)], ids=["3", "6", "1 of 1"])
@pytest.mark.parametrize("spec", ["dense", "int-8:mean=post", "int-8:mean=pre", "ghost-4"])
def test_padding_in_the_middle(shared_model: Any, attention: str, spec: str, second: Tensor) -> None:
    """A later turn of a padded batch: no hidden token is attended, or the pass is refused and padding is the reason."""
    masks = [left_padded(9, 4), second, ONES, ONES, left_padded(5, 2), ONES]
    turns, cache = (
        [prompt(2, mask.shape[1], seed=i) for i, mask in enumerate(masks)],
        new_cache(shared_model, spec, attention),
    )
    if attention == "fused" and spec in ("int-8:mean=pre", "ghost-4"):
        with pytest.raises(UnsupportedError, match="padding in the middle"):
            rows(shared_model, cache, turns, masks)
        return
    same_rows(shared_model, cache, transformers.DynamicCache(), turns, masks)


@pytest.mark.parametrize(
    ("spec", "way"),
    each_in_turn(["dense", "int-8:mean=post", "int-8:mean=pre", "ghost-4"], [(13, 1), (13, 3), (2, 1), (2, 3)]),
)
def test_chunks_of_padding(shared_model: Any, attention: str, spec: str, way: tuple[int, int]) -> None:
    """A prompt in chunks, of which a row's first ones hold padding only; the tokens are placed as in one pass."""
    padding, chunk = way
    whole, ids = left_padded(22, padding), prompt(2, 22)
    masks = list(whole.split(chunk, 1))
    cache = new_cache(shared_model, spec, attention)
    rows(shared_model, cache, list(ids.split(chunk, 1)), masks)
    expected = transformers.DynamicCache()
    rows(shared_model, expected, [ids], [whole])
    turns, more = [ids, prompt(2, 1, seed=5), prompt(2, 4, seed=6)], [whole, ONES, ONES.expand(2, 4)]
    same_rows(shared_model, new_cache(shared_model, spec, attention), transformers.DynamicCache(), turns, more)
    for layer, other in zip(cache.layer_caches, expected.layers, strict=True):
        tokens = whole[1].bool()
        assert off(layer.decode()[0][1][:, tokens], other.keys[1][:, tokens]) < TOLERANCE


@pytest.mark.parametrize("spec", ["dense", "int-8:mean=post", "int-8:mean=pre"])
def test_a_crop_into_padding(shared_model: Any, attention: str, spec: str) -> None:
    masks = [left_padded(20, 14), ONES.expand(2, 6), ONES, ONES]
    turns = [prompt(2, mask.shape[1], seed=i) for i, mask in enumerate(masks)]
    cache, plain = new_cache(shared_model, spec, attention), transformers.DynamicCache()
    rows(shared_model, cache, turns[:1], masks[:1])
    rows(shared_model, plain, turns[:1], masks[:1])
    for keep, later in ((9, 1), (6, 2)):  # several tokens follow, or one
        for held in (cache, plain):
            held.crop(keep - held.get_seq_length())
        same_rows(shared_model, cache, plain, turns[later:], masks[later:], masks[0][:, :keep])
