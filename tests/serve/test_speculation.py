"""Speculative decoding: tokens are those of plain decoding, however many drafts are accepted or rejected."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import packedkv
from packedkv.integrations.vllm.servable import page_step
from tests.integrations.served import refusal
from tests.serve.biased import Biased
from tests.serve.engines import engine, generate, layers, metric, prompts, save_model
from tests.serve.heads import add_mtp, save_eagle
from tests.serve.test_engine import SERVED

IDS = [[*own, *own[:20], *own[:9]] for own in prompts(40, 27, 33)]
"""Prompts that repeat themselves, so that n-grams are found."""
NEW = 24
DRAFTS = 3
GROUPS: dict[str, dict[str, Any]] = {"kivi-2": {"window": 0}, "innerq-base:norm=false": {"window": 0, "sink": 0}}
NGRAMS = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def others() -> dict[str, dict[str, Any]]:
    """The presets that a server takes without a file of constants, beside those above."""
    names = [f"{name}:norm=false" if name.startswith("innerq") else name for name in packedkv.presets()]
    bare = {"window": 0, "sink": 0}
    found = {name: bare for name in names if not refusal(replace(packedkv.get(name), **bare), 64)}
    return {name: given for name, given in found.items() if name not in SERVED | GROUPS}


OTHERS = others()


@contextmanager
def drafting(folder: Path, given: Any, sizes: Any, speculative: Any, want: Any, ids: Any = IDS) -> Iterator[Any]:
    """An engine with drafts, which generates the wanted tokens."""
    speculative = {"num_speculative_tokens": DRAFTS, **speculative}
    with engine(folder, given, **sizes, speculative_config=speculative) as llm:
        assert generate(llm, ids, NEW) == want, speculative
        yield llm


def counted(llm: Any) -> tuple[float, float]:
    """Drafts of an engine, and how many of them were accepted."""
    return metric(llm, "spec_decode_num_draft_tokens"), metric(llm, "spec_decode_num_accepted_tokens")


@pytest.mark.parametrize(
    ("preset", "kinds"),
    [
        *((p, ("wrong", "n-gram")) for p in ("saw-int4", "kivi-2")),
        *(pytest.param(p, ("wrong", "itself", "n-gram"), marks=pytest.mark.nightly) for p in (*SERVED, *GROUPS)),
        *(pytest.param(p, ("wrong",), marks=pytest.mark.nightly) for p in OTHERS),
    ],
    ids=str,
)
def test_speculation_is_plain_decoding(preset: str, kinds: tuple[str, ...], llama: Any, saved: Any) -> None:
    """By n-grams, a draft model that is mostly wrong, and a draft model that is the model itself in 16 bit."""
    bare = {**OTHERS, **SERVED, **GROUPS}[preset]
    sizes = {"block_size": page_step(replace(packedkv.get(preset), **bare)), "max_num_batched_tokens": 64}
    with engine(llama.folder, {"preset": preset, **bare}, **sizes) as llm:
        want = generate(llm, IDS, NEW)
    options: dict[str, dict[str, Any]] = {
        "wrong": {"method": "draft_model", "model": str(saved("llama-mqa").folder)},
        "itself": {"method": "draft_model", "model": str(llama.folder)},
        "n-gram": NGRAMS,
    }
    for kind in kinds:
        with drafting(llama.folder, {"preset": preset, **bare}, sizes, options[kind], want) as llm:
            drafted, accepted = counted(llm)
            # a rejected token's place is written again
            assert drafted > accepted + (NEW if kind == "wrong" else 0), kind
            assert accepted > 0 or kind == "wrong", kind


@pytest.mark.nightly
def test_drafts_with_constants_of_a_file(biased: Biased, tmp_path: Path) -> None:
    """In blocks of the size that a server chooses, in which ghost's dense first tokens take a quarter bit a number."""
    ids = [[*own, *own[:20], *own[:9]] for own in prompts(40, 2, 33)]  # one is shorter than the dense first tokens
    biased.fitted("ghost-3", tmp_path / "fitted.safetensors")
    given = {"preset": "ghost-3", "params": str(tmp_path / "fitted.safetensors")}
    with engine(biased.folder, given) as llm:
        want = generate(llm, ids, NEW)
        cache = next(iter(layers(llm).values())).kv_cache
        assert cache.shape[2:] == (128, 2 * 64 * 3 // 8 + 2 * 4 * 64 * 2 // 128)
    with drafting(biased.folder, given, {}, NGRAMS, want, ids) as llm:
        drafted, accepted = counted(llm)
        assert drafted > accepted


@pytest.fixture(scope="module", params=["eagle", "eagle3", "mtp"])
def head(request: pytest.FixtureRequest, llama: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model and the options of a head that drafts from its hidden states, with random weights."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind == "mtp":
        config = save_model(folder, "qwen2", num_hidden_layers=6).config
        return add_mtp(folder, config), {"method": "mtp", "num_speculative_tokens": 1}
    return llama.folder, {"method": kind, "model": str(save_eagle(folder, llama.model.config, kind))}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [{"preset": "saw-int4"}, {"preset": "turboquant-4:sink=3", "draft": "int-8"}, {"preset": "kivi-2", "window": 0}],
    ids=str,
)
def test_a_head_changes_no_token(given: dict[str, Any], head: Any) -> None:
    """Prompts in chunks, together and again from the prefix cache; the head's layer is dense unless told otherwise."""
    folder, speculative = head
    ids, given = prompts(89, 56, 71), {**given, "probe": "off"}
    sizes = {"block_size": 32, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    with engine(folder, {name: x for name, x in given.items() if name != "draft"}, **sizes) as llm:
        want = generate(llm, ids, NEW)
    with drafting(folder, given, sizes, speculative, want, ids) as llm:
        assert generate(llm, ids, NEW) == want
        drafted, accepted = counted(llm)
        assert drafted > accepted + NEW
        assert metric(llm, "prefix_cache_hits") > 0
        *model, own = (layer.impl.packed.scheme for layer in layers(llm).values())
        assert str(own) == given.get("draft", "dense")
        assert len(model) == 6
        assert all(str(scheme).startswith(given["preset"].split(":")[0]) for scheme in model)
