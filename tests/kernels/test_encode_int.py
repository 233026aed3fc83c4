"""Encode kernels of the integer, FP4 and FP8 codecs, emulated: every byte of the page pool as the reference has it."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcodec.codec import FP16_MAX, Codec, Params, Payload
from kvcodec.codecs.fp8 import Fp8
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.innerq import InnerQ
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec.kernels.cuda.arguments import EncodeArgs, EncodeRoleArgs
from kvcodec.layout import Field, Layout, PageLayout
from kvcodec.ops.hadamard import block_hadamard, power_of_two_divisor
from kvcodec.store.pages import PageStore
from tests.kernels import harness
from tests.kernels.decode_cases import two_dims_in_turn
from tests.kernels.offline import architectures_in_turn, compile_kernels

KINDS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """A codec, and the C++ type that encodes it; ``blocks``: the type is a Block, not a Role."""

    codec: Codec
    type: str
    blocks: bool = False
    factor: str = ""
    rotated: bool = False


def _flag(x: bool) -> str:
    return "true" if x else "false"


def _group_int(bits: int, group: int, symmetric: bool = False) -> Callable[[int], Case]:
    def make(dim: int) -> Case:
        kind = f"EncodeGroupInt<{dim}, {bits}, {group}, {_flag(symmetric)}>"
        return Case(GroupInt(bits, group, "channels", symmetric), f"Role<{kind}>")

    return make


def _saw(rotate: bool = True, block: int | None = None, zero: Any = "rounded") -> Callable[[int], Case]:
    def make(dim: int) -> Case:
        order = 1 if not rotate else block or power_of_two_divisor(dim)
        kind = f"EncodeSaw<{dim}, {_flag(zero == 'float')}>"
        return Case(SawInt4(order, zero), f"Role<{kind}, {order}>", rotated=order > 1)

    return make


def _fp8(scaled: bool) -> Callable[[int], Case]:
    return lambda dim: Case(Fp8(scaled), f"Role<EncodeFp8<{dim}, {_flag(scaled)}>>")


def _ultraquant(rotate: bool, c: float = 0.156, scale: Any = "pow2") -> Callable[[int], Case]:
    def make(dim: int) -> Case:
        codec = UltraQuant(rotate, c, scale)
        order = codec._order(dim)
        bits = hex(struct.unpack("<Q", struct.pack("<d", c))[0])
        unit = int(codec._unit(dim)).bit_length() - 1
        kind = f"EncodeUltraquant<{dim}, {bits}ull, {_flag(scale == 'real')}, {unit}>"
        return Case(codec, f"Role<{kind}, {order}>", rotated=order > 1)

    return make


def _innerq(bits: int, reading: Any, factor: str = "") -> Callable[[int], Case]:
    def make(dim: int) -> Case:
        kind = f"EncodeInnerq<{dim}, {bits}, {reading.upper()}>"
        how = f", 1, {factor}" if factor else ""
        return Case(InnerQ(bits, "channels", reading, norm=factor != ""), f"Role<{kind}{how}>", factor=factor)

    return make


def _tokens_int(bits: int, group: int = 32, symmetric: bool = False) -> Callable[[int], Case]:
    def make(dim: int) -> Case:
        kind = f"EncodeTokensInt<{dim}, {bits}, {group}, {_flag(symmetric)}>"
        return Case(GroupInt(bits, group, "tokens", symmetric), kind, blocks=True)

    return make


def _tokens_innerq(bits: int, reading: Any, hybrid: bool = False, factor: str = "") -> Callable[[int], Case]:
    def make(dim: int) -> Case:
        kind = f"EncodeTokensInnerq<{dim}, {bits}, {reading.upper()}, {_flag(hybrid)}>"
        return Case(InnerQ(bits, "tokens", reading, hybrid, factor != ""), kind, blocks=True, factor=factor)

    return make


ROWS: dict[str, Sequence[Callable[[int], Case]]] = {
    "int": [_group_int(b, 0) for b in (2, 3, 4, 8)],
    "int-groups": [_group_int(4, g) for g in (4, 8, 16, 64, 96, 128)]
    + [_group_int(3, g) for g in (64, 128)]
    + [_group_int(2, g) for g in (1, 6, 20, 48)],
    "int-symmetric": [_group_int(b, g, True) for b, g in ((2, 32), (3, 32), (3, 0), (4, 32), (4, 0), (8, 0), (3, 40))],
    "saw": [_saw(False), _saw(), _saw(block=2), _saw(block=8), _saw(block=16), _saw(zero="float")],
    "fp8": [_fp8(True), _fp8(False)],
    "ultraquant": [
        *(_ultraquant(True), _ultraquant(False), _ultraquant(True, 0.195), _ultraquant(False, 1.0)),
        *(_ultraquant(True, scale="real"), _ultraquant(False, scale="real")),
    ],
    "innerq": [
        *(_innerq(b, r) for b, r in ((3, "literal"), (2, "literal"), (3, "signed"), (2, "signed"), (3, "full"))),
        *(_innerq(2, "full"), _innerq(3, "literal", "FACTOR_INVERSE"), _innerq(3, "literal", "FACTOR_OVER")),
    ],
}
# values of kivi and the like, with codes interleaved or not: by their width, and by whether 128 divides head_dim
OFTEN = [_group_int(b, 32) for b in (2, 3, 4, 8)]
# of 80 channels: rows of whole words, one group
UNEVEN = [_group_int(b, 0) for b in (2, 4, 8)] + [_group_int(b, 0, True) for b in (4, 8)]
BLOCKS: dict[str, Sequence[Callable[[int], Case]]] = {
    "kivi": [_tokens_int(2), _tokens_int(3), _tokens_int(4), _tokens_int(8), _tokens_int(4, symmetric=True)],
    "kivi-groups": [_tokens_int(2, 16), _tokens_int(3, 64), _tokens_int(2, 4), _tokens_int(2, 20)],
    "kivi-long-groups": [*(_tokens_int(b, 128) for b in (2, 3, 4, 8)), _tokens_int(4, 64)],
    "innerq-tokens": [
        *(_tokens_innerq(3, "literal"), _tokens_innerq(2, "full")),
        _tokens_innerq(3, "signed", factor="FACTOR_INVERSE"),
        *(_tokens_innerq(2, r, hybrid=True) for r in ("literal", "signed", "full")),
        _tokens_innerq(3, "literal", hybrid=True),
    ],
}


def _library(cases: Sequence[Case], more: str = "") -> harness.Library:
    """Kernels run_0, run_1, ...: grid x, batch, arguments."""
    lines = [f'#include "encode_{name}.cuh"' for name in ("saw", "fp8", "ultraquant", "innerq", "blocks")]
    lines.extend(("using namespace kv;", more))
    for i, case in enumerate(cases):
        if case.blocks:
            body, threads = f"encode_blocks<T{i}, {case.factor or 'FACTOR_NONE'}>(args, args.key)", f"T{i}::THREADS"
        else:
            body, threads = f"encode_side<T{i}>(args, args.key)", "ENCODE_THREADS"
        lines.append(f"using T{i} = {case.type};")
        lines.append(f"KV_KERNEL void kv_encode_{i}(KV_GRID_CONSTANT EncodeArgs args) {{ {body}; }}")
        lines.append(
            f'extern "C" void run_{i}(const EncodeArgs* args, int64_t x, int64_t batch) '
            f"{{ kv::launch((int)x, (int)batch, 1, {threads}, 0, kv_encode_{i}, *args); }}"
        )
    return harness.build("\n".join(lines))


@dataclass
class Call:
    """One launch: where tokens come from and go to."""

    x: Tensor  # [B, H, N, D]
    first: list[int]
    page_tokens: int
    columns: int
    seed: int = 0
    grid: int = 2

    def pool(self, layout: PageLayout) -> tuple[Tensor, Tensor]:
        """Poisoned pages and a scattered table."""
        g = torch.Generator().manual_seed(7)
        batch, heads = self.x.shape[:2]
        count = batch * self.columns
        pages = torch.randint(0, 256, (count + 3, heads, layout.page_bytes), dtype=torch.uint8, generator=g)
        return pages, torch.randperm(count + 3, generator=g)[:count].view(batch, self.columns).int()


def _launch(library: harness.Library, index: int, case: Case, call: Call, params: Params) -> tuple[Tensor, int]:
    """Return the pool and the bad flag after the kernel."""
    layout = _layout(case, call)
    pages, table = call.pool(layout)
    first, bad = torch.tensor(call.first, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    x = call.x
    with library.memory() as memory:
        side = EncodeRoleArgs(x=memory.put(x), first=memory.put(first), tokens=x.shape[2])
        side.batch, side.head, side.token = x.stride()[:3]
        if case.factor:
            norm = params["norm"]
            factor = 1.0 / norm.double() if case.factor == "FACTOR_INVERSE" else norm
            side.factor, side.factor_batch = memory.put(factor), factor.stride(0) if len(factor) > 1 else 0
        if "table" in params:
            side.tables, side.table_head = memory.put(params["table"]), params["table"].stride(1) * 4
        args = EncodeArgs(memory.put(pages, True), memory.put(table), memory.put(bad, True), side, EncodeRoleArgs())
        args.page_bytes, args.table_row, args.kind = layout.page_bytes, table.stride(0), KINDS.index(x.dtype)
        args.page_tokens, args.heads = call.page_tokens, x.shape[1]
        args.capacity = call.columns * call.page_tokens
        shape = (ctypes.c_int64(call.grid), ctypes.c_int64(len(x)))
        library.enter(f"run_{index}", ctypes.byref(args), *shape, seed=call.seed)
    return pages, int(bad)


def _layout(case: Case, call: Call) -> PageLayout:
    layout = case.codec.layout(call.x.shape[-1])
    return PageLayout(layout, layout, call.page_tokens)


def _expected(case: Case, call: Call, params: Params) -> tuple[Tensor, int]:
    """Reference bytes: what a bad row or block leaves is zeros, what passes the capacity is not written."""
    layout = _layout(case, call)
    pages, table = call.pool(layout)
    unit, bad = case.codec.block_tokens, 0
    for b in range(len(call.x)):
        room = max(0, min(call.x.shape[2], call.columns * call.page_tokens - call.first[b])) // unit * unit
        bad = max(bad, 2 if room < call.x.shape[2] else 0)
        if room == 0:
            continue
        x = call.x[b : b + 1, :, :room].float()
        wrong = ~(x.abs() <= FP16_MAX).all(-1)  # [1, H, n]
        wrong = wrong.unflatten(2, (-1, unit)).any(-1)  # [1, H, M]
        bad = max(bad, int(wrong.any()))
        x = torch.where(wrong.repeat_interleave(unit, 2).unsqueeze(-1), 0.0, x)
        own = {k: v[b : b + 1] if len(v) > 1 else v for k, v in params.items()}
        payload = case.codec.encode(case.codec.to_code(x, own), own)
        payload = {k: v.masked_fill(wrong.view(*wrong.shape, *(1,) * (v.ndim - 3)), 0) for k, v in payload.items()}
        store = PageStore(layout, 1, x.shape[1], x.device)
        store.pages, store.table = pages, table[b : b + 1]
        store.write("key", call.first[b], payload)
    return pages, bad


def _check(library: harness.Library, index: int, case: Case, call: Call, params: Params | None = None) -> int:
    params = params or {}
    got, bad = _launch(library, index, case, call, params)
    want, want_bad = _expected(case, call, params)
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        at = tuple(wrong[0].tolist())
        planes = [(p.role, p.field.name, p.offset, p.nbytes) for p in _layout(case, call).planes]
        raise AssertionError(
            f"{case.type}: {len(wrong)} bytes differ; first page, head, byte {at}: {int(got[at]):#x}, "
            f"reference {int(want[at]):#x}; planes {planes}"
        )
    assert bad == want_bad
    return bad


def _rows(dim: int, dtype: torch.dtype, rotated: bool, seed: int = 0) -> Tensor:
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


def _params(case: Case, x: Tensor, batch: int) -> Params:
    if not case.factor:
        return {}
    g = torch.Generator().manual_seed(3)
    norm = torch.rand(batch, x.shape[1], x.shape[3], generator=g) * 3 + 0.01
    norm[..., ::7] = 1.0
    norm[..., 3] = 2.0**-20
    return {"norm": norm}


def _token_rows(dim: int, dtype: torch.dtype, groups: int, group: int) -> Tensor:
    """Tokens whose channels run through the hard rows: ``[2, groups * group, dim]``."""
    kinds = [_rows(max(64, group), dtype, False, seed) for seed in range(4)]
    pool = torch.cat(kinds)[:, :group]  # [n, G]
    pool = pool.repeat(-(-groups * dim * 2 // len(pool)), 1)[: groups * dim * 2]
    return pool.view(2, groups, dim, group).transpose(2, 3).reshape(2, groups * group, dim).contiguous()


@pytest.mark.parametrize(
    ("family", "dim"),
    [
        *(("often", 96), ("often", 128), ("often", 256), *two_dims_in_turn(ROWS, (64, 96, 192))),
        *(pytest.param(family, 80, marks=pytest.mark.wide) for family in ("saw", "fp8", "uneven")),
    ],
)
def test_rows_have_the_reference_bytes(family: str, dim: int) -> None:
    cases = [make(dim) for make in {**ROWS, "often": OFTEN, "uneven": UNEVEN}[family]]
    library = _library(cases)
    for i, case in enumerate(cases):
        for kind, dtype in enumerate(KINDS):
            rows = _rows(dim, dtype, case.rotated)
            n = len(rows) // 2 - (kind == 0)  # an odd number of tokens: warps straddle heads
            x = rows[: 2 * n].view(1, 2, n, dim)
            page_tokens = (16, 64, 128)[kind]
            call = Call(x, [(0, 13, 37)[kind]], page_tokens, -(-(n + 37) // page_tokens), grid=1 + kind)
            _check(library, i, case, call, _params(case, x, 1))


@pytest.mark.parametrize(("family", "dim"), two_dims_in_turn(BLOCKS, (64, 96, 192)))
def test_blocks_of_tokens_have_the_reference_bytes(family: str, dim: int) -> None:
    cases = [make(dim) for make in BLOCKS[family]]
    library = _library(cases)
    for i, case in enumerate(cases):
        unit = case.codec.block_tokens
        for kind, dtype in enumerate(KINDS):
            groups = -(-120 // dim) + 1
            x = _token_rows(dim, dtype, groups, unit).unsqueeze(0)
            page_tokens = unit * (1, 2, 4)[kind] if unit % 16 == 0 else 80
            call = Call(x, [(0, 1, 3)[kind] * unit], page_tokens, -(-(groups + 3) * unit // page_tokens), grid=1 + kind)
            _check(library, i, case, call, _params(case, x, 1))


EACH = (OFTEN, *ROWS.values(), *BLOCKS.values())


def test_bad_rows_become_zeros_and_raise_the_flag() -> None:
    cases = [make(128) for makers in EACH for make in (makers[0], makers[-1])]
    library = _library(cases)
    for i, case in enumerate(cases):
        unit = case.codec.block_tokens
        values = ((torch.float32, 65520.0), (torch.bfloat16, 65536.0), (torch.float16, float("inf")))
        for dtype, value in (*values, (torch.float16, float("nan")), (torch.bfloat16, -float("inf"))):
            x = torch.randn(2, 2, 5 * unit, 128, generator=torch.Generator().manual_seed(1)).half().to(dtype)
            x[0, 1, 3 * unit, 127] = value
            x[1, 0, unit - 1, 0] = value
            page_tokens = 64 if 64 % unit == 0 else 4 * unit
            call = Call(x, [0, 2 * unit], page_tokens, -(-7 * unit // page_tokens))
            assert _check(library, i, case, call, _params(case, x, 2)) == 1


def test_tokens_past_the_capacity_are_not_written() -> None:
    cases = [makers[0](64) for makers in EACH]
    library = _library(cases)
    for i, case in enumerate(cases):
        unit = case.codec.block_tokens
        x = torch.randn(3, 1, 3 * unit, 64, generator=torch.Generator().manual_seed(2)).half()
        page = max(32, unit)
        call = Call(x, [(page - unit) // unit * unit, 0, page], page, 1)
        assert _check(library, i, case, call, _params(case, x, 3)) == 2


def test_appending_one_token_to_many_sequences_and_strides() -> None:
    cases = [_saw()(128), _group_int(3, 32)(128), _innerq(3, "literal", "FACTOR_INVERSE")(128)]
    library = _library(cases)
    g = torch.Generator().manual_seed(5)
    wide = torch.randn(9, 1, 3, 128 + 4, generator=g).bfloat16()
    x = wide[..., :128].transpose(1, 2)  # [B, H, 1, D] out of [B, 1, H, D + 4]
    for i, case in enumerate(cases):
        for seed in (0, 1, 2):
            call = Call(x, [0, 1, 15, 16, 31, 47, 40, 3, 9], 16, 3, seed=seed)
            assert _check(library, i, case, call, _params(case, x, 9)) == 0
            assert _check(library, i, case, call, _params(case, x, 1)) == 0


def test_order_of_lanes_and_blocks_does_not_matter() -> None:
    cases = [_saw()(96), _group_int(3, 20)(96), _tokens_innerq(2, "literal", hybrid=True)(96), _tokens_int(3)(96)]
    library = _library(cases)
    for i, case in enumerate(cases):
        x = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(6)).half()
        for seed in (0, 1, 2, 3):
            _check(library, i, case, Call(x, [0, 32], 32, 3, seed=seed, grid=3))


def test_keys_and_values_in_one_launch() -> None:
    codecs = (SawInt4(128), GroupInt(2, 32, "channels"))
    library = harness.build(
        """
        #include "encode_saw.cuh"
        using namespace kv;
        KV_KERNEL void kv_encode(KV_GRID_CONSTANT EncodeArgs args) {
          encode_pair<Role<EncodeSaw<128>, 128>, Role<EncodeGroupInt<128, 2, 32, false>>>(args);
        }
        extern "C" void run(const EncodeArgs* args) { kv::launch(3, 2, 2, ENCODE_THREADS, 0, kv_encode, *args); }
        """
    )
    g = torch.Generator().manual_seed(8)
    keys, values = torch.randn(2, 2, 21, 128, generator=g).half(), torch.randn(2, 2, 19, 128, generator=g).half()
    layout = PageLayout(codecs[0].layout(128), codecs[1].layout(128), 16)
    store = PageStore(layout, 2, 2, keys.device)
    store.pages = torch.full((4, 2, layout.page_bytes), 0xA5, dtype=torch.uint8)
    store.table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    pages, first = store.pages.clone(), torch.tensor([[0, 0], [5, 5]], dtype=torch.int32)
    with library.memory() as memory:
        key = EncodeRoleArgs(
            x=memory.put(keys), first=memory.put(first[0].clone()), tokens=21, plane=layout.planes[0].offset
        )
        value = EncodeRoleArgs(x=memory.put(values), first=memory.put(first[1].clone()), tokens=19)
        value.plane = next(p.offset for p in layout.planes if p.role == "value")
        for side, x in ((key, keys), (value, values)):
            side.batch, side.head, side.token = x.stride()[:3]
        held, table = memory.put(pages, True), memory.put(store.table)
        args = EncodeArgs(held, table, None, key, value, layout.page_bytes, 2, 0, 16, 32, 2)
        library.enter("run", ctypes.byref(args))
    store.write("key", 0, codecs[0].encode(codecs[0].to_code(keys.float(), {}), {}))
    store.write("value", 5, codecs[1].encode(values.float(), {}))
    assert torch.equal(pages, store.pages)


@dataclass(frozen=True)
class Rounded(Codec):
    """What ``ROUNDED_ROW`` does: planes of whole words, of half words and of bytes."""

    def layout(self, head_dim: int) -> Layout:
        fields = (Field("codes", "uint8", (head_dim,)), Field("ends", "float16", (3,)), Field("low", "uint8", (3,)))
        return Layout(head_dim, 1, fields, nominal_bits=8.0)

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return block_hadamard(x * params["norm"].unsqueeze(2), power_of_two_divisor(x.shape[-1]))

    def encode(self, x: Tensor, params: Params) -> Payload:
        codes = (x + params["table"][:, :, None, :1]).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
        ends = x[..., [0, 31, x.shape[-1] - 1]].half()
        return {"codes": codes, "ends": ends, "low": ends.view(torch.uint8)[..., ::2]}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        raise NotImplementedError


ROUNDED_ROW = """
template <int D> struct Rounded {
  KV_CONST int DIM = D, TEAM = 32, PLANES = 3, SCRATCH = 12;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D : p == 1 ? 6 : 3; }
  KV_DEV static void row(const float (&y)[D / 32], int lane, const uint8_t* tables, uint8_t* out, uint8_t* scratch) {
    float* ends = (float*)scratch;
    if (lane == 0) ends[0] = y[0];
    if (lane == 31) ends[1] = y[0], ends[2] = y[D / 32 - 1];
    for (int i = 0; i < D / 32; i++) {
      float q = minimum(maximum(round_even(add(y[i], *(const float*)tables)), -128.0f), 127.0f);
      out[lane + 32 * i] = (uint8_t)(int)q;
    }
    sync_warp();
    if (lane < 3) {
      uint16_t bits = half_bits(ends[lane]);
      ((uint16_t*)(out + row_offset<Rounded>(1)))[lane] = bits;
      out[row_offset<Rounded>(2) + lane] = (uint8_t)bits;
    }
    sync_warp();
  }
};
"""


@pytest.mark.parametrize("dim", [96, 128, *(pytest.param(d, marks=pytest.mark.wide) for d in (64, 192, 256))])
def test_rows_shared_by_a_whole_warp(dim: int) -> None:
    order = power_of_two_divisor(dim)
    case = Case(Rounded(), f"Role<Rounded<{dim}>, {order}, FACTOR_TIMES>", factor="FACTOR_TIMES")
    library = _library([case], ROUNDED_ROW)
    g = torch.Generator().manual_seed(9)
    signs = torch.randint(0, 2, (1, 3, dim), generator=g).float() * 2 - 1
    params = {"norm": signs, "table": torch.randn(1, 3, 2, generator=g)}
    for dtype in KINDS:
        x = (torch.randn(2, 3, 7, dim, generator=g) * 40).half().to(dtype)
        for seed in (0, 1):
            assert _check(library, 0, case, Call(x, [14, 3], 16, 2, seed=seed, grid=2), params) == 0
        x[1, 2, 4, dim - 1] = float("nan")
        assert _check(library, 0, case, Call(x, [0, 9], 16, 1, grid=1), params) == 1


_PROGRAM = """
#include "encode_blocks.cuh"
using Block = kv::EncodeTokensInt<256, {bits}, 128, false>;
KV_KERNEL void KV_BOUNDS(Block::THREADS, 1) encode(KV_GRID_CONSTANT kv::EncodeArgs a) {{
  kv::encode_blocks<Block>(a, a.key);
}}
"""


@pytest.mark.parametrize(("bits", "arch"), architectures_in_turn([4, 8, 3]))
def test_groups_of_128_tokens_of_256_channels_stay_in_registers(bits: int, arch: int) -> None:
    """512 threads have 128 registers each, and 64 numbers of a group."""
    kernel = compile_kernels(_PROGRAM.format(bits=bits), arch, fma=False)["encode"]
    assert kernel.spills() == []
    assert kernel.stack == 0
