"""``packedkv bench codec``: time codecs on any device, without kernels, keys and values together.

- ``encode_tokens_per_s``: K and V of all heads into the code basis and to bytes, constants given
- ``decode_tokens_per_s``: the same bytes to float32 K and V in the model basis
- ``encode_vs_int4``, ``decode_vs_int4``: the time over that of ``int-4``, pair by pair
- ``encode_vs_preset``, ``decode_vs_preset``: of other libraries, the time over that of the preset ``job``

Input is Gaussian, rounded to fp16; times do not depend on the data, except HQMQ's ties.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Sample, Site
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.registry import get
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.rivals import QuantizerRival, quantizer_rivals
from packedkv_lab.bench.shapes import Shape
from packedkv_lab.bench.timing import in_turn, ratios, spread

BASE = "int-4"


class CodecWork:
    """Keys and values of one layer under one spec; ``encode`` and ``decode`` are what is timed."""

    def __init__(self, spec: str, kv: Sequence[Tensor], seed: int) -> None:
        self.roles = []
        for role, whole in zip(ROLES, kv, strict=True):
            codec = get(spec).codec(role).for_dtype(torch.float16)
            x = whole[:, :, : whole.shape[2] // codec.block_tokens * codec.block_tokens]
            site = Site(0, role, x.shape[1], x.shape[3], seed, x.device)
            self.roles.append((codec, codec.fit(site, Sample(x.half())), x))
        self.packed = self.encode()
        self.tokens = self.roles[0][2].shape[2]

    def encode(self) -> list[Any]:
        """Encode keys and values: model basis to bytes."""
        return [codec.encode(codec.to_code(x, params), params) for codec, params, x in self.roles]

    def decode(self) -> list[Tensor]:
        """Decode keys and values: bytes to the model basis."""
        pairs = zip(self.roles, self.packed, strict=True)
        return [codec.from_code(codec.decode(packed, params), params) for (codec, params, _), packed in pairs]


class QuantizerWork:
    """The same keys and values in another library."""

    def __init__(self, rival: QuantizerRival, kv: Sequence[Tensor]) -> None:
        self.rival, self.rows = rival, [x.flatten(0, 2) for x in kv]
        self.packed = self.encode()
        self.tokens = kv[0].shape[2]
        self.bits = sum(map(rival.nbytes, self.packed)) * 8 / sum(x.numel() for x in self.rows)
        pairs = zip(self.decode(), self.rows, strict=True)
        errors = [float((y.float() - x).square().sum() / x.square().sum()) for y, x in pairs]
        self.relative_mse = sum(errors) / len(errors)

    def encode(self) -> list[Any]:
        """Encode keys and values."""
        return [self.rival.encode(x) for x in self.rows]

    def decode(self) -> list[Tensor]:
        """Decode keys and values."""
        return [self.rival.decode(x) for x in self.packed]


@torch.no_grad()
def codec_rows(specs: Sequence[str], shape: Shape, recorder: Recorder, *, repeats: int = 5) -> None:
    """Time encode and decode of each spec beside ``int-4``, then the rivals that are installed.

    One sequence of the shape; whole blocks of every codec are taken of its tokens.
    """
    for spec in (BASE, *specs):
        for role in ROLES:
            codec = get(spec).codec(role)
            codec.layout(shape.head_dim)  # refuses a head_dim it cannot take
            if codec.block_tokens > shape.tokens:
                raise ShapeError(
                    f"bench codec: {spec} encodes {codec.block_tokens} tokens at once; got {shape.tokens}."
                )
            if "queries" in codec.needs:
                raise UnsupportedError(f"bench codec: {spec} needs a model's queries to be fitted; leave it out.")
    heads, dim, tokens, seed = shape.kv_heads, shape.head_dim, shape.tokens, recorder.seed
    generator = torch.Generator().manual_seed(seed)
    kv = [torch.randn(1, heads, tokens, dim, generator=generator).half().float().to(recorder.device) for _ in ROLES]

    def beside(
        name: str, bits: float, work: CodecWork | QuantizerWork, base: CodecWork, than: str, **more: Any
    ) -> None:
        """Write rows of encode and decode, in tokens per second and as multiples of the time of ``base``."""

        def add(metric: str, unit: str, values: Sequence[float]) -> None:
            recorder.add(name, bits, metric, unit, shape.name, spread(values), repeats=repeats, **more)

        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "encode": (work.encode, base.encode),
            "decode": (work.decode, base.decode),
        }
        times = {job: in_turn(pair, recorder.device, repeats) for job, pair in pairs.items()}
        for job, (ours, _) in times.items():
            add(f"{job}_tokens_per_s", "tokens/s", [work.tokens / seconds for seconds in ours])
        for job, (ours, theirs) in times.items():
            add(f"{job}_vs_{than}", "x", ratios(ours, theirs, tokens / work.tokens))

    base = CodecWork(BASE, kv, seed)
    for spec in specs:
        beside(spec, get(spec).effective_bits(dim), CodecWork(spec, kv, seed), base, "int4")
    for rival in quantizer_rivals(dim) if recorder.libraries else ():
        if rival.missing:
            recorder.say(f"{rival.name}: {rival.module} is not installed, left out")
            continue
        theirs, ours = QuantizerWork(rival, kv), CodecWork(rival.job, kv, seed)
        beside(rival.name, theirs.bits, theirs, ours, "preset", job=rival.job, relative_mse=theirs.relative_mse)
