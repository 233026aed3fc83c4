"""Facts of HQMQ's additive baseline: bits of Table 16, three readings, and the search over all sums."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codec import Site, roundtrip
from packedkv.codecs.additive import Additive
from packedkv.codecs.hqmq import Hqmq
from packedkv.ops.bitpack import unpack
from packedkv.ops.quaternion import nearest_entry
from tests.codecs.draws import fitted, normal_fp16


@lru_cache
def direction_error(k, reading):
    """E|u - e|^2 of uniform directions, mean of six codebooks."""
    codec = Additive(k, 4, reading)
    params = fitted(codec, heads=6)
    u = torch.nn.functional.normalize(torch.randn(400, 4, generator=torch.Generator().manual_seed(3)).double(), dim=1)
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
def test_direction_error_of_a_reading(k, reading, expected):
    assert direction_error(k, reading) == pytest.approx(expected, rel=0.15)


def test_products_beat_sums_at_equal_rate():
    """K = 48 has as many sums as S = 96 has products."""
    x = normal_fp16(1, 4, 128, 128)
    found = [float((x - roundtrip(c, x, fitted(c, heads=4))).square().sum()) for c in (Hqmq(96, 4), Additive(48, 4))]
    assert 1.02 < found[1] / found[0] < 1.3


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    k=st.sampled_from([24, 48]),
    reading=st.sampled_from(["normalised", "raw", "greedy"]),
    r=st.sampled_from([3, 4, 6]),
    seed=st.integers(0, 999),
    power=st.integers(-12, 12),
    kind=st.sampled_from(["normal", "outlier", "on codewords", "small integers", "one axis"]),
    crowd=st.sampled_from([1, 1, 300]),
)
def test_codes_radii_and_scale_by_definition(k, reading, r, seed, power, kind, crowd):
    """Every pair tried, with the codebooks as held; only codes within 1e-6 of the best may differ."""
    codec = Additive(k, r, reading)
    params = codec.fit(Site(0, "key", 1, 32, seed))
    first, second = (params[name][0, 0].double() for name in ("first", "second"))
    sums = torch.stack([a + b for a in first for b in second])
    table = params["codebook"][0, 0].double()
    exact = torch.nn.functional.normalize(sums, dim=1) if reading == "normalised" else sums
    assert float((table - exact).abs().max()) < (2**-10 if reading == "normalised" else 1e-12)

    x = normal_fp16(1, 1, 6, 32, seed=seed)
    if kind == "outlier":
        x[..., 4:8] *= 90
    elif kind == "on codewords":
        x = table[torch.arange(48) * 11 % len(table)].reshape(1, 1, 6, 32).float()
    elif kind == "small integers":
        x = (x * 2).round()
    elif kind == "one axis":
        x = x * (torch.arange(32) % 4 == 1)
    x = (x * 2.0**power).clamp(-65504, 65504).half().float()
    # in a crowd the search may go other ways, to the same codes
    payload = {name: field[:, :, -6:] for name, field in codec.encode(x.repeat(1, 1, crowd, 1), params).items()}
    chunks = x.reshape(48, 4).double()
    length = chunks.square().sum(1).sqrt()
    u, live = chunks / length.clamp_min(1e-30)[:, None], length > 0
    codes = unpack(payload["codes"], codec.code_bits, 8).flatten().long()
    if reading == "normalised":
        loss = -(u @ table.T)
    elif reading == "raw":
        loss = (u[:, None] - table).square().sum(-1)
    else:  # the second codeword has the choice that the first one left
        i = codes // k
        loss = (u[:, None] - first).square().sum(-1)
        _nearest_or_tied(loss[live], i[live])
        loss, codes = (u[:, None] - first[i][:, None] - second).square().sum(-1), codes % k
    _nearest_or_tied(loss[live], codes[live])
    assert not codes[~live].any()

    length = length.reshape(6, 8)
    held = payload["scale"][0, 0]
    assert torch.equal(held, (length.amax(-1, keepdim=True) / 2).half())
    exact = torch.where(held > 0, length * (2**r - 1) / (2 * held.double()), 0.0)
    radius = unpack(payload["radius"], r, 8)[0, 0]
    between = ((exact % 1) - 0.5).abs() < 1e-6
    assert torch.equal(radius[~between].double(), exact.round().clamp(0, 2**r - 1)[~between])


def _nearest_or_tied(loss, chosen):
    """``chosen`` is the smallest loss of each row; where two are within 1e-6, it is one of them."""
    best = loss.min(1)
    assert bool((loss.gather(1, chosen[:, None])[:, 0] <= best.values + 1e-6).all())
    tied = (loss < best.values[:, None] + 1e-6).sum(1) > 1
    assert torch.equal(chosen[~tied], best.indices[~tied])


def test_ties_take_the_lowest_entry():
    table = torch.tensor([[0.5, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    assert nearest_entry(x, table, by="angle").tolist() == [1, 0, 1]
    assert nearest_entry(x, table, by="distance").tolist() == [1, 0, 1]
