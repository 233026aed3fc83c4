"""``packedkv fit``: what is recorded, what codecs are given, and what is refused before the model runs."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import packedkv
from packedkv.cli.measure import fidelity, perplexity
from packedkv.codec import Sample, Site
from packedkv.errors import FitError, ModelError, ShapeError, SpecError, UnsupportedError
from packedkv.files.params import sites_to_fit
from packedkv.fitting import fit as module
from packedkv.fitting import samples
from packedkv.fitting.fit import about, about_text, capture, fit_model
from packedkv.fitting.samples import WARM_UP_CALLS, sample_windows
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention_hooks import watched
from packedkv.integrations.transformers.plan import load_params
from packedkv.models import windows as text_windows
from packedkv.models.loading import load_text
from packedkv.progress import Progress
from tests.cli.tiny import TEXT, Leaning, leaning, tiny_llama, tiny_loaded, tiny_tokenizer
from tests.conftest import tiny_model

SMALL = {"windows": 2, "window_tokens": 96}
LAYERS = (0, 1, 2)
KLT = "ghost-3:transform=klt"


def windows_of(count=2):
    return text_windows.split_windows(text_windows.tokenize(tiny_tokenizer(), TEXT, count * 96), count, 96)


def cached(model, role, layer):
    """Keys or values as transformers' own cache holds them, the windows side by side, fp16."""
    parts = []
    for window in windows_of():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(window[None], **passing(model, cache))
        parts.append(getattr(cache.layers[layer], "keys" if role == "key" else "values"))
    return torch.cat(parts, 2).half()


def captured(model, spec, windows=None, **options):
    return capture(model, windows or windows_of(), sites_to_fit(packedkv.get(spec), LAYERS), **options)


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_keys_and_values_are_those_that_a_cache_receives(llama):
    samples = captured(llama, "hqmq-s24_r3:outliers=3")
    assert list(samples) == list(LAYERS)
    for layer, sample in samples.items():
        for role in ("key", "value"):
            held = torch.cat(getattr(sample, role), 2)
            assert held.dtype == torch.float16
            torch.testing.assert_close(held, cached(llama, role, layer), atol=2e-3, rtol=2e-3)


def test_queries_are_those_of_attention_and_roles_without_constants_are_left_out(llama):
    window = windows_of(1)
    with torch.no_grad(), fidelity.record(llama, queries=96) as records:
        llama(window[0][None], use_cache=False)
    samples = captured(llama, "innerq-base", window)
    for record in records:
        assert torch.equal(samples[record.layer].queries[0], record.q.half())
        assert samples[record.layer].value == []


def test_tokens_beyond_the_bound_are_left_out_evenly_with_their_gradients(llama):
    """Only codecs that ask for gradients get them."""
    for spec in ("ghost-3", KLT):
        whole, some = captured(llama, spec), captured(llama, spec, max_tokens=20)
        for part in range(2):
            kept = whole[1].places[part][some[1].places[part]]
            assert kept.tolist() == [0, 11, 21, 32, 42, 53, 63, 74, 84, 95]
            for name in ("key", "queries", *(["key_gradient"] if spec == KLT else ())):
                assert torch.equal(getattr(some[1], name)[part], getattr(whole[1], name)[part][:, :, kept])
        assert [sum(map(len, found[1].places)) for found in (whole, some)] == [192, 20]
        assert len(whole[1].key_gradient) == len(whole[1].value_gradient) == 2 * (spec == KLT)
    assert not torch.equal(*whole[1].key_gradient)


def test_a_bf16_model_is_held_in_bf16():
    sample = captured(tiny_llama().bfloat16(), "innerq-base", windows_of(1))[0]
    assert (sample.key[0].dtype, sample.queries[0].dtype, sample.dtype) == (torch.bfloat16,) * 3


def test_keys_that_no_cache_takes_are_refused_with_their_layer():
    """The model's attention is its own again."""
    made = tiny_llama()
    made.model.layers[1].self_attn.k_proj.weight.data.mul_(1e6)
    with pytest.raises(FitError, match=r"keys of layer 1\[batch=0, .* is above 65504"):
        captured(made, "innerq-base")
    assert made.config._attn_implementation == "sdpa"


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_a_loss_with_labels_of_the_model(llama):
    """By autograd's own cross-entropy, through keys and values that take another way into attention."""
    window = windows_of(1)[0]
    found, seen = captured(llama, KLT, [window], seed=3), {}

    def record(module, query, key, value, mask, options):
        key.retain_grad()
        value.retain_grad()
        seen[module.layer_idx] = key, value

    llama.zero_grad()
    with watched(llama, record):
        logits = llama(window[None], use_cache=False).logits[0]
    drawn = torch.Generator().manual_seed(3)
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=drawn)[:, 0]
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    llama.zero_grad()
    assert list(seen) == list(LAYERS)
    for layer, (key, value) in seen.items():
        for own, x in ((found[layer].key_gradient, key), (found[layer].value_gradient, value)):
            assert own[0].dtype == torch.bfloat16
            torch.testing.assert_close(own[0].float(), x.grad, rtol=1e-2, atol=1e-6)


def test_a_frozen_model_has_the_same_gradients_and_none_is_left_in_its_weights(llama):
    frozen = tiny_llama().requires_grad_(False)
    one, other = (captured(made, KLT, windows_of(1)) for made in (llama, frozen))
    assert torch.equal(one[1].value_gradient[0], other[1].value_gradient[0])
    assert all(p.grad is None for p in llama.parameters())


def test_a_model_that_cannot_be_run_backwards_is_fitted_without_gradients(model, monkeypatch, capsys):
    plain, own = fit_model(model, KLT, TEXT, text_name="mine", **SMALL), torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: (*own(*given)[:-1], torch.tensor(float("inf"))))
    assert fit_model(model, KLT, TEXT, progress=Progress(), **SMALL).text_name == "a text, without gradients"
    assert "fitting without gradients: gradients in float32 are not finite; try bfloat16." in capsys.readouterr().err
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: (_ for _ in ()).throw(RuntimeError("no derivative")))
    without = fit_model(model, KLT, TEXT, text_name="mine", progress=Progress(), **SMALL)
    told = capsys.readouterr().err
    assert "fitting without gradients: LlamaForCausalLM could not be run backwards (no derivative)." in told
    assert (plain.text_name, without.text_name) == ("mine", "mine, without gradients")
    assert not torch.equal(plain[1]["value"]["matrix"], without[1]["value"]["matrix"])
    sample = captured(model.model, KLT, backward=False)[1]
    given = Sample(torch.cat(sample.value, 2), torch.cat(sample.queries, 2))
    expected = packedkv.get(KLT).value.fit(Site(1, "value", 2, 64, 0), given)
    assert all(torch.equal(without[1]["value"][name], x) for name, x in expected.items())
    with pytest.raises(FitError, match="the model returns no logits"):
        captured(model.model.model, KLT, windows_of(1))


# -- what codecs make of it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["innerq-base", "hqmq-s24_r3:outliers=3", "ultra-tq:table=calibrated,dense_layers=1"])
def test_constants_are_what_fit_gives_for_the_caches_own_site(model, spec):
    fitted = fit_model(model, spec, TEXT, seed=5, **SMALL)
    scheme = packedkv.get(spec)
    edge = scheme.dense_key_layers
    assert list(fitted) == list(range(edge, 3 - edge))
    for layer, roles in fitted.items():
        assert set(roles) == {r for r in ("key", "value") if "tensor" in scheme.codec(r).needs}
        for role, params in roles.items():
            expected = scheme.codec(role).fit(Site(layer, role, 2, 64, 5), Sample(cached(model.model, role, layer)))
            assert params.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(params[name], expected[name], atol=2e-3, rtol=2e-3)
    assert fitted.seeded == spec.startswith("hqmq"), "only codebooks are drawn from the seed"
    assert (fitted.tokens, fitted.windows, fitted.window_tokens, fitted.seed) == (192, 2, 96, 5)


def test_queries_reach_the_codec_and_layers_are_settled_together(model, monkeypatch):
    """Boundary layers are neither fitted nor settled."""
    calls, original = [], Leaning.fit

    def watched(self, site, sample):
        x = sample.tensor
        calls.append((site.layer, site.role, tuple(x.shape), tuple(sample.queries.shape), x.dtype))
        return original(self, site, sample)

    monkeypatch.setattr(Leaning, "fit", watched)
    for layers, scheme in (LAYERS, leaning()), ((1,), leaning(dense_layers=1)):
        calls.clear()
        fitted = fit_model(model, scheme, TEXT, **SMALL)
        assert calls == [(i, "key", (1, 2, 192, 64), (1, 4, 192, 64), torch.float16) for i in layers]
        assert [fitted[i]["key"]["place"].item() for i in fitted] == list(range(len(layers)))
        assert max(fitted[i]["key"]["lean"].max().item() for i in layers) == 1
        assert not fitted.seeded
    assert fit_model(model, leaning(drawing=True), TEXT, **SMALL).seeded


@pytest.mark.parametrize("name", ["mistral", "gpt-oss", "gemma3n", "lfm2"])
def test_models_with_other_layers_are_fitted_where_they_cache(name):
    more = {"vocab_size_per_layer_input": 256} if name == "gemma3n" else {}
    made = tiny_model(name, vocab_size=256, **more)
    fitted = fit_model(tiny_loaded(made, name), leaning(), TEXT, **SMALL)
    cache = packedkv.cache_for(made, leaning(), params=fitted)
    assert list(fitted) == [layer.index for layer in cache.packed_layers]
    with torch.no_grad():
        made(windows_of(1)[0][None], **passing(made, cache))
    assert cache.layer_caches[0].constant_bytes() > 0


def test_about_says_what_was_fitted(model):
    found = about(fit_model(model, "innerq-base", TEXT, text_name="my.txt", **SMALL))
    (row,) = found["constants"]
    assert (row["role"], row["codec"], row["constant"], row["shapes"]) == ("key", "InnerQ", "norm", [[1, 2, 64]])
    assert (row["layers"], row["bytes"], found["bytes"]) == (3, 3 * 2 * 64 * 4, 3 * 2 * 64 * 4)
    assert 0 < row["min"] < row["max"]
    assert (found["seed"], found["text"], found["tokens"], found["layers"]) == (None, "my.txt", 192, [0, 1, 2])
    text = about_text(found | {"file": "f.safetensors", "seconds": 1.0}, 2)
    assert f"keys: norm float32 [1x2x64] in 3 layers, {row['min']:.4g} .. {row['max']:.4g}" in text
    short = fit_model(model, "innerq-base", TEXT[:150], **SMALL)
    assert (short.windows, short.tokens) == (1, 96)
    text = about_text(about(short) | {"file": "f", "seconds": 1.0}, 2)
    assert "1 x 96 tokens (2 asked for: the text is too short)" in text


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        ("saw-int4", {}, FitError, "saw-int4 has no constants to fit: it takes nothing from data"),
        ("ultra-tq:table=calibrated", {}, FitError, "all 3 KV layers of tiny are dense"),
        ("innerq-bse", {}, SpecError, "Did you mean 'innerq-base'"),
        ("innerq-base", {"window_tokens": 600}, ModelError, "does not fit the model, which knows 512 positions"),
        ("innerq-base", {"window_tokens": 5000}, ModelError, "the text has 1420 bytes and a window takes 5000 tokens"),
        ("innerq-base", {"text": "é" * 50}, ModelError, "the text has 50 tokens and a window takes 96"),
    ],
    ids=["nothing-to-fit", "all-dense", "unknown", "positions", "short", "fewer tokens than bytes"],
)
def test_mistakes_are_refused_before_the_model_runs(model, monkeypatch, spec, options, error, message):
    monkeypatch.setattr(module, "capture", lambda *_, **__: pytest.fail("the model was run"))
    if "text" in options:
        monkeypatch.setattr(module, "tokenize", lambda tokenizer, text, tokens: torch.arange(len(text)))
    with pytest.raises(error, match=message):
        fit_model(model, spec, **{"text": TEXT, **SMALL, **options})


def test_a_head_dim_or_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="head_dim=36"):
        fit_model(tiny_loaded(tiny_model("llama-gqa", head_dim=36, vocab_size=256)), "innerq-base", TEXT, **SMALL)
    with pytest.raises(UnsupportedError, match="multi-head latent attention"):
        fit_model(tiny_loaded(tiny_model("deepseek-v3", vocab_size=256)), "innerq-base", TEXT, **SMALL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_model_is_fitted_saved_and_served(smollm2, tmp_path):
    text, real = load_text().text, smollm2.model
    fitted = fit_model(smollm2, "innerq-base", text, windows=1, window_tokens=256)
    assert list(fitted) == list(range(30))
    fitted.save(tmp_path / "p")
    window = text_windows.tokenize(smollm2.tokenizer, text, 512)[256:]
    reference = perplexity.uncompressed(real, window)
    own, served = (
        reference.score(perplexity.compressed_logits(real, "innerq-base", window, params=params)[0]).kl / 255
        for params in (None, load_params(tmp_path / "p", real, "innerq-base"))
    )
    assert served != own
    assert served < 0.1, "constants of one text serve the next"


# -- without a text ----------------------------------------------------------------------------------------------------


def test_windows_are_drawn_by_the_models_own_probabilities():
    model = tiny_llama()
    firsts = torch.stack(sample_windows(model, 50, 2))[:, 0]
    assert len(set(firsts.tolist())) > 20  # its config names no token that begins or ends texts
    model.config.bos_token_id = 7
    ids = torch.stack(sample_windows(model, 4000, 2, seed=1))
    assert ids[:, 0].unique().tolist() == [7]
    with torch.no_grad():
        logits = model(input_ids=ids[:1, :1]).logits[0, -1].double()
    likely = (3 * logits).softmax(-1)  # what another temperature would draw
    share = torch.bincount(ids[:, 1], minlength=len(logits)).double() / len(ids)
    apart, other = ((share - p).abs().sum() for p in (logits.softmax(-1), likely))
    assert apart < 0.2 * other
    later = torch.stack(sample_windows(model, 8, 24, seed=1))
    with torch.no_grad():  # token for token with a cache, as in one call
        whole = model(input_ids=later).logits.log_softmax(-1)
    own = whole[:, :-1].gather(-1, later[:, 1:, None]).mean()
    assert own > whole[:, :-1].mean() + 3
    model.lm_head.weight.data.fill_(float("inf"))
    with pytest.raises(FitError, match="not finite after 1 tokens of its own; pass --text"):
        sample_windows(model, 1, 4)


def repeated(run):
    """In place of a CUDA graph: what calls the function again."""
    for _ in range(WARM_UP_CALLS):
        run()
    return SimpleNamespace(replay=run)


@pytest.mark.parametrize("tokens", [2, 24])
def test_a_captured_step_draws_the_same_windows(tokens, monkeypatch):
    model = tiny_llama()
    wanted = sample_windows(model, 3, tokens, seed=2)
    monkeypatch.setattr(samples, "capture", repeated)
    monkeypatch.setattr(samples, "_step", lambda *given: (samples._captured(*given), ""))
    assert torch.equal(torch.stack(sample_windows(model, 3, tokens, seed=2)), torch.stack(wanted))


def test_steps_that_need_the_host_are_not_captured_and_an_eager_step_says_why(monkeypatch):
    monkeypatch.setattr(samples, "capture", repeated)
    model = tiny_llama()
    assert samples._captured(model, 1, 8) is not None
    model._can_compile_fullgraph = False  # its forward looks at numbers
    assert samples._captured(model, 1, 8) is None
    model = tiny_llama()
    model.config.layer_types = ["sliding_attention"] * model.config.num_hidden_layers
    model.config.sliding_window = 4
    assert samples._captured(model, 1, 8) is None

    def fails(*given):
        raise KeyError("linear_attention")

    monkeypatch.setattr(samples, "_captured", fails)
    model = SimpleNamespace(device=torch.device("cuda"), config=tiny_llama().config)
    assert samples._step(model, 1, 8)[1] == ", eager: no CUDA graph (KeyError: 'linear_attention')"
    assert samples._step(tiny_llama(), 1, 8)[1] == ""


@pytest.mark.gpu
def test_windows_are_drawn_by_a_cuda_graph(capfd):
    model = tiny_llama().to("cuda")
    ids = torch.stack(sample_windows(model, 4, 200, seed=1, progress=Progress()))
    assert "4 windows, by a CUDA graph" in capfd.readouterr().err
    assert torch.equal(ids, torch.stack(sample_windows(model, 4, 200, seed=1)))
    with torch.no_grad():
        whole = model(input_ids=ids.to("cuda")).logits.log_softmax(-1).cpu()
    # as likely as what the model draws by itself: the mean over tokens is the entropy's, up to its standard error
    found = whole[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(whole.exp() * whole).sum(-1)[:, :-1]
    assert abs(float((found + entropy).mean())) < 4 * float((found + entropy).std()) / found.numel() ** 0.5


def test_a_fit_without_a_text_is_of_the_models_own_samples(model):
    fitted, again, other = (fit_model(model, "ghost-3", windows=2, window_tokens=40, seed=seed) for seed in (3, 3, 4))
    assert (fitted.tokens, fitted.windows, fitted.window_tokens, fitted.seeded) == (80, 2, 40, False)
    told = about_text(about(fitted) | {"file": "", "seconds": 0.0}, 2)
    assert "the model's own samples (seed 3), 2 x 40 tokens" in told
    assert fitted.text_sha256 == again.text_sha256 != other.text_sha256
    held = captured(model.model, "ghost-3", sample_windows(model.model, 2, 40, seed=3))[1]
    codec = fitted.scheme.for_layer(1, 3).codec("value")
    wanted = codec.fit(Site(1, "value", 2, 64, 3), Sample(torch.cat(held.value, 2), torch.cat(held.queries, 2)))
    torch.testing.assert_close(fitted[1]["value"]["centre"], codec.settle([wanted])[0]["centre"])
