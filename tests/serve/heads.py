"""Heads that draft for a tiny model from its hidden states, with random weights: EAGLE, EAGLE 3 and MTP."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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
