"""A tiny random llama on disk with a tokenizer of single bytes, and a text for it."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from packedkv.models.loading import LoadedModel

TEXT = "The cache holds what attention reads, and every byte of it is counted. " * 20


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.3,  # as large as this, attention matters and compression shows
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_loaded(model: Any = None, name: str = "tiny") -> LoadedModel:
    return LoadedModel(model or tiny_llama(), tiny_tokenizer(), name, "made in the test")


def save_tiny(folder: Path) -> Path:
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def interrupted(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


def interrupting(whole: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, interrupted in its ``at``-th call."""
    calls = itertools.count(1)
    return lambda *args, **options: (interrupted if next(calls) == at else whole)(*args, **options)
