"""An engine's layer on the kernels against the same layer on the codecs; the kernels run on the emulated machine."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.attention import Seen
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import ROLES, Dense, Params, Role, Sample, Site
from packedkv.errors import ShapeError
from packedkv.integrations.vllm import layer as served
from packedkv.integrations.vllm.layer import EngineLayer, visible
from packedkv.integrations.vllm.servable import group_tokens
from packedkv.kernels.cpu.engine import CpuEngine
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.prefill import Chunks, Sight, Workspace, gathered
from packedkv.kernels.flash import Ragged, ragged_attention
from packedkv.kernels.tokens import Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.scheme import KVScheme
from packedkv.store.site import LayerSite, MeanRemoval
from tests.integrations.served import refusal
from tests.integrations.test_serving import BLOCK, CPU, DIM, HEADS, ROW, RULES, TOKENS, made, pool, rows, slots

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


@pytest.fixture
def emulated(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """CUDA engines are chosen although tensors lie on the CPU."""
    monkeypatch.setattr(
        served, "choose", lambda s, dim, device, tokens, *, static: CudaEngine(s.key, s.value, dim, tokens)
    )
    return machine


def filled(layer: EngineLayer, tokens: int = TOKENS) -> torch.Tensor:
    cache, (k, v) = pool(layer), rows()
    layer.write(k[:tokens], v[:tokens], cache, slots(0, tokens))
    return cache


@pytest.fixture(params=["cuda", "cpu"])
def served_by(request: pytest.FixtureRequest) -> str:
    """The kernels of GPUs, emulated, or those of CPUs."""
    request.getfixturevalue("emulated" if request.param == "cuda" else "compiled")
    name: str = request.param
    return name


def by(cuda: Sequence[str], cpu: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize by what serves and the specs for it."""
    pairs = [*(("cuda", spec) for spec in cuda), *(("cpu", spec) for spec in cpu)]
    return pytest.mark.parametrize(("served_by", "spec"), pairs, indirect=["served_by"])


@by(SPECS + SUNK, ALONE + CPU_SUNK)
def test_kernels_write_the_codecs_bytes(spec: str, served_by: str) -> None:
    """A prompt cut anywhere, single tokens of a batch in any order, and none where a token has no slot."""
    several = served_by == "cpu" and spec in ("saw-int4", "dense", "saw-int4:sink=4")
    for dtype in (torch.float16, torch.bfloat16, torch.float32) if several else (torch.float16,):
        layer = made(spec, dtype=dtype)
        want, found, (k, v) = pool(layer), pool(layer), (x.to(dtype) for x in rows())
        layer.write(k, v, want, slots(0, TOKENS))
        for first, last in ((0, 1), (1, 20), (20, 41)):
            layer.encode_chunk(k[first:last], v[first:last], found, ROW, last)
        order = 41 + torch.randperm(TOKENS - 41, generator=torch.Generator().manual_seed(1))
        where = torch.cat([slots(0, TOKENS)[order], torch.tensor([-1, -1])])
        padded = torch.cat([order, order[:2]])  # the last two are padding of a captured batch
        layer.encode(k[padded], v[padded], found, where)
        assert torch.equal(found, want)


@by(["saw-int4", "fp8", "dense", "int-8:sink=3", "bfloat16 beside int-8"], ["saw-int4", "dense"])
def test_float32_tokens_are_encoded_as_caches_hold_them(spec: str, served_by: str) -> None:
    """Rounded to 16 bit first, as by the codecs; what cannot be stored is zero bytes."""
    if spec == "bfloat16 beside int-8":
        scheme = KVScheme(Dense("bfloat16"), packedkv.get("int-8").value)
        layer = EngineLayer(scheme, layer=3, heads=HEADS, head_dim=DIM, dtype=torch.float32, device=CPU)
    else:
        layer = made(spec, dtype=torch.float32)
    k, v = torch.randn(2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(5))
    k[3, 1, 7], v[9, 0, 2], v[7, 1, 1] = 65519.0, 65520.0, 65510.0  # the second rounds to no fp16 number
    k[5, 1, 3], v[6, 0, 2] = torch.nan, 1e6
    found, want = pool(layer), pool(layer)
    layer.write(k, v, want, slots(0, TOKENS))
    layer.encode(k, v, found, slots(0, TOKENS))
    assert torch.equal(found, want)


@pytest.mark.parametrize("rules", RULES)
@by(["int-8", "ultraquant", "octopus-qjl-2:window=0", *SUNK], ALONE + CPU_SUNK)
def test_attention_is_the_references(spec: str, rules: str, served_by: str) -> None:
    """Three requests in one pool, one of them padding without tokens, and a prompt's chunks; pages may be freed."""
    layer, rule = made(spec), RULES[rules]
    cache, lengths, near = filled(layer), [TOKENS, 0, 17], 4e-3 if served_by == "cuda" else 2e-3
    table = torch.zeros(3, 6, dtype=torch.int32)  # as wide as the longest request may get
    table[0, :5], table[2, :5] = ROW, ROW
    if rule.seen.window and rule.seen.window < TOKENS - 2 * BLOCK:
        table[0, :2] = 0
    q = torch.randn(3, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
    seq_lens, space = torch.tensor(lengths, dtype=torch.int32), None
    if served_by == "cuda":
        size = layer.workspace_bytes(4, 2 * HEADS, cache, 6, rule)
        space = torch.full((-(-size // 4),), torch.nan)
    fields = visible(seq_lens, layer.sink, rule.seen.window)
    found = layer.decode(q, StepTokens(cache, table, seq_lens, workspace=space, **fields), rule)
    for i, length in enumerate(lengths):
        if length:
            want = layer.attend(q[i : i + 1], cache, table[i], length, rule)
            torch.testing.assert_close(found[i : i + 1], want, rtol=near, atol=near)
    assert bool((found[1] == 0).all())
    for n, length in ((1, TOKENS), (7, 41), (16, 16), (TOKENS, TOKENS)):
        q = torch.randn(n, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(n)).half()
        found = layer.prefill(q, cache, ROW, length, rule)
        torch.testing.assert_close(found, layer.attend(q, cache, ROW, length, rule), rtol=near, atol=near)
    assert isinstance(layer.engine(BLOCK), CudaEngine if served_by == "cuda" else CpuEngine)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("spec", ["saw-int4", *SPECS])
def test_several_queries_of_a_request(spec: str, group: int, emulated: dict[str, Any]) -> None:
    """What each of them reads as a sequence of its own; a request without queries is padding of a captured batch."""
    layer, counts, lengths = made(spec), [4, 1, 0, 3, 2], [TOKENS, 17, 0, 3, 43]
    cache, total = filled(layer), sum(counts)
    table = torch.zeros(5, 6, dtype=torch.int32)
    table[[0, 1, 3, 4], :5] = ROW
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn(total, group * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
    seq_lens, rules = torch.tensor(lengths, dtype=torch.int32), Rules(0.125, sinks=torch.randn(group * HEADS))
    assert layer.engine(cache.shape[2])
    assert layer.takes_several(rules)
    size = layer.workspace_bytes(5, 4 * group * HEADS, cache, 6, rules)
    space = torch.full((-(-size // 4),), torch.nan)
    several = StepTokens(cache, table, seq_lens, workspace=space, starts=starts, queries=4, longest=68)
    found = layer.decode(q, several, rules)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for i in range(count):
            at = slice(int(starts[row]) + i, int(starts[row]) + i + 1)
            want = layer.attend(q[at], cache, table[row], min(length - count + 1 + i, several.longest), rules)
            torch.testing.assert_close(found[at], want, rtol=0, atol=4e-3)


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("spec", ["saw-int4", "turboquant-4"])
def test_keys_without_their_mean(spec: str, kind: Literal["pre", "post"], served_by: str) -> None:
    """The codec's bytes, cut anywhere and in steps of two requests; attention of steps and chunks, in windows too."""
    rotary = Rotary(1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)), 1.2) if kind == "pre" else None
    mean = MeanRemoval(kind, rotary, 4 * torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1)))
    layer, plain, (k, v) = made(spec, mean=mean), made(spec), rows()
    k = (k + mean.at(mean.given, torch.arange(TOKENS)[None])[0].transpose(0, 1)).half()
    want = pool(layer)
    layer.write(k, v, want, slots(0, TOKENS), torch.arange(TOKENS)[None])
    rough = pool(plain)
    plain.write(k, v, rough, slots(0, TOKENS))
    assert not torch.equal(want, rough)
    cache = pool(layer)
    for first, last in ((0, 1), (1, 20), (20, 50)):
        layer.encode_chunk(k[first:last], v[first:last], cache, ROW, last)
    at = torch.arange(50, TOKENS)
    layer.encode(k[50:], v[50:], cache, slots(50, TOKENS), at[None])
    assert torch.equal(cache, want)
    with pytest.raises(ShapeError, match="the positions of new tokens are needed"):
        layer.encode(k[:1], v[:1], cache, slots(0, 1))
    table = torch.zeros(3, 6, dtype=torch.int32)
    table[0, :5], table[2, :5] = ROW, ROW
    seq_lens = torch.tensor([TOKENS, 0, 17], dtype=torch.int32)
    store = LayerCache(LayerSite(layer.scheme, 3, mean=mean))
    store.append(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    for window in (0, 9):
        rule = Rules(0.125, Seen(window=window))
        q = torch.randn(3, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
        found = layer.decode(q, StepTokens(cache, table, seq_lens, **visible(seq_lens, 0, window)), rule)
        for i in (0, 2):
            right = layer.attend(q[i : i + 1], cache, ROW, int(seq_lens[i]), rule)
            torch.testing.assert_close(found[i : i + 1], right, rtol=0, atol=6e-3)
        rows_ = torch.randn(7, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(4)).half()
        right = layer.attend(rows_, cache, ROW, TOKENS, rule)
        torch.testing.assert_close(layer.prefill(rows_, cache, ROW, TOKENS, rule), right, rtol=0, atol=6e-3)
        if not window:
            library = attend(rows_.transpose(0, 1)[None], store, scale=0.125)[0].transpose(0, 1)
            torch.testing.assert_close(right, library.to(right.dtype), rtol=0, atol=3e-3)


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


@pytest.mark.parametrize(
    ("spec", "dtype", "rules"),
    [
        *((s, torch.float16, "sinks") for s in ("int-8", "saw-int4", "turboquant-4", "hqmq-s24_r3", "ultra-tq", *SUNK)),
        *((spec, torch.bfloat16, "plain") for spec in ("saw-int4", "hqmq-s24_r3", "turboquant-4:sink=3")),
        *(("saw-int4", torch.float16, rules) for rules in WINDOWS),
        *(
            (s, torch.float16, rules)
            for s in ("turboquant-4:sink=3", "saw-int4:mean=pre")
            for rules in ("one", "pages")
        ),
    ],
)
def test_chunks_of_many_requests_at_once(spec: str, dtype: torch.dtype, rules: str, emulated: dict[str, Any]) -> None:
    """One launch for each stage, and the output of each request alone.

    Blocks before a window belong to nobody, or to others: they are not read.
    """
    rule, mean = {**WINDOWS, "plain": Rules(0.125), "sinks": Rules(0.125, sinks=LOGITS)}[rules], None
    if "mean" in spec:
        rotary = Rotary(1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)))
        mean = MeanRemoval("pre", rotary, 4 * torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1)))
    layer, flash = made(spec, mean=mean, dtype=dtype), EngineFlash()
    layer.flash = flash
    cache, (k, v) = pool(layer), rows()
    layer.write(k, v, cache, slots(0, TOKENS), torch.arange(TOKENS)[None])
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
        q = torch.randn(begin - 5, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
        found = torch.full((len(q), 3, 2 * HEADS, DIM), torch.nan, dtype=dtype)[:, 1]
        before = {name: len(kernel.launches) for name, kernel in emulated.items()}
        chunks = Chunks.of(requests, freed, Workspace(), Sight(rule.seen.window, cache.shape[2]))
        layer.attend_chunks(q, cache, chunks, rule, found)
        launched = {name: len(kernel.launches) - before.get(name, 0) for name, kernel in emulated.items()}
        assert (launched["kv_unpack"], len(flash.calls) - calls) == (1, 1)
        assert launched.get("kv_basis", 0) <= 2 + (layer.sink > 0)
        assert (chunks.first, chunks.last) == (5, begin)
        near = 2e-2 if dtype == torch.bfloat16 else 6e-3 if mean else 4e-3
        for row, first, last, length in requests:
            part = slice(first - 5, last - 5)
            want = layer.attend(q[part], cache, table[row], length, rule)
            torch.testing.assert_close(found[part], want, rtol=0, atol=near)


GHOSTS = ("ghost-3:transform=channels", "ghost-3:transform=klt", "ghost-2:transform=klt,sink=0,bits=2.5")


def fitted(spec: str, kind: Literal["pre", "post", "none"]) -> tuple[EngineLayer, Tensor, Tensor]:
    """A layer of ``ghost`` with constants and a mean from a file, and tokens ``[T, H, D]`` that have that mean."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randn(1, HEADS, 1, DIM, generator=generator).exp()
    x = sizes * torch.randn(1, HEADS, 300, DIM, generator=generator)
    params: dict[Role, Params] = {}
    for role in ROLES:
        codec = packedkv.get(spec).codec(role)
        found = codec.fit(Site(3, role, HEADS, DIM, 0, CPU), Sample(x, x.flip(2)))
        params[role] = codec.settle([found])[0]
    k, v = (x[0, :, at : at + TOKENS].transpose(0, 1) for at in (0, TOKENS))
    mean = None
    if kind != "none":
        rotary = Rotary(1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)), 1.2) if kind == "pre" else None
        mean = MeanRemoval(kind, rotary, 4 * torch.randn(1, HEADS, DIM, generator=generator))
        k = k + mean.at(mean.given, torch.arange(TOKENS)[None])[0].transpose(0, 1)
    name = f"{spec},mean={kind}"
    return made(name, params=params, mean=mean), k.half(), v.half()


def apart(found: Tensor, right: Tensor) -> float:
    """Relative difference, NaN if there is one."""
    return float((found - right).float().norm() / right.float().norm())


@pytest.mark.parametrize("kind", ["pre", "post", "none"])
@pytest.mark.parametrize("spec", GHOSTS)
def test_ghost_in_an_engines_pages(
    spec: str, kind: Literal["pre", "post", "none"], served_by: str, request: pytest.FixtureRequest
) -> None:
    """Tokens of several requests in any order in one launch, and padding; steps, and prompts of many requests."""
    layer, k, v = fitted(spec, kind)
    want, cache = pool(layer), pool(layer)
    layer.write(k, v, want, slots(0, TOKENS), torch.arange(TOKENS)[None])
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    where = torch.cat([slots(0, TOKENS)[order], torch.tensor([-1, -1])])
    padded = torch.cat([order, order[:2]])
    layer.encode(k[padded], v[padded], cache, where, padded[None])
    assert torch.equal(cache, want)
    table = torch.zeros(3, 6, dtype=torch.int32)
    table[0, :5], table[2, :5] = ROW, ROW
    lengths, rule = torch.tensor([TOKENS, 0, 17], dtype=torch.int32), Rules(0.125)
    q = torch.randn(24, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
    found = layer.decode(q[:3], StepTokens(cache, table, lengths, **visible(lengths, layer.sink, 0)), rule)
    assert bool((found[1] == 0).all())
    for i in (0, 2):
        right = layer.attend(q[i : i + 1], cache, ROW, int(lengths[i]), rule)
        assert apart(found[i : i + 1], right) < 0.004
    if served_by == "cuda":
        kernels = request.getfixturevalue("emulated")
        before = len(kernels["kv_unpack"].launches) if "kv_unpack" in kernels else 0
        out = torch.full_like(q, torch.nan)
        requests, table = [(0, 0, 7, 41), (1, 7, 23, 16), (2, 23, 24, TOKENS)], ROW.expand(3, -1).contiguous()
        layer.attend_chunks(q, cache, Chunks.of(requests, table, Workspace()), rule, out)
        assert len(kernels["kv_unpack"].launches) == before + 1
    else:
        out = torch.cat([layer.prefill(q[:7], cache, ROW, 41, rule), layer.prefill(q[7:], cache, ROW, TOKENS, rule)])
        requests = [(0, 0, 7, 41), (0, 7, 24, TOKENS)]
    for row, first, last, length in requests:
        right = layer.attend(q[first:last], cache, table[row], length, rule)
        assert apart(out[first:last], right) < 0.004


@pytest.mark.parametrize(("bits", "dim"), [(2, 128), (2.5, 256), (3, 128), (3.5, 128), (4, 256), (5, 128)])
def test_few_tokens_are_the_same_bytes(bits: float, dim: int, emulated: dict[str, Any]) -> None:
    """A row to a warp, where four rows to a warp would leave most multiprocessors idle."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randn(1, HEADS, 1, dim, generator=generator).exp()
    x = sizes * torch.randn(1, HEADS, 300, dim, generator=generator)
    params: dict[Role, Params] = {}
    for role in ROLES:
        codec = packedkv.get(f"ghost-3:bits={bits}").codec(role)
        params[role] = codec.settle([codec.fit(Site(3, role, HEADS, dim, 0, CPU), Sample(x, x.flip(2)))])[0]
    rotary = Rotary(1e4 ** -(torch.arange(dim // 2) / (dim // 2)))
    mean = MeanRemoval("pre", rotary, 4 * torch.randn(1, HEADS, dim, generator=generator))
    layer = made(f"ghost-3:bits={bits},mean=pre", params=params, mean=mean, head_dim=dim)
    k, v = (x[0, :, at : at + TOKENS].transpose(0, 1).contiguous() for at in (0, TOKENS))
    for rows_ in (k, v):
        rows_[3], rows_[5], rows_[8, 1, 7] = 0.0, 5e4, torch.nan
        rows_[4] *= 1e-5
        rows_[6] *= torch.logspace(-3, 3, dim)
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
