"""HQMQ: which figures must hold; covering radii against places where they are known."""

import math

import pytest
import torch

from kvcodec.ops.quaternion import UNITS, products, random_units
from kvcodec_lab.reproduce import available, hqmq, reproduce_rows
from kvcodec_lab.reproduce.same_family import FAMILY


@pytest.fixture(scope="module")
def rows():
    return list(reproduce_rows(["hqmq"], quick=True))


@pytest.fixture(scope="module")
def claims(rows):
    """What is recomputed; rows of another model need not hold, and are tested in test_reproduce_family.py."""
    return [r for r in rows if r["ours"] is not None and FAMILY not in r["table"]]


def test_everything_holds(claims):
    assert [(r["table"], r["item"], r["metric"], r["ours"]) for r in claims if not r["holds"]] == []


def test_every_table_gives_rows(rows):
    assert {r["table"] for r in rows if r["ours"] is not None} == set(available()["hqmq"])
    assert len({(r["table"], r["item"], r["metric"]) for r in rows}) == len(rows)


def test_bands_are_narrow_and_bits_all_but_exact(claims):
    assert max(r["band"] for r in claims) < 0.08
    assert max(r["band"] for r in claims if r["metric"] == "bits" and r["printed"] > 1) < 0.012


def test_bits_that_leave_scales_out_are_corrected(claims):
    corrected = {r["item"]: r["spec"] for r in claims if r["spec"] is not None}
    assert corrected == {
        "naive int2": 2.25,
        "naive int3": 3.25,
        "naive int4": 4.25,
        "KIVI-2": 3.0,
        "KIVI-4": 5.0,
        "Mistral-7B, what Med adds (Sec. 4.1)": 0.53,
    }


def test_all_twelve_configurations_at_three_counts(claims):
    for table, count in {"Tables 2, 8, 9, bits": 12 + 3, "not printed: bytes": 24, "Tables 12, 21": 12}.items():
        assert len([r for r in claims if r["table"] == table]) == count


@pytest.mark.parametrize(
    ("points", "degrees"),
    [
        (torch.cat([torch.eye(4), -torch.eye(4)]), 60.0),  # 16-cell: middle of a facet, (1,1,1,1)/2
        (UNITS, 45.0),
        (products(torch.tensor([[0.5, 0.5, 0.5, 0.5]])), 45.0),
    ],
    ids=["16-cell", "24-cell", "24-cell turned into itself"],
)
def test_covering_radius_of_polytopes(points, degrees):
    assert hqmq.covering_radius(points, 512, 0) == pytest.approx(degrees, abs=1e-4)


def test_covering_radius_is_reached_from_other_starts_and_never_above():
    points = random_units(200, torch.Generator().manual_seed(3))
    few, many = hqmq.covering_radius(points, 4096, 0), hqmq.covering_radius(points, 16384, 5)
    assert few == pytest.approx(many, abs=1e-6)
    u = torch.randn(20000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    u = u / u.norm(dim=1, keepdim=True)
    sampled = math.degrees(math.acos(float((u @ points.T).amax(1).min())))
    assert sampled < many < sampled + 5


def test_zero_share_is_what_samples_give():
    r = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(0)).norm(dim=1)
    assert float(r.median()) == pytest.approx(hqmq.MEDIAN_CHI4, rel=2e-3)
    step = 100 * hqmq.MEDIAN_CHI4 / 63
    assert float((r < step / 2).float().mean()) == pytest.approx(hqmq._zero_share(63), abs=3e-3)


def test_error_of_r_2_follows_the_codec_at_other_widths():
    x = torch.randn(1, 1, 64, 128, generator=torch.Generator().manual_seed(0))
    errors = [hqmq._error(x, 24, r, 0) for r in (2, 3, 4)]
    assert errors == sorted(errors, reverse=True)
