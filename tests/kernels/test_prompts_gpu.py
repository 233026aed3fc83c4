"""Tokens, prompt chunks and drafts of a step on a GPU, all requests at once, against the reference on the CPU."""

import pytest
import torch

from packedkv.integrations.vllm.flash import flash_for
from packedkv.kernels.cuda.prefill import Chunks, Sight, Workspace
from packedkv.kernels.tokens import Rules, StepTokens
from tests.integrations.test_serving import DIM, HEADS, ROW, TOKENS, made, pool, rows, slots
from tests.kernels.conftest import unsynchronised
from tests.kernels.test_packed_layer import WINDOWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPECS = ("saw-int4", "int-4", "octopus-3:window=0", "hqmq-s24_r3", "turboquant-4:sink=3", "ultra-tq", "fp8")
REQUESTS = [(7, 41), (16, 16), (1, TOKENS), (3, 3)]
"""New tokens, and all tokens, of the requests of a step."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_is_the_references(spec: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    layer, plain = made(spec, dtype=dtype, device=device), made(spec, dtype=dtype)
    want, (k, v) = pool(plain), (x.to(dtype) for x in rows())
    plain.write(k, v, want, slots(0, TOKENS))
    cache = pool(layer).to(device)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    where = torch.cat([slots(0, TOKENS)[order], torch.tensor([-1, -1])]).to(device)
    padded = torch.cat([order, order[:2]])
    new_k, new_v = k[padded].to(device), v[padded].to(device)
    layer.engine(cache.shape[2])
    layer.pool(cache)  # compiles
    with unsynchronised():
        layer.encode(new_k, new_v, cache, where)
    assert torch.equal(cache.cpu(), want)
    requests, begin = [], 0
    for row, (new, length) in enumerate(REQUESTS):
        requests.append((row, begin, begin + new, length))
        begin += new
    table = ROW.expand(len(requests), -1).contiguous().to(device)
    q = torch.randn(begin, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    found, given = torch.full_like(q, torch.nan, device=device), q.to(device)
    layer.attend_chunks(given, cache, Chunks.of(requests, table, Workspace()), Rules(0.125), found)  # compiles
    with unsynchronised():
        layer.attend_chunks(given, cache, Chunks.of(requests, table, Workspace()), Rules(0.125), found)
    for _, first, last, length in requests:
        right = plain.attend(q[first:last], want, ROW, length, Rules(0.125))
        torch.testing.assert_close(
            found[first:last].cpu(), right, rtol=0, atol=4e-3 if dtype == torch.float16 else 2e-2
        )


@pytest.mark.parametrize("rules", WINDOWS)
@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-4:sink=3", "hqmq-s24_r3"])
def test_windows_and_soft_caps(spec: str, rules: str) -> None:
    """Blocks before a window belong to nobody, or to others: they are not read. Soft caps by vLLM's flash attention."""
    device, rule = torch.device("cuda"), WINDOWS[rules]
    layer, plain = made(spec, device=device), made(spec)
    if rule.seen.softcap:
        layer.flash = flash_for(DIM, True)
        if layer.flash is None:
            pytest.skip("vLLM, whose flash attention has a soft cap, is not installed")
    want, (k, v) = pool(plain), rows()
    plain.write(k, v, want, slots(0, TOKENS))
    cache, requests, begin = want.to(device), [], 0
    freed = ROW.repeat(len(REQUESTS), 1)
    for row, (new, length) in enumerate(REQUESTS):
        requests.append((row, begin, begin + new, length))
        begin += new
        if rule.seen.window:
            freed[row, : max(0, length - new - rule.seen.window + 1) // cache.shape[2]] = 0
    layer.engine(cache.shape[2])
    assert layer.takes_chunks(rule)
    q = torch.randn(begin, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
    given, table, sight = q.to(device), freed.to(device), Sight(rule.seen.window, cache.shape[2])
    on_device = rule if rule.sinks is None else rule._replace(sinks=rule.sinks.to(device))
    found = torch.full_like(given, torch.nan)
    layer.attend_chunks(given, cache, Chunks.of(requests, table, Workspace(), sight), on_device, found)  # compiles
    with unsynchronised():
        layer.attend_chunks(given, cache, Chunks.of(requests, table, Workspace(), sight), on_device, found)
    for _, first, last, length in requests:
        right = plain.attend(q[first:last], want, ROW, length, rule)
        torch.testing.assert_close(found[first:last].cpu(), right, rtol=0, atol=4e-3)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("spec", ["saw-int4", "int-8", "octopus-3:window=0", "hqmq-s24_r3"])
def test_several_queries_of_a_request_in_a_graph(spec: str, group: int) -> None:
    """Captured with as many queries of each request as may be, and replayed with fewer."""
    device, counts, lengths = torch.device("cuda"), [4, 1, 0, 3], [TOKENS, 17, 0, 3]
    layer, plain = made(spec, device=device), made(spec)
    want, (k, v) = pool(plain), rows()
    plain.write(k, v, want, slots(0, TOKENS))
    cache, rules, heads = want.to(device), Rules(0.125), group * HEADS
    table = torch.zeros(4, 6, dtype=torch.int32)
    table[[0, 1, 3], :5] = ROW
    q = torch.randn(16, heads, DIM, generator=torch.Generator().manual_seed(3)).half()
    starts, totals = torch.arange(0, 17, 4, dtype=torch.int32, device=device), torch.zeros(4, dtype=torch.int32)
    given, held, seen = q.to(device), table.to(device), totals.to(device)
    layer.engine(cache.shape[2])
    size = layer.workspace_bytes(4, 4 * heads, cache, 6, rules)
    space = torch.full((-(-size // 4),), torch.nan, device=device)
    several = StepTokens(cache, held, seen, workspace=space, starts=starts, queries=4, longest=2 * TOKENS)
    layer.decode(given, several, rules)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.decode(given, several, rules)
    starts.copy_(torch.tensor([0, *counts]).cumsum(0).int())
    seen.copy_(torch.tensor(lengths, dtype=torch.int32))
    graph.replay()
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for i in range(count):
            at = slice(sum(counts[:row]) + i, sum(counts[:row]) + i + 1)
            right = plain.attend(q[at], want, table[row], length - count + 1 + i, rules)
            torch.testing.assert_close(found[at].cpu(), right, rtol=0, atol=4e-3)
