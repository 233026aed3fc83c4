"""Speculative decoding: tokens are those of plain decoding, however many drafts are accepted or rejected."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import packedkv
from packedkv.integrations.vllm.servable import page_step
from tests.integrations.test_serving import refusal
from tests.serve.engines import Biased, engine, generate, layers, metric, prompts, save_model
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


SCALE = 0.3
"""Of random weights: large enough that what a head proposes depends on all it reads."""


def _layer(
    config: Any, prefix: str, inputs: int, generator: torch.Generator, *, biases: bool
) -> dict[str, torch.Tensor]:
    """Weights of a decoder layer that attends over ``inputs`` channels."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = {
        "self_attn.q_proj.weight": (queries, inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
        "self_attn.o_proj.weight": (config.hidden_size, queries),
        "mlp.gate_proj.weight": (config.intermediate_size, config.hidden_size),
        "mlp.up_proj.weight": (config.intermediate_size, config.hidden_size),
        "mlp.down_proj.weight": (config.hidden_size, config.intermediate_size),
    }
    if biases:
        shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", queries), ("k", keys), ("v", keys))}
    found = {prefix + name: SCALE * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return found | {f"{prefix}{name}.weight": torch.ones(config.hidden_size) for name in ("post_attention_layernorm",)}


def save_eagle(folder: Path, config: Any, kind: str) -> Path:
    """Write a head for a Llama's config: ``eagle`` reads the last hidden states, ``eagle3`` those of three layers."""
    generator, size = torch.Generator().manual_seed(5), config.hidden_size
    third = kind == "eagle3"
    weights = _layer(config, "layers.0.", 2 * size if third else size, generator, biases=False)
    weights["fc.weight"] = SCALE * torch.randn(size, (3 if third else 2) * size, generator=generator)
    if third:
        weights |= {
            f"{name}.weight": torch.ones(size) for name in ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm")
        }
        weights["lm_head.weight"] = SCALE * torch.randn(config.vocab_size, size, generator=generator)
    about = config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights, folder / "model.safetensors")
    return folder


def add_mtp(folder: Path, config: Any) -> Path:
    """Make a Qwen2 on disk a MiMo: the same model with a layer that predicts one token more."""
    generator, size, name = torch.Generator().manual_seed(5), config.hidden_size, "model.mtp_layers.0."
    weights = load_file(folder / "model.safetensors") | _layer(config, name, size, generator, biases=True)
    weights[f"{name}input_proj.weight"] = SCALE * torch.randn(size, 2 * size, generator=generator)
    for norm in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        weights[f"{name}{norm}.weight"] = torch.ones(size)
    about = json.loads((folder / "config.json").read_text())
    about |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


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
