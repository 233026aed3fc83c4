"""Row encoders with tables: the bytes of the reference codecs, for random rows and for those that sit on a decision."""

import ctypes

import pytest
import torch
from torch import Tensor

from kvcodec.codec import Codec, Site
from kvcodec.codecs.turboquant import TurboQuant
from kvcodec.codecs.ultra_tq import UltraTQ
from kvcodec.cuda.encode_tables import level_table, row_encoder
from kvcodec.layout import Layout, PageLayout
from tests.cuda.harness import Library, Out, build

HEADS, PAGE = 2, 16

SOURCE = """
#include "{header}"
using C = {type};
using R = kv::Role<C, {order}, {factor}>;
KV_KERNEL void encode(kv::EncodeArgs args) {{ kv::encode_with_table<R>(args, args.key); }}
extern "C" int run(int x, int planes, kv::EncodeArgs* args) {{
  if (planes != C::PLANES) return 1;
  kv::launch(x, 1, 1, kv::TABLE_THREADS, kv::table_bytes<C>(), encode, *args);
  return 0;
}}
extern "C" int table_size() {{ return C::TABLE; }}
extern "C" int plane_size(int p) {{ return C::plane_bytes(p); }}
"""


class _Side(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "tables", "factor", "first")]
        + [(name, ctypes.c_int64) for name in ("batch", "head", "token", "table_head", "factor_batch", "plane", "tokens")]
    )  # fmt: skip


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


def library(codec: Codec, head_dim: int) -> Library:
    """The encoder of a codec, compiled."""
    encoder = row_encoder(codec, head_dim)
    assert encoder is not None
    factor = "kv::FACTOR_TIMES" if encoder.factor else "kv::FACTOR_NONE"
    text = SOURCE.format(header=encoder.header, type=encoder.type, order=encoder.order, factor=factor)
    return build(text)


def encoded(codec: Codec, params: dict[str, Tensor], x: Tensor, seed: int = 0, grid: int = 3) -> dict[str, Tensor]:
    """What the kernel makes of ``x [1, H, N, D]``: bytes ``[H, N, n]`` of every field; the rest of the pages is untouched."""
    heads, tokens, dim = x.shape[1:]
    encoder, lib = row_encoder(codec, dim), library(codec, dim)
    assert encoder is not None
    fields = codec.layout(dim).fields
    tables = encoder.tables(params)
    assert [lib.enter("plane_size", p, result=ctypes.c_int) for p in range(len(fields))] == [f.nbytes for f in fields]
    assert tables.shape[1] >= lib.enter("table_size", result=ctypes.c_int)
    columns = -(-tokens // PAGE)
    offsets, end = [], 0
    for field in fields:
        offsets.append(end)
        end += -(-field.nbytes * PAGE // 16) * 16
    pages = torch.full((columns + 1, heads, end), 0xA5, dtype=torch.uint8)
    order = torch.randperm(columns + 1, generator=torch.Generator().manual_seed(tokens))[:columns].int()[None]
    bad, first = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    factor = params[encoder.factor] if encoder.factor else None
    with lib.memory() as memory:
        side = _Side(
            x=memory.put(x), tables=memory.put(tables), factor=None if factor is None else memory.put(factor),
            first=memory.put(first), batch=x.stride(0), head=x.stride(1), token=x.stride(2), factor_batch=0,
            table_head=tables.shape[1] if len(tables) > 1 else 0, plane=0, tokens=tokens,
        )  # fmt: skip
        kind = [torch.float16, torch.bfloat16, torch.float32].index(x.dtype)
        args = _Args(
            pages=memory.put(pages, True), page_table=memory.put(order), bad=memory.put(bad, True), key=side, value=side,
            page_bytes=end, table_row=columns, kind=kind, page_tokens=PAGE, capacity=columns * PAGE, heads=heads,
        )  # fmt: skip
        assert lib.enter("run", grid, len(fields), ctypes.byref(args), seed=seed, result=ctypes.c_int) == 0
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


def check(codec: Codec, x: Tensor, params: dict[str, Tensor] | None = None, seed: int = 0) -> None:
    """Assert that the kernel's bytes of ``x`` are the reference's."""
    site = Site(3, "key", x.shape[1], x.shape[3], 5)
    params = dict(params if params is not None else codec.fit(site))
    expected = codec.encode(codec.to_code(x.float(), params), params)
    for name, found in encoded(codec, params, x, seed).items():
        want = expected[name][0].contiguous().view(torch.uint8).flatten(2)
        wrong = (found != want).any(-1).nonzero()
        assert len(wrong) == 0, f"{codec} {name}: {len(wrong)} rows of {want[..., 0].numel()}, first {wrong[0].tolist()}"


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


DIMS = (64, 96, 128, 256)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", range(1, 7))
def test_turboquant(bits: int, dim: int) -> None:
    x = random_rows(61, dim, bits)
    check(TurboQuant(bits), x.half())
    check(TurboQuant(bits, "fp32"), x.bfloat16())


@pytest.mark.parametrize("dim", DIMS)
def test_turboquant_of_tiny_rows(dim: int) -> None:
    x = random_rows(48, dim) * torch.logspace(-44, 0, 48)[:, None]
    check(TurboQuant(4, "fp32"), x)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("norm", ["token", "block"])
def test_ultra_tq(norm: str, dim: int) -> None:
    x = random_rows(61, dim)
    check(UltraTQ(norm, "sphere"), x.half())
    check(UltraTQ(norm), x)
