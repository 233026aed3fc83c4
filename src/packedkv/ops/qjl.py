"""QJL: one bit per coordinate of a quantizer's residual, for unbiased scores. arXiv:2406.03482; 2504.19874.

    sigma = sign(R' r),  g = |r|                R' = M diag(s') / sqrt(D), M a Hadamard matrix; sign(0) = +1 r^ = g
    sqrt(pi / (2 D)) R'^T sigma          <q, r^> is linear in q, so the estimate is a vector, which ``decode`` adds

Where the coefficient comes from: the entries of R' are +-1/sqrt(D), so over random s' a coordinate a of R' r has the
variance |r|^2 / D, and with the same coordinate b of R' v the covariance <r, v> / D. For nearly normal a,
E sign(a) b = sqrt(2/pi) <r, v> / (|r| sqrt(D)); D of them times g sqrt(pi / (2 D)) make <r, v>. |r^|^2 is (pi/2) |r|^2,
so the error is (pi/2 - 1) |r|^2.

R' must mix all coordinates. Were it block-diagonal, n blocks, a would have the variance n |r_k|^2 / D of its block k,
and r^_k would come out scaled by |r| / (sqrt(n) |r_k|): right only where all blocks hold the same energy. With one
channel 30 times as large as the others scores at D = 80, blocks of 16, are then short by 24 % (turboquant-qjl-2). So M
is of full order for D that is no power of two too: Sylvester's times one of Paley's (80 = 4 x 20, 96 = 8 x 12).

Nearly normal means that r is spread over a dozen coordinates or more; for an r of one coordinate r^ is 1.25 r.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import isqrt, pi

import torch
from torch import Tensor

from packedkv.codec import Payload
from packedkv.errors import ShapeError
from packedkv.layout import Field, Layout
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.hadamard import hadamard_signs, power_of_two_divisor
from packedkv.ops.sums import row_norm, token_chunks

FIXED_POINT = 2.0**30
"""Residuals are sketched as whole multiples of its inverse: 2^20 of them, up to 2^32 each, sum exactly in float64."""


def sketched_layout(method: str, stage: Layout) -> Layout:
    """Add the fields of a sketch, ``signs`` and ``residual``, to those of a stage.

    Raises ShapeError if neither Sylvester nor Paley (over a prime field) gives a Hadamard matrix of its head_dim: of
    the multiples of 8 up to 256 these are 184 and 232.
    """
    dim = stage.head_dim
    if _paley_order(dim) is None:
        raise ShapeError(
            f"{method}: head_dim={dim} has no Hadamard matrix for the sketch; use 64, 80, 96, 128, 192 or 256."
        )
    sketch = Field("signs", "uint8", (dim // 8,)), Field("residual", "float16", (1,), "norms")
    return replace(stage, fields=(*stage.fields, *sketch), nominal_bits=stage.nominal_bits + 1)


def sketched(payload: Payload, residual: Callable[[Tensor, Payload], Tensor], x: Tensor, signs: Tensor) -> Payload:
    """Add a sketch to the payload of ``x``: ``residual`` maps rows and their payload to ``u - u^``."""
    parts, start = [], 0
    for piece in token_chunks(x):
        fields = {name: field[:, :, start : start + piece.shape[2]] for name, field in payload.items()}
        parts.append(sketch(residual(piece, fields), signs))
        start += piece.shape[2]
    sigma, lengths = (torch.cat(field, 2) for field in zip(*parts, strict=True))
    return {**payload, "signs": sigma, "residual": lengths}


def sketch(r: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Sigma and g of residuals r: packed signs, uint8 ``[B, H, N, D / 8]``, bit 1 is +1; fp16 ``[B, H, N, 1]``.

    The sums of R' r are taken of r in units of 2^-30 and are exact, so a sign never depends on the order of additions.
    ``r`` is float64 ``[B, H, N, D]``, at most 4 in magnitude; ``signs [1, H, D]`` are s'.
    """
    units = (r * FIXED_POINT).round() * signs.unsqueeze(2)
    plus = units @ hadamard_matrix(r.shape[-1], str(r.device)).T >= 0
    return pack(plus, 1), row_norm(r).half()


def estimate(sigma: Tensor, g: Tensor, signs: Tensor) -> Tensor:
    """r^ of ``sketch``'s results, float32 ``[B, H, N, D]``."""
    dim = signs.shape[-1]
    plus_minus = unpack(sigma, 1, dim).double() * 2 - 1
    sums = (plus_minus @ hadamard_matrix(dim, str(sigma.device))).float()  # whole numbers, exact
    return sums * signs.unsqueeze(2) * (g.float() * ((pi / 2) ** 0.5 / dim))


@lru_cache(maxsize=32)
def hadamard_matrix(order: int, device: str = "cpu") -> Tensor:
    """Matrix M of +-1 with ``M M^T = order I``, float64 ``[order, order]``; Sylvester's if ``order`` is a power of two.

    Otherwise the smallest Paley matrix whose order c divides ``order`` with a power of two left, times Sylvester's.

    >>> m = hadamard_matrix(24)
    >>> bool((m @ m.T == 24 * torch.eye(24)).all())
    True
    """
    core = _paley_order(order)
    if core is None:
        raise ShapeError(f"order={order}: expected a power of two times 1 or the order of a Paley matrix.")
    return torch.kron(hadamard_signs(order // core), _paley(core)).to(device)


def _paley_order(order: int) -> int | None:
    """Smallest order c of a Paley matrix, 1 for none needed, with ``order / c`` a power of two; None: there is none."""
    odd = order // power_of_two_divisor(order)
    if odd == 1:
        return 1
    core = 4 * odd
    while order % core == 0:
        if _is_prime(core - 1) or (_is_prime(core // 2 - 1) and core // 2 % 4 == 2):
            return core
        core *= 2
    return None


def _paley(order: int) -> Tensor:
    """Paley's matrix, float64: type I over the field of ``order - 1`` elements, else type II, of ``order / 2 - 1``."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    first = _is_prime(order - 1)
    q = order - 1 if first else order // 2 - 1
    field = torch.arange(q)
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[field * field % q] = 1  # squares
    character[0] = 0
    conference = torch.ones(q + 1, q + 1, dtype=torch.float64)
    conference[0, 0] = 0
    conference[1:, 1:] = character[(field[:, None] - field) % q]
    if first:  # q = 3 mod 4: -1 is no square, the core is skew
        conference[1:, 0] = -1
        return conference + torch.eye(q + 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    turned = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(conference, two) + torch.kron(torch.eye(q + 1, dtype=torch.float64), turned)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, isqrt(n) + 1))
