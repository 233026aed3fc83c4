"""What ``benchmarks/serve_features.py`` says of two engines' answers."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("serve_features", ROOT / "benchmarks/serve_features.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def answer(tokens, steps, prompt=(-1.0, -2.0)):
    return {"tokens": tokens, "steps": steps, "prompt": list(prompt)}


def test_answers_are_apart_up_to_where_tokens_part(program):
    one = answer([7, 8, 9], [[[7, -0.5], [8, -1.0]], [[8, -0.25], [9, -0.5]], [[9, -0.1], [7, -3.0]]])
    two = answer([7, 9, 1], [[[7, -0.75], [8, -1.0]], [[9, -0.3], [8, -0.4]], [[1, -9.0], [2, -9.5]]], (-1.5, -2.0))
    found = program.apart([two], [one])
    assert found == pytest.approx(
        {"prompt": 0.25, "steps": 0.25, "behind": 0.25}
    )  # what comes after they part: not read
    assert program.same([two], [one]) == pytest.approx(1 / 3)
    unlisted = answer([7, 5, 1], [[[7, -0.5], [8, -1.0]], [[5, -0.3], [4, -0.9]], [[1, -9.0], [2, -9.5]]])
    assert program.apart([unlisted], [one])["behind"] == pytest.approx(0.6)  # as far as the last that is listed


@pytest.mark.parametrize(("prompt", "steps", "fine"), [(2.0, 2.0, True), (2.1, 0.0, False), (0.0, 2.1, False)])
def test_a_feature_may_do_twice_what_an_order_of_sums_does(prompt, steps, fine, program):
    assert program.judged({"prompt": prompt, "steps": steps}, {"prompt": 1.0, "steps": 1.0}) is fine


def test_a_feature_may_do_half_more_than_it_does_with_the_engines_own_cache(program):
    one, order, two = (answer([7], [[[7, -0.5]]], (-1.0, x)) for x in (-2.0, -2.1, -2.3))
    runs = {"one": one, "order": order, "tp2": two}
    read = {f"two-none-{name}": {"turns": {"together": [x]}} for name, x in runs.items()}
    assert program.plain_of(read, "two", "tp2") == pytest.approx(3.0)
    assert program.plain_of(read, "two", "pp2") == 0
    assert program.judged({"prompt": 4.4, "steps": 4.4}, {"prompt": 1.0, "steps": 1.0}, 3.0)  # 1.5 times as many
    assert not program.judged({"prompt": 4.6, "steps": 0.0}, {"prompt": 1.0, "steps": 1.0}, 3.0)


@pytest.mark.parametrize("wrong", [{}, {"requests": 2}, {"bytes_equal": 0.9999}, {"error": 0.01}, None])
def test_every_process_must_hold_the_librarys_bytes(wrong, program):
    fine = {"layers": 8, "requests": 3, "bytes": 1e6, "bytes_equal": 1.0, "error": 1e-4}
    pages = [] if wrong is None else [fine, fine | wrong]
    assert program.own_pages(pages) is (wrong == {})
