"""Facts of the HQMQ paper and its additive baseline: direction error, covering radius, MSE; and the true codes."""

import itertools
import math
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codec import Site, roundtrip
from packedkv.codecs.additive import Additive
from packedkv.codecs.hqmq import Hqmq, pack_rows
from packedkv.ops.bitpack import unpack
from packedkv.ops.quaternion import nearest_entry, nearest_product, products, random_units

from .support import fitted, normal_fp16, relative_mse


@lru_cache
def relative_error(s, r, **options):
    """Mean over four heads, so over four codebook seeds."""
    codec, x = Hqmq(s, r, **options), normal_fp16(1, 4, 256, 128)
    return relative_mse(x, roundtrip(codec, x, fitted(codec, heads=4)))


def directions(n):
    u = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return u / u.norm(dim=1, keepdim=True)


def nearest_of(s, seed, u):
    q = random_units(s, torch.Generator().manual_seed(seed))
    return products(q)[nearest_product(u, q)]


@pytest.mark.parametrize(("s", "expected"), [(24, 0.0351), (48, 0.0237), (96, 0.0144), (192, 0.0092)])
def test_direction_error(s, expected):
    """One codebook differs from the next by 4 % (one deviation); the mean of eight by less than 2."""
    u = directions(3000)
    found = [float((u - nearest_of(s, seed, u)).square().sum(1).mean()) for seed in range(50, 58)]
    assert sum(found) / 8 == pytest.approx(expected, rel=0.06)
    assert all(abs(one / expected - 1) < 0.15 for one in found)


@pytest.mark.parametrize(("s", "degrees"), [(24, 21.8), (96, 15.2)])
def test_covering_radius(s, degrees):
    """The worst of many random directions, mean of four codebooks: a little below the exact one; 45 for P alone."""
    u = directions(40_000)
    cosines = [(u * nearest_of(s, seed, u)).sum(1).min() for seed in range(50, 54)]
    worst = torch.stack(cosines).acos().mean() * 180 / math.pi
    assert float(worst) == pytest.approx(degrees, rel=0.08)


@pytest.mark.parametrize(
    ("s", "r", "expected"),
    [
        *[(24, 3, 0.0411), (24, 4, 0.0372), (24, 6, 0.0362), (48, 3, 0.0277), (48, 4, 0.0239), (48, 6, 0.0229)],
        *[(96, 3, 0.0194), (96, 4, 0.0156), (96, 6, 0.0146), (192, 3, 0.0138), (192, 4, 0.0100), (192, 6, 0.0090)],
    ],
    ids=str,
)
def test_relative_error_of_gaussian_tokens(s, r, expected):
    assert relative_error(s, r) == pytest.approx(expected, rel=0.05)


def test_radix_decodes_to_the_same_values_and_int8_nearly():
    for s in (24, 48, 96, 192):
        x = normal_fp16(2, 2, 8, 80, seed=s)
        ceil, radix, int8 = Hqmq(s, 4), Hqmq(s, 4, packing="radix"), Hqmq(s, 4, codebook="int8")
        params = fitted(ceil, 80, 2)
        assert torch.equal(roundtrip(ceil, x, params), roundtrip(radix, x, params))
        small = fitted(int8, 80, 2)
        a, b = ceil.encode(x, params), int8.encode(x, small)
        assert all(torch.equal(a[name], b[name]) for name in a)
        entries = small["codebook"].double() / 127
        assert float((entries - params["codebook"].double()).abs().max()) <= 1 / 254 + 1e-9


def hamilton(p, q):
    """Product of quaternions (w, x, y, z), written out."""
    (a, b, c, d), (e, f, g, h) = p, q
    return [
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    ]


# p, -p, i p, -i p in turn
FIRST = [[1.0, 0, 0, 0], [0, 0, 1.0, 0], *([0.5, -0.5, *rest] for rest in itertools.product((0.5, -0.5), repeat=2))]
HURWITZ = [[s * c for c in u] for p in FIRST for u in (p, hamilton([0, 1.0, 0, 0], p)) for s in (1.0, -1.0)]


READINGS = ("normalised", "raw", "greedy")
CODECS = [
    *(Hqmq(s, r) for s in (24, 48, 96, 192) for r in (3, 4, 6)),
    *(Additive(k, r, reading) for k in (24, 48) for r in (3, 4, 6) for reading in READINGS),
]


def table_of(codec, params):
    """Directions of all codes, from the definition: float64 ``[n, 4]``."""
    if isinstance(codec, Hqmq):
        return torch.tensor([hamilton(p, q) for q in params["secondary"][0, 0].tolist() for p in HURWITZ]).double()
    first, second = (params[name][0, 0].double() for name in ("first", "second"))
    sums = torch.stack([a + b for a in first for b in second])
    table, exact = params["codebook"][0, 0].double(), sums
    if codec.reading == "normalised":
        exact = torch.nn.functional.normalize(sums, dim=1)
    assert float((table - exact).abs().max()) < (2**-10 if codec.reading == "normalised" else 1e-12)
    return table


def losses_of(codec, params, table, u, codes):
    """What each choice costs directions ``u [n, 4]``, and the choices made."""
    if isinstance(codec, Hqmq) or codec.reading == "normalised":
        return [(-(u @ table.T), codes)]
    if codec.reading == "raw":
        return [((u[:, None] - table).square().sum(-1), codes)]
    # the second codeword has the choice that the first one left
    (first, second), i = (params[name][0, 0].double() for name in ("first", "second")), codes // codec.k
    left = u[:, None] - first[i][:, None]
    return [((u[:, None] - first).square().sum(-1), i), ((left - second).square().sum(-1), codes % codec.k)]


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 999),
    power=st.integers(-12, 12),
    kind=st.sampled_from(["normal", "outlier", "on codewords", "small integers", "one axis"]),
    crowd=st.sampled_from([1, 1, 300]),
)
def test_codes_radii_and_scale_by_definition(codec, seed, power, kind, crowd):
    """All products or sums tried, Sec. 3, Alg. 1 and App. Q; only codes within 1e-6 of the best may differ."""
    params = codec.fit(Site(0, "key", 1, 32, seed))
    table, x = table_of(codec, params), normal_fp16(1, 1, 6, 32, seed=seed)
    if kind == "outlier":
        x[..., 4:8] *= 90
    elif kind == "on codewords":
        x = table[torch.arange(48) * 11 % len(table)].reshape(1, 1, 6, 32).float()
    elif kind == "small integers":
        x = (x * 2).round()
    elif kind == "one axis":
        x = x * (torch.arange(32) % 4 == 1)
    x = (x * 2.0**power).clamp(-65504, 65504).half().float()
    # a crowd is searched in several pieces, to the same codes
    payload = {name: field[:, :, -6:] for name, field in codec.encode(x.repeat(1, 1, crowd, 1), params).items()}
    if isinstance(codec, Hqmq):
        codes, radius = (integers[0, 0].long() for integers in codec.unpack(payload, 8))
    else:
        widths = {"codes": codec.code_bits, "radius": codec.r}
        codes, radius = (unpack(payload[name], bits, 8)[0, 0].long() for name, bits in widths.items())
    chunks, codes = x.reshape(48, 4).double(), codes.flatten()
    length = chunks.square().sum(1).sqrt()
    live = length > 0
    for loss, chosen in losses_of(codec, params, table, chunks / length.clamp_min(1e-30)[:, None], codes):
        loss, chosen = loss[live], chosen[live]
        best = loss.min(1)
        assert bool((loss.gather(1, chosen[:, None])[:, 0] <= best.values + 1e-6).all())
        tied = (loss < best.values[:, None] + 1e-6).sum(1) > 1
        assert torch.equal(chosen[~tied], best.indices[~tied])
    assert not codes[~live].any()

    length, levels, held = length.reshape(6, 8), 2**codec.r - 1, payload["scale"][0, 0]
    assert torch.equal(held, (length.amax(-1, keepdim=True) / 2).half())
    exact = torch.where(held > 0, length * levels / (2 * held.double()), 0.0)
    between = ((exact % 1) - 0.5).abs() < 1e-6
    assert torch.equal(radius[~between].double(), exact.round().clamp(0, levels)[~between])
    assert bool(((radius - exact).abs()[between] < 0.5 + 1e-5).all())


@pytest.mark.parametrize("dim", [1, 3, 45, 66])
@pytest.mark.parametrize("codec", [Hqmq(96, 6), Hqmq(96, 6, packing="radix"), Additive(96, 6)], ids=str)
def test_a_head_dim_that_four_does_not_divide_is_padded(codec, dim):
    x = normal_fp16(1, 2, 8, dim)
    y = roundtrip(codec, x, fitted(codec, dim, 2))
    assert y.shape == x.shape
    assert relative_mse(x, y) < 0.03


@pytest.mark.parametrize(("s", "r"), [(24, 3), (24, 4), (48, 6), (96, 4)])
@pytest.mark.parametrize("dim", [64, 80])
def test_the_order_of_bits_by_head_dim(s, r, dim):
    """Plain streams of version 2 where 8 does not divide the number of chunks, and the same integers everywhere."""
    codec, x = Hqmq(s, r), normal_fp16(1, 1, 5, 64)
    payload = codec.encode(torch.nn.functional.pad(x, (0, dim - 64)), fitted(codec, dim))
    assert codec.layout(dim).version == (5 if dim == 64 else 4)
    found = codec.unpack(payload, dim // 4)
    if dim == 80:
        assert torch.equal(found[0], unpack(payload["codes"], codec.code_bits, 20))
        assert torch.equal(found[1], unpack(payload["radius"], r, 20))
    for integers, whole in zip(found, codec.unpack(codec.encode(x, fitted(codec, 64)), 16), strict=True):
        assert torch.equal(integers[..., :16].long(), whole.long())


def test_int8_costs_what_its_text_says():
    for s in (24, 48, 192):
        cost = relative_error(s, 4, codebook="int8") - relative_error(s, 4)
        assert 1.2e-5 < cost < 5e-5, s


# -- the additive baseline ---------------------------------------------------------------------------------------------


@lru_cache
def sum_error(k, reading):
    """E|u - e|^2 of uniform directions, mean of six codebooks."""
    codec = Additive(k, 4, reading)
    params, u = fitted(codec, heads=6), directions(400)
    errors = []
    for head in range(6):
        entry = params["codebook"][0, head].double()[codec._search(u, params, head)]
        errors.append(float((u - entry).square().sum(1).mean()))
    return sum(errors) / 6


@pytest.mark.parametrize(
    ("k", "reading", "expected"),
    [
        *[(24, "normalised", 0.0435), (24, "raw", 0.106), (24, "greedy", 0.44)],
        *[(48, "normalised", 0.0158), (48, "raw", 0.052), (48, "greedy", 0.44)],
    ],
    ids=str,
)
def test_direction_error_of_sums(k, reading, expected):
    assert sum_error(k, reading) == pytest.approx(expected, rel=0.15)


def test_products_beat_sums_at_equal_rate():
    """K = 48 has as many sums as S = 96 has products."""
    x = normal_fp16(1, 4, 128, 128)
    found = [float((x - roundtrip(c, x, fitted(c, heads=4))).square().sum()) for c in (Hqmq(96, 4), Additive(48, 4))]
    assert 1.02 < found[1] / found[0] < 1.3


def test_ties_take_the_lowest_entry():
    table = torch.tensor([[0.5, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    assert nearest_entry(x, table, by="angle").tolist() == [1, 0, 1]
    assert nearest_entry(x, table, by="distance").tolist() == [1, 0, 1]


# -- bytes of chunks ---------------------------------------------------------------------------------------------------


WIDTHS = list(itertools.product((10, 11, 12, 13), (3, 4, 6)))


def numbers(w, r, n, rows=40):
    generator = torch.Generator().manual_seed(100 * w + r)
    return (torch.randint(1 << bits, (2, rows, n), generator=generator) for bits in (w, r))


def bits_of(packed):
    """Bit k of the stream of bytes, as Python integers."""
    return [byte >> k & 1 for byte in packed.tolist() for k in range(8)]


def number(bits, first, count):
    return sum(bit << k for k, bit in enumerate(bits[first : first + count]))


@pytest.mark.parametrize(("w", "r"), WIDTHS)
def test_bytes_by_definition(w, r):
    n, m = 24, 3
    codes, radius = numbers(w, r, n, rows=5)
    packed = pack_rows(codes, radius, w, r)
    for at in itertools.product(range(2), range(5)):
        held = {name: bits_of(x[at]) for name, x in packed.items()}
        for c, (code, length) in enumerate(zip(codes[at].tolist(), radius[at].tolist(), strict=True)):
            row, sign = code // 2, code % 2
            if w + r >= 16:
                unit = number(held["codes"], 16 * c, 16)
                assert unit >> 15 == sign
                assert (unit & 0x7FFF) >> 16 - w == row
                rest = number(held["radius"], (w + r - 16) * c, w + r - 16) if w + r > 16 else 0
                assert rest << 16 - w | unit & (1 << 16 - w) - 1 == length
                continue
            low = 8 if w == 10 else w - 1
            planes = [number(held["bits"], 8 * m * k + 8 * (c % m) + c // m, 1) for k in range((w == 10) + (r == 4))]
            high = planes.pop(0) if w == 10 else 0
            assert number(held["codes"], low * c, low) | high << 8 == row
            nibble = number(held["radius"], 4 * c, 4)
            assert (nibble, *planes) == ((length, sign) if r == 4 else (length | sign << 3,))
