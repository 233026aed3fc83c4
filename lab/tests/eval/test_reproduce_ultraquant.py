"""UltraQuant and Ultra-TQ in ``kvcodec reproduce``: every claim holds, quadrature and codec agree."""

import math

import pytest
import torch

from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec_lab.reproduce import not_recomputed, reproduce_rows, ultraquant
from kvcodec_lab.reproduce.measure import codec_error, gauss, unit_vectors


@pytest.fixture(scope="module")
def rows():
    return [r for r in reproduce_rows(["ultraquant"], quick=True) if r["ours"] is not None]


def test_every_claim_holds(rows):
    assert [(r["item"], r["metric"]) for r in rows if not r["holds"]] == []
    assert max(r["band"] for r in rows) < 0.06


@pytest.mark.parametrize("group", [16, 32, 64, 256])
def test_law_of_a_group_has_variance_one(group):
    law = ultraquant.group_law(group)
    assert law.top + float(law.weights @ law.t**2) == pytest.approx(1, abs=1e-5)


def test_largest_of_two():
    """E max(|x|, |y|)^2 = 1 + 2/pi, half of it an element."""
    assert ultraquant.group_law(2).top == pytest.approx((1 + 2 / math.pi) / 2, rel=1e-6)


@pytest.mark.parametrize("c", [0.12, 0.156, 0.25, 1.0])
def test_quadrature_is_the_codec(c):
    x = gauss(True)
    assert ultraquant.real_error(c) == pytest.approx(codec_error(x, UltraQuant(c=c, scale="real")), rel=0.01)
    measured, _ = ultraquant._octave_measured(c, 4096)
    assert ultraquant.octave_error(c) == pytest.approx(measured, rel=0.02)


def test_error_with_powers_of_two_repeats_every_octave_and_only_then():
    errors = [codec_error(gauss(True) * size, UltraQuant(c=0.156)) for size in (1.0, 2.0, 2.0**-7, 2**0.5)]
    assert errors[:3] == [pytest.approx(errors[0], rel=1e-6)] * 3
    assert errors[3] != pytest.approx(errors[0], rel=0.05)


def test_minimum_of_a_parabola():
    place, value = ultraquant._minimum(lambda c: (c - 0.3) ** 2 + 1, 0.0, 1.0)
    assert place == pytest.approx(0.3, abs=1e-4)
    assert value == pytest.approx(1)


def test_saturation_follows_from_c(rows):
    """The maximum saturates where 2^f > 6 c, f uniform in [-1/2, 1/2]."""
    for c in (0.156, 0.195):
        expected = 100 * (0.5 - math.log2(6 * c))
        found = next(r["ours"] for r in rows if r["item"] == f"c={c}" and r["metric"] == "percent_saturated")
        assert found == pytest.approx(expected, abs=0.8)


@pytest.mark.parametrize(("percent", "questions", "right"), [("67.4", 46, 31), ("63.0", 46, 29), ("67.4", 45, None)])
def test_a_percentage_is_turned_into_right_answers(percent, questions, right):
    assert ultraquant._share(percent, questions) == right


def test_the_text_and_its_law_disagree(rows):
    levels = {r["item"]: r["ours"] for r in rows if r["metric"] == "level"}
    assert f"{levels['gaussian table, d=64, level 8']:.3f}" == "0.342"
    assert f"{levels['sphere table, d=64, level 8']:.3f}" == "0.331"


def test_sweep_has_its_minima_where_the_paper_and_the_format_say(rows):
    curves = {
        name: {r["x"]: r["ours"] for r in rows if r["curve"] == name} for name in ("real scales", "powers of two")
    }
    assert [len(points) for points in curves.values()] == [17, 17]
    assert min(curves["real scales"], key=curves["real scales"].get) == pytest.approx(1 / 6)
    assert min(curves["powers of two"], key=curves["powers of two"].get) == 0.195


def test_unit_vectors_have_length_one_and_differ_by_seed():
    x = unit_vectors(5, 64, 1)
    assert x.shape == (1, 1, 5, 64)
    assert torch.allclose(x.norm(dim=-1), torch.ones(1, 1, 5))
    assert not torch.equal(x, unit_vectors(5, 64, 2))


def test_what_is_left_out_says_why():
    reasons = not_recomputed("ultraquant")
    assert len(reasons) >= 3
    assert all("need" in why or "captured" in why or "figures" in why for why in reasons.values())
