"""HQMQ, arXiv:2605.27646: bits of its baselines, naive integers."""

from collections.abc import Iterator

from kvcodec.eval.reproduce.claims import NOT_PRINTED, Claim, reproduces
from kvcodec.eval.reproduce.measure import gauss, relative_mse
from kvcodec.registry import get


@reproduces("hqmq", "Tables 2, 3")
def hqmq_baseline_bits(quick: bool) -> Iterator[Claim]:
    """Bits that the paper prints for its baselines, against bytes held."""
    note = "the codes alone; held with a scale and an offset per token"
    for bits in (2, 3, 4):
        yield Claim(f"naive int{bits}", "bits", f"{bits}.00", get(f"int-{bits}").effective_bits(128), 0.0, note)
    note = "groups of 32 with scale and offset in fp16 take one bit; the print fits groups of 64"
    for bits in (2, 4):
        yield Claim(f"KIVI-{bits}", "bits", f"{bits}.5", get(f"kivi-{bits}").effective_bits(128), 0.0, note)


@reproduces("hqmq", NOT_PRINTED)
def hqmq_naive_int(quick: bool) -> Iterator[Claim]:
    """Naive integers on N(0, 1), one scale per token of 128 channels; the paper does not say which kind it used."""
    reference = {
        "symmetric": {2: "0.592", 3: "0.0752", 4: "0.0139"},
        "asymmetric": {2: "0.251", 3: "0.0457", 4: "0.0099"},
    }
    x = gauss(quick)
    for kind, errors in reference.items():
        for bits, error in errors.items():
            scheme = get(f"int-{bits}:symmetric={str(kind == 'symmetric').lower()}")
            yield Claim(f"naive int{bits}, {kind}", "relative_mse", error, relative_mse(x, scheme), 0.01)
