"""The search: one option per layer, least predicted KL within a budget of bytes (a multiple-choice knapsack).

The KL of a mixture is predicted as the sum over layers and roles. Dynamic programming over bytes in ``STEPS`` steps,
rounded up, so that the budget is never exceeded; bytes left over are spent by single exchanges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packedkv.registry import LayerChoice

STEPS = 4096


@dataclass(frozen=True)
class Option:
    """One option of a layer: its bytes and the predicted KL."""

    choice: LayerChoice
    nbytes: int
    kl: float


def frontier(options: Sequence[Option]) -> list[Option]:
    """Pareto frontier of bytes and KL, ascending in bytes."""
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.kl)):
        if not front or option.kl < front[-1].kl:
            front.append(option)
    return front


def best_within(groups: Sequence[Sequence[Option]], budget: int) -> list[Option] | None:
    """Choose an option of every group, least sum of KL with at most ``budget`` bytes; None if nothing fits.

    >>> a = [Option(LayerChoice("int-2", "int-2"), 2, 0.5), Option(LayerChoice("int-8", "int-8"), 8, 0.0)]
    >>> b = [Option(LayerChoice("int-2", "int-2"), 2, 0.1), Option(LayerChoice("int-8", "int-8"), 8, 0.0)]
    >>> [o.nbytes for o in best_within([a, b], 10)]
    [8, 2]
    """
    groups = [frontier(group) for group in groups]
    least = sum(group[0].nbytes for group in groups)
    if least > budget:
        return None
    free = min(budget, sum(group[-1].nbytes for group in groups)) - least
    step = max(-(-free // STEPS), 1)
    room = free // step
    cost = torch.zeros(room + 1, dtype=torch.float64)
    taken: list[torch.Tensor] = []
    for group in groups:
        rows = torch.full((len(group), room + 1), torch.inf, dtype=torch.float64)
        for i, option in enumerate(group):
            size = -(-(option.nbytes - group[0].nbytes) // step)
            if size <= room:
                rows[i, size:] = cost[: room + 1 - size] + option.kl
        cost, index = rows.min(0)
        taken.append(index)
    at, picked = room, []
    for group, index in zip(reversed(groups), reversed(taken), strict=True):
        option = group[int(index[at])]
        picked.append(option)
        at -= -(-(option.nbytes - group[0].nbytes) // step)
    return _spend(groups, picked[::-1], budget)


def _spend(groups: Sequence[Sequence[Option]], picked: list[Option], budget: int) -> list[Option]:
    """Exchange single options while the exact bytes allow it: most KL saved first."""
    while True:
        left = budget - sum(option.nbytes for option in picked)
        gains = [
            (had.kl - option.kl, i, option)
            for i, (group, had) in enumerate(zip(groups, picked, strict=True))
            for option in group
            if option.kl < had.kl and option.nbytes - had.nbytes <= left
        ]
        if not gains:
            return picked
        _, i, option = max(gains, key=lambda gain: gain[:2])
        picked[i] = option


def least_for(groups: Sequence[Sequence[Option]], max_kl: float) -> list[Option]:
    """Choose an option of every group, fewest bytes with a sum of KL of at most ``max_kl``, by bisection.

    The last option of every group's frontier is taken where even those exceed it.
    """
    groups = [frontier(group) for group in groups]
    low, high = (sum(group[end].nbytes for group in groups) for end in (0, -1))
    best = [group[-1] for group in groups]
    first = best_within(groups, low)
    if first is not None and sum(option.kl for option in first) <= max_kl:
        return first
    while high - low > max(high // STEPS, 1):
        middle = (low + high) // 2
        tried = best_within(groups, middle)
        if tried is not None and sum(option.kl for option in tried) <= max_kl:
            best, high = tried, middle
        else:
            low = middle
    return best
