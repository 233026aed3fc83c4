"""Numbers through the compressed cache: those of first principles, in any batch, and never from fresh K and V."""

from dataclasses import replace

import pytest
import torch
from tests.cli.tiny import TEXT, corrupt, tiny_llama, tiny_tokenizer
from tests.conftest import tiny_model

from packedkv.cli.measure.perplexity import compressed_logits, uncompressed
from packedkv.errors import ModelError
from packedkv.integrations.transformers.argument import passing
from packedkv.models import windows as text_windows
from packedkv_lab.eval.batches import read_answers, read_window
from packedkv_lab.eval.scoring import Reader, cut_at
from packedkv_lab.eval.stress import stress
from packedkv_lab.eval.tasks.base import Item, token_ids

CONTEXTS = ("The cache holds", "What attention reads is counted", "Every byte", "The cache holds")
PREFILLS = ("decoded", "exact")


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def items(n: int = 4) -> list[Item]:
    return [Item("t", str(i), "answer", context=CONTEXTS[i], answers=("x",), max_new_tokens=8) for i in range(n)]


def nothing() -> None:
    pass


def read(reader, tokenizer, wanted, batch=4):
    with reader.reading():
        return {done.item.id: done for done in read_answers(reader, tokenizer, wanted, batch, nothing)}


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", PREFILLS)
def test_dense_is_the_uncompressed_model(tokenizer, prefill):
    """To the last bit in 16 bit, which dense holds as it is."""
    model = tiny_llama().to(torch.bfloat16)
    dense = read(Reader(model, "dense", prefill=prefill), tokenizer, items())
    exact = read(Reader(model, None, prefill=prefill), tokenizer, items())
    assert {i: done.output for i, done in dense.items()} == {i: done.output for i, done in exact.items()}


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("spec", [None, "int-4", "kivi-2:group=16,window=8", "innerq-base:sink=2,window=4"])
def test_answers_do_not_depend_on_the_batch_size(model, tokenizer, spec, prefill):
    alone = read(Reader(model, spec, prefill=prefill), tokenizer, items(), batch=1)
    many = read(Reader(model, spec, prefill=prefill), tokenizer, items(), batch=16)
    assert {i: (done.output, done.content) for i, done in many.items()} == {
        i: (done.output, done.content) for i, done in alone.items()
    }


@pytest.mark.parametrize("prefill", PREFILLS)
def test_an_answer_reads_what_is_stored(model, tokenizer, prefill):
    prompt = [Item("t", "y", "answer", context=TEXT[:40], answers=("x",), max_new_tokens=1)]
    readers = Reader(model, None, prefill=prefill), Reader(model, corrupt(), prefill=prefill)
    kept, lost = (read(reader, tokenizer, prompt)["y"] for reader in readers)
    assert kept.output != lost.output


def test_bytes_are_those_of_the_prompt(model, tokenizer):
    (done,) = read(Reader(model, "int-4"), tokenizer, items(1)).values()
    assert done.content.elements == 3 * 2 * len(CONTEXTS[0]) * 64 * 2
    assert 4 < done.content.nbytes * 8 / done.content.elements < 20  # pages of 64 tokens, not all of them used
    (plain,) = read(Reader(model, None), tokenizer, items(1)).values()
    assert (plain.content.elements, plain.content.nbytes) == (done.content.elements, 2 * done.content.elements)


def test_what_cannot_be_read_is_an_item_with_an_error(model, tokenizer):
    pytest.importorskip("sklearn")
    short, long = replace(items()[0], id="short", context="Hi"), replace(items()[0], id="long", context="x" * 600)
    # its clusters need 16 tokens
    found = read(Reader(model, "saw-int4:kmeans=16"), tokenizer, [short, long, items()[1]])
    assert "needs at least 16 tokens to fit on" in found["short"].error
    assert "608 tokens do not fit the model, which knows 512 positions" in found["long"].error
    assert found["1"].output is not None
    assert found["short"].output is found["long"].output is None


def test_nan_in_the_keys_is_an_error_of_its_item_alone(model, tokenizer):
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.embed_tokens.weight[token_ids(tokenizer, "~")[0]] = float("nan")
    bad = replace(items()[0], id="bad", context="The cache hold~")
    found = read(Reader(broken, "int-4"), tokenizer, [bad, *items()], batch=16)
    assert "nan is not finite" in found["bad"].error
    assert all(found[item.id].output is not None for item in items())


@pytest.mark.parametrize("prefill", PREFILLS)
def test_answers_are_those_of_generate(model, tokenizer, prefill):
    from packedkv.integrations.transformers import cache_for

    prompts = [
        Item("t", str(i), "answer", context=TEXT[i : 60 + i], answers=("x",), max_new_tokens=8, stop=())
        for i in range(3)
    ]
    found = read(Reader(model, "saw-int4", prefill=prefill), tokenizer, prompts)
    for item in prompts:
        ids = torch.tensor(token_ids(tokenizer, item.context))[None]
        cache = cache_for(model, "saw-int4", prefill=prefill, attention="decoded")
        with torch.no_grad():
            if prefill == "exact":
                model(ids[:, :-1], **passing(model, cache))
            made = model.generate(ids, **passing(model, cache), max_new_tokens=8, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert found[item.id].output == text
        assert found[item.id].content.elements == 3 * 2 * 60 * 64 * 2, "held when the prompt was read"


def test_an_answer_ends_at_its_stop_and_generation_with_it(model, tokenizer, monkeypatch):
    free = Item("t", "a", "answer", context=TEXT[:50], answers=("x",), max_new_tokens=12, stop=())
    (done,) = read(Reader(model, None), tokenizer, [free]).values()
    text = done.output
    stop = text.strip()[3]
    reader, steps = Reader(model, None), []
    original = reader._logits
    monkeypatch.setattr(reader, "_logits", lambda *a: steps.append(1) or original(*a))
    (done,) = read(reader, tokenizer, [replace(free, stop=(stop,))]).values()
    assert done.output == cut_at(text, (stop,)) != text
    assert len(steps) < 12


def test_tokens_that_end_a_text_end_an_answer(tokenizer):
    model = tiny_llama()
    free = Item("t", "a", "answer", context=TEXT[:50], answers=("x",), max_new_tokens=6, stop=())
    reader = Reader(model, None)
    with reader.reading():
        (ids,), _ = reader.answers(torch.tensor([token_ids(tokenizer, free.context)]), 6, lambda tokens: False)
    model.generation_config.eos_token_id = [ids[2]]
    (cut,) = read(Reader(model, None), tokenizer, [free]).values()
    assert cut.output == tokenizer.decode(ids[: ids.index(ids[2])])


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_window_scores_as_compare_scores_it(model, tokenizer):
    ids = text_windows.tokenize(tokenizer, TEXT, 200)
    reference = uncompressed(model, ids)
    item = Item("kl", "w", "window", ids=tuple(ids.tolist()))
    for spec in ("dense", "int-4", "kivi-2:group=16,window=32"):
        reader = Reader(model, spec)
        with reader.reading():
            output = read_window(reader, item, reference, nothing).output
        wanted = reference.score(compressed_logits(model, spec, ids)[0])
        assert output.nll.sum().item() == pytest.approx(wanted.nll, rel=1e-5)
        assert output.kl.sum().item() == pytest.approx(wanted.kl, rel=1e-4, abs=1e-4)
        assert int(output.top1.sum()) == wanted.agree
        assert output.nll.numel() == 199
        assert (output.top5 >= output.top1).all()
    reader = Reader(model, None)
    with reader.reading():
        done = read_window(reader, item, reference, nothing)
    assert done.output.nll.sum().item() == pytest.approx(reference.nll.sum().item())
    assert not done.output.kl.any()
    assert done.output.top1.all()
    assert done.content.elements == 3 * 2 * 200 * 64 * 2


@pytest.mark.parametrize(("tokens", "first"), [(512, 257), (100, 51)])
def test_an_exact_window_scores_only_tokens_that_read_the_store(model, tokenizer, tokens, first):
    ids = text_windows.tokenize(tokenizer, TEXT, tokens)
    reference = uncompressed(model, ids)
    outputs = {}
    for spec in (None, "int-4"):
        reader = Reader(model, spec, prefill="exact")
        with reader.reading():
            outputs[spec] = reader.window(ids, reference)[0]
        assert outputs[spec].first == first
        assert outputs[spec].nll.numel() == tokens - first
    assert torch.equal(outputs[None].nll, reference.nll[first - 1 :])
    if tokens == 512:
        logits = compressed_logits(model, "int-4", ids, prefill="exact")[0][first - 1 :].log_softmax(-1)
        wanted = -logits.gather(1, ids[first:, None])[:, 0]
        assert torch.allclose(outputs["int-4"].nll, wanted.to(outputs["int-4"].nll.dtype), atol=1e-4)
    noise = Reader(model, corrupt(), prefill="exact")
    with noise.reading():
        lost = noise.window(ids, reference)[0]
    assert (lost.kl > 1e-6).all(), "every scored token reads noise"


# -- constants, attention, tokens --------------------------------------------------------------------------------------


def test_constants_are_drawn_once_and_are_those_of_a_fresh_cache(model, tokenizer, monkeypatch):
    from packedkv.codec import Site
    from packedkv.shared import SHARED

    SHARED.clear()
    drawn = []
    original = Site.generator
    monkeypatch.setattr(Site, "generator", lambda self, *a: drawn.append(1) or original(self, *a))
    fresh = [read(Reader(model, "turboquant-4"), tokenizer, [item], batch=16)[item.id].output for item in items()]
    before = len(drawn)
    assert before == 3 * 2 * 2, "drawn once in a process"
    SHARED.clear()
    found = read(Reader(model, "turboquant-4"), tokenizer, items(), batch=1)
    for item, output in zip(items(), fresh, strict=True):
        assert found[item.id].output == output
    assert len(drawn) - before == 3 * 2 * 2, "layers x roles x heads, however many sequences are read"


def test_warnings_of_the_probe_become_notes(tokenizer):
    model = tiny_model("llama-gqa", vocab_size=256)
    with stress(model, 256.0):
        reader = Reader(model, "int-4")
        found = read(reader, tokenizer, [replace(items()[1], context=CONTEXTS[1] * 3)])
    assert all(done.output for done in found.values())
    assert len(reader.notes) == 1
    assert "breaks on this model's keys" in reader.notes[0]


def test_an_exact_prefill_without_a_context_is_refused(model):
    reader = Reader(model, "int-4", prefill="exact")
    with reader.reading(), pytest.raises(ModelError, match="fills the cache before it scores"):
        reader.answers(torch.tensor([[1]]), 2, lambda tokens: False)
