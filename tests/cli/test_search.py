"""The knapsack against every combination there is."""

import itertools
import random

import pytest

from packedkv.cli.advise.search import Option, best_within, frontier, least_for
from packedkv.recipe import LayerChoice


def option(nbytes, kl):
    return Option(LayerChoice("int-4", "int-4"), nbytes, kl)


def groups(seed, layers=4, options=4):
    r = random.Random(seed)
    return [[option(r.randint(10, 90), round(r.random(), 3)) for _ in range(options)] for _ in range(layers)]


def every(found):
    return [(sum(o.nbytes for o in c), sum(o.kl for o in c)) for c in itertools.product(*found)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 2.0])
def test_the_least_kl_within_the_budget_is_found(seed, share):
    found = groups(seed)
    sums = every(found)
    low, high = min(s[0] for s in sums), max(s[0] for s in sums)
    budget = int(low + share * (high - low))
    picked = best_within(found, budget)
    assert sum(o.nbytes for o in picked) <= budget
    assert sum(o.kl for o in picked) == pytest.approx(min(kl for size, kl in sums if size <= budget))
    assert all(o in group for o, group in zip(picked, found, strict=True))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_fewest_bytes_for_a_kl_are_found(seed, share):
    found = groups(seed)
    sums = every(found)
    low, high = min(s[1] for s in sums), max(s[1] for s in sums)
    target = low + share * (high - low)
    picked = least_for(found, target)
    assert sum(o.kl for o in picked) <= target
    assert sum(o.nbytes for o in picked) == min(size for size, kl in sums if kl <= target)


def test_nothing_fits_and_nothing_is_good_enough():
    found = [[option(10, 0.5), option(20, 0.1)]] * 2
    assert best_within(found, 19) is None
    assert [o.nbytes for o in least_for(found, 0.01)] == [20, 20], "the best there is"
    assert [o.nbytes for o in least_for(found, 5.0)] == [10, 10]


def test_sizes_beyond_the_steps_never_exceed_the_budget():
    found = [[option(s * 1_000_003 + i, 1 / s) for s in range(1, 9)] for i in range(40)]
    for budget in (41_000_000, 123_456_789, 250_000_001):
        picked = best_within(found, budget)
        assert sum(o.nbytes for o in picked) <= budget
        left = budget - sum(o.nbytes for o in picked)
        cheapest = min(
            o.nbytes - had.nbytes for group, had in zip(found, picked, strict=True) for o in group if o.kl < had.kl
        )
        assert left < cheapest, "what is left buys nothing more"


def test_the_frontier_leaves_out_what_costs_more_and_gives_nothing():
    kept = frontier([option(5, 0.4), option(3, 0.4), option(9, 0.1), option(7, 0.5), option(3, 0.6)])
    assert [(o.nbytes, o.kl) for o in kept] == [(3, 0.4), (9, 0.1)]
