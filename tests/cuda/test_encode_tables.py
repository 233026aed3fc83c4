"""Row encoders with tables: the bytes of the reference codecs, for random rows and for those that sit on a decision."""

import ctypes
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Site
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.med import Med
from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.octopus_qjl import OctopusQJL
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL
from kvcodec.codecs.ultra_tq import UltraTQ
from kvcodec.cuda.encode_tables import row_encoder
from tests.cuda.harness import build

HEADS, PAGE = 2, 16

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


class _Side(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "tables", "factor", "first")]
        + [(name, ctypes.c_int64) for name in ("batch", "head", "token", "table_head", "factor_batch")]
        + [(name, ctypes.c_int64) for name in ("plane", "tokens")]
    )


class _Args(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("pages", "page_table", "bad")]
        + [("key", _Side), ("value", _Side)]
        + [(name, ctypes.c_int64) for name in ("page_bytes", "table_row")]
        + [(name, ctypes.c_int32) for name in ("kind", "page_tokens", "capacity", "heads")]
    )  # fmt: skip


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
            encoder = row_encoder(codec, head_dim)
            assert encoder is not None
            self.encoders.append(encoder)
            factor = "kv::FACTOR_TIMES" if encoder.factor else "kv::FACTOR_NONE"
            text += SOURCE.format(i=i, type=encoder.type, order=encoder.order, factor=factor)
        headers = dict.fromkeys(f'#include "{encoder.header}"\n' for encoder in self.encoders)
        self.library = build("".join(headers) + text)

    def encoded(self, codec: Codec, params: Params, x: Tensor, seed: int = 0, grid: int = 3) -> dict[str, Tensor]:
        """Bytes ``[H, N, n]`` of every field of ``x [1, H, N, D]``; nothing else of the pages may be written."""
        heads, tokens, dim = x.shape[1:]
        i, lib = self.codecs.index(codec), self.library
        encoder, fields = self.encoders[i], codec.layout(dim).fields
        tables = encoder.tables(params)
        sizes = [lib.enter(f"plane{i}", p, result=ctypes.c_int) for p in range(len(fields) + 1)]
        assert sizes == [*(field.nbytes for field in fields), -1]
        assert tables.shape[1] >= lib.enter(f"table{i}", result=ctypes.c_int)
        columns = -(-tokens // PAGE)
        offsets, end = [], 0
        for field in fields:
            offsets.append(end)
            end += -(-field.nbytes * PAGE // 16) * 16
        pages = torch.full((columns + 1, heads, end), 0xA5, dtype=torch.uint8)
        order = torch.randperm(columns + 1, generator=torch.Generator().manual_seed(tokens))[:columns].int()[None]
        bad, first = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        name = encoder.factor or encoder.own
        factor = params[name] if name else None
        with lib.memory() as memory:
            side = _Side(
                x=memory.put(x), tables=memory.put(tables), factor=None if factor is None else memory.put(factor),
                first=memory.put(first), batch=x.stride(0), head=x.stride(1), token=x.stride(2), factor_batch=0,
                table_head=tables.shape[1] if len(tables) > 1 else 0, plane=0, tokens=tokens,
            )  # fmt: skip
            kind = [torch.float16, torch.bfloat16, torch.float32].index(x.dtype)
            args = _Args(
                pages=memory.put(pages, True), page_table=memory.put(order), bad=memory.put(bad, True), key=side,
                value=side, page_bytes=end, table_row=columns, kind=kind, page_tokens=PAGE, capacity=columns * PAGE,
                heads=heads,
            )  # fmt: skip
            lib.enter(f"run{i}", grid, ctypes.byref(args), seed=seed)
        assert not bad.any()
        found = {}
        used = torch.zeros_like(pages, dtype=torch.bool)
        for field, offset in zip(fields, offsets, strict=True):
            plane = slice(offset, offset + PAGE * field.nbytes)
            rows = pages[order[0].long(), :, plane].unflatten(-1, (PAGE, -1))  # [columns, H, P, n]
            found[field.name] = rows.transpose(0, 1).flatten(1, 2)[:, :tokens]
            mark = torch.zeros(heads, columns * PAGE, field.nbytes, dtype=torch.bool)
            mark[:, :tokens] = True
            used[order[0].long(), :, plane] = mark.unflatten(1, (columns, PAGE)).transpose(0, 1).flatten(2)
        assert (pages[~used] == 0xA5).all(), "bytes that belong to no row were written"
        return found

    def check(self, codec: Codec, x: Tensor, params: Params | None = None, seed: int = 0, grid: int = 3) -> None:
        """Assert that the kernel's bytes of ``x`` are the reference's."""
        params = params or codec.fit(Site(3, "key", x.shape[1], x.shape[3], 5), x.float())
        expected = codec.encode(codec.to_code(x.float(), params), params)
        for name, found in self.encoded(codec, params, x, seed, grid).items():
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


DIMS = (64, 96, 128, 192, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_turboquant(dim: int) -> None:
    codecs = [TurboQuant(bits, norm) for bits in range(1, 7) for norm in ("fp16", "fp32")]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    tiny = random_rows(48, dim) * torch.logspace(-44, 0, 48)[:, None]
    encoders.check(TurboQuant(4, "fp32"), tiny)
    encoders.check(TurboQuant(3), tiny, seed=1)


@pytest.mark.parametrize("dim", DIMS)
def test_ultra_tq(dim: int) -> None:
    codecs = [UltraTQ(norm, table) for norm in ("token", "block") for table in ("gaussian", "sphere")]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).half())
        encoders.check(codec, random_rows(48, dim) * torch.logspace(-30, 0, 48)[:, None])


@pytest.mark.parametrize("dim", DIMS)
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


@pytest.mark.parametrize("dim", DIMS)
def test_hqmq(dim: int) -> None:
    pairs = ((24, 3), (48, 4), (96, 4), (192, 6), (96, 3), (24, 6)) if dim in (64, 128) else ((24, 3), (96, 4))
    codecs = [Hqmq(s, r) for s, r in pairs]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(49, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    encoders.check(codecs[1], random_rows(48, dim) * torch.logspace(-44, 0, 48)[:, None], seed=1)


@pytest.mark.parametrize("dim", DIMS)
def test_qjl(dim: int) -> None:
    codecs = [TurboQuantQJL(3), TurboQuantQJL(2, "fp32"), OctopusQJL(5, 3), OctopusQJL(4, 2), OctopusQJL(1, 1)]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        encoders.check(codec, random_rows(25, dim, i).to((torch.float16, torch.bfloat16)[i % 2]))
    encoders.check(codecs[2], random_rows(24, dim) * torch.logspace(-44, 0, 24)[:, None], seed=1)


@pytest.mark.parametrize("dim", DIMS)
def test_hqmq_with_outliers(dim: int) -> None:
    codecs = [Med(Hqmq(96, 4), 3, 2), Med(Hqmq(24, 3), 1, 5)]
    encoders = Encoders(codecs, dim)
    for i, codec in enumerate(codecs):
        x = random_rows(49, dim, i)
        x *= torch.where(torch.arange(dim) % 50 == 9, 8.0, 1.0)
        x = x.clamp(-60000, 60000).to((torch.float16, torch.float32)[i])
        encoders.check(codec, x, seed=i)
        params = {**codec.fit(Site(3, "key", HEADS, dim, 5), x.float())}
        for threshold in (0.0, 4.0, 3e38):  # all, ties of sums of squares, none
            params["threshold"] = torch.full_like(params["threshold"], threshold)
            encoders.check(codec, x.round(), params)
