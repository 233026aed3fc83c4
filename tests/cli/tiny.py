"""A tiny random llama with a tokenizer of single bytes, a text for it, and two codecs that exist only for tests."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from packedkv.codec import NO_SAMPLE, Codec, Dense, Params, Part, Payload, Sample, Site
from packedkv.layout import Field, Layout
from packedkv.models.loading import LoadedModel
from packedkv.scheme import KVScheme

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


@dataclass(frozen=True)
class Leaning(Codec):
    """fp16 keys over the root mean square of the queries' channels, largest of all layers scaled to 1."""

    drawing: bool = False

    @property
    def needs(self) -> frozenset[Part]:
        return frozenset({"queries"})

    def layout(self, head_dim: int) -> Layout:
        return Layout(head_dim, 1, (Field("data", "float16", (head_dim,)),), nominal_bits=16.0)

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        b, hq, n, d = sample.queries.shape
        folded = sample.queries.float().reshape(b, site.num_heads, hq // site.num_heads * n, d)
        params = {"lean": folded.square().mean(2).sqrt().clamp_min(1e-3)}
        if self.drawing:
            draws = [torch.rand(3, generator=site.generator(h)) for h in range(site.num_heads)]
            params["draw"] = torch.stack(draws)[None]
        return params

    def settle(self, fitted: Sequence[Params]) -> list[Params]:
        top = torch.stack([params["lean"].amax() for params in fitted]).amax()
        return [{**params, "lean": params["lean"] / top, "place": torch.tensor([i])} for i, params in enumerate(fitted)]

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return x * params["lean"].unsqueeze(2)

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        return q / params["lean"].unsqueeze(2)

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        return x / params["lean"].unsqueeze(2)

    def encode(self, x: Tensor, params: Params) -> Payload:
        return {"data": x.half()}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return payload["data"].float()


def leaning(*, drawing: bool = False, dense_layers: int = 0) -> KVScheme:
    return KVScheme(key=Leaning(drawing), value=Dense(), dense_key_layers=dense_layers)


@dataclass(frozen=True)
class Corrupt(Codec):
    """Noise of the stored token's own strength."""

    def layout(self, head_dim: int) -> Layout:
        return Layout(head_dim, 1, (Field("data", "float16", (head_dim,)),), nominal_bits=16.0)

    def encode(self, x: Tensor, params: Params) -> Payload:
        return {"data": x.half()}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        x = payload["data"].float()
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
        return noise * x.square().mean(-1, keepdim=True).sqrt()


def corrupt() -> KVScheme:
    return KVScheme(key=Corrupt(), value=Corrupt())
