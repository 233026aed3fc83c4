"""What is measured: the perplexity protocol and the real model's 22.90, generation, attention errors."""

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

import packedkv
from packedkv.cli.measure import fidelity, generation, perplexity
from packedkv.cli.measure.caches import generating_cache
from packedkv.cli.measure.compare import Settings, compare
from packedkv.cli.measure.generation import Generation, fill, greedy, in_turns, long_context, uncompressed_cache
from packedkv.cli.measure.perplexity import Reference
from packedkv.codec import Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.kernels.cpu import library
from packedkv.models import windows as text_windows
from packedkv.models.loading import load_text
from tests.cli.tiny import TEXT, tiny_tokenizer
from tests.conftest import own_threads, tiny_model

FIRST = 20.98
"""Perplexity of the real model on the first 512 tokens."""


def windows(count=2, size=64):
    return text_windows.split_windows(text_windows.tokenize(tiny_tokenizer(), TEXT, count * size), count, size)


def test_windows_follow_each_other_from_the_start_without_overlap():
    ids, text = torch.arange(1000), TEXT * 200
    assert [w.tolist() for w in text_windows.split_windows(ids, 2, 300)] == ids[:600].view(2, 300).tolist()
    assert len(text_windows.split_windows(ids, 9, 300)) == 3, "an unfinished window is not a window"
    assert text_windows.tokenize(tiny_tokenizer(), text, 100).tolist() == tiny_tokenizer()(text)["input_ids"][:100]
    assert text_windows.tokenize(tiny_tokenizer(), TEXT, 10**6).numel() == len(TEXT)
    packaged = load_text()
    assert packaged.name.startswith("WikiText-2")
    assert "Robert Boulter is an English film , television and theatre actor" in packaged.text


def test_the_first_token_is_not_scored_and_perplexity_is_the_models_own_loss(llama):
    window = windows()[0]
    quality = perplexity.summarize([perplexity.uncompressed(llama, window).score_itself()])
    assert quality.tokens == 63
    with torch.no_grad():
        loss = llama(window[None], labels=window[None], use_cache=False).loss
    assert quality.perplexity == pytest.approx(math.exp(loss.item()), rel=1e-5)
    assert (quality.kl, quality.top1_agreement) == (0, 1)


def test_kl_agreement_and_errors_follow_their_definitions():
    p, q = torch.randn(700, 11), torch.randn(700, 11)
    targets = torch.randint(0, 11, (700,))
    score = perplexity.summarize([Reference(targets, p.log_softmax(-1)).score(q)])
    ln_p, ln_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    kl = (ln_p.exp() * (ln_p - ln_q)).sum(-1)
    nll = -ln_q.gather(1, targets[:, None])[:, 0]
    rise = nll + ln_p.gather(1, targets[:, None])[:, 0]
    assert score.kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert score.kl_se == pytest.approx(kl.std(unbiased=False).item() / 700**0.5, rel=1e-4)
    assert score.nll == pytest.approx(nll.mean().item(), rel=1e-5)
    assert score.nll_rise == pytest.approx(rise.mean().item(), rel=1e-4)
    assert score.nll_rise_se == pytest.approx(rise.std(unbiased=False).item() / 700**0.5, rel=1e-4)
    assert score.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    top5 = Reference(targets, p.log_softmax(-1)).compare(q).top5
    assert top5.tolist() == [int(a.argmax()) in b.topk(5).indices for a, b in zip(p, q, strict=True)]
    # windows are averaged over their tokens
    parts = [Reference(targets[s], p[s].log_softmax(-1)).score(q[s]) for s in (slice(0, 300), slice(300, 700))]
    halves = perplexity.summarize(parts)
    assert halves.windows == 2
    assert (halves.kl, halves.nll_se) == (pytest.approx(score.kl), pytest.approx(score.nll_se))


def test_exact_prefill_leaves_only_the_first_call_exact(llama):
    ids = text_windows.tokenize(tiny_tokenizer(), TEXT, 320)
    reference = perplexity.uncompressed(llama, ids).log_p
    logits, _ = perplexity.compressed_logits(llama, "int-4", ids, prefill="exact")
    n = perplexity.EXACT_CALL_TOKENS
    logits = logits.log_softmax(-1)
    torch.testing.assert_close(logits[:n], reference[:n], atol=1e-4, rtol=1e-4)
    assert (logits[n:] - reference[n:]).abs().max() > 1e-2


def test_the_models_attention_is_its_own_again_after_an_error(llama, monkeypatch):
    monkeypatch.setattr(packedkv.LayerCache, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        perplexity.compressed_logits(llama, "ultraquant:queries=fp8,dense_layers=0", windows()[0])
    assert llama.config._attn_implementation == "sdpa"


@pytest.fixture
def fast():
    """Threads for a real model; and memory is not filled: NaN in 400 MB of logits is not what is tested."""
    threads = torch.get_num_threads()
    torch.set_num_threads(own_threads())
    torch.use_deterministic_algorithms(False)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("fast")
def test_saw_int4_is_closer_to_smollm2_than_int4(smollm2):
    """The beginning of the protocol's first window, each token against the model's own."""
    once = Settings(windows=1, window_tokens=512, new_tokens=0, queries=0)
    naive, saw = compare(smollm2, ["int-4", "saw-int4"], load_text().text, once)
    own = naive["uncompressed"]["perplexity"]
    assert own == pytest.approx(FIRST, abs=0.02)
    assert own < saw["perplexity"] < naive["perplexity"]
    assert saw["kl"] < 0.6 * naive["kl"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("fast")
def test_smollm2_gives_22_90(smollm2):
    """WikiText-2 raw test, three windows of 2048 tokens, float32; see the module's protocol."""
    windows = text_windows.split_windows(text_windows.tokenize(smollm2.tokenizer, load_text().text, 3 * 2048), 3, 2048)
    scores = [perplexity.uncompressed(smollm2.model, window).score_itself() for window in windows]
    assert perplexity.summarize(scores).perplexity == pytest.approx(22.90, abs=0.02)
    (dense,) = compare(smollm2, ["dense"], load_text().text, Settings(windows=1, new_tokens=0, queries=0))
    assert dense["perplexity"] == pytest.approx(perplexity.summarize(scores[:1]).perplexity, abs=0.02)


# -- greedy generation: the text is generate's, and speed is that of one-token steps -----------------------------------


def cache_for(llama, spec):
    """The cache and the name of the attention; None: transformers' own."""
    own = uncompressed_cache(llama), llama.config._attn_implementation
    return own if spec is None else generating_cache(llama, spec)


@pytest.mark.parametrize("spec", [None, "int-4", "kivi-2:window=32"], ids=["uncompressed", "int-4", "kivi-2"])
def test_tokens_are_those_of_generate(llama, spec):
    prompt = torch.randint(0, 256, (70,))

    def cache():
        return uncompressed_cache(llama) if spec is None else packedkv.cache_for(llama, spec, probe=False)

    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "attention_mask": torch.ones(1, 70).long()}
    expected = llama.generate(prompt[None], **passing(llama, cache()), **options)
    made = greedy(llama, prompt, 12, cache())
    assert made.tokens == expected[0, 70:].tolist()
    assert len(made.step_seconds) == 11


def test_speed_is_the_median_step_without_the_prompt_and_agreement_counts_leading_tokens():
    made = Generation([1, 2, 3, 4], [0.1, 9.0, 0.1], prompt_seconds=50.0)
    assert made.tokens_per_s == pytest.approx(10)
    assert made.agreement(Generation([1, 2, 9, 4], [1.0], 1.0)) == 2
    assert made.agreement(made) == 4


@pytest.mark.parametrize(("with_cudnn", "without", "counts"), [(0.06, 0.03, 0.03), (0.02, 0.03, 0.02)])
def test_the_uncompressed_cache_is_timed_both_ways_on_a_gpu_and_the_faster_counts(
    monkeypatch, with_cudnn, without, counts
):
    def timed(model, prompt, new_tokens, cache):
        on = torch.backends.cuda.cudnn_sdp_enabled()
        return Generation([1] if on else [2], [with_cudnn if on else without], 0.0)

    monkeypatch.setattr(generation, "greedy", timed)
    monkeypatch.setattr(generation, "uncompressed_cache", lambda model: None)
    found = generation.uncompressed(SimpleNamespace(device=torch.device("cuda")), torch.arange(3), 1)
    assert found.step_seconds == [counts]
    assert found.tokens == [1]  # what a user gets
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert generation.uncompressed(SimpleNamespace(device=torch.device("cpu")), torch.arange(3), 1).step_seconds == [
        with_cudnn
    ]


def test_a_backend_that_is_off_stays_off():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        for form in generation.FORMS:
            with generation.attention_backends(form):
                assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


# -- which path --------------------------------------------------------------------------------------------------------


def test_generation_is_by_the_kernels_where_they_serve(llama):
    if reason := library.refusal(torch.device("cpu")):
        pytest.skip(reason)
    prompt, own, texts = torch.randint(0, 256, (70,)), llama.config._attn_implementation, {}
    streamed = "ultraquant:queries=fp8,dense_layers=0,mean=post"
    for spec, path in {"int-4": "fused", "e8-2": "decoded", streamed: "streamed"}.items():
        cache, attention = generating_cache(llama, spec)
        assert llama.config._attn_implementation == own
        with implementation(llama, attention):
            texts[spec] = greedy(llama, prompt, 5, cache).tokens
        report = cache.report()
        assert report["attention"] == path
        assert bool(report["unfused"]) == (path != "fused")
        assert path in report["paths"]
    cache = packedkv.cache_for(llama, "int-4", attention="decoded", probe=False)
    assert greedy(llama, prompt, 5, cache).tokens == texts["int-4"]


# -- behind a long context ---------------------------------------------------------------------------------------------


def test_a_context_of_one_window_is_a_prefill_and_windows_stand_at_their_own_positions(llama):
    ids, whole = torch.randint(0, 256, (90,)), uncompressed_cache(llama)
    with torch.no_grad():
        llama(input_ids=ids[None], **passing(llama, whole), use_cache=True)
    for found, layer in zip(long_context(llama, ids, 90), whole.layers, strict=True):
        torch.testing.assert_close(found, (layer.keys, layer.values))
    # the first layer's keys depend on a token and its position alone
    torch.testing.assert_close(long_context(llama, ids, 40)[0][0], whole.layers[0].keys)


@pytest.mark.parametrize("spec", [None, "int-4", "saw-int4:mean=pre", "kivi-2"])
def test_a_filled_cache_goes_on_as_after_a_prefill(llama, spec):
    ids = torch.randint(0, 256, (300,))
    (filled, attention), (other, _) = cache_for(llama, spec), cache_for(llama, spec)
    fill(filled, long_context(llama, ids[:-1], 300))
    with implementation(llama, attention), torch.no_grad():
        llama(input_ids=ids[None, :-1], **passing(llama, other), use_cache=True)
    found = in_turns(llama, int(ids[-1]), {"filled": (filled, attention), "other": (other, attention)}, 4)
    assert found["filled"].tokens == found["other"].tokens
    assert [(len(made.tokens), len(made.step_seconds)) for made in found.values()] == [(5, 4)] * 2


def test_a_model_of_sliding_windows_has_no_long_context():
    with pytest.raises(UnsupportedError, match="does not hold the keys and values of all tokens"):
        long_context(tiny_model("gemma3"), torch.randint(0, 256, (20,)), 20)


# -- attention-output error: recorded inputs, and the error of a scheme on them ----------------------------------------


def record(model, ids, queries):
    """Records of a run, what each layer's output projection saw, and the outputs on exact keys and values."""
    outputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, __: outputs.append(args[0]))
        for layer in model.get_decoder().layers
    ]
    with torch.no_grad(), fidelity.record(model, queries=queries) as records:
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return records, outputs, [r.output(r.k, r.v) for r in records]


@pytest.fixture(scope="module")
def recorded(llama):
    return record(llama, torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(1)), 32)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_recomputed_outputs_are_the_models_own(recorded, name):
    """Sliding layers with their own mask."""
    records, outputs, exact = recorded if name == "llama" else record(tiny_model(name), torch.arange(50)[None], 8)
    assert [r.layer for r in records] == list(range(len(outputs)))
    for mine, seen in zip(exact, outputs, strict=True):
        torch.testing.assert_close(mine.transpose(1, 2).flatten(2), seen[:, -mine.shape[2] :], atol=1e-5, rtol=1e-4)


def test_error_is_zero_for_16_bit_and_grows_as_bits_fall(recorded):
    records, _, exact = recorded
    errors = [fidelity.attention_error(records, exact, spec).mean for spec in ("dense", "int-8", "int-4", "int-2")]
    assert errors[0] < 1e-3
    assert errors == sorted(errors)
    assert errors[3] > 0.1
    by_layer = fidelity.attention_error(records, exact, "octopus-2:dense_keys=1,window=0").by_layer
    assert by_layer[1] > max(by_layer[0], by_layer[2]), "keys of the first and the last layer are dense"


def test_rounded_queries_and_given_constants_enter_the_error(recorded):
    records, _, exact = recorded

    def error(spec, params=None):
        return fidelity.attention_error(records, exact, spec, params=params).mean

    plain, rounded = (error(f"ultraquant:queries={q},dense_layers=0") for q in ("exact", "fp8"))
    assert plain != rounded
    assert rounded == pytest.approx(plain, rel=0.2)
    norm = {layer: {"key": {"norm": torch.full((1, 2, 64), 3.0)}} for layer in range(3)}
    same = {layer: {"key": {"norm": torch.ones(1, 2, 64)}} for layer in range(3)}
    assert error("innerq-base:sink=0,window=0", norm) != error("innerq-base:sink=0,window=0", same)
    assert error("innerq-base:sink=0,window=0", same) == error("innerq-base:norm=false,sink=0,window=0")


def test_error_of_one_layer_is_its_definition(recorded):
    r, exact = recorded[0][1], recorded[2][1]
    k, v = packedkv.compress("int-4", r.k, r.v, layer=1).decode()
    expected = ((r.output(k, v) - exact).norm() / exact.norm()).item()
    found = fidelity.attention_error([r], [exact], "int-4")
    assert found.by_layer == {1: pytest.approx(expected)}
    assert (found.mean, found.worst_layer) == (pytest.approx(expected), 1)


def test_masks_soft_caps_and_learned_sinks_enter_the_scores():
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = torch.ones(1, 1, 3, 6, dtype=torch.bool).tril(3)
    mask[..., 0] = False
    sinks = torch.randn(4)
    got = fidelity.LayerRecord(0, q, k, v, mask, 0.3, 5.0, sinks).output(k, v)
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3 / 5) * 5
    e = scores.exp() * mask
    expected = e @ v.repeat_interleave(2, 1) / (e.sum(-1, keepdim=True) + sinks.exp().view(1, 4, 1, 1))
    torch.testing.assert_close(got, expected)
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(fidelity.LayerRecord(0, q, k, v, additive, 0.3, 5.0, sinks).output(k, v), got)


def test_a_model_without_attention_is_refused(llama):
    with pytest.raises(UnsupportedError, match="no attention layer was seen"), fidelity.record(llama):
        pass


def test_nothing_keeps_alive_what_was_recorded(llama):
    held = [weakref.ref(r.k) for r in record(llama, torch.arange(20)[None], 4)[0]]
    gc.collect()
    assert [r() for r in held] == [None] * 3, "transformers keeps the attention function that was registered"


def test_layers_that_borrow_keys_are_compressed_as_their_lenders():
    # layers 2 and 3 borrow from 0 and 1
    records, _, exact = record(tiny_model("gemma3n"), torch.randint(1, 128, (1, 64)), 8)
    assert [(r.layer, r.owner) for r in records] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert records[2].k is records[0].k
    ends = packedkv.KVScheme(packedkv.get("int-2").key, packedkv.get("dense").value, dense_key_layers=1)
    errors = fidelity.attention_error(records, exact, ends).by_layer
    assert list(errors) == [0, 1, 2, 3]
    assert max(errors.values()) < 1e-3, "layers 0 and 1 are all that cache: the first and the last"
    # constants that only queries give: there are none for layers 2 and 3
    scheme = packedkv.get("saw-int4:hessian=true")
    given = {r.layer: {"key": scheme.key.fit(Site(r.layer, "key", 2, 64), Sample(r.k, r.q))} for r in records[:2]}
    assert fidelity.attention_error(records, exact, scheme, params=given).worst < 1
