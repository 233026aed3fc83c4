"""InnerQ: effective bit-widths."""

from collections.abc import Iterator

from kvcodec.eval.reproduce.claims import Claim, reproduces
from kvcodec.registry import get


@reproduces("innerq", "Table 3")
def innerq_kivi_bits(quick: bool) -> Iterator[Claim]:
    """Effective bit-width of KIVI: 2 bits, fp16 scale and zero point in groups of 32."""
    scheme = get("kivi-2")
    yield Claim("KIVI, key", "bits", "3.0", scheme.key_bits(128))
    yield Claim("KIVI, value", "bits", "3.0", scheme.value_bits(128))
    yield Claim("KIVI", "bits", "3", scheme.effective_bits(128), 0.0, "windows not counted")
