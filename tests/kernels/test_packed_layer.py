"""An engine's layer on kernels against the same layer on the codecs: kernels of GPUs, emulated too, and of CPUs."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.attention import Seen
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import ROLES, Dense, Params, Role, Sample, Site
from packedkv.errors import ShapeError
from packedkv.integrations.vllm.flash import flash_for
from packedkv.integrations.vllm.layer import EngineLayer, visible
from packedkv.integrations.vllm.servable import group_tokens
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.engine import CpuEngine
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.prefill import Chunks, Sight, Workspace, gathered
from packedkv.kernels.flash import Ragged, ragged_attention
from packedkv.kernels.tokens import Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.scheme import KVScheme
from packedkv.store.site import LayerSite, MeanRemoval
from tests.integrations.test_serving import BLOCK, CPU, DIM, HEADS, ROW, RULES, TOKENS, made, pool, refusal, rows, slots
from tests.kernels.conftest import Server, by, normal, unsynchronised

SPECS = ["int-8", "turboquant-4", "hqmq-s24_r3", "octopus-3:window=0", "ultra-tq", "ultraquant"]
SUNK = ["int-8:sink=3", "turboquant-4:sink=3"]
"""With first tokens in 16 bit: values that join the codes' sums, and values that are rotated."""


def bare(name: str) -> str:
    """A preset without the dense tokens that a server does not keep, and without a fit."""
    scheme = packedkv.get(name)
    options = [f"{option}=0" for option in ("window", "sink") if getattr(scheme, option)]
    options += ["norm=false"] if name.startswith(("innerq-base", "innerq-small")) else []
    return name + ":" * bool(options) + ",".join(options)


SERVED = [spec for spec in map(bare, packedkv.presets()) if not refusal(packedkv.get(spec).for_layer(3, 8), DIM)]
"""All that a server serves."""
READ = [s for s in SERVED if not packedkv.kernels.choose.refusal(packedkv.get(s).for_layer(3, 8), DIM, CPU)]
"""Those that the CPU kernels read."""
ALONE = [s for s in READ if group_tokens(packedkv.get(s).for_layer(3, 8)) == 1]
CPU_SUNK = ["saw-int4:sink=4", "turboquant-4:sink=3", "octopus-3:window=0,sink=1"]
"""With first tokens in 16 bit."""


GPU = ("saw-int4", "int-4", "octopus-3:window=0", "hqmq-s24_r3", "turboquant-4:sink=3", "ultra-tq", "fp8")


def test_every_method_with_readers_is_served() -> None:
    assert len(READ) >= 40
    left = {s.partition(":")[0].partition("-")[0] for s in SERVED} - {s.partition("-")[0] for s in READ}
    assert left == {"additive", "e8", "kvarn", "polarquant"}


def test_why_the_reference_serves(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unserved(spec: str) -> str:
        layer = made(spec)
        layer.find_kernels(BLOCK)
        return layer.unserved

    assert unserved("saw-int4") == ""
    assert unserved("polarquant-3").startswith("polarquant-3: no CPU kernel reads PolarQuant")
    monkeypatch.setattr(library, "chosen", lambda: Path("missing.so"))
    assert "the CPU kernels are not compiled (missing.so is missing)" in unserved("saw-int4")


def filled(layer: EngineLayer) -> Tensor:
    cache, (k, v) = pool(layer), rows()
    layer.write(k.to(layer.dtype), v.to(layer.dtype), cache, slots(0, TOKENS), torch.arange(TOKENS)[None])
    return cache


def three() -> tuple[Tensor, Tensor]:
    """Block table, as wide as the longest request may get, and lengths: one request is padding without tokens."""
    table = torch.zeros(3, 6, dtype=torch.int32)
    table[0, :5], table[2, :5] = ROW, ROW
    return table, torch.tensor([TOKENS, 0, 17], dtype=torch.int32)


def removal(kind: str, dim: int = DIM, scaling: float = 1.0) -> MeanRemoval | None:
    """A large mean of keys before or after RoPE."""
    rotary = Rotary(1e4 ** -(torch.arange(dim // 2) / (dim // 2)), scaling) if kind == "pre" else None
    return None if kind == "none" else MeanRemoval(kind, rotary, 4 * normal(1, HEADS, dim, seed=3))  # type: ignore[arg-type]


def workspace(layer: EngineLayer, requests: int, heads: int, cache: Tensor, rules: Rules) -> Tensor:
    size = layer.workspace_bytes(requests, heads, cache, 6, rules)
    return torch.full((-(-size // 4),), torch.nan, device=cache.device)


@by("spec", cuda=SPECS + SUNK, cpu=ALONE + CPU_SUNK, gpu=GPU)
def test_kernels_write_the_codecs_bytes(spec: str, served_by: Server) -> None:
    """A prompt cut anywhere, single tokens of a batch in any order, and none where a token has no slot."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    if served_by.name != "cpu" or spec not in ("saw-int4", "dense", "saw-int4:sink=4"):
        dtypes = dtypes[: 1 + (served_by.name == "gpu")]
    for dtype in dtypes:
        layer, device = made(spec, dtype=dtype, device=served_by.device), served_by.device
        want = filled(made(spec, dtype=dtype))
        found, (k, v) = pool(layer).to(device), (x.to(device, dtype) for x in rows())
        for first, last in ((0, 1), (1, 20), (20, 41)):
            layer.encode_chunk(k[first:last], v[first:last], found, ROW.to(device), last)
        order = 41 + torch.randperm(TOKENS - 41, generator=torch.Generator().manual_seed(1))
        where = torch.cat([slots(0, TOKENS)[order], torch.tensor([-1, -1])]).to(device)
        padded = torch.cat([order, order[:2]]).to(device)  # the last two are padding of a captured batch
        new = k[padded], v[padded]
        if served_by.name == "gpu":
            layer.pool(found)  # compiles
        with unsynchronised() if served_by.name == "gpu" else nullcontext():
            layer.encode(*new, found, where)
        assert torch.equal(found.cpu(), want)


@by("spec", cuda=["saw-int4", "fp8", "dense", "int-8:sink=3", "bfloat16 beside int-8"], cpu=["saw-int4", "dense"])
def test_float32_tokens_are_encoded_as_caches_hold_them(spec: str, served_by: Server) -> None:
    """Rounded to 16 bit first, as by the codecs; what cannot be stored is zero bytes."""
    if spec == "bfloat16 beside int-8":
        scheme = KVScheme(Dense("bfloat16"), packedkv.get("int-8").value)
        layer = EngineLayer(scheme, layer=3, heads=HEADS, head_dim=DIM, dtype=torch.float32, device=CPU)
    else:
        layer = made(spec, dtype=torch.float32)
    k, v = normal(2, TOKENS, HEADS, DIM, seed=5)
    k[3, 1, 7], v[9, 0, 2], v[7, 1, 1] = 65519.0, 65520.0, 65510.0  # the second rounds to no fp16 number
    k[5, 1, 3], v[6, 0, 2] = torch.nan, 1e6
    found, want = pool(layer), pool(layer)
    layer.write(k, v, want, slots(0, TOKENS))
    layer.encode(k, v, found, slots(0, TOKENS))
    assert torch.equal(found, want)


@pytest.mark.parametrize("rules", RULES)
@by("spec", cuda=["int-8", "ultraquant", "octopus-qjl-2:window=0", *SUNK], cpu=ALONE + CPU_SUNK)
def test_attention_is_the_references(spec: str, rules: str, served_by: Server) -> None:
    """Three requests in one pool, and a prompt's chunks; pages may be freed."""
    layer, rule = made(spec), RULES[rules]
    cache, near, (table, lengths) = filled(layer), 4e-3 if served_by.name == "cuda" else 2e-3, three()
    if rule.seen.window and rule.seen.window < TOKENS - 2 * BLOCK:
        table[0, :2] = 0
    q = normal(3, 2 * HEADS, DIM, seed=3).half()
    space = workspace(layer, 4, 2 * HEADS, cache, rule) if served_by.name == "cuda" else None
    fields = visible(lengths, layer.sink, rule.seen.window)
    found = layer.decode(q, StepTokens(cache, table, lengths, workspace=space, **fields), rule)
    for i in (0, 2):
        want = layer.attend(q[i : i + 1], cache, table[i], int(lengths[i]), rule)
        torch.testing.assert_close(found[i : i + 1], want, rtol=near, atol=near)
    assert bool((found[1] == 0).all())
    for n, length in ((1, TOKENS), (7, 41), (16, 16), (TOKENS, TOKENS)):
        q = normal(n, 2 * HEADS, DIM, seed=n).half()
        found = layer.prefill(q, cache, ROW, length, rule)
        torch.testing.assert_close(found, layer.attend(q, cache, ROW, length, rule), rtol=near, atol=near)
    assert isinstance(layer.engine(BLOCK), CudaEngine if served_by.name == "cuda" else CpuEngine)


@pytest.mark.parametrize("group", [1, 2, 4])
@by("spec", cuda=["saw-int4", *SPECS], gpu=["saw-int4", "int-8", "octopus-3:window=0", "hqmq-s24_r3"])
def test_several_queries_of_a_request(spec: str, group: int, served_by: Server) -> None:
    """What each of them reads as a sequence of its own; a request without queries is padding of a captured batch.

    On a GPU a graph is captured with as many queries of each request as may be, and replayed with fewer.
    """
    device, heads, counts, totals = served_by.device, group * HEADS, [4, 1, 0, 3, 2], [TOKENS, 17, 0, 3, 43]
    layer, plain = made(spec, device=device), made(spec)
    want, sinks, logits = filled(plain), torch.randn(heads), Rules(0.125)
    cache, rules = want.to(device), logits._replace(sinks=sinks.to(device))
    table = torch.zeros(5, 6, dtype=torch.int32)
    table[[0, 1, 3, 4], :5] = ROW
    q = normal(20, heads, DIM, seed=3).half()
    begins, lengths = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(totals, dtype=torch.int32)
    assert layer.engine(cache.shape[2])
    assert layer.takes_several(rules)
    space = workspace(layer, 5, 4 * heads, cache, rules)
    several = StepTokens(cache, table.to(device), lengths.to(device), workspace=space, queries=4, longest=68)
    if served_by.name == "gpu":
        starts, given = torch.arange(0, 21, 4, dtype=torch.int32, device=device), q.to(device)
        several = several._replace(starts=starts, seq_lens=torch.zeros_like(several.seq_lens))
        layer.decode(given, several, rules)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer.decode(given, several, rules)
        starts.copy_(begins)
        several.seq_lens.copy_(lengths)
        graph.replay()
    else:
        found = layer.decode(q[: sum(counts)], several._replace(starts=begins), rules)
    for row, (count, length) in enumerate(zip(counts, totals, strict=True)):
        for i in range(count):
            at = slice(int(begins[row]) + i, int(begins[row]) + i + 1)
            end = min(length - count + 1 + i, several.longest)
            right = plain.attend(q[at], want, table[row], end, logits._replace(sinks=sinks))
            torch.testing.assert_close(found[at].cpu(), right, rtol=0, atol=4e-3)


class EngineFlash:
    """Stands for vLLM's: causal attention of the newest tokens of each sequence, with its log-sum-exp."""

    def __init__(self) -> None:
        self.calls: list[Ragged] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float, softcap: float, out: Tensor
    ) -> Tensor:
        assert int(ragged.queries[-1]) == len(q)
        assert int(ragged.keys[-1]) == len(k) == len(v)
        self.calls.append(ragged)
        return ragged_attention(q, k, v, ragged, scale, softcap, out)


REQUESTS = [(TOKENS, TOKENS)], [(1, TOKENS)], [(7, 41), (16, 16), (1, TOKENS), (3, 3)]
"""New tokens, and all tokens, of the requests of a step."""


LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0])
WINDOWS = {
    "one": Rules(0.125, Seen(window=1)),
    "short": Rules(0.125, Seen(window=9, softcap=2.0)),
    "pages": Rules(0.125, Seen(window=32)),
    "long": Rules(0.125, Seen(window=45), sinks=LOGITS),
    "soft cap": Rules(0.125, Seen(softcap=2.0)),
}


@by(
    "spec, dtype, rules",
    cuda=[
        *((s, torch.float16, "sinks") for s in ("int-8", "saw-int4", "turboquant-4", "hqmq-s24_r3", "ultra-tq", *SUNK)),
        *((spec, torch.bfloat16, "plain") for spec in ("saw-int4", "hqmq-s24_r3", "turboquant-4:sink=3")),
        *(("saw-int4", torch.float16, rules) for rules in WINDOWS),
        *((s, torch.float16, r) for s in ("turboquant-4:sink=3", "saw-int4:mean=pre") for r in ("one", "pages")),
    ],
    gpu=[
        *((spec, dtype, "plain") for spec in GPU for dtype in (torch.float16, torch.bfloat16)),
        *((s, torch.float16, r) for s in ("saw-int4", "turboquant-4:sink=3", "hqmq-s24_r3") for r in WINDOWS),
    ],
)
def test_chunks_of_many_requests_at_once(spec: str, dtype: torch.dtype, rules: str, served_by: Server) -> None:
    """One launch for each stage, and the output of each request alone; soft caps on a GPU by vLLM's flash attention.

    Blocks before a window belong to nobody, or to others: they are not read.
    """
    rule, device = {**WINDOWS, "plain": Rules(0.125), "sinks": Rules(0.125, sinks=LOGITS)}[rules], served_by.device
    mean, flash, gpu = removal("pre" if "mean" in spec else "none"), EngineFlash(), served_by.name == "gpu"
    layer, plain = (made(spec, mean=mean, dtype=dtype, device=at) for at in (device, CPU))
    if not gpu or rule.seen.softcap:
        layer.flash = flash_for(DIM, True) if gpu else flash
        if layer.flash is None:
            pytest.skip("vLLM, whose flash attention has a soft cap, is not installed")
    want = filled(plain)
    cache, on_device = want.to(device), rule._replace(sinks=None if rule.sinks is None else rule.sinks.to(device))
    layer.engine(cache.shape[2])
    assert layer.takes_chunks(rule)
    for given in REQUESTS:
        requests, begin, calls = [], 5, len(flash.calls)
        table = torch.cat([torch.zeros(1, 5, dtype=torch.int32), ROW.expand(len(given), -1)])
        freed = table.clone()  # what the engine has given to others: block 0 is not written
        for row, (new, length) in enumerate(given, 1):
            requests.append((row, begin, begin + new, length))
            begin += new
            freed[row, : max(0, length - new - rule.seen.window + 1) // cache.shape[2] if rule.seen.window else 0] = 0
        q, freed = normal(begin - 5, 2 * HEADS, DIM, seed=3).to(dtype), freed.to(device)
        found = torch.full((len(q), 3, 2 * HEADS, DIM), torch.nan, dtype=dtype, device=device)[:, 1]
        before, queries = served_by.counted(), q.to(device)
        for context in [nullcontext(), *[unsynchronised()] * gpu]:  # on a GPU the first call compiles
            with context:
                chunks = Chunks.of(requests, freed, Workspace(), Sight(rule.seen.window, cache.shape[2]))
                layer.attend_chunks(queries, cache, chunks, on_device, found)
        if not gpu:
            launched = {name: count - before.get(name, 0) for name, count in served_by.counted().items()}
            assert (launched["kv_unpack"], len(flash.calls) - calls) == (1, 1)
            assert launched.get("kv_basis", 0) <= 2 + (layer.sink > 0)
        assert (chunks.first, chunks.last) == (5, begin)
        near = 2e-2 if dtype == torch.bfloat16 else 6e-3 if mean else 4e-3
        for row, first, last, length in requests:
            part = slice(first - 5, last - 5)
            right = plain.attend(q[part], want, table[row], length, rule)
            torch.testing.assert_close(found[part].cpu(), right, rtol=0, atol=near)


def fitted(spec: str, kind: str, dim: int = DIM) -> tuple[EngineLayer, MeanRemoval | None, Tensor, Tensor]:
    """A layer with constants and a mean as from a file; tokens ``[T, H, D]`` without that mean."""
    x = normal(1, HEADS, 1, dim, seed=1).exp() * normal(1, HEADS, 300, dim, seed=2)
    params: dict[Role, Params] = {}
    for role in ROLES:
        codec = packedkv.get(spec).codec(role)
        params[role] = codec.settle([codec.fit(Site(3, role, HEADS, dim, 0, CPU), Sample(x, x.flip(2)))])[0]
    k, v = (x[0, :, at : at + TOKENS].transpose(0, 1).contiguous() for at in (0, TOKENS))
    mean = removal(kind, dim, 1.2 if dim == DIM else 1.0)
    spec = f"{spec}{',' if ':' in spec else ':'}mean={kind}"
    return made(spec, params=params, mean=mean, head_dim=dim), mean, k, v


def apart(found: Tensor, right: Tensor) -> float:
    """Relative difference, NaN if there is one."""
    return float((found - right).float().norm() / right.float().norm())


@pytest.mark.parametrize("kind", ["pre", "post", "none"])
@pytest.mark.parametrize(
    "spec",
    [
        *("saw-int4", "turboquant-4", "ghost-3:transform=channels", "ghost-3:transform=klt"),
        "ghost-2:transform=klt,sink=0,bits=2.5",
    ],
)
def test_keys_without_their_mean_and_constants_of_a_file(spec: str, kind: str, served_by: Server) -> None:
    """A prompt cut anywhere, tokens of several requests in any order and padding; attention of steps and of chunks."""
    layer, mean, k, v = fitted(spec, kind)
    if mean is not None:
        k = k + mean.at(mean.given, torch.arange(TOKENS)[None])[0].transpose(0, 1)
    k, v, want, cache, rule = k.half(), v.half(), pool(layer), pool(layer), Rules(0.125)
    layer.write(k, v, want, slots(0, TOKENS), torch.arange(TOKENS)[None])
    for first, last in ((0, 1), (1, 20), (20, 50)):
        layer.encode_chunk(k[first:last], v[first:last], cache, ROW, last)
    order = 50 + torch.randperm(TOKENS - 50, generator=torch.Generator().manual_seed(2))
    where, padded = torch.cat([slots(0, TOKENS)[order], torch.tensor([-1, -1])]), torch.cat([order, order[:2]])
    layer.encode(k[padded], v[padded], cache, where, padded[None])
    assert torch.equal(cache, want)
    if mean is not None:
        with pytest.raises(ShapeError, match="the positions of new tokens are needed"):
            layer.encode(k[:1], v[:1], cache, slots(0, 1))
    store = LayerCache(LayerSite(layer.scheme, 3, mean=mean, fitted=layer.site.fitted))
    store.append(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    (table, lengths), q = three(), normal(24, 2 * HEADS, DIM, seed=3).half()
    for window in (0, 9):
        own = rule._replace(seen=Seen(window=window))
        found = layer.decode(q[:3], StepTokens(cache, table, lengths, **visible(lengths, layer.sink, window)), own)
        assert bool((found[1] == 0).all())
        for i in (0, 2):
            assert apart(found[i : i + 1], layer.attend(q[i : i + 1], cache, table[i], int(lengths[i]), own)) < 0.004
    right = attend(q[:7].transpose(0, 1)[None], store, scale=0.125)[0].transpose(0, 1)
    assert apart(layer.attend(q[:7], cache, ROW, TOKENS, rule), right) < 0.004
    requests = [(0, 0, 7, 41), (1, 7, 23, 16), (2, 23, 24, TOKENS)]
    if served_by.name == "cuda":
        before, out = served_by.counted(), torch.full_like(q, torch.nan)
        layer.attend_chunks(q, cache, Chunks.of(requests, ROW.expand(3, -1).contiguous(), Workspace()), rule, out)
        assert served_by.counted()["kv_unpack"] == before.get("kv_unpack", 0) + 1
    else:
        out = torch.cat([layer.prefill(q[a:b], cache, ROW, length, rule) for _, a, b, length in requests])
    for _, first, last, length in requests:
        assert apart(out[first:last], layer.attend(q[first:last], cache, ROW, length, rule)) < 0.004


@pytest.mark.parametrize(("bits", "dim"), [(2, 128), (2.5, 256), (3, 128), (3.5, 128), (4, 256), (5, 128)])
def test_few_tokens_are_the_same_bytes(bits: float, dim: int, emulated: dict[str, Any]) -> None:
    """A row to a warp, where four rows to a warp would leave most multiprocessors idle."""
    layer, _, k, v = fitted(f"ghost-3:bits={bits}", "pre", dim)
    for x in (k, v):
        x[3], x[5], x[8, 1, 7] = 0.0, 5e4, torch.nan
        x[4] *= 1e-5
        x[6] *= torch.logspace(-3, 3, dim)
    want, where = pool(layer), slots(0, TOKENS)
    layer.write(k.half(), v.half(), want, where, torch.arange(TOKENS)[None])
    for few in (0, 1 << 20):
        cache = pool(layer)
        writer, _ = layer.pool(cache)
        writer.few_tokens = few
        layer.encode(k.half(), v.half(), cache, where, torch.arange(TOKENS)[None])
        assert torch.equal(cache, want)


def test_requests_are_gathered_without_gaps() -> None:
    requests = [(2, 5, 9, 30), (3, 9, 10, 60), (4, 10, 20, 11), (6, 20, 25, 5), (7, 26, 27, 1), (8, 27, 28, 200)]
    together, alone = gathered(requests, 100)
    assert together == [requests[:2], requests[2:3], requests[3:4], requests[4:5]]
    assert alone == requests[5:]
    assert gathered([], 100) == ([], [])
    # the first page that is read begins at 16, 48, 0, 0, 0 and 176
    together, alone = gathered(requests, 20, Sight(10, 16))
    assert (together, alone) == (
        [requests[:1], requests[1:2], requests[2:3], requests[3:4], requests[4:5]],
        requests[5:],
    )
