"""Facts of the InnerQ paper: readings of b bits, hybrid masks, true bits, windows, key norms within rotary pairs."""

import pytest
import torch

import kvcodec
from kvcodec.codec import Site, roundtrip
from kvcodec.codecs.innerq import InnerQ, innerq
from kvcodec.errors import FitError, ShapeError, SpecError
from kvcodec.ops.bitpack import unpack

BITS = {  # key, value, published mean
    "base": (3.5, 3.5, 3.5),
    "small": (3.5, 2.5, 3.0),
    "hybrid": (3.5, 3.0, 3.25),
}


def normal(n, dim=64, heads=1, batch=1, seed=0):
    return torch.randn(batch, heads, n, dim, generator=torch.Generator().manual_seed(seed))


def error(codec, x):
    """Relative MSE."""
    return float((roundtrip(codec, x, {}) - x).square().sum() / x.square().sum())


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


@pytest.mark.parametrize(
    ("symmetric", "bits", "codes"),
    [
        ("literal", 2, range(-3, 4)),
        ("literal", 3, range(-7, 8)),
        ("signed", 2, range(-1, 2)),
        ("signed", 3, range(-3, 4)),
        ("full", 2, range(-2, 2)),
        ("full", 3, range(-4, 4)),
    ],
)
def test_levels_of_each_reading(symmetric, bits, codes):
    codec = InnerQ(bits, "channels", symmetric)
    payload = codec.encode(normal(256), {})
    used = unpack(payload["codes"], codec.width, 64).int() - 2 ** (codec.width - 1)
    assert sorted(set(used.flatten().tolist())) == list(codes)
    scale = payload["scale"].float().repeat_interleave(32, -1)
    assert torch.equal(codec.decode(payload, {}), used * scale)


@pytest.mark.parametrize("along", ["channels", "tokens"])
def test_every_element_goes_to_its_nearest_level(along):
    for dim in (64, 80):
        codec, x = InnerQ(3, along), normal(64, dim)
        payload = codec.encode(x, {})
        scale = payload["scale"].float()
        scale = scale.repeat_interleave(32, -1)[..., :dim] if along == "channels" else scale.repeat_interleave(32, 2)
        best = (x[..., None] - scale[..., None] * torch.arange(-7.0, 8)).abs().amin(-1)
        torch.testing.assert_close((codec.decode(payload, {}) - x).abs(), best, rtol=1e-5, atol=1e-6)


def asymmetric_share(symmetric, x):
    codec = InnerQ(2, "tokens", symmetric, hybrid=True)
    return float(torch.signbit(codec.encode(x, {})["scale"]).float().mean())


@pytest.mark.parametrize(
    ("symmetric", "gauss", "shifted"), [("literal", (0, 0.001), (0.06, 0.11)), ("signed", (0.95, 1), (0.95, 1))]
)
def test_share_of_asymmetric_groups(symmetric, gauss, shifted):
    """The paper's sparse mask (99 % symmetric, 90 % for one model) needs the literal reading."""
    x = normal(4096)
    assert gauss[0] <= asymmetric_share(symmetric, x) <= gauss[1]
    means = normal(128, seed=1).repeat_interleave(32, 2)
    assert shifted[0] <= asymmetric_share(symmetric, x + means) <= shifted[1]


def test_full_reading_makes_the_mask_dense():
    assert 0.4 < asymmetric_share("full", normal(4096)) < 0.75


@pytest.mark.parametrize("symmetric", ["literal", "signed", "full"])
def test_hybrid_takes_the_better_of_two(symmetric):
    x = normal(2048) + normal(64, seed=1).repeat_interleave(32, 2)
    plain, hybrid = InnerQ(2, "tokens", symmetric), InnerQ(2, "tokens", symmetric, hybrid=True)
    assert error(hybrid, x) < error(plain, x)
    payload = hybrid.encode(x, {})
    symmetric_groups = ~torch.signbit(payload["scale"]).repeat_interleave(32, 2)
    assert torch.equal(roundtrip(hybrid, x, {})[symmetric_groups], roundtrip(plain, x, {})[symmetric_groups])
    squares = [(roundtrip(c, x, {}) - x).square().unflatten(2, (-1, 32)).sum(3) for c in (hybrid, plain)]
    assert bool((squares[0] <= squares[1] * (1 + 1e-5)).all())


def test_a_far_off_constant_group_is_exact_when_asymmetric():
    x = torch.full((1, 1, 32, 8), -5.3125)
    x[:, :, 0] = -5.0
    codec = InnerQ(2, "tokens", hybrid=True)
    payload = codec.encode(x, {})
    assert bool(torch.signbit(payload["scale"]).all())
    assert torch.equal(payload["zero"], torch.full((1, 1, 1, 8), -5.3125).half())
    torch.testing.assert_close(codec.decode(payload, {}), x, rtol=1e-3, atol=0)


@pytest.mark.parametrize("variant", BITS)
@pytest.mark.parametrize("symmetric", ["literal", "signed", "full"])
def test_bits_are_true_bits(variant, symmetric):
    """Table 3; the literal reading costs one bit more."""
    extra = 1 if symmetric == "literal" else 0
    scheme = kvcodec.get(f"innerq:variant={variant},symmetric={symmetric}")
    found = scheme.key_bits(128), scheme.value_bits(128), scheme.effective_bits(128)
    assert found == tuple(b + extra for b in BITS[variant])


@pytest.mark.parametrize(
    ("variant", "tokens", "bits"),
    [("base", 512, 6.625), ("base", 2048, 4.281), ("hybrid", 512, 6.4375), ("small", 2048, 3.8125)],
)
def test_bits_with_windows(variant, tokens, bits):
    scheme = kvcodec.get(f"innerq:variant={variant},symmetric=signed")
    x = normal(tokens)
    assert kvcodec.compress(scheme, x, x).effective_bits == pytest.approx(bits, abs=5e-4)


def test_keys_leave_one_by_one_and_values_in_groups_of_32():
    scheme = kvcodec.get("innerq-base")
    assert (scheme.sink, scheme.window) == (32, 96)
    for step in range(1, 100):
        assert scheme.encoded_tokens("key", 128 + step) == step
        assert scheme.encoded_tokens("value", 128 + step) == step // 32 * 32


def test_norms_are_the_root_of_the_larger_maximum_of_a_pair():
    codec, x = InnerQ(3, norm=True), normal(50, heads=2, batch=2)
    x[..., 7] *= 40
    x[:, :, :, [5, 37]] = 0
    norm = codec.fit(Site(0, "key", 2, 64), x)["norm"]
    assert norm.shape == (2, 2, 64)
    largest = x.abs().amax(2)
    for i in range(32):
        pair = torch.maximum(largest[..., i], largest[..., i + 32]).sqrt()
        pair[pair == 0] = 1
        assert torch.equal(norm[..., i], pair)
        assert torch.equal(norm[..., i + 32], pair)
    assert not torch.equal(norm[0], norm[1])


def test_norms_commute_with_rotary_embeddings():
    """Folded into the projections before RoPE or applied after it: the same logits."""
    k, q = normal(40), normal(40, seed=1)
    codec = InnerQ(3, norm=True)
    params = codec.fit(Site(0, "key", 1, 64), k)
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
        params = codec.fit(Site(0, "key", 1, 64), x)
        return float((roundtrip(codec, x, params) - x)[..., :3].square().mean())

    assert logit_error(InnerQ(3, norm=True)) < 0.3 * logit_error(InnerQ(3))


def test_recipe_is_the_papers():
    assert kvcodec.get("innerq-base").key == InnerQ(3, "channels", "literal", norm=True)
    assert kvcodec.get("innerq-base").value == InnerQ(3, "tokens", "literal")
    assert kvcodec.get("innerq-small").value == InnerQ(2, "tokens", "literal")
    assert kvcodec.get("innerq:variant=hybrid").value == InnerQ(2, "tokens", "literal", hybrid=True)
    assert not kvcodec.get("innerq-small:norm=false").key.needs_sample


def test_unknown_options_and_missing_samples():
    with pytest.raises(SpecError, match="bits=4 is not allowed; use 2 or 3"):
        InnerQ(4)
    with pytest.raises(SpecError, match="symmetric='odd' is not allowed; use literal, signed or full"):
        innerq(symmetric="odd")
    with pytest.raises(SpecError, match="use channels or tokens, and tokens with hybrid"):
        InnerQ(2, "channels", hybrid=True)
    with pytest.raises(ShapeError, match="head_dim=100 is not a multiple of 8; use 64, 80, 96, 128, 192 or 256"):
        InnerQ().layout(100)
    with pytest.raises(FitError, match="norm=true needs sample keys"):
        InnerQ(norm=True).fit(Site(0, "key", 1, 64))
