"""Layers that encode tokens in groups, over pages that somebody else owns: bytes, and what every token reads."""

import math
import random
from typing import Any

import pytest
import torch

import packedkv
from packedkv.attention import Seen
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Role, roundtrip
from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.pending import FREE, PendingGroups
from packedkv.kernels.tokens import Rules
from tests.fuzz.oracle import attention64, causal

CPU = torch.device("cpu")
HEADS, DIM, UNIT, BLOCK = 2, 64, 32, 64
TOTAL = 150
SPECS = (
    "kivi-2:window=0",
    "kivi-4:window=0",
    "innerq-base:norm=false,window=0,sink=0",
    "innerq-hybrid:window=0,sink=0",
    "kivi-g64-3:window=0",
    "kivi-tq-4",
)
ROW = [7, 2, 11, 5]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def norms() -> dict[Role, Any]:
    return {"key": {"norm": torch.rand(1, HEADS, DIM // 2).repeat(1, 1, 2) + 0.5}, "value": {}}


def made(spec: str, slots: int = 3, **options: Any) -> GroupedLayer:
    scheme = packedkv.get(spec)
    torch.manual_seed(0)
    params = norms() if "tensor" in scheme.key.needs else None
    given = {"layer": 3, "heads": HEADS, "head_dim": DIM, "dtype": torch.float16, "device": CPU, "params": params}
    return GroupedLayer(scheme, slots=slots, **{**given, **options})


def tokens(count: int = TOTAL, seed: int = 0, heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, heads, DIM, generator=generator).half()
    return torch.randn(count, 2 * heads, DIM, generator=generator).half(), k, v


def block_of(layer: GroupedLayer) -> int:
    return math.lcm(BLOCK, layer.unit)


def pool(layer: GroupedLayer, blocks: int = 12) -> torch.Tensor:
    return torch.full(
        (blocks, layer.heads, block_of(layer), layer.token_bytes(block_of(layer))), 0xFF, dtype=torch.uint8
    )


def pending_of(layer: GroupedLayer, rows: int = 4, device: torch.device = CPU) -> PendingGroups:
    return PendingGroups(layer.slots, layer.unit, block_of(layer), rows, device, layer.halves)


def put(pending: PendingGroups, row: list[int], length: int, new: int) -> torch.Tensor:
    """Announce a step of one request; its table."""
    table = torch.tensor([row], dtype=torch.int32)
    lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, new], dtype=torch.int32)
    pending.put(table, lengths, starts, torch.zeros(new, dtype=torch.int64))
    return table


def fed(
    layer: GroupedLayer, cache: torch.Tensor, cuts: list[int], rules: Rules, first: int = 0, *, kernels: bool = False
) -> torch.Tensor:
    """Outputs of all tokens, which come in chunks of these sizes."""
    q, k, v = tokens()
    pending, out, at = pending_of(layer), [], first
    attend = layer.prefill_request if kernels else layer.attend_request
    for n in cuts:
        part = slice(at, at + n)
        at += n
        row = put(pending, ROW, at, n)[0]
        own = layer.take_chunk(k[part], v[part], cache, row, at, pending.slot[:1], kernels=kernels)
        assert own["key"].shape[2] == at - (at - n) // layer.unit * layer.unit
        out.append(attend(q[part], cache, row, at, rules, own))
    assert at == TOTAL
    return torch.cat(out)


def plain(layer: GroupedLayer, rules: Rules) -> torch.Tensor:
    """The definition in float64: each token over its own group as it came, and the ones before it decoded."""
    q, k, v = tokens()
    unit, decoded = layer.unit, []
    for role, x in zip(ROLES, (k, v), strict=True):
        state = layer.roles[role]
        whole = x[: TOTAL // unit * unit].transpose(0, 1)[None]
        decoded.append(roundtrip(state.codec, whole, state.params)[0].transpose(0, 1).half())
    out = []
    for t in range(TOTAL):
        begin, seen = t // unit * unit, causal(1, t + 1, rules.seen.window)
        held = (
            torch.cat([d[:begin], x[begin : t + 1]]).transpose(0, 1)[None] for d, x in zip(decoded, (k, v), strict=True)
        )
        query = q[t][None, :, None]
        found = attention64(query, *held, seen, scale=rules.scale, sinks=rules.sinks, softcap=rules.seen.softcap)
        out.append(found[0, :, 0])
    return torch.stack(out)


CUTS = {
    "at once": [TOTAL],
    "one by one": [1] * TOTAL,
    "at edges": [32, 64, 1, 31, 22],
    "across": [5, 20, 7, 40, 1, 50, 27],
}
RULES = {
    "plain": Rules(0.125),
    "all": Rules(0.3, Seen(window=50, softcap=3.0), sinks=SINKS),
    "narrow": Rules(0.3, Seen(window=9), sinks=SINKS),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rules", RULES)
def test_no_cut_of_a_prompt_shows(cut: str, rules: str) -> None:
    layer = made(SPECS[0])
    found = fed(layer, pool(layer), CUTS[cut], RULES[rules])
    torch.testing.assert_close(found.double(), plain(layer, RULES[rules]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("spec", SPECS)
def test_pages_hold_the_librarys_bytes(spec: str) -> None:
    """Whole groups, keys and values; nothing is written of the last one, or to blocks of others."""
    layer = made(spec)
    cache, (_, k, v) = pool(layer), tokens()
    found = fed(layer, cache, CUTS["across"], RULES["plain"])
    torch.testing.assert_close(found.double(), plain(layer, RULES["plain"]), rtol=0, atol=2e-3)
    library = LayerCache(layer.scheme, layer=3, page_tokens=block_of(layer), params=layer.site.fitted)
    whole = TOTAL // layer.unit * layer.unit
    library.append(*(x[:whole].transpose(0, 1)[None] for x in (k, v)))
    store, (layout, pages) = library.store, layer.pages(cache)
    for plane in layout.planes:
        unit = layout.page_tokens // plane.blocks
        mine, theirs = (layout.view_plane(x, plane) for x in (pages[torch.tensor(ROW)], store.pages))
        for block in range(len(ROW) * plane.blocks):
            page, place = divmod(block, plane.blocks)
            if block * unit < whole:
                assert torch.equal(mine[page, :, place], theirs[page, :, place])
            else:
                assert bool((mine[page, :, place].view(torch.uint8) == 0xFF).all())
    assert bool((cache[[i for i in range(12) if i not in ROW]] == 0xFF).all())


def test_a_hit_in_the_prefix_cache_does_not_show() -> None:
    layer = made(SPECS[2])
    cache = pool(layer)
    whole = fed(layer, cache, [TOTAL], RULES["plain"])
    row, other = ROW.copy(), pool(layer)
    other[:] = cache
    other[row[2:]] = 0xFF  # its own blocks behind the two that it found
    torch.testing.assert_close(
        fed(layer, other, [10, TOTAL - 128 - 10], RULES["plain"], first=128), whole[128:], rtol=0, atol=1e-3
    )
    assert torch.equal(other[row[:2]], cache[row[:2]])


def test_groups_with_a_row_that_cannot_be_stored_are_zero_bytes() -> None:
    """Only the blocks that hold it: 32 keys of one channel, one value."""
    layer = made(SPECS[0], dtype=torch.bfloat16)
    cache, clean = pool(layer), pool(layer)
    k, v = (x.bfloat16() for x in tokens(64)[1:])
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[40, 1, 3], bad_v[5, 0, 2] = torch.nan, 1e6
    for into, keys, values in ((clean, k, v), (cache, bad_k, bad_v)):
        layer.take_chunk(keys, values, into, put(pending_of(layer), ROW, 64, 64)[0], 64, torch.tensor([0]))
    layout, pages = layer.pages(cache)
    _, wanted = layer.pages(clean)
    for plane in layout.planes:
        found, want = layout.view_plane(pages, plane), layout.view_plane(wanted, plane).clone()
        head, block = (1, 1) if plane.role == "key" else (0, 5)
        want[ROW[0], head, block] = 0
        assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_half_of_the_heads_write_the_same_bytes() -> None:
    """Tensor parallelism."""
    k, v = tokens(64, heads=4)[1:]
    both = made(SPECS[0], heads=4)
    whole = pool(both)
    both.take_chunk(k, v, whole, put(pending_of(both), ROW, 64, 64)[0], 64, torch.tensor([0]))
    for first in (0, 2):
        part = made(SPECS[0], first_head=first)
        cache, own = pool(part), slice(first, first + 2)
        part.take_chunk(k[:, own], v[:, own], cache, put(pending_of(part), ROW, 64, 64)[0], 64, torch.tensor([0]))
        assert torch.equal(cache, whole[:, own])


def test_slots_are_counted() -> None:
    layer = made(SPECS[0], slots=5)
    assert layer.pending_bytes == 2 * 6 * HEADS * UNIT * DIM * 2
    assert made(SPECS[0], dtype=torch.float32).slot_rows["key"].dtype == torch.float16


# -- slots of unfinished groups against a dict of what every request would have; no engine -----------------------------

GROUP, PAGE, COLUMNS = 8, 16, 6


class Request:
    """Blocks, and how many tokens are computed."""

    def __init__(self, number: int, row: int, tokens: int, total: int) -> None:
        self.number, self.row, self.tokens, self.total = number, row, tokens, total
        self.blocks: list[int] = []


class Scheduler:
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
    engine, pending = Scheduler(most + budget, most, budget), PendingGroups(most, GROUP, PAGE, most + 3, CPU)
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
            slot, rest = int(pending.slot[i]), before % GROUP
            if rest or length % GROUP:
                assert slot < most
                assert slot not in used
                used.add(slot)
            if rest:
                assert held[slot][-rest:] == [(request.number, t) for t in range(before - rest, before)]
            if length % GROUP:
                begin = length // GROUP * GROUP
                reused += slot in held
                held[slot] = [(request.number, t) for t in range(begin, length)]
            base = (length - 1) // GROUP * GROUP
            assert (int(pending.packed[i]), int(pending.dense_len[i])) == (base, length - base)
            assert int(pending.place[i]) == (length - 1) % GROUP
            assert int(pending.page[i]) == request.blocks[-1]
            assert int(pending.first[i]) == (PAGE if length % GROUP else base % PAGE)
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
    pending = PendingGroups(2, GROUP, PAGE, 4, CPU)
    pending.put(*one([3], 5, 5))
    with pytest.raises(UnsupportedError, match=r"goes on in a group of 8 tokens whose beginning is not here.*; serve"):
        pending.put(*one([4], 6, 1))
    for rows in (None, [1]):
        again = PendingGroups(2, GROUP, PAGE, 4, CPU)
        again.put(*one([3], 5, 5), rows)
        with pytest.raises(UnsupportedError, match="beginning is not here"):  # tokens between them are missing
            again.put(*one([3], 7, 1), rows)


def test_batches_without_requests_leave_no_trace() -> None:
    """Captures of graphs, and the steps of an idle replica."""
    pending = PendingGroups(2, GROUP, PAGE, 4, CPU)
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
    pending = PendingGroups(2, GROUP, PAGE, 4, CPU)
    pending.put(*one([3], 5, 5))
    slot = int(pending.slot[0])
    pending.put(*one([3], 8, 3))
    assert int(pending.slot[0]) == slot  # read once more in this step
    assert bool((pending.block == FREE).all())


def test_numbers_stay_where_graphs_read_them() -> None:
    pending = PendingGroups(2, GROUP, PAGE, 4, CPU)
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
    pending = PendingGroups(most, GROUP, PAGE, 4 * most + 4, CPU, halves=2, longest=COLUMNS * PAGE - 2)
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
                base = t // GROUP * GROUP
                half = 2 * slot + base // GROUP % 2
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
                    ends = (t + 1) % GROUP == 0
                    assert int(pending.first[i]) == (base % PAGE if ends else PAGE)
                    assert not ends or int(pending.page[i]) == request.blocks[t // PAGE]
                i += 1
            accepted = engine.randrange(1, new + 1) if new < 5 else new
            back += (request.tokens - 1) // GROUP > (before + accepted - 1) // GROUP
            request.tokens = before + accepted
        assert i == decodes
        assert pending.first[decodes:].unique().tolist() == [PAGE]
        assert pending.at[decodes:].unique().tolist() == [2 * most]
    assert count > 20
    assert back > 20
