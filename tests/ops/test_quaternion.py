"""The Hurwitz group, products that fp16 holds exactly, and every search against the plain one."""

import pytest
import torch

from packedkv.codecs.hqmq import pack_digits, packed_digit_bytes, unpack_digits
from packedkv.ops import quaternion
from packedkv.ops.quaternion import (
    MANY,
    UNITS,
    multiply,
    nearest_entry,
    nearest_product,
    products,
    random_units,
    scaled,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_units_are_a_group_60_degrees_apart():
    rows = {tuple(u) for u in UNITS.tolist()}
    assert len(rows) == 24
    table = multiply(UNITS[:, None], UNITS).flatten(0, 1)
    assert {tuple(u) for u in table.tolist()} == rows
    cosines = (UNITS @ UNITS.T).masked_fill(torch.eye(24, dtype=torch.bool), -1)
    assert cosines.amax(1).unique().tolist() == [0.5]
    assert UNITS[0].tolist() == [1, 0, 0, 0]
    assert torch.equal(UNITS[0::2], -UNITS[1::2])
    assert torch.equal(multiply(torch.eye(4, dtype=torch.float64)[1], UNITS[0::4]), UNITS[2::4])


@pytest.mark.parametrize("count", [1, 24, 192], ids=lambda s: f"S{s}")
def test_products_are_exact_in_fp16_and_closed(count):
    q = random_units(count, generator(5))
    table = products(q)
    assert torch.equal(table.half().double(), table)
    rows = {tuple(r) for r in table.tolist()}
    assert len(rows) == 24 * count
    assert {tuple(r) for r in (-table).tolist()} == rows
    assert {tuple(r) for r in multiply(UNITS[13], table).tolist()} == rows
    assert float((q.norm(dim=-1) - 1).abs().max()) < 2**-9
    assert float(q.norm(dim=-1).max()) <= 1


def vectors(kind: str) -> torch.Tensor:
    n, g = MANY + 900, generator(11)  # enough for a search in cells
    if kind == "gaussian":
        return torch.randn(n, 4, generator=g).half()
    if kind == "extreme":
        return torch.where(torch.randn(n, 4, generator=g) > 0, 65504.0, -65504.0)
    if kind == "wide":
        return torch.randn(n, 4, generator=g) * 2.0 ** torch.randint(-24, 15, (n, 4), generator=g)
    if kind == "integers":  # on walls between faces and cells, and zeros
        return torch.randint(-2, 3, (n, 4), generator=g).float()
    return (torch.randn(n, 4, generator=g) * (torch.rand(n, 4, generator=g) < 0.3)).bfloat16()


KINDS = ["gaussian", "extreme", "wide", "integers", "sparse"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("secondary", ["S1", "S24", "S192", "twice", "units"])
def test_every_search_finds_the_lowest_of_the_best(secondary, kind, monkeypatch):
    """In cells and, of few vectors or on a GPU, by closed form or by trying all entries.

    Ties included: q_s twice ties every row, Hurwitz units as q_s tie products and put vectors on borders.
    """
    q = random_units(24, generator(12))
    q = {"twice": torch.cat([q, q]), "units": torch.cat([UNITS, q])}.get(secondary)
    q = random_units(int(secondary[1:]), generator(12)) if q is None else q
    x, table = vectors(kind), products(q)
    score = scaled(x.T.contiguous()).T @ table.T  # without rounding
    expected = (score == score.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(nearest_product(x, q), expected)
    assert torch.equal(nearest_entry(x, table, "angle"), expected)
    monkeypatch.setattr(quaternion, "_cells_pay", lambda x: False)
    monkeypatch.setattr(quaternion, "_in_cells", lambda *_: pytest.fail("searched in cells"))
    for scores in (quaternion.SCORES, quaternion.WIDE_SCORES):
        monkeypatch.setattr(quaternion, "SCORES", scores)
        assert torch.equal(nearest_product(x, q), expected)
        assert torch.equal(nearest_entry(x, table, "angle"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_finds_what_a_cpu_finds(kind):
    q, x, entries = random_units(24, generator(12)), vectors(kind), random_units(576, generator(13))
    assert torch.equal(nearest_product(x.cuda(), q.cuda()).cpu(), nearest_product(x, q))
    assert torch.equal(nearest_entry(x.cuda(), entries.cuda(), "angle").cpu(), nearest_entry(x, entries, "angle"))


@pytest.mark.parametrize("count", [1, 16, 17, 18, 64, 80, 128, 256])
def test_base_9_digits_come_back(count):
    digits = torch.randint(0, 9, (3, 5, count), generator=generator(count))
    digits[0] = 8
    packed = pack_digits(digits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, packed_digit_bytes(count))
    assert torch.equal(unpack_digits(packed, count), digits)
