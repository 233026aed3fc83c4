"""Small random models of every architecture that transformers can build from a shrunken default config."""

import copy
from typing import Any

import torch

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


def causal_types() -> list[str]:
    """Architectures of ``AutoModelForCausalLM`` that are built of their own text config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def seq2seq_types() -> list[str]:
    """Architectures of ``AutoModelForSeq2SeqLM``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)


def small_config(kind: str, **changed: Any) -> Any:
    """The default config of an architecture with sizes of ``SIZES``."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    return type(default)(**{**_shrunken(default), **CHANGES.get(kind, {}), **changed})


def _shrunken(config: Any) -> dict[str, Any]:
    stated = copy.deepcopy(config.to_dict())
    names = {*stated, *getattr(config, "attribute_map", {})}
    small = {name: size for name, size in SIZES.items() if name in names and stated.get(name, size) is not None}
    layers = next((small[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers") if n in small), 4)
    for name, value in stated.items():
        if name.endswith(("layer_types", "layers_block_type", "_pattern", "layers_types")) and isinstance(value, list):
            small[name] = _shortened(value, layers)
        elif name in HALVES and hasattr(config, name) and getattr(config, name) is not None:
            half = getattr(config, name)
            small[name] = type(half)(**_shrunken(half)).to_dict() if not isinstance(half, dict) else half
    rope = stated.get("rope_parameters")
    if isinstance(rope, dict):
        small["rope_parameters"] = rope
    keep = {name: value for name, value in stated.items() if name not in small and _is_plain(name, value)}
    return {**keep, **small}


def _is_plain(name: str, value: Any) -> bool:
    return isinstance(value, bool | str | float) and name not in ("model_type", "transformers_version", "dtype")


def _shortened(value: list[Any], layers: int) -> list[Any]:
    """A list by layer of the first layers, with one of each kind."""
    kinds = list(dict.fromkeys(value))
    return (kinds + [value[0]] * layers)[:layers]


def small_model(kind: str, **changed: Any) -> Any:
    """A random model whose tokens differ; raises ``NotBuilt``."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if kind in seq2seq_types() else AutoModelForCausalLM
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
