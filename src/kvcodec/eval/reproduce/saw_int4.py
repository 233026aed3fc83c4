"""SAW-INT4, arXiv:2604.19157: accounting, and the error of token-wise INT4."""

from collections.abc import Iterator
from typing import Any

from kvcodec.eval.reproduce.claims import NOT_PRINTED, Claim, reproduces
from kvcodec.eval.reproduce.measure import gauss, relative_mse, token_bytes
from kvcodec.registry import get


@reproduces("saw-int4", "Sec. 1, Table 1")
def saw_printed(quick: bool) -> Iterator[Claim]:
    """Cache of Llama 4 Scout at 10M tokens, and the ratio of INT4."""
    scout: dict[str, Any] = {"layers": 48, "kv_heads": 8, "dim": 128}
    tib = 10e6 / 2**40
    packed = token_bytes("saw-int4", **scout) * tib
    note = f"48 layers, 8 KV heads, 128 channels, 2 bytes; saw-int4 takes {packed:.3f} TiB"
    yield Claim("Llama 4 Scout, 10M tokens", "bf16_tib", "1.8", token_bytes("dense", **scout) * tib, 0.0, note)
    note = "the codes alone; with scale and zero point in fp16 it is 3.765"
    yield Claim("INT4, BDR", "ratio_to_bf16", "4", 16 / get("saw-int4").effective_bits(128), 0.0, note)


@reproduces("saw-int4", NOT_PRINTED)
def saw_implied(quick: bool) -> Iterator[Claim]:
    """True bits, serving bytes, and the error of token-wise INT4."""
    scheme = get("saw-int4")
    yield Claim("saw-int4, d=128", "bits", "4.25", scheme.effective_bits(128))
    yield Claim("saw-int4, d=128", "ratio_to_bf16", "3.765", 16 / scheme.effective_bits(128))
    qwen: dict[str, Any] = {"layers": 36, "kv_heads": 8, "dim": 128}
    room = 80e9 * 0.8 - 16.4e9
    for spec, printed, resident in (("dense", "147456", "18.6"), ("saw-int4", "39168", "69.8")):
        ours = token_bytes(spec, **qwen)
        yield Claim(f"Qwen3-8B, {spec}", "bytes_per_token", printed, ours)
        note = "80 GB x 0.8 less 16.4 GB of weights, requests of 17408 tokens: where the throughput curves bend"
        yield Claim(f"Qwen3-8B, {spec}", "resident_requests", resident, room / (17408 * ours), 0.002, note)
    error = relative_mse(gauss(quick), get("saw-int4:rotate=none"))
    note = "integer zero point, N(0, 1), d=128; with a float offset it is 0.009995"
    yield Claim("token-wise INT4", "relative_mse", "0.010147", error, 0.01 if quick else 0.005, note)
