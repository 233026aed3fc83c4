"""``kvcodec reproduce``: what the papers print, recomputed. One module per paper; each registers its tables."""

from kvcodec.eval.reproduce import hqmq, innerq, octopus, saw_int4, ultraquant  # noqa: F401  # each registers its tables
from kvcodec.eval.reproduce.claims import NOT_PRINTED, PAPERS, Claim, available, reproduce_rows, reproduces

__all__ = ["NOT_PRINTED", "PAPERS", "Claim", "available", "reproduce_rows", "reproduces"]
