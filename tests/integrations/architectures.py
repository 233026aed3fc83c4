"""Small random models of every architecture that transformers can build from a shrunken default config."""

import copy
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "decoder_hidden_size": 64,
    "cross_attention_hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "d_kv": 16,
    "n_inner": 64,
    "n_positions": 512,
    "n_ctx": 512,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_kv_heads": 2,
    "kv_n_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "swa_head_dim": 32,
    "v_head_dim": 32,
    "kv_channels": 32,
    "attention_head_dim": 32,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "max_target_positions": 512,
    "max_source_positions": 512,
    "sliding_window": 12,
    "attention_chunk_size": 12,
    "window_size": 12,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "num_memory_blocks": 1,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "query_pre_attn_scalar": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 128,
    "n_mamba_heads": 4,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "lru_width": 64,
    "dim_head": 16,
    "dim_ff": 64,
    "dff": 64,
    "prompt_length": 0,
    "adapter_rank": 8,
    "lora_rank": 8,
    "encoder_no_repeat_ngram_size": 0,
    "no_repeat_ngram_size": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "hidden_dropout": 0.0,
}
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
