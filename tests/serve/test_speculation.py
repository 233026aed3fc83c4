"""Speculative decoding: drafts, accepted and rejected, do not change which tokens a request gets."""

from dataclasses import replace
from typing import Any

import pytest

import packedkv
from packedkv.errors import KVError
from packedkv.integrations.vllm.servable import page_step
from tests.integrations.served import refusal
from tests.serve.engines import engine, generate, metric, prompts
from tests.serve.test_engine import SERVED

IDS = [[*own, *own[:20], *own[:9]] for own in prompts(40, 27, 33)]
"""Prompts that repeat themselves, so that n-grams are found."""
NEW = 24
DRAFTS = 3
EVERY_RUN = ("saw-int4", "kivi-2")
GROUPS: dict[str, dict[str, Any]] = {"kivi-2": {"window": 0}, "innerq-base:norm=false": {"window": 0, "sink": 0}}
"""Each kind of drafts takes an engine; the others are nightly."""
KINDS = ("wrong", "itself", "n-gram")


def others() -> dict[str, dict[str, Any]]:
    """The presets that a server takes without a file of constants, beside those above; ghost: ``test_means``."""
    names = [f"{name}:norm=false" if name.startswith("innerq") else name for name in packedkv.presets()]
    bare = {"window": 0, "sink": 0}
    found = {name: bare for name in names if not refusal(replace(packedkv.get(name), **bare), 64)}
    return {name: given for name, given in found.items() if name not in SERVED | GROUPS}


@pytest.fixture(scope="module")
def draft(saved: Any) -> str:
    """Another random model: almost all that it proposes is rejected."""
    return str(saved("llama-mqa").folder)


@pytest.mark.parametrize(
    ("preset", "kinds"),
    [
        *((p, ("wrong", "n-gram")) for p in EVERY_RUN),
        *(pytest.param(p, KINDS, marks=pytest.mark.nightly) for p in (*SERVED, *GROUPS)),
    ],
    ids=str,
)
def test_speculation_is_plain_decoding(preset: str, kinds: tuple[str, ...], llama: Any, draft: str) -> None:
    """By n-grams, a draft model that is mostly wrong, and a draft model that is the model itself in 16 bit."""
    given = {"preset": preset, **(SERVED | GROUPS)[preset]}
    sizes = {"block_size": 32 if preset in GROUPS else 16, "max_num_batched_tokens": 64}
    with engine(llama.folder, given, **sizes) as llm:
        want = generate(llm, IDS, NEW)
    options = {
        "wrong": {"method": "draft_model", "model": draft},
        "itself": {"method": "draft_model", "model": str(llama.folder)},
        "n-gram": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
    }
    for kind in kinds:
        speculative = {"num_speculative_tokens": DRAFTS, **options[kind]}
        with engine(llama.folder, given, **sizes, speculative_config=speculative) as llm:
            assert generate(llm, IDS, NEW) == want, kind
            drafted, accepted = (metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
            assert drafted > accepted, kind  # some were rejected
            assert accepted > 0 or kind == "wrong", kind


@pytest.mark.nightly
@pytest.mark.parametrize("preset", others())
def test_rejected_drafts_leave_nothing(preset: str, llama: Any, draft: str) -> None:
    """Every other preset, with a draft model that is mostly wrong: a rejected token's place is written again."""
    given, block = {"preset": preset, **others()[preset]}, page_step(packedkv.get(preset))
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFTS}
    with engine(llama.folder, given, block_size=block) as llm:
        want = generate(llm, IDS, NEW)
    with engine(llama.folder, given, block_size=block, speculative_config=speculative) as llm:
        assert generate(llm, IDS, NEW) == want
        drafted, accepted = (metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
        assert drafted > accepted + NEW


@pytest.mark.parametrize(
    ("given", "drafts", "said"),
    [
        (
            {"preset": "saw-int4", "draft": "kivi-2:window=0"},
            2,
            r'the layers of a draft model .* give "draft" a preset',
        ),
        ({"preset": "kivi-2", "window": 0}, 32, r"32 tokens together, and a request may have fewer drafts than that"),
    ],
)
def test_drafts_that_groups_do_not_take(given: dict[str, Any], drafts: int, said: str, llama: Any) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    with pytest.raises(KVError, match=said), engine(llama.folder, given, speculative_config=speculative):
        pass
