"""``packedkv reproduce``: printed numbers of the papers, recomputed. One module per paper registers its tables."""

from packedkv_lab.reproduce import baselines, hqmq, innerq, octopus, saw_int4, ultraquant  # noqa: F401
from packedkv_lab.reproduce.claims import NOT_PRINTED, PAPERS, claims, reproduce_rows

__all__ = ["NOT_PRINTED", "PAPERS", "claims", "reproduce_rows"]
