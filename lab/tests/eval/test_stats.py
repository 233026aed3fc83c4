"""Intervals: what they cover, what pairing gains, and the rows made of a folder's lines."""

import math

import numpy as np
import pytest

from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv_lab.eval.stats import AGREEMENT, against, estimate, paired, summarize, wilson
from packedkv_lab.eval.store import Run
from packedkv_lab.eval.tasks.base import Metric

MEAN = Metric("higher", "")
PERPLEXITY = Metric("lower", "", of="nll", exp=True)


def scores(values) -> dict[str, tuple[float, float]]:
    return {f"{i:04}": (float(v), 1.0) for i, v in enumerate(values)}


@pytest.mark.parametrize(
    ("right", "items", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (2, 2, 0.3424, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilsons_interval_as_printed_elsewhere(right, items, low, high):
    """The last row is Table I of Newcombe 1998 (Stat. Med. 17, 857)."""
    assert wilson(right, items) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    found = estimate(scores([1.0] * right + [0.0] * (items - right)), MEAN)
    assert found == (right / items, *wilson(right, items))


def test_only_items_that_are_right_or_wrong_make_a_share():
    one = scores([1.0] * 9 + [0.5])
    assert estimate(one, MEAN)[1] > wilson(9, 10)[0]
    assert estimate({"a": (1.0, 1.0), "b": (1.0, 2.0)}, MEAN)[1:] == (0.5, 1.0)
    assert estimate({"a": (1.0, 1.0), "b": (1.0, 1.0)}, PERPLEXITY)[1:] == (math.e, math.e)


def test_ninety_five_of_a_hundred_intervals_hold_the_truth():
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        _, low, high = estimate(scores(rng.normal(5.0, 2.0, 60)), MEAN)
        held += low <= 5.0 <= high
    assert 178 <= held <= 199


def test_counts_weigh_items():
    value, low, high = estimate({"a": (2.0, 1.0), "b": (30.0, 9.0)}, MEAN)
    assert value == 3.2
    assert (low, high) == (2.0, 30 / 9)


def test_perplexity_is_exp_of_the_mean_loss():
    value, low, high = estimate({"a": (4.0, 2.0), "b": (9.0, 3.0)}, PERPLEXITY)
    assert value == pytest.approx(math.exp(13 / 5))
    assert low == pytest.approx(math.exp(2))
    assert high == pytest.approx(math.exp(3))
    assert PERPLEXITY.value(1e6, 1.0) == math.inf
    assert math.isnan(MEAN.value(0.0, 0.0))


def test_the_same_items_in_any_order_and_the_same_seed_give_the_same_interval():
    one = scores(np.random.default_rng(3).random(50))
    other = dict(reversed(one.items()))
    assert estimate(one, MEAN, 7) == estimate(other, MEAN, 7)
    assert estimate(one, MEAN, 7) != estimate(one, MEAN, 8)


def test_pairing_takes_out_what_items_share():
    rng = np.random.default_rng(4)
    hard = rng.normal(0, 5, 100)
    base, mine = scores(hard), scores(hard + 0.5 + rng.normal(0, 0.1, 100))
    value, low, high = paired(mine, base, MEAN)
    assert value == pytest.approx(0.5, abs=0.05)
    assert high - low < 0.06
    alone = estimate(mine, MEAN)
    assert alone[2] - alone[1] > 1.5


def test_a_difference_is_over_the_items_of_both():
    mine = {"a": (1.0, 1.0), "b": (5.0, 1.0)}
    base = {"b": (3.0, 1.0), "c": (100.0, 1.0)}
    assert paired(mine, base, MEAN) == (2.0, None, None)
    assert paired(mine, {}, MEAN) is None


def run(tmp_path, lines, tasks=None, specs=("int-4",)) -> Run:
    about = {
        "model": {"name": "tiny"},
        "versions": {"packedkv": "1"},
        "seed": 0,
        "settings": {"prefill": "decoded"},
        "specs": list(specs),
        "bits": {"int-4": {"key_bits": 4.25, "value_bits": 4.5}},
        "tasks": tasks
        or {"needle": {"items": 4, "metrics": {"recall": {"better": "higher", "text": "", "of": "", "exp": False}}}},
    }
    return Run(tmp_path, about, lines)


def needle(spec, item, depth, value, output, **more) -> dict:
    line = {"spec": spec, "task": "needle", "item": item, "group": {"length": 512, "depth": depth}, "output": output}
    return {**line, "scores": {"recall": [value, 1.0]}, "seconds": 0.5, "bytes": 10, "elements": 16, **more}


LINES = [
    needle(UNCOMPRESSED, "a", 0.0, 1.0, "x", bytes=32),
    needle(UNCOMPRESSED, "b", 0.0, 1.0, "y", bytes=32),
    needle(UNCOMPRESSED, "c", 0.5, 0.0, "z", bytes=32),
    needle("int-4", "a", 0.0, 0.0, "q"),
    needle("int-4", "b", 0.0, 1.0, "y"),
    needle("int-4", "c", 0.5, 0.0, "z"),
]


def test_rows_for_the_whole_and_for_each_cell(tmp_path):
    rows = summarize(run(tmp_path, LINES))
    found = {(r["spec"], r["metric"], str(r["group"])): r for r in rows}
    whole = found["int-4", "recall", "None"]
    assert whole["value"] == pytest.approx(1 / 3)
    assert whole["difference"] == pytest.approx(-1 / 3)
    assert (whole["items"], whole["count"], whole["planned"], whole["failed"]) == (3, 3.0, 4, 0)
    assert (whole["effective_bits"], whole["ratio_to_16bit"], whole["cache_bytes"]) == (5.0, 3.2, 10.0)
    assert (whole["key_bits"], whole["value_bits"]) == (4.25, 4.5)
    assert (whole["prefill"], whole["model"], whole["seed"], whole["status"]) == ("decoded", "tiny", 0, "complete")
    assert whole["seconds"] == 1.5
    top = found["int-4", "recall", str({"length": 512, "depth": 0.0})]
    assert (top["value"], top["items"], top["difference"]) == (0.5, 2, -0.5)
    assert found["int-4", "recall", str({"length": 512, "depth": 0.5})]["difference"] == 0.0
    base = found[UNCOMPRESSED, "recall", "None"]
    assert (base["difference"], base["effective_bits"], base["key_bits"]) == (None, 16.0, None)
    assert found["int-4", AGREEMENT, "None"]["value"] == pytest.approx(2 / 3)
    assert (UNCOMPRESSED, AGREEMENT, "None") not in found


def test_a_spec_is_compared_with_others_on_the_items_of_both_over_several_texts(tmp_path):
    loss = {"better": "lower", "text": "", "of": "nll", "exp": True}
    tasks = {"perplexity": {"items": 2, "metrics": {"perplexity": loss}}}
    specs = ("int-4", "saw-int4", "fp8")

    def window(spec, item, nll, **more) -> dict:
        return {"spec": spec, "task": "perplexity", "item": item, "scores": {"nll": [nll, 4.0]}, **more}

    one = [window("int-4", "a", 4.0), window("int-4", "b", 8.0), window("saw-int4", "a", 2.0)]
    two = [window("int-4", "a", 12.0), window("saw-int4", "a", 11.0), window("saw-int4", "b", 0.0, error="NaN")]
    (row,) = against([run(tmp_path, lines, tasks, specs) for lines in (one, two)], "int-4")
    assert (row["spec"], row["other"], row["items"], row["better"]) == ("int-4", "saw-int4", 2, "lower")
    assert row["value"] == pytest.approx(math.exp(16 / 8))
    assert row["other_value"] == pytest.approx(math.exp(13 / 8))
    assert row["difference"] == pytest.approx(math.exp(16 / 8) - math.exp(13 / 8))
    assert row["low"] == pytest.approx(math.exp(4 / 4) - math.exp(2 / 4))
    assert row["high"] == pytest.approx(math.exp(12 / 4) - math.exp(11 / 4))
    assert against([run(tmp_path, one, tasks, specs)], "fp8") == []


def test_parts_of_a_window_become_groups(tmp_path):
    metric = {"better": "lower", "text": "", "of": "", "exp": False}
    lines = [
        {"spec": s, "task": "kl", "item": i, "group": {}, "seconds": 1.0, "bytes": 8, "elements": 8}
        | {"scores": {"kl": [v, 4.0], "kl@0-1": [v / 4, 1.0], "kl@2-4": [v / 2, 3.0]}}
        for s, i, v in ((UNCOMPRESSED, "a", 0.0), ("int-4", "a", 2.0), ("int-4", "b", 4.0))
    ]
    rows = [
        r
        for r in summarize(run(tmp_path, lines, {"kl": {"items": 2, "metrics": {"kl": metric}}}))
        if r["spec"] == "int-4"
    ]
    assert [(r["group"], r["value"], r["items"]) for r in rows] == [
        (None, 6 / 8, 2),
        ({"positions": "0-1"}, 1.5 / 2, 2),
        ({"positions": "2-4"}, 3 / 6, 2),
    ]
    assert rows[0]["difference"] == 0.5, "over the item that both have"


def test_items_without_a_result_are_counted_and_not_scored(tmp_path):
    lines = [*LINES, needle("int-4", "d", 0.5, 0.0, "", scores={}, error="NaN", bytes=0, elements=0)]
    whole = next(r for r in summarize(run(tmp_path, lines)) if r["spec"] == "int-4")
    assert (whole["items"], whole["failed"], whole["effective_bits"]) == (3, 1, 5.0)
