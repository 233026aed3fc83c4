"""Encode kernels, emulated: every byte of the page pool as the reference has it."""

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Sample, Site
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.ghost import Ghost, levels, scales
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.octopus import Octopus, OctopusQJL
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant
from packedkv.kernels.codecs.hqmq import MOST_PAIRS, PAIRS, SIDE, cell_rivals
from packedkv.kernels.codecs.tables import wall_table
from packedkv.kernels.constants import constants_for
from packedkv.kernels.cuda.arguments import EncodeArgs, EncodeRoleArgs
from packedkv.kernels.spec import encoder as encoder_of
from packedkv.layout import PageLayout
from packedkv.ops.hadamard import block_hadamard, power_of_two_divisor
from packedkv.ops.lloyd_max import midpoints, unit_levels
from packedkv.ops.quaternion import UNITS, products, random_units
from packedkv.ops.widths import put_back, width_cuts
from packedkv.store.pages import PageStore
from tests.kernels.conftest import normal
from tests.kernels.decode_cases import Klt, two_dims_in_turn
from tests.kernels.harness import Out, build

KINDS = (torch.float16, torch.bfloat16, torch.float32)
HEADS = 2

CALLS = {
    "rows": ("encode_side<kv::Role<{type}, {order}, {factor}>>", "kv::ENCODE_THREADS", "0"),
    "blocks": ("encode_blocks<{type}, {factor}>", "{type}::THREADS", "0"),
    "table": (
        "encode_with_table<kv::Role<{type}, {order}, {factor}>>", "kv::TABLE_THREADS", "kv::table_bytes<{type}>()",
    ),
}  # fmt: skip
"""By the form of an encoder: what its kernel calls, threads of a block, bytes of shared memory."""


class Encoders:
    """Encoders of several codecs, compiled together for the emulated machine."""

    def __init__(self, codecs: Sequence[Codec], head_dim: int) -> None:
        self.codecs, self.dim = list(codecs), head_dim
        self.encoders = [encoder_of(codec, head_dim, "key") for codec in codecs]
        lines = [*dict.fromkeys(f'#include "{encoder.header}"' for encoder in self.encoders)]
        for i, encoder in enumerate(self.encoders):
            factor = "NONE" if not encoder.factor else "INVERSE" if encoder.divide else "TIMES"
            given = {"type": encoder.type, "order": encoder.order, "factor": f"kv::FACTOR_{factor}"}
            call, threads, shared = (text.format(**given) for text in CALLS[encoder.form])
            lines.append(f"KV_KERNEL void encode{i}(KV_GRID_CONSTANT kv::EncodeArgs a) {{ kv::{call}(a, a.key); }}")
            lines.append(
                f'extern "C" void run{i}(const kv::EncodeArgs* a, int64_t x, int64_t batch) '
                f"{{ kv::launch((int)x, (int)batch, 1, {threads}, {shared}, encode{i}, *a); }}"
            )
        self.library = build("\n".join(lines))

    def check(
        self,
        codec: Codec,
        x: Tensor,
        params: Params | None = None,
        *,
        first: Sequence[int] = (),
        page: int = 16,
        columns: int = 0,
        seed: int = 0,
        grid: int = 3,
        bad: int = 0,
    ) -> None:
        """Encode ``x [B, H, N, D]`` into poisoned, scattered pages; every byte is the reference's.

        Parameters
        ----------
        first : list of int
            Slot of each sequence's first token; left out: 0.
        page, columns : int
            Tokens of a page; pages of a sequence (0: as many as its tokens take).
        seed : int
            Order in which threads run.
        grid : int
            Blocks of threads.
        bad : int
            What the kernel is to say of the rows.
        """
        batch, heads, tokens, dim = x.shape
        first = list(first) or [0] * batch
        columns = columns or -(-(max(first) + tokens) // page)
        if params is None:
            params = codec.fit(
                Site(3, "key", heads, dim, 5), Sample(x.float().nan_to_num(0, 0, 0).clamp(-FP16_MAX, FP16_MAX))
            )
        layout = PageLayout(codec.layout(dim), codec.layout(dim), page)
        g, count = torch.Generator().manual_seed(7), batch * columns
        pages = torch.randint(0, 256, (count + 3, heads, layout.page_bytes), dtype=torch.uint8, generator=g)
        table = torch.randperm(count + 3, generator=g)[:count].view(batch, columns).int()
        want = pages.clone()
        said = _write(codec, x, params, first, PageStore.over(layout, want, table))
        found = self._run(codec, x, params, first, PageStore.over(layout, pages, table), seed, grid)
        assert (found, said) == (bad, bad)
        if not torch.equal(pages, want):
            wrong = (pages != want).nonzero()
            planes = [(p.role, p.field.name, p.offset, p.nbytes) for p in layout.planes]
            raise AssertionError(
                f"{codec}: {len(wrong)} bytes differ, the first at page, head, byte {wrong[0].tolist()}; {planes}"
            )

    def _run(
        self, codec: Codec, x: Tensor, params: Params, first: Sequence[int], store: PageStore, seed: int, grid: int
    ) -> int:
        """Run the kernel; return the flag that it leaves."""
        i, said = self.codecs.index(codec), torch.zeros(1, dtype=torch.int32)
        made = constants_for(self.encoders[i], params, x.shape[1], self.dim)
        with self.library.memory() as memory:
            put = lambda part: None if part is None else memory.put(part)  # noqa: E731
            tables, factor = made.tables, made.factor
            side = EncodeRoleArgs(
                x=memory.put(x), tables=put(tables), factor=put(factor), matrix=put(made.matrix),
                first=memory.put(torch.tensor(first, dtype=torch.int32)), tokens=x.shape[2],
                batch=x.stride(0), head=x.stride(1), token=x.stride(2),
                table_head=tables.stride(0) if tables is not None and len(tables) > 1 else 0,
                factor_batch=factor.stride(0) if factor is not None and len(factor) > 1 else 0,
            )  # fmt: skip
            args = EncodeArgs(
                pages=memory.put(store.pages, True), page_table=memory.put(store.table), bad=memory.put(said, True),
                key=side, value=EncodeRoleArgs(), page_bytes=store.layout.page_bytes, table_row=store.table.stride(0),
                kind=KINDS.index(x.dtype), page_tokens=store.layout.page_tokens, capacity=store.capacity,
                heads=x.shape[1],
            )  # fmt: skip
            shape = (ctypes.c_int64(grid), ctypes.c_int64(len(x)))
            self.library.enter(f"run{i}", ctypes.byref(args), *shape, seed=seed)
        return int(said)


def _write(codec: Codec, x: Tensor, params: Params, first: Sequence[int], store: PageStore) -> int:
    """Write the reference's bytes; return its flag. Bad rows or blocks become zeros, those past the end are lost."""
    unit, bad = codec.block_tokens, 0
    for b in range(len(x)):
        room = max(0, min(x.shape[2], store.capacity - first[b])) // unit * unit
        bad = max(bad, 2 if room < x.shape[2] else 0)
        if room == 0:
            continue
        rows = x[b : b + 1, :, :room].float()
        wrong = ~(rows.abs() <= FP16_MAX).all(-1)  # [1, H, n]
        wrong = wrong.unflatten(2, (-1, unit)).any(-1)  # [1, H, M]
        bad = max(bad, int(wrong.any()))
        rows = torch.where(wrong.repeat_interleave(unit, 2).unsqueeze(-1), 0.0, rows)
        own = {k: v[b : b + 1] if len(v) > 1 else v for k, v in params.items()}
        payload = codec.encode(codec.to_code(rows, own), own)
        payload = {k: v.masked_fill(wrong.view(*wrong.shape, *(1,) * (v.ndim - 3)), 0) for k, v in payload.items()}
        PageStore.over(store.layout, store.pages, store.table[b : b + 1]).write("key", first[b], payload)
    return bad


def hard_rows(dim: int, dtype: torch.dtype, rotated: bool, seed: int = 0) -> Tensor:
    """Rows that are known to be hard, ``[n, dim]``; sums of a rotated one fit double."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def integers(low: int, high: int, n: int = 1) -> Tensor:
        return torch.randint(low, high, (n, dim), generator=g).double()

    rows = [
        normal(4, dim),
        normal(4, dim) * 10.0 ** torch.tensor([-7.0, -4.0, 3.0, 4.0]).unsqueeze(-1),  # subnormal scales; huge
        normal(2, dim) + torch.tensor([[50.0], [-3000.0]]),  # far from zero
        normal(2, dim).abs() * torch.tensor([[1.0], [-1.0]]),
        torch.zeros(1, dim).double(),
        torch.full((1, dim), 3.25).double(),
        torch.full((1, dim), -65504.0).double(),
        integers(0, 2) * 131008 - 65504,  # the whole range
        integers(0, 31) / 2,  # ties in every grid
        integers(-15, 16, 2) / 4,
        integers(0, 511) / 2,
        integers(-14, 15) / 2,
        integers(-3, 4) * 2.0**-24,  # fp16 subnormals
        integers(0, 1024) * 2.0**-24,
        (torch.arange(dim) == 5).double().unsqueeze(0) * 7,
        normal(1, dim) * (integers(0, 10) == 0),
        normal(1, dim) + (torch.arange(dim) == dim - 1) * 900,
        integers(0, 2) * 896 - 448.0,
        normal(1, dim) * 2.0 ** integers(-12, 8),
    ]
    if dtype == torch.float32:  # spans of which the scale lies half way between two fp16 numbers
        steps = torch.tensor([1, 2, 3, 4, 7, 15, 127, 255, 448], dtype=torch.float64).repeat_interleave(4)
        ties = 1 + (2 * torch.arange(36) * 23 + 1) / 2048.0
        rows.append(torch.where(torch.arange(dim) % 16 == 3, (steps * ties).unsqueeze(-1), 0.0))
    x = torch.cat(rows)
    top = FP16_MAX if dtype != torch.bfloat16 else 65280.0  # 65504 would round up
    x = x.clamp(-top, top).to(torch.float16 if rotated and dtype == torch.float32 else dtype).to(dtype)
    # which zero the minimum of -0 and +0 is, is up to the machine: all of a row's zeros are alike
    x = torch.where(x == 0, torch.zeros_like(x), x)
    return x if rotated else torch.cat([torch.full((1, dim), -0.0, dtype=dtype), x])


def random_rows(tokens: int, dim: int, seed: int = 0, heads: int = HEADS) -> Tensor:
    """Rows of every kind: Gaussian of many sizes, loud channels, zeros, equal numbers, a spike, few levels."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, dim, generator=g)
    kind = torch.arange(tokens) % 12
    loud = torch.where(torch.arange(dim) % 29 == 3, 50.0, 1.0)
    x[:, :, kind == 1] *= loud
    x[:, :, kind == 2] = 0.0
    x[:, :, kind == 3] = x[:, :, kind == 3][..., :1]  # all equal
    x[:, :, kind == 4] *= 2.0**-22
    x[:, :, kind == 5] = (x[:, :, kind == 5] * 3000).clamp(-60000, 60000)
    x[:, :, kind == 6] = x[:, :, kind == 6].sign()
    x[:, :, kind == 7] = torch.where(torch.arange(dim) == 7, 3.0, 0.0)
    x[:, :, kind == 8] = (x[:, :, kind == 8] * 2).round()
    x[:, :, kind == 9] = x[:, :, kind == 9].abs() + 4
    return x


def token_rows(dim: int, dtype: torch.dtype, groups: int, group: int) -> Tensor:
    """Tokens whose channels run through the hard rows: ``[2, groups * group, dim]``."""
    kinds = [hard_rows(max(64, group), dtype, False, seed) for seed in range(4)]
    pool = torch.cat(kinds)[:, :group]  # [n, G]
    pool = pool.repeat(-(-groups * dim * 2 // len(pool)), 1)[: groups * dim * 2]
    return pool.view(2, groups, dim, group).transpose(2, 3).reshape(2, groups * group, dim).contiguous()


ROWS: dict[str, Sequence[Codec]] = {
    "int": [GroupInt(bits, 0) for bits in (2, 3, 4, 8)],
    "int-groups": [GroupInt(bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128)],
    "int-symmetric": [
        *(GroupInt(bits, 0, symmetric=True) for bits in (3, 4, 8)),
        *(GroupInt(bits, 32, symmetric=True) for bits in (2, 3, 4)),
    ],
    "saw": [*(SawInt4(block) for block in (1, None, 2, 8, 16)), SawInt4(zero="float")],
    "fp8": [Fp8(True), Fp8(False)],
    "ultraquant": [
        *(UltraQuant(rotate, c) for rotate, c in ((True, 0.156), (False, 0.156), (True, 0.195), (False, 1.0))),
        *(UltraQuant(rotate, scale="real") for rotate in (True, False)),
    ],
    "innerq": [
        *(InnerQ(bits, "channels", reading) for bits in (2, 3) for reading in ("literal", "signed", "full")),
        InnerQ(3, "channels", "literal", norm=True),
    ],
    # of 80 channels: rows of whole words, one group
    "uneven": [GroupInt(bits, 0, symmetric=symmetric) for bits in (2, 4, 8) for symmetric in (False, bits > 2)],
}
BLOCKS: dict[str, Sequence[Codec]] = {
    "kivi": [*(GroupInt(bits, 32, "tokens") for bits in (2, 3, 4, 8)), GroupInt(4, 32, "tokens", True)],
    "kivi-groups": [GroupInt(3, 64, "tokens"), GroupInt(4, 64, "tokens")],
    "kivi-long-groups": [GroupInt(bits, 128, "tokens") for bits in (2, 3, 4, 8)],
    "innerq-tokens": [
        *(InnerQ(3, "tokens", "literal"), InnerQ(2, "tokens", "full"), InnerQ(3, "tokens", "signed", norm=True)),
        *(InnerQ(2, "tokens", reading, hybrid=True) for reading in ("literal", "signed", "full")),
        InnerQ(3, "tokens", "literal", hybrid=True),
    ],
}
TABLES: dict[str, Sequence[Codec]] = {
    "turboquant": [TurboQuant(bits, norm) for bits in range(1, 7) for norm in ("fp32", "fp16")],
    "ultra-tq": [UltraTQ(norm, table) for norm in ("token", "block") for table in ("gaussian", "sphere")],
    "octopus": [
        *(Octopus(*bits) for bits in ((5, 3), (1, 1), (3, 1), (4, 2), (3, 2), (5, 4), (2, 6))),
        Octopus(4, 3, norm="fp32"),
    ],
    "octopus-candidates": [
        Octopus(*bits, rounding) for rounding in ("scalar", "local_2x2", "full") for bits in ((3, 1), (7, 2))
    ],
    "hqmq": [Hqmq(s, r) for s, r in ((96, 4), (24, 3), (24, 4), (96, 6), (48, 4), (192, 6), (96, 3), (24, 6))],
    "qjl": [OctopusQJL(5, 3), OctopusQJL(4, 2), OctopusQJL(1, 1), TurboQuantQJL(3), TurboQuantQJL(2, "fp32")],
}


def fitted(codec: Codec, x: Tensor, batch: int = 1) -> Params | None:
    """Norms of any size for codecs that divide by them; None: what the codec fits itself."""
    if getattr(codec, "norm", None) is not True:
        return None
    norm = torch.rand(batch, x.shape[1], x.shape[3], generator=torch.Generator().manual_seed(3)) * 3 + 0.01
    norm[..., ::7], norm[..., 3] = 1.0, 2.0**-20
    return {"norm": norm}


@pytest.mark.parametrize(
    ("family", "dim"),
    [
        *two_dims_in_turn([family for family in (*ROWS, *BLOCKS) if family != "uneven"], (64, 96, 192)),
        *(pytest.param(family, 80, marks=pytest.mark.wide) for family in ("saw", "fp8", "uneven")),
    ],
)
def test_hard_numbers_have_the_reference_bytes(family: str, dim: int) -> None:
    """Rows, and channels of tokens that share a scale; in pages of any size, from any slot."""
    codecs = [x for x in (ROWS | BLOCKS)[family] if dim <= 256 or not getattr(x, "hybrid", False)]
    encoders = Encoders(codecs, dim)
    for codec, encoder in zip(codecs, encoders.encoders, strict=True):
        unit = codec.block_tokens
        for kind, dtype in enumerate(KINDS):
            if unit > 1:
                x = token_rows(dim, dtype, -(-120 // dim) + 1, unit).unsqueeze(0)
                at, page = (0, 1, 3)[kind] * unit, unit * (1, 2, 4)[kind]
            else:
                rows = hard_rows(dim, dtype, encoder.order > 1)
                n = len(rows) // 2 - (kind == 0)  # an odd number of tokens: warps straddle heads
                x, at, page = rows[: 2 * n].view(1, 2, n, dim), (0, 13, 37)[kind], (16, 64, 128)[kind]
            encoders.check(codec, x, fitted(codec, x), first=[at], page=page, grid=1 + kind)


@pytest.mark.parametrize(
    ("family", "dim"),
    [*two_dims_in_turn(TABLES, (64, 96, 192)), pytest.param("turboquant", 80, marks=pytest.mark.wide)],
)
def test_rows_with_tables_have_the_reference_bytes(family: str, dim: int) -> None:
    """Of 80 channels, no whole runs of 32, four lanes of the last run have what the others have."""
    encoders = Encoders([x for x in TABLES[family] if dim != 80 or getattr(x, "bits", 0) != 3], dim)
    tokens = {"qjl": 25, "octopus-candidates": 13}.get(family, 49)
    for i, codec in enumerate(encoders.codecs):
        encoders.check(codec, random_rows(tokens, dim, i).to(KINDS[i % 2]))
        if i % 4 == 0:
            encoders.check(codec, random_rows(tokens, dim) * torch.logspace(-44, 0, tokens)[:, None], seed=1)


@pytest.mark.parametrize("dim", [64, 128, *(pytest.param(d, marks=pytest.mark.wide) for d in (96, 192, 256))])
def test_ghost(dim: int) -> None:
    """Also values, which lose their mean; widths that differ much, and streams of every unit."""
    codecs = [Ghost(bits) for bits in (2, 2.5, 3, 4.5, 5) if dim * bits % 32 == 0]
    encoders, g = Encoders(codecs, dim), torch.Generator().manual_seed(0)
    sizes = torch.logspace(-2, 1, dim)[torch.randperm(dim, generator=g)]
    for i, codec in enumerate(codecs):
        x = random_rows(49, dim, i)
        encoders.check(codec, x.to((torch.float16, torch.bfloat16)[i % 2]))
        uneven, sample = (x * sizes).clamp(-60000, 60000).half(), torch.randn(1, HEADS, 300, dim, generator=g)
        for role, rows in (("key", sample * sizes), ("value", sample + sizes)):
            encoders.check(codec, uneven, codec.fit(Site(3, role, HEADS, dim, 5), Sample(rows)), seed=i)


@pytest.mark.parametrize(
    "dim", [pytest.param(d, marks=[] if d == 96 else pytest.mark.wide) for d in (64, 96, 128, 192, 256)]
)
def test_ghost_of_mixed_channels(dim: int) -> None:
    """Rows of every size, few and many, of warps without a row of their own."""
    codec, g = Klt(3, "klt"), torch.Generator().manual_seed(0)
    encoders = Encoders([codec], dim)
    mixed = torch.randn(1, HEADS, 400, dim, generator=g) @ torch.randn(dim, dim, generator=g)
    for role in ("key", "value"):
        params = codec.fit(Site(3, role, HEADS, dim, 5), Sample(mixed + (role == "value")))
        for i, tokens in enumerate((1, 49, 3)):
            encoders.check(codec, random_rows(tokens, dim, i).to(KINDS[i]), params, seed=i, grid=3 - i, first=[5 * i])
        tiny = random_rows(48, dim, 3) * torch.logspace(-44, -30, 48)[:, None]
        encoders.check(codec, tiny, {**params, "factor": params["factor"] * 2.0**100}, grid=1)


def test_ghost_at_cuts() -> None:
    """Numbers over a scale that are a cut, or next to one, of either sign, zero, or nearly zero."""
    codec, dim, tokens, g = Ghost(4), 64, 60, torch.Generator().manual_seed(0)
    steep = torch.randn(1, HEADS, 300, dim, generator=g) * torch.logspace(-1, 1, dim)
    params = codec.fit(Site(3, "key", HEADS, dim, 5), Sample(steep))
    params["factor"] = torch.ones_like(params["factor"])
    cuts, widths = width_cuts(levels()).float(), params["widths"].long()
    count = (2**widths - 1).clamp_min(1).expand(tokens, HEADS, dim)
    chosen = (torch.rand(count.shape, generator=g) * count).long()
    x = cuts[widths.expand(tokens, -1, -1), chosen].nan_to_num(posinf=0.0).transpose(0, 1)[None]
    x = x * scales()[torch.randint(1, 16, (1, HEADS, tokens, 1), generator=g)]
    nudge = torch.randint(-1, 2, x.shape, generator=g)
    x = torch.where(nudge == 0, x, torch.nextafter(x, nudge.float() * torch.inf))
    x[:, :, 0], x[:, :, 1] = 0.0, 1e-44
    Encoders([codec], dim).check(codec, put_back(x, params["order"]), params)


@pytest.mark.parametrize("dim", [64, 128, *(pytest.param(d, marks=pytest.mark.wide) for d in (96, 192, 256))])
def test_hqmq_with_outliers(dim: int) -> None:
    codecs = [Med(Hqmq(96, 4), 3, 2), Med(Hqmq(24, 3), 1, 5)]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        x = random_rows(49, dim, i)
        x *= torch.where(torch.arange(dim) % 50 == 9, 8.0, 1.0)
        x = x.clamp(-60000, 60000).to((torch.float16, torch.float32)[i])
        encoders.check(codec, x, seed=i)
        params = {**codec.fit(Site(3, "key", HEADS, dim, 5), Sample(x.float()))}
        for threshold in (0.0, 4.0, 3e38):  # all, ties of sums of squares, none
            params["threshold"] = torch.full_like(params["threshold"], threshold)
            encoders.check(codec, x.round(), params)


EACH = [*ROWS.values(), *BLOCKS.values(), *TABLES.values(), [Med(Hqmq())]]


def of_each(dim: int, *which: int) -> Encoders:
    """The first, or the first and last, codec of each family."""
    return Encoders(list(dict.fromkeys(family[i] for family in EACH for i in which)), dim)


def test_bad_rows_become_zeros_and_raise_the_flag() -> None:
    encoders = of_each(128, 0, -1)
    for i, codec in enumerate(encoders.codecs):
        unit = codec.block_tokens
        values = ((torch.float32, 65520.0), (torch.bfloat16, 65536.0), (torch.float16, float("inf")))
        values += ((torch.float16, float("nan")), (torch.bfloat16, -float("inf")))
        for dtype, value in values if encoders.encoders[i].form != "table" else values[i % 2 :: 2]:
            x = normal(2, 2, 5 * unit, 128, seed=1).half().to(dtype)
            x[0, 1, 3 * unit, 127] = value
            x[1, 0, unit - 1, 0] = value
            encoders.check(codec, x, fitted(codec, x, 2), first=[0, 2 * unit], page=max(64, unit), bad=1)


def test_tokens_past_the_capacity_are_not_written() -> None:
    encoders = of_each(64, 0)
    for codec in encoders.codecs:
        unit = codec.block_tokens
        x = normal(3, 1, 3 * unit, 64, seed=2).half()
        page = max(32, unit)
        first = [(page - unit) // unit * unit, 0, page]
        encoders.check(codec, x, fitted(codec, x, 3), first=first, page=page, columns=1, bad=2)


def test_appends_grids_strides_and_orders_of_threads_do_not_show() -> None:
    """One token of many sequences out of wider tensors; several tokens from any slot, by any number of blocks."""
    appended = [SawInt4(), GroupInt(3, 32), InnerQ(3, "channels", "literal", norm=True), TurboQuant(3), Octopus(4, 2)]
    appended += [Hqmq(24, 3), OctopusQJL(3, 1), Med(Hqmq(24, 3))]
    blocks = [InnerQ(2, "tokens", "literal", hybrid=True), GroupInt(3, 32, "tokens")]
    encoders = Encoders([*appended, *blocks], 64)
    wide = normal(9, 1, 3, 64 + 4, seed=5).bfloat16()
    one = wide[..., :64].transpose(1, 2)  # [B, H, 1, D] out of [B, 1, H, D + 4]
    for codec in appended:
        for seed in (0, 1, 2):
            for batch in (1, 9):
                params = fitted(codec, one, batch)
                encoders.check(codec, one, params, first=[0, 1, 15, 16, 31, 47, 40, 3, 9], columns=3, seed=seed)
        for heads, tokens, grid, at in ((1, 1, 1, 0), (5, 3, 2, 15), (3, 70, 7, 30), (2, 33, 1, 1)):
            x = random_rows(tokens, 64, heads, heads).half()
            encoders.check(codec, x, fitted(codec, x), grid=grid, first=[at], seed=heads)
    for codec in blocks:
        x = normal(2, 3, 64, 64, seed=6).half()
        for seed in (0, 1, 2, 3):
            encoders.check(codec, x, first=[0, 32], page=32, columns=3, seed=seed)


SEARCH = """
#include "encode_sums.cuh"
KV_KERNEL void guess(const uint8_t* table, const float* u, int n, int32_t* code) {{
  for (int i = kv::thread(); i < n; i += 32) {{
    bool sure = true;
    int32_t found = (int32_t)kv::Levels<{bits}>::guess(table, u[i], sure);
    code[i] = sure ? found : -1;
  }}
}}
KV_KERNEL void find(const uint8_t* table, const double* u, int n, int32_t* code) {{
  for (int i = kv::thread(); i < n; i += 32) code[i] = (int32_t)kv::Levels<{bits}>::find(table, u[i]);
}}
extern "C" void run(const uint8_t* table, const float* u, const double* v, int64_t n, int32_t* a, int32_t* b) {{
  kv::launch(1, 1, 1, 32, 0, guess, table, u, (int)n, a);
  kv::launch(1, 1, 1, 32, 0, find, table, v, (int)n, b);
}}
"""


@pytest.mark.parametrize("bits", [1, 4, 6])
def test_levels(bits: int) -> None:
    """A guess that is sure holds for all numbers within the error; one that is not is close to a wall."""
    library = build(SEARCH.format(bits=bits))
    g = torch.Generator().manual_seed(bits)
    count = 2**bits - 1
    for kind in range(4):
        walls = torch.randn(count, generator=g, dtype=torch.float64).sort().values
        if kind == 1:
            walls[count // 2 :] = walls[count // 2]  # equal ones, as levels of a sample may have
        if kind == 2:
            walls = walls[1:-1]
        if kind == 3:
            walls = midpoints(unit_levels(128, 2**bits))
        table = wall_table(walls, bits)
        error = float(table[8:12].view(torch.float32))
        near = (walls[:, None] + torch.linspace(-8, 8, 65, dtype=torch.float64) * error).flatten()
        u = torch.cat([near, torch.randn(4000, generator=g, dtype=torch.float64) * 2, walls, torch.zeros(1).double()])
        u = torch.cat([u, torch.tensor([3e38, -3e38], dtype=torch.float64)])
        guess, find = (torch.empty(len(u), dtype=torch.int32) for _ in range(2))
        library.call("run", table, u.float(), u, len(u), Out(guess), Out(find))
        assert torch.equal(find.long(), torch.bucketize(u, walls))
        sure = guess >= 0
        slack = error * 0.9  # fp32 holds the wall and the difference to a tenth of it
        for off in (-slack, slack):
            assert torch.equal(guess[sure].long(), torch.bucketize(u.float().double() + off, walls)[sure])
        if kind == 3:  # no two walls share a cell
            gap = (u[:, None] - walls).abs().amin(1)
            assert (gap[~sure] <= 1.2 * error).all()
            assert sure.sum() > 3000


@pytest.mark.parametrize("most", [0, MOST_PAIRS], ids=["without lists", "with lists"])
def test_hqmq_ties(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks of small whole numbers: the lowest of the products with the largest inner product."""
    monkeypatch.setattr("packedkv.kernels.codecs.hqmq.MOST_PAIRS", most)
    codec = Hqmq(24, 3)
    encoders = Encoders([codec], 64)
    grid = torch.arange(-2.0, 3.0)
    chunks = torch.cartesian_prod(grid, grid, grid, grid)
    x = torch.nn.functional.pad(chunks.flatten(), (0, 60)).view(1, 1, 40, 64)
    params = dict(codec.fit(Site(0, "key", 1, 64)))
    for secondary in (params["secondary"], UNITS.float()[None, None]):  # units themselves: every product 24 times
        params["secondary"] = secondary
        scores = x.double().view(-1, 4) @ products(secondary[0, 0].double()).T
        encoders.check(codec, x, params)
        codes = codec.unpack(codec.encode(codec.to_code(x, params), params), 16)[0].flatten()
        assert torch.equal(codes.long(), (scores == scores.amax(1, keepdim=True)).int().argmax(1))


@pytest.mark.parametrize("count", [24, 192])
def test_hqmq_lists_hold_every_winner(count: int) -> None:
    secondary = torch.stack([random_units(count, torch.Generator().manual_seed(count + head)) for head in range(2)])
    tables = products(secondary)
    place, names, held = cell_rivals(tables)
    table = tables[1]
    rivals = torch.zeros(len(place), len(table), dtype=torch.bool)
    rivals[held[1].nonzero()[:, 0], names[1][held[1]]] = True
    row = torch.full((SIDE**3,), -1)
    row[place] = torch.arange(len(place))
    g = torch.Generator().manual_seed(7)
    r = torch.rand(40000, 3, generator=g, dtype=torch.float64) * 2 - 1
    r = r[r.abs().sum(1) <= 1]
    scale = 0.5 * SIDE * (1 - 1 / 128)
    edge = ((r * scale).round() + 0.5) / scale  # walls, and corners: a vector there is in one of the cells beside it
    for part in (r, edge[edge.abs().sum(1) <= 1]):
        best = (torch.nn.functional.pad(part, (1, 0), value=1.0) @ table.T).max(1).indices
        for off in (-(2.0**-18), 2.0**-18):
            cell = ((part + off) * scale + SIDE // 2).round().long()
            found = row[(cell[:, 0] * SIDE + cell[:, 1]) * SIDE + cell[:, 2]]
            inside = found >= 0
            assert inside.float().mean() > 0.99
            assert rivals[found[inside], best[inside]].all()
    assert rivals.sum(1).max() <= 2 * MOST_PAIRS
    assert ((rivals.sum(1) + 1) // 2).sum() <= PAIRS[count]


TOKENS = 16
ROTATE = """
#define KV_FEW_DOUBLES {few}
#include "encode.cuh"
using namespace kv;
KV_KERNEL void rotate(const void* x, float* out, int64_t kind) {{
  constexpr int N = {D} / {team};
  const int row = thread() / {team}, part = thread() % {team};
  float y[N];
  load_row<{team}>(y, x, (int64_t)row * {D}, part, (int)kind);
  rotate_row<{team}, {order}>(y, part);
  for (int k = 0; k < N; ++k) out[row * {D} + channel_of<{team}>(part, k)] = y[k];
}}
extern "C" void run(const void* x, float* out, int64_t kind) {{
  kv::launch(1, 1, 1, {threads}, 0, rotate, x, out, kind);
}}
"""


def rotated(x: Tensor, team: int, *, few: bool) -> Tensor:
    dim = x.shape[1]
    names = {"D": dim, "team": team, "order": power_of_two_divisor(dim), "few": int(few), "threads": TOKENS * team}
    lib, out = build(ROTATE.format(**names)), torch.full((TOKENS, dim), torch.nan)
    kinds = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
    lib.call("run", x, Out(out), kinds[x.dtype])
    return out


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("team", [8, 32])
def test_sums_of_integers_are_those_of_doubles(team: int, dim: int) -> None:
    """Numbers of every size; rows in which integers would not be exact are added as doubles."""
    rng = torch.Generator().manual_seed(dim)
    x = torch.randn(TOKENS, dim, generator=rng)
    sizes = torch.exp2(torch.randint(-24, 12, (TOKENS, dim), generator=rng).float())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for rows in (x, x * sizes, x * 0.02, x * 4096, torch.zeros_like(x)):
            given = rows.clamp(-65504, 65504).to(dtype)
            few, many = (rotated(given, team, few=which) for which in (True, False))
            assert torch.equal(few, many)
            if dtype == torch.float16:
                assert torch.equal(few, block_hadamard(given.float(), power_of_two_divisor(dim)))
    tiny = torch.full((TOKENS, dim), 2.0**-40)
    assert torch.equal(rotated(tiny, team, few=True), rotated(tiny, team, few=False))
