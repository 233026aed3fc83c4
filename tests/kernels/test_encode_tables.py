"""Row encoders with tables: the bytes of the reference codecs, for random rows and for those that sit on a decision."""

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Sample, Site
from kvcodec.codecs.ghost import Ghost, levels, scales
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.octopus_qjl import OctopusQJL
from kvcodec.codecs.outliers import Med
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL, coordinate_centroids
from kvcodec.codecs.ultra_tq import UltraTQ
from kvcodec.kernels.codecs.hqmq import MOST_PAIRS, PAIRS, SIDE, cell_rivals
from kvcodec.kernels.codecs.tables import wall_table
from kvcodec.kernels.cuda.arguments import EncodeArgs, EncodeRoleArgs
from kvcodec.kernels.spec import encoder as encoder_of
from kvcodec.ops.lloyd_max import midpoints
from kvcodec.ops.quaternion import UNITS, products, random_units
from kvcodec.ops.widths import put_back, width_cuts
from tests.kernels.harness import Out, build, same_for_any_order
from tests.kernels.klt import Klt
from tests.kernels.offline import Loop, architectures_in_turn, compile_kernels, opcode

HEADS, PAGE = 2, 16
DTYPES = torch.float16, torch.bfloat16, torch.float32

SOURCE = """
using C{i} = {type};
KV_KERNEL void encode{i}(kv::EncodeArgs args) {{
  kv::encode_with_table<kv::Role<C{i}, {order}, {factor}>>(args, args.key);
}}
extern "C" void run{i}(int x, kv::EncodeArgs* args) {{
  kv::launch(x, 1, 1, kv::TABLE_THREADS, kv::table_bytes<C{i}>(), encode{i}, *args);
}}
extern "C" int table{i}() {{ return C{i}::TABLE; }}
extern "C" int plane{i}(int p) {{ return p < C{i}::PLANES ? C{i}::plane_bytes(p) : -1; }}
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Encoders:
    """Encoders of several codecs, compiled together; call one with the codec."""

    def __init__(self, codecs: Sequence[Codec], head_dim: int) -> None:
        self.codecs = list(codecs)
        self.dim = head_dim
        self.encoders = []
        text = ""
        for i, codec in enumerate(codecs):
            encoder = encoder_of(codec, head_dim, "key")
            assert encoder is not None
            self.encoders.append(encoder)
            factor = "kv::FACTOR_TIMES" if encoder.factor else "kv::FACTOR_NONE"
            text += SOURCE.format(i=i, type=encoder.type, order=encoder.order, factor=factor)
        headers = dict.fromkeys(f'#include "{encoder.header}"\n' for encoder in self.encoders)
        self.library = build("".join(headers) + text)

    def encoded(
        self, codec: Codec, params: Params, x: Tensor, seed: int = 0, grid: int = 3, bad: int = 0, at: int = 0
    ) -> dict[str, Tensor]:
        """Bytes ``[H, N, n]`` of every field of ``x [1, H, N, D]``; nothing else of the pages may be written.

        Parameters
        ----------
        seed : int
            Order in which threads run.
        grid : int
            Blocks.
        bad : int
            What the kernel is to say of the rows.
        at : int
            Slot of the first token.
        """
        heads, tokens, dim = x.shape[1:]
        i, lib = self.codecs.index(codec), self.library
        encoder, fields = self.encoders[i], codec.layout(dim).fields
        tables = encoder.tables(params)
        sizes = [lib.enter(f"plane{i}", p, result=ctypes.c_int) for p in range(len(fields) + 1)]
        assert sizes == [*(field.nbytes for field in fields), -1]
        assert tables.shape[-1] >= lib.enter(f"table{i}", result=ctypes.c_int)
        columns = -(-(at + tokens) // PAGE)
        offsets, end = [], 0
        for field in fields:
            offsets.append(end)
            end += -(-field.nbytes * PAGE // 16) * 16
        pages = torch.full((columns + 1, heads, end), 0xA5, dtype=torch.uint8)
        order = torch.randperm(columns + 1, generator=torch.Generator().manual_seed(tokens))[:columns].int()[None]
        said, first = torch.zeros(1, dtype=torch.int32), torch.full((1,), at, dtype=torch.int32)
        name = encoder.factor or encoder.own
        factor = name(params) if callable(name) else params[name] if name else None
        with lib.memory() as memory:
            side = EncodeRoleArgs(
                x=memory.put(x), tables=memory.put(tables), factor=None if factor is None else memory.put(factor),
                matrix=None if encoder.matrix is None else memory.put(encoder.matrix(params)),
                first=memory.put(first), batch=x.stride(0), head=x.stride(1), token=x.stride(2), factor_batch=0,
                table_head=tables.stride(0) if len(tables) > 1 else 0, plane=0, tokens=tokens,
            )  # fmt: skip
            kind = [torch.float16, torch.bfloat16, torch.float32].index(x.dtype)
            args = EncodeArgs(
                pages=memory.put(pages, True), page_table=memory.put(order), bad=memory.put(said, True), key=side,
                value=side, page_bytes=end, table_row=columns, kind=kind, page_tokens=PAGE, capacity=columns * PAGE,
                heads=heads,
            )  # fmt: skip
            lib.enter(f"run{i}", grid, ctypes.byref(args), seed=seed)
        assert said.item() == bad
        found = {}
        used = torch.zeros_like(pages, dtype=torch.bool)
        for field, offset in zip(fields, offsets, strict=True):
            plane = slice(offset, offset + PAGE * field.nbytes)
            rows = pages[order[0].long(), :, plane].unflatten(-1, (PAGE, -1))  # [columns, H, P, n]
            found[field.name] = rows.transpose(0, 1).flatten(1, 2)[:, at : at + tokens]
            mark = torch.zeros(heads, columns * PAGE, field.nbytes, dtype=torch.bool)
            mark[:, at : at + tokens] = True
            used[order[0].long(), :, plane] = mark.unflatten(1, (columns, PAGE)).transpose(0, 1).flatten(2)
        assert (pages[~used] == 0xA5).all(), "bytes that belong to no row were written"
        return found

    def check(self, codec: Codec, x: Tensor, params: Params | None = None, **how: int) -> None:
        """Assert that the kernel's bytes of ``x`` are the reference's; ``how`` as in ``encoded``."""
        params = params or codec.fit(Site(3, "key", x.shape[1], x.shape[3], 5), Sample(x.float()))
        expected = codec.encode(codec.to_code(x.float(), params), params)
        for name, found in self.encoded(codec, params, x, **how).items():
            want = expected[name][0].contiguous().view(torch.uint8).flatten(2)
            wrong = (found != want).any(-1).nonzero()
            rows = want.shape[0] * want.shape[1]
            assert len(wrong) == 0, f"{codec} {name}: {len(wrong)} of {rows} rows, first {wrong[0].tolist()}"


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


DIMS = (64, 96, 128, 192, 256, 512)


def dims(other: int, most: int = 512) -> Any:
    """128 and another; the rest up to ``most`` is for wide runs."""
    wide, found = [pytest.mark.wide], [d for d in DIMS if d <= most]
    return pytest.mark.parametrize("dim", [pytest.param(d, marks=[] if d in (128, other) else wide) for d in found])


@dims(96)
def test_turboquant(dim: int) -> None:
    codecs = [TurboQuant(bits, norm) for bits in range(1, 7) for norm in ("fp16", "fp32")]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    tiny = random_rows(48, dim) * torch.logspace(-44, 0, 48)[:, None]
    encoders.check(TurboQuant(4, "fp32"), tiny)
    encoders.check(TurboQuant(3), tiny, seed=1)


@pytest.mark.wide
def test_turboquant_of_80_channels() -> None:
    """No whole runs of 32: of the last one four lanes have what others have."""
    codecs = [TurboQuant(bits, norm) for bits in (1, 2, 4, 5, 6) for norm in ("fp16", "fp32")]
    encoders = Encoders(codecs, 80)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, 80, i).to((torch.float16, torch.bfloat16)[i % 2]))
        encoders.check(codec, random_rows(48, 80) * torch.logspace(-44, 0, 48)[:, None])


@dims(64)
def test_ultra_tq(dim: int) -> None:
    codecs = [UltraTQ(norm, table) for norm in ("token", "block") for table in ("gaussian", "sphere")]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).half())
        encoders.check(codec, random_rows(48, dim) * torch.logspace(-30, 0, 48)[:, None])


@dims(64, most=256)
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


@pytest.mark.parametrize("dim", [pytest.param(d, marks=[] if d == 96 else pytest.mark.wide) for d in DIMS[:5]])
def test_ghost_of_mixed_channels(dim: int) -> None:
    """Rows of every size, few and many, of warps without a row of their own."""
    codec, g = Klt(3, "klt"), torch.Generator().manual_seed(0)
    encoders = Encoders([codec], dim)
    mixed = torch.randn(1, HEADS, 400, dim, generator=g) @ torch.randn(dim, dim, generator=g)
    for role in ("key", "value"):
        params = codec.fit(Site(3, role, HEADS, dim, 5), Sample(mixed + (role == "value")))
        for i, tokens in enumerate((1, 49, 3)):
            encoders.check(codec, random_rows(tokens, dim, i).to(DTYPES[i]), params, seed=i, grid=3 - i, at=5 * i)
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


@dims(192)
def test_octopus(dim: int) -> None:
    codecs = [Octopus(*bits) for bits in ((1, 1), (3, 1), (4, 2), (5, 3), (3, 2), (5, 4), (2, 6))]
    codecs.append(Octopus(4, 3, norm="fp32"))
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    encoders.check(codecs[3], random_rows(48, dim) * torch.logspace(-44, 0, 48)[:, None], seed=1)


@pytest.mark.parametrize("rounding", ["scalar", "local_2x2", "full"])
def test_octopus_with_other_candidates(rounding: Literal["scalar", "local_2x2", "full"]) -> None:
    codecs = [Octopus(3, 1, rounding), Octopus(7, 2, rounding)]
    encoders = Encoders(codecs, 128)
    for codec in codecs:
        encoders.check(codec, random_rows(13, 128).half())


@dims(96)
def test_hqmq(dim: int) -> None:
    pairs: tuple[tuple[int, int], ...] = ((24, 3), (96, 4), (24, 4), (96, 6))
    if dim in (64, 128):
        pairs += ((48, 4), (192, 6), (96, 3), (24, 6))
    codecs = [Hqmq(s, r) for s, r in pairs]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    encoders.check(codecs[1], random_rows(48, dim) * torch.logspace(-44, 0, 48)[:, None], seed=1)


@dims(256)
def test_qjl(dim: int) -> None:
    codecs = [TurboQuantQJL(3), TurboQuantQJL(2, "fp32"), OctopusQJL(5, 3), OctopusQJL(4, 2), OctopusQJL(1, 1)]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(25, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    encoders.check(codecs[2], random_rows(24, dim) * torch.logspace(-44, 0, 24)[:, None], seed=1)


@dims(64, most=256)
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


def test_rows_that_cannot_be_held_are_zeros() -> None:
    codecs = [TurboQuant(4), TurboQuant(3), UltraTQ("block"), Octopus(5, 3), OctopusQJL(4, 2), Hqmq(96, 4), Med(Hqmq())]
    encoders = Encoders(codecs, 64)
    x = random_rows(30, 64)
    held = torch.ones(30, dtype=torch.bool)
    for token, value in ((3, torch.nan), (9, torch.inf), (20, 65536.0), (29, -torch.inf)):
        x[:, :, token, token] = value
        held[token] = False
    clean = x.nan_to_num(0, 0, 0).clamp(-65504, 65504)
    for codec in codecs:
        params = codec.fit(Site(3, "key", HEADS, 64, 5), Sample(clean))
        expected = codec.encode(codec.to_code(clean, params), params)
        for name, found in encoders.encoded(codec, params, x, bad=1).items():
            assert torch.equal(found[:, held], expected[name][0].view(torch.uint8).flatten(2)[:, held]), name
            assert not found[:, ~held].any(), name


def test_grids_and_appends() -> None:
    codecs = [TurboQuant(3), Octopus(4, 2), Hqmq(24, 3)]
    encoders = Encoders(codecs, 64)
    for codec in codecs:
        for heads, tokens, grid, at in ((1, 1, 1, 0), (5, 3, 2, 15), (3, 70, 7, 30), (2, 33, 1, 1)):
            encoders.check(codec, random_rows(tokens, 64, heads, heads).half(), grid=grid, at=at, seed=heads)


def test_threads_do_not_race() -> None:
    codecs = [TurboQuant(3), Octopus(4, 2), OctopusQJL(3, 1), Hqmq(24, 3), Med(Hqmq(24, 3))]
    encoders = Encoders(codecs, 96)
    x = random_rows(21, 96).half()
    for codec in codecs:
        params = codec.fit(Site(3, "key", HEADS, 96, 5), Sample(x.float()))

        def run(seed: int, codec: Codec = codec, params: Params = params) -> list[Tensor]:
            return list(encoders.encoded(codec, params, x, seed).values())

        same_for_any_order(run)


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
            walls = midpoints(coordinate_centroids(128, bits))
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
    monkeypatch.setattr("kvcodec.kernels.codecs.hqmq.MOST_PAIRS", most)
    codec = Hqmq(24, 3)
    encoders = Encoders([codec], 64)
    grid = torch.arange(-2.0, 3.0)
    chunks = torch.cartesian_prod(grid, grid, grid, grid)
    x = torch.nn.functional.pad(chunks.flatten(), (0, 60)).view(1, 1, 40, 64)
    params = dict(codec.fit(Site(0, "key", 1, 64)))
    for secondary in (params["secondary"], UNITS.float()[None, None]):  # units themselves: every product 24 times
        params["secondary"] = secondary
        scores = x.double().view(-1, 4) @ products(secondary[0, 0].double()).T
        codes = codec.unpack(encoders.encoded(codec, params, x), 16)[0].flatten()
        assert torch.equal(codes.long(), (scores == scores.amax(1, keepdim=True)).int().argmax(1))


def test_hqmq_cells_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that have no list, and vectors anywhere in those that have one."""
    codec = Hqmq(48, 3)
    encoders = Encoders([codec], 64)
    monkeypatch.setattr("kvcodec.kernels.codecs.hqmq.MOST_PAIRS", 2)
    encoders.check(codec, random_rows(61, 64).half())


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


BUDGETS = {TurboQuant(4): 1000, Octopus(5, 3): 1700, Hqmq(96, 4): 1500}
"""Instructions of a warp for four rows where fp32 decides, loops as often as random rows need; head_dim 128, sm_90."""
TIMES = {Octopus(5, 3): 6, Hqmq(96, 4): 6}
"""Turns of inner loops: six runs of eight triplets; twelve products, the longest list of 32 random chunks."""


@pytest.mark.parametrize(("codec", "arch"), architectures_in_turn(BUDGETS))
def test_machine_code(codec: Codec, arch: int) -> None:
    encoder = encoder_of(codec, 128, "key")
    assert encoder is not None
    factor = "kv::FACTOR_TIMES" if encoder.factor else "kv::FACTOR_NONE"
    source = f"""
        #include "{encoder.header}"
        KV_KERNEL void KV_BOUNDS(kv::TABLE_THREADS, 1) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs a) {{
          using R = kv::Role<{encoder.type}, {encoder.order}, {factor}>;
          kv::encode_with_table<R>(a, kv::block_z() ? a.value : a.key);
        }}
    """
    kernel = compile_kernels(source, arch, fma=False)["kv_encode"]
    assert not kernel.spills()
    assert kernel.stack == 0
    assert kernel.registers <= (160 if arch == 120 else 128)  # two blocks of 256 threads; on sm_120 one
    if arch != 90:
        return
    rows = max(
        (loop for loop in kernel.loops if "LDGSTS" not in map(opcode, loop.code)), key=lambda loop: len(loop.code)
    )
    inner = [loop for loop in kernel.loops if loop.blocks < rows.blocks]
    stores = sum(opcode(x) == "STG" for x in rows.code)
    count = len(rows.shortest("STG", stores))
    if isinstance(codec, Octopus):
        count += TIMES[codec] * len(max((loop.shortest("LDS", 10) for loop in inner if _has(loop, 10)), key=len))
    if isinstance(codec, Hqmq):
        lists = [loop for loop in inner if {"HADD2", "DFMA"} & set(map(opcode, loop.code)) == {"HADD2"}]
        assert len(lists) == 4
        count += sum(TIMES[codec] * len(loop.code) for loop in lists)
    print(f"{codec}: {count} instructions for four rows, {kernel.registers} registers")
    assert count <= BUDGETS[codec]


@pytest.mark.parametrize("bits", [2, 3, 4.5])
def test_ghost_tries_two_scales_with_few_instructions(bits: float) -> None:
    encoder = encoder_of(Ghost(bits), 128, "key")
    assert encoder is not None
    kernel = compile_kernels(
        f"""
        #include "{encoder.header}"
        KV_KERNEL void KV_BOUNDS(kv::TABLE_THREADS, {encoder.resident}) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs a) {{
          kv::encode_with_table<kv::Role<{encoder.type}, 1, kv::FACTOR_TIMES>>(a, kv::block_z() ? a.value : a.key);
        }}
        """,
        fma=False,
    )["kv_encode"]
    assert not kernel.spills()
    assert kernel.stack == 0
    # 32 numbers, nine instructions each; those of the least cost and the next
    assert len(kernel.loop_with("SHFL", "FMNMX").code) <= 360


def _has(loop: Loop, loads: int) -> bool:
    return sum(opcode(x) == "LDS" for x in loop.code) >= loads
