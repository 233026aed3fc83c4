"""A codec that exists only for tests: its constants need the model's queries, and its layers are settled together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Dense, Params, Part, Payload, Sample, Site
from packedkv.layout import Field, Layout
from packedkv.scheme import KVScheme


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
