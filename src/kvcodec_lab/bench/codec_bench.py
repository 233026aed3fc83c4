"""What encoding and decoding cost on this device, codec by codec: tokens per second of keys and values together.

One row per spec and metric, with the keys of every result file (``cache_bench``):

========================  ========  ================================================================================
metric                    unit      what is timed
========================  ========  ================================================================================
``encode_tokens_per_s``   tokens/s  K and V of all heads into the code basis and to bytes, constants given
``decode_tokens_per_s``   tokens/s  the same bytes to float32 K and V in the model basis
``encode_vs_int4``        x         its time over ``int-4``'s, pair by pair: 40 is forty times slower
``decode_vs_int4``        x         the same for decoding
``exhaustive_vs_encode``  x         a search through every codeword (``exhaustive.py``, for the first tokens, scaled up)
                                    over the codec's encoding of all keys, pair by pair; for codecs with a codebook.
                                    ``codewords`` says how many.
========================  ========  ================================================================================

Rows of other libraries (``rivals.py``) do the job of the preset that ``job`` names; ``encode_vs_preset`` and
``decode_vs_preset`` are their times over that preset's. Input is Gaussian, rounded to fp16 as a cache holds it, and
float32: nothing here depends on the data but HQMQ's ties.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcodec.codec import ROLES, Codec, Params, Payload, Site
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.registry import get
from kvcodec_lab.bench.cache_bench import commit, device_name, spread, versions
from kvcodec_lab.bench.exhaustive import exhaustive
from kvcodec_lab.bench.rivals import Rival, rivals

Row = dict[str, Any]
BASE = "int-4"
EXHAUSTIVE_TOKENS = 128
"""Tokens that an exhaustive search is timed on and scaled up from: it is slow, and its time proportional to them."""


@dataclass(frozen=True)
class Side:
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


class Work:
    """Keys and values of one layer under one spec; ``encode`` and ``decode`` are what is timed."""

    def __init__(self, spec: str, kv: Sequence[Tensor], seed: int) -> None:
        sides = []
        for role, whole in zip(ROLES, kv, strict=True):
            codec = get(spec).codec(role).for_dtype(torch.float16)
            x = whole[:, :, : whole.shape[2] // codec.block_tokens * codec.block_tokens]
            site = Site(0, role, x.shape[1], x.shape[3], seed, x.device)
            sides.append(Side(codec, codec.fit(site, x.half() if codec.needs_sample else None), x))
        self.key, self.value = sides
        self.packed = (self.key.encode(), self.value.encode())
        self.tokens = self.key.x.shape[2]

    def encode(self) -> object:
        """Encode keys and values."""
        return self.key.encode(), self.value.encode()

    def decode(self) -> object:
        """Decode keys and values."""
        return self.key.decode(self.packed[0]), self.value.decode(self.packed[1])


class Search:
    """An exhaustive search for the first tokens of the keys."""

    def __init__(self, key: Side) -> None:
        found = exhaustive(key.codec)
        self.codewords = found[0] if found else 0
        self.params, x = key.params, key.x[:, :, :EXHAUSTIVE_TOKENS]
        self.tokens = x.shape[2]
        self.x = key.codec.to_code(x, key.params).double()
        self.search = found[1] if found else None

    def run(self) -> object:
        """Try every codeword."""
        assert self.search is not None
        return self.search(self.x, self.params)


class RivalWork:
    """The same keys and values in another library."""

    def __init__(self, rival: Rival, kv: Sequence[Tensor]) -> None:
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
    progress: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Time encode and decode of each spec beside ``int-4``, then the rivals that are installed.

    Parameters
    ----------
    specs : sequence of str
    kv_heads, head_dim, tokens : int
        Shape of K and V, one sequence; whole blocks of every codec are taken of ``tokens``.
    device : str
    repeats : int
        Timed pairs per metric, behind one that is not counted.
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
        At once: unknown spec, a shape that no codec takes, codecs that need a model's queries.
    """
    for name, value in (("kv_heads", kv_heads), ("tokens", tokens), ("repeats", repeats)):
        if value < 1:
            raise ShapeError(f"bench codec: {name}={value}; expected a number >= 1.")
    for spec in (BASE, *specs):
        scheme = get(spec)
        for role in ROLES:
            codec = scheme.codec(role)
            codec.layout(head_dim)  # refuses a head_dim it cannot take
            if codec.block_tokens > tokens:
                raise ShapeError(f"bench codec: {spec} encodes {codec.block_tokens} tokens at once; got {tokens}.")
            if codec.needs_queries:
                raise UnsupportedError(f"bench codec: {spec} needs a model's queries to be fitted; leave it out.")
    return _rows(specs, (kv_heads, head_dim, tokens), torch.device(device), repeats, seed, progress or (lambda _: None))


@torch.no_grad()
def _rows(
    specs: Sequence[str],
    shape: tuple[int, int, int],
    device: torch.device,
    repeats: int,
    seed: int,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    heads, dim, tokens = shape
    generator = torch.Generator().manual_seed(seed)
    kv = [torch.randn(1, heads, tokens, dim, generator=generator).half().float().to(device) for _ in ROLES]
    common = {
        "repeats": repeats,
        "shape": f"b1_h{heads}_d{dim}_t{tokens}",
        "device": device_name(device),
        "versions": versions(),
        "commit": commit(),
        "seed": seed,
    }

    def row(spec: str, bits: float, metric: str, unit: str, values: Sequence[float], **more: Any) -> Row:
        return {
            "spec": spec, "effective_bits": bits, "metric": metric, "unit": unit, "values": spread(values), **more,
            **common,
        }  # fmt: skip

    base = Work(BASE, kv, seed)
    for i, spec in enumerate(specs):
        progress(f"{spec} ({i + 1} of {len(specs)})")
        work, bits = Work(spec, kv, seed), get(spec).effective_bits(dim)
        encode = _pairs(work.encode, base.encode, device, repeats)
        decode = _pairs(work.decode, base.decode, device, repeats)
        scale = tokens / work.tokens
        yield row(spec, bits, "encode_tokens_per_s", "tokens/s", [work.tokens / a for a, _ in encode])
        yield row(spec, bits, "decode_tokens_per_s", "tokens/s", [work.tokens / a for a, _ in decode])
        yield row(spec, bits, "encode_vs_int4", "x", [a * scale / b for a, b in encode])
        yield row(spec, bits, "decode_vs_int4", "x", [a * scale / b for a, b in decode])
        every = Search(work.key)
        if every.search is not None:
            pairs = _pairs(every.run, work.key.encode, device, repeats)
            share = work.tokens / every.tokens
            values = [a * share / b for a, b in pairs]
            yield row(spec, bits, "exhaustive_vs_encode", "x", values, codewords=every.codewords)
    for rival in rivals(dim):
        if rival.missing:
            progress(f"{rival.name}: {rival.module} is not installed, left out")
            continue
        progress(rival.name)
        theirs, ours = RivalWork(rival, kv), Work(rival.job, kv, seed)
        encode = _pairs(theirs.encode, ours.encode, device, repeats)
        decode = _pairs(theirs.decode, ours.decode, device, repeats)
        more = {"job": rival.job, "relative_mse": theirs.relative_mse}
        yield row(rival.name, theirs.bits, "encode_tokens_per_s", "tokens/s", [tokens / a for a, _ in encode], **more)
        yield row(rival.name, theirs.bits, "decode_tokens_per_s", "tokens/s", [tokens / a for a, _ in decode], **more)
        yield row(rival.name, theirs.bits, "encode_vs_preset", "x", [a / b for a, b in encode], **more)
        yield row(rival.name, theirs.bits, "decode_vs_preset", "x", [a / b for a, b in decode], **more)


def _pairs(
    job: Callable[[], object], base: Callable[[], object], device: torch.device, repeats: int
) -> list[tuple[float, float]]:
    """Seconds of job and base in turn, so that a machine busy with something else slows both."""
    out = []
    for _ in range(repeats + 1):
        times = []
        for call in (job, base):
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            times.append(time.perf_counter() - start)
        out.append((times[0], times[1]))
    return out[1:]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
