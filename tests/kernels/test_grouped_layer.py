"""An engine's layer of token groups on the kernels against the reference; the kernels run on the emulated machine."""

from typing import Any

import pytest
import torch

from packedkv.attention import Seen
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.kernels.cuda import prefill_groups
from packedkv.kernels.cuda.prefill import Workspace
from packedkv.kernels.cuda.prefill_groups import GroupChunks
from packedkv.kernels.tokens import Rules, StepTokens
from tests.integrations.test_groups import (
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
from tests.kernels.test_packed_layer import EngineFlash, emulated  # noqa: F401

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_of_a_prompt_are_the_references(spec: str, machine: dict[str, Any]) -> None:
    layer = made(spec)
    wanted, written = pool(layer), pool(layer)
    rules = Rules(0.125, sinks=SINKS)
    want = fed(layer, wanted, CUTS["across"], rules)
    for cut in ("across", "at once"):
        written.fill_(0xFF)
        found = fed(layer, written, CUTS[cut], rules, kernels=True)
        torch.testing.assert_close(found, want, rtol=0, atol=4e-3)
        assert torch.equal(written, wanted)
    assert machine["kv_unpack"].launches


@pytest.mark.parametrize("rows", [UNIT, 2 * UNIT])
def test_queries_that_come_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_groups, "rows_at_once", lambda q: rows)
    layer = made(SPECS[0])
    wanted, written = pool(layer), pool(layer)
    want = fed(layer, wanted, CUTS["across"], RULES["plain"])
    found = fed(layer, written, CUTS["across"], RULES["plain"], kernels=True)
    torch.testing.assert_close(found, want, rtol=0, atol=4e-3)


def test_what_flash_attention_cannot_do_takes_the_reference(machine: dict[str, Any]) -> None:
    layer = made(SPECS[0])
    cache, other = pool(layer), pool(layer)
    found = fed(layer, cache, CUTS["across"], RULES["all"], kernels=True)
    assert torch.equal(found, fed(layer, other, CUTS["across"], RULES["all"]))
    assert "kv_unpack" not in machine


class Batch:
    """Three requests that decode side by side, and the same ones one by one by the reference."""

    def __init__(self, spec: str, rules: Rules, lengths: list[int]) -> None:
        self.layer, self.rules, self.lengths = made(spec), rules, list(lengths)
        self.rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        self.data = [tokens(seed=i) for i in range(3)]
        self.caches = [pool(self.layer) for _ in range(2)]
        self.pending = pending_of(self.layer, 5)
        self.own: GroupedLayer = made(spec)  # its slots are the reference's
        for i, (length, (_, k, v)) in enumerate(zip(lengths, self.data, strict=True)):
            if length:
                slot = torch.tensor([i])
                row = torch.tensor(self.rows[i], dtype=torch.int32)
                self.put([i], [length])
                self.layer.take_chunk(k[:length], v[:length], self.caches[0], row, length, self.pending.slot[:1])
                self.own.take_chunk(k[:length], v[:length], self.caches[1], row, length, slot)
        columns = 5
        size = self.layer.workspace_bytes(4, 2 * HEADS, self.caches[0], columns, rules)
        self.space = torch.full((-(-size // 4),), torch.nan)

    def put(self, which: list[int], new: list[int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.zeros(len(which) + padding, 5, dtype=torch.int32)
        for i, r in enumerate(which):
            table[i, :3] = torch.tensor(self.rows[r])
        lengths = torch.tensor([self.lengths[r] for r in which] + [0] * padding, dtype=torch.int32)
        starts = torch.tensor([0, *new, *[0] * padding]).cumsum(0).int()
        self.pending.put(table, lengths, starts, torch.zeros(sum(new), dtype=torch.int64))
        return table, lengths

    def step(self, which: list[int], padding: int) -> None:
        for r in which:
            self.lengths[r] += 1
        table, lengths = self.put(which, [1] * len(which), padding)
        last = [(r, self.lengths[r] - 1) for r in which]
        newest = [torch.stack([self.data[r][part][t] for r, t in last]) for part in range(3)]
        q, k, v = (torch.cat([x, x[:1].expand(padding, -1, -1)]) for x in newest)
        step = StepTokens(self.caches[0], table, lengths, workspace=self.space)
        dense = self.layer.store_steps(k, v, self.caches[0], self.pending)
        found = self.layer.attend_steps(q, dense, step, self.pending, self.rules)
        for i, (r, t) in enumerate(last):
            row, slot = torch.tensor(self.rows[r], dtype=torch.int32), torch.tensor([r])
            own = self.own.take_chunk(k[i : i + 1], v[i : i + 1], self.caches[1], row, t + 1, slot)
            want = self.own.attend_own(q[i : i + 1], self.caches[1], row, t + 1, self.rules, own)
            torch.testing.assert_close(found[i : i + 1], want, rtol=0, atol=4e-3)
        assert torch.equal(*self.caches)


STEPS = {
    "whole groups": ([64, 128, 0], [64, 0, 32], [0, 22, 40]),
    "cut anywhere": ([5, 40, 3], [70, 0, 29], [1, 33, 1], [60, 77, 100]),
    "short": ([3, 0, 31], [20, 1, 1], [9, 0, 40]),
    "windows": ([70, 5, 129], [1, 90, 3], [79, 30, 18]),  # one goes on where its window begins with a block
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
}


@pytest.mark.parametrize(
    ("spec", "dtype", "steps", "rules"),
    [
        *((s, torch.float16, steps, "sinks") for s in SPECS for steps in ("whole groups", "cut anywhere", "short")),
        *((SPECS[3], dtype, "cut anywhere", "plain") for dtype in (torch.bfloat16, torch.float32)),
        *((SPECS[0], torch.float16, "windows", rules) for rules in WINDOWS),
        *((SPECS[4], torch.float16, "windows", rules) for rules in ("a group", "some")),
    ],
)
def test_chunks_of_many_requests_at_once(
    spec: str, dtype: torch.dtype, steps: str, rules: str, machine: dict[str, Any]
) -> None:
    """One launch for each stage, and the bytes and outputs of each request alone.

    Blocks before a window belong to nobody, or to others: they are not read.
    """
    rule, halves, flash = WINDOWS[rules], 1 + SPECS.index(spec) % 2, EngineFlash()
    layer, alone = made(spec, dtype=dtype, halves=halves), made(spec, dtype=dtype)
    layer.flash = flash
    cache, wanted, pending, block = pool(layer), pool(layer), pending_of(layer), block_of(layer)
    layer.engine(block)
    assert layer.takes_chunks(rule)
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    data, lengths = [[x.to(dtype) for x in tokens(seed=i)] for i in range(3)], [0, 0, 0]
    for new in STEPS[steps]:
        rows, before = [r for r in range(3) if new[r]], lengths
        lengths = [n + more for n, more in zip(lengths, new, strict=True)]
        starts, freed = torch.tensor([0, *(new[r] for r in rows)]).cumsum(0).int(), table.clone()
        for r in range(3):
            freed[r, : max(0, before[r] - rule.seen.window + 1) // block if rule.seen.window else 0] = 0
        requests = [(i, 5 + int(starts[i]), 5 + int(starts[i + 1]), lengths[r]) for i, r in enumerate(rows)]
        held = torch.tensor([lengths[r] for r in rows], dtype=torch.int32)
        pending.put(freed[rows], held, starts, torch.zeros(sum(new), dtype=torch.int64), queries=0)
        q, k, v = (torch.cat([data[r][i][before[r] : lengths[r]] for r in rows]) for i in range(3))
        chunks = GroupChunks.of(
            requests, freed[rows], pending.slot, layer.unit, block, Workspace(), halves, rule.seen.window
        )
        found = torch.full((len(q), 3, 2 * HEADS, DIM), torch.nan, dtype=dtype)[:, 1]
        launched, calls = {name: len(kernel.launches) for name, kernel in machine.items()}, len(flash.calls)
        layer.attend_chunk_groups(q, layer.store_chunks(k, v, cache, chunks), cache, chunks, rule, found)
        launched = {name: len(kernel.launches) - launched.get(name, 0) for name, kernel in machine.items()}
        assert launched["kv_basis"] <= 3
        assert launched.get("kv_unpack", 0) <= 1
        assert launched["kv_encode"] <= 2
        assert len(flash.calls) <= calls + 2
        for r, (_, first, last, length) in zip(rows, requests, strict=True):
            part = slice(first - 5, last - 5)
            own = alone.take_chunk(k[part], v[part], wanted, table[r], length, torch.tensor([r]))
            want = alone.attend_own(q[part], wanted, table[r], length, rule, own)
            torch.testing.assert_close(found[part], want, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 4e-3)
        assert torch.equal(cache, wanted)


CASES = [
    *((spec, "plain") for spec in SPECS),
    *((SPECS[0], "all"), (SPECS[0], "narrow"), (SPECS[3], "all"), (SPECS[5], "all")),
]


@pytest.mark.parametrize(("spec", "rules"), CASES)
def test_decoding_is_the_references(spec: str, rules: str) -> None:
    """Through the ends of groups and of blocks, some requests left out, with the padding of a captured batch."""
    first = [61, 31, 1] if made(spec).unit == 32 else [125, 63, 1]
    batch = Batch(spec, RULES[rules], first)
    for step in range(6):
        batch.step([[0, 1, 2], [2, 0], [1]][step % 3], padding=step % 2)
    assert batch.lengths == [n + 4 for n in first]


def test_a_captured_batch_without_requests_writes_nothing() -> None:
    batch = Batch(SPECS[0], RULES["plain"], [5, 0, 0])
    layer, cache = batch.layer, batch.caches[0]
    before = [cache.clone(), *(layer.slot_rows[r][: layer.slots].clone() for r in ("key", "value"))]
    batch.pending.blank(3)
    q, k, v = (x[:3] for x in batch.data[0])
    table, lengths = torch.zeros(3, 5, dtype=torch.int32), torch.full((3,), 320, dtype=torch.int32)
    dense = layer.store_steps(k, v, cache, batch.pending)
    own = StepTokens(cache, table, lengths, workspace=batch.space)
    layer.attend_steps(q, dense, own, batch.pending, batch.rules)
    after = [cache, *(layer.slot_rows[r][: layer.slots] for r in ("key", "value"))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
