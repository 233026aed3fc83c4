"""``packedkv bench encode``: time encoding into pages.

- ``encode_us``: K and V of all tokens of a shape, in a CUDA graph, dirty L2; other libraries eagerly
- ``encode_roofline_us``: bytes read and written / 4.3 TB/s
- ``append_us``: one new token per sequence; of codecs with blocks of tokens a block's time / its tokens
- ``differing_bytes``: share of bytes that are not the reference's, before timing; above 1e-4 nothing is timed
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Params, Role, Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda import build, encode
from packedkv.kernels.mean import RotatedMean
from packedkv.kernels.spec import encode_spec, text_of
from packedkv.kernels.tokens import NewTokens
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore
from packedkv.store.site import MeanRemoval
from packedkv_lab.bench.decode import ROOFLINE_BYTES_PER_US
from packedkv_lab.bench.packed import FIT_TOKENS, LAYER, mean_of, scheme_of
from packedkv_lab.bench.record import GateError, Recorder
from packedkv_lab.bench.rivals import quantizer_rivals
from packedkv_lab.bench.shapes import SHAPES, Shape, shapes_named
from packedkv_lab.bench.timing import Spread, Timer, flat

ENCODE_SHAPES = tuple(SHAPES[name] for name in ("llm64k", "video", "audio", "b32_8k"))
APPEND_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_DIFFERENT = 1e-4
CHECKED_TOKENS = 128


@dataclass
class Encoding:
    """Keys and values, bf16 ``[B, H, T, D]``, empty pages in random order, and the call that writes them there.

    ``write(keys or None, values or None)`` encodes from slot 0 on. ``mean`` is subtracted from the keys, whose
    positions count from 0.
    """

    spec: str
    shape: Shape
    keys: Tensor
    values: Tensor
    store: PageStore
    params: dict[Role, Params]
    mean: MeanRemoval | None
    write: Callable[[Tensor | None, Tensor | None], object]
    path = "cuda"
    """Which kernels encode, as rows name them."""

    def encode(self) -> None:
        """Encode all tokens, whole blocks of them."""
        key, value = (self.whole(role, x) for role, x in zip(ROLES, (self.keys, self.values), strict=True))
        self.write(key, value)

    def whole(self, role: Role, x: Tensor) -> Tensor:
        """Return ``x`` without an unfinished block at its end."""
        block = self.block(role)
        return x[:, :, : x.shape[2] // block * block]

    def block(self, role: Role) -> int:
        """Tokens of a block."""
        return scheme_of(self.spec).codec(role).block_tokens

    @property
    def bytes_moved(self) -> int:
        """Bytes that encoding must read and write: K and V in bf16, the planes of all whole blocks."""
        s, written = self.shape, 0
        for plane in self.store.layout.planes:
            tokens = self.store.layout.page_tokens // plane.blocks
            written += s.tokens // tokens * plane.field.nbytes * s.batch * s.kv_heads
        return s.bf16_bytes + written


def encode_operator(spec: str, shape: Shape, device: torch.device, seed: int) -> Encoding:
    """Draw keys and values and find the kernel that encodes them; ``UnsupportedError`` without one for both roles."""
    scheme = scheme_of(spec)
    layout = scheme.page_layout(shape.head_dim)
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    keys, values = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in ROLES)
    params: dict[Role, Params] = {}
    for role, x in zip(ROLES, (keys, values), strict=True):
        codec = scheme.codec(role)
        site = Site(LAYER, role, shape.kv_heads, shape.head_dim, seed)
        sample = x[:1, :, :FIT_TOKENS].float().cpu()
        params[role] = {name: p.to(device) for name, p in codec.fit(site, Sample(sample)).items()}
    store = PageStore(layout, shape.batch, shape.kv_heads, device, shape.tokens)
    order = torch.randperm(store.table.numel(), generator=generator, device=device)
    store.table = order.view(store.table.shape).int().contiguous()
    first = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    if (mean := mean_of(scheme, shape.kv_heads, shape.head_dim, device)) is not None:
        keys += mean.at(mean.given, torch.arange(shape.tokens, device=device)[None]).to(keys.dtype)
    write = writer(scheme, shape, store, params, first, mean)
    return Encoding(spec, shape, keys, values, store, params, mean, write)


Write = Callable[[Tensor | None, Tensor | None], object]


def writer(
    scheme: KVScheme,
    shape: Shape,
    store: PageStore,
    params: dict[Role, Params],
    first: Tensor,
    mean: MeanRemoval | None = None,
) -> Write:
    """Return the call that encodes keys and values into the pages; ``UnsupportedError`` without a kernel."""
    if reason := build.refusal(first.device):
        raise UnsupportedError(f"no kernel encodes {scheme}: {reason}")
    target = encode_spec(scheme.key, scheme.value, shape.head_dim, store.layout.page_tokens, mean=mean is not None)
    both: dict[Role, Constants] = {}
    for role in ROLES:
        if (encoder := target.encoder(role)) is None:
            raise UnsupportedError(f"no kernel encodes the {role}s of {scheme}")
        both[role] = constants_for(encoder, params[role], shape.kv_heads, shape.head_dim)
    text, less = text_of(target), None
    if mean is not None and mean.given is not None:
        at = torch.arange(shape.tokens, device=first.device)[None]
        less = RotatedMean(mean.given, *mean.turning.angles(at), mean.turning.interleaved)

    def write(keys: Tensor | None, values: Tensor | None) -> None:
        removal = less if less is None or keys is None else less._replace(
            cosines=less.cosines[:, : keys.shape[2]], sines=less.sines[:, : keys.shape[2]]
        )  # fmt: skip
        parts: dict[Role, Tensor | None] = {"key": keys, "value": values}
        new = NewTokens({role: x for role, x in parts.items() if x is not None}, first, less=removal)
        encode.encode_to_pages(new, store.pages, store.table, spec=text, key=both["key"], value=both["value"])

    return write


@torch.no_grad()
def differing_bytes(work: Encoding) -> float:
    """Share of bytes that differ from the reference on the CPU: first and last tokens of two sequences, all heads.

    On the CPU, because there the reference's bytes are defined.
    """
    work.encode()
    scheme, different, total = scheme_of(work.spec), 0, 0
    for role, x in zip(ROLES, (work.keys, work.values), strict=True):
        codec, block = scheme.codec(role), work.block(role)
        params = {name: p.cpu() for name, p in work.params[role].items()}
        whole = work.whole(role, x).shape[2]
        count = min(-(-CHECKED_TOKENS // block) * block, whole)
        for at in sorted({0, whole - count}):
            fields = work.store.read(role, at, at + count)
            for b in sorted({0, work.shape.batch - 1}):
                part = x[b : b + 1, :, at : at + count].float().cpu()
                if role == "key" and work.mean is not None and work.mean.given is not None:
                    places, turning = torch.arange(at, at + count)[None], work.mean.turning
                    part = part - turning.turned(work.mean.given.cpu()[:, :, None], *turning.angles(places))
                want = codec.encode(codec.to_code(part, params), params)
                for name, field in want.items():
                    a = field[0].contiguous().view(torch.uint8)
                    other = fields[name][b].cpu().contiguous().view(torch.uint8)
                    different += int((a != other).sum())
                    total += a.numel()
    return different / max(total, 1)


# -- rows --------------------------------------------------------------------------------------------------------------


def append_shape(batch: int) -> Shape:
    """Pages of one block per sequence; 8 KV heads.

    >>> append_shape(4).name
    'append_b4'
    """
    return Shape(f"append_b{batch}", batch, 32, 8, 128, 64)


def encode_shapes(names: str) -> tuple[tuple[Shape, ...], tuple[int, ...]]:
    """Shapes and batches of ``encode_rows`` by name: any shape of the benches, ``append_b<n>``, or ``append`` for all.

    >>> shapes, batches = encode_shapes("llm64k,append_b8")
    >>> [shape.name for shape in shapes], batches
    (['llm64k'], (8,))
    """
    given = [name for part in names.split(",") if (name := part.strip())]
    sizes = {int(name[8:]) for name in given if name[:8] == "append_b" and name[8:].isdigit()}
    batches = APPEND_BATCHES if "append" in given else tuple(sorted(sizes - {0}))
    others = [name for name in given if name != "append" and not (name[:8] == "append_b" and name[8:].isdigit())]
    return tuple(shapes_named(",".join(others))) if others or not batches else (), batches


def encode_rows(
    specs: Sequence[str],
    recorder: Recorder,
    shapes: Sequence[Shape] = ENCODE_SHAPES,
    batches: Sequence[int] = APPEND_BATCHES,
) -> None:
    """Time prefills of ``shapes``, and appends of a token to each of ``batches`` sequences, unless recorded already."""
    for shape in (*shapes, *map(append_shape, batches)):
        metric = "append_us" if shape.name.startswith("append") else "encode_us"
        for spec in specs:
            if recorder.late(f"{spec} at {shape.name}"):
                return
            if not recorder.has(spec, metric, shape.name):
                _preset_rows(spec, shape, metric, recorder)
        if metric == "encode_us" and recorder.libraries and shape.name == "llm64k":
            _library_rows(shape, recorder)
        if recorder.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _preset_rows(spec: str, shape: Shape, metric: str, recorder: Recorder) -> None:
    bits, timer = scheme_of(spec).effective_bits(shape.head_dim), recorder.timer
    with recorder.case(spec, shape.name, metric, bits=bits, more={"sizes": shape.sizes()}) as case:
        work = encode_operator(spec, shape, recorder.device, recorder.seed)
        case.more["path"] = work.path
        share = differing_bytes(work)
        if share > MOST_DIFFERENT:
            raise GateError(f"{share:.1e} of the bytes are not the reference's")
        if metric == "append_us":
            times = append_times(work, timer)
            case.add(metric, "us", times, differing_bytes=share)
            return
        times = timer.cold(work.encode, 30 if shape.batch == 1 else 12)
        case.add("differing_bytes", "x", flat(share, 12))
        case.add("encode_roofline_us", "us", flat(work.bytes_moved / ROOFLINE_BYTES_PER_US), bytes=work.bytes_moved)
        case.add(metric, "us", times)


def append_times(work: Encoding, timer: Timer) -> Spread:
    """Time one token per sequence; a role with blocks of n tokens counts with a block's time / n."""
    given = dict(zip(ROLES, (work.keys, work.values), strict=True))
    groups: dict[int, list[Any]] = {}
    for role in ROLES:
        groups.setdefault(work.block(role), []).append(role)
    total = dict.fromkeys(("p20", "p50", "p80"), 0.0)
    for block, roles in groups.items():
        # contiguous, like the output of a model's projection
        token = {role: given[role][:, :, :block].clone() if role in roles else None for role in ROLES}
        times = timer.cold(lambda token=token: work.write(token["key"], token["value"]), 30)  # type: ignore[misc]
        total = {p: round(x + times[p] / block, 4) for p, x in total.items()}
    return total


@torch.no_grad()
def _library_rows(shape: Shape, recorder: Recorder) -> None:
    size = (shape.kv_heads * shape.tokens * shape.batch, shape.head_dim)
    generator = torch.Generator(recorder.device).manual_seed(recorder.seed)
    kv = [torch.randn(size, generator=generator, device=recorder.device, dtype=torch.bfloat16) for _ in ROLES]
    for rival in quantizer_rivals(shape.head_dim):
        more = {"job": rival.job, "sizes": shape.sizes()}
        if recorder.has(rival.name, "encode_us", shape.name):
            continue
        with recorder.case(rival.name, shape.name, "encode_us", more=more) as case:
            if rival.missing:
                raise ModuleNotFoundError(rival.module)
            packed = [rival.encode(x) for x in kv]
            case.bits = sum(map(rival.nbytes, packed)) * 8 / sum(x.numel() for x in kv)
            times = recorder.timer.eager(lambda rival=rival: [rival.encode(x) for x in kv], 5)  # type: ignore[misc]
            case.add("encode_us", "us", times)
