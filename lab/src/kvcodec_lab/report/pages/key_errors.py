"""Tables of ``kvcodec_lab.eval.key_errors``: which presets fail on a model's keys, who warns, what mends it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcodec.cli.page.rows import UNCOMPRESSED, Json, Results, mapping, number, read_rows
from kvcodec.cli.page.tables import markdown
from kvcodec.cli.page.words import DASH, bits_text, listed, value_text
from kvcodec.errors import FormatError
from kvcodec.key_bias import LIMIT
from kvcodec_lab.report.ranks import WITHIN, holding

STANDS_OUT = 10.0
"""Ratio of the largest chunk to the median one from which a layer is listed."""
CURE = "mean=pre"
MENDS = {
    "mean": "Without the mean key",
    "mean before RoPE": "Without the mean key before RoPE",
    "channel scales": "With channel scales",
    "outliers": "With 8 outlier slots a token",
}


def read(path: Path) -> Json:
    """What the script wrote, with checked rows.

    Raises
    ------
    FormatError
        If the file is missing, damaged or of something else.
    """
    rows = read_rows([path])
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not isinstance(data.get("outliers"), list) or "by_layer" not in rows[0]:
        raise FormatError(f"{path} holds no errors of scores; pass rows of kvcodec_lab.eval.key_errors.")
    return {**data, "rows": rows}


def breaking(data: Json, stressed: Json | None, judged: Results | None, small: Results | None) -> str:
    """A line per preset, the largest error first: where it fails, what the checks say, what perplexity says.

    Parameters
    ----------
    data, stressed : mapping
        Errors on the model, and on the stressed small one.
    judged, small : Results, optional
        Published runs of both.
    """
    other = {row["spec"]: row for row in stressed["rows"]} if stressed else {}
    heads = ["preset", "key bits", "worst layer, head", "error", "shift", "layers above", "weights", "probe"]
    heads += ["perplexity", "stressed small model: error", "its perplexity"]
    lines = []
    for row in sorted(data["rows"], key=_size):
        above = [str(i) for i, e in enumerate(row["by_layer"]) if _at_least(e, LIMIT)]
        check, probe = row["check"], row["probe"]
        told = DASH if check is None else f"{'refuses' if check['warned'] else 'passes'} ({check['error']:.1f})"
        seen = DASH if probe["layer"] is None else "warns" if probe["warned"] else "silent"
        small_row = other.get(row["spec"])
        place = DASH if row["layer"] is None else f"{row['layer']}, {row['head']}"
        lines.append([
            f"`{row['spec']}`", f"{row['key_bits']:.2f}", place, _nats(row["error"]), _nats(row["shift"]),
            ", ".join(above) or DASH, told, seen, _rise(judged, row["spec"]),
            DASH if small_row is None else _nats(small_row["error"]), _rise(small, row["spec"]),
        ])  # fmt: skip
    return markdown(heads, lines)


def mending(data: Json) -> str:
    """A line per preset with an error of at least ``LIMIT``: what each change of the keys leaves of it."""
    heads = [
        "preset",
        "as it is",
        "less the mean key",
        "less the mean before RoPE",
        "channel scales",
        "8 outlier slots",
    ]
    failing = [row for row in sorted(data["rows"], key=_size) if _at_least(row["error"], LIMIT)]
    lines = [[f"`{r['spec']}`", _nats(r["error"]), *(_nats(r["mends"].get(name)) for name in MENDS)] for r in failing]
    return markdown(heads, lines)


def without_mean(judged: Results | None) -> str:
    """A line per preset that was read with ``mean=pre`` too: the whole model's perplexity and KL, both ways."""
    heads = ["preset", "bits in all", "perplexity", "KL", "with `mean=pre`: perplexity", "KL"]
    lines = []
    for spec in judged.specs if judged else []:
        cured = f"{spec}{',' if ':' in spec else ':'}{CURE}"
        if judged is None or cured not in judged.specs:
            continue
        rows = [judged.row(name, name, of) for of in (spec, cured) for name in ("perplexity", "kl")]
        cells = [DASH if r is None or r["value"] is None else value_text(r.metric, r["value"]) for r in rows]
        lines.append([f"`{spec}`", bits_text(next(r["effective_bits"] for r in rows if r is not None)), *cells])
    return markdown(heads, lines)


def channels(data: Json) -> str:
    """A line per layer whose keys stand out: the ratio, and the strongest channel."""
    heads = ["layer", "largest chunk / median, by KV head", "chunks of a token above 3 medians", "largest number"]
    heads += ["strongest channels (times the median)"]
    lines = []
    for row in data["outliers"]:
        if row["worst_head_ratio"] < STANDS_OUT:
            continue
        strongest = [f"head {c['head']}, {c['channel']} ({c['times_median']:.0f})" for c in row["channels"]]
        ratios = ", ".join(f"{ratio:.0f}" for ratio in row["head_ratios"])
        above = ", ".join(f"{fewest} to {most}" for fewest, most in row["above"])
        lines.append([str(row["layer"]), ratios, above, f"{row['largest']:.0f}", "; ".join(strongest)])
    return markdown(heads, lines)


def summary(data: Json, judged: Results | None, plain: Results | None) -> str:
    """What follows from the numbers, as a list.

    Parameters
    ----------
    data : mapping
    judged, plain : Results, optional
        Published runs of the model, and of a small one without biases.
    """
    failing = [row for row in data["rows"] if _at_least(row["error"], LIMIT)]
    only_first = [row for row in failing if [i for i, e in enumerate(row["by_layer"]) if _at_least(e, LIMIT)] == [0]]
    said = [
        f"{len(failing)} of {len(data['rows'])} presets and options move a head's scores by {LIMIT:g} nats or more; "
        f"{len(only_first)} of them in layer 0 alone."
    ]
    for name, words in MENDS.items():
        measured = [row["mends"][name] for row in failing if row["mends"].get(name) is not None]
        left = sum(value >= LIMIT for value in measured)
        said.append(f"{words}, {left} of {len(measured)} still do.")
    if judged is not None:
        said += _warned(data, judged, plain)
    return "\n".join(f"- {sentence}" for sentence in said)


def unwarned(data: Json, judged: Results, plain: Results | None) -> tuple[list[str], list[str]]:
    """Presets whose perplexity is off by more than ``WITHIN`` says, of which neither check warns.

    Returns
    -------
    list of str, list of str
        Those that are merely coarse, because they break on the plain model as well; and all others.
    """
    found = [row["spec"] for row in data["rows"] if _is_off(judged, row["spec"]) and not _warns(row)]
    coarse = [spec for spec in found if plain is not None and spec in plain.specs and spec not in holding(plain)]
    return coarse, [spec for spec in found if spec not in coarse]


def _warned(data: Json, judged: Results, plain: Results | None) -> list[str]:
    known = [row for row in data["rows"] if _ratio(judged, row["spec"]) is not None]
    off = [row for row in known if _is_off(judged, row["spec"])]
    coarse, missed = unwarned(data, judged, plain)
    said = [
        f"The perplexity of {len(off)} of {len(known)} is more than {100 * (WITHIN - 1):.0f} % off. Of "
        f"{len(off) - len(coarse) - len(missed)} of these the check of the weights or the probe warns."
    ]
    if coarse and plain is not None:
        name = mapping(plain.about.get("model")).get("name")
        said.append(f"Not warned of, but as far off on {name}, which has no biases: {_quoted(coarse)}.")
    if missed:
        said.append(f"Not warned of, and good on a model without biases: {_quoted(missed)}.")
    false = [row["spec"] for row in known if not _is_off(judged, row["spec"]) and _warns(row)]
    return [*said, f"Warned of, though it holds: {_quoted(false) if false else 'none'}."]


def _quoted(specs: Sequence[str]) -> str:
    return listed([f"`{spec}`" for spec in specs], len(specs))


def _warns(row: Mapping[str, Any]) -> bool:
    return bool((row["check"] or {}).get("warned") or row["probe"]["warned"])


def _is_off(results: Results, spec: str) -> bool:
    ratio = _ratio(results, spec)
    return ratio is not None and not ratio <= WITHIN


def _ratio(results: Results | None, spec: str) -> float | None:
    """Perplexity over the uncompressed model's; infinite where it overflowed."""
    if results is None:
        return None
    row, base = (results.row("perplexity", "perplexity", of) for of in (spec, UNCOMPRESSED))
    if row is None or base is None or not base["value"]:
        return None
    return float("inf") if row["value"] is None else row["value"] / base["value"]


def _rise(results: Results | None, spec: str) -> str:
    ratio = _ratio(results, spec)
    if ratio is None:
        return DASH
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−") if ratio < 2 else f"x {value_text('', ratio)}"


def _nats(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:.2f}"


def _at_least(value: Any, limit: float) -> bool:
    found = number(value)
    return found is not None and found >= limit


def _size(row: Mapping[str, Any]) -> tuple[float, str]:
    return -(number(row["error"]) or 0.0), str(row["spec"])
