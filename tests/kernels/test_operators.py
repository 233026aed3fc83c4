"""The operators around the CUDA kernels, complete: on CPU tensors, with what they launch run by the emulator.

Their programs are compiled by g++; the launches that they would make on a GPU are made there, with the same structs.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.attention import Seen
from packedkv.codec import ROLES, Codec, Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels import spec as specs
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda import encode, launch
from packedkv.kernels.tokens import Rules, StepTokens
from packedkv.layout import PageLayout
from packedkv.store.pages import PageStore
from tests.kernels.decode_cases import each_in_turn

CPU = torch.device("cpu")
SAW = packedkv.get("saw-int4:rotate=kv")


def reference(q: Tensor, k: Tensor, v: Tensor, dense: tuple[Tensor, Tensor] | None, lens: Any, start: Any, sinks: Any,
              softcap: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in float64: output [B, HQ, 1, D] and log-sum-exp."""
    b, hq, _, d = q.shape
    group = hq // k.shape[1]
    out, lse = torch.zeros(b, hq, 1, d, dtype=torch.float64), torch.full((b, hq), -torch.inf, dtype=torch.float64)
    for i in range(b):
        keys, values = (x[i, :, start[i] : lens[i]].double() for x in (k, v))
        if dense is not None:
            keys, values = (torch.cat([x, y[i].double()], 1) for x, y in zip((keys, values), dense, strict=True))
        for n in range(hq):
            s = keys[n // group] @ q[i, n, 0].double() * d**-0.5
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if sinks is not None:
                s = torch.cat([s, sinks[n : n + 1].double()])
            if len(s):
                p = s.softmax(0)
                lse[i, n] = s.logsumexp(0)
                out[i, n, 0] = p[: values.shape[1]] @ values[n // group]
    return out, lse


def fill(key: Codec, value: Codec, dim: int, heads: int, lens: list[int], page: int) -> tuple[Any, ...]:
    """Pages in a random order with encoded random tokens; also the decoded keys and values, and the constants."""
    rng = torch.Generator().manual_seed(1)
    b, tokens = len(lens), -(-max(lens) // page) * page
    layout = PageLayout(key.layout(dim), value.layout(dim), page)
    store = PageStore(layout, b, heads, CPU, tokens)
    store.table = torch.randperm(store.pages.shape[0], generator=rng).to(torch.int32).view_as(store.table)
    params, decoded = {}, []
    for role, codec in zip(ROLES, (key, value), strict=True):
        x = torch.randn(b, heads, tokens, dim, generator=rng)
        site = Site(0, role, heads, dim)
        params[role] = codec.fit(site, Sample(x))
        payload = codec.encode(codec.to_code(x, params[role]), params[role])
        store.write(role, 0, payload)
        decoded.append(codec.from_code(codec.decode(payload, params[role]), params[role]))
    return store, params, decoded


@pytest.mark.parametrize("case", ["plain", "split", "everything", "override"])
def test_decode_attention_complete(case: str, machine: dict[str, Any]) -> None:
    """Strides, page tables, lengths of 0, dense tokens, sinks, soft cap, launch constants given."""
    dim, heads, group, page = 64, 2, 3, 64
    lens, start = ([100, 0, 37], [0, 0, 0]) if case != "everything" else ([130, 5, 64], [17, 5, 0])
    store, params, (k, v) = fill(SAW.key, SAW.value, dim, heads, lens, page)
    pair = specs.decode_spec(SAW.key, SAW.value, dim, page)
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(3, 1, heads * group, dim, generator=rng).transpose(1, 2)  # as a model's projection leaves it
    options: dict[str, Any] = {}
    more: dict[str, Any] = {}
    dense, sinks, softcap = None, None, 0.0
    if case == "split":
        options["config"] = launch.Config(32, 2, 2, 1, 3)
    if case == "override":
        options["config"] = launch.Config(16, 1, 2, 1, 1)
    if case == "everything":
        dense = tuple(torch.randn(3, heads, 7, dim, generator=rng).bfloat16() for _ in ROLES)
        sinks = torch.randn(heads * group, generator=rng).bfloat16()
        options["config"] = launch.Config(32, 2, 3, 1, 2)
        more = {"dense_k": dense[0], "dense_v": dense[1], "start": torch.tensor(start, dtype=torch.int32)}
        softcap = 20.0
    got, lse = attention.decode_attention(
        q,
        StepTokens(store.pages, store.table, torch.tensor(lens, dtype=torch.int32), **more),
        Rules(dim**-0.5, Seen(softcap=softcap), sinks),
        spec=specs.text_of(pair),
        key=constants_for(pair.key, params["key"], heads, dim),
        value=constants_for(pair.value, params["value"], heads, dim),
        **options,
    )
    want, want_lse = reference(q, k, v, dense, lens, start, sinks, softcap)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=3e-3)
    chosen = options.get("config") or launch.config_for(pair, 6, store.table.shape[1] * page, launch.H200)
    slots = chosen.splits + (dense is not None)
    grid, threads, shared, early = machine["kv_decode"].launches[0]
    assert (grid, threads, early) == ((slots, heads, 3), chosen.warps * 32, False)
    assert shared == launch.shared_bytes(pair, chosen)
    merged = [launch[0] for launch in machine["kv_combine"].launches]
    assert merged == ([(3 * heads * group, 1, 1)] if slots > 1 else [])


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_teams_that_share_tables(stages: int, machine: dict[str, Any]) -> None:
    """Their query lies in the ring; the host counts the same shared memory as the program, which asserts it."""
    made, dim, heads, group, page, lens = packedkv.get("hqmq-s48_r4"), 64, 2, 3, 64, [130, 0, 37, 64, 1]
    store, params, (k, v) = fill(made.key, made.value, dim, heads, lens, page)
    pair = specs.decode_spec(made.key, made.value, dim, page)
    q = torch.randn(len(lens), heads * group, 1, dim, generator=torch.Generator().manual_seed(2))
    config = launch.Config(16, 2, stages, 1, 1, 2)
    key, value = (constants_for(s, params[r], heads, dim) for s, r in zip((pair.key, pair.value), ROLES, strict=True))
    got, lse = attention.decode_attention(
        q, StepTokens(store.pages, store.table, torch.tensor(lens, dtype=torch.int32)), Rules(dim**-0.5),
        spec=specs.text_of(pair), key=key, value=value, config=config,
    )  # fmt: skip
    want, want_lse = reference(q, k, v, None, lens, [0] * len(lens), None, 0.0)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=3e-3)
    ((_, threads, shared, early),) = machine["kv_decode"].launches
    assert (threads, early) == (4 * 32, True)
    assert shared == max(launch.shared_bytes(pair, config, heads=4), launch.H200.shared_sm // 2)


@pytest.mark.parametrize(("spec", "teams"), [("hqmq-s48_r4", 2), ("int-4", 1)])
def test_launch_constants_without_room_are_refused(spec: str, teams: int, machine: dict[str, Any]) -> None:
    """Before anything is compiled: what is launched with less writes over its neighbours, or faults."""
    made, dim, heads = packedkv.get(spec), 64, 2
    store, params, _ = fill(made.key, made.value, dim, heads, [64], 64)
    pair = specs.decode_spec(made.key, made.value, dim, 64)
    config = launch.Config(64, 8, 16, 1, 1, teams)
    need = launch.shared_bytes(pair, config, heads=4)
    assert need > launch.H200.shared_block
    key, value = (constants_for(s, params[r], heads, dim) for s, r in zip((pair.key, pair.value), ROLES, strict=True))
    text = rf"Config\(tile=64, .* needs {need} bytes of shared memory in a block; this GPU has 232448\. Give fewer"
    with pytest.raises(UnsupportedError, match=text):
        attention.decode_attention(
            torch.zeros(1, heads, 1, dim), StepTokens(store.pages, store.table, torch.tensor([64], dtype=torch.int32)),
            Rules(1.0), spec=specs.text_of(pair), key=key, value=value, config=config,
        )  # fmt: skip
    assert "kv_decode" not in machine


def test_more_than_eight_query_heads_take_two_tiles(machine: dict[str, Any]) -> None:
    store, params, (k, v) = fill(SAW.key, SAW.value, 64, 1, [50], 64)
    pair = specs.decode_spec(SAW.key, SAW.value, 64, 64)
    q = torch.randn(1, 11, 1, 64, generator=torch.Generator().manual_seed(3)).half()
    tensors = constants_for(pair.key, params["key"], 1, 64)
    got, _ = attention.decode_attention(
        q, StepTokens(store.pages, store.table, torch.tensor([50], dtype=torch.int32)), Rules(64**-0.5),
        spec=specs.text_of(pair), key=tensors, value=tensors,
    )  # fmt: skip
    assert machine["kv_decode"].launches[0][0][1:] == (2, 1)
    assert got.dtype == torch.float16
    want, _ = reference(q, k, v, None, [50], [0], None, 0.0)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-3)


WRITTEN = (
    *("int-3", "int-4:group=32", "int-3:symmetric=true", "fp8", "fp8:scale=none", "saw-int4", "kivi-2", "innerq-base"),
    *("saw-int4:rotate=kv,zero=float", "innerq-hybrid", "innerq-base:symmetric=full", "ultraquant"),
    *("ultraquant:scale=real", "ultra-tq", "dense", "dense:dtype=bfloat16", "turboquant-3", "turboquant-qjl-3"),
    *("octopus-3", "octopus-qjl-2", "hqmq-s24_r3", "hqmq-s24_r3:outliers=3", "kivi-g64-3", "kivi-tq-3"),
    # other numbers of bits; the encoders' own tests have them too
    *(pytest.param(x, marks=pytest.mark.wide) for x in ("int-2", "int-4", "int-8", "kivi-4", "innerq-small")),
)


@pytest.mark.parametrize("spec", WRITTEN)
def test_encode_to_pages_complete(spec: str, machine: dict[str, Any]) -> None:
    """The reference's bytes in the right slots, nothing elsewhere, from tensors that are views."""
    scheme, dim, heads = packedkv.get(spec), 64, 2
    unit, page = math.lcm(scheme.key.block_tokens, scheme.value.block_tokens), scheme.page_layout(dim).page_tokens
    tokens, first = max(64, unit) if unit > 1 else 37, max(32, unit)
    store, (target, given, params) = target_of(scheme, dim, heads, 2, first + tokens, page)
    before = store.pages.clone()
    x = torch.randn(2, 6 + tokens, 2, heads, dim, generator=torch.Generator().manual_seed(5)).half()
    rows = [x[:, 6:, i].transpose(1, 2) for i in range(2)]  # [B, H, N, D], strided
    bad = torch.zeros(1, dtype=torch.int32)
    encode.encode_to_pages(
        *(part if target.encoder(role) else None for role, part in zip(ROLES, rows, strict=True)),
        store.pages,
        store.table,
        torch.full((2,), first, dtype=torch.int32),
        spec=specs.text_of(target),
        key=given["key"],
        value=given["value"],
        bad=bad,
    )
    expected = PageStore(store.layout, 2, heads, CPU)
    expected.pages, expected.table = before, store.table
    for role, part in zip(ROLES, rows, strict=True):
        if target.encoder(role):
            codec = scheme.codec(role)
            expected.write(role, first, codec.encode(codec.to_code(part.float(), params[role]), params[role]))
    assert torch.equal(store.pages, expected.pages)
    assert not bad.item()
    assert target.key is not None or target.value is not None


def target_of(scheme: Any, dim: int, heads: int, batch: int, capacity: int, page: int) -> Any:
    """Pages full of 0xA5, their target, and the constants of both roles."""
    layout = PageLayout(scheme.key.layout(dim), scheme.value.layout(dim), page)
    store = PageStore(layout, batch, heads, CPU, capacity)
    store.pages.fill_(0xA5)
    rng = torch.Generator().manual_seed(6)
    store.table = torch.randperm(store.pages.shape[0], generator=rng).to(torch.int32).view_as(store.table)
    target = specs.encode_spec(scheme.key, scheme.value, dim, page)
    params, given = {}, {}
    for role in ROLES:
        codec = scheme.codec(role)
        sample = torch.randn(batch, heads, 40, dim, generator=rng) if "tensor" in codec.needs else None
        params[role] = codec.fit(Site(0, role, heads, dim), Sample(sample))
        side = target.encoder(role)
        given[role] = Constants(None, None, 1) if side is None else constants_for(side, params[role], heads, dim)
    return store, (target, given, params)


READ = (
    *("dense", "dense:dtype=bfloat16", "saw-int4", "int-4", "kivi-2", "innerq-hybrid", "fp8", "ultraquant", "ultra-tq"),
    *("ultraquant:scale=real", "turboquant-3", "octopus-3", "hqmq-s24_r3", "kivi-g64-3", "kivi-tq-4"),
)
"""As many readers as there are ways of the host to serve them; every reader has tests of its own."""


@pytest.mark.parametrize(("spec", "dim"), each_in_turn(READ, (64, 96)))
def test_every_way_to_read_complete(spec: str, dim: int, machine: dict[str, Any]) -> None:
    scheme, heads = packedkv.get(spec), 2
    page = scheme.page_layout(dim).page_tokens
    pair = specs.decode_spec(scheme.key, scheme.value, dim, page)
    store, params, (k, v) = fill(scheme.key, scheme.value, dim, heads, [75, 33], page)
    q = torch.randn(2, 4, 1, dim, generator=torch.Generator().manual_seed(8))
    given = [
        constants_for(side, params[role], heads, dim) for side, role in zip((pair.key, pair.value), ROLES, strict=True)
    ]
    got, _ = attention.decode_attention(
        q, StepTokens(store.pages, store.table, torch.tensor([75, 33], dtype=torch.int32)), Rules(dim**-0.5),
        spec=specs.text_of(pair), key=given[0], value=given[1], config=launch.Config(32, 2, 2, 1, 1),
    )  # fmt: skip
    want, _ = reference(q, k, v, None, [75, 33], [0, 0], None, 0.0)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-3)


@pytest.mark.parametrize("spec", ["int-4", "kivi-2", "ultra-tq"])
def test_what_cannot_be_stored_is_flagged(spec: str, machine: dict[str, Any]) -> None:
    """A row of NaN becomes zero bytes and a flag of 1; tokens behind the capacity are dropped and make it 2."""
    scheme = packedkv.get(spec)
    store, (target, given, _) = target_of(scheme, 64, 1, 1, 64, 64)
    bad = torch.zeros(1, dtype=torch.int32)
    x = torch.randn(1, 1, 32, 64, generator=torch.Generator().manual_seed(7))
    x[0, 0, 3, 5] = torch.nan

    def put(first: int) -> int:
        parts = (x if target.encoder(role) else None for role in ROLES)
        encode.encode_to_pages(
            *parts, store.pages, store.table, torch.tensor([first], dtype=torch.int32), spec=specs.text_of(target),
            key=given["key"], value=given["value"], bad=bad,
        )  # fmt: skip
        return int(bad)

    assert put(0) == 1
    for role in ROLES:
        if target.encoder(role):
            held = store.read(role, 0, 32)
            for part in held.values():  # [B, H, blocks, *shape]
                row = part[0, 0, 3 if part.shape[2] == 32 else 0]
                assert not row.view(torch.uint8).any()
    held = store.pages.clone()
    assert put(64) == 2
    assert torch.equal(store.pages, held)
