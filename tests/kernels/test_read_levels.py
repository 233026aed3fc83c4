"""Readers of turboquant, ultra-tq's keys and ultraquant: every code as the codec decodes it, and the whole kernel."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcodec.codec import ROLES, Codec, Params, Payload, Role, Sample, Site
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.turboquant import TurboQuant
from kvcodec.codecs.ultra_tq import UltraTQ
from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec.kernels.codecs.tables import level_table
from kvcodec.kernels.codecs.turboquant import read_table as turboquant_table
from kvcodec.kernels.codecs.ultra_tq import read_table as ultra_tq_table
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.kernels.decode_cases import CASES, Case, Geometry, Side, check, check_all, each_in_turn, two_dims_in_turn
from tests.kernels.harness import Out, build
from tests.kernels.offline import architectures_in_turn, compile_kernels, mix

DIMS = (64, 96, 128, 256, 512)
TOKENS = 256
NO_TABLE = torch.zeros(1, dtype=torch.uint8)

# one warp unpacks 256 tokens as the kernel would, and writes what each register stands for
_KEYS = """
#include "tile.cuh"
#include "{header}"
using R = kv::{reader};
constexpr int T = 256, D = {dim};
static float number(uint32_t x, int e) {{ return kv::half_float((uint16_t)(e % 2 ? x >> 16 : x)); }}
static uint8_t* prepare(uint8_t* shared, const uint8_t* bytes, const uint8_t* table) {{
  for (int i = kv::thread(); i < kv::planes_bytes<R>(T); i += 32) shared[R::TABLE + i] = bytes[i];
  if (R::TABLE) R::fill(shared, table, kv::thread(), 32);
  kv::sync_threads();
  return shared + R::TABLE;
}}
KV_KERNEL void keys(const uint8_t* bytes, const uint8_t* table, float* out) {{
  KV_DYNAMIC_SHARED(shared);
  const kv::Planes<R, T> planes{{prepare(shared, bytes, table)}};
  const int lane = kv::thread();
  for (int token = lane / 4; token < T; token += 8) {{
    uint32_t r[R::K_REGS];
    R::keys(planes, shared, token, lane % 4, lane, r);
    for (int e = 0; e < 2 * R::K_REGS; ++e) {{
      const int c = R::k_channel(lane % 4, e);
      const float x = number(r[e / 2], e) * R::k_weight(e) * R::k_scale(planes, token, e / (2 * R::K_REGS / R::GROUPS));
      if (c >= 0) out[token * D + c] += x;
    }}
  }}
}}
extern "C" void run_keys(const uint8_t* bytes, const uint8_t* table, float* out) {{
  kv::launch(1, 1, 1, 32, R::TABLE + kv::planes_bytes<R>(T), keys, bytes, table, out);
}}
extern "C" int64_t bytes() {{ return kv::planes_bytes<R>(T); }}
"""
_VALUES = """
template <class Q> static float scale(const kv::Planes<Q, T>& planes, int token) {{
  if constexpr (Q::HAS_V_SCALE) return Q::v_scale(planes, token);
  return 1.0f;
}}
KV_KERNEL void values(const uint8_t* bytes, const uint8_t* table, float* out) {{
  KV_DYNAMIC_SHARED(shared);
  const kv::Planes<R, T> planes{{prepare(shared, bytes, table)}};
  const int lane = kv::thread();
  for (int token = lane % 4; token < T; token += 4) {{
    uint32_t r[R::V_REGS];
    R::values(planes, shared, token, lane / 4, lane, r);
    for (int e = 0; e < 2 * R::V_REGS; ++e) {{
      const int c = R::v_channel(lane / 4, e);
      if (c >= 0) out[token * D + c] += number(r[e / 2], e) * R::v_weight(e) * scale<R>(planes, token);
    }}
  }}
}}
extern "C" void run_values(const uint8_t* bytes, const uint8_t* table, float* out) {{
  kv::launch(1, 1, 1, 32, R::TABLE + kv::planes_bytes<R>(T), values, bytes, table, out);
}}
"""


def unpacked(
    reader: str, header: str, dim: int, role: Role, codec: Codec, payload: Payload, table: Tensor, both: bool = True
) -> Tensor:
    """What the reader makes of a payload of 256 tokens, float32 ``[256, D]``; ``both``: it reads either role."""
    library = build((_KEYS + _VALUES if both else _KEYS).format(reader=reader, header=header, dim=dim))
    layout = codec.layout(dim)
    parts = []
    for field in layout.fields:
        plane = payload[field.name].reshape(TOKENS, -1).contiguous().view(torch.uint8).flatten()
        parts.append(torch.nn.functional.pad(plane, (0, -len(plane) % 16)))
    planes = torch.cat(parts)
    assert len(planes) == library.enter("bytes", result=ctypes.c_int64)
    out = torch.zeros(TOKENS, dim)
    library.call(f"run_{role}s", planes, table, Out(out))
    return out


def all_bytes(dim: int, width: int) -> Tensor:
    """Rows ``[1, 1, 256, width]`` that have every byte in every column."""
    return ((torch.arange(256)[:, None] + 37 * torch.arange(width)) % 256).to(torch.uint8)[None, None]


def norms(count: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Norms ``[1, 1, 256, count]`` of every size that keeps a product's bits, zeros among them."""
    rng = torch.Generator().manual_seed(count)
    x = 2.0 ** (torch.rand(1, 1, 256, count, generator=rng) * 16 - 6)
    x[..., :3, :] = 0.0
    return x.to(dtype)


def site(dim: int, role: Role = "key") -> Site:
    """Two layers' worth of nothing: constants do not depend on heads but for signs."""
    return Site(1, role, 1, dim, seed=0)


def fitted(codec: Codec, dim: int) -> Params:
    """Constants of a codec."""
    return codec.fit(site(dim), Sample(torch.randn(1, 1, 64, dim)))


def close(got: Tensor, want: Tensor, relative: float) -> None:
    """Every number within ``relative`` of what the codec decodes."""
    off = (got - want).abs() - relative * want.abs()
    assert bool((off <= 0).all()), f"{int((off > 0).sum())} numbers, worst {float((got - want).abs().max()):.3g}"


@pytest.mark.parametrize(("bits", "dim"), two_dims_in_turn((1, 2, 3, 4, 5, 6)))
def test_turboquant_codes(dim: int, bits: int) -> None:
    codec = TurboQuant(bits, "fp32" if bits == 3 else "fp16")
    params = fitted(codec, dim)
    payload = {
        "codes": all_bytes(dim, dim * bits // 8),
        "norm": norms(1, torch.float32 if bits == 3 else torch.float16),
    }
    reader = f"ReadTurboQuant<{dim}, {bits}, {str(bits == 3).lower()}>"
    for role in ROLES:
        got = unpacked(reader, "read_levels.cuh", dim, role, codec, payload, turboquant_table(params, dim))
        close(got, codec.decode(payload, params)[0, 0], 2.0**-11 + 2.0**-20)


@pytest.mark.parametrize(("norm", "dim"), two_dims_in_turn(("token", "block")))
def test_ultra_tq_codes(dim: int, norm: Any) -> None:
    codec = UltraTQ(norm, "calibrated")
    params = fitted(codec, dim)
    payload = {"codes": all_bytes(dim, dim // 2), "norm": norms(1 if norm == "token" else dim // 32)}
    reader = f"ReadUltraTQ<{dim}, {str(norm == 'block').lower()}>"
    got = unpacked(reader, "read_levels.cuh", dim, "key", codec, payload, ultra_tq_table(params, norm), both=False)
    close(got, codec.decode(payload, params)[0, 0], 2.0**-11 if norm == "token" else 2.0**-10 + 2.0**-20)


def exponents(dim: int, low: int, high: int, spread: int = 300) -> Tensor:
    """UE8M0 bytes ``[1, 1, 256, D / 32]`` between 2^low and 2^high, a token's within ``spread``; some groups zero."""
    rng = torch.Generator().manual_seed(dim)
    top = torch.randint(low, high + 1, (1, 1, 256, 1), generator=rng)
    below = torch.randint(0, spread, (1, 1, 256, dim // 32), generator=rng)
    below[..., 0] = 0
    below = below.gather(-1, torch.rand(below.shape, generator=rng).argsort(-1))
    scale = (top - below).clamp_min(low) + 127
    return torch.where(torch.rand(scale.shape, generator=rng) < 0.05, 0, scale).to(torch.uint8)


@pytest.mark.parametrize(("way", "dim"), two_dims_in_turn(("OWN", "NONE", "value")))
def test_ultraquant_codes(dim: int, way: str) -> None:
    """Bits are exact: by table between 2^-17 and 2^13, in registers within 2^23 of a token's largest scale."""
    codec = UltraQuant()
    scale = exponents(dim, -100, 100, 24) if way == "NONE" else exponents(dim, -17, 13)
    payload = {"codes": all_bytes(dim, dim // 2), "scale": scale}
    payload["codes"] = torch.where((scale == 0).repeat_interleave(16, -1), 0, payload["codes"])  # as encoders leave it
    reader = f"ReadUltraQuant<{dim}, kv::TABLE_{'OWN' if way == 'value' else way}>"
    role: Role = "value" if way == "value" else "key"
    got = unpacked(reader, "read_ultraquant.cuh", dim, role, codec, payload, NO_TABLE, both=way != "NONE")
    assert torch.equal(got, codec.decode(payload, {})[0, 0])


@pytest.mark.parametrize(("role", "dim"), two_dims_in_turn(ROLES))
def test_ultraquant_real_scales(dim: int, role: Role) -> None:
    codec = UltraQuant(role == "key", scale="real")
    payload = {"codes": all_bytes(dim, dim // 2), "scale": norms(dim // 32)}
    reader = f"ReadUltraQuant<{dim}, kv::TABLE_OWN, true>"
    got = unpacked(reader, "read_ultraquant.cuh", dim, role, codec, payload, NO_TABLE)
    close(got, codec.decode(payload, {})[0, 0], 2.0**-11)


def test_tiny_scales_vanish() -> None:
    """Far below the documented range a key or value is zero or off by 2^-19 at most, never large."""
    codec = UltraQuant()
    payload = {"codes": all_bytes(64, 32), "scale": exponents(64, -120, 0)}
    payload["codes"] = torch.where((payload["scale"] == 0).repeat_interleave(16, -1), 0, payload["codes"])
    want = codec.decode(payload, {})[0, 0]
    role: Role
    for reader, role, bound in (("OWN", "key", 2.0**-19), ("OWN", "value", 2.0**-19), ("NONE", "key", 2.0**-24)):
        name, both = f"ReadUltraQuant<64, kv::TABLE_{reader}>", reader == "OWN"
        got = unpacked(name, "read_ultraquant.cuh", 64, role, codec, payload, NO_TABLE, both)
        assert float((got - want).abs().max()) <= bound


def test_level_table() -> None:
    levels = torch.arange(16.0)
    entries = level_table(levels, 4).view(torch.float16).view(256, 2)
    assert entries[0x3A].tolist() == [10.0, 3.0]
    assert level_table(levels[:4], 2).view(torch.float16).view(256, 4)[0b11_10_01_00].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert level_table(levels[:8], 3).view(torch.float16).view(64, 2)[0b110_001].tolist() == [1.0, 6.0]
    assert level_table(torch.arange(32.0), 5).view(torch.float16).view(32, 2)[17].tolist() == [17.0, 17.0]


# -- the kernel ------------------------------------------------------------------------------------------------------


def turboquant(bits: int, borrows: bool = False, norm: Any = "fp16") -> Side:
    reader = f"kv::ReadTurboQuant<{{D}}, {bits}, {str(norm == 'fp32').lower()}, {str(borrows).lower()}>"
    return Side(
        TurboQuant(bits, norm),
        reader,
        "read_levels.cuh",
        order=power_of_two_divisor,
        table=turboquant_table,
        factor=lambda params, _: params["signs"],
    )


def ultra_tq(norm: Any) -> Side:
    return Side(
        UltraTQ(norm),
        f"kv::ReadUltraTQ<{{D}}, {str(norm == 'block').lower()}>",
        "read_levels.cuh",
        order=power_of_two_divisor,
        table=lambda params, _: ultra_tq_table(params, norm),
    )


def ultraquant(role: Role, way: str, scale: Any = "pow2", c: float = 0.156) -> Side:
    return Side(
        UltraQuant(role == "key", c, scale),
        f"kv::ReadUltraQuant<{{D}}, kv::TABLE_{way}, {str(scale == 'real').lower()}>",
        "read_ultraquant.cuh",
        order=power_of_two_divisor if role == "key" else lambda _: 1,
    )


INTS = Side(GroupInt(4, 32, "channels"), "kv::ReadGroupInt<{D}, 4>", "read_group.cuh")
PAIRS = {
    **{f"turboquant-{b}": (turboquant(b), turboquant(b, borrows=True)) for b in (2, 3, 4)},
    "ultra-tq": (ultra_tq("token"), INTS),
    "ultraquant": (ultraquant("key", "NONE"), ultraquant("value", "OWN")),
}
# other widths, scales and ways to look up: fewer cases
OTHERS = {
    **{f"turboquant-{b}": (turboquant(b), turboquant(b, borrows=True)) for b in (1, 5, 6)},
    "turboquant-3 fp32": (turboquant(3, norm="fp32"), turboquant(3, norm="fp32")),
    "turboquant 4 and 2": (turboquant(4), turboquant(2)),
    "ultra-tq block": (ultra_tq("block"), INTS),
    "ultraquant one table": (ultraquant("key", "OWN"), ultraquant("value", "BORROWED")),
    "ultraquant real": (ultraquant("key", "OWN", "real"), ultraquant("value", "BORROWED", "real")),
    "ultraquant c=1": (ultraquant("key", "NONE", c=1.0), ultraquant("value", "OWN", c=1.0)),
}


def agree(pair: tuple[Side, Side], dim: int, cases: Sequence[Case]) -> None:
    """Within twice the error of attention in bf16.

    Rows that differ by 2^12 would have logits of 150, of which queries rounded to fp16 lose 0.03 wherever they are
    rotated, while bf16 may be exact on E2M1 keys: the scale brings them down to 5.
    """
    cases = [replace(case, scale=dim**-0.5 / 32) if case.spread else case for case in cases]
    check_all(*pair, dim, cases, tolerance=2)


@pytest.mark.parametrize(("name", "dim"), each_in_turn(PAIRS, DIMS))
def test_decode(name: str, dim: int) -> None:
    agree(PAIRS[name], dim, CASES)


@pytest.mark.parametrize(("name", "dim"), each_in_turn(OTHERS, (96, 128)))
def test_decode_other_options(name: str, dim: int) -> None:
    agree(OTHERS[name], dim, (CASES[1], CASES[2], CASES[4], CASES[6]))


@pytest.mark.parametrize("name", PAIRS)
def test_tiles(name: str) -> None:
    check(*PAIRS[name], 128, Case(lens=(1, 17, 129), start=(0, 2, 63), splits=2), Geometry(128, 64, 1, 3))


# -- machine code ----------------------------------------------------------------------------------------------------

_PROGRAM = """
#include "decode.cuh"
#include "{key.header}"
#include "{value.header}"
using Kernel = kv::Decoder<{k}, {v}, 128, 64, 32, 4, 3>;
KV_KERNEL void KV_BOUNDS(128, 2) decode(KV_GRID_CONSTANT kv::DecodeArgs a) {{ Kernel::run(a); }}
"""
# instructions per element, on the way around that unpacks 32 tokens and starts no fetch; a third more but for sm_90
BUDGETS = {
    "turboquant-2": 1.7,
    "turboquant-3": 2.6,
    "turboquant-4": 2.1,
    "ultra-tq": 2.6,
    "ultraquant": 3.2,
    "ultraquant one table": 2.6,
}


@pytest.mark.parametrize(("name", "arch"), architectures_in_turn(BUDGETS))
def test_machine_code(name: str, arch: int) -> None:
    key, value = {**PAIRS, **OTHERS}[name]
    source = _PROGRAM.format(key=key, value=value, k=key.reader.format(D=128), v=value.reader.format(D=128))
    kernel = compile_kernels(source, arch)["decode"]
    assert kernel.spills() == []
    assert kernel.stack == 0
    loop = kernel.loop_with("HMMA", "LDGSTS")
    products = mix(loop.code)["HMMA"] // 2  # a tile is either whole or masked
    path = loop.shortest("HMMA", products)
    assert len(path) / (2 * 32 * 128 / 32) <= BUDGETS[name] * (1 if arch == 90 else 4 / 3)
