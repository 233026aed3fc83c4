"""Layers that encode tokens in groups, over pages that somebody else owns: bytes, and what every token reads."""

import math
from typing import Any

import pytest
import torch

import packedkv
from packedkv.attention import Seen
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Role, roundtrip
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.pending import PendingGroups
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
    attend = layer.prefill_own if kernels else layer.attend_own
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
