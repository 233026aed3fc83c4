"""Facts of both codecs whose bits follow RoPE pairs, ``ghost`` and ``rope-pairs``; and fits on a model."""

import itertools

import pytest
import torch

from packedkv.codec import Sample, Site, roundtrip
from packedkv.codecs.ghost import Ghost
from packedkv.codecs.rope_pairs import RopePairs
from packedkv.codecs.turboquant import TurboQuant
from packedkv.fitting.fit import capture, fit_model
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.cache import cache_for
from packedkv.models.windows import split_windows, tokenize
from packedkv.registry import get
from tests.cli.tiny import TEXT, tiny_loaded, tiny_tokenizer

from .draws import normal, uneven

both = pytest.mark.parametrize("make", [Ghost, RopePairs])


def site(role="key", heads=2, dim=64):
    return Site(0, role, heads, dim)


def sizes(params):
    """Root of the energy of each channel in coded order."""
    return params["scale"] if "scale" in params else 1 / params["factor"]


def turned(x, angle):
    """Rotate channels (i, i + D / 2) of ``x [..., D]`` by ``angle [D / 2]``, as RoPE does."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@both
def test_turning_pairs_as_later_positions_do_changes_no_constant_of_keys(make):
    """A sample of positions 0..n fits keys of later ones: RoPE moves energy within a pair, never between pairs."""
    keys, queries = uneven(2, 200, 64, seed=1).double(), uneven(6, 200, 64, seed=2).double()
    keys[..., 32:] = 0  # as a pair of low frequency at the first positions
    angle = normal(32, seed=3).double()
    early = make(3).fit(site(), Sample(keys, queries))
    late = make(3).fit(site(), Sample(turned(keys, angle), turned(queries, angle)))
    assert make is Ghost or torch.equal(early["order"], late["order"])
    assert torch.equal(early["widths"], late["widths"])
    torch.testing.assert_close(sizes(early), sizes(late))


@both
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_a_short_sample_does_not_show_may_be_loud_later(make, tokens):
    sample = torch.zeros(1, 1, tokens, 64)
    sample[..., 5] = 4.0
    params = make(3).fit(site(heads=1), Sample(sample))
    torch.testing.assert_close(sizes(params).double().min() ** 2, torch.tensor(16.0 / 64 / tokens).double())
    silent = make(3).fit(site(heads=1), Sample(torch.zeros(1, 1, 4, 64)))
    assert torch.equal(sizes(silent), torch.ones(1, 1, 64))
    assert silent["widths"].sum() in (8 * 3, 3 * 64 - 4)


@pytest.mark.parametrize(("codec", "role"), [(Ghost(3), "key"), (Ghost(3), "value"), (RopePairs(3), "key")])
def test_heads_of_different_widths_and_sequences_of_different_constants_keep_their_own(codec, role):
    x = uneven(2, 30, 64, batch=3, seed=9)
    x[1] *= torch.logspace(1, -1, 64)
    x[2, 1] = x[2, 1].flip(-1)
    params = codec.fit(site(role), Sample(x))
    assert len({tuple(w) for w in params["widths"].flatten(0, 1).tolist()}) > 1
    whole = codec.encode(codec.to_code(x, params), params)
    back = codec.decode(whole, params)
    for b, h in itertools.product(range(3), range(2)):
        own = {n: t if n == "levels" else t[b : b + 1, h : h + 1] for n, t in params.items()}
        one = codec.encode(codec.to_code(x[b : b + 1, h : h + 1], own), own)
        assert all(torch.equal(one[n], t[b : b + 1, h : h + 1]) for n, t in whole.items())
        assert torch.equal(codec.decode(one, own), back[b : b + 1, h : h + 1])


@both
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scores_lose_a_quarter_of_what_equal_bits_lose_on_uneven_pairs(make, bits):
    keys, queries = uneven(2, 400, 128, seed=1), uneven(2, 100, 128, seed=1)
    codec, plain = make(bits), TurboQuant(bits)

    def score_mse(codec, sample):
        params = codec.fit(site(dim=128), sample)
        return float((queries @ (roundtrip(codec, keys, params) - keys).mT).square().mean())

    assert score_mse(codec, Sample(keys, queries)) < score_mse(plain, Sample()) / 4
    # queries that are loud where keys are not: their fit asks for other bits than the keys alone
    queries = queries.roll(32, -1)
    assert score_mse(codec, Sample(keys, queries)) < 0.8 * score_mse(codec, Sample(keys))


@pytest.mark.parametrize(
    ("spec", "roles", "mean"),
    [("ghost-3", ["key", "value"], "pre"), ("rope-pairs-3", ["key"], None), ("saw-int4:oscar=true", ["key"], None)],
)
def test_a_fit_on_a_model_is_saved_and_used(spec, roles, mean, tmp_path):
    model = tiny_loaded()
    fitted = fit_model(model, spec, TEXT, windows=2, window_tokens=96)
    assert all(list(own) == roles for own in fitted.values())
    parts, codec = split_windows(tokenize(tiny_tokenizer(), TEXT, 192), 2, 96), get(spec).key
    if mean is None:  # keys are the codec's own
        for layer, sample in capture(model.model, parts, [(layer, "key", codec) for layer in fitted]).items():
            keys, queries = torch.cat(sample.key, 2), torch.cat(sample.queries, 2)
            again = codec.fit(Site(layer, "key", keys.shape[1], keys.shape[3]), Sample(keys, queries))
            assert all(torch.equal(again[name], x) for name, x in fitted[layer]["key"].items())
    fitted.save(tmp_path / "p.safetensors")
    cache = cache_for(model.model, spec, params=tmp_path / "p.safetensors")
    with torch.no_grad():
        model.model(parts[0][None], **passing(model.model, cache))
    for layer, held in zip(fitted, cache.layers, strict=True):
        assert mean is None or held.cache.scheme.mean == mean
        for role in roles:
            params = held.cache.roles[role].params
            assert all(torch.equal(x, fitted[layer][role][name]) for name, x in params.items())
