"""Rate and distortion of every preset at its true bits, on keys drawn from ``SOURCES`` and on those of a model.

Relative MSE ``|x^ - x|^2 / |x|^2`` of the encoded tokens, windows and dense layers aside, over the bytes of the layout.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import packedkv
from packedkv.cli.measure.fidelity import LayerRecord, record
from packedkv.cli.measure.rows import Row
from packedkv.codec import Role, Sample, Site, roundtrip
from packedkv.description import describe
from packedkv.errors import KVError
from packedkv.progress import Progress
from packedkv.registry import get

STUDY = "rate-distortion"
DIM = 128
OFFSET, LOUD_CHANNEL = 30.0, 17
LAYERS, TOKENS = 6, 512


def gaussian(generator: torch.Generator, tokens: int) -> Tensor:
    """N(0, I)."""
    return torch.randn(1, 1, tokens, DIM, generator=generator)


def unit_sphere(generator: torch.Generator, tokens: int) -> Tensor:
    """Uniform directions of length 1."""
    x = gaussian(generator, tokens)
    return x / x.norm(dim=-1, keepdim=True)


def heavy_tailed(generator: torch.Generator, tokens: int) -> Tensor:
    """Student's t, 4 degrees of freedom: a Gaussian over the root of a mean of four squares."""
    spread = torch.randn(4, 1, 1, tokens, DIM, generator=generator).square().mean(0).sqrt()
    return gaussian(generator, tokens) / spread


def outlier_channel(generator: torch.Generator, tokens: int) -> Tensor:
    """N(0, I) with a constant offset in one channel."""
    x = gaussian(generator, tokens)
    x[..., LOUD_CHANNEL] += OFFSET
    return x


SOURCES: dict[str, Callable[[torch.Generator, int], Tensor]] = {
    "Gaussian keys": gaussian,
    "unit-sphere keys": unit_sphere,
    "heavy-tailed keys": heavy_tailed,
    "one-outlier-channel keys": outlier_channel,
}


def rate_distortion_rows(
    specs: Sequence[str] | None = None,
    *,
    quick: bool = False,
    model: Any = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Measure presets (default: all) on all sources, and on a model's keys and values of the packaged text.

    ``spread`` is the standard deviation over ``samples``: seeds of data and of constants, or layers. A codec that
    refuses a source has None for numbers and the reason in ``note``. ``quick``: 2 seeds of 128 tokens, not 5 of 512.
    """
    progress = progress or Progress(False)
    wanted = [p for p in packedkv.presets() if p != "dense"] if specs is None else list(specs)
    for spec in wanted:
        get(spec)
    return _rows(wanted, quick, model, progress)


def _rows(specs: Sequence[str], quick: bool, model: Any, progress: Progress) -> Iterator[Row]:
    seeds, tokens = (2, 128) if quick else (5, TOKENS)
    jobs: list[tuple[str, Role, list[Tensor]]] = []
    for source, draw in SOURCES.items():
        samples = [draw(torch.Generator().manual_seed(seed), tokens) for seed in range(seeds)]
        jobs.append((source, "key", samples))
    if model is not None:
        with progress.busy(f"{model.name}: keys and values of its layers"):
            records = capture(model)
        jobs.append((f"keys of {model.name}", "key", [r.k for r in records]))
        jobs.append((f"values of {model.name}", "value", [r.v for r in records]))
    total = len(jobs) * len(specs)
    for i, (source, role, samples) in enumerate(jobs):
        for j, spec in enumerate(specs):
            progress.bar(STUDY, i * len(specs) + j, total, f"{source}, {spec}")
            yield measure(spec, source, role, samples)


def measure(spec: str, source: str, role: Role, samples: Sequence[Tensor]) -> Row:
    """Relative MSE of one spec on ``samples``, tensors ``[B, H, N, D]``: one row."""
    codec = get(spec).codec(role)
    dim = samples[0].shape[-1]
    row: Row = {"paper": STUDY, "spec": spec, "method": describe(spec)["method"], "source": source, "role": role}
    row |= {"head_dim": dim, "bits": None, "relative_mse": None, "spread": None}
    row |= {"samples": len(samples), "tokens": samples[0].shape[2], "note": ""}
    errors = []
    try:
        bits = codec.layout(dim).effective_bits
        for seed, sample in enumerate(samples):
            x = sample[:, :, : sample.shape[2] // codec.block_tokens * codec.block_tokens].half().float()
            site = Site(seed, role, x.shape[1], dim, seed)
            decoded = roundtrip(codec, x, codec.fit(site, Sample(x)))
            errors.append(float((decoded - x).square().sum() / x.square().sum()))
    except KVError as error:
        return row | {"note": str(error)}
    spread = statistics.stdev(errors) if len(errors) > 1 else 0.0
    return row | {"bits": bits, "relative_mse": statistics.fmean(errors), "spread": spread}


def capture(model: Any, layers: int = LAYERS, tokens: int = TOKENS) -> list[LayerRecord]:
    """Keys (after RoPE) and values of some layers, first and last among them, on the packaged text."""
    from packedkv.models.loading import load_text

    ids = model.tokenizer(load_text(None).text, return_tensors="pt").input_ids[:, :tokens]
    with record(model.model, queries=1) as records, torch.no_grad():
        model.model(ids.to(model.model.device))
    last = len(records) - 1
    chosen = sorted({round(i * last / max(1, layers - 1)) for i in range(layers)})
    return [records[i] for i in chosen]
