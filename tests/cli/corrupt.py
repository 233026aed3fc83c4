"""A codec that exists only for tests: it returns noise for what was stored. Scores read through it are chance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Payload
from packedkv.layout import Field, Layout
from packedkv.scheme import KVScheme


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
