"""The perplexity protocol: windows, what is scored, KL, agreement, and the real model's 22.90."""

import math

import pytest
import torch

import packedkv
from packedkv.cli.measure import perplexity
from packedkv.cli.measure.compare import Settings, compare
from packedkv.cli.measure.perplexity import Reference
from packedkv.models import windows as text_windows
from packedkv.models.loading import load_text
from tests.cli.tiny import TEXT, tiny_llama, tiny_tokenizer
from tests.conftest import own_threads

FIRST = 20.98
"""Perplexity of the real model on the first 512 tokens."""


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def windows(count=2, size=64):
    ids = text_windows.tokenize(tiny_tokenizer(), TEXT, count * size)
    return text_windows.split_windows(ids, count, size)


def test_windows_follow_each_other_from_the_start_without_overlap():
    ids = torch.arange(1000)
    first, second = text_windows.split_windows(ids, 2, 300)
    assert first.tolist() == list(range(300))
    assert second.tolist() == list(range(300, 600))
    assert len(text_windows.split_windows(ids, 9, 300)) == 3, "an unfinished window is not a window"


def test_tokens_are_those_of_the_whole_text_however_long_it_is():
    text = TEXT * 200
    whole = tiny_tokenizer()(text)["input_ids"]
    assert text_windows.tokenize(tiny_tokenizer(), text, 100).tolist() == whole[:100]
    assert text_windows.tokenize(tiny_tokenizer(), TEXT, 10**6).numel() == len(TEXT)


def test_the_first_token_is_not_scored_and_perplexity_is_the_models_own_loss(model):
    window = windows()[0]
    reference = perplexity.uncompressed(model, window)
    quality = perplexity.summarize([reference.score_itself()])
    assert quality.tokens == 63
    with torch.no_grad():
        loss = model(window[None], labels=window[None], use_cache=False).loss
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


def test_two_windows_are_averaged_over_tokens():
    p, q, targets = torch.randn(90, 7), torch.randn(90, 7), torch.randint(0, 7, (90,))
    whole = perplexity.summarize([Reference(targets, p.log_softmax(-1)).score(q)])
    parts = [Reference(targets[s], p[s].log_softmax(-1)).score(q[s]) for s in (slice(0, 30), slice(30, 90))]
    halves = perplexity.summarize(parts)
    assert halves.windows == 2
    assert halves.kl == pytest.approx(whole.kl)
    assert halves.nll_se == pytest.approx(whole.nll_se)


def test_decoded_prefill_reads_the_codes_in_one_call(model):
    window = windows()[0]
    reference = perplexity.uncompressed(model, window)
    dense, _ = perplexity.compressed_logits(model, "dense", window)
    coarse, cache = perplexity.compressed_logits(model, "int-4", window)
    assert reference.score(dense).kl < 1e-5 * 63
    assert reference.score(coarse).kl > 1e-3 * 63, "a one-call run that never reads the codes measures nothing"
    assert cache.report()["prefill"] == "decoded"


def test_exact_prefill_leaves_only_the_first_call_exact(model):
    ids = text_windows.tokenize(tiny_tokenizer(), TEXT, 320)
    reference = perplexity.uncompressed(model, ids).log_p
    logits, _ = perplexity.compressed_logits(model, "int-4", ids, prefill="exact")
    n = perplexity.EXACT_CALL_TOKENS
    logits = logits.log_softmax(-1)
    torch.testing.assert_close(logits[:n], reference[:n], atol=1e-4, rtol=1e-4)
    assert (logits[n:] - reference[n:]).abs().max() > 1e-2


def test_rounded_queries_are_read_inside_attention_and_change_little(model):
    window = windows(1, 96)[0]
    reference = perplexity.uncompressed(model, window)
    exact, plain = perplexity.compressed_logits(model, "ultraquant:dense_layers=0", window)
    rounded, cache = perplexity.compressed_logits(model, "ultraquant:queries=fp8,dense_layers=0", window)
    assert (plain.report()["attention"], cache.report()["attention"]) == ("decoded", "streamed")
    assert cache.report()["paths"] == {"streamed": 3}
    assert model.config._attn_implementation == "sdpa", "the model's own attention is set again"
    assert not torch.equal(exact, rounded)
    change = Reference(window[1:], exact.log_softmax(-1)).score(rounded).kl
    assert 0 < change < 0.2 * reference.score(exact).kl


def test_the_models_attention_is_its_own_again_after_an_error(model, monkeypatch):
    monkeypatch.setattr(packedkv.LayerCache, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        perplexity.compressed_logits(model, "ultraquant:queries=fp8,dense_layers=0", windows()[0])
    assert model.config._attn_implementation == "sdpa"


def test_the_packaged_text_fills_the_three_windows_and_is_real():
    text = load_text()
    assert text.name.startswith("WikiText-2")
    assert "Robert Boulter is an English film , television and theatre actor" in text.text


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
