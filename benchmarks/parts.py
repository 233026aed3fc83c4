"""Presets as OCTOPUS's Sec. 4.3 runs them: names that the benchmarks of speech and video share.

``PRESET-BITS:PART``, where no layer is left out, no first token stays, the newest unit (a frame of video, a token of
text) is in 16 bit, and values are OCTOPUS's, in groups of channels at the same bits, whatever the method of the keys:

- ``:paper``: so, with the preset's keys;
- ``:stage``: of a preset with a sketch of residuals, keys of its first stage alone, one bit less. The paper's rows of
  TurboQuant-QJL equal TurboQuant-MSE's of a bit less, and OCTOPUS-QJL's OCTOPUS's: its models read no sketch;
- ``:keys``, ``:values``: one of the two packed, the other in 16 bit;
- ``:bare``: nothing stays in 16 bit.
"""

from dataclasses import replace

import kvcodec
from kvcodec.codec import Dense
from kvcodec.scheme import KVScheme

PARTS = ("paper", "stage", "keys", "values", "bare")
CODECS = ("turboquant", "turboquant-qjl", "polarquant", "octopus", "octopus-qjl")
"""The paper's, in its order."""
PAPER = ",".join(
    [
        *(f"{codec}-{bits}:paper" for bits in (4, 3, 2) for codec in CODECS),
        *(f"turboquant-qjl-{bits}:stage" for bits in (4, 3, 2)),
        *(f"octopus-{bits}:{part}" for part in ("keys", "values", "bare") for bits in (4, 3, 2)),
        "turboquant-2:keys",
        "turboquant-2:bare",
    ]
)
"""What ``--specs paper`` stands for."""


def part_of(name: str) -> tuple[str, str]:
    """Return the spec and the part of a name; the part may be empty.

    >>> part_of("octopus-2:keys"), part_of("kivi-4:group=32")
    (('octopus-2', 'keys'), ('kivi-4:group=32', ''))
    """
    spec, _, part = name.rpartition(":")
    return (spec, part) if part in PARTS else (name, "")


def paper_scheme(name: str, unit: int, group: int) -> KVScheme:
    """Return the scheme of a name with a part.

    Parameters
    ----------
    name : str
    unit : int
        Newest tokens in 16 bit.
    group : int
        Channels of a value that share a scale: 32 in the paper's video, 16 in its audio.
    """
    spec, part = part_of(name)
    method, _, bits = spec.rpartition("-")
    if part == "stage":
        spec = f"{method.removesuffix('-qjl')}-{int(bits) - 1}"
    key = kvcodec.get(spec).key if part != "values" else Dense()
    value = kvcodec.get(f"octopus-{bits}:group={group}").value if part != "keys" else Dense()
    return KVScheme(key, value, window=0 if part == "bare" else unit)


def whole_scheme(spec: str, unit: int) -> KVScheme:
    """Return a preset with no layer left out, no first token in 16 bit, and the newest ``unit`` tokens in 16 bit."""
    return replace(kvcodec.get(spec), dense_key_layers=0, dense_value_layers=0, sink=0, window=unit)
