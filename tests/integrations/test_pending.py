"""Slots of unfinished groups against a dict of what every request would have; no engine."""

import random
from typing import Any

import pytest
import torch

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.pending import FREE, PendingGroups

CPU = torch.device("cpu")
UNIT, PAGE, COLUMNS = 8, 16, 6


class Request:
    """Blocks, and how many tokens are computed."""

    def __init__(self, number: int, row: int, tokens: int, total: int) -> None:
        self.number, self.row, self.tokens, self.total = number, row, tokens, total
        self.blocks: list[int] = []


class Engine:
    """A scheduler as vLLM's: those that run come first, others are admitted only while there is budget left."""

    def __init__(self, seed: int, most: int, budget: int) -> None:
        self.random, self.most, self.budget = random.Random(seed), most, budget
        self.free = list(range(1, 200))
        self.rows = list(range(most))
        self.running: list[Request] = []
        self.count = 0

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.free += request.blocks
        self.rows.append(request.row)
        self.random.shuffle(self.free)  # blocks come back in any order, also at once

    def schedule(self) -> list[tuple[Request, int]]:
        """Requests of this step, and how many of their tokens."""
        for request in list(self.running):
            if request.tokens >= request.total or self.random.random() < 0.04:  # complete; cancelled or preempted
                self.end(request)
        left, batch = self.budget, []
        for request in self.running:
            if left:
                count = min(left, request.total - request.tokens, self.random.choice([1, 1, 1, 40]))
                batch.append((request, count))
                left -= count
        while left and len(self.running) < self.most and self.random.random() < 0.7:
            # whole blocks of its prompt may be in the prefix cache
            hit = PAGE * self.random.randrange(3)
            request = Request(self.count, self.rows.pop(), hit, hit + self.random.randrange(1, 45))
            request.blocks = [self.free.pop() for _ in range(hit // PAGE)]
            self.count += 1
            self.running.append(request)
            count = min(left, self.random.randrange(1, request.total - hit + 1))
            batch.append((request, count))
            left -= count
        for request, count in batch:
            request.tokens += count
            while len(request.blocks) * PAGE < request.tokens:
                request.blocks.append(self.free.pop())
        self.random.shuffle(batch)
        return batch


def tensors(batch: list[tuple[Request, int]], padding: int = 0) -> tuple[torch.Tensor, ...]:
    table = torch.full((len(batch) + padding, COLUMNS), 7777, dtype=torch.int32)  # what is behind is never read
    for i, (request, _) in enumerate(batch):
        table[i, : len(request.blocks)] = torch.tensor(request.blocks)
    table[len(batch) :] = 0
    lengths = torch.tensor([r.tokens for r, _ in batch] + [0] * padding, dtype=torch.int32)
    starts = torch.tensor([0, *(n for _, n in batch), *[0] * padding], dtype=torch.int32).cumsum(0).int()
    return table, lengths, starts, torch.full((int(starts[-1]),), 5)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("most", "budget"), [(1, 9), (4, 12), (4, 300), (9, 20)])
def test_every_request_finds_its_group_again(most: int, budget: int, named: bool) -> None:
    """Arrivals, ends, prefix hits, steps that leave requests out for want of budget, blocks that change hands."""
    engine, pending = Engine(most + budget, most, budget), PendingGroups(most, UNIT, PAGE, most + 3, CPU)
    held: dict[int, list[tuple[int, int]]] = {}  # slot -> (request, place in it) of each token
    skipped = reused = 0
    for _ in range(400):
        batch = engine.schedule()
        if not batch:
            continue
        skipped += len(engine.running) > len(batch)
        padding = engine.random.randrange(4)
        rows = [request.row for request, _ in batch] if named else None
        pending.put(*tensors(batch, padding), rows)
        used = set()
        for i, (request, count) in enumerate(batch):
            length, before = request.tokens, request.tokens - count
            slot, rest = int(pending.slot[i]), before % UNIT
            if rest or length % UNIT:
                assert slot < most
                assert slot not in used
                used.add(slot)
            if rest:
                assert held[slot][-rest:] == [(request.number, t) for t in range(before - rest, before)]
            if length % UNIT:
                begin = length // UNIT * UNIT
                reused += slot in held
                held[slot] = [(request.number, t) for t in range(begin, length)]
            base = (length - 1) // UNIT * UNIT
            assert (int(pending.packed[i]), int(pending.dense_len[i])) == (base, length - base)
            assert int(pending.place[i]) == (length - 1) % UNIT
            assert int(pending.page[i]) == request.blocks[-1]
            assert int(pending.first[i]) == (PAGE if length % UNIT else base % PAGE)
        for i in range(len(batch), len(batch) + padding):
            assert (int(pending.slot[i]), int(pending.dense_len[i]), int(pending.first[i])) == (most, 0, PAGE)
    assert engine.count > 40
    assert reused > 20
    assert skipped > 20 or most == 1 or budget > 40 * most


def one(blocks: list[int], length: int, new: int) -> tuple[torch.Tensor, ...]:
    request = Request(0, 0, length, length)
    request.blocks = blocks
    return tensors([(request, new)])


def test_a_group_that_is_not_there_is_an_error() -> None:
    pending = PendingGroups(2, UNIT, PAGE, 4, CPU)
    pending.put(*one([3], 5, 5))
    with pytest.raises(UnsupportedError, match=r"goes on in a group of 8 tokens whose beginning is not here.*; serve"):
        pending.put(*one([4], 6, 1))
    for rows in (None, [1]):
        again = PendingGroups(2, UNIT, PAGE, 4, CPU)
        again.put(*one([3], 5, 5), rows)
        with pytest.raises(UnsupportedError, match="beginning is not here"):  # tokens between them are missing
            again.put(*one([3], 7, 1), rows)


def test_batches_without_requests_leave_no_trace() -> None:
    """Captures of graphs, and the steps of an idle replica."""
    pending = PendingGroups(2, UNIT, PAGE, 4, CPU)
    pending.put(*one([3], 5, 5), [1])
    before = [x.clone() for x in (pending.block, pending.tokens)]
    pending.blank(4)
    lengths, starts = torch.full((3,), 5).int(), torch.arange(4).int() * 5
    for rows in (None, [0, 1, 2]):
        for block, where in ((0, 5), (3, -1)):  # the null block; blocks of the step before, and nothing to store
            pending.put(torch.full((3, COLUMNS), block).int(), lengths, starts, torch.full((15,), where), rows)
            assert pending.slot[:3].tolist() == [2, 2, 2]
            assert pending.first[:3].tolist() == [PAGE] * 3
    assert all(torch.equal(a, b) for a, b in zip(before, (pending.block, pending.tokens), strict=True))
    pending.put(*one([3], 6, 1), [1])
    assert int(pending.slot[0]) == 1


def test_slots_of_complete_groups_are_given_back() -> None:
    pending = PendingGroups(2, UNIT, PAGE, 4, CPU)
    pending.put(*one([3], 5, 5))
    slot = int(pending.slot[0])
    pending.put(*one([3], 8, 3))
    assert int(pending.slot[0]) == slot  # read once more in this step
    assert bool((pending.block == FREE).all())


def test_numbers_stay_where_graphs_read_them() -> None:
    pending = PendingGroups(2, UNIT, PAGE, 4, CPU)
    names = ("slot", "place", "packed", "dense_len", "page", "first")
    at = [getattr(pending, name).data_ptr() for name in names]
    given: Any = one([3], 5, 5)
    pending.put(*given)
    pending.blank(2)
    assert [getattr(pending, name).data_ptr() for name in names] == at


@pytest.mark.parametrize("named", [False, True])
def test_rejected_drafts_go_back_into_the_group_before(named: bool) -> None:
    """Requests of which each step computes up to 4 tokens and accepts some; others end and give their blocks back."""
    most, engine = 5, random.Random(3)
    pending = PendingGroups(most, UNIT, PAGE, 4 * most + 4, CPU, halves=2, longest=COLUMNS * PAGE - 2)
    held: dict[tuple[int, int], tuple[int, int]] = {}  # half of a slot, place -> (request, token)
    free, rows, count, back = list(range(1, 80)), list(range(most)), 0, 0
    running: list[Request] = []
    for _ in range(600):
        for request in [r for r in running if r.tokens >= r.total or engine.random() < 0.02]:
            running.remove(request)
            free += request.blocks
            rows.append(request.row)
            engine.shuffle(free)
        while len(running) < most and engine.random() < 0.5:
            count += 1
            running.append(Request(count, rows.pop(), 0, engine.randrange(20, pending.longest)))
        batch = [(r, engine.randrange(1, 5) if r.tokens else engine.randrange(5, 30)) for r in running]
        batch = sorted(batch, key=lambda one: one[1] > 4)  # as vLLM orders them: decode steps first
        befores = [request.tokens for request, _ in batch]
        for request, new in batch:
            request.tokens += new
            while len(request.blocks) * PAGE < min(request.tokens, COLUMNS * PAGE):
                request.blocks.append(free.pop())
        if not batch:
            continue
        decodes = sum(new for _, new in batch if new < 5)
        pending.put(*tensors(batch, 2), [r.row for r, _ in batch] if named else None, decodes)
        i = 0
        for (request, new), before, slot in zip(batch, befores, pending.slot.tolist(), strict=False):
            for t in range(before, request.tokens):
                base = t // UNIT * UNIT
                half = 2 * slot + base // UNIT % 2
                if new > 4:
                    held[half, t - base] = request.number, t
                    continue
                if t >= pending.longest:
                    assert (int(pending.at[i]), int(pending.first[i])) == (2 * most, PAGE)
                else:
                    assert int(pending.at[i]) == half < 2 * most
                    assert (int(pending.place[i]), int(pending.packed[i])) == (t - base, base)
                    assert int(pending.dense_len[i]) == t - base + 1
                    held[half, t - base] = request.number, t
                    for place in range(t - base + 1):  # what the query reads
                        assert held[half, place] == (request.number, base + place)
                    ends = (t + 1) % UNIT == 0
                    assert int(pending.first[i]) == (base % PAGE if ends else PAGE)
                    assert not ends or int(pending.page[i]) == request.blocks[t // PAGE]
                i += 1
            accepted = engine.randrange(1, new + 1) if new < 5 else new
            back += (request.tokens - 1) // UNIT > (before + accepted - 1) // UNIT
            request.tokens = before + accepted
        assert i == decodes
        assert pending.first[decodes:].unique().tolist() == [PAGE]
        assert pending.at[decodes:].unique().tolist() == [2 * most]
    assert count > 20
    assert back > 20
