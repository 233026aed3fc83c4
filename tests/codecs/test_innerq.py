"""Facts of the InnerQ paper: readings of b bits, hybrid masks, true bits, windows, key norms within rotary pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packedkv
from packedkv.codec import Sample, Site, roundtrip
from packedkv.codecs.innerq import InnerQ
from packedkv.ops.bitpack import unpack

from .support import error
from .support import tokens as normal

BITS = {  # key, value, published mean
    "base": (3.5, 3.5, 3.5),
    "small": (3.5, 2.5, 3.0),
    "hybrid": (3.5, 3.0, 3.25),
}


@pytest.mark.parametrize("along", ["channels", "tokens"])
@pytest.mark.parametrize(
    ("bits", "symmetric", "expected"),
    [
        (2, "literal", 0.0513),
        (2, "full", 0.153),
        (2, "signed", 0.433),
        (3, "literal", 0.0094),
        (3, "full", 0.0359),
        (3, "signed", 0.0513),
    ],
)
def test_error_of_each_reading(along, bits, symmetric, expected):
    assert error(InnerQ(bits, along, symmetric), normal(8192)) == pytest.approx(expected, rel=0.015)


LEVELS = {  # L, lowest and highest code
    "literal": lambda b: (2**b - 1, -(2**b - 1), 2**b - 1),
    "signed": lambda b: (2 ** (b - 1) - 1, -(2 ** (b - 1) - 1), 2 ** (b - 1) - 1),
    "full": lambda b: (2 ** (b - 1), -(2 ** (b - 1)), 2 ** (b - 1) - 1),
}
ROWS = {
    "seed": st.integers(0, 2**16),
    "power": st.integers(-6, 7),
    "kind": st.sampled_from(["normal", "shifted", "coarse", "zeros"]),
}
drawn = settings(max_examples=8, derandomize=True, deadline=None, database=None)


def rows(seed, power, kind, dim):
    """64 tokens of two heads, exact in fp16; coarse values are multiples of 1/4 and meet ties."""
    x = normal(64, dim, heads=2, seed=seed)
    if kind == "shifted":
        x = x + 3 * normal(2, dim, heads=2, seed=seed + 1).repeat_interleave(32, 2)
    elif kind == "coarse":
        x = (x * 4).round() / 4
    elif kind == "zeros":
        x[..., 3::5], x[:, :, :40] = 0, 0
    return (x * 2.0**power).half().float()


def nearest_of_all(x, grid):
    """Index of the level of ``grid [..., n]`` nearest to ``x``, and whether it is so by more than rounding."""
    distance = (x.double()[..., None] - grid.double()).abs()
    best = distance.sort(dim=-1, stable=True)
    clear = best.values[..., 1] - best.values[..., 0] > 1e-6 * grid.abs().amax(-1)
    return best.indices[..., 0], clear


@pytest.mark.parametrize("along", ["channels", "tokens"])
@pytest.mark.parametrize("symmetric", LEVELS)
@pytest.mark.parametrize("bits", [2, 3])
@drawn
@given(**ROWS, dim=st.sampled_from([64, 80]))
def test_codes_are_the_nearest_of_all_levels(along, symmetric, bits, seed, power, kind, dim):
    """From the definition (Eq. 13, three readings): S from the group's largest magnitude, then every code tried."""
    codec, x = InnerQ(bits, along, symmetric), rows(seed, power, kind, dim)
    steps, low, high = LEVELS[symmetric](bits)
    payload = codec.encode(x, {})
    groups = x.split(32, 2) if along == "tokens" else x.split(32, 3)
    axis = 2 if along == "tokens" else 3
    expected = torch.cat([(g.abs().amax(axis, keepdim=True) / steps).clamp_min(2.0**-24).half() for g in groups], axis)
    held = payload["scale"]
    assert torch.equal(held, expected)
    s = held.float().repeat_interleave(32, axis)[..., :dim]
    index, clear = nearest_of_all(x, s[..., None] * torch.arange(low, high + 1.0))
    codes = unpack(payload["codes"], codec.width, dim).long() - 2 ** (codec.width - 1)
    assert torch.equal(codes.reshape(x.shape)[clear], (index + low)[clear])
    decoded = codec.decode(payload, {})
    assert torch.equal(decoded, codes.reshape(x.shape) * s)


@pytest.mark.parametrize("symmetric", LEVELS)
@drawn
@given(**ROWS)
def test_hybrid_codes_are_those_of_the_better_of_two(symmetric, seed, power, kind):
    """From the definition (Eq. 10-13): both tried per group, the smaller squared error kept, M in the sign of S."""
    x = rows(seed, power, kind, 64)
    codec, plain = InnerQ(2, "tokens", symmetric, hybrid=True), InnerQ(2, "tokens", symmetric)
    payload, held = codec.encode(x, {}), plain.encode(x, {})
    groups = x.unflatten(2, (-1, 32))  # [B, H, M, 32, D]
    zero = groups.amin(3).half()
    assert torch.equal(payload["zero"], zero)
    scale = ((groups.amax(3) - zero.float()) / 3).clamp_min(2.0**-24).half()
    grid = zero.float()[..., None, :, None] + scale.float()[..., None, :, None] * torch.arange(4.0)
    index, clear = nearest_of_all(groups, grid.expand(*groups.shape, 4))
    asymmetric = grid.expand(*groups.shape, 4).gather(-1, index[..., None])[..., 0]
    symmetric_part = plain.decode(held, {}).unflatten(2, (-1, 32))
    errors = [(y.double() - groups.double()).square().sum(3) for y in (asymmetric, symmetric_part)]
    mask = torch.signbit(payload["scale"])
    sure = (errors[0] - errors[1]).abs() > 1e-6 * (errors[0] + errors[1])
    assert torch.equal(mask[sure], (errors[0] < errors[1])[sure])
    assert torch.equal(payload["scale"].abs(), torch.where(mask, scale, held["scale"]))
    codes = [unpack(p["codes"], codec.width, 64).long() for p in (payload, held)]
    wide = mask.unsqueeze(3).expand(groups.shape)
    assert torch.equal(codes[0][wide & clear], index[wide & clear])
    assert torch.equal(codes[0][~wide], codes[1][~wide])


def test_the_mask_is_the_sign_bit_even_of_a_zero_scale():
    """-0.0 < 0 is false: M must come from the bit."""
    codec = InnerQ(2, "tokens", hybrid=True)
    payload = dict(codec.encode(normal(32, 8), {}))
    payload["zero"] = torch.full((1, 1, 1, 8), 2.5).half()
    payload["scale"] = torch.tensor([0.0, -0.0] * 4).half().view(1, 1, 1, 8)
    decoded = codec.decode(payload, {})
    assert torch.equal(decoded, torch.tensor([0.0, 2.5] * 4).expand(1, 1, 32, 8))


def asymmetric_share(symmetric, x):
    codec = InnerQ(2, "tokens", symmetric, hybrid=True)
    return float(torch.signbit(codec.encode(x, {})["scale"]).float().mean())


def synthetic(law):
    """Groups of 32 tokens per channel: 32768 of them."""
    x = normal(8192, 128)
    if law == "laplace":
        x = torch.distributions.Laplace(0, 1).icdf(torch.special.ndtr(x.double()).clamp(1e-12, 1 - 1e-12)).float()
    elif law == "t5":
        chi = sum(normal(8192, 128, seed=2 + i).square() for i in range(5))
        x = x / (chi / 5).sqrt()
    elif law == "shifted":
        x = x + normal(256, 128, seed=1).repeat_interleave(32, 2)
    return x


@pytest.mark.parametrize(
    ("law", "share", "band"),
    [("gauss", 0.9999, 2e-4), ("laplace", 0.9994, 4e-4), ("t5", 0.9987, 6e-4), ("shifted", 0.917, 0.005)],
)
def test_share_of_symmetric_groups(law, share, band):
    """The paper's sparse mask (99 % symmetric, 90 % for one model) is that of the literal reading alone."""
    x = synthetic(law)
    assert 1 - asymmetric_share("literal", x) == pytest.approx(share, abs=band)
    assert 0 <= 1 - asymmetric_share("signed", x) < 0.045
    assert 0.25 < 1 - asymmetric_share("full", x) < 0.6


@pytest.mark.parametrize("variant", BITS)
@pytest.mark.parametrize("symmetric", ["literal", "signed", "full"])
def test_bits_are_true_bits(variant, symmetric):
    """Table 3; the literal reading costs one bit more."""
    extra = 1 if symmetric == "literal" else 0
    scheme = packedkv.get(f"innerq:variant={variant},symmetric={symmetric}")
    found = scheme.key_bits(128), scheme.value_bits(128), scheme.effective_bits(128)
    assert found == tuple(b + extra for b in BITS[variant])


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("base", [6.625, 4.281, 3.695, 3.549]),
        ("hybrid", [6.4375, 4.047, 3.449, 3.300]),
        ("small", [6.25, 3.8125, 3.203, 3.051]),
    ],
)
def test_bits_with_windows(variant, expected):
    """Mean over all tokens of a cache of 512, 2048, 8192 and 32768, the dense ones in 16 bit."""
    scheme = packedkv.get(f"innerq:variant={variant},symmetric=signed")
    for tokens, bits in zip((512, 2048, 8192, 32768), expected, strict=True):
        dense = sum(tokens - scheme.encoded_tokens(role, tokens) for role in ("key", "value"))
        rest = sum(
            scheme.encoded_tokens(role, tokens) * b
            for role, b in (("key", scheme.key_bits(128)), ("value", scheme.value_bits(128)))
        )
        assert (16 * dense + rest) / (2 * tokens) == pytest.approx(bits, abs=6e-4)
        if tokens <= 2048:  # the bytes held say the same
            x = normal(tokens)
            assert packedkv.compress(scheme, x, x).effective_bits == pytest.approx(bits, abs=6e-4)


def test_norms_are_the_root_of_the_larger_maximum_of_a_pair():
    codec, x = InnerQ(3, norm=True), normal(50, heads=2, batch=2)
    x[..., 7] *= 40
    x[:, :, :, [5, 37]] = 0
    norm = codec.fit(Site(0, "key", 2, 64), Sample(x))["norm"]
    assert norm.shape == (2, 2, 64)
    largest = x.abs().amax(2)
    for i in range(32):
        pair = torch.maximum(largest[..., i], largest[..., i + 32]).double().sqrt().float()
        pair[pair == 0] = 1
        assert torch.equal(norm[..., i], pair)
        assert torch.equal(norm[..., i + 32], pair)
    assert not torch.equal(norm[0], norm[1])


def test_norms_commute_with_rotary_embeddings():
    """Folded into the projections before RoPE or applied after it: the same logits."""
    k, q = normal(40), normal(40, seed=1)
    codec = InnerQ(3, norm=True)
    params = codec.fit(Site(0, "key", 1, 64), Sample(k))
    angle = torch.arange(40.0)[:, None] * 10000 ** (-torch.arange(32) / 32)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rope(x):
        return x * cos + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin

    torch.testing.assert_close(rope(codec.to_code(k, params)), codec.to_code(rope(k), params))
    torch.testing.assert_close(rope(codec.query_to_code(q, params)), codec.query_to_code(rope(q), params))


def test_norms_help_keys_with_a_loud_channel():
    x = normal(256)
    x[..., 3] *= 40

    def logit_error(codec):
        params = codec.fit(Site(0, "key", 1, 64), Sample(x))
        return float((roundtrip(codec, x, params) - x)[..., :3].square().mean())

    assert logit_error(InnerQ(3, norm=True)) < 0.3 * logit_error(InnerQ(3))
