"""What several papers' tables measure: Gaussian tensors, errors of reconstruction and of scores, bytes of a token."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from packedkv.codec import Codec, Site, roundtrip
from packedkv.registry import get


@dataclass(frozen=True)
class Fidelity:
    """Means over seeds: MSE of a coordinate, cosine, |score error|, 95th percentile over keys of a key's MSE."""

    mse: float
    cos: float
    ip: float
    tail95: float


def fidelity(codec: Codec, seeds: int, keys: int) -> Fidelity:
    """Encode and decode ``keys`` N(0, I) keys of 128 channels per seed, each seed with constants of its own.

    The score error is the mean over Gaussian queries q, taken exactly: ``E |<q, e>| = sqrt(2 / pi) |e|``. It holds for
    estimators that are linear in q, as all codecs' are. A paper that draws some queries instead has their lengths in
    its figures: 16 queries are 1.6 % uncertain, 64 are 0.8 %.
    """
    dim, total = 128, torch.zeros(4, dtype=torch.float64)
    for seed in range(seeds):
        k = torch.randn(1, 1, keys, dim, generator=torch.Generator().manual_seed(seed))
        k_hat = roundtrip(codec, k, codec.fit(Site(0, "key", 1, dim, seed)))
        squared = (k - k_hat).square().sum(-1).flatten()
        cosine = torch.nn.functional.cosine_similarity(k, k_hat, dim=-1).mean()
        score = math.sqrt(2 / math.pi) * squared.sqrt().mean()
        total += torch.stack([squared.mean() / dim, cosine, score, squared.quantile(0.95) / dim]).double()
    return Fidelity(*(total / seeds).tolist())


def token_bytes(spec: str, layers: int, kv_heads: int, dim: int) -> int:
    """Cache bytes of one token of a model, windows aside."""
    scheme = get(spec)
    per_head = sum(c.layout(dim).block_bytes / c.block_tokens for c in (scheme.key, scheme.value))
    return round(layers * kv_heads * per_head)


def printed_table(name: str) -> dict[str, list[float]]:
    """Read ``tables/NAME.csv``, a table as its paper prints it: label -> numbers, without the cells that are empty."""
    path = Path(__file__).parent / "tables" / f"{name}.csv"
    _, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    return {label: [float(cell) for cell in cells if cell] for label, *cells in rows}
