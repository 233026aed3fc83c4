"""Times of codecs on any device, without kernels, keys and values together: ``packedkv bench codec``.

One row per spec and metric, the same keys as every result file::

    {"spec", "effective_bits", "metric", "unit", "values": {"p20", "p50", "p80"}, "repeats", "shape", "device",
     "versions", "commit", "seed"}

========================  ========  ================================================================================
metric                    unit      what is timed
========================  ========  ================================================================================
``encode_tokens_per_s``   tokens/s  K and V of all heads into the code basis and to bytes, constants given
``decode_tokens_per_s``   tokens/s  the same bytes to float32 K and V in the model basis
``encode_vs_int4``        x         its time over ``int-4``'s, pair by pair: 40 is forty times slower
``decode_vs_int4``        x         the same for decoding
========================  ========  ================================================================================

Rows of other libraries (``quantizer_rivals.py``) do the job of the preset that ``job`` names; ``encode_vs_preset`` and
``decode_vs_preset`` are their times over that preset's. Input is Gaussian, rounded to fp16 as a cache holds it, and
float32: times do not depend on the data, except HQMQ's ties.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Payload, Role, Sample, Site
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.registry import get
from packedkv_lab.bench.quantizer_rivals import QuantizerRival, quantizer_rivals
from packedkv_lab.bench.record import Row, spread, usable_device
from packedkv_lab.bench.turns import Progress, in_turn, positive, ratios, stamped

BASE = "int-4"


@dataclass(frozen=True)
class RoleWork:
    """Keys or values of one layer with their codec and constants."""

    codec: Codec
    params: Params
    x: Tensor

    def encode(self) -> Payload:
        """Model basis to bytes."""
        return self.codec.encode(self.codec.to_code(self.x, self.params), self.params)

    def decode(self, payload: Payload) -> Tensor:
        """Bytes to the model basis."""
        return self.codec.from_code(self.codec.decode(payload, self.params), self.params)


class CodecWork:
    """Keys and values of one layer under one spec; ``encode`` and ``decode`` are what is timed."""

    def __init__(self, spec: str, kv: Sequence[Tensor], seed: int) -> None:
        def of(role: Role, whole: Tensor) -> RoleWork:
            codec = get(spec).codec(role).for_dtype(torch.float16)
            x = whole[:, :, : whole.shape[2] // codec.block_tokens * codec.block_tokens]
            site = Site(0, role, x.shape[1], x.shape[3], seed, x.device)
            return RoleWork(codec, codec.fit(site, Sample(x.half())), x)

        self.key, self.value = (of(role, whole) for role, whole in zip(ROLES, kv, strict=True))
        self.packed = (self.key.encode(), self.value.encode())
        self.tokens = self.key.x.shape[2]

    def encode(self) -> object:
        """Encode keys and values."""
        return self.key.encode(), self.value.encode()

    def decode(self) -> object:
        """Decode keys and values."""
        return self.key.decode(self.packed[0]), self.value.decode(self.packed[1])


class QuantizerWork:
    """The same keys and values in another library."""

    def __init__(self, rival: QuantizerRival, kv: Sequence[Tensor]) -> None:
        self.rival, self.rows = rival, [x.flatten(0, 2) for x in kv]
        self.held = [rival.encode(x) for x in self.rows]
        self.bits = sum(map(rival.nbytes, self.held)) * 8 / sum(x.numel() for x in self.rows)
        pairs = zip(self.decode(), self.rows, strict=True)
        errors = [float((y.float() - x).square().sum() / x.square().sum()) for y, x in pairs]
        self.relative_mse = sum(errors) / len(errors)

    def encode(self) -> object:
        """Encode keys and values."""
        return [self.rival.encode(x) for x in self.rows]

    def decode(self) -> list[Tensor]:
        """Decode keys and values."""
        return [self.rival.decode(x) for x in self.held]


def codec_rows(
    specs: Sequence[str],
    *,
    kv_heads: int = 8,
    head_dim: int = 128,
    tokens: int = 4096,
    device: str = "cpu",
    repeats: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Time encode and decode of each spec beside ``int-4``, then the rivals that are installed.

    Parameters
    ----------
    specs : sequence of str
    kv_heads, head_dim, tokens : int
        Shape of K and V, one sequence; whole blocks of every codec are taken of ``tokens``.
    device : str
    repeats : int
        Timed pairs per metric, after a warm-up.
    seed : int
    progress : callable, optional
        Gets a line before each spec.

    Returns
    -------
    iterator of dict
        Rows as in the module's text, as they are measured.

    Raises
    ------
    SpecError, ShapeError, UnsupportedError
        At once: unknown spec, a shape that no codec takes, codecs that need a model's queries, a missing device.
    """
    positive("bench codec", {"kv_heads": kv_heads, "tokens": tokens, "repeats": repeats})
    for spec in (BASE, *specs):
        scheme = get(spec)
        for role in ROLES:
            codec = scheme.codec(role)
            codec.layout(head_dim)  # refuses a head_dim it cannot take
            if codec.block_tokens > tokens:
                raise ShapeError(f"bench codec: {spec} encodes {codec.block_tokens} tokens at once; got {tokens}.")
            if "queries" in codec.needs:
                raise UnsupportedError(f"bench codec: {spec} needs a model's queries to be fitted; leave it out.")
    shape = (kv_heads, head_dim, tokens)
    return _codec_rows(specs, shape, usable_device("bench codec", device), repeats, seed, progress or (lambda _: None))


@torch.no_grad()
def _codec_rows(
    specs: Sequence[str],
    shape: tuple[int, int, int],
    device: torch.device,
    repeats: int,
    seed: int,
    progress: Progress,
) -> Iterator[Row]:
    heads, dim, tokens = shape
    generator = torch.Generator().manual_seed(seed)
    kv = [torch.randn(1, heads, tokens, dim, generator=generator).half().float().to(device) for _ in ROLES]
    common = stamped(f"b1_h{heads}_d{dim}_t{tokens}", device, repeats, seed)

    def row(spec: str, bits: float, metric: str, values: Sequence[float], **more: Any) -> Row:
        unit = "tokens/s" if metric.endswith("_per_s") else "x"
        head = {"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit, "values": spread(values)}
        return {**head, **more, **common}

    def beside(
        name: str, bits: float, work: CodecWork | QuantizerWork, base: CodecWork, than: str, done: int, **more: Any
    ) -> list[Row]:
        """Rows of encode and decode, in tokens per second of ``done`` tokens and beside ``base``."""
        encode = in_turn([work.encode, base.encode], device, repeats)
        decode = in_turn([work.decode, base.decode], device, repeats)
        both = {"encode": encode, "decode": decode}
        rates = [row(name, bits, f"{job}_tokens_per_s", [done / a for a in t[0]], **more) for job, t in both.items()]
        compared = [
            row(name, bits, f"{job}_vs_{than}", ratios(t[0], t[1], tokens / done), **more) for job, t in both.items()
        ]
        return rates + compared

    base = CodecWork(BASE, kv, seed)
    for i, spec in enumerate(specs):
        progress(f"{spec} ({i + 1} of {len(specs)})")
        work, bits = CodecWork(spec, kv, seed), get(spec).effective_bits(dim)
        yield from beside(spec, bits, work, base, "int4", work.tokens)
    for rival in quantizer_rivals(dim):
        if rival.missing:
            progress(f"{rival.name}: {rival.module} is not installed, left out")
            continue
        progress(rival.name)
        theirs, ours = QuantizerWork(rival, kv), CodecWork(rival.job, kv, seed)
        more = {"job": rival.job, "relative_mse": theirs.relative_mse}
        yield from beside(rival.name, theirs.bits, theirs, ours, "preset", tokens, **more)
