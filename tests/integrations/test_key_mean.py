"""Keys encoded without their mean: ``mean=pre``, ``post``, and what ``auto`` makes of a model."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import packedkv
from packedkv.codec import roundtrip
from packedkv.codecs.rope_pairs import RopePairs
from packedkv.errors import FitError, FormatError, PackedKVWarning, UnsupportedError
from packedkv.fitting.fit import fit_model
from packedkv.integrations.transformers import attention_hooks
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.biases import biases_of
from packedkv.integrations.transformers.plan import plan_for
from packedkv.integrations.transformers.queries import SKIPPED, TOKENS, query_energies
from packedkv.integrations.transformers.rope import record_positions
from packedkv.integrations.vllm.options import read_options
from packedkv.integrations.vllm.weights import decided
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import library
from packedkv.scheme import mix_of
from tests.cli.tiny import TEXT, tiny_loaded
from tests.conftest import tiny_model
from tests.integrations.test_generate import prompt
from tests.integrations.test_serving import refusal
from tests.test_key_bias import DYNAMIC, biased

SPEC, RAW = "saw-int4:mean=pre", "saw-int4:mean=none"


@pytest.fixture(scope="module")
def model() -> Any:
    return biased()


def own_keys(model: Any, ids: Tensor, **more: Any) -> list[Tensor]:
    """Keys of the uncompressed model by layer, ``[B, H, n, D]``."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids, **passing(model, cache), **more)
    return [layer.keys for layer in cache.layers]


def run(model: Any, cache: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **passing(model, cache), **more).logits


# -- the definition, over all operations of a cache --------------------------------------------------------------------


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("rope", [PLAIN, YARN, LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("spec", [SPEC, "saw-int4:mean=post", "rope-pairs-4:mean=pre"])
def test_decoded_keys_are_those_of_the_definition(rope: Any, spec: str) -> None:
    """Keys less R_t mu from the frequencies in float64, mu from what the projections give."""
    made = biased(rope_parameters=rope)
    embedding = made.model.rotary_emb
    ids, n = prompt(1, 150), 150
    cache = packedkv.cache_for(made, spec)
    run(made, cache, ids)
    own = own_keys(made, ids)[0].half().double()
    angle = torch.arange(n).double()[:, None] * embedding.inv_freq.double()
    cos, sin = (x * embedding.attention_scaling for x in (angle.cos(), angle.sin()))
    layer = cache.layer_caches[0]
    a, b = layer.mean.double()[:, :, None].chunk(2, -1)
    removed = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    if "post" in spec:
        removed = own[:, :, :128].mean(2, keepdim=True)
    state = layer.roles["key"]
    wanted = roundtrip(state.codec, (own - removed).float(), state.params).double() + removed
    off = (layer.decode()[0].double() - wanted).abs() > 1e-2
    assert off.double().mean() < 2e-3
    assert embedding.attention_scaling != 1 or rope is not YARN
    if "pre" in spec:
        bias = made.model.layers[0].self_attn.k_proj.bias.detach().view(1, -1, 64)
        torch.testing.assert_close(layer.mean, bias, atol=1e-3, rtol=1e-4)


def test_dense_tokens_keep_their_mean(model: Any) -> None:
    ids, windowed = prompt(1, 40), packedkv.cache_for(model, "kivi-4:mean=pre,window=8,sink=4", prefill="decoded")
    run(model, windowed, ids)
    got, own = windowed.layer_caches[0].decode()[0], own_keys(model, ids)[0]
    assert torch.equal(got[:, :, :4], own[:, :, :4].half().float())
    assert torch.equal(got[:, :, 36:], own[:, :, 36:].half().float())
    assert 0 < (got[:, :, 4:36] - own[:, :, 4:36]).abs().amax() < 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_the_mean_that_a_refusal_names_holds(model: Any) -> None:
    ids = prompt(1, 60)
    wanted = run(model, None, ids)
    errors = [
        float((run(model, packedkv.cache_for(model, spec, prefill="decoded", probe="off"), ids) - wanted).norm())
        for spec in (SPEC, RAW)
    ]
    assert errors[0] < 0.4 * errors[1]


def test_what_has_no_mean_or_cannot_add_it_is_refused(model: Any) -> None:
    x = torch.randn(1, 2, 8, 64)
    for made in (lambda: packedkv.compress(SPEC, x, x), lambda: packedkv.fake_quant("saw-int4:mean=post", x, x),
                 lambda: packedkv.LayerCache(packedkv.get(SPEC))):  # fmt: skip
        with pytest.raises(FitError, match=r"mean=p.* cache_for\(model, \.\.\.\)"):
            made()
    assert packedkv.compress("saw-int4", x, x).nbytes == packedkv.compress(RAW, x, x).nbytes
    with pytest.raises(FitError, match="pass the model itself"):
        packedkv.cache_for(model.config, SPEC)


def test_rope_that_changes_with_the_length_is_refused() -> None:
    made = biased(rope_parameters=DYNAMIC)
    with pytest.raises(UnsupportedError, match="rope_type 'dynamic' change with the length"):
        packedkv.cache_for(made, SPEC)


def test_positions_that_are_not_consecutive_are_refused_and_nothing_is_lost(model: Any) -> None:
    ids = prompt(1, 20)
    cache = packedkv.cache_for(model, SPEC)
    run(model, cache, ids)
    before = cache.layer_caches[0].decode()[0]
    with pytest.raises(UnsupportedError, match="not consecutive"):
        run(model, cache, ids[:, :3], position_ids=torch.tensor([[20, 22, 23]]))
    assert torch.equal(cache.layer_caches[0].decode()[0], before)


def test_a_model_that_turns_keys_otherwise_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    cache = packedkv.cache_for(model, SPEC)
    turn = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, -k, cos, sin))
    keys = torch.stack([x[0] for x in own_keys(model, prompt(1, 9))])[:1]
    record_positions(torch.arange(9)[None], cache.layers[0].hook.name)
    with pytest.raises(UnsupportedError, match="rotates its keys in another way"):
        cache.layers[0].update(keys, keys)


@pytest.mark.parametrize("change", ["other pairs", "none"])
def test_a_function_that_turns_other_pairs_is_refused(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    turn = modeling_qwen2.apply_rotary_pos_emb
    if change == "none":
        monkeypatch.delattr(modeling_qwen2, "apply_rotary_pos_emb")
    else:
        monkeypatch.setattr(
            modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, k.roll(1, -1), cos, sin)
        )
    made = biased()
    with pytest.raises(UnsupportedError, match="this model rotates its keys in another way"):
        packedkv.cache_for(made, SPEC)
    assert packedkv.cache_for(made, "saw-int4").layer_caches[0].scheme.mean == "post"


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_is_pre_where_biases_break_the_preset(model: Any) -> None:
    ids = prompt(1, 40)
    auto, pre = (packedkv.cache_for(model, spec, attention="decoded") for spec in ("saw-int4", SPEC))
    for cache in (auto, pre):
        run(model, cache, ids)
    for a, b in zip(auto.layer_caches, pre.layer_caches, strict=True):
        assert torch.equal(a.decode()[0], b.decode()[0])
    report = auto.report()
    assert (report["spec"], report["mean"]) == ("saw-int4", "pre")
    assert [(layer["mean"], layer["mean_from"]) for layer in report["layers"]] == [("pre", "weights")] * 2
    assert packedkv.cache_for(model.config, "saw-int4").report()["mean"] == "none"


def test_auto_changes_nothing_on_a_model_without_biases(tmp_path: Any) -> None:
    made, ids = tiny_model("llama-gqa"), prompt(2, 150)
    caches = [packedkv.cache_for(made, spec, probe="off") for spec in ("saw-int4", RAW)]
    for cache in caches:
        run(made, cache, ids)
    for a, b in zip(*(cache.layer_caches for cache in caches), strict=True):
        assert torch.equal(a.store.pages, b.store.pages)
        assert a.scheme == b.scheme
    reports = [cache.report() for cache in caches]
    assert [report.pop("spec") for report in reports] == ["saw-int4", RAW]
    assert reports[0] == reports[1]
    assert "mean" not in caches[0].scheme.to_json()  # older versions read its file


@pytest.mark.parametrize(
    ("spec", "mean"),
    [("saw-int4", "pre"), ("saw-int4:mean=post", "post"), ("turboquant-4", "pre"), ("int-4:mean=pre", "pre"),
     ("ghost-3", "pre"), ("ghost-4:mean=none", "none")],
)  # fmt: skip
def test_cpu_kernels_serve_it(model: Any, spec: str, mean: str) -> None:
    """By default where the model attends with packedkv: the report names them, and they agree with the reference."""
    sources.compile_missing()
    caches, logits = [], []
    with attention_hooks.implementation(model, "packedkv"):
        for attention in (None, "streamed"):
            cache = packedkv.cache_for(model, spec, attention=attention)  # type: ignore[arg-type]
            turns = [prompt(2, n, seed=n) for n in (300, 1, 1, 4, 1)]
            logits.append(torch.cat([run(model, cache, ids)[:, -1:] for ids in turns], 1))
            caches.append(cache)
            assert {layer["mean"] for layer in cache.report()["layers"]} == {mean}
    report = caches[0].report()
    assert (report["attention"], report["unfused"]) == ("fused", "")
    assert {layer["kernels"]["decode"] for layer in report["layers"]} == {f"cpu {library.variant()}"}
    assert report["paths"]["fused"]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-3 * float(logits[1].std()))
    first = [cache.layer_caches[0].decode() for cache in caches]  # later layers differ by roundings
    assert all(torch.equal(a, b) for a, b in zip(*first, strict=True))


def test_each_layer_is_decided_by_its_biases_and_its_scheme(model: Any) -> None:
    mix = mix_of([packedkv.get("kivi-4"), packedkv.get("saw-int4")])
    for made, spec in ((model, mix), (biased(layers=(1,)), SPEC)):
        cache = packedkv.cache_for(made, spec)
        run(made, cache, prompt(1, 40))
        assert [layer["mean"] for layer in cache.report()["layers"]] == ["none", "pre"]


def test_a_server_takes_every_mean_but_of_groups() -> None:
    for spec, mean in (("saw-int4", "auto"), (RAW, "none"), (SPEC, "pre"), ("saw-int4:mean=post", "post")):
        options = read_options({"packedkv": {"preset": spec}})
        assert options.scheme.mean == mean
        assert refusal(options.scheme) == ""
    for mean in ("pre", "post"):
        assert "unfinished ones beside the pages keep" in refusal(packedkv.get(f"kivi-4:window=0,mean={mean}"))
    for spec in packedkv.presets():
        assert "mean" not in refusal(packedkv.get(spec).for_layer(5, 20))


def test_what_a_server_decides(model: Any) -> None:
    """By the biases, or by what a file holds; without either keys keep their mean."""
    found = biases_of(model, plan_for(model, "decoded"))
    auto, none = packedkv.get("saw-int4"), packedkv.get(RAW)
    assert decided(auto, [0, 1], found, None) == ["pre", "pre"]
    assert decided(auto, [0, 1], None, None) == decided(none, [0, 1], found, None) == ["none", "none"]
    assert decided(auto, [0, 1], found, {0: {"key": {"mean": torch.zeros(1, 2, 64)}}, 1: {}}) == ["pre", "none"]
    assert decided(packedkv.get("kivi-4"), [0, 1], found, None) == ["none", "none"]


# -- post, and means of the first tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [DYNAMIC, {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}])
def test_where_frequencies_are_not_fixed_auto_is_post(rope: Any) -> None:
    made = biased(rope_parameters=rope)
    cache = packedkv.cache_for(made, "saw-int4", prefill="decoded")
    ids = prompt(1, 200)
    got = run(made, cache, ids)
    report = cache.report()
    assert {(layer["mean"], layer["mean_from"]) for layer in report["layers"]} == {("post", "first tokens")}
    wanted = run(made, None, ids)
    raw = run(made, packedkv.cache_for(made, RAW, prefill="decoded", probe="off"), ids)
    assert (got - wanted).norm() < 0.5 * (raw - wanted).norm()
    own = own_keys(made, ids)[0]
    mean = own.half().double()[:, :, :128].mean(2)
    torch.testing.assert_close(cache.layer_caches[0].mean.double(), mean, atol=1e-3, rtol=1e-5)


def test_the_mean_of_the_first_tokens_is_that_of_the_projection() -> None:
    """On a model without biases: the mean of what k_proj gives, in each sequence; left padding is left out."""
    made, ids, pad = tiny_model("llama-gqa"), prompt(2, 160), 9
    mask = torch.ones(2, 160, dtype=torch.long)
    mask[0, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    seen: list[Tensor] = []
    hook = made.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *given: seen.append(given[2]))
    cache = packedkv.cache_for(made, SPEC)
    run(made, cache, ids[:, :100], attention_mask=mask[:, :100], position_ids=positions[:, :100])
    assert "dense until 128 tokens have come" in cache.report()["layers"][0]["note"]
    run(made, cache, ids[:, 100:], attention_mask=mask, position_ids=positions[:, 100:])
    hook.remove()
    layer = cache.layer_caches[0]
    before = torch.cat(seen, 1).unflatten(-1, (-1, made.config.head_dim))
    wanted = torch.stack([before[0, pad : pad + 128].mean(0), before[1, :128].mean(0)])
    torch.testing.assert_close(layer.mean, wanted, atol=1e-3, rtol=1e-3)
    assert cache.report()["layers"][0]["mean_from"] == "first tokens"


def test_a_codec_may_ask_for_it_in_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = tiny_model("llama-gqa", vocab_size=256), prompt(1, 150)
    monkeypatch.setattr(RopePairs, "without_mean", True)
    cache = packedkv.cache_for(made, "rope-pairs-4")
    run(made, cache, ids)
    first = {(layer["mean"], layer["mean_from"]) for layer in cache.report()["layers"]}
    assert first == {("pre", "first tokens")}
    loaded = tiny_loaded(made, "llama")
    fitted = fit_model(loaded, "rope-pairs-4", TEXT, windows=1, window_tokens=96)
    assert fitted.scheme.mean == "pre"
    assert "mean" in fitted[0]["key"]
    assert packedkv.cache_for(made.config, "rope-pairs-4").layer_caches[0].scheme.mean == "none"
    assert packedkv.cache_for(biased(rope_parameters=DYNAMIC), "rope-pairs-4").layer_caches[0].scheme.mean == "post"


# -- fitted ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, "rope-pairs-3:mean=pre", "saw-int4:mean=post", "rope-pairs-3"])
def test_a_mean_is_fitted_and_used(model: Any, spec: str, tmp_path: Any) -> None:
    loaded = tiny_loaded(model, "biased")
    fitted = fit_model(loaded, spec, TEXT, windows=2, window_tokens=96).save(tmp_path / "params")
    bias = model.model.layers[0].self_attn.k_proj.bias.detach().view(1, -1, 64)
    mean = fitted[0]["key"]["mean"]
    assert mean.dtype == torch.float32
    assert fitted.spec == spec
    kind = "post" if "post" in spec else "pre"
    if kind == "pre":
        assert (mean - bias).abs().amax() < 3
        assert fitted[0]["key"].get("scale", torch.ones(1)).amax() < 30  # constants of keys without it
    cache = packedkv.cache_for(model, spec, params=tmp_path / "params", attention="decoded")
    ids = prompt(1, 20)
    run(model, cache, ids)
    assert {(layer["mean"], layer["mean_from"]) for layer in cache.report()["layers"]} == {(kind, "params")}
    assert cache.layer_caches[0].roles["key"].encoded == 20  # nothing waits
    asked = spec.partition(":")[0]
    again = packedkv.cache_for(model, asked if kind == "pre" else spec, params=fitted, attention="decoded")
    run(model, again, ids)
    assert torch.equal(cache.layer_caches[0].decode()[0], again.layer_caches[0].decode()[0])
    cache.save(tmp_path / "cache")
    read = packedkv.load_cache(tmp_path / "cache", model)
    more = prompt(1, 3)
    assert torch.equal(run(model, cache, more), run(model, read, more))


def test_what_has_nothing_but_auto_is_not_fitted(model: Any) -> None:
    loaded = tiny_loaded(model, "biased")
    with pytest.raises(FitError, match="fit the mean of the keys with mean=pre"):
        fit_model(loaded, "saw-int4", TEXT, windows=1, window_tokens=96)


def test_params_fitted_without_a_mean_serve_the_preset(tmp_path: Any) -> None:
    made = tiny_model("llama-gqa", vocab_size=256)
    loaded = tiny_loaded(made, "llama")
    old = fit_model(loaded, "rope-pairs-3:mean=none", TEXT, windows=1, window_tokens=96).save(tmp_path / "old")
    assert '"mean"' not in old.scheme.to_json()
    cache = packedkv.cache_for(made, "rope-pairs-3", params=tmp_path / "old", probe="off")
    run(made, cache, prompt(1, 20))
    assert cache.report()["mean"] == "none"
    with pytest.raises(FormatError, match="fitted for rope-pairs-3:mean=none, not for rope-pairs-3:mean=pre"):
        packedkv.cache_for(made, "rope-pairs-3:mean=pre", params=tmp_path / "old")


# -- energies of queries, from a run on random tokens ------------------------------------------------------------------


def by_hand(model: Any, layer: int) -> torch.Tensor:
    """Mean squares before RoPE over each pair, from the layer's own input: ``[H, D / 2]``."""
    inputs: list[torch.Tensor] = []
    attention = model.model.layers[layer].self_attn
    hook = attention.q_proj.register_forward_hook(lambda _, __, out: inputs.append(out))
    tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, use_cache=False)
    hook.remove()
    heads, dim = model.config.num_key_value_heads, attention.head_dim
    squares = inputs[0][0, SKIPPED:].double().view(TOKENS - SKIPPED, heads, -1, dim).square().mean((0, 2))
    return (squares[:, : dim // 2] + squares[:, dim // 2 :]) / 2


@pytest.mark.parametrize("make", [lambda: tiny_model("llama-gqa"), biased])
def test_they_are_of_the_queries_of_each_group_whatever_rope_does(make: Any) -> None:
    model = make()
    own = model.config._attn_implementation
    found = query_energies(model)
    assert sorted(found) == list(range(model.config.num_hidden_layers))
    for layer, energy in found.items():
        low, high = energy[0].chunk(2, -1)
        torch.testing.assert_close((low + high) / 2, by_hand(model, layer), rtol=1e-4, atol=0)
    assert model.config._attn_implementation == own


def test_a_model_runs_once_until_its_weights_change() -> None:
    model, runs = tiny_model("llama-gqa"), []
    model.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    first = query_energies(model)
    assert query_energies(model) is first
    assert len(runs) == 1
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert len(runs) == 1
    torch.testing.assert_close(query_energies(model)[0], 4 * first[0])
    assert len(runs) == 2


def test_only_constants_that_wait_for_tokens_ask_for_them() -> None:
    model = tiny_model("llama-gqa")
    runs: list[int] = []
    model.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    packedkv.cache_for(model, "saw-int4")
    assert not runs
    cache = packedkv.cache_for(model, "ghost-3")
    assert runs == [1]
    found = query_energies(model)
    assert all(torch.equal(one.site.energy, found[i]) for i, one in enumerate(cache.layer_caches))


def test_a_model_without_weights_has_none_and_one_that_does_not_run_says_so() -> None:
    assert query_energies(tiny_model("llama-gqa").to("meta")) == {}
    model = tiny_model("llama-gqa")

    def refuse(*_: Any) -> None:
        raise ValueError("pixel_values are missing")

    model.get_decoder().register_forward_pre_hook(refuse)
    with pytest.warns(PackedKVWarning, match=r"did not run on tokens alone \(pixel_values are missing\)"):
        assert query_energies(model) == {}
