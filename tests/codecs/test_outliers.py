"""Facts of Med, HQMQ's outlier side channel: what it saves, what it costs, which chunks it holds, around any codec."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packedkv
from packedkv.codec import NO_SAMPLE, Dense, Sample, Site, roundtrip
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.wrapper import inside
from packedkv.errors import FitError, ShapeError, SpecError
from packedkv.files import caches as persist
from packedkv.ops.bitpack import unpack
from tests.codecs.draws import normal_fp16, relative_mse

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


def test_without_it_coarse_radii_lose_most_chunks():
    """6 bits: those with |x| / |y| < 100 / 126, y as long as they are; |x|^2 / |y|^2 is F(4, 4): one third."""
    _, x, bulk = with_a_long_chunk(1, 1000)
    chunks = {r: roundtrip(Hqmq(24, r), x, fitted(Hqmq(24, r), x))[..., bulk].unflatten(-1, (31, 4)) for r in (3, 4, 6)}
    zeroed = {r: float((~y.any(-1)).float().mean()) for r, y in chunks.items()}
    assert min(zeroed[3], zeroed[4]) > 0.95
    assert zeroed[6] == pytest.approx(0.333, abs=0.015)


def test_a_rotating_codec_gets_the_rest_in_its_own_basis():
    """Outliers are split off before the rotation, so they come back as they are and do not smear over the head."""
    _, x, bulk = with_a_long_chunk(2)
    med, plain = Med(SawInt4(), 3, 1), SawInt4()
    params = fitted(med, x)
    y = roundtrip(med, x, params)
    assert torch.equal(y[..., ~bulk], x[..., ~bulk])
    assert relative_mse(x[..., bulk], y[..., bulk]) < 0.015
    assert relative_mse(x[..., bulk], roundtrip(plain, x, {})[..., bulk]) > 1
    assert torch.equal(med.query_to_code(x, params), x)


def test_zeros_stretch_the_range_of_a_one_sided_token():
    """The documented price: zeros stand where the outliers were, so [8, 9] becomes [0, 9]."""
    x = (8 + torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))).half().float()
    sample = x.clone()
    x[..., 8:12] *= 50
    inner = GroupInt(4, 0)
    kept = roundtrip(Med(inner, 3, 1), x, fitted(Med(inner, 3, 1), sample))
    step = (kept - x)[..., 12:].abs().max() * 2
    assert 9 / 15 * 0.9 < float(step) < 9.1 / 15


# -- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "dim", "nbytes"),
    [
        (Med(Hqmq(24, 3)), 128, 74),  # 54 + 4 flags + 2 x 8
        (Med(Hqmq(24, 3), slots=1), 128, 66),
        (Med(Hqmq(24, 3), slots=3), 45, 22 + 2 + 24),  # 12 chunks
        (Med(Hqmq(24, 3, packing="radix"), slots=1), 128, 203 + 16 + 32),  # four tokens
        (Med(GroupInt(4, 0)), 128, 68 + 4 + 16),
        (Med(GroupInt(2, 32, "tokens"), slots=1), 64, 512 + 256 + 64 + 256),  # 32 tokens of 16 chunks
        (Med(GroupInt(4, 0), slots=99), 16, 12 + 1 + 32),  # no more slots than chunks
    ],
    ids=str,
)
def test_bytes_of_a_block(codec, dim, nbytes):
    layout, x = codec.layout(dim), normal_fp16(2, 1, 2 * codec.block_tokens, dim)
    assert layout.block_bytes == nbytes
    payload = codec.encode(x, fitted(codec, x))
    assert sum(t.nbytes for t in payload.values()) == 2 * 2 * nbytes
    assert [f.name for f in layout.fields][-2:] == ["flags", "outliers"]
    assert layout.fields[:-2] == codec.inner.layout(dim).fields


@pytest.mark.parametrize(("slots", "bits"), [(1, 0.75), (2, 1.25), (3, 1.75)])
def test_bits_on_top_at_128(slots, bits):
    assert Med(Hqmq(24, 3), slots=slots).layout(128).effective_bits == 3.375 + bits


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


def test_the_more_medians_the_fewer_outliers():
    x = normal_fp16(1, 1, 64, 128)
    x[..., :4] *= 4
    found = []
    for c in (3, 4, 5):
        codec = Med(Hqmq(24, 3), c)
        found.append(int(flags_of(codec, codec.encode(x, fitted(codec, x)), 128).sum()))
    assert found[0] > found[1] > found[2] > 0


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


# -- streaming -------------------------------------------------------------------------------------------------------


def lumpy(*shape):
    """Normal values, every third token with one long chunk, every fifth with four."""
    x = normal_fp16(*shape)
    x[..., ::3, 8:12] *= 40
    x[..., ::5, 16:32] *= 20
    return x.half().float()


@around
def test_blocks_one_by_one_equal_all_at_once_and_sequences_do_not_meet(inner):
    codec = Med(inner)
    g, x = codec.block_tokens, lumpy(2, 2, 6 * codec.block_tokens, 64)
    params = fitted(codec, normal_fp16(1, 2, 200, 64, seed=1))
    whole = codec.encode(codec.to_code(x, params), params)
    assert flags_of(codec, whole, 64).any()
    for field in codec.layout(64).fields:
        assert whole[field.name].shape == (2, 2, 6, *field.shape)
        assert whole[field.name].dtype == field.torch_dtype
    assert list(whole) == [f.name for f in codec.layout(64).fields]
    decoded = codec.decode(whole, params)
    for m in range(6):
        one = codec.encode(codec.to_code(x[1:, :, m * g : (m + 1) * g], params), params)
        for name, part in one.items():
            assert torch.equal(part, whole[name][1:, :, m : m + 1]), name
        piece = codec.decode({n: t[:1, :, m : m + 1] for n, t in whole.items()}, params)
        assert torch.equal(piece, decoded[:1, :, m * g : (m + 1) * g])


@around
def test_a_cache_appends_crops_saves_and_loads(inner, tmp_path):
    scheme = packedkv.KVScheme(key=Med(inner), value=Med(inner), window=3)
    k, v = lumpy(2, 1, 2, 60, 64).half()
    params = {"key": fitted(scheme.key, k.float()), "value": fitted(scheme.value, v.float())}
    once, steps = (packedkv.LayerCache(scheme, params=params) for _ in range(2))
    once.append(k, v)
    for at in range(0, 60, 7):
        steps.append(k[:, :, at : at + 7], v[:, :, at : at + 7])
    assert all(torch.equal(a, b) for a, b in zip(once.decode(), steps.decode(), strict=True))
    persist.save_layers(tmp_path / "cache", [steps], {})
    (loaded,), _ = persist.load_layers(tmp_path / "cache")
    assert loaded.scheme == scheme
    assert all(torch.equal(a, b) for a, b in zip(once.decode(), loaded.decode(), strict=True))
    once.crop(40)
    assert torch.equal(once.decode()[0], steps.decode(0, 40)[0])
    parts = once.nbytes()
    assert parts["key.outliers"] > parts["key.flags"] > 0


def test_a_cache_without_constants_fits_on_its_first_call():
    k, v = lumpy(2, 2, 2, 40, 64).half()
    cache = packedkv.LayerCache(packedkv.get("hqmq-s24_r4:outliers=3,slots=5"))
    cache.append(k[:, :, :30], v[:, :, :30])
    frozen = cache.roles["key"].params["threshold"].clone()
    for at in range(30, 40):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
    assert torch.equal(cache.roles["key"].params["threshold"], frozen)
    assert relative_mse(k.float(), cache.decode()[0].float()) < 0.01
    swapped = cache.decode()[0].flip(0)
    cache.select(torch.tensor([1, 0]))
    assert torch.equal(cache.decode()[0], swapped)


def test_constants_of_each_sequence_move_with_it():
    codec = Med(InnerQ(3, norm=True))
    k, v = lumpy(2, 2, 2, 64, 64).half()
    k[1] *= 10
    cache = packedkv.LayerCache(packedkv.KVScheme(key=codec, value=Med(GroupInt(4, 32))))
    cache.append(k, v)
    assert {n: p.shape[0] for n, p in cache.roles["key"].params.items()} == {"inner.norm": 2, "threshold": 2}
    swapped = cache.decode()[0].flip(0)
    cache.select(torch.tensor([1, 0]))
    assert torch.equal(cache.decode()[0], swapped)


def test_a_sequence_in_a_batch_gets_the_bytes_it_gets_alone():
    k, v = ((normal_fp16(3, 2, 40, 64, seed=s) ** 3).half() for s in (1, 2))  # outliers of every size
    k[1:] *= 20
    together, alone = (packedkv.LayerCache(packedkv.get("int-4:outliers=3")) for _ in range(2))
    together.append(k, v)
    alone.append(k[:1], v[:1])
    assert torch.equal(together.decode()[0][:1], alone.decode()[0])


def test_no_tokens_make_no_bytes():
    x = torch.zeros(1, 2, 0, 64)
    for codec in (Med(inner) for inner in INNERS):
        params = fitted(codec, normal_fp16(1, 2, 8, 64))
        payload = codec.encode(x, params)
        assert sum(t.nbytes for t in payload.values()) == 0
        assert codec.decode(payload, params).shape == x.shape


# -- around any codec ------------------------------------------------------------------------------------------------


@around
def test_json_and_repr_bring_the_same_codec_back(inner):
    scheme = packedkv.KVScheme(key=Med(inner, 4, 1), value=Med(inner, 2.5))
    assert packedkv.from_json(scheme.to_json()) == scheme
    assert eval(repr(scheme.key)) == scheme.key
    assert scheme.key != scheme.value


def test_the_inner_codec_is_fitted_calibrated_and_settled_on_the_rest():
    seen = {}

    class Listening(GroupInt):
        needs = frozenset({"tensor", "queries"})

        def fit(self, site, sample=NO_SAMPLE):
            if sample.queries is None:
                seen["fit"] = sample.tensor
                return {"mark": torch.zeros(1)}
            seen["calibrate"], seen["queries"] = sample.tensor, sample.queries
            return {"mark": torch.ones(1)}

        def settle(self, fitted):
            seen["settle"] = [list(params) for params in fitted]
            return [{"mark": params["mark"] + 1} for params in fitted]

    codec, x, q = Med(Listening(4, 0)), lumpy(1, 1, 64, 64), normal_fp16(1, 2, 64, 64)
    site = Site(0, "key", 1, 64)
    plain = codec.fit(site, Sample(x))
    rest = x.masked_fill(flags_of(codec, codec.encode(x, plain), 64).repeat_interleave(4, -1), 0)
    assert relative_mse(x, rest) > 0.5
    assert torch.equal(seen["fit"], rest)
    params = codec.fit(site, Sample(x, q))
    assert "queries" in codec.needs
    assert torch.equal(seen["calibrate"], rest)
    assert seen["queries"] is q
    assert torch.equal(params["threshold"], plain["threshold"])
    settled = codec.settle([params, params])
    assert seen["settle"] == [["mark"], ["mark"]]
    assert all(float(p["inner.mark"]) == 2 and torch.equal(p["threshold"], plain["threshold"]) for p in settled)


def test_what_the_inner_codec_holds_depends_on_the_dtype():
    codec = Med(Dense()).for_dtype(torch.bfloat16)
    assert codec == Med(Dense("bfloat16"))
    assert codec.held_dtype(torch.bfloat16) == torch.bfloat16
    k = lumpy(1, 1, 8, 64).bfloat16()
    assert torch.equal(
        packedkv.compress(packedkv.KVScheme(key=Med(Dense()), value=Dense()), k, k).decode()[0], k.float()
    )


def test_which_kernels_know_these_bytes():
    kernels_for = packedkv.description.kernels_for
    assert kernels_for(packedkv.get("hqmq-s24_r3:outliers=3")) == {"encode": "cuda", "decode": "cuda"}
    for inner in (SawInt4(), GroupInt(4, 32), InnerQ(3)):
        scheme = packedkv.KVScheme(key=Med(inner), value=Med(inner))
        assert kernels_for(scheme) == {"encode": "none", "decode": "none"}


def test_refusals():
    site = Site(0, "key", 1, 64)
    for sample in (None, torch.empty(1, 1, 0, 64)):
        with pytest.raises(FitError, match=r"needs a sample .* outliers=off"):
            Med(Hqmq(24, 3)).fit(site, Sample(sample))
    for options in ({"c": 0}, {"c": float("nan")}, {"c": "3"}, {"slots": 0}, {"slots": 1.5}, {"inner": "hqmq"}):
        with pytest.raises(SpecError, match=r"Med: .* (not allowed; use|is not a codec; pass)"):
            Med(**({"inner": Hqmq(24, 3)} | options))
    with pytest.raises(ShapeError, match="head_dim=20 is not a multiple of 8"):
        Med(GroupInt(3)).layout(20)
    with pytest.raises(SpecError, match=r"Med has a field .* use a codec without outliers"):
        Med(Med(Hqmq(24, 3))).layout(64)
    with pytest.raises(SpecError, match="outliers='2' is not allowed"):
        packedkv.get("hqmq-s24_r3:outliers=2")
