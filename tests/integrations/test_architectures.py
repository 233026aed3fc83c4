"""Every architecture of transformers equals ``DynamicCache`` within the loss of 16-bit storage, or is refused."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ

from packedkv.errors import FitError, ShapeError, UnsupportedError
from packedkv.integrations.transformers import cache_for, load_cache
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.fold import fold_key_norms
from tests.conftest import tiny_model

_NAMES: dict[int, str] = {
    512: "n_positions n_ctx max_position_embeddings max_target_positions max_source_positions",
    128: "vocab_size vocab_size_per_layer_input mamba_d_ssm",
    64: (
        "hidden_size d_model n_embd dim word_embed_proj_dim embedding_size decoder_hidden_size "
        "cross_attention_hidden_size intermediate_size ffn_dim d_ff n_inner decoder_ffn_dim encoder_ffn_dim "
        "ffn_hidden_size dense_intermediate_size intermediate_size_mlp lru_width dim_ff dff"
    ),
    32: (
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size head_dim global_head_dim swa_head_dim "
        "v_head_dim kv_channels attention_head_dim query_pre_attn_scalar mamba_d_head mamba_head_dim"
    ),
    16: "d_kv linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size dim_head",
    12: "sliding_window attention_chunk_size window_size",
    8: "hidden_size_per_layer_input rotary_dim laurel_rank mamba_dt_rank adapter_rank lora_rank",
    4: (
        "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
        "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads num_local_experts num_experts n_routed_experts moe_num_experts "
        "linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads"
    ),
    2: (
        "num_decoder_layers encoder_layers decoder_layers num_key_value_heads num_global_key_value_heads "
        "swa_num_key_value_heads num_kv_heads kv_n_heads multi_query_group_num num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k top_k_experts altup_num_inputs linear_num_key_heads eos_token_id"
    ),
    1: (
        "n_group topk_group num_expert_groups num_limited_groups n_shared_experts moe_num_shared_experts "
        "first_k_dense_replace num_memory_blocks n_groups mamba_n_groups mamba_ngroups bos_token_id "
        "decoder_start_token_id"
    ),
    0: "num_kv_shared_layers prompt_length encoder_no_repeat_ngram_size no_repeat_ngram_size pad_token_id",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES["hidden_dropout"] = 0.0
"""Sizes of any config that has the field."""

MOST = 20_000_000
"""Parameters of a model that is built: what is larger has parts that ``SIZES`` does not reach (an audio tower)."""
HALVES = ("text_config", "decoder", "encoder")
"""Configs inside a config that are shrunken as well."""


_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32, **_ROPE},
    "hunyuan_v1_moe": {"head_dim": 32, **_ROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], **_ROPE},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 32, **_ROPE},
    "mimo_v2_flash": {"v_head_dim": 16},
    "nemotron": {**_ROPE, "num_key_value_heads": 2, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single architectures need beside ``SIZES``."""


class NotBuilt(Exception):
    """Transformers makes no small model of this architecture from these sizes."""


def small_config(kind: str, **changed: Any) -> Any:
    """The default config of an architecture with sizes of ``SIZES``."""
    default = CONFIG_MAPPING[kind]()
    return type(default)(**{**_shrunken(default), **CHANGES.get(kind, {}), **changed})


def _shrunken(config: Any) -> dict[str, Any]:
    stated = copy.deepcopy(config.to_dict())
    names = {*stated, *getattr(config, "attribute_map", {})}
    small = {name: size for name, size in SIZES.items() if name in names and stated.get(name, size) is not None}
    layers = next((small[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers") if n in small), 4)
    for name, value in stated.items():
        if name.endswith(("layer_types", "layers_block_type", "_pattern", "layers_types")) and isinstance(value, list):
            kinds = list(dict.fromkeys(value))  # one of each kind first
            small[name] = (kinds + [value[0]] * layers)[:layers]
        elif name in HALVES and hasattr(config, name) and getattr(config, name) is not None:
            half = getattr(config, name)
            small[name] = type(half)(**_shrunken(half)).to_dict() if not isinstance(half, dict) else half
    rope = stated.get("rope_parameters")
    if isinstance(rope, dict):
        small["rope_parameters"] = rope
    gone = {*small, "model_type", "transformers_version", "dtype"}
    keep = {name: x for name, x in stated.items() if name not in gone and isinstance(x, bool | str | float)}
    return {**keep, **small}


def small_model(kind: str, **changed: Any) -> Any:
    """A random model whose tokens differ; raises ``NotBuilt``."""
    auto = AutoModelForSeq2SeqLM if kind in SEQ2SEQ else AutoModelForCausalLM
    try:
        config = small_config(kind, **changed)
        with torch.device("meta"):
            count = sum(p.numel() for p in auto.from_config(config).parameters())
        if count > MOST:
            raise NotBuilt(f"{kind}: {count} parameters")
        torch.manual_seed(1)
        model = auto.from_config(config, dtype=torch.float32).eval()
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{kind}: {type(error).__name__}: {error}") from error
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in name and "lm_head" not in name:
                weight.mul_(2)
    given = model.generation_config
    given.pad_token_id, given.eos_token_id, given.bos_token_id = 0, None, 1
    given.forced_eos_token_id = None
    if config.is_encoder_decoder:
        given.decoder_start_token_id = 1
    return model


LOSS = 0.05
"""Largest difference of a logit, in standard deviations of the logits: float32 numbers are stored in 16 bit."""
TURNS = (9, 1, 1, 6, 1, 1)
"""Tokens of each forward pass: a prompt, steps, a second turn, steps."""


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, count), generator=torch.Generator().manual_seed(seed))


@contextmanager
def attending(model: Any, attention: str | None) -> Iterator[None]:
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation(attention or own)
        yield
    finally:
        model.set_attn_implementation(own)


def turns(model: Any, cache: Any, padding: int) -> list[Tensor]:
    """Logits of the newest token after each pass of ``TURNS``, for two sequences of which one has left padding."""
    ids, mask = tokens(2, sum(TURNS), 3), torch.ones(2, sum(TURNS), dtype=torch.long)
    found, done = [], 0
    given: dict[str, Any] = {}
    name = "input_ids"
    if model.config.is_encoder_decoder:
        source, seen = tokens(2, 11, 4), torch.ones(2, 11, dtype=torch.long)
        if padding:
            seen[1, -padding:] = 0
        given = {"encoder_outputs": model.get_encoder()(source, attention_mask=seen), "attention_mask": seen}
        name = "decoder_input_ids"
    elif padding:
        mask[1, :padding] = 0
    for count in TURNS:
        own = {} if given else {"attention_mask": mask[:, : done + count]}
        if own:
            own["position_ids"] = (own["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, done:]
        out = model(**{name: ids[:, done : done + count]}, **given, **own, **passing(model, cache), use_cache=True)
        found.append(out.logits[:, -1])
        done += count
    return found


def generated(model: Any, cache: Any, **options: Any) -> list[Tensor]:
    """Logits of each generated token; of beams their scores."""
    out = model.generate(
        tokens(1, 9, 5).repeat(1, 3), **passing(model, cache), max_new_tokens=6, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return [out.sequences_scores] if "num_beams" in options else list(out.logits)


SITUATIONS: dict[str, Callable[[Any, Any], list[Tensor]]] = {
    "no padding": partial(turns, padding=0),
    "padding": partial(turns, padding=4),
    "greedy": generated,
    "prompt look-up": partial(generated, prompt_lookup_num_tokens=3),
    "beams": partial(generated, num_beams=3, output_scores=True),
}


def plain_cache(model: Any) -> Any:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache())
    return DynamicCache(config=config)


def alike(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest difference in standard deviations, up to the first token that differs because two were nearly equal."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=False):
        if a.shape != b.shape:
            return torch.inf
        worst = max(worst, float((a - b).abs().max() / b.std()))
        if not torch.equal(a.argmax(-1), b.argmax(-1)):
            break
    return worst


def check(kind: str, spec: str, attention: str | None) -> str:
    """Compare a packed cache with ``DynamicCache`` in each situation; return how the model was served."""
    model = small_model(kind)
    wanted: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for name, run in SITUATIONS.items():
            with suppress(Exception):  # transformers itself does not serve the model so
                wanted[name] = run(model, plain_cache(model))
    if not wanted:
        raise NotBuilt(f"{kind} does not run")
    with torch.no_grad(), attending(model, attention):
        try:
            way = cache_for(model, spec, probe=False).options["attention"]
        except (UnsupportedError, ShapeError) as error:
            return f"refused: {error}"
        for name, want in wanted.items():
            got = SITUATIONS[name](model, cache_for(model, spec, probe=False))
            if spec == "dense":
                off = float((got[0] - want[0]).abs().max()) if name == "beams" else alike(got, want)
                assert off < LOSS, (kind, name, off)
    return str(way)


SAMPLE = {
    "bart": "fused",  # some sequences hide a part of the encoder's output
    "t5gemma": "fused",  # its generate makes the cross-attention's cache anew
    "prophetnet": "decoded",  # the decoder's layers are not num_hidden_layers
    "nllb-moe": "refused",
    "mllama": "fused",
    "diffllama": "decoded",
    "jetmoe": "decoded",
    "doge": "decoded",
    "gpt2": "fused",  # casts cached tensors in a branch that is an option
    "mimo_v2_flash": "decoded",
    "gpt_neox_japanese": "decoded",  # takes views of what the cache returns
    "moshi": "fused",
    "llama4_text": "fused",  # chunked attention
    "lfm2": "fused",  # convolutions
    "qwen3_next": "fused",
}
"""How each is served to a model that attends with ``packedkv``."""


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_equals_a_plain_cache_or_is_refused(kind: str) -> None:
    assert check(kind, "dense", "packedkv").startswith(SAMPLE[kind])


@pytest.mark.nightly
@pytest.mark.parametrize(("spec", "attention"), [("dense", None), ("dense", "packedkv"), ("saw-int4", "packedkv")])
@pytest.mark.parametrize("kind", sorted({*CAUSAL, *SEQ2SEQ}))
def test_every_architecture_equals_a_plain_cache_or_is_refused(kind: str, spec: str, attention: str | None) -> None:
    try:
        check(kind, spec, attention)
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("attention", ["streamed", "fused"])
def test_a_model_that_works_on_cached_tensors_is_refused_by_the_expression(attention: str) -> None:
    model = small_model("diffllama")
    with attending(model, "packedkv"):
        with pytest.raises(
            UnsupportedError, match=r"DiffLlamaAttention uses `torch.chunk\(value_states, 2, dim=1\)` of"
        ):
            cache_for(model, "saw-int4", attention=attention)  # type: ignore[arg-type]
        assert "torch.chunk" in cache_for(model, "saw-int4").report()["unfused"]


# -- wrappers, and caches of another model -----------------------------------------------------------------------------


class Adapted(nn.Module):
    """What PEFT's models offer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = model

    def get_base_model(self) -> nn.Module:
        return self.base


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "peft": Adapted,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda model: torch.compile(Adapted(model), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_model_inside_a_wrapper_is_taken(tiny: Any, tmp_path: Path, name: str) -> None:
    model = tiny("qwen2")
    wrapped = WRAPPERS[name](model)
    cache = cache_for(wrapped, "kivi-4:mean=pre")
    with torch.no_grad():
        model(tokens(1, 40), **passing(wrapped, cache))
    assert cache.plan.name == "Qwen2ForCausalLM"
    cache.save(tmp_path / "cache.safetensors")
    assert load_cache(tmp_path / "cache.safetensors", wrapped).get_seq_length() == 40
    with pytest.raises(FitError, match="params hold no key norms"):  # not that it is no model
        fold_key_norms(wrapped, {})


@pytest.mark.parametrize("attention", ["sdpa", "packedkv"])
def test_a_cache_of_a_model_with_fewer_layers_is_refused(attention: str) -> None:
    two, three = (tiny_model("llama-gqa", num_hidden_layers=n) for n in (2, 3))
    with torch.no_grad(), attending(two, attention), attending(three, attention):
        cache = cache_for(two, "saw-int4")
        with pytest.raises(UnsupportedError, match="made for LlamaForCausalLM with 2 layers, and the model has more"):
            three(tokens(1, 20), **passing(three, cache))


@pytest.mark.parametrize(("attention", "name"), [("sdpa", "llama-gqa"), ("packedkv", "llama-gqa"), ("sdpa", "mistral")])
def test_more_tokens_than_max_len_are_refused(tiny: Any, attention: str, name: str) -> None:
    model = tiny(name)
    with torch.no_grad(), attending(model, attention):
        cache = cache_for(model, "saw-int4", max_len=20)
        model(tokens(1, 19), **passing(model, cache))
        model(tokens(1, 1), **passing(model, cache))
        with pytest.raises(ShapeError, match=r"token 21 does not fit the .*cache of max_len=20"):
            model(tokens(1, 1), **passing(model, cache))
        assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral"])
def test_a_prompt_that_the_cache_holds_already_is_refused_in_words(tiny: Any, name: str) -> None:
    """A pipeline called twice with one cache: transformers leaves no token of the second prompt."""
    model = tiny(name)
    cache = cache_for(model, "saw-int4")
    with torch.no_grad():
        model(tokens(1, 60), **passing(model, cache))
    with pytest.raises(UnsupportedError, match=r"no new tokens: the cache holds 60, .* call cache.reset\(\)"):
        generated(model, cache)
    assert cache.get_seq_length() == 60


# -- autocast, copies of K and V ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "attention"),
    [
        ("llama-gqa", "saw-int4", "eager"),
        ("llama-gqa", "dense", "packedkv"),
        ("qwen3", "kivi-4", "packedkv"),
        ("gemma3", "ghost-4", "packedkv"),
        ("gemma3", "dense", "eager"),
        ("gpt-oss", "saw-int4", "packedkv"),
    ],
)
def test_autocast_around_a_float32_model(tiny: Any, name: str, spec: str, attention: str) -> None:
    """RoPE leaves keys in float32 beside values in bfloat16; both are stored as attention computes, in bfloat16."""
    model = tiny(name)
    with torch.no_grad(), attending(model, attention), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = cache_for(model, spec, probe=False), plain_cache(model)
        for count in (30, 1, 1):
            got, want = (model(tokens(2, count), **passing(model, c)).logits[:, -1].float() for c in (ours, theirs))
            limit = 0.1 if spec == "dense" and name != "gpt-oss" else 1.0  # its router may choose another expert
            assert (got - want).square().mean().sqrt() < limit * want.std()
    assert ours.layer_caches[0].dtype == torch.bfloat16


@pytest.mark.parametrize("attention", ["sdpa", "packedkv"])
def test_keys_and_values_are_copied_out_of_the_layers(tiny: Any, attention: str) -> None:
    model = tiny("mistral")
    with torch.no_grad(), attending(model, attention):
        cache, plain = cache_for(model, "dense"), plain_cache(model)
        assert cache.layers[0].keys is None
        for held in (cache, plain):
            model(tokens(2, 20), **passing(model, held))
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(ours.values[1], theirs.values[1], rtol=1e-3, atol=1e-3)
