"""Rate and distortion of every preset at its true bits: what no paper has.

Relative MSE ``|x^ - x|^2 / |x|^2`` of the encoded tokens, windows and dense layers aside, over the bytes of the layout.
Keys are drawn with D = 128: Gaussian; on the unit sphere; heavy-tailed (Student's t with 4 degrees of freedom in every
channel); and Gaussian with a constant offset of 30 in one channel, as key biases make them (the offset counts as
energy, so figures of that source compare with each other only). A model adds the keys and values of its own layers.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvcodec
from kvcodec.codec import Role, Site, roundtrip
from kvcodec.errors import KVError, UnsupportedError
from kvcodec.eval.fidelity import LayerRecord, record
from kvcodec.eval.rows import Row
from kvcodec.plot import style_of
from kvcodec.progress import Progress
from kvcodec.registry import describe, get

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
    """Measure presets on all sources.

    Parameters
    ----------
    specs : list of str, optional
        None for every preset there is, codecs from files included.
    quick : bool
        2 seeds of 128 tokens instead of 5 of 512.
    model : LoadedModel, optional
        From ``kvcodec.models.load``: adds keys and values of its layers on the packaged text.
    progress : Progress, optional

    Returns
    -------
    iterator of dict
        ``paper`` (``"rate-distortion"``), ``spec, method, source, role, head_dim, bits, relative_mse, spread, samples,
        tokens, note``. ``spread`` is the standard deviation over ``samples``: seeds of data and of constants, or
        layers. A codec that refuses a source has None for numbers and says why in ``note``.

    Raises
    ------
    SpecError
        For an unknown spec, at once.
    """
    progress = progress or Progress(False)
    wanted = [p for p in kvcodec.presets() if p != "dense"] if specs is None else list(specs)
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
            decoded = roundtrip(codec, x, codec.fit(site, x if codec.needs_sample else None))
            errors.append(float((decoded - x).square().sum() / x.square().sum()))
    except KVError as error:
        return row | {"note": str(error)}
    spread = statistics.stdev(errors) if len(errors) > 1 else 0.0
    return row | {"bits": bits, "relative_mse": statistics.fmean(errors), "spread": spread}


def capture(model: Any, layers: int = LAYERS, tokens: int = TOKENS) -> list[LayerRecord]:
    """Keys (after RoPE) and values of some layers, first and last among them, on the packaged text."""
    from kvcodec.models import load_text

    ids = model.tokenizer(load_text(None).text, return_tensors="pt").input_ids[:, :tokens]
    with record(model.model, queries=1) as records, torch.no_grad():
        model.model(ids.to(model.model.device))
    last = len(records) - 1
    chosen = sorted({round(i * last / max(1, layers - 1)) for i in range(layers)})
    return [records[i] for i in chosen]


def rate_distortion_figure(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel per source, relative MSE over true bits, and write it in the format of the file's suffix.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing; names the extra.
    KVError
        If the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "figures need matplotlib, which is not installed; run: pip install 'kvcodec[plot]'"
        ) from error

    drawn = [r for r in rows if r["relative_mse"]]
    sources = list(dict.fromkeys(r["source"] for r in drawn))
    across = 2 if len(sources) in (2, 4) else min(3, max(1, len(sources)))
    down = max(1, -(-len(sources) // across))
    figure = Figure(figsize=(5.6 * across, 4.4 * down + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False)
    for axes in panels.flat[len(sources) :]:
        axes.set_axis_off()
    handles: dict[str, Any] = {}
    for source, axes in zip(sources, panels.flat, strict=False):
        here = sorted((r for r in drawn if r["source"] == source), key=lambda r: (r["bits"], r["relative_mse"]))
        shown = [r for r in here if r["bits"] <= MOST_BITS]
        for r in shown:
            style = style_of(r["spec"])
            low = min(r["spread"], 0.9 * r["relative_mse"])
            handle = axes.errorbar(
                r["bits"], r["relative_mse"], [[low], [r["spread"]]], color=style.color, marker=style.marker,
                ms=5.5, lw=1, capsize=2, ls="none", alpha=0.9,
            )  # fmt: skip
            handles.setdefault(r["method"], handle)
        best = float("inf")
        for r in shown:  # names where nothing with fewer bits is as good
            if r["relative_mse"] < best:
                best = r["relative_mse"]
                axes.annotate(
                    r["spec"], (r["bits"], best), xytext=(-3, -4), textcoords="offset points", fontsize=6,
                    ha="right", va="top", color=style_of(r["spec"]).color,
                )  # fmt: skip
        if source in ("Gaussian keys", "unit-sphere keys"):
            rates = [r["bits"] for r in shown]
            axes.plot(rates, [4.0**-rate for rate in rates], color="0.5", lw=1, ls=":", zorder=0)
            axes.annotate("Shannon's bound, 4^-bits", (rates[0], 4.0 ** -rates[0]), fontsize=6, color="0.4", va="top")
        head = f"D = {here[0]['head_dim']}; {here[0]['samples']} {'layers' if ' of ' in source else 'seeds'}"
        axes.set_title(f"{source} ({head})", fontsize=9, loc="left")
        axes.set_yscale("log")
        axes.margins(x=0.16)
        axes.grid(which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        left_out = [r["spec"] for r in here if r["bits"] > MOST_BITS]
        if left_out:
            axes.set_xlabel(f"above {MOST_BITS} bits, not shown: {', '.join(left_out)}", fontsize=7)
    figure.supxlabel("bits per element: all bytes of an encoded block x 8 / elements", fontsize=9)
    figure.supylabel("relative MSE; bars: one standard deviation", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise KVError(f"{path} cannot be written ({error.strerror or error}); choose another folder.") from error


MOST_BITS = 7.0
"""Right end of the figure; what costs more is named under it."""
