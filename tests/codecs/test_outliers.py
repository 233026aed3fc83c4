"""Facts of Med, HQMQ's outlier side channel: what it saves, what it costs, which chunks it holds, around any codec."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codec import Sample, Site, roundtrip
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hessian import HessianRotated
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.wrapper import inside
from packedkv.ops.bitpack import unpack

from .support import normal_fp16, relative_mse

INNERS = [
    Hqmq(24, 3),
    Hqmq(24, 6, packing="radix"),
    GroupInt(4, 0),
    GroupInt(3, 32, "channels", symmetric=True),
    GroupInt(2, 8, "tokens"),
    Fp8(),
    SawInt4(),
]
"""One token or several to a block; bases that are the identity, and one that rotates."""
around = pytest.mark.parametrize("inner", INNERS, ids=str)


def fitted(codec, x):
    return codec.fit(Site(0, "key", x.shape[1], x.shape[3]), Sample(x))


def flags_of(codec, payload, dim):
    """Which chunks are held: bool ``[B, H, N, n]``."""
    tokens, n = codec.block_tokens, -(-dim // 4)
    return unpack(payload["flags"], 1, tokens * n).unflatten(-1, (tokens, n)).flatten(2, 3).bool()


# -- what it saves ---------------------------------------------------------------------------------------------------


def with_a_long_chunk(heads=16, tokens=64):
    """One chunk of 32 a hundred times longer than the others; and the same tokens without it."""
    plain = normal_fp16(1, heads, tokens, 128, seed=5)
    x = plain.clone()
    x[..., 20:24] *= 100
    bulk = torch.ones(128, dtype=torch.bool)
    bulk[20:24] = False
    return plain, x.half().float(), bulk


@pytest.mark.parametrize(
    ("inner", "without", "with_it"),
    [
        (Hqmq(24, 3), 1.0, 0.0411),
        (Hqmq(24, 4), 1.0, 0.0372),
        (Hqmq(24, 6), 0.34, 0.0362),
        (Hqmq(192, 6), 0.31, 0.0093),
        (GroupInt(4, 0, symmetric=True), 1.0, 0.0135),
        (GroupInt(4, 0), 18.0, 0.0098),  # no level is zero
    ],
    ids=str,
)
def test_the_bulk_is_as_good_as_without_outliers(inner, without, with_it):
    """HQMQ's error is that of sixteen codebooks: one codebook is off by 3 % (S = 192) to 5 % (S = 24)."""
    plain, x, bulk = with_a_long_chunk()
    med = Med(inner, 3, 1)
    lost, kept = roundtrip(inner, x, fitted(inner, x)), roundtrip(med, x, fitted(med, x))
    assert relative_mse(x[..., bulk], lost[..., bulk]) == pytest.approx(without, rel=0.05)
    assert relative_mse(x[..., bulk], kept[..., bulk]) == pytest.approx(with_it, rel=0.03)
    free = roundtrip(inner, plain, fitted(inner, plain))
    wanted = relative_mse(plain[..., bulk], free[..., bulk])
    assert relative_mse(x[..., bulk], kept[..., bulk]) == pytest.approx(wanted, rel=0.02)
    assert torch.equal(kept[..., ~bulk], x[..., ~bulk]), "held as they are"


# -- which chunks ----------------------------------------------------------------------------------------------------


def by_definition(x, threshold, slots):
    """Held chunks and rest of tokens ``[n, D]``, one chunk after the other."""
    held, rest = [], x.clone()
    for token, values in enumerate(rest):
        lengths = {
            c: float(values[4 * c : 4 * c + 4].double().square().sum() ** 0.5) for c in range(-(-len(values) // 4))
        }
        above = sorted((c for c in lengths if lengths[c] > threshold), key=lambda c: (-lengths[c], c))
        held.append({c: x[token, 4 * c : 4 * c + 4].clone() for c in sorted(above[:slots])})
        for c in held[-1]:
            values[4 * c : 4 * c + 4] = 0
    return held, rest


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    inner=st.sampled_from(INNERS),
    dim=st.sampled_from([8, 24, 64]),
    c=st.sampled_from([1.5, 3, 4, 5]),
    slots=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_fields_by_definition(inner, dim, c, slots, seed):
    codec, x = Med(inner, c, slots), normal_fp16(1, 2, 8, dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x *= torch.randint(1, 9, (1, 2, 8, dim // 4, 1), generator=generator).expand(-1, -1, -1, -1, 4).flatten(-2)
    x[:, :, 3] = 5.0  # ties
    x = x.half().float()
    params = fitted(codec, normal_fp16(1, 2, 200, dim, seed=seed + 1))
    payload = codec.encode(codec.to_code(x, params), params)
    flags = flags_of(codec, payload, dim)
    rows = payload["outliers"].unflatten(-2, (codec.block_tokens, -1)).flatten(2, 3)
    bulk = []
    for head in range(2):
        held, rest = by_definition(x[0, head], float(params["threshold"][0, head]), slots)
        for token, chunks in enumerate(held):
            assert flags[0, head, token].nonzero().flatten().tolist() == list(chunks)
            found = rows[0, head, token]
            assert torch.equal(found[: len(chunks)].float(), torch.cat([*chunks.values(), torch.empty(0)]).view(-1, 4))
            assert not found[len(chunks) :].any(), "unused rows are zero"
        bulk.append(rest)
    bulk = torch.stack(bulk)[None]
    constants = inside(params)
    expected = inner.encode(inner.to_code(bulk, constants), constants)
    assert all(torch.equal(payload[name], field) for name, field in expected.items())
    y = codec.decode(payload, params)
    where = flags.repeat_interleave(4, -1)
    assert torch.equal(y[where], x[where])
    assert torch.equal(y[~where], inner.from_code(inner.decode(expected, constants), constants)[~where])


def test_the_threshold_is_frozen_at_c_medians_of_each_sequence_and_head():
    x = normal_fp16(2, 2, 300, 64) * torch.tensor([1.0, 10.0]).view(1, 2, 1, 1)
    median = Med(GroupInt(4, 0), 3).fit(Site(0, "key", 2, 64), Sample(x))["threshold"]
    assert median.shape == (2, 2)
    for row in range(2):
        for head in range(2):
            lengths = x[row, head].unflatten(-1, (-1, 4)).double().norm(dim=-1).flatten()
            assert float(median[row, head]) == pytest.approx(3 * float(lengths.median()), rel=1e-6)
    assert torch.allclose(Med(GroupInt(4, 0), 5).fit(Site(0, "key", 2, 64), Sample(x))["threshold"], median * 5 / 3)


def test_overflow_counts_what_found_no_place_and_it_is_quantized_not_clamped():
    codec, x = Med(Hqmq(24, 6), 3, 2), normal_fp16(1, 1, 4, 64, seed=6)
    params = fitted(codec, normal_fp16(1, 1, 256, 64))
    x[0, 0, 0, [0, 20, 40, 60]] = torch.tensor([50.0, 90.0, 70.0, 60.0])  # chunks 0, 5, 10, 15
    x[0, 0, 1, 4] = 30.0
    x[0, 0, 2, :] = 25.0  # all alike and all outliers: the first two
    payload = codec.encode(x, params)
    flags = flags_of(codec, payload, 64)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in flags] == [[5, 10], [1], [0, 1], []]
    missing = codec.overflow(x, params)
    assert missing.dtype == torch.int64
    assert missing.tolist() == [[[2, 0, 14, 0]]]
    y = codec.decode(payload, params)
    assert float(y[0, 0, 0, 60]) == pytest.approx(60, rel=0.1)
    assert relative_mse(x[0, 0, 2], y[0, 0, 2]) < 0.05
    enough = Med(codec.inner, 3, 2 + int(missing.max()))
    assert not enough.overflow(x, params).any()
    assert torch.equal(enough.decode(enough.encode(x, params), params)[0, 0, 0, 60:], x[0, 0, 0, 60:])


@around
def test_a_sample_of_zeros_has_no_outliers(inner):
    codec = Med(inner)
    params = codec.fit(Site(0, "key", 1, 64), Sample(torch.zeros(1, 1, 8, 64)))
    x = normal_fp16(1, 1, 8, 64)
    assert bool(params["threshold"].isfinite().all())
    assert not codec.encode(codec.to_code(x, params), params)["flags"].any()
    assert not codec.overflow(x, params).any()
    assert not roundtrip(codec, torch.zeros(1, 1, 8, 64), params).any()


# -- around any codec ------------------------------------------------------------------------------------------------


def test_the_inner_codec_is_fitted_and_settled_on_the_rest():
    inner, site = UltraTQ(table="calibrated", refit=0.5), Site(0, "key", 1, 64)
    codec, q = Med(inner), normal_fp16(1, 2, 64, 64)
    assert Med(HessianRotated(SawInt4())).needs == {"tensor", "queries"}
    _, x, _ = with_a_long_chunk(1)
    x = x[..., :64]
    plain, text = codec.fit(site, Sample(x)), codec.fit(site, Sample(x, q))
    rest = x.masked_fill(flags_of(codec, codec.encode(x, plain), 64).repeat_interleave(4, -1), 0)
    assert relative_mse(x, rest) > 0.5
    first, second = codec.settle([text, text])
    own, gaussian = inner.settle([inner.fit(site, Sample(rest, q))] * 2)
    cases = (plain, inner.fit(site, Sample(rest))), (text, inner.fit(site, Sample(rest, q))), (first, own)
    for params, wanted in (*cases, (second, gaussian)):
        assert inside(params).keys() == wanted.keys()
        assert all(torch.equal(x, wanted[name]) for name, x in inside(params).items())
        assert torch.equal(params["threshold"], plain["threshold"])
    assert not torch.equal(own["levels"], gaussian["levels"])
