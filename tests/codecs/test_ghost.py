"""Facts of ghost: its levels, who gets which bits, the bytes by the definition, and what it is good for."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import Sample, Site, roundtrip
from packedkv.codecs import ghost
from packedkv.codecs.ghost import (
    CUBIC,
    ERRORS,
    FIT_EVERY,
    FIT_TOKENS,
    PARTS,
    TRIED,
    UNIT,
    Ghost,
    kinds,
    levels,
    scales,
    share_bits,
    short_kind,
    usual,
)
from packedkv.ops.lloyd_max import distortion, lloyd_max

from .support import by_definition, normal, smallest, uneven

ALL_BITS = (2, 2.5, 3, 3.5, 4, 4.5, 5)


def site(role="key", heads=2, dim=64):
    return Site(0, role, heads, dim)


def table(width):
    return levels()[2**width - 1 : 2 ** (width + 1) - 1].double()


def density(x):
    return (-x * x / 2).exp()


# -- levels and bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 8))
def test_levels_are_a_cubic_that_no_other_cubic_beats(width):
    own = table(width)
    assert torch.equal(own, -own.flip(0))
    assert bool((own.diff() > 0).all())
    found = distortion(density, own, -9.0, 9.0)
    assert found == pytest.approx(ERRORS[width], rel=2e-3)
    u = torch.arange(2**width).double() - (2**width - 1) / 2
    for a, b in itertools.product((0.99, 1.01), (0.99, 1.01)):
        other = CUBIC[width - 1][0] * a * u + CUBIC[width - 1][1] * b * u**3
        assert distortion(density, other, -9.0, 9.0) > found


@pytest.mark.parametrize(("width", "lost"), [(1, 1e-6), (2, 1e-6), (3, 0.003), (4, 0.02), (5, 0.06), (6, 0.12)])
def test_a_cubic_loses_little_against_lloyd_max(width, lost):
    best = distortion(density, lloyd_max(density, 2**width, -9.0, 9.0, symmetric=True), -9.0, 9.0)
    assert distortion(density, table(width), -9.0, 9.0) < best * (1 + lost)


@pytest.mark.parametrize("total", range(4, 11))
@pytest.mark.parametrize("seed", range(3))
def test_other_kinds_cost_hardly_less(total, seed):
    """Every run of kinds, of which each pair has at most the kind of the one before it."""
    dim = 24
    cost = (10.0 ** (normal(dim, seed=seed) * (seed + 0.5))).sort(descending=True).values.double()
    widths, places = share_bits(cost, total)
    own = kinds(total)
    assert own[-1][0] in (7, total)
    assert all(a + b == total and a >= b for a, b in own)

    def error(runs):
        pairs = list(runs)
        at = pairs.index(0) if total % 2 == 0 and 0 in pairs else len(pairs)
        every = [*(own[k] for k in pairs[:at]), *[short_kind(total)] * PARTS, *(own[k] for k in pairs[at:])]
        return sum(float(cost[i]) * ERRORS[a] + float(cost[-1 - i]) * ERRORS[b] for i, (a, b) in enumerate(every))

    full = dim // 2 - PARTS
    falling = (list(x)[::-1] for x in itertools.combinations_with_replacement(range(len(own)), full))
    found = sum(float(cost[c]) * ERRORS[w] for c, w in zip(places.tolist(), widths.tolist(), strict=True))
    least = min(map(error, falling))  # where short pairs stand is not weighed against the kinds
    assert least <= found * (1 + 1e-12)
    assert found <= least * (1.03 if total % 2 == 0 else 1 + 1e-12)
    assert sorted(places.tolist()) == list(range(dim))


# -- constants ---------------------------------------------------------------------------------------------------------


def moments_by_hand(x, paired):
    """m and v of each channel of tokens ``[n, D]`` that are all alike, with plain numbers."""
    n, dim = x.shape
    mean = [0.0 if paired else float(x[:, c].double().sum()) / n for c in range(dim)]
    square = [float(((x[:, c].double() - mean[c]) ** 2).sum()) / n for c in range(dim)]
    if paired:
        half = dim // 2
        square = [(square[c % half] + square[c % half + half]) / 2 for c in range(dim)]
    least = sum(square) / dim / n
    return mean, [max(v, least) for v in square]


def constants_by_hand(mean, variance, asked, bits):
    """Order, widths, 1 / sqrt(v) and m / sqrt(v) by place: kinds found pair by pair, places one after the other."""
    dim, total = len(mean), int(2 * bits)
    cost = [v * f for v, f in zip(variance, asked, strict=True)]
    channels = sorted(range(dim), key=lambda c: -cost[c])
    own, full = kinds(total), dim // 2 - PARTS

    def gains(i, kind):
        (a, b), (high, low) = own[kind - 1], own[kind]
        gain = cost[channels[i]] * (ERRORS[a] - ERRORS[high])
        return gain > cost[channels[-1 - i]] * (ERRORS[low] - ERRORS[b])

    each = [max(k for k in range(len(own)) if k == 0 or gains(i, k)) for i in range(full)]
    at = sum(k > 0 for k in each) if total % 2 == 0 else full
    ranked = [own[k] for k in each[:at]] + [short_kind(total)] * PARTS + [own[k] for k in each[at:]]
    fulls = [i for i in range(dim // 2) if not at <= i < at + PARTS]
    pair_of = {}
    for k in range(dim // 8):
        for quarter in range(4):
            if (p := quarter * (dim // 8) + k) < full:
                pair_of[p] = fulls.pop(0)
    pair_of |= {full + t: at + t for t in range(PARTS)}
    places = [c for p in range(dim // 2) for c in (channels[pair_of[p]], channels[-1 - pair_of[p]])]
    widths = [w for p in range(dim // 2) for w in ranked[pair_of[p]]]
    return places, widths, [variance[c] ** -0.5 for c in places], [mean[c] * variance[c] ** -0.5 for c in places]


@pytest.mark.parametrize(
    ("role", "dim", "bits"), [*(("key", 64, b) for b in (2, 3, 3.5, 4, 4.5, 5)), ("key", 128, 2.5), ("value", 64, 4)]
)
def test_constants_of_a_text_weigh_keys_by_the_queries_of_their_group(role, dim, bits):
    sample, queries = uneven(2, 50, dim, batch=2, seed=1), uneven(6, 50, dim, batch=2, seed=2)
    if role == "value":
        sample = sample + normal(2, 1, dim, seed=3)
    params = Ghost(bits).fit(site(role, 2, dim), Sample(sample, queries))
    for head in range(2):
        mean, variance = moments_by_hand(sample[:, head].flatten(0, 1), role == "key")
        asked = [1.0] * dim
        if role == "key":
            rows = queries[:, 3 * head : 3 * head + 3].flatten(0, 2).double()
            energy = rows.square().mean(0)
            pairs = [(float(energy[c]) + float(energy[c + dim // 2])) / 2 for c in range(dim // 2)]
            asked = 2 * [e**0.75 for e in pairs]
        order, widths, factor, centre = constants_by_hand(mean, variance, asked, bits)
        assert params["order"][0, head].tolist() == order
        assert params["widths"][0, head].tolist() == widths
        torch.testing.assert_close(params["factor"][0, head], torch.tensor(factor))
        weight = torch.tensor([variance[c] * asked[c] for c in order])
        torch.testing.assert_close(params["weight"][0, head], weight / weight.max())
        if role == "value":
            torch.testing.assert_close(params["centre"][0, head], torch.tensor(centre), rtol=1e-5, atol=1e-6)
    assert ("centre" in params) == (role == "value")


def test_constants_of_a_prefill_are_each_sequences_own_and_of_its_first_tokens():
    keys, most = torch.cat([uneven(2, 300, 64, seed=1), uneven(2, 300, 64, seed=5)]), FIT_TOKENS // FIT_EVERY
    params = Ghost(3).fit(site(), Sample(keys))
    loud = keys.clone()
    loud[:, :, most:] *= 50
    assert all(torch.equal(params[n], x) for n, x in Ghost(3).fit(site(), Sample(loud)).items())
    for b, head in itertools.product(range(2), range(2)):
        mean, variance = moments_by_hand(keys[b, head, :most], True)
        order, widths, _, _ = constants_by_hand(mean, variance, [v**0.5 for v in variance], 3)
        assert params["order"][b, head].tolist() == order
        assert params["widths"][b, head].tolist() == widths


def test_energies_of_the_queries_replace_those_that_keys_suggest():
    keys, queries = uneven(2, 256, 64, seed=1), uneven(6, 256, 64, seed=2)
    energy = queries.unflatten(1, (2, 3)).double().square().mean((0, 2, 3))[None]
    told, text = Ghost(3).fit(site(), Sample(keys, energy=energy)), Ghost(3).fit(site(), Sample(keys, queries))
    assert all(torch.equal(told[n], text[n]) for n in ("order", "widths", "factor"))
    torch.testing.assert_close(told["weight"], text["weight"])
    assert not torch.equal(told["order"], Ghost(3).fit(site(), Sample(keys))["order"])


@pytest.mark.parametrize("paired", [True, False])
def test_tokens_unlike_all_others_do_not_count(paired):
    x = normal(1, 2, 250, 64, seed=1)
    odd = torch.cat([40 * normal(1, 2, 1, 64, seed=2), x], 2)
    odd[:, 1, 100] *= 40
    mean, variance, kept = usual(odd, paired=paired)
    assert kept.sum((2, 3)).tolist() == [[250, 249]]
    for head, own in ((0, x[:, :1]), (1, torch.cat([x[:, 1:, :99], x[:, 1:, 100:]], 2))):
        wanted = usual(own, paired=paired)
        torch.testing.assert_close(mean[:, head : head + 1], wanted[0])
        torch.testing.assert_close(variance[:, head : head + 1], wanted[1])


# -- bytes -------------------------------------------------------------------------------------------------------------


def row_of(codes, widths, number, total):
    """A token's bytes: fields of two codes, the last four with a bit of the scale's number."""
    bits = ""
    for p in range(len(codes) // 2):
        for c in (2 * p, 2 * p + 1):
            if widths[c]:
                bits += format(codes[c], f"0{widths[c]}b")[::-1]
        if (t := p - len(codes) // 2 + PARTS) >= 0:
            bits += str(number >> t & 1)
    assert len(bits) == total
    return [int(bits[i : i + 8][::-1], 2) for i in range(0, total, 8)]


def encode_by_hand(y, params, head):
    """Codes, the scale's number, and whether every choice is clear; ``y [D]`` in the code basis."""
    each = params["widths"][0, head].tolist()
    weight = params["weight"][0, head].double()
    if "centre" in params:
        y = y - params["centre"][0, head].double()
    coded = torch.tensor([w > 0 for w in each])
    rms = float(y[coded].square().mean().sqrt())
    place = 4 * math.log2(rms) + UNIT if rms else 1.0
    nearest = min(max(round(place), 1), 15)
    clear = abs(place - math.floor(place) - 0.5) > 1e-4
    costs, tried = [float((weight * y.square()).sum())], [(0, [2**w // 2 - 1 if w else 0 for w in each])]
    for number in dict.fromkeys(min(max(nearest + step, 1), 15) for step in TRIED):
        scale, codes, level = float(scales()[number]), torch.zeros(len(each), dtype=torch.int64), torch.zeros_like(y)
        for w in set(each):
            own = torch.tensor(each) == w
            codes[own], sure = smallest((y[own, None] / scale - table(w)).abs())
            clear &= bool(sure.all())
            level[own] = table(w).double()[codes[own]]
        costs.append(float((weight * (y - scale * level).square()).sum()))
        tried.append((number, codes.tolist()))
    best = min(range(len(costs)), key=lambda i: costs[i])
    ranked = sorted(costs)
    clear &= ranked[1] - ranked[0] > 1e-4 * ranked[0]
    return *tried[best], clear


@given(
    seed=st.integers(0, 2**16),
    dim=st.sampled_from((64, 128)),
    bits=st.sampled_from(ALL_BITS),
    role=st.sampled_from(("key", "value")),
    power=st.integers(-3, 3),
)
@by_definition
def test_bytes_are_those_of_the_definition(seed, dim, bits, role, power):
    codec = Ghost(bits)
    params = codec.fit(site(role, 2, dim), Sample(uneven(2, 60, dim, seed=seed) + 1, uneven(2, 60, dim, seed=seed + 1)))
    x = (uneven(2, 4, dim, seed=seed) * 2.0**power).half().float()
    code = codec.to_code(x, params)
    payload, compared = codec.encode(code, params), 0
    for head, token in itertools.product(range(2), range(4)):
        for j, c in enumerate(params["order"][0, head].tolist()):
            y = float(x[0, head, token, c]) * float(params["factor"][0, head, j])
            assert float(code[0, head, token, j]) == pytest.approx(y, rel=1e-6)
        number, codes, clear = encode_by_hand(code[0, head, token].double(), params, head)
        if clear:
            compared += 1
            widths = params["widths"][0, head].tolist()
            assert payload["codes"][0, head, token].tolist() == row_of(codes, widths, number, int(bits * dim))
    assert compared >= 2


def test_a_decoded_channel_is_scale_times_level_times_size_and_values_get_their_mean():
    codec, x = Ghost(3), uneven(2, 4, 64, seed=4) + 2
    for role in ("key", "value"):
        params = codec.fit(site(role), Sample(uneven(2, 60, 64) + 2, uneven(4, 60, 64)))
        code = codec.to_code(x, params)
        back = codec.from_code(codec.decode(codec.encode(code, params), params), params)
        number, codes, _ = encode_by_hand(code[0, 1, 2].double(), params, 1)
        for j, c in enumerate(params["order"][0, 1].tolist()):
            y = float(scales()[number] * table(int(params["widths"][0, 1, j]))[codes[j]])
            y += float(params["centre"][0, 1, j]) if role == "value" else 0.0
            assert float(back[0, 1, 2, c]) == pytest.approx(y / float(params["factor"][0, 1, j]), rel=1e-5, abs=1e-6)


def test_a_token_of_zeros_is_the_mean_itself_and_a_tie_takes_the_lower_level():
    codec, x = Ghost(4), torch.zeros(1, 1, 1, 64)
    params = codec.fit(site(heads=1), Sample(uneven(1, 256, 64)))
    payload = codec.encode(codec.to_code(x, params), params)
    assert not codec.decode(payload, params).any()
    widths = params["widths"][0, 0].tolist()
    middle = [2**w // 2 - 1 if w else 0 for w in widths]
    assert payload["codes"][0, 0, 0].tolist() == row_of(middle, widths, 0, 256)
    values = codec.fit(site("value", 1), Sample(uneven(1, 256, 64) + 3))
    at_mean = values["centre"][:, :, None]
    assert torch.equal(codec.decode(codec.encode(at_mean, values), values), at_mean)


# -- klt ---------------------------------------------------------------------------------------------------------------


def mixed(tokens, dim, seed):
    """Rows whose channels are correlated: uneven ones behind a random matrix."""
    return uneven(2, tokens, dim, seed=seed) @ torch.linalg.qr(normal(dim, dim, seed=77)).Q


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("dim", [64, 128])
def test_uncorrelated_channels_keep_scores_and_come_back(role, dim):
    codec, x, q = Ghost(3, "klt"), mixed(40, dim, 1), normal(1, 2, 9, dim, seed=2)
    params = codec.fit(site(role, 2, dim), Sample(mixed(900, dim, 3), normal(1, 6, 900, dim, seed=4)))
    code = codec.to_code(x, params)
    cut = float(x.abs().max()) * 2.0**-15  # a token has 15 bits below its largest number
    torch.testing.assert_close(codec.from_code(code, params), x, rtol=1e-4, atol=cut)
    torch.testing.assert_close(codec.query_to_code(q, params) @ code.mT, q @ x.mT, rtol=1e-4, atol=cut * dim**0.5)
    assert torch.equal(codec.to_code(x[:, :, 7:8], params), code[:, :, 7:8])
    assert [sum(w) + 4 for w in params["widths"][0].tolist()] == [3 * dim] * 2


def test_a_head_that_is_the_same_for_all_tokens_comes_back_from_the_klt():
    codec, x = Ghost(3, "klt"), mixed(1, 64, 1).expand(-1, -1, 300, -1)
    params = codec.fit(site("value"), Sample(x, normal(1, 2, 300, 64)))
    torch.testing.assert_close(roundtrip(codec, x, params), x, rtol=1e-3, atol=1e-3)


def test_uncorrelated_channels_lose_less_where_channels_are_correlated():
    keys, queries = mixed(900, 64, 1), mixed(900, 64, 2)

    def loss(codec):
        params = codec.fit(site(), Sample(keys, queries))
        return float((queries @ (roundtrip(codec, keys, params) - keys).mT).square().mean())

    assert loss(Ghost(3, "klt")) < 0.5 * loss(Ghost(3))


def test_scaling_a_pair_of_keys_and_its_queries_alike_changes_no_code_of_the_klt():
    keys, queries, scale = mixed(900, 64, 1), mixed(900, 64, 2), torch.ones(64)
    scale[[5, 37]] = 64.0
    codec = Ghost(3, "klt")
    plain, loud = codec.fit(site(), Sample(keys, queries)), codec.fit(site(), Sample(keys * scale, queries / scale))
    assert torch.equal(plain["widths"], loud["widths"])
    lost = [
        float((queries / s @ (roundtrip(codec, keys * s, p) - keys * s).mT).square().mean())
        for s, p in ((torch.ones(64), plain), (scale, loud))
    ]
    assert lost[1] == pytest.approx(lost[0], rel=0.02)


@pytest.mark.parametrize("role", ["key", "value"])
def test_gradients_weigh_the_tokens_of_the_klt_by_definition(role):
    x, gradient = mixed(300, 64, 1).double() + 0.5, normal(1, 2, 300, 64, seed=2).double()
    gradient[:, :, ::3] *= 30
    gradient[:, 1, 5] *= 1e4  # beyond the upper limit
    paired = role == "key"
    mean, variance, kept = ghost.usual(x, paired=paired)
    for head in range(2):
        cost = (gradient[0, head] ** 2 * variance[0, head]).sum(-1)
        share = cost / (cost * kept[0, head, :, 0]).sum() * kept[0, head].sum()
        weight = kept[0, head, :, 0] * share.clamp(1e-3, 100).sqrt()
        found = ghost.token_weights(gradient, variance, kept)[0, head, :, 0]
        torch.testing.assert_close(found, weight)
        assert float(share.max()) > 100 or head == 0
    seen = {}

    def bases(self, site, mean, rows, weight, queries):
        seen.update(mean=mean, rows=rows, weight=weight)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ghost, "_bases", bases)
        Ghost(3, "klt").fit(site(role), Sample(x.float(), x.float(), gradient))
    own = torch.zeros_like(mean) if paired else (x * seen["weight"]).sum(2) / seen["weight"].sum(2)
    torch.testing.assert_close(seen["mean"], own, rtol=1e-5, atol=1e-5)


def test_gradients_that_tell_no_token_from_another_change_nothing():
    x, q, even = mixed(300, 64, 1), mixed(300, 64, 2), torch.ones(1, 2, 300, 64)
    for role in ("key", "value"):
        for codec in (Ghost(3, "klt"), Ghost(3)):
            plain, told = codec.fit(site(role), Sample(x, q)), codec.fit(site(role), Sample(x, q, even))
            assert all(torch.equal(plain[name], told[name]) for name in plain)
            none = codec.fit(site(role), Sample(x, q, even * 0))
            assert all(torch.equal(plain[name], none[name]) for name in plain)


def test_a_basis_suits_the_tokens_on_which_the_loss_depends():
    """Two kinds of tokens with bases of their own, and a loss that depends on one kind."""
    turn, codec = torch.linalg.qr(normal(64, 64, seed=5)).Q, Ghost(3, "klt")
    one, other = mixed(1000, 64, 1), mixed(1000, 64, 2) @ turn
    kinds = torch.cat([one[:, :, :600], other[:, :, :600]], 2)
    gradients = torch.ones_like(kinds)
    gradients[:, :, 600:] *= 1e-2

    def error(params, part):
        return float((roundtrip(codec, part, params) - part)[:, :, 600:].square().mean())

    plain = codec.fit(site("value"), Sample(kinds, kinds))
    told = codec.fit(site("value"), Sample(kinds, kinds, gradients))
    assert error(told, one) < 0.9 * error(plain, one)
    assert error(told, other) > error(plain, other)


# -- what it is good for -----------------------------------------------------------------------------------------------


def test_the_searched_scale_saves_what_one_loud_channel_would_cost():
    keys = normal(1, 1, 400, 64, seed=1)
    params = Ghost(3).fit(site(heads=1), Sample(keys))
    loud = normal(1, 1, 200, 64, seed=2)
    loud[..., 7] *= 12
    error = (roundtrip(Ghost(3), loud, params) - loud).square().mean()
    scale = loud.square().mean(-1, keepdim=True).sqrt()
    fixed = (roundtrip(Ghost(3), loud / scale, params) * scale - loud).square().mean()
    assert float(error) < 3 * float(fixed)
    assert float(error) < 0.5 * float((loud - loud.clamp(-2.2, 2.2)).square().mean())
