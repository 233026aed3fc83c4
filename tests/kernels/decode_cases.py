"""Cases of decode attention for the readers of all codecs: pages as the codecs write them, the kernel, the reference.

A test names two codecs and cases; ``check_all`` encodes random rows into a pool with a random page table, poisons every
byte that the kernel must not interpret, runs the whole kernel on the emulated machine and compares with attention in
float64 over what the codecs decode.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Params, Role, Sample, Site
from packedkv.codecs.ghost import Ghost
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda.arguments import DecodeArgs
from packedkv.kernels.mean import KeyMean, key_mean, pairs_of
from packedkv.kernels.spec import DecodeSpec, decode_spec, includes
from packedkv.layout import PageLayout
from packedkv.store.pages import PageStore
from tests.kernels import harness

KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
POISON = 2**30  # page ids that must not be looked up


MOST = 4096
"""Tokens of a sequence that constants of mixed channels are fitted on."""


def fit_klt(codec: Ghost, site: Site, sample: Tensor) -> Params:
    """Constants of ``transform=klt`` from keys or values, and random queries that ask more of some directions."""
    rng, dim = torch.Generator().manual_seed(site.head_dim), site.head_dim
    queries = torch.randn(1, site.num_heads, 200, dim, generator=rng) * torch.logspace(-1, 1, dim)
    return codec.fit(site, Sample(sample[:, :, :MOST], queries @ torch.randn(dim, dim, generator=rng)))


class Klt(Ghost):
    """Ghost with ``transform=klt``, fitted like any other codec."""

    __module__ = Ghost.__module__  # by which its kernels are found

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        assert sample.tensor is not None
        return super().fit(site, sample) if sample.queries is not None else fit_klt(self, site, sample.tensor)


@dataclass(frozen=True)
class Means:
    """The mean before RoPE that keys are held without.

    ``size`` of its channels; ``few``: that many of a head's pairs have one, 0 for all. ``first``: position of slot 0 of
    each sequence, as many as ``lens``. ``rotary``: channels that turn, 0 for all.
    """

    first: tuple[int, ...]
    size: float = 1.0
    few: int = 0
    base: float = 1e4
    rotary: int = 0
    interleaved: bool = False
    scaling: float = 1.0
    each: bool = False  # a mean of its own for each sequence

    def made(self, case: "Case", dim: int, rng: torch.Generator) -> tuple[KeyMean, Tensor, Tensor]:
        """Its constants; the mean float64 ``[B, H, D]`` and the frequencies."""
        mean = torch.randn(len(case.lens) if self.each else 1, case.heads, dim, generator=rng) * self.size
        turning = self.rotary or dim
        theta = self.base ** (-torch.arange(0, turning, 2).float() / turning)
        if self.few:
            channels = torch.tensor(pairs_of(dim, turning, self.interleaved))
            for head in range(case.heads):
                gone = torch.randperm(dim // 2, generator=rng)[self.few :]
                mean[:, head, channels[gone].flatten()] = 0.0
        made = key_mean(mean, theta.tolist(), scaling=self.scaling, interleaved=self.interleaved)
        return made, mean.double().expand(len(case.lens), -1, -1), theta.double()

    def turned(self, mean: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
        """``R_t mu`` in float64 at each position, ``[H, n, D]``, for a mean ``[H, D]``."""
        x, half = mean[:, None].repeat(1, len(positions), 1), len(theta)
        c, s = ((f(positions[:, None].double() * theta)) * self.scaling for f in (torch.cos, torch.sin))
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if self.interleaved else (
            slice(0, half), slice(half, 2 * half))  # fmt: skip
        a, b = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = a * c - b * s, b * c + a * s
        return x


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call.

    ``lens`` and ``start`` are the live slots of each sequence, ``dense`` the tokens of each that are held dense.
    ``spread``: powers of two over which rows differ in size. ``shift`` is added to every number, ``loud`` multiplies
    every 16th channel of keys, ``values`` all values. ``order``: of the emulated threads, 0 for one after another.
    ``alone``: dense tokens have the last split for themselves. ``slack`` multiplies the error that is allowed.
    ``change`` edits the rows of a role in place.
    """

    lens: tuple[int, ...] = (64,)
    start: tuple[int, ...] | None = None
    heads: int = 1
    group: int = 4
    splits: int = 1
    alone: bool = False
    sinks: bool = False
    dense: tuple[int, ...] | None = None
    dense_start: tuple[int, ...] | None = None
    softcap: float = 0.0
    q_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.float32
    dense_dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    spread: int = 0
    shift: float = 0.0
    loud: float = 1.0
    values: float = 1.0
    seed: int = 0
    order: int = 0
    slack: float = 1.0
    means: Means | None = None
    change: Callable[[Tensor, Role], None] | None = None


# what every reader is tried with: where sequences begin and end, heads, merging, options, numbers. Two kernels do: more
# than 4 query heads, a soft cap and dense tokens come together (APART has them one by one)
CASES = (
    Case((130, 7, 64), heads=2, group=8, softcap=20.0, dense=(0, 0, 1)),
    Case((0, 1, 15, 65), group=1, heads=2),
    Case((33, 96, 31), start=(3, 95, 0), group=12, splits=2, softcap=20.0, dense=(0, 2, 0)),
    Case((200, 190, 10), start=(130, 150, 10), splits=3, group=3, order=3),
    Case((250, 17, 0), splits=13, group=6, softcap=20.0, dense=(3, 0, 1)),  # more splits than a merge reads ahead
    Case((65, 0, 100), dense=(5, 1, 9), dense_start=(2, 0, 3), sinks=True, splits=2, group=8, softcap=20.0),
    Case((128, 40), dense=(0, 0), softcap=20.0, sinks=True, scale=0.3, group=5),
    Case((130, 64), spread=6, seed=1),
    Case((130, 64), shift=4.0, loud=10.0, seed=2),
)
APART = (
    Case((130, 7, 64), heads=2, group=8),
    Case((33, 96, 31), start=(3, 95, 0), group=12, splits=2),
    Case((128, 40), softcap=20.0, sinks=True, scale=0.3, group=5),
    Case((128, 40), softcap=20.0, splits=2),
    Case((250, 17, 0), splits=13, dense=(3, 0, 1)),
    Case((65, 0, 100), dense=(5, 1, 9), dense_start=(2, 0, 3), sinks=True, splits=2, group=7),
)


@dataclass(frozen=True)
class Geometry:
    """Template arguments of the kernel besides the readers: page, tile, warps, stages of a ring, teams of a CTA.

    ``table_shrink``: how often the room of look-up tables is halved.
    """

    page: int = 64
    tile: int = 32
    warps: int = 2
    stages: int = 2
    teams: int = 1
    table_shrink: int = 0


_SOURCE = """
#define KV_HALVINGS {table_shrink}
#include "decode.cuh"
{includes}
constexpr int WARPS = {warps}, TEAMS = {teams}, MERGERS = 2;
constexpr bool OUTLIERS = kv::scratch_bytes<{key}>(0) + kv::scratch_bytes<{value}>(0) > 0;
KV_KERNEL void combine(KV_GRID_CONSTANT kv::DecodeArgs a) {{
  kv::combine<{dim}, MERGERS, kv::is_mixed<{value}>(0)>(a);
}}
extern "C" int page_bytes() {{ return kv::page_bytes<{key}, {value}>({page}); }}
extern "C" int args_bytes() {{ return sizeof(kv::DecodeArgs); }}
"""
_VARIANT = """
constexpr int HEADS_{name} = OUTLIERS || {group} > 4 ? 8 : 4;
using Kernel_{name} =
    kv::Decoder<{key}, {value}, {dim}, {page}, {tile}, WARPS, {stages}, {cap}, {dense}, HEADS_{name}, TEAMS, {pairs}>;
KV_KERNEL void decode_{name}(KV_GRID_CONSTANT kv::DecodeArgs a) {{ Kernel_{name}::run(a); }}
extern "C" int heads_{name}() {{ return HEADS_{name}; }}
extern "C" void run_{name}(const kv::DecodeArgs* a, int batch) {{
  // teams: two blocks for all pieces of as many heads as have the same tables
  const int x = TEAMS > 1 ? 2 : a->slots, y = TEAMS > 1 ? a->heads / a->alike : a->heads * a->tiles;
  const int z = TEAMS > 1 ? 1 : batch;
  kv::launch(x, y, z, TEAMS * WARPS * 32, Kernel_{name}::SHARED, decode_{name}, *a);
  const int shared = kv::combine_shared({dim}, MERGERS);
  if (a->slots > 1) kv::launch(batch * a->heads * a->group, 1, 1, MERGERS * 32, shared, combine, *a);
}}
"""


class Variant(NamedTuple):
    """Template arguments that depend on the call: soft cap, the kind of dense tokens, query heads of a tile."""

    cap: bool
    dense: int
    group: int
    pairs: int

    @property
    def name(self) -> str:
        """Its suffix in C++."""
        return f"{int(self.cap)}_{self.dense + 1}_{self.group}_{self.pairs}"


def _variant(pair: DecodeSpec, case: Case) -> Variant:
    # dense tokens may join the codes, whose channels may have factors
    joins = KINDS[case.dense_dtype] + 2 * pair.joins * (1 + pair.value.multiplies)
    pairs = 0 if case.means is None else -(-(case.means.few or pair.head_dim // 2) // 16) * 16
    few = case.group <= 4 or pair.head_dim > 256
    return Variant(case.softcap > 0, -1 if case.dense is None else joins, 4 if few else 8, pairs)


@functools.cache
def library(pair: DecodeSpec, geometry: Geometry, variants: frozenset[Variant]) -> harness.Library:
    """Build the kernels for two readers: all in one source, as half the time goes into what they share."""
    names = {"key": pair.key.type, "value": pair.value.type, "dim": pair.head_dim, **vars(geometry)}
    source = _SOURCE.format(includes="\n".join(includes(pair.key, pair.value)), **names)
    for variant in sorted(variants):
        arguments = {**variant._asdict(), "cap": str(variant.cap).lower()}
        source += _VARIANT.format(name=variant.name, **arguments, **names)
    lib = harness.build(source)
    assert lib.enter("args_bytes", result=ctypes.c_int) == ctypes.sizeof(DecodeArgs)
    return lib


def each_in_turn(firsts: Iterable[Any], seconds: Sequence[Any]) -> list[Any]:
    """Pairs for ``parametrize``: every first beside one second, in turn; the other seconds are marked ``wide``."""
    return [
        pytest.param(first, second, marks=[] if j == i % len(seconds) else [pytest.mark.wide])
        for i, first in enumerate(firsts)
        for j, second in enumerate(seconds)
    ]


def two_dims_in_turn(firsts: Iterable[Any], odd: Sequence[int] = (64, 96)) -> list[Any]:
    """Pairs for ``parametrize``: every first with a head_dim of ``odd`` and with 128 or 256; the others are wide.

    So is 512.
    """
    whole = (128, 256)  # rows of 128 channels are often interleaved, and other rows not
    made = []
    for i, first in enumerate(firsts):
        chosen = odd[i % len(odd)], whole[(i + i // 2) % 2]
        made += [
            pytest.param(first, d, marks=[] if d in chosen else [pytest.mark.wide]) for d in sorted({*odd, *whole, 512})
        ]
    return made


def rows(case: Case, role: Role, dim: int, tokens: int, rng: torch.Generator) -> Tensor:
    """Random rows ``[B, H, tokens, D]`` with the trouble that the case asks for; the third row is all zero."""
    shape = (len(case.lens), case.heads, tokens, dim)
    x = torch.randn(shape, generator=rng) + case.shift
    if role == "key":
        x[..., ::16] *= case.loud
    else:
        x *= case.values
    if case.spread:
        x *= 2.0 ** torch.randint(-case.spread, case.spread + 1, (*shape[:3], 1), generator=rng)
    if tokens > 2:
        x[:, :, 2] = 0.0
    if case.change is not None:
        case.change(x, role)
    return x.half().float()


def _poison(store: PageStore, case: Case, rng: torch.Generator) -> None:
    """Overwrite what is not live with random bytes, many of them 255, and page ids nobody may look up."""
    size = store.layout.page_tokens
    for plane in store.layout.planes:
        view, per = store.layout.view_plane(store.pages, plane), size // plane.blocks
        rows = store.layout.side(plane.role).rows(plane.field)
        for b, (first, last) in enumerate(_live(case)):
            for column in range(store.table.shape[1]):
                held = view[int(store.table[b, column])]  # [H, blocks, *shape]
                for block in range(plane.blocks):
                    at = column * size + block * per
                    target = held[:, block].view(torch.uint8)
                    if rows > 1:
                        dead = [t for t in range(per) if not first <= at + t < last]
                        target[:, dead] = _noise((case.heads, len(dead), *target.shape[2:]), rng)
                    elif at + per <= first or at >= last:
                        target[:] = _noise(tuple(target.shape), rng)
    for b, (first, last) in enumerate(_live(case)):
        store.table[b, : first // size] = POISON
        store.table[b, -(-last // size) if last > first else 0 :] = POISON


def _noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    noise = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    noise[torch.rand(shape, generator=rng) < 0.3] = 255
    return noise


def _live(case: Case) -> list[tuple[int, int]]:
    starts = case.start or (0,) * len(case.lens)
    return [(s, n) if n > s else (0, 0) for s, n in zip(starts, case.lens, strict=True)]


def attention(
    case: Case, q: Tensor, ks: list[Tensor], vs: list[Tensor], sinks: Tensor | None, rounded: bool
) -> tuple[Tensor, Tensor]:
    """Attention in float64, ``[B, HQ, D]`` and log-sum-exp; ``rounded``: with q, k, v and p in bf16."""

    def rnd(x: Tensor) -> Tensor:
        return x.float().bfloat16().double() if rounded else x.double()

    dim = q.shape[-1]
    scale = dim**-0.5 if case.scale is None else case.scale
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            k, v = rnd(ks[b][n // case.group]), rnd(vs[b][n // case.group])
            s = k @ rnd(q[b, n]) * scale
            if case.softcap:
                s = case.softcap * torch.tanh(s / case.softcap)
            if sinks is not None:
                s = torch.cat([s, sinks[n : n + 1].double()])
            if not s.numel():
                continue
            p = (s - s.max()).exp()
            lse[b, n] = s.max() + p.sum().log()
            out[b, n] = rnd(p)[: len(v)] @ v / p.sum()
    return out, lse


def check_all(
    key: Codec,
    value: Codec,
    dim: int,
    cases: Sequence[Case],
    geometry: Geometry | None = None,
    tolerance: float = 1.0,
    changed: Callable[[DecodeSpec], DecodeSpec] = lambda pair: pair,
) -> None:
    """Run the kernel on each case and compare it with float64 attention over the decoded pages.

    Codecs are read as the library reads them, or as ``changed`` says. The kernels of all cases are compiled together,
    in half the time.

    The relative error (L2 of a head's output, root mean square over heads) may be ``tolerance`` times that of attention
    with q, k, v and p in bf16, or 1e-3 if that is more; log-sum-exp may be off by twice as much.
    """
    geometry = geometry or Geometry()
    pair = changed(decode_spec(key, value, dim, geometry.page))
    variants = frozenset(_variant(pair, case) for case in cases)
    for case in cases:
        try:
            _check({"key": key, "value": value}, pair, case, geometry, tolerance, variants)
        except Exception as error:
            error.add_note(str(case))
            raise


def _check(
    codecs: dict[Role, Codec],
    pair: DecodeSpec,
    case: Case,
    geometry: Geometry,
    tolerance: float,
    variants: frozenset[Variant],
) -> None:
    lib, variant, dim = library(pair, geometry, variants), _variant(pair, case), pair.head_dim
    rng = torch.Generator().manual_seed(case.seed)
    b, h, hq = len(case.lens), case.heads, case.heads * case.group
    layout = PageLayout(codecs["key"].layout(dim), codecs["value"].layout(dim), geometry.page)
    assert lib.enter("page_bytes", result=ctypes.c_int) == layout.page_bytes

    columns = max(1, -(-max(case.lens) // geometry.page))
    store = PageStore(layout, b, h, torch.device("cpu"))
    store.pages = _noise((b * columns + 3, h, layout.page_bytes), rng)
    store.table = torch.randperm(b * columns + 3, generator=rng)[: b * columns].view(b, columns).int()
    constants: dict[Role, Constants] = {}
    decoded: dict[str, Tensor] = {}
    for role, codec in codecs.items():
        x = rows(case, role, dim, columns * geometry.page, rng)
        params = codec.fit(Site(1, role, h, dim, seed=case.seed), Sample(x))
        payload = codec.encode(codec.to_code(x, params), params)
        store.write(role, 0, payload)
        decoded[role] = codec.from_code(codec.decode(payload, params), params)
        constants[role] = constants_for(getattr(pair, role), params, h, dim)
    _poison(store, case, rng)

    q = torch.randn(b, hq, dim, generator=rng).to(case.q_dtype)
    sinks = torch.randn(hq, generator=rng) if case.sinks else None
    live = _live(case)
    ks = [decoded["key"][i, :, first:last] for i, (first, last) in enumerate(live)]
    vs = [decoded["value"][i, :, first:last] for i, (first, last) in enumerate(live)]
    held: KeyMean | None = None
    if case.means is not None:
        held, mean, theta = case.means.made(case, dim, rng)
        assert held.pairs == variant.pairs
        for i, (first, last) in enumerate(live):
            positions = case.means.first[i] + torch.arange(first, last)
            ks[i] = ks[i].double() + case.means.turned(mean[i], theta, positions)
    dense: list[Tensor] = []
    if case.dense is not None:
        width = max(case.dense) + 2
        dense = [torch.full((b, h, width, dim), torch.nan, dtype=case.dense_dtype) for _ in range(2)]
        for i, n in enumerate(case.dense):
            first = case.dense_start[i] if case.dense_start else 0
            for x, live_rows in zip(dense, (ks, vs), strict=True):
                x[i, :, first:n] = torch.randn(h, n - first, dim, generator=rng).to(x.dtype)
                live_rows[i] = torch.cat([live_rows[i], x[i, :, first:n].float()], 1)

    out, lse = torch.full((b, hq, dim), torch.nan, dtype=case.out_dtype), torch.full((b, hq), torch.nan)
    slots = case.splits + (case.dense is not None and variant.dense < 2)  # dense tokens apart have a slot
    with lib.memory() as memory:

        def put(x: Tensor | None, write: bool = False) -> int | None:
            return None if x is None else memory.put(x, write)

        args = DecodeArgs()
        args.q, args.q_batch, args.q_head = put(q), hq * dim, dim
        args.pages, args.page_table, args.table_row = put(store.pages), put(store.table), columns
        args.page_bytes = store.pages.shape[2]
        args.seq_lens, args.start = put(_ints(case.lens)), put(_ints(case.start))
        if dense:
            width = dense[0].shape[2]
            args.dense_k, args.dense_v = put(dense[0]), put(dense[1])
            args.dense_k_batch, args.dense_k_head, args.dense_k_token = h * width * dim, width * dim, dim
            args.dense_v_batch, args.dense_v_head, args.dense_v_token = h * width * dim, width * dim, dim
            args.dense_width, args.dense_kind = width, KINDS[case.dense_dtype]
            args.dense_lens, args.dense_start = put(_ints(case.dense)), put(_ints(case.dense_start))
        args.sinks = put(sinks)
        args.part_o = put(torch.full((b * hq, slots, dim), torch.nan), write=True)
        args.part_m = put(torch.full((b * hq, slots), torch.nan), write=True)
        args.part_l = put(torch.full((b * hq, slots), torch.nan), write=True)
        args.out, args.out_batch, args.out_head = put(out, write=True), hq * dim, dim
        args.lse, alike = put(lse, write=True), True
        for role, (table, factor, order, matrix) in constants.items():
            to = getattr(args, role)
            to.block, to.matrix = order, put(matrix)
            if table is not None:
                to.table, to.table_bytes = put(table), table.shape[-1]
                to.table_head = table.stride(0) if table.shape[0] > 1 else 0
                alike &= table.dim() == 3 or len(table) == 1
            if factor is not None:
                to.factor, to.factor_batch = put(factor), h * dim if factor.shape[0] > 1 else 0
        if held is not None and case.means is not None:
            args.mean.mean, args.mean.table = put(held.mean), put(held.table)
            args.mean.placed = put(_ints(case.means.first))
            args.mean.batch = h * dim if case.means.each else 0
            args.mean.table_head = held.table.shape[1] if held.table.shape[0] > 1 else 0
        args.q_kind, args.out_kind = KINDS[case.q_dtype], KINDS[case.out_dtype]
        heads = lib.enter(f"heads_{variant.name}", result=ctypes.c_int)
        args.heads, args.group, args.tiles = h, case.group, -(-case.group // heads)
        args.splits, args.slots, args.capacity = case.splits, slots, columns * geometry.page
        args.runs = case.splits - case.alone
        args.alike = h if alike and not args.mean.table_head else 1
        args.pieces = b * args.alike * args.tiles * case.splits
        args.scale2 = (dim**-0.5 if case.scale is None else case.scale) * math.log2(math.e)
        args.softcap = case.softcap
        lib.enter(f"run_{variant.name}", ctypes.byref(args), b, seed=case.order)

    want, want_lse = attention(case, q, ks, vs, sinks, rounded=False)
    plain, plain_lse = attention(case, q, ks, vs, sinks, rounded=True)
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), f"no tokens: {empty.tolist()}, log-sum-exp {lse.tolist()}"
    if not bool(empty.all()):
        off = float((lse.double() - want_lse)[~empty].abs().max())
        allowed = 2 * max(float((plain_lse - want_lse)[~empty].abs().max()), 1e-3)
        assert off <= allowed, f"log-sum-exp off by {off:.2e}, allowed {allowed:.2e}"
    error, bound = _relative(out.double(), want), tolerance * case.slack * max(_relative(plain, want), 1e-3)
    assert error <= bound, f"relative error {error:.2e}, allowed {bound:.2e}"


def _ints(x: tuple[int, ...] | None) -> Tensor | None:
    return None if x is None else torch.tensor(x, dtype=torch.int32)


def _relative(x: Tensor, want: Tensor) -> float:
    norm = want.norm(dim=-1)
    # where an all-zero token takes the whole weight, what is left is the tail of a softmax
    norm = norm.clamp_min(1e-3 * float(norm.max()) or 1.0)
    return float(((x - want).norm(dim=-1) / norm).square().mean().sqrt())
