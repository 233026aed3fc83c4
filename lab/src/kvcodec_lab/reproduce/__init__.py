"""``kvcodec reproduce``: what the papers print, recomputed. One module per paper; each registers its tables."""

from kvcodec_lab.reproduce import (  # noqa: F401  # each registers its tables
    baselines,
    hqmq,
    innerq,
    octopus,
    own_models,
    same_family,
    saw_int4,
    ultraquant,
)
from kvcodec_lab.reproduce.claims import (
    NOT_PRINTED,
    PAPERS,
    Axes,
    Claim,
    available,
    cannot,
    not_recomputed,
    reproduce_rows,
    reproduces,
)

__all__ = [
    "NOT_PRINTED",
    "PAPERS",
    "Axes",
    "Claim",
    "available",
    "cannot",
    "not_recomputed",
    "reproduce_rows",
    "reproduces",
]
