"""OCTOPUS's findings on video and audio (Sec. 4.3, Tables 3, 10, 11), tested on models of this project.

The paper judged video models of 1.3B and an audio model. Here they are Whisper base and a small video model.
Nothing is run: rows come from result files below ``RESULTS``, where they exist. The protocol is the paper's: keys by
five methods, values of all in groups of channels at the same bits, the newest unit in 16 bit, no layer left out. One
file has the presets with values of their own instead.

A finding is a ratio of two errors, which can be compared where the errors cannot: the paper's squared error by PSNR and
log-spectral distance, ours squared error by PSNR and KL. It is printed by no paper but follows from the numbers of one;
ours is held to a bound that says what the finding claims.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcodec_lab.reproduce.claims import Claim, cannot, reproduces

RESULTS = Path("benchmarks/results")
FOLDER = Path(__file__).resolve().parents[3] / RESULTS
CODECS = ("turboquant", "turboquant-qjl", "polarquant", "octopus", "octopus-qjl")
OTHERS = CODECS[:3]
"""Codecs that OCTOPUS is compared with."""
VIDEO = {
    4: (14.58, 13.09, 15.41, 15.21, 15.23),
    3: (13.10, 8.42, 13.06, 13.48, 13.54),
    2: (8.45, 7.10, 8.62, 10.90, 10.89),
}
"""Table 10, Causal Forcing, frame by frame: PSNR in dB of ``CODECS``, by bits."""
AUDIO = {4: (6.36, 6.24, 6.28, 6.20, 6.17), 3: (6.48, 12.72, 6.34, 6.45, 6.43), 2: (12.65, 13.17, 12.59, 6.75, 6.88)}
"""Table 11: log-spectral distance in dB."""

Errors = Mapping[str, float]
"""Errors by name: ``octopus-2``, and with a part ``octopus-2:keys``."""


def squared(psnr: float) -> float:
    """Squared error of a PSNR in dB, the peak being 1."""
    return float(10 ** (-psnr / 10))


def by_name(table: Mapping[int, tuple[float, ...]], error: Callable[[float], float] = float) -> dict[str, float]:
    """Errors of a printed table by name. The paper's rows of a sketch are those of its first stage (``parts.py``)."""
    found = {f"{codec}-{b}": error(x) for b, row in table.items() for codec, x in zip(CODECS, row, strict=True)}
    return found | {f"turboquant-qjl-{bits}:stage": found[f"turboquant-qjl-{bits}"] for bits in table}


class Finding(NamedTuple):
    """What the paper says, as a ratio of errors, and the bounds within which it holds.

    Parameters
    ----------
    item : str
    ratio : function
        Of errors by name; raises KeyError where one is missing. What is said of all codecs is asked of those there.
    note : str
    least, most : float, optional
    """

    item: str
    ratio: Callable[[Errors], float]
    note: str
    least: float | None = None
    most: float | None = None


def _over(above: str, below: str) -> Callable[[Errors], float]:
    return lambda errors: errors[above] / errors[below]


def _spread(errors: Errors) -> float:
    found = _there(errors, CODECS, 4)
    return max(found) / min(found)


def _lead(bits: int) -> Callable[[Errors], float]:
    return lambda errors: min(_there(errors, OTHERS, bits)) / errors[f"octopus-{bits}"]


def _there(errors: Errors, codecs: Sequence[str], bits: int) -> list[float]:
    """Errors of the codecs that are there; raises KeyError without TurboQuant."""
    names = [f"{codec}-{bits}" for codec in codecs]
    return [errors[name] for name in names if name in errors or name == names[0]]


FINDINGS = (
    Finding("b=4, worst / best", _spread, "all codecs overlap: within a factor of 2", most=2.0),
    Finding("b=4, best other / OCTOPUS", _lead(4), "level: within a quarter", least=0.75, most=1.25),
    Finding("b=3, best other / OCTOPUS", _lead(3), "level, or OCTOPUS leads", least=0.95),
    Finding("b=2, best other / OCTOPUS", _lead(2), "OCTOPUS leads, by at least a fifth", least=1.2),
    Finding(
        "b=2, TurboQuant-QJL / OCTOPUS", _over("turboquant-qjl-2:stage", "octopus-2"),
        "TurboQuant-QJL breaks, its first stage alone as the paper's rows are: at least 1.5 times the error", least=1.5,
    ),
    Finding(
        "b=2, TurboQuant-QJL with its sketch / OCTOPUS", _over("turboquant-qjl-2", "octopus-2"),
        "the same with scores that read the sketch", least=1.5,
    ),
    Finding(
        "TurboQuant-QJL b=3 / TurboQuant b=2", _over("turboquant-qjl-3:stage", "turboquant-2"),
        "the same keys beside values of 3 and of 2 bits: keys decide, values change at most a quarter",
        least=0.75, most=1.25,
    ),
    Finding(
        "b=2, OCTOPUS-QJL / OCTOPUS", _over("octopus-qjl-2", "octopus-2"),
        "level, as the paper's rows read no sketch; ours do", least=0.75, most=1.25,
    ),
)  # fmt: skip
UNPRINTED = (
    *(
        Finding(
            f"b={bits}, keys alone / values alone", _over(f"octopus-{bits}:keys", f"octopus-{bits}:values"),
            "OCTOPUS's keys packed beside 16-bit values, and the reverse: keys cost more", least=1.0,
        )
        for bits in (4, 3, 2)
    ),
    *(
        Finding(
            f"b={bits}, no window / window of one unit", _over(f"octopus-{bits}:bare", f"octopus-{bits}"),
            "OCTOPUS with every token packed: the newest unit in 16 bit helps", least=1.0,
        )
        for bits in (4, 3, 2)
    ),
)  # fmt: skip
"""What the paper does not print: the same of its other choices."""


class Own(NamedTuple):
    """A model, its results at the paper's protocol, and the numbers of the paper that stand beside them."""

    name: str
    file: str
    error: Callable[[Mapping[str, Any]], float]
    what: str
    printed: Mapping[str, float]


def _psnr(row: Mapping[str, Any]) -> float:
    return squared(row["psnr"][1])


OWN = (
    Own("Whisper base", "cpu/speech_whisper-base_paper.json", lambda row: row["kl"], "KL", by_name(AUDIO)),
    Own(
        "video model of 14 M", "nvidia-h100/video_digits_paper.json", _psnr, "squared error", by_name(VIDEO, squared)
    ),
    Own(
        "video model of 14 M, values of each method", "nvidia-h100/video_digits.json", _psnr, "squared error",
        by_name(VIDEO, squared),
    ),
)  # fmt: skip


def errors_of(own: Own, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors by name of a result file's rows; ``:paper`` is left out of the name."""
    return {row["spec"].removesuffix(":paper"): own.error(row) for row in rows if row["spec"] != "dense"}


def own_claims(own: Own, errors: Errors) -> Iterator[Claim]:
    """Each finding of which the errors are there."""
    for finding in (*FINDINGS, *UNPRINTED):
        try:
            ours = finding.ratio(errors)
        except KeyError:  # not run
            continue
        printed, note = "1", f"{finding.note}; not printed"
        if finding in FINDINGS:
            beside = {name: x for name, x in own.printed.items() if name in errors}
            printed, note = f"{finding.ratio(beside):.3g}", finding.note
        metric = f"ratio of {own.what}"
        yield Claim(finding.item, metric, printed, ours, 0.0, note, least=finding.least, most=finding.most)


def _register(own: Own) -> None:
    title = f"Sec. 4.3: own model, {own.name}"
    if (path := FOLDER / own.file).is_file():

        @reproduces("octopus", title)
        def claims(quick: bool) -> Iterator[Claim]:
            """Read the results; nothing is measured."""
            return own_claims(own, errors_of(own, json.loads(path.read_text(encoding="utf-8"))["rows"]))

    else:
        cannot("octopus", title, f"needs the results {(RESULTS / own.file).as_posix()} of a checkout of the repository")


for _own in OWN:
    _register(_own)
