"""A preset that breaks on the model's key biases: the engine does not start, unless it is told to."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from packedkv.errors import BrokenPresetError, KVError, UnsupportedError
from tests.serve.engines import WORDS, engine, generate, layers, prompts, save_model
from tests.test_key_bias import with_biases


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 on disk with a bias in a slowly turning channel of its keys."""
    folder = tmp_path_factory.mktemp("biased")
    model = save_model(folder, "qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[61] = 400.0
            layer.self_attn.q_proj.weight.mul_(4)
    model.save_pretrained(folder)
    return folder


def test_it_is_refused_at_the_start(one: Path) -> None:
    sentence = (
        r"packedkv: saw-int4:mean=none breaks on the key biases of .*channel 61, 400 .*'saw-int4:mean=pre'.*"
        r"'kivi-4:window=0'.*\"probe\": \"warn\""
    )
    with pytest.raises(BrokenPresetError, match=sentence), engine(one, {"preset": "saw-int4:mean=none"}):
        pass


@pytest.mark.parametrize(
    "options",
    [{"preset": "saw-int4:mean=none", "probe": "warn"}, {"preset": "kivi-4", "window": 0}],
    ids=lambda options: str(options["preset"]),
)
def test_it_starts_when_told_and_what_holds_starts(options: dict[str, Any], one: Path) -> None:
    with engine(one, options, max_num_batched_tokens=64) as llm:
        assert len(generate(llm, prompts(40))[0]) > 0


# -- attention modules of other forms ----------------------------------------------------------------------------------

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2": ({"n_head": 2}, "post"),  # learned positions; called with states alone
    "Starcoder2": ({"num_attention_heads": 2, "num_key_value_heads": 1}, "pre"),  # of the Transformers backend
}


@pytest.fixture(scope="module", params=FORMS)
def formed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A model with large key biases, and a bias of the norm before them."""
    changed, kind = FORMS[request.param]
    made = with_biases(request.param, vocab_size=WORDS, **changed)
    folder = tmp_path_factory.mktemp(request.param)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("ln_1.bias", "input_layernorm.bias")):
                weight.normal_()
    made.save_pretrained(folder)
    return kind, made, folder


def true_means(made: Any) -> list[torch.Tensor]:
    """Keys of a state of zeros behind the norm, layer by layer: its bias, through the projection, and the keys' own."""
    found = []
    with torch.no_grad():
        for block in made.base_model.h if hasattr(made.base_model, "h") else made.base_model.layers:
            before = block.ln_1 if hasattr(block, "ln_1") else block.input_layernorm
            y = before.bias[None]
            found.append(block.attn.c_attn(y)[:, 128:256] if hasattr(block, "attn") else block.self_attn.k_proj(y))
    return found


def test_the_weights_give_the_mean_of_any_attention(formed: tuple[str, Any, Path]) -> None:
    kind, made, folder = formed
    with engine(folder, {"preset": "int-8"}, max_num_batched_tokens=16, block_size=16) as llm:
        packed = [layer.impl.packed for layer in layers(llm).values()]
        assert {(own.site.mean.kind, own.site.mean.source) for own in packed} == {(kind, "weights")}
        for own, mean in zip(packed, true_means(made), strict=True):
            assert (own.site.mean.given.flatten() - mean.flatten()).norm() < 0.02 * mean.norm()
        ids = prompts(40, 2, 33)
        found = generate(llm, ids)
        assert [generate(llm, [own]) for own in ids] == [[own] for own in found]


def named(text: str) -> list[str]:
    return re.findall(r"'([a-z0-9_:=,-]+)'", text.partition(" cannot be followed")[2] or text.partition(" Use ")[2])


def test_advice_names_what_starts(formed: tuple[str, Any, Path]) -> None:
    """Both refusals: a mean that cannot be followed, and a preset that breaks; blocks of 16 are too small for some."""
    kind, _, folder = formed
    asked = "saw-int4:mean=pre" if kind == "post" else "saw-int4:mean=none"
    with pytest.raises(KVError) as error, engine(folder, {"preset": asked}, block_size=16):
        pass
    assert isinstance(error.value, UnsupportedError if kind == "post" else BrokenPresetError)
    assert str(error.value).startswith(f"packedkv: {asked}")
    assert named(str(error.value)) == [f"saw-int4:mean={kind}", "octopus-4:window=0", "int-8"]


@pytest.mark.nightly
@pytest.mark.parametrize("given", [{}, {"block_size": 16}], ids=["any blocks", "small blocks"])
def test_all_that_advice_names_starts(given: dict[str, Any], formed: tuple[str, Any, Path]) -> None:
    _, _, folder = formed
    with pytest.raises(BrokenPresetError) as error, engine(folder, {"preset": "saw-int4:mean=none"}, **given):
        pass
    found = named(str(error.value))
    assert len(found) >= 3
    for spec in found:
        with engine(folder, {"preset": spec}, **given) as llm:
            assert len(generate(llm, prompts(9), 2)[0]) == 2
