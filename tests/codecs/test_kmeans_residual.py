"""Facts of the k-means residual of SAW-INT4, App. A.2: assignment, error by C, bytes, and how centroids come to be."""

import builtins

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codec import Sample, Site, roundtrip
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.kmeans_residual import KMeansResidual, fit_centroids, nearest_centroid
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import FitError

from .support import normal, relative_mse

SITE = Site(0, "key", 2, 64)


def clustered(batch: int, heads: int, tokens: int, dim: int, *, seed: int = 0) -> torch.Tensor:
    """Keys around 40 far-apart points of each head, exact in fp16."""
    generator = torch.Generator().manual_seed(seed)
    centres = 5 * torch.randn(heads, 40, dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(40, (batch, heads, tokens), generator=generator)
    points = centres.expand(batch, -1, -1, -1).gather(2, which[..., None].expand(-1, -1, -1, dim))
    return (points + 0.5 * torch.randn(batch, heads, tokens, dim, generator=generator)).half().float()


def distances(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """``|x - c|^2`` by its definition: float64 ``[B, H, N, C]``."""
    return (x.double().unsqueeze(3) - centroids.double().unsqueeze(2)).square().sum(-1)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**16),
    dim=st.sampled_from((64, 80, 96, 128, 192, 256)),
    count=st.integers(2, 40),
    exponent=st.integers(-12, 9),
    offset=st.sampled_from((0.0, 30.0, 400.0)),
)
def test_assignments_are_those_of_brute_force(seed, dim, count, exponent, offset):
    x = normal(2, 2, 20, dim, seed=seed) * 2.0**exponent
    centroids = normal(1, 2, count, dim, seed=seed + 1) * 2.0**exponent
    x[..., 3] += offset  # a loud channel, as in Qwen's keys
    centroids[..., 3] += offset
    centroids = centroids.half()
    every = distances(x, centroids)
    found = nearest_centroid(x, centroids)
    assert found.dtype == torch.int64
    chosen = every.gather(-1, found[..., None])
    assert bool((chosen <= every.amin(-1, keepdim=True) * (1 + 1e-6)).all())


def test_a_tie_goes_to_the_lowest_id():
    centroids = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]).half()[None, None]
    x = torch.tensor([[0.0, 5.0], [1.0, 0.0], [-2.0, 0.0], [2.0, 0.0]])[None, None]
    assert nearest_centroid(x, centroids).flatten().tolist() == [1, 2, 1, 0]


def test_assignment_is_cut_into_pieces_that_do_not_show(monkeypatch):
    x, centroids = normal(2, 2, 33, 64), normal(1, 2, 17, 64, seed=1).half()
    whole = nearest_centroid(x, centroids)
    monkeypatch.setattr("packedkv.codecs.kmeans_residual.SCORES", 1)
    assert torch.equal(nearest_centroid(x, centroids), whole)


def test_one_cluster_is_the_mean_subtracted():
    k = normal(1, 2, 500, 64) + 8 * normal(1, 2, 1, 64, seed=1)
    codec = KMeansResidual(SawInt4(1), 1)
    params = codec.fit(SITE, Sample(k))
    mean = k.double().mean(2, keepdim=True).half()
    assert torch.equal(params["centroids"], mean)
    payload = codec.encode(k, params)
    expected = SawInt4(1).encode(k - mean.float(), {})
    assert {n: t.tolist() for n, t in payload.items()} == {n: t.tolist() for n, t in expected.items()}
    assert torch.equal(codec.decode(payload, params), SawInt4(1).decode(payload, {}) + mean.float())


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
def test_mean_removal_undoes_constant_outlier_channels(channels):
    k = normal(1, 2, 4000, 128)
    k[..., torch.randperm(128, generator=torch.Generator().manual_seed(0))[:channels]] += 30.0
    codec = KMeansResidual(SawInt4(1), 1)
    error = roundtrip(codec, k, codec.fit(Site(0, "key", 2, 128), Sample(k))) - k
    assert float(error.square().mean()) == pytest.approx(0.0100, rel=0.03)
    assert float((roundtrip(SawInt4(1), k, {}) - k).square().mean()) > 0.3


def test_error_falls_with_more_clusters_on_clustered_keys():
    sample, k = clustered(1, 2, 800, 64), clustered(1, 2, 300, 64, seed=1)
    errors = [relative_mse(k, roundtrip(SawInt4(), k, {}))]
    for clusters in (1, 8, 64):
        codec = KMeansResidual(SawInt4(), clusters)
        errors.append(relative_mse(k, roundtrip(codec, k, codec.fit(SITE, Sample(sample)))))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


def test_slots_that_were_never_written_decode_to_something():
    codec = KMeansResidual(SawInt4(), 5)
    params = codec.fit(SITE, Sample(normal(1, 2, 20, 64)))
    fields = {f.name: torch.full((1, 2, 3, *f.shape), 255, dtype=torch.uint8) for f in codec.layout(64).fields}
    fields["scale_zero"] = torch.zeros(1, 2, 3, 2, dtype=torch.float16)
    assert torch.equal(codec.decode(fields, params), params["centroids"][:, :, 4:].float().expand(1, 2, 3, 64))


def test_ids_of_a_block_are_those_of_its_tokens_one_by_one():
    codec = KMeansResidual(GroupInt(2, group=32, along="tokens"), 300)
    params, x = codec.fit(SITE, Sample(clustered(1, 2, 400, 64))), clustered(2, 2, 96, 64, seed=2)
    payload = codec.encode(x, params)
    assert payload["ids"].shape == (2, 2, 3, 64)
    ids = payload["ids"].unflatten(-1, (32, 2)).flatten(2, 3).long()
    assert torch.equal(ids[..., 0] + 256 * ids[..., 1], nearest_centroid(x, params["centroids"]))
    last = codec.encode(x[:, :, 64:], params)
    assert all(torch.equal(last[name], field[:, :, 2:]) for name, field in payload.items())
    assert torch.equal(codec.decode(last, params), codec.decode(payload, params)[:, :, 64:])


def test_a_prefill_fits_each_sequence_and_a_text_fits_all_together():
    codec = KMeansResidual(SawInt4(), 6)
    k = clustered(2, 2, 100, 64)
    own = codec.fit(SITE, Sample(k))["centroids"]
    assert (own.shape, own.dtype) == ((2, 2, 6, 64), torch.float16)
    assert torch.equal(codec.fit(SITE, Sample(k[1:]))["centroids"], own[1:])
    assert codec.fit(SITE, Sample(k, normal(1, 4, 9, 64)))["centroids"].shape == (1, 2, 6, 64)
    # each window alone has fewer tokens than clusters
    assert KMeansResidual(SawInt4(), 16).fit(SITE, Sample(k[:, :, :8], normal(1, 4, 9, 64)))["centroids"].shape[2] == 16


def test_a_fit_repeats_and_its_seed_is_the_sites():
    codec, k = KMeansResidual(SawInt4(), 12), normal(1, 2, 200, 64)
    before = torch.get_rng_state()
    first = codec.fit(SITE, Sample(k))["centroids"]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(codec.fit(SITE, Sample(k))["centroids"], first)
    assert not torch.equal(codec.fit(Site(0, "key", 2, 64, seed=1), Sample(k))["centroids"], first)


@pytest.mark.parametrize("distinct", [1, 3, 8])
def test_fewer_distinct_points_than_clusters_are_all_centroids(distinct):
    points = normal(distinct, 64).half().float()
    k = points[torch.arange(40) % distinct].expand(1, 2, -1, -1)
    codec = KMeansResidual(SawInt4(1), 8)
    params = codec.fit(SITE, Sample(k))
    assert params["centroids"].shape == (1, 2, 8, 64)
    assert torch.equal(roundtrip(codec, k, params), k)


def test_points_too_close_to_tell_apart_fit_without_a_warning():
    points = torch.full((50, 64), 6e4)  # two heaps whose squared lengths swamp the distances within
    points[25:] *= -1
    points[:, 0] += torch.arange(50.0) % 25 * 2.0**-8
    assert len(points.unique(dim=0)) == 50
    found = fit_centroids(points, 30, torch.Generator().manual_seed(0))
    assert found.shape == (30, 64)
    assert float((found.abs() - 6e4).abs().max()) < 1


def test_a_missing_library_is_named_and_the_mean_needs_none(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FitError, match=r"k-means of 4 clusters needs scikit-learn.*install packedkv\[fit\]"):
        KMeansResidual(SawInt4(), 4).fit(SITE, Sample(normal(1, 2, 15, 64)))
    assert KMeansResidual(SawInt4(), 1).fit(SITE, Sample(normal(1, 2, 15, 64)))
