"""An engine's layer of token groups against the reference: CUDA kernels, emulated or on a GPU, and CPU kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.attention import Seen
from packedkv.kernels.cpu.engine import CpuEngine
from packedkv.kernels.cuda import prefill_groups
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.prefill import Workspace
from packedkv.kernels.cuda.prefill_groups import GroupChunks
from packedkv.kernels.tokens import Rules, StepTokens
from tests.integrations.test_groups import (
    CPU,
    CUTS,
    DIM,
    HEADS,
    RULES,
    SINKS,
    SPECS,
    UNIT,
    block_of,
    fed,
    made,
    pending_of,
    pool,
    tokens,
)
from tests.kernels.conftest import Server, by, unsynchronised
from tests.kernels.test_packed_layer import ALONE, READ, EngineFlash

GROUPS = [*(spec for spec in READ if spec not in ALONE), "innerq-hybrid:window=0,sink=0"]
"""Those that the CPU kernels read."""
TABLE = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)


@by("spec, rules", cuda=[(s, "sinks") for s in SPECS], cpu=[(s, rules) for s in GROUPS for rules in RULES])
def test_chunks_of_a_prompt_are_the_references(spec: str, rules: str, served_by: Server) -> None:
    """However the prompt is cut; bytes too."""
    layer, rule = made(spec), {**RULES, "sinks": Rules(0.125, sinks=SINKS)}[rules]
    wanted, written = pool(layer), pool(layer)
    want = fed(layer, wanted, CUTS["across"], rule)
    near = {"rtol": 0.0, "atol": 4e-3} if served_by.name == "cuda" else {"rtol": 2e-3, "atol": 2e-3}
    for cut in ("across", "at once", "at edges"):
        written.fill_(0xFF)
        torch.testing.assert_close(fed(layer, written, CUTS[cut], rule, kernels=True), want, **near)
        assert torch.equal(written, wanted)
    assert served_by.name == "cpu" or served_by.launches["kv_unpack"].launches


@pytest.mark.parametrize("rows", [UNIT, 2 * UNIT])
def test_queries_that_come_in_parts(rows: int, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_groups, "rows_at_once", lambda q: rows)
    layer = made(SPECS[0])
    want = fed(layer, pool(layer), CUTS["across"], RULES["plain"])
    close(fed(layer, pool(layer), CUTS["across"], RULES["plain"], kernels=True), want)


def test_what_flash_attention_cannot_do_takes_the_reference(emulated: dict[str, Any]) -> None:
    layer = made(SPECS[0])
    found = fed(layer, pool(layer), CUTS["across"], RULES["all"], kernels=True)
    assert torch.equal(found, fed(layer, pool(layer), CUTS["across"], RULES["all"]))
    assert "kv_unpack" not in emulated


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), want, rtol=0, atol=4e-3)


class Requests:
    """Three requests of a layer, side by side in decode steps; further rows are the padding of a captured batch."""

    def __init__(
        self, spec: str, rules: Rules, device: torch.device = CPU, rows: int = 3, *, kernels: bool = False
    ) -> None:
        if rules.sinks is not None:
            rules = rules._replace(sinks=rules.sinks.to(device))
        self.rules, self.kernels, self.device, self.rows = rules, kernels, device, rows
        self.layer = made(spec, device=device, params=made(spec).site.fitted)
        self.cache = pool(self.layer).to(device)
        self.pending = pending_of(self.layer, rows, device)
        self.data = [[x.to(device) for x in tokens(seed=i)] for i in range(3)]
        self.table = torch.zeros(rows, 5, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.newest = [torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=device) for x in self.data[0]]
        size = self.layer.workspace_bytes(rows, 2 * HEADS, self.cache, 5, rules) if kernels else 0
        self.space = torch.full((-(-size // 4),), torch.nan, device=device)

    def announce(self, which: list[int], lengths: list[int], new: int) -> None:
        """Set a step of these requests in place."""
        padding = [0] * (self.rows - len(which))
        table = torch.zeros(self.rows, 5, dtype=torch.int32)
        table[: len(which), :3] = TABLE[which]
        self.table.copy_(table)
        self.lengths.copy_(torch.tensor([*lengths, *padding], dtype=torch.int32))
        self.starts.copy_(torch.tensor([0, *[new] * len(which), *padding]).cumsum(0).int())

    def put(self, requests: Any) -> None:
        """Announce the step; on a GPU with the requests' rows of the runner's table."""
        where = torch.zeros(len(self.data[0][0]), dtype=torch.int64, device=self.device)
        named = requests if self.device.type == "cuda" else None
        self.pending.put(self.table, self.lengths, self.starts, where, named)

    def prompt(self, r: int, first: int, last: int) -> Tensor:
        """Outputs of tokens of one request."""
        q, k, v = (x[first:last] for x in self.data[r])
        self.announce([r], [last], last - first)
        self.put([r])
        row, layer = self.table[0], self.layer
        own = layer.take_chunk(k, v, self.cache, row, last, self.pending.slot[:1], kernels=self.kernels)
        attend = layer.prefill_request if self.kernels else layer.attend_request
        return attend(q, self.cache, row, last, self.rules, own)

    def load(self, newest: list[tuple[int, int]]) -> None:
        for part, to in enumerate(self.newest):
            to[: len(newest)] = torch.stack([self.data[r][part][t] for r, t in newest])

    def step(self) -> Tensor:
        q, k, v = self.newest
        own = StepTokens(self.cache, self.table, self.lengths, workspace=self.space)
        dense = self.layer.store_steps(k, v, self.cache, self.pending)
        return self.layer.attend_steps(q, dense, own, self.pending, self.rules)


CASES = [
    *((spec, "plain") for spec in SPECS),
    *((SPECS[0], "all"), (SPECS[0], "narrow"), (SPECS[3], "all"), (SPECS[5], "all")),
]


@by(
    "spec, rules",
    cuda=CASES,
    cpu=[*CASES, *((s, "plain") for s in GROUPS if s not in dict(CASES))],
    gpu=[(spec, rules) for spec in SPECS for rules in ("plain", "all")],
)
def test_decoding_is_the_references(spec: str, rules: str, served_by: Server) -> None:
    """Through the ends of groups and of blocks, some requests left out, with padding; on a GPU as a captured graph."""
    gpu = served_by.name == "gpu"
    there = Requests(spec, RULES[rules], served_by.device, 3 + gpu, kernels=True)
    here, steps, replay, out = Requests(spec, RULES[rules]), 40 if gpu else 6, None, torch.empty(0)
    engine = there.layer.engine(block_of(there.layer))
    assert isinstance(engine, CpuEngine if served_by.name == "cpu" else CudaEngine)
    # on a GPU the first request completes a group of every length
    lengths = first = [105, 33, 1] if gpu else [61, 31, 1] if there.layer.unit == 32 else [125, 63, 1]
    for r, length in enumerate(first):
        for begin, end in ((0, length // 2), (length // 2, length)):
            if begin < end:
                close(there.prompt(r, begin, end), here.prompt(r, begin, end))
    if gpu:
        there.pending.blank(there.rows)
        there.step()  # programs are loaded outside of a graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = there.step()
        replay = graph.replay
    for step in range(steps):
        which = [[0, 1, 2], [2, 0], [1]][step % 3]
        lengths = [n + (r in which) for r, n in enumerate(lengths)]
        there.announce(which, [lengths[r] for r in which], 1)
        there.load([(r, lengths[r] - 1) for r in which])
        if replay is None:
            there.put(which)
            out = there.step()
        else:
            with unsynchronised():
                there.put(which if step % 2 else torch.tensor(which).numpy())
                replay()
        for i, r in enumerate(which):
            close(out[i : i + 1], here.prompt(r, lengths[r] - 1, lengths[r]))
        assert torch.equal(there.cache.cpu(), here.cache)
    assert lengths == [n + steps // 3 * 2 + steps % 3 for n in first]


def test_a_captured_batch_without_requests_writes_nothing(emulated: Any) -> None:
    batch = Requests(SPECS[0], RULES["plain"], kernels=True)
    batch.prompt(0, 0, 5)
    layer = batch.layer
    held = batch.cache, *(layer.slot_rows[role][: layer.slots] for role in ("key", "value"))
    before = [x.clone() for x in held]
    batch.pending.blank(3)
    batch.table.zero_()
    batch.lengths.fill_(320)
    batch.load([(0, t) for t in range(3)])
    batch.step()
    assert all(map(torch.equal, held, before))


@pytest.mark.gpu
def test_slots_by_their_block_need_no_synchronisation() -> None:
    """As the first model runner's batches are: rows of the runner's table are not named."""
    served = Requests(SPECS[0], Rules(0.125, sinks=SINKS), torch.device("cuda"), 4, kernels=True)
    torch.cuda.synchronize()
    for length in range(1, 70):
        served.announce([1], [length], 1)
        with unsynchronised():
            served.put(None)
        assert int(served.pending.dense_len[0]) == (length - 1) % UNIT + 1
        assert int(served.pending.slot[0]) < served.layer.slots


STEPS = {
    "whole groups": ([64, 128, 0], [64, 0, 32], [0, 22, 40]),
    "cut anywhere": ([5, 40, 3], [70, 0, 29], [1, 33, 1], [60, 77, 100]),
    "short": ([3, 0, 31], [20, 1, 1], [9, 0, 40]),
    "windows": ([70, 5, 129], [1, 90, 3], [79, 30, 18]),  # one goes on where its window begins with a block
    "two": ([70, 5, 1], [80, 100, 29]),
}
"""New tokens of three requests in each step."""
WINDOWS = {
    "plain": Rules(0.125),
    "sinks": Rules(0.125, sinks=SINKS),
    "narrow": Rules(0.125, Seen(window=9)),
    "a group": Rules(0.125, Seen(window=32), sinks=SINKS),
    "some": Rules(0.3, Seen(window=50, softcap=3.0), sinks=SINKS),
    "long": Rules(0.125, Seen(window=140)),
    "soft cap": Rules(0.125, Seen(softcap=3.0)),
    **{f"{window} and sinks": Rules(0.125, Seen(window=window), sinks=SINKS) for window in (9, 32, 50, 140)},
}


@by(
    "spec, dtype, steps, rules",
    cuda=[
        *((s, torch.float16, steps, "sinks") for s in SPECS for steps in ("whole groups", "cut anywhere", "short")),
        *((SPECS[3], dtype, "cut anywhere", "plain") for dtype in (torch.bfloat16, torch.float32)),
        *((SPECS[0], torch.float16, "windows", rules) for rules in list(WINDOWS)[:7]),
        *((SPECS[4], torch.float16, "windows", rules) for rules in ("a group", "some")),
    ],
    gpu=[
        *((spec, dtype, "two", "sinks") for spec in SPECS for dtype in (torch.float16, torch.bfloat16)),
        *((spec, torch.float16, "two", rules) for spec in SPECS for rules in list(WINDOWS)[7:]),
    ],
)
def test_chunks_of_many_requests_at_once(
    spec: str, dtype: torch.dtype, steps: str, rules: str, served_by: Server
) -> None:
    """One launch for each stage, and the bytes and outputs of each request alone.

    Blocks before a window belong to nobody, or to others: they are not read.
    """
    device, flash, emulated = served_by.device, EngineFlash(), served_by.name == "cuda"
    halves, params = 1 + SPECS.index(spec) % 2 if emulated else 1, made(spec).site.fitted
    layer = made(spec, dtype=dtype, halves=halves, device=device, params=params)
    alone, block = made(spec, dtype=dtype, params=params), block_of(layer)
    if emulated:
        layer.flash = flash
    wanted, pending = pool(alone), pending_of(layer, device=device)
    cache, window = wanted.to(device, copy=True), WINDOWS[rules].seen.window
    layer.pool(cache)  # compiles
    data, lengths = [[x.to(dtype) for x in tokens(seed=i)] for i in range(3)], [0, 0, 0]
    for number, new in enumerate(STEPS[steps]):
        rule = WINDOWS[rules] if number or emulated else WINDOWS[rules]._replace(sinks=None)
        assert layer.takes_chunks(rule)
        rows, before = [r for r in range(3) if new[r]], lengths
        lengths = [n + more for n, more in zip(lengths, new, strict=True)]
        starts, freed = torch.tensor([0, *(new[r] for r in rows)]).cumsum(0).int(), TABLE.clone()
        for r in range(3):
            freed[r, : max(0, before[r] - window + 1) // block if window else 0] = 0
        requests = [(i, 5 + int(starts[i]), 5 + int(starts[i + 1]), lengths[r]) for i, r in enumerate(rows)]
        held, table = torch.tensor([lengths[r] for r in rows], dtype=torch.int32), freed[rows].to(device)
        where = torch.zeros(sum(new), dtype=torch.int64, device=device)
        pending.put(table, held.to(device), starts.to(device), where, queries=0)
        q, k, v = (torch.cat([data[r][i][before[r] : lengths[r]] for r in rows]) for i in range(3))
        chunks = GroupChunks.of(requests, table, pending.slot, layer.unit, block, Workspace(), halves, window)
        found = torch.full((len(q), 3, 2 * HEADS, DIM), torch.nan, dtype=dtype, device=device)[:, 1]
        launched, calls = served_by.counted(), len(flash.calls)
        taken = layer.store_chunks(k.to(device), v.to(device), cache, chunks)
        sinks = None if rule.sinks is None else rule.sinks.to(device)
        layer.attend_chunk_groups(q.to(device), taken, cache, chunks, rule._replace(sinks=sinks), found)
        counts = {name: count - launched.get(name, 0) for name, count in served_by.counted().items()}
        for name, most in (("kv_basis", 3), ("kv_unpack", 1), ("kv_encode", 2)):
            assert counts.get(name, 0) <= most
        assert len(flash.calls) <= calls + 2
        for r, (_, first, last, length) in zip(rows, requests, strict=True):
            part = slice(first - 5, last - 5)
            own = alone.take_chunk(k[part], v[part], wanted, TABLE[r], length, torch.tensor([r]))
            want = alone.attend_request(q[part], wanted, TABLE[r], length, rule, own)
            near = 2e-2 if dtype == torch.bfloat16 else 4e-3
            torch.testing.assert_close(found[part].cpu(), want, rtol=0, atol=near)
        assert torch.equal(cache.cpu(), wanted)
