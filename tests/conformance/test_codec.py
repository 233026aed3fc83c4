"""One codec, one site: pure, append-invariant, finite, and no better than information theory allows."""

import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packedkv
from packedkv.codec import Site, roundtrip
from packedkv.registry import method_of

from .conftest import CALIBRATED, beside_presets, in_turn
from .support import (
    DTYPES,
    HEAD_DIMS,
    KINDS,
    cache_of,
    dim_of,
    fit,
    gaussian,
    kv,
    mixtures,
    payload_equal,
    quick,
    relative_mse,
    row_block,
    same_bits,
    sides,
    site_of,
    supported_dims,
)


def test_same_seed_same_bits(spec):
    scheme = packedkv.get(spec)
    k, v = kv(scheme.sink + scheme.window + 2 * scheme.key.block_tokens, dim=dim_of(scheme))
    torch.manual_seed(1)
    a = packedkv.compress(scheme, k, v, layer=3, seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    b = packedkv.compress(scheme, k, v, layer=3, seed=5)
    b.decode()
    assert torch.equal(before, torch.get_rng_state()), "the global generator was used"
    assert payload_equal(a.key.payload, b.key.payload)
    assert payload_equal(a.value.payload, b.value.payload)


def test_drawn_constants_differ_between_sites(spec):
    """A codec that draws per site must not draw the same for each; one that draws nothing has equal constants."""
    for role, codec in sides(packedkv.get(spec)):
        dim = supported_dims(codec)[0]
        base = fit(codec, site_of(role, dim=dim))
        others = [fit(codec, site_of(role, dim=dim, **change)) for change in ({"layer": 1}, {"seed": 1})]
        for name, value in base.items():
            assert same_bits(value, fit(codec, site_of(role, dim=dim))[name]), f"{name} is not reproducible"
        drawn = [any(not same_bits(v, other[n]) for n, v in base.items()) for other in others]
        assert drawn[0] == drawn[1], f"{role}: constants depend on only one of layer and seed"
        other = fit(codec, site_of("value" if role == "key" else "key", dim=dim))
        for name, value in base.items():
            if "tensor" not in codec.needs and not same_bits(value, others[0][name]):
                assert not same_bits(value, other[name]), f"{name}: keys and values draw the same"
                assert not same_bits(value[:, 0], value[:, 1]), f"{name}: heads draw the same"


def test_constants_are_real_tensors_with_leading_dimension_one(spec):
    for role, codec in sides(packedkv.get(spec)):
        for name, value in fit(codec, site_of(role, dim=supported_dims(codec)[0])).items():
            assert isinstance(value, torch.Tensor), name
            shape = list(value.shape)
            assert not shape or shape[0] == 1, f"{name} {shape}: leading dimension 1, or B; return it as {[1, *shape]}"
            assert not value.is_floating_point() or bool(value.isfinite().all()), name


@beside_presets(*CALIBRATED)
@quick
@given(data=st.data())
def test_blocks_one_by_one_equal_all_at_once(spec, data):
    """Append-invariance, bit for bit, on values of every kind; a slice of the batch is the batch's slice."""
    for role, codec in sides(packedkv.get(spec)):
        dim, g = supported_dims(codec)[0], codec.block_tokens
        batch, blocks = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
        params = fit(codec, site_of(role, dim=dim))
        x = codec.to_code(data.draw(mixtures(batch, 2, blocks * g, dim)), params)
        copy = x.clone()
        whole = codec.encode(x, params)
        assert torch.equal(x, copy), "encode changed its input"
        for m in range(blocks):
            one = codec.encode(x[:, :, m * g : (m + 1) * g], params)
            assert payload_equal(one, {n: t[:, :, m : m + 1] for n, t in whole.items()}), f"{role} block {m}"
        last = codec.encode(x[-1:], params)
        assert payload_equal(last, {n: t[-1:] for n, t in whole.items()}), f"{role} batch slice"
        decoded = codec.decode(whole, params)
        assert bool(decoded.isfinite().all()), "NaN or Inf out"
        piece = codec.decode({n: t[-1:, :, -1:] for n, t in whole.items()}, params)
        assert same_bits(piece, decoded[-1:, :, -g:].contiguous()), f"{role} decode depends on the rest of the call"


@beside_presets(*CALIBRATED)
@quick
@given(data=st.data())
def test_the_model_basis_is_append_invariant_too(spec, data):
    """to_code on one token gives the bits of a whole prefill: no GEMM whose order depends on the shape."""
    for role, codec in sides(packedkv.get(spec)):
        dim, g = supported_dims(codec)[-1], codec.block_tokens
        params = fit(codec, site_of(role, dim=dim))
        blocks = 4 if g < 64 else 2
        x = data.draw(mixtures(2, 2, blocks * g, dim))
        whole = codec.encode(codec.to_code(x, params), params)
        for m in range(blocks):
            one = codec.encode(codec.to_code(x[:, :, m * g : (m + 1) * g], params), params)
            assert payload_equal(one, {n: t[:, :, m : m + 1] for n, t in whole.items()}), f"{role} block {m}"


@beside_presets(*CALIBRATED[1:])  # a token of the first has 15 bits in its product with the basis
def test_bases_keep_inner_products_and_come_back(spec):
    for role, codec in sides(packedkv.get(spec)):
        for dim in supported_dims(codec):
            params = fit(codec, site_of(role, dim=dim))
            k = gaussian(2, 2, 2 * codec.block_tokens, dim, seed=1).float()
            q = gaussian(2, 2, 5, dim, seed=2).float()
            code = codec.to_code(k, params)
            torch.testing.assert_close(codec.from_code(code, params), k, rtol=1e-5, atol=1e-5)
            scores = codec.query_to_code(q, params) @ code.transpose(2, 3)
            band = max(1e-4, codec.query_error)
            torch.testing.assert_close(scores, q @ k.transpose(2, 3), rtol=band, atol=band * dim**0.5)
            # linear: values may be mapped back once, after the attention output
            mixed = codec.from_code(code * 0.5 + 2 * code.flip(2), params)
            torch.testing.assert_close(mixed, k * 0.5 + 2 * k.flip(2), rtol=1e-4, atol=1e-4)


def test_error_falls_with_more_bits_within_a_method():
    """Over all presets at once, key and value apart: half a bit or more buys a smaller error where groups of 32 tokens
    have means of their own, and costs nothing where they have none. Strict on the first only: an offset that a codec
    may take or leave (InnerQ's hybrid) is left on centred groups, and the bytes that hold it then buy nothing."""
    by_method: dict[str, list[str]] = {}
    for preset in packedkv.presets():
        by_method.setdefault(method_of(preset).name, []).append(preset)
    for group in by_method.values():
        for role in ("key", "value"):
            points = sorted((c.layout(128).effective_bits, p, c) for p, c in codecs(group, role))
            for (bits, preset, codec), (more, better, finer) in pairwise(points):
                if more - bits < 0.5:
                    continue
                step = f"{role}: {better} ({more} bits) against {preset} ({bits} bits)"
                assert shifted_error(finer) < shifted_error(codec), step
                assert gaussian_error(finer) <= gaussian_error(codec), step


def codecs(presets: list[str], role: str):
    for preset in presets:
        codec = packedkv.get(preset).codec(role)
        if 128 in supported_dims(codec):
            yield preset, codec


def gaussian_error(codec) -> float:
    """Relative mean squared error on independent normal values."""
    return error_on(codec, gaussian(1, 2, 256, 128, seed=7).float())


def shifted_error(codec) -> float:
    """The same where each channel has another N(0, 1) mean every 32 tokens."""
    means = gaussian(1, 2, 8, 128, seed=8).float().repeat_interleave(32, 2)
    return error_on(codec, gaussian(1, 2, 256, 128, seed=7).float() + means)


def error_on(codec, x) -> float:
    return relative_mse(x, roundtrip(codec, x, fit(codec, site_of(dim=128))))


def test_error_on_gaussian_input_is_possible_and_decent(spec):
    """Rate-distortion: no map of R bits per element gets below 4^-R on normal values, so less means hidden bytes."""
    for role, codec in sides(packedkv.get(spec)):
        if 128 not in supported_dims(codec):
            continue
        layout = codec.layout(128)
        error = gaussian_error(codec)
        assert error > 4.0**-layout.effective_bits * 0.9 or layout.effective_bits >= 16, f"{role}: {error}"
        assert error < 8 * 4.0 ** -min(layout.nominal_bits, 5), f"{role}: {error} at {layout.nominal_bits} bits"


@in_turn("dim", HEAD_DIMS)
def test_extreme_inputs_stay_finite_and_close(spec, dim):
    """A sequence of each kind, all in one call."""
    for role, codec in sides(packedkv.get(spec)):
        if dim not in supported_dims(codec):
            continue  # test_layout looks at what it says
        params = fit(codec, Site(0, role, 2, dim))
        noise = fitted_noise(codec, params, dim)
        every = torch.cat([row_block(kind, (1, 2, 2 * codec.block_tokens, dim), seed=4) for kind in KINDS])
        for kind, x, y in zip(KINDS, every, roundtrip(codec, every, params), strict=True):
            where = f"{kind} {role} D={dim}"
            assert bool(y.isfinite().all()), where
            if kind == "zero":
                assert float(y.abs().max()) <= noise, f"{where}: zeros came back as {float(y.abs().max())}"
            elif kind != "subnormal":
                assert relative_mse(x, y) < 1.0, f"{where}: worse than storing nothing"
                if kind == "extreme" and "tensor" not in codec.needs:
                    assert relative_mse(x, y) < 0.5, f"{where}: the length of the row, 65504 sqrt(D), is clamped"
            else:
                assert float((x - y).abs().max()) <= max(2.0**-14, noise), where


def fitted_noise(codec, params, dim) -> float:
    """How far off a token near zero may be: 0, or four times the error on its sample of a codec fitted on one."""
    x = gaussian(1, 2, 256, dim, seed=99).float()
    return 4 * relative_mse(x, roundtrip(codec, x, params)) ** 0.5 if "tensor" in codec.needs else 0.0


def test_input_dtypes(spec):
    """What stays dense comes back as it was held."""
    scheme = packedkv.get(spec)
    dim, n = dim_of(scheme), scheme.sink + scheme.window + 2 * scheme.key.block_tokens + 1
    for dtype in DTYPES:
        k, v = kv(n, dim=dim, dtype=dtype)
        packed = packedkv.compress(scheme, k, v)
        held = dtype if dtype != torch.float32 else torch.float16
        for role, x, back in zip((packed.key, packed.value), (k, v), packed.decode(), strict=True):
            assert (back.dtype, back.shape) == (torch.float32, x.shape)
            assert role.sink.dtype == role.window.dtype == held
            last = role.window.shape[2]
            assert last == 0 or same_bits(back[:, :, -last:].to(held), x[:, :, -last:].to(held)), dtype


def test_what_no_codec_can_store_is_refused_with_the_place(spec):
    """By compress and fake_quant, and by a cache, which stays as it is."""
    scheme = packedkv.get(spec)
    good = dict(zip(("keys", "values"), kv(7, dim=dim_of(scheme), dtype=torch.float32), strict=True))
    cache = cache_of(scheme, dim=dim_of(scheme))
    cache.append(**good)
    before, sizes = cache.decode(), cache.nbytes()
    calls = (lambda **t: packedkv.compress(scheme, **t), lambda **t: packedkv.fake_quant(scheme, **t), cache.append)
    for which, bad in itertools.product(good, (float("nan"), float("inf"), -float("inf"), 70000.0)):
        wrong = {**good, which: good[which].clone()}
        wrong[which][1, 0, 4, 11] = bad
        for call in calls:
            with pytest.raises(ValueError, match=rf"{which}\[batch=1, head=0, token=4, channel=11\]"):
                call(**wrong)
    assert (len(cache), cache.nbytes()) == (7, sizes)
    assert all(same_bits(a, b) for a, b in zip(before, cache.decode(), strict=True))


def test_float32_gives_the_bits_of_its_fp16_rounding(spec):
    scheme = packedkv.get(spec)
    k, v = kv(scheme.sink + scheme.window + scheme.key.block_tokens, dim=dim_of(scheme), dtype=torch.float32)
    a, b = packedkv.compress(scheme, k, v), packedkv.compress(scheme, k.half(), v.half())
    assert payload_equal(a.key.payload, b.key.payload)
    assert payload_equal(a.value.payload, b.value.payload)


def test_fake_quant_is_compress_without_windows(spec):
    scheme = packedkv.get(spec)
    k, v = kv(2 * scheme.key.block_tokens, dim=dim_of(scheme))
    expected = packedkv.compress(scheme.without_windows(), k, v).decode()
    for a, b in zip(packedkv.fake_quant(spec, k, v), expected, strict=True):
        assert same_bits(a, b)
