"""Readers of turboquant, ultra-tq's keys and ultraquant: every code as the codec decodes it, and the whole kernel."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role, Sample, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.turboquant import TurboQuant
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant
from tests.kernels.decode_cases import CASES, Case, check_all, each_in_turn, two_dims_in_turn
from tests.kernels.unpacking import unpacked

DIMS = (64, 96, 128, 256, 512)
TOKENS = 256


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
    for role in ROLES:
        got = unpacked(codec, dim, payload, params, TOKENS, role)
        close(got, codec.decode(payload, params)[0, 0], 2.0**-11 + 2.0**-20)


@pytest.mark.parametrize(("norm", "dim"), two_dims_in_turn(("token", "block")))
def test_ultra_tq_codes(dim: int, norm: Any) -> None:
    codec = UltraTQ(norm, "calibrated")
    params = fitted(codec, dim)
    payload = {"codes": all_bytes(dim, dim // 2), "norm": norms(1 if norm == "token" else dim // 32)}
    got = unpacked(codec, dim, payload, params, TOKENS, "key")
    close(got, codec.decode(payload, params)[0, 0], 2.0**-11 if norm == "token" else 2.0**-10 + 2.0**-20)


def exponents(dim: int, low: int, high: int) -> Tensor:
    """UE8M0 bytes ``[1, 1, 256, D / 32]`` between 2^low and 2^high; some groups zero."""
    rng = torch.Generator().manual_seed(dim)
    top = torch.randint(low, high + 1, (1, 1, 256, 1), generator=rng)
    below = torch.randint(0, 300, (1, 1, 256, dim // 32), generator=rng)
    below[..., 0] = 0
    below = below.gather(-1, torch.rand(below.shape, generator=rng).argsort(-1))
    scale = (top - below).clamp_min(low) + 127
    return torch.where(torch.rand(scale.shape, generator=rng) < 0.05, 0, scale).to(torch.uint8)


@pytest.mark.parametrize(("role", "dim"), two_dims_in_turn(ROLES))
def test_ultraquant_codes(dim: int, role: Role) -> None:
    """Bits are exact between 2^-17 and 2^13."""
    codec, scale = UltraQuant(role == "key"), exponents(dim, -17, 13)
    payload = {"codes": all_bytes(dim, dim // 2), "scale": scale}
    payload["codes"] = torch.where((scale == 0).repeat_interleave(16, -1), 0, payload["codes"])  # as encoders leave it
    assert torch.equal(unpacked(codec, dim, payload, {}, TOKENS, role), codec.decode(payload, {})[0, 0])


@pytest.mark.parametrize(("role", "dim"), two_dims_in_turn(ROLES))
def test_ultraquant_real_scales(dim: int, role: Role) -> None:
    codec = UltraQuant(role == "key", scale="real")
    payload = {"codes": all_bytes(dim, dim // 2), "scale": norms(dim // 32)}
    close(unpacked(codec, dim, payload, {}, TOKENS, role), codec.decode(payload, {})[0, 0], 2.0**-11)


@pytest.mark.parametrize("role", ROLES)
def test_tiny_scales_vanish(role: Role) -> None:
    """Far below the documented range a key or value is zero or off by 2^-19 at most, never large."""
    codec = UltraQuant(role == "key")
    payload = {"codes": all_bytes(64, 32), "scale": exponents(64, -120, 0)}
    payload["codes"] = torch.where((payload["scale"] == 0).repeat_interleave(16, -1), 0, payload["codes"])
    off = unpacked(codec, 64, payload, {}, TOKENS, role) - codec.decode(payload, {})[0, 0]
    assert float(off.abs().max()) <= 2.0**-19


# -- the kernel ------------------------------------------------------------------------------------------------------


INTS = GroupInt(4, 32)
PAIRS: dict[str, tuple[Codec, Codec]] = {
    **{f"turboquant-{bits}": (TurboQuant(bits), TurboQuant(bits)) for bits in (2, 3, 4)},
    "ultra-tq": (UltraTQ("token"), INTS),
    "ultraquant": (UltraQuant(True), UltraQuant(False)),
}
# other widths and scales: fewer cases
OTHERS: dict[str, tuple[Codec, Codec]] = {
    **{f"turboquant-{bits}": (TurboQuant(bits), TurboQuant(bits)) for bits in (1, 5, 6)},
    "turboquant-3 fp32": (TurboQuant(3, "fp32"), TurboQuant(3, "fp32")),
    "turboquant 4 and 2": (TurboQuant(4), TurboQuant(2)),
    "ultra-tq block": (UltraTQ("block"), INTS),
    "ultraquant real": (UltraQuant(True, scale="real"), UltraQuant(False, scale="real")),
    "ultraquant c=1": (UltraQuant(True, 1.0), UltraQuant(False, 1.0)),
}


def agree(pair: tuple[Codec, Codec], dim: int, cases: Sequence[Case]) -> None:
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
