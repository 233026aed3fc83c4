"""Items: the same in every process, what prompts say, every form of data, and what is said of data that is wrong."""

import gzip
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.cli.tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from packedkv.errors import FormatError, KVError, ModelError, SpecError
from packedkv.models.loading import SampleText, load_text
from packedkv_lab.eval.tasks import get_task, task_names
from packedkv_lab.eval.tasks.base import Item, TaskSettings, token_ids
from packedkv_lab.eval.tasks.haystack import Haystack, fitted, largest

GENERATED = ("needle", "needle_multikey", "kv_retrieval", "variable_tracking", "common_words")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def text():
    return load_text()


def settings(text, **changed) -> TaskSettings:
    return TaskSettings(text=text, **{"limit": 6, "lengths": (1400, 1900), "depths": (0.0, 0.5, 1.0), **changed})


# -- the registry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", task_names())
def test_every_task_says_what_it_is(name):
    task = get_task(name)
    assert task.name == name
    assert task.summary
    assert task.default_limit > 0
    assert all(metric.text and metric.better in ("higher", "lower") for metric in task.metrics.values())


@pytest.mark.parametrize("name", ["perplexity", "kl", *GENERATED])
def test_items_are_the_same_in_another_process_and_nested_in_larger_limits(name, tokenizer, text):
    found = [i.id for i in get_task(name).items(tokenizer, settings(text, window_tokens=300))]
    assert len(found) == len(set(found)) == 6
    more = [i.id for i in get_task(name).items(tokenizer, settings(text, window_tokens=300, limit=8))]
    assert set(found) < set(more)
    if name in GENERATED:
        other = [i.id for i in get_task(name).items(tokenizer, settings(text, seed=1))]
        assert not set(found) & set(other)
    if name == "needle_multikey":
        code = (
            "from lab.tests.eval.test_tasks import *\n"
            f"print(*(i.id for i in get_task({name!r}).items(tiny_tokenizer(), settings(load_text()))))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == found


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_are_consecutive_and_a_short_text_gives_fewer(tokenizer, text):
    items = get_task("kl").items(tokenizer, settings(text, window_tokens=100, limit=3))
    ids = [t for item in items for t in item.ids]
    assert ids == token_ids(tokenizer, text.text)[:300]
    short = SampleText(text.text[:250], "short", "")
    assert len(get_task("perplexity").items(tokenizer, settings(short, window_tokens=100))) == 2
    with pytest.raises(ModelError, match="the text has 250 tokens and a window takes 300"):
        get_task("kl").items(tokenizer, settings(short, window_tokens=300))
    with pytest.raises(ModelError, match="does not fit the model, which knows 64 positions"):
        get_task("kl").items(tokenizer, settings(text, window_tokens=100, positions=64))


# -- prompts of a length -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_prompts_have_the_length_and_cover_the_grid(name, tokenizer, text):
    items = get_task(name).items(tokenizer, settings(text))
    room = {"kv_retrieval": 90, "common_words": 300}.get(name, 0)
    for item in items:
        length = item.group["length"]
        assert length - room <= len(token_ids(tokenizer, item.context)) <= length
        assert item.max_new_tokens > 0
    cells = {tuple(item.group.values()) for item in items}
    assert len(cells) == (6 if "depth" in items[0].group else 2)


@pytest.mark.parametrize(("name", "keys"), [("needle", 1), ("needle_multikey", 4)])
def test_a_needle_stands_at_its_depth_and_its_key_is_asked_for(name, keys, tokenizer, text):
    for item in get_task(name).items(tokenizer, settings(text)):
        body, ask = item.context.split("\nWhat is the special magic number")
        assert body.count("One of the special magic numbers for ") == keys
        key = ask.split(" for ")[1].split(" mentioned")[0]
        needle = f"One of the special magic numbers for {key} is: {item.answers[0]}."
        assert body.count(needle) == 1
        hay = re.sub(r" ?One of the special magic numbers for \w+ is: \d+\.", "", body.replace(needle, "^"))
        at = hay.index("^") / len(hay)
        assert at == pytest.approx(item.group["depth"], abs=0.15)
        assert len(item.answers[0]) == 7


def test_a_haystack_begins_again_where_it_ends(tokenizer):
    haystack = Haystack(tokenizer, "abc def ")
    assert haystack.piece(6, 12) == "f abc def ab"
    assert haystack.piece(14, 2) == "f "


def test_a_prompt_without_room_for_the_question_is_refused(tokenizer, text):
    for name in GENERATED:
        with pytest.raises(ModelError, match=rf"{name}: .*pass longer --lengths"):
            get_task(name).items(tokenizer, settings(text, lengths=(100,)))
    with pytest.raises(ModelError, match="1900 tokens of a prompt do not fit the model, which knows 1000 positions"):
        get_task("needle").items(tokenizer, settings(text, positions=1000))
    with pytest.raises(SpecError, match=r"depth 2 is not in 0\.\.1"):
        get_task("needle").items(tokenizer, settings(text, depths=(2,)))


def test_default_lengths_are_those_that_fit_the_model(tokenizer, text):
    items = get_task("needle").items(tokenizer, settings(text, lengths=(), positions=1100, limit=2))
    assert {item.group["length"] for item in items} == {1024}
    with pytest.raises(ModelError, match="the model knows 512 positions; pass --lengths"):
        get_task("needle").items(tokenizer, settings(text, lengths=(), positions=512))


def test_a_length_that_no_prompt_has_is_missed_by_the_least(tokenizer):
    assert len(fitted("t", tokenizer, 50, lambda m, shift: "ab" * m, 10)) == 50
    assert len(fitted("t", tokenizer, 51, lambda m, shift: "ab" * m, 10)) == 50


@pytest.mark.parametrize("most", [0, 1, 5, 1000])
@pytest.mark.parametrize("length", [0, 1, 2, 17, 64])
def test_the_largest_that_fits_is_found(tokenizer, length, most):
    wanted = max([m for m in range(most + 1) if 3 * m + 1 <= length], default=-1)
    assert largest(tokenizer, length, lambda m: "x" * (3 * m + 1), most) == wanted


def test_keys_and_values_are_asked_for_at_their_depth(tokenizer, text):
    for item in get_task("kv_retrieval").items(tokenizer, settings(text)):
        head, ask = item.context.split("\n\nKey: ")
        pairs = json.loads(head.split("JSON data:\n")[1])
        key = json.loads(ask.split("\n")[0])
        assert pairs[key] == item.answers[0]
        assert list(pairs).index(key) == round(item.group["depth"] * (len(pairs) - 1))
        assert item.context.endswith('Corresponding value: "')


def test_key_value_prompts_of_one_length_have_exactly_that_many_tokens(text):
    """Where records differ in tokens: pairs of letters are one token here."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "abcdef" for b in "abcdef"]
    vocabulary = {s: i for i, s in enumerate([*symbols, *("".join(pair) for pair in merges)])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    items = get_task("kv_retrieval").items(tokenizer, settings(text, limit=12))
    assert [len(token_ids(tokenizer, item.context)) for item in items] == [item.group["length"] for item in items]
    for item in items:
        pairs = json.loads(item.context.split("\n\nKey: ")[0].split("JSON data:\n")[1])
        assert item.answers[0] in pairs.values()
        assert all(str(uuid.UUID(text)) == text for pair in pairs.items() for text in pair)


def test_key_value_records_of_a_file_are_used_where_it_is_named(tokenizer, text, tmp_path):
    record = {"ordered_kv_records": [[f"key{i}", f"value{i}"] for i in range(40)]}
    path = tmp_path / "kv-retrieval-40.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    task = get_task("kv_retrieval")
    assert task.source(settings(text)) is None
    assert task.source(settings(text, data={"kv_retrieval": tmp_path})).name == path.name
    given = settings(text, data={"kv_retrieval": path}, lengths=(900,))
    assert task.source(given).name == path.name
    items = task.items(tokenizer, given)
    assert all(item.answers[0].startswith("value") for item in items)
    for content, said in (
        ('{"ordered_kv_records": [["a", "b"]]}', "record 1: fewer than two pairs; expected JSON lines"),
        ('\n{"a": 1}', "record 1: no 'ordered_kv_records'; expected"),
        ("not json", "record 1: Expecting value"),
        ("", "holds no records"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(FormatError, match=rf"kv_retrieval: .*bad.jsonl.* {said}"):
            task.items(tokenizer, settings(text, data={"kv_retrieval": tmp_path / "bad.jsonl"}))
    with pytest.raises(KVError, match=r"kv_retrieval: .*gone cannot be read"):
        task.source(settings(text, data={"kv_retrieval": tmp_path / "gone"}))


def test_variables_form_a_chain(tokenizer, text):
    for item in get_task("variable_tracking").items(tokenizer, settings(text)):
        names = list(item.answers)
        value = item.context.rsplit("assigned the value ", 1)[1].split(",")[0]
        for name, set_to in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False):
            assert item.context.count(f"VAR {name} = {set_to}.") == 1
        places = [item.context.index(f"VAR {name} =") for name in names]
        assert places == sorted(places)


def test_common_words_are_the_most_common(tokenizer, text):
    from collections import Counter

    for item in get_task("common_words").items(tokenizer, settings(text)):
        listed = item.context.split("most often.\n")[1].split("\nQuestion")[0].split(" ")
        assert listed[::2] == [f"{i}." for i in range(1, len(listed) // 2 + 1)]
        counted = Counter(listed[1::2])
        assert {word for word, _ in counted.most_common(10)} == set(item.answers)
        (tenth, eleventh) = (n for _, n in counted.most_common(11)[9:])
        assert tenth > eleventh
    with pytest.raises(ModelError, match=r"the text has 2 different words of 4 to 9 letters"):
        get_task("common_words").items(tokenizer, settings(SampleText("some text", "t", "")))


# -- scores ------------------------------------------------------------------------------------------------------------


def test_answers_are_scored_by_what_they_hold():
    needle = Item("needle", "i", "answer", answers=("1234567",))
    task = get_task("needle")
    assert task.score(needle, " 1234567") == {"recall": (1.0, 1.0), "prefix": (1.0, 1.0)}
    assert task.score(needle, " 1299") == {"recall": (0.0, 1.0), "prefix": (2 / 7, 1.0)}
    assert task.score(needle, "the number 1234567") == {"recall": (1.0, 1.0), "prefix": (0.0, 1.0)}
    listing = Item("variable_tracking", "i", "answer", answers=("ABCDE", "FGHIJ"))
    task = get_task("variable_tracking")
    assert task.score(listing, " FGHIJ, XABCDE, and FGHIJ")["recall"] == (1.0, 2.0)


def test_the_page_names_every_task_with_its_data_and_defaults():
    page = (Path(__file__).parents[3] / "docs/evaluate.md").read_text()
    for name in task_names():
        assert f"`{name}`" in page
    limits = {name: get_task(name).default_limit for name in task_names()}
    assert {limits[n] for n in ("perplexity", "kl")} == {10}
    assert {limits[n] for n in GENERATED} == {30}
