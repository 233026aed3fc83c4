"""Facts of the HQMQ paper: bits, direction error, covering radius, relative MSE, outliers; and the true codes."""

import math
from functools import lru_cache

import pytest
import torch

import kvcodec
from kvcodec.codec import Site, roundtrip
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.errors import FitError, ShapeError, SpecError
from kvcodec.ops.bitpack import unpack
from kvcodec.ops.quaternion import nearest_product, products, random_units
from kvcodec.ops.radix import unpack_digits


def gauss(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().float()


def fitted(codec, dim=128, heads=1, sample=None):
    return codec.fit(Site(0, "key", heads, dim), sample)


def error(x, y):
    return float((x - y).square().sum() / x.square().sum())


@lru_cache
def relative_error(s, r, **options):
    """Mean over four heads, so over four codebook seeds."""
    codec, x = Hqmq(s, r, **options), gauss(1, 4, 256, 128)
    return error(x, roundtrip(codec, x, fitted(codec, heads=4)))


@pytest.mark.parametrize(
    ("s", "r", "printed"),
    [
        *[(24, 3, 3.04), (24, 4, 3.29), (24, 6, 3.79), (48, 3, 3.29), (48, 4, 3.54), (48, 6, 4.04)],
        *[(96, 3, 3.54), (96, 4, 3.79), (96, 6, 4.29), (192, 3, 3.79), (192, 4, 4.04), (192, 6, 4.54)],
    ],
    ids=str,
)
def test_bits_at_128(s, r, printed):
    ceil, radix = Hqmq(s, r).layout(128), Hqmq(s, r, packing="radix").layout(128)
    assert ceil.nominal_bits == pytest.approx(printed, abs=0.005)
    assert ceil.effective_bits == (math.ceil(math.log2(24 * s)) + r) / 4 + 16 / 128
    assert 0 < radix.effective_bits - (radix.nominal_bits + 16 / 128) < 0.005


@pytest.mark.parametrize(
    ("codec", "dim", "nbytes"),
    [
        (Hqmq(24, 3), 128, 54),  # 40 + 12 + 2
        (Hqmq(24, 3), 64, 28),  # 20 + 6 + 2
        (Hqmq(48, 4), 80, 40),  # 27.5 + 10 + 2
        (Hqmq(192, 6), 256, 154),  # 104 + 48 + 2
        (Hqmq(24, 3, packing="radix"), 128, 203),  # four tokens: 96 + 51 + 48 + 8
        (Hqmq(24, 3, 3), 128, 74),  # + 4 flags + 16
        (Hqmq(24, 3, 3, slots=1), 128, 66),
        (Hqmq(24, 3), 45, 22),  # 12 chunks: 15 + 4.5 + 2
    ],
    ids=str,
)
def test_bytes(codec, dim, nbytes):
    assert codec.layout(dim).block_bytes == nbytes


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
        x = gauss(2, 2, 8, 80, seed=s)
        ceil, radix, int8 = Hqmq(s, 4), Hqmq(s, 4, packing="radix"), Hqmq(s, 4, codebook="int8")
        params = fitted(ceil, 80, 2)
        assert torch.equal(roundtrip(ceil, x, params), roundtrip(radix, x, params))
        small = fitted(int8, 80, 2)
        a, b = ceil.encode(x, params), int8.encode(x, small)
        assert all(torch.equal(a[name], b[name]) for name in a)
        entries = small["codebook"].double() / 127
        assert float((entries - params["codebook"].double()).abs().max()) <= 1 / 254 + 1e-9
    cost = relative_error(24, 3, codebook="int8") - relative_error(24, 3)
    assert 1e-5 < cost < 1e-4


@pytest.mark.parametrize("s", [24, 48, 96, 192])
def test_codes_are_the_search_over_the_decode_table(s):
    codec, x = Hqmq(s, 4), gauss(1, 2, 60, 64, seed=3)
    params = fitted(codec, 64, 2)
    codes = unpack(codec.encode(x, params)["codes"], codec.code_bits, 16).long()
    for head in range(2):
        table = params["codebook"][0, head].double()
        score = x[0, head].reshape(-1, 4).double() @ table.T
        assert torch.equal(codes[0, head].flatten(), score.argmax(1)), "fp16 entries are exact: the same winner"


def test_radix_splits_the_code_into_a_digit_and_low_bits():
    codec, plain = Hqmq(48, 3, packing="radix"), Hqmq(48, 3)
    x = gauss(1, 1, 8, 128)
    params = fitted(codec)
    payload = codec.encode(x, params)
    codes = unpack_digits(payload["digits"], 128) * 128 + unpack(payload["low"], 7, 128)
    whole = unpack(plain.encode(x, params)["codes"], 11, 32)
    assert torch.equal(codes.flatten(), whole.flatten().long())
    assert payload["scale"].shape == (1, 1, 2, 4)


def test_zero_chunks_have_code_zero_and_radius_zero():
    codec, x = Hqmq(24, 3), gauss(1, 1, 1, 64)
    x[..., 8:16] = 0
    payload = codec.encode(x, fitted(codec, 64))
    assert unpack(payload["codes"], 10, 16)[0, 0, 0, 2:4].tolist() == [0, 0]
    assert unpack(payload["radius"], 3, 16)[0, 0, 0, 2:4].tolist() == [0, 0]
    assert not codec.decode(payload, fitted(codec, 64))[..., 8:16].any()


@pytest.mark.parametrize("dim", [1, 3, 45, 66])
@pytest.mark.parametrize("packing", ["ceil", "radix"])
def test_a_head_dim_that_four_does_not_divide_is_padded(dim, packing):
    codec, x = Hqmq(96, 6, packing=packing), gauss(1, 2, 8, dim)
    y = roundtrip(codec, x, fitted(codec, dim, 2))
    assert y.shape == x.shape
    assert error(x, y) < 0.03


def test_codebooks_differ_by_head_layer_role_and_seed_and_repeat():
    codec = Hqmq(24, 3)
    books = codec.fit(Site(0, "key", 3, 64))["codebook"]
    assert books.shape == (1, 3, 576, 4)
    assert not torch.equal(books[0, 0], books[0, 1])
    assert torch.equal(books, codec.fit(Site(0, "key", 3, 64))["codebook"])
    for other in (Site(1, "key", 3, 64), Site(0, "value", 3, 64), Site(0, "key", 3, 64, seed=1)):
        assert not torch.equal(books, codec.fit(other)["codebook"])


def with_outlier_chunk(tokens=256):
    """One chunk of 32 a hundred times longer than the others: Sec. 4.3 in a nutshell."""
    x = gauss(1, 1, tokens, 128, seed=5)
    x[..., 20:24] *= 100
    bulk = torch.ones(128, dtype=torch.bool)
    bulk[20:24] = False
    return x.half().float(), bulk


@pytest.mark.parametrize(
    ("s", "r", "without", "with_them"), [(24, 3, 1.0, 0.0379), (24, 6, 0.34, 0.0331), (192, 6, 0.31, 0.0093)]
)
def test_outliers_restore_the_bulk(s, r, without, with_them):
    x, bulk = with_outlier_chunk()
    plain, med3 = Hqmq(s, r), Hqmq(s, r, 3)
    lost = roundtrip(plain, x, fitted(plain))[..., bulk]
    kept = roundtrip(med3, x, fitted(med3, sample=x))
    assert error(x[..., bulk], lost) == pytest.approx(without, rel=0.1)
    assert error(x[..., bulk], kept[..., bulk]) == pytest.approx(with_them, rel=0.1)
    assert torch.equal(kept[..., ~bulk], x[..., ~bulk]), "held as they are"


@pytest.mark.parametrize("packing", ["ceil", "radix"])
def test_flags_name_the_longest_chunks_above_the_threshold(packing):
    codec, x = Hqmq(24, 6, 3, slots=2, packing=packing), gauss(1, 1, 4, 64, seed=6)
    params = dict(fitted(codec, 64, sample=gauss(1, 1, 256, 64)))
    assert float(params["threshold"]) == pytest.approx(3 * 1.83, rel=0.05)  # median of chi with 4 degrees: 1.832
    x[0, 0, 0, [0, 20, 40, 60]] = torch.tensor([50.0, 90.0, 70.0, 60.0])  # chunks 0, 5, 10, 15
    x[0, 0, 1, 4] = 30.0
    x[0, 0, 2, :] = 25.0  # all chunks the same and all outliers: the first two
    payload = codec.encode(x, params)
    flags = unpack(payload["flags"], 1, 16 * codec.block_tokens).reshape(4, 16)
    assert [row.nonzero().flatten().tolist() for row in flags] == [[5, 10], [1], [0, 1], []]
    y = codec.decode(payload, params)
    assert torch.equal(y[0, 0, 0, 20:24], x[0, 0, 0, 20:24])
    assert torch.equal(y[0, 0, 1, 4:8], x[0, 0, 1, 4:8])
    # no slot left: quantized under a sigma that covers them, not clamped
    assert float(y[0, 0, 0, 60]) == pytest.approx(60, rel=0.1)
    assert error(x[0, 0, 2], y[0, 0, 2]) < 0.05


def test_outliers_of_5_medians_are_fewer():
    x = gauss(1, 1, 64, 128)
    x[..., :4] *= 4
    found = []
    for multiple in (3, 4, 5):
        codec = Hqmq(24, 3, multiple)
        payload = codec.encode(x, fitted(codec, sample=x))
        found.append(int(unpack(payload["flags"], 1, 32).sum()))
    assert found[0] > found[1] > found[2] > 0


@pytest.mark.parametrize("spec", ["hqmq-s24_r3:outliers=3", "hqmq-s96_r4:outliers=4,packing=radix"])
def test_tokens_one_by_one_equal_all_at_once(spec):
    codec = kvcodec.get(spec).key
    g = codec.block_tokens
    x = gauss(2, 2, 6 * g, 64)
    x[:, :, ::3, 8:12] *= 40
    params = fitted(codec, 64, 2, gauss(1, 2, 200, 64, seed=1))
    whole = codec.encode(x, params)
    assert list(whole) == [f.name for f in codec.layout(64).fields]
    for field in codec.layout(64).fields:
        assert whole[field.name].shape == (2, 2, 6, *field.shape)
        assert whole[field.name].dtype == field.torch_dtype
    for m in range(6):
        one = codec.encode(x[1:, :, m * g : (m + 1) * g], params)
        for name, part in one.items():
            assert torch.equal(part, whole[name][1:, :, m : m + 1]), name


def test_a_cache_with_outliers_fits_on_its_first_tokens_and_appends_the_same():
    k, v = gauss(2, 1, 2, 40, 64).half()
    k[..., 8:12] *= 40
    cache = kvcodec.LayerCache(kvcodec.get("hqmq-s24_r4:outliers=3"))
    cache.append(k[:, :, :30], v[:, :, :30])
    for at in range(30, 40):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
    keys, _ = cache.decode()
    assert error(k.float(), keys.float()) < 0.01


def test_refusals():
    with pytest.raises(FitError, match="sample"):
        Hqmq(24, 3, 3).fit(Site(0, "key", 1, 64))
    for options in ({"s": 25}, {"r": 5}, {"outliers": 2}, {"packing": "zip"}, {"codebook": "fp8"}, {"slots": 0}):
        with pytest.raises(SpecError, match=r"hqmq: .* not allowed; use"):
            Hqmq(**options)
    with pytest.raises(ShapeError, match="head_dim=0"):
        Hqmq().layout(0)


def test_a_sample_of_zeros_has_no_outliers():
    codec = Hqmq(24, 3, 3)
    params = fitted(codec, 64, sample=torch.zeros(1, 1, 8, 64))
    assert not unpack(codec.encode(gauss(1, 1, 8, 64), params)["flags"], 1, 16).any()
