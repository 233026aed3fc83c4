"""An engine's layer of token groups on a GPU, decode steps as a captured graph, against the reference on the CPU."""

from typing import Any

import pytest
import torch

from packedkv.attention import Seen
from packedkv.kernels.cuda.prefill import Workspace
from packedkv.kernels.cuda.prefill_groups import GroupChunks
from packedkv.kernels.tokens import Rules, StepTokens
from tests.integrations.test_groups import HEADS, RULES, SINKS, SPECS, UNIT, block_of, made, pending_of, pool, tokens
from tests.kernels.conftest import unsynchronised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, COLUMNS, STARTS, STEPS = 4, 3, (105, 33, 1), 40  # the first completes a group of every length


class Served:
    """Three requests on a device; a fourth row is the padding of a captured batch."""

    def __init__(self, spec: str, device: torch.device, rules: Rules, *, kernels: bool) -> None:
        if rules.sinks is not None:
            rules = rules._replace(sinks=rules.sinks.to(device))
        self.rules, self.kernels, self.device = rules, kernels, device
        params = made(spec).site.fitted
        self.layer = made(spec, device=device, params=params)
        self.cache = pool(self.layer).to(device)
        self.pending = pending_of(self.layer, ROWS, device)
        self.data = [[x.to(device) for x in tokens(seed=i)] for i in range(3)]
        self.blocks = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
        self.table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(ROWS, dtype=torch.int32, device=device)
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32, device=device)
        self.q, self.k, self.v = (
            torch.zeros(ROWS, heads, x.shape[2], dtype=x.dtype, device=device)
            for heads, x in zip((2 * HEADS, HEADS, HEADS), self.data[0], strict=True)
        )

    def announce(self, which: list[int], lengths: list[int], new: int) -> None:
        table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
        table[: len(which)] = self.blocks[which]
        padding = [0] * (ROWS - len(which))
        starts = torch.tensor([0, *[new] * len(which), *padding]).cumsum(0).int()
        self.table.copy_(table)
        self.lengths.copy_(torch.tensor([*lengths, *padding], dtype=torch.int32))
        self.starts.copy_(starts)

    def put(self, requests: Any) -> None:
        where = torch.zeros(len(self.data[0][0]), dtype=torch.int64, device=self.device)
        self.pending.put(self.table, self.lengths, self.starts, where, requests)

    def prompt(self, r: int, first: int, last: int) -> torch.Tensor:
        q, k, v = (x[first:last] for x in self.data[r])
        self.announce([r], [last], last - first)
        self.put([r])
        row, layer = self.table[0], self.layer
        own = layer.take_chunk(k, v, self.cache, row, last, self.pending.slot[:1], kernels=self.kernels)
        attend = layer.prefill_own if self.kernels else layer.attend_own
        return attend(q, self.cache, row, last, self.rules, own)

    def load(self, newest: list[tuple[int, int]]) -> None:
        for to, part in ((self.q, 0), (self.k, 1), (self.v, 2)):
            to[: len(newest)] = torch.stack([self.data[r][part][t] for r, t in newest])

    def step(self, space: torch.Tensor) -> torch.Tensor:
        own = StepTokens(self.cache, self.table, self.lengths, workspace=space)
        dense = self.layer.store_steps(self.k, self.v, self.cache, self.pending)
        return self.layer.attend_steps(self.q, dense, own, self.pending, self.rules)


def run(spec: str, rules: Rules, device: torch.device, graph: bool) -> None:
    there, here = (Served(spec, d, rules, kernels=d is device) for d in (device, torch.device("cpu")))
    lengths = list(STARTS)
    for r, length in enumerate(lengths):
        for first, last in ((0, length // 2), (length // 2, length)):
            if first < last:
                close(there.prompt(r, first, last), here.prompt(r, first, last))
    size = there.layer.workspace_bytes(ROWS, 2 * HEADS, there.cache, COLUMNS, there.rules)
    space = torch.empty(-(-size // 4), device=device)
    replay, out = (lambda: None), torch.empty(0)
    if graph:
        there.pending.blank(ROWS)
        there.step(space)  # programs are loaded outside of a graph
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = there.step(space)
        replay = captured.replay
    for step in range(STEPS):
        which = [[0, 1, 2], [2, 0], [1]][step % 3]
        for r in which:
            lengths[r] += 1
        now = [lengths[r] for r in which]
        there.announce(which, now, 1)
        there.load([(r, lengths[r] - 1) for r in which])
        if graph:
            with unsynchronised():
                there.put(which if step % 2 else torch.tensor(which).numpy())
                replay()
        else:
            there.put(which)
            out = there.step(space)
        for i, r in enumerate(which):
            close(out[i : i + 1], here.prompt(r, lengths[r] - 1, lengths[r]))
    assert torch.equal(there.cache.cpu(), here.cache)
    assert lengths[0] > 128


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), want, rtol=0, atol=4e-3)


@pytest.mark.parametrize("rules", ["plain", "all"])
@pytest.mark.parametrize("spec", SPECS)
def test_captured_steps_are_the_references(spec: str, rules: str) -> None:
    run(spec, RULES[rules], torch.device("cuda"), graph=True)


@pytest.mark.parametrize(
    ("spec", "dtype", "window"),
    [
        *((spec, dtype, 0) for spec in SPECS for dtype in (torch.float16, torch.bfloat16)),
        *((spec, torch.float16, window) for spec in SPECS for window in (9, 32, 50, 140)),
    ],
)
def test_chunks_of_many_requests_at_once(spec: str, dtype: torch.dtype, window: int) -> None:
    """Two steps of three requests; the second one goes on in the middle of groups."""
    device, lengths = torch.device("cuda"), [0, 0, 0]
    params = made(spec).site.fitted
    layer, alone = made(spec, dtype=dtype, device=device, params=params), made(spec, dtype=dtype, params=params)
    wanted, pending = pool(alone), pending_of(layer, ROWS, device)
    cache = wanted.to(device)
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    data, there = [[x.to(dtype) for x in tokens(seed=i)] for i in range(3)], table.to(device)
    for number, new in enumerate(([70, 5, 1], [80, 100, 29])):
        before, lengths = lengths, [n + more for n, more in zip(lengths, new, strict=True)]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        requests = [(r, int(starts[r]), int(starts[r + 1]), lengths[r]) for r in range(3)]
        where = torch.zeros(sum(new), dtype=torch.int64, device=device)
        pending.put(there, torch.tensor(lengths, dtype=torch.int32, device=device), starts.to(device), where)
        q, k, v = (torch.cat([data[r][i][before[r] : lengths[r]] for r in range(3)]) for i in range(3))
        rules = Rules(0.125, Seen(window=window), sinks=(None, SINKS)[number])
        found, given = torch.full_like(q, torch.nan, device=device), [x.to(device) for x in (q, k, v)]
        own_rules = rules if rules.sinks is None else rules._replace(sinks=rules.sinks.to(device))
        layer.pool(cache)  # compiles
        chunks = GroupChunks.of(requests, there, pending.slot, layer.unit, block_of(layer), Workspace(), window=window)
        taken = layer.store_chunks(*given[1:], cache, chunks)
        layer.attend_chunk_groups(given[0], taken, cache, chunks, own_rules, found)
        for r, first, last, length in requests:
            part = slice(first, last)
            own = alone.take_chunk(k[part], v[part], wanted, table[r], length, torch.tensor([r]))
            want = alone.attend_own(q[part], wanted, table[r], length, rules, own)
            near = 4e-3 if dtype == torch.float16 else 2e-2
            torch.testing.assert_close(found[part].cpu(), want, rtol=0, atol=near)
        assert torch.equal(cache.cpu(), wanted)


def test_slots_by_their_block_need_no_synchronisation() -> None:
    """As the first model runner's batches are: rows of the runner's table are not named."""
    served = Served(SPECS[0], torch.device("cuda"), Rules(0.125, sinks=SINKS), kernels=True)
    torch.cuda.synchronize()
    for length in range(1, 70):
        served.announce([1], [length], 1)
        with unsynchronised():
            served.put(None)
        assert int(served.pending.dense_len[0]) == (length - 1) % UNIT + 1
        assert int(served.pending.slot[0]) < served.layer.slots
