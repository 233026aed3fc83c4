"""The operators around the CUDA kernels, complete: on CPU tensors, with what they launch run by the emulator.

Their programs are compiled by g++; the launches that they would make on a GPU are made there, with the same structs.
"""

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
from packedkv.kernels.cuda import launch
from packedkv.kernels.tokens import Rules, StepTokens
from packedkv.layout import PageLayout
from packedkv.store.pages import PageStore

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
