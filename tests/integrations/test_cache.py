"""What the cache does by itself: crop, select, windows, accounting, memory, saving."""

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import packedkv
from packedkv.errors import FormatError, ShapeError, SpecError, UnsupportedError
from packedkv.integrations.transformers import KVCache, cache_for, layers, load_cache, restore_attention
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention import ATTENTION_NAME
from tests.cli.tiny import tiny_llama
from tests.conftest import tiny_config, tiny_model
from tests.integrations.test_generate import assert_same, prompt, run
from tests.kernels.decode_cases import each_in_turn

BLOCKED = "kivi-2:window=4"


def filled(model: Any, cache: Any, batch: int = 2, tokens: int = 45) -> Any:
    with torch.no_grad():
        model(prompt(batch, tokens), **passing(model, cache))
    return cache


def step_logits(model: Any, cache: Any, batch: int) -> Tensor:
    with torch.no_grad():
        return model(prompt(batch, 7, seed=9), **passing(model, cache)).logits


def assert_same_step(model: Any, ours: Any, theirs: Any, batch: int) -> None:
    a, b = step_logits(model, ours, batch), step_logits(model, theirs, batch)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("amount", "left"), [(-1, 299), (-250, 50), (-300, 0), (-400, 0), (30, 30), (400, 300), (0, 300)]
)
def test_crop_takes_tokens_to_remove_or_to_keep(tiny: Any, amount: int, left: int) -> None:
    model = tiny("llama-gqa")
    cache = filled(model, _cache(model, "saw-int4"), 2, 300)
    before = [c.nbytes()["key.codes"] for c in cache.layer_caches]
    pages = [c.store.pages.shape[0] for c in cache.layer_caches]
    cache.crop(amount)
    assert [len(c) for c in cache.layer_caches] == [left] * 2
    assert cache.get_seq_length() == left
    assert [c.nbytes()["key.codes"] for c in cache.layer_caches] == [b * left // 300 for b in before]
    assert left >= 250 or all(c.store.pages.shape[0] < p for c, p in zip(cache.layer_caches, pages, strict=True))


def test_select_takes_numbers_or_a_boolean_mask(tiny: Any) -> None:
    model = tiny("llama-gqa")
    ours, theirs = (filled(model, _cache(model, "saw-int4"), 3) for _ in range(2))
    ours.batch_select_indices(torch.tensor([True, False, True]))
    theirs.batch_select_indices(torch.tensor([0, 2]))
    assert torch.equal(step_logits(model, ours, 2), step_logits(model, theirs, 2))


def test_a_cache_that_was_reset_is_empty_and_takes_another_batch(tiny: Any) -> None:
    model = tiny("gemma3")
    cache = filled(model, _cache(model, BLOCKED))
    cache.reset()
    assert (cache.get_seq_length(), cache.report()["total_bytes"]) == (0, 0)
    assert filled(model, cache, 3, 11).report()["batch"] == 3


# -- sliding windows ------------------------------------------------------------


@pytest.mark.parametrize("spec", ["saw-int4:window=4,sink=4", "kivi-2:window=4,sink=4"])
def test_sliding_layers_hold_their_window_and_no_sink(tiny: Any, spec: str) -> None:
    """Every sliding layer is packed; neither its window nor the scheme's dense window shrinks or grows over steps."""
    model = tiny("gemma3")
    cache = filled(model, _cache(model, spec, attention="decoded"), 1, 100)
    most = model.config.sliding_window - 1
    for layer, kind in zip(cache.report()["layers"], model.config.layer_types, strict=True):
        sliding = kind == "sliding_attention"
        assert layer["tokens"] == (most if sliding else 100)
        assert layer["bytes"]["value.codes"]
        assert ("sliding" in layer["note"]) == sliding
    assert cache.is_sliding == [True, False, True]
    assert [c.roles["key"].sink.shape[2] for c in cache.layer_caches] == [0, 4, 0]
    for _ in range(80):
        with torch.no_grad():
            model(prompt(1, 1), **passing(model, cache))
        slide, full, _ = cache.layer_caches
        assert len(slide) == most
        widths = [s.window.shape[2] for s in full.roles.values()]
        assert 4 <= widths[0] < 4 + packedkv.get(spec).key.block_tokens
        assert widths[1] == 4
    assert slide.store.pages.shape[0] <= 2  # dead pages are freed


def test_sliding_crop_brings_recorded_tokens_back_and_is_refused_without(tiny: Any) -> None:
    model = tiny("mistral")
    cache = filled(model, _cache(model, "saw-int4"), 1, 30)
    with pytest.raises(RuntimeError, match=r"layer 0: crop by 2 tokens .*activate_past_recording"):
        cache.crop(-2)
    cache.activate_past_recording()
    filled(model, cache, 1, 6)
    cache.crop(-4)
    assert [len(c) for c in cache.layer_caches] == [model.config.sliding_window - 1] * 2
    assert cache.get_seq_length() == 32


# -- bytes and memory ------------------------------------------------------------


@pytest.mark.parametrize("attention", ["decoded", "streamed"])
def test_no_16_bit_copy_of_the_history_survives_a_step(tiny: Any, attention: str) -> None:
    model = tiny("llama-gqa")
    model.set_attn_implementation("packedkv" if attention == "streamed" else "sdpa")
    filled(model, _cache(model, "saw-int4", attention=attention), 1, 20)  # constants of the process stay
    gc.collect()
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), Tensor)}
    cache = filled(model, _cache(model, "saw-int4", attention=attention), 1, 500)
    with torch.no_grad():
        model(prompt(1, 1), **passing(model, cache))
    gc.collect()
    new = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and id(x) not in before]
    floats = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in new if x.is_floating_point()}
    one_role = 500 * 2 * 64 * 2
    assert max(floats.values(), default=0) < one_role / 4, "a dense copy of K or V is alive after the step"
    held = [
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in c.tensors()} for c in cache.layer_caches
    ]
    # layers with the same pages share a tensor of their numbers, which counts for each
    assert sum(sum(layer.values()) for layer in held) == cache.report()["total_bytes"]


def test_report_adds_up(tiny: Any) -> None:
    model = tiny("gemma3")
    cache = _cache(model, "saw-int4", attention="decoded")
    assert repr(cache) == "KVCache('saw-int4', 3 layers, empty; prefill='exact', attention='decoded')"
    run(model, cache, prompt(2))
    seen = cache.report()
    assert seen["total_bytes"] == sum(seen["bytes"].values()) == sum(x["total_bytes"] for x in seen["layers"])
    elements = sum(2 * 2 * x["tokens"] * 2 * 256 for x in seen["layers"])
    assert seen["effective_bits"] == pytest.approx(seen["total_bytes"] * 8 / elements)
    assert seen["ratio_to_16bit"] == pytest.approx(16 / seen["effective_bits"])
    assert seen["key_bits"] == seen["value_bits"] == 4 + 32 / 256
    assert (seen["tokens"], seen["batch"], seen["prefill"], seen["attention"]) == (68, 2, "exact", "decoded")
    assert seen["paths"] == {"exact": 3, "decoded": 3 * 23}
    assert seen["workspace_bytes"] > 0
    assert re.search(r"3 layers, 2 x 68 tokens, \d\.\d\d MiB, .* bits, .*x smaller than 16-bit; prefill", repr(cache))


@pytest.mark.parametrize(("name", "note"), [("llama4", "chunked_attention"), ("lfm2", "conv")])
def test_the_report_notes_what_layers_are(tiny: Any, name: str, note: str) -> None:
    report = cache_for(tiny(name), "saw-int4").report()
    assert any(note in layer["note"] for layer in report["layers"] + report["unpacked_layers"])


class LiveBytes(TorchDispatchMode):
    """Follows every tensor that an operation makes; ``peak`` is the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.alive.append(weakref.ref(x))
        self.alive = [ref for ref in self.alive if ref() is not None]
        sizes = {}
        for ref in self.alive:
            if (x := ref()) is not None and x.dtype != torch.int64:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(sizes.values()))
        return out


@pytest.mark.parametrize(
    ("spec", "attention"),
    each_in_turn(
        [*(s for s in packedkv.presets() if "octopus" not in s), "octopus-3", "octopus-2"], ["decoded", "streamed"]
    ),
)
def test_workspace_of_a_step_is_within_the_reported_bound(spec: str, attention: str) -> None:
    config = tiny_config("llama-gqa", num_hidden_layers=3, num_attention_heads=8)
    config._attn_implementation = "packedkv"
    cache = cache_for(config, spec, attention=attention, probe=False)
    k, v = torch.randn(2, 1, 2, 2600, 64, dtype=torch.bfloat16)
    from packedkv.integrations.transformers.attention import packedkv_attention

    cache.update(k, v, 1)
    q = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
    with torch.no_grad(), LiveBytes() as live:
        keys, values = cache.update(k[:, :, :1], v[:, :, :1], 1)
        if attention == "streamed":
            packedkv_attention(torch.nn.Module(), q, keys, values, None)
    bound = cache.report()["workspace_bytes"]
    assert live.peak <= bound
    if attention == "streamed":  # bounded by the chunk, not by the length
        assert bound <= (2 * 4 * 1024 * 64 * 4) * 2 * layers.DECODE_COPIES
    else:
        assert bound <= 2 * 2 * 2601 * 64 * 2 + 2 * 1024 * 64 * 4 * layers.DECODE_COPIES


def test_nan_in_a_long_prefill_leaves_the_cache_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "APPEND_TOKENS", 50)
    cache = cache_for(tiny_config("llama-gqa"), "saw-int4")
    k = torch.randn(1, 2, 130, 64)
    k[0, 1, 120, 3] = torch.nan
    with pytest.raises(ValueError, match=r"keys\[batch=0, head=1, token=120, channel=3\] = nan"):
        cache.update(k, k, 0)
    assert len(cache.layer_caches[0]) == 0


def test_keys_and_values_of_different_width() -> None:
    cache = cache_for(tiny_config("llama-gqa"), "saw-int4", prefill="decoded")
    keys, values = cache.update(torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 32), 0)
    assert (keys.shape[-1], values.shape[-1]) == (64, 32)


# -- saving ------------------------------------------------------------


def test_a_saved_cache_is_loaded_with_another_attention(tiny: Any, tmp_path: Path) -> None:
    model, path = tiny("llama-gqa"), tmp_path / "chat.safetensors"
    filled(model, _cache(model, "saw-int4"), 1).save(path)
    with pytest.raises(SpecError, match=r"attention='steamed': expected one of decoded, streamed\. Did you mean"):
        load_cache(path, model, attention="steamed")
    with pytest.raises(UnsupportedError, match="not loaded into the fused path; use 'streamed' or 'decoded'"):
        load_cache(path, model, attention="fused")
    try:
        loaded = {way: load_cache(path, model, attention=way) for way in ("decoded", "streamed")}
        assert {way: cache.options["attention"] for way, cache in loaded.items()} == {w: w for w in loaded}
        ids = torch.cat([prompt(1), prompt(1, 8, seed=3)], 1)
        assert_same(*(run(model, cache, ids) for cache in loaded.values()))
    finally:
        restore_attention(model)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_borrow_are_no_part_of_a_saved_cache(tiny: Any, tmp_path: Path, name: str) -> None:
    """Two layers of four hold K and V; whether the others are counted depends on the version of transformers."""
    model = tiny(name)
    cache = filled(model, _cache(model, "saw-int4"), 1)
    cache.save(tmp_path / "chat.safetensors")
    loaded = load_cache(tmp_path / "chat.safetensors", model)
    assert [layer.index for layer in loaded.packed_layers] == [0, 1]
    assert_same_step(model, loaded, cache, 1)


def test_sizes_of_layers_that_differ(tiny: Any) -> None:
    """Gemma 4 states KV heads and head_dim per layer; one number for all would be wrong."""
    cache = filled(tiny("gemma4"), _cache(tiny("gemma4"), "saw-int4"), 1)
    plan = cache.plan
    assert [(layer.heads, layer.head_dim) for layer in plan.kv_layers] == [(2, 64), (1, 128)]
    assert (plan.heads, plan.head_dim, cache.report()["key_bits"]) == (None, None, None)
    with pytest.raises(ShapeError, match=r"layer 1: .*head_dim=100 is not"):
        cache_for(tiny_config("gemma4", global_head_dim=100), "octopus-3")


def test_saved_cache_of_another_model_is_refused(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    filled(tiny("llama-gqa"), _cache(tiny("llama-gqa"), "saw-int4")).save(path)
    for changed, text in (
        ({"num_hidden_layers": 3}, "the file holds 2 layers, LlamaConfig caches 3"),
        ({"num_key_value_heads": 4}, "layer 0 of the file has 2 KV heads, LlamaConfig has 4"),
        ({"head_dim": 128}, "layer 0 of the file has 64 head_dim, LlamaConfig has 128"),
    ):
        with pytest.raises(FormatError, match=text):
            load_cache(path, tiny_config("llama-gqa", **changed))
    with pytest.raises(FormatError, match="its layer types differ"):
        load_cache(path, tiny_config("mistral"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FormatError):
        load_cache(path, tiny("llama-gqa"))


def _cache(model: Any, spec: str, **options: Any) -> KVCache:
    return cache_for(model, spec, probe=False, **options)


@pytest.mark.parametrize("mean", ["pre", "post"])
def test_a_loaded_cache_with_age_tiers_is_reset(tmp_path: Path, mean: str) -> None:
    model, ids = tiny_model("llama-gqa"), prompt(1, 200)
    cache = cache_for(model, f"saw-int4:window=24,recent=int-8,mean={mean}", probe="off")
    with torch.no_grad():
        expected = model(ids, **passing(model, cache)).logits
        cache.save(tmp_path / "cache.safetensors")
        loaded = load_cache(tmp_path / "cache.safetensors", model)
        loaded.reset()
        assert torch.equal(model(ids, **passing(model, loaded)).logits, expected)
    assert all(map(torch.equal, loaded.layer_caches[0].decode(), cache.layer_caches[0].decode()))


# -- eviction and quantization together --------------------------------------------------------------------------------

TOKENS, KEPT, NEW = 96, 48, 20
GUIDE = Path(__file__).parents[2] / "docs/evaluate.md"
SPECS = ("dense", "saw-int4", "q4_0", "kivi-2:group=16,window=16")


class CodedCache(DynamicCache):
    """Holds K and V as they come and hands out what the codec makes of all of them; whole, so by another way."""

    def __init__(self, config, spec):
        super().__init__(config=config)
        self.spec = spec

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return packedkv.compress(self.spec, keys, values, layer=layer_idx).decode()


def kept(layer):
    """Per head the tokens with the shortest keys (Devoto et al., arXiv:2406.11430), oldest first."""
    best = layer.keys.norm(dim=-1).topk(KEPT, largest=False).indices.sort(-1).values[..., None]
    return [x.gather(2, best.expand(-1, -1, -1, x.shape[-1])) for x in (layer.keys, layer.values)]


def decoded_after(model, cache, tokens):
    """Logits of ``tokens``, one by one, at the positions that they have where nothing was evicted."""
    with torch.no_grad():
        places = ((tokens[:, i : i + 1], torch.tensor([[TOKENS + i]])) for i in range(tokens.shape[1]))
        return torch.cat([model(t, **passing(model, cache), position_ids=p).logits for t, p in places], 1)


@pytest.mark.parametrize("attention", ["decoded", "streamed"])
@pytest.mark.parametrize("spec", SPECS)
def test_what_was_kept_is_packed_once_and_decoding_reads_it(spec, attention):
    model = tiny_llama()
    if attention == "streamed":
        model.set_attn_implementation(ATTENTION_NAME)
    generator = torch.Generator().manual_seed(3)
    ids, later = (torch.randint(0, 256, (1, n), generator=generator) for n in (TOKENS, NEW))
    with torch.no_grad():
        full, whole = DynamicCache(config=model.config), cache_for(model, spec, attention=attention)
        model(ids, **passing(model, full))
        model(ids, **passing(model, whole))
    packed, plain = cache_for(model, spec, attention=attention), CodedCache(model.config, spec)
    for i, layer in enumerate(full.layers):
        packed.update(*kept(layer), i)
        plain.update(*kept(layer), i)
    assert packed.report()["tokens"] == KEPT
    assert packed.report()["total_bytes"] < whole.report()["total_bytes"]
    found, expected = decoded_after(model, packed, later), decoded_after(model, plain, later)
    # the two add in another order, which moves a code of a later layer now and then
    assert float((found - expected).norm() / expected.norm()) < 0.01
    far = decoded_after(model, whole, later)
    assert float((far - expected).norm() / expected.norm()) > 0.1, "eviction changed nothing"


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # from transformers 5.24 on
def test_the_guide_shows_these_steps():
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "position_ids" in c]
    model, spec = tiny_llama(), "saw-int4"
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(4))
    names = {"model": model, "prompt_ids": ids}
    exec(code, names)
    packed = names["packed"]
    assert str(packed.scheme) == spec
    assert packed.report()["tokens"] == TOKENS // 2 + 1
    assert names["logits"].shape == (1, 1, 256)
