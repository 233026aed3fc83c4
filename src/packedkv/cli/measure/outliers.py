"""K_max / K_median of a model's keys, layer by layer: the diagnosis of HQMQ's Fig. 7, as data."""

from typing import Any

import torch
from torch import Tensor

from packedkv.cli.measure import fidelity
from packedkv.cli.measure.perplexity import uncompressed
from packedkv.cli.measure.rows import Row
from packedkv.ops.quaternion import chunk_lengths, split_chunks
from packedkv.probe import outlier_ratio

TOP = 4
"""Channels named per layer."""
C = 3
"""A chunk of more than so many medians of its head is an outlier for Med3 (``packedkv.codecs.outliers``)."""


def key_outliers(model: Any, window: Tensor) -> list[Row]:
    """Run the uncompressed model over ``window [n]`` (token ids) and measure its keys after RoPE.

    Rows have, by head, ``above``: fewest and most chunks of a token that are longer than ``C`` medians; ``largest`` is
    that of |k|; ``channels`` are the strongest by root mean square, over the median channel's.
    """
    with fidelity.record(model, 1) as records:
        uncompressed(model, window)
    return [outliers_of(r.layer, r.k) for r in records if r.source is None]


def outliers_of(layer: int, keys: Tensor) -> Row:
    """Diagnosis of one layer's ``keys [B, H, N, D]``, D a multiple of 4."""
    ratios = outlier_ratio(keys, keys.shape[1]).tolist()
    size = keys.float().square().mean((0, 2)).sqrt()  # [H, D]
    times = size / size.median(-1, keepdim=True).values.clamp_min(1e-12)
    strongest = times.flatten().topk(min(TOP, times.numel())).indices.tolist()
    dim = keys.shape[-1]
    length = chunk_lengths(split_chunks(keys.float()))  # [B, H, N, D / 4]
    median = length.transpose(0, 1).flatten(1).median(1).values
    above = (length > C * median[:, None, None]).sum(-1).transpose(0, 1).flatten(1)
    return {
        "layer": layer,
        "ratio": float(outlier_ratio(keys)),
        "worst_head_ratio": max(ratios),
        "head_ratios": ratios,
        "above": torch.stack([above.amin(1), above.amax(1)], 1).tolist(),
        "largest": float(keys.abs().amax()),
        "channels": [
            {"head": i // dim, "channel": i % dim, "times_median": float(times[i // dim, i % dim])} for i in strongest
        ],
    }
