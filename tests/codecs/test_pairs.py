"""Facts of both codecs whose bits follow RoPE pairs, ``ghost`` and ``rope-pairs``; and fits on a model."""

import itertools
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import FP16_MAX, Sample, Site, roundtrip
from packedkv.codecs.ghost import Ghost
from packedkv.codecs.rope_pairs import ERRORS, STEP, RopePairs, level_tables
from packedkv.codecs.turboquant import TurboQuant
from packedkv.fitting.fit import capture, fit_model
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.cache import cache_for
from packedkv.models.windows import split_windows, tokenize
from packedkv.ops.lloyd_max import distortion
from packedkv.ops.widths import allot
from packedkv.registry import get
from tests.cli.tiny import TEXT, tiny_loaded, tiny_tokenizer

from .support import by_definition, nearest, normal, uneven

both = pytest.mark.parametrize("make", [Ghost, RopePairs])


def site(heads=2, dim=64, role="key"):
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
    params = codec.fit(site(role=role), Sample(x))
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


# -- rope-pairs --------------------------------------------------------------------------------------------------------


# -- who gets which bits -----------------------------------------------------------------------------------------------


def test_levels_are_lloyd_max_of_the_normal_law_one_width_after_the_other():
    levels = level_tables()
    assert levels.shape == (511,)
    assert float(levels[0]) == 0
    known = {1: [0.7979], 2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1520]}  # Max, 1960
    for bits, positive in known.items():
        table = levels[2**bits - 1 : 2 ** (bits + 1) - 1]
        torch.testing.assert_close(table[2 ** (bits - 1) :], torch.tensor(positive), rtol=0, atol=6e-5)
        assert torch.equal(table, -table.flip(0))


def test_the_errors_that_bits_are_bought_by_are_those_of_the_levels():
    for bits, error in enumerate(ERRORS):
        table = level_tables()[2**bits - 1 : 2 ** (bits + 1) - 1].double()
        assert distortion(lambda x: (-x * x / 2).exp(), table, -9.0, 9.0) == pytest.approx(error, rel=2e-3, abs=6e-7)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_widths_cost_the_scores_less(bits, seed):
    weights = (10.0 ** (normal(4, seed=seed) * 1.5)).sort(descending=True).values.tolist()

    def cost(widths):
        return sum(w * ERRORS[b] for w, b in zip(weights, widths, strict=True))

    every = (list(w) for w in itertools.product(range(9), repeat=4) if sum(w) == 4 * bits)
    found = allot(torch.tensor(weights, dtype=torch.float64), ERRORS, 4 * bits).tolist()
    assert cost(found) == pytest.approx(min(map(cost, every)), rel=1e-12)


def by_hand(keys, queries, bits):
    """Order, widths and sizes of each head from the definition, with plain numbers; ``queries`` None: keys alone."""
    heads, dim = keys.shape[1], keys.shape[3]
    half, found = dim // 2, []

    def energies(x):
        n = x.numel() // dim
        pairs = [float((x[..., p].double() ** 2 + x[..., p + half].double() ** 2).sum()) / (2 * n) for p in range(half)]
        least = sum(pairs) / half / n
        return [max(e, least) for e in pairs]

    for head in range(heads):
        e = energies(keys[:, head])
        group = [] if queries is None else queries[:, head * 3 : head * 3 + 3]
        f = e if queries is None else energies(group)
        weight = [a * b for a, b in zip(e, f, strict=True)]
        ranked = sorted(range(half), key=lambda p: -weight[p])
        steps = [ranked[i : i + 4] for i in range(0, half, 4)]
        widths = one_at_a_time([sum(weight[p] for p in step) for step in steps], ERRORS, bits * len(steps))
        order = [c for step in steps for c in [*step, *(p + half for p in step)]]
        found.append((order, widths, [e[c % half] ** 0.5 for c in order]))
    return found


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_constants_of_a_text_weigh_keys_by_the_queries_of_their_group(bits, dim):
    keys, queries = uneven(2, 50, dim, batch=2, seed=1), uneven(6, 50, dim, batch=2, seed=2)
    params = RopePairs(bits).fit(site(2, dim), Sample(keys, queries))
    for head, (order, widths, sizes) in enumerate(by_hand(keys, queries, bits)):
        assert params["order"][0, head].tolist() == order
        assert params["widths"][0, head].tolist() == widths
        torch.testing.assert_close(params["scale"][0, head], torch.tensor(sizes))
    assert {n: (tuple(x.shape), x.dtype) for n, x in params.items()} == {
        "order": ((1, 2, dim), torch.int16),
        "scale": ((1, 2, dim), torch.float32),
        "widths": ((1, 2, dim // 8), torch.uint8),
        "levels": ((1, 511), torch.float32),
    }


def test_constants_of_a_prefill_are_each_sequences_own_by_its_keys_alone():
    keys = torch.cat([uneven(2, 40, 64, seed=1), uneven(2, 40, 64, seed=5)])
    params = RopePairs(3).fit(site(), Sample(keys))
    assert not torch.equal(params["order"][0], params["order"][1])
    for b in range(2):
        for head, (order, widths, sizes) in enumerate(by_hand(keys[b : b + 1], None, 3)):
            assert params["order"][b, head].tolist() == order
            assert params["widths"][b, head].tolist() == widths
            torch.testing.assert_close(params["scale"][b, head], torch.tensor(sizes))


# -- bytes -------------------------------------------------------------------------------------------------------------


def stream(codes, widths):
    """A token's codes as bytes: code after code, its lowest bit first."""
    bits = "".join(format(c, f"0{w}b")[::-1] for c, w in zip(codes, widths, strict=True) if w)
    return [int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8)]


@given(
    seed=st.integers(0, 2**16),
    dim=st.sampled_from((64, 80, 128)),
    bits=st.sampled_from((2, 3, 4)),
    power=st.integers(-8, 8),
    loud=st.sampled_from((1.0, 30.0)),
)
@by_definition
def test_bytes_are_those_of_the_definition(seed, dim, bits, power, loud):
    """Order, division, norm over channels with bits, nearest level by brute force, bits written one by one."""
    codec = RopePairs(bits)
    params = codec.fit(site(2, dim), Sample(uneven(2, 60, dim, seed=seed), uneven(2, 60, dim, seed=seed + 1)))
    x = uneven(2, 5, dim, seed=seed) * 2.0**power
    x[:, 0, :, seed % dim] *= loud
    x = x.clamp(-FP16_MAX, FP16_MAX).half().float()
    payload = codec.encode(codec.to_code(x, params), params)
    for head, token in itertools.product(range(2), range(5)):
        order = params["order"][0, head].tolist()
        widths = [w for w in params["widths"][0, head].tolist() for _ in range(8)]
        z = torch.stack([x[0, head, token, c] for c in order]) / params["scale"][0, head]
        coded = torch.tensor([w > 0 for w in widths])
        gamma = z.double()[coded].square().mean().sqrt()
        codes, clear = [], True
        for u, w in zip((z.double() / gamma), widths, strict=True):
            index, sure = nearest(u, params["levels"][0, 2**w - 1 : 2 ** (w + 1) - 1].double())
            codes.append(int(index))
            clear &= bool(sure)
        if clear:
            assert payload["codes"][0, head, token].tolist() == stream(codes, widths)
        assert float(payload["norm"][0, head, token]) == pytest.approx(float(gamma), rel=2**-10)


def test_a_decoded_channel_is_norm_times_level_times_size():
    codec, x = RopePairs(3), uneven(2, 4, 64, seed=4)
    params = codec.fit(site(), Sample(uneven(2, 60, 64), uneven(4, 60, 64)))
    payload = codec.encode(codec.to_code(x, params), params)
    back = codec.from_code(codec.decode(payload, params), params)
    levels, head, token = params["levels"][0], 1, 2
    for j, c in enumerate(params["order"][0, head].tolist()):
        width = int(params["widths"][0, head, j // STEP])
        table = levels[2**width - 1 : 2 ** (width + 1) - 1]
        value = float(back[0, head, token, c] / payload["norm"][0, head, token].float() / params["scale"][0, head, j])
        assert (table - value).abs().min() < 1e-5 * max(1.0, abs(value))
        assert width or value == 0


def test_zeros_come_back_as_zeros_and_a_tie_takes_the_lower_level():
    codec, x = RopePairs(4), torch.zeros(1, 1, 2, 64)
    params = codec.fit(site(1), Sample(uneven(1, 40, 64)))
    x[0, 0, 1, int(params["order"][0, 0, 0])] = 1.0
    payload = codec.encode(codec.to_code(x, params), params)
    back = codec.from_code(codec.decode(payload, params), params)
    assert not back[0, 0, 0].any()
    widths = params["widths"][0, 0].repeat_interleave(STEP).tolist()
    assert payload["codes"][0, 0, 0].tolist() == stream([2**w // 2 - 1 if w else 0 for w in widths], widths)
    others = back[0, 0, 1][params["order"][0, 0, 1:].long()]
    coded = params["widths"][0, 0].repeat_interleave(STEP)[1:] > 0
    assert bool((others[coded] < 0).all())
    assert not others[~coded].any()


# -- widths ------------------------------------------------------------------------------------------------------------


def one_at_a_time(weights: Sequence[float], errors: Sequence[float], total: int) -> list[int]:
    """The definition, with plain numbers."""
    widths, gains = [0] * len(weights), [a - b for a, b in pairwise(errors)]
    for _ in range(total):
        free = (i for i, width in enumerate(widths) if width < len(gains))
        widths[max(free, key=lambda i: weights[i] * gains[widths[i]])] += 1
    return widths


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 200.0])
def test_widths_are_those_of_the_definition(spread: float) -> None:
    """Equal weights, zeros and weights that differ beyond all bounds among them; several heads at once."""
    generator = torch.Generator().manual_seed(int(spread))
    weights = 10.0 ** (torch.randn(2, 3, 24, generator=generator, dtype=torch.float64) * spread)
    weights[0, 0, 5:9] = weights[0, 0, 5]
    weights[0, 1, 10:] = 0.0
    weights[1, 2] = 0.0
    errors = (1.0, 0.36, 0.12, 0.035, 0.0095, 0.0025)
    for total in (0, 1, 24, 71, 120):
        found = allot(weights, errors, total)
        assert found.tolist() == [[one_at_a_time(head, errors, total) for head in heads] for heads in weights.tolist()]
