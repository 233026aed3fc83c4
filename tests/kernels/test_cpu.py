"""The CPU kernels against the reference: unpacked numbers bit by bit, attention against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import ROLES, Codec, Role, Sample, Site, page_layout
from packedkv.codecs.ghost import ALLOWED, Ghost
from packedkv.codecs.group_int import BITS, GroupInt
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.octopus_qjl import OctopusQJL
from packedkv.codecs.outliers import Med
from packedkv.codecs.q4_0 import Q40
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.choose import refusal
from packedkv.kernels.constants import constants_for
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import layer as cpu_layer
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import Piece, unpack
from packedkv.kernels.cpu.attend import attend as attend_pages
from packedkv.kernels.cpu.mean import cpu_mean
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.kernels.tokens import Rules
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.store.pages import PageStore
from tests.kernels.conftest import ABLE, use
from tests.kernels.decode_cases import two_dims_in_turn
from tests.kernels.klt import Klt

CPU = torch.device("cpu")
SERVED = [spec for spec in packedkv.presets() if not refusal(packedkv.get(spec).for_layer(8, 24), 128, CPU)]
OTHERS = [
    SawInt4(zero="float"), *(TurboQuant(bits, "fp32") for bits in (1, 5, 6)), *(TurboQuantQJL(bits) for bits in (2, 4)),
    *(GroupInt(bits, 32, along, symmetric) for bits in BITS for along in ("channels", "tokens")
      for symmetric in (False, True)), GroupInt(3, 48), GroupInt(4, 0, symmetric=True),
    *(Ghost(bits) for bits in ALLOWED), Klt(3, "klt"),
    Octopus(5, 4), Octopus(3, 1, norm="fp32"), Octopus(1, 1), OctopusQJL(2, 2), UltraQuant(scale="real"),
    UltraTQ(norm="block"), Q40("none"), Hqmq(192, 6, codebook="int8"), Med(Hqmq(24, 3), 2.0),
    *(Med(Hqmq(s, r), 1.5, 1) for s in (24, 48, 96, 192) for r in (3, 4, 6)),
    *(Med(GroupInt(bits, 0), 1.5) for bits in BITS),
    *(InnerQ(bits, "tokens", reading, hybrid=True) for bits in (2, 3) for reading in ("literal", "full")),
]  # fmt: skip
KLT = "ghost-3:transform=klt"
MEANS = ["saw-int4", "int-4", "kivi-2", "turboquant-3", "octopus-3", "innerq-base", "hqmq-s24_r3", "ghost-3", "fp8"]
DIMS = (64, 80, 96, 128, 256)


pytestmark = pytest.mark.usefixtures("compiled")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codecs(spec: str | Codec) -> list[tuple[Role, Codec]]:
    if isinstance(spec, Codec):
        return [("key", spec)]
    scheme = packedkv.get(spec).for_layer(8, 24)
    own = [(role, scheme.codec(role).for_dtype(torch.float32)) for role in ROLES]
    return [(role, Klt(x.bits, x.transform) if isinstance(x, Ghost) and "queries" in x.needs else x) for role, x in own]


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*SERVED, *OTHERS], ids=str)
def test_unpacks_what_the_codec_decodes(spec: str | Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, in any run of tokens, whatever the slots around it hold, by every instruction set."""
    found = 0
    for role, codec in codecs(spec):
        for dim in DIMS:
            try:
                page = page_layout(codec, codec, dim, dim)
                read = cpu_spec(codec, codec, dim, page.page_tokens)
            except (UnsupportedError, ShapeError):
                continue
            heads, tokens = 2, page.page_tokens
            x, site = draw(1, heads, tokens, dim, seed=dim).half().float(), Site(0, role, heads, dim)
            x[:, :, 3] = 0
            params = codec.fit(site, Sample(x))
            store = PageStore(page, 1, heads, CPU, tokens)
            store.pages.random_(0, 256, generator=torch.Generator().manual_seed(1))
            live = tokens // 2 // codec.block_tokens * codec.block_tokens or tokens
            store.write(role, 0, codec.encode(codec.to_code(x[:, :, :live], params), params))
            made = constants_for(read.key if role == "key" else read.value, params, heads, dim)
            wanted = codec.decode(store.read(role, 0, live), params)[0]
            for variant in ABLE:
                use(variant, monkeypatch)
                for head in range(heads):
                    for first, last in ((0, live), (5, live - 2), (live - 1, live)):
                        got = unpack(read, role, store.pages[0, head], head, made, first, last - first)
                        assert torch.equal(got, wanted[head, first:last]), (variant, role, dim, first)
            found += 1
    assert found


def test_every_reader_is_tested() -> None:
    named = {read.name for spec in (*SERVED, *OTHERS) for _, codec in codecs(spec) for read in _readers(codec)}
    text = (sources.HERE / "readers.h").read_text()
    listed = {line.split('"')[1] for line in text.splitlines() if line.startswith('    {"')}
    assert listed == named


def _readers(codec: Codec) -> list[Any]:
    try:
        read = cpu_spec(codec, codec, 128, page_layout(codec, codec, 128, 128).page_tokens)
    except UnsupportedError:
        return []
    return [read.key, read.value]


# -- attention ---------------------------------------------------------------------------------------------------------


def written(store: PageStore, read: Any, codecs: Any, tokens: Any) -> tuple[list[Any], list[Tensor]]:
    """Encode keys and values into pages of arbitrary bytes; constants of the kernels, and what the codecs decode."""
    store.pages.random_(0, 256, generator=torch.Generator().manual_seed(2))
    sides, decoded = [], []
    for role, codec, x in zip(ROLES, codecs, tokens, strict=True):
        params = codec.fit(Site(0, role, x.shape[1], x.shape[3]), Sample(x))
        store.write(role, 0, codec.encode(codec.to_code(x, params), params))
        sides.append(constants_for(read.key if role == "key" else read.value, params, x.shape[1], x.shape[3]))
        decoded.append(codec.from_code(codec.decode(store.read(role, 0, x.shape[2]), params), params))
    return sides, decoded


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize(("spec", "dim"), [*two_dims_in_turn(SERVED, (64, 80, 96)), (KLT, 96)])
def test_attention_is_as_exact_as_float32(spec: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd lengths, random page tables, arbitrary bytes around the live tokens; by every instruction set."""
    heads = 2
    key, value = (codec for _, codec in codecs(spec))
    try:
        page = page_layout(key, value, dim, dim)
        read = cpu_spec(key, value, dim, page.page_tokens)
    except (UnsupportedError, ShapeError):
        pytest.skip("not at this head_dim")
    unit = page.page_tokens
    k, v = draw(2, 2, heads, 5 * unit, dim)
    columns = 5
    store = PageStore(page, 2, heads, CPU, columns * unit)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).int().view(2, columns)
    store.table = order
    sides, decoded = written(store, read, (key, value), (k, v))
    for group, lengths in ((1, (unit, 3)), (3, (2 * unit + 1, 0)), (4, (unit - 1, 7)), (6, (5 * unit - 3, unit + 17))):
        q = draw(2, heads * group, 1, dim, seed=group + 1)
        pieces = [[Piece(n, 0, 0)] for n in lengths]
        results = []
        for variant in ABLE:
            use(variant, monkeypatch)
            results.append(
                attend_pages(q, store.pages, order, pieces, Rules(dim**-0.5), spec=read, key=sides[0], value=sides[1])
            )
        for b, n in enumerate(lengths):
            if n == 0:
                assert not any(found[b].any() for found, _ in results)
                assert all((lse[b] == -torch.inf).all() for _, lse in results)
                continue
            one = [x[b : b + 1, :, :n] for x in decoded]
            wanted = _sdpa(q[b : b + 1].double(), *(x.double() for x in one))
            limit = 2 * error(_sdpa(q[b : b + 1], *one), wanted) + 2e-7
            for variant, (found, _) in zip(ABLE, results, strict=True):
                assert error(found[b : b + 1], wanted) <= limit, (variant, group, n)


@pytest.mark.parametrize(
    "turn",
    [
        Rotary(1e6 ** -(torch.arange(0, 1, 1 / 32))),
        Rotary(1e4 ** -(torch.arange(0, 1, 1 / 16)), scaling=1.2, interleaved=True),
        Rotary(5e5 ** -(torch.arange(0, 1, 1 / 48))),
        NOT_TURNED,
    ],
    ids=["all of 64", "half of 64", "all of 96", "after RoPE"],
)
@pytest.mark.parametrize("spec", [*MEANS, KLT])
def test_means_of_350_are_as_exact_as_float32(spec: str, turn: Rotary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few channels or of all, one for all sequences or one each; far positions and those of padding."""
    dim, heads = 96 if len(turn.frequencies) == 48 else 64, 2
    key, value = (codec for _, codec in codecs(spec))
    page = page_layout(key, value, dim, dim)
    read = cpu_spec(key, value, dim, page.page_tokens)
    unit = page.page_tokens
    errors: dict[str, list[tuple[float, float]]] = {variant: [] for variant in ABLE}
    for group, lengths, first, few in (
        (1, (2 * unit, 3), (100_037, -2), True),
        (3, (2 * unit - 3, 1), (0, 2_000_000), False),
        (4, (unit - 1, unit + 9), (-40, 17), True),
        (6, (2 * unit, 70), (16_384, 5), False),
    ):
        mean = 350 * draw(2 if group % 2 else 1, heads, dim, seed=group).sign()
        if few:
            mean[..., torch.arange(dim) % 11 > 0] = 0
        k, v = draw(2, 2, heads, 2 * unit, dim, seed=group)
        n = 1 if few else 5
        q = draw(2, heads * group, n, dim, seed=group + 1)
        store = PageStore(page, 2, heads, CPU, 2 * unit)
        sides, decoded = written(store, read, (key, value), (k, v))
        positions = torch.tensor(first)[:, None] + torch.arange(2 * unit)
        k32, k64 = (
            decoded[0] + turn.turn(mean[:, :, None], positions),
            decoded[0] + turned_exactly(mean, turn, positions),
        )
        pieces = [[Piece(tokens, 0, 0, at)] for tokens, at in zip(lengths, first, strict=True)]
        for variant in ABLE:
            use(variant, monkeypatch)
            found, _ = attend_pages(
                q, store.pages, store.table, pieces, Rules(dim**-0.5), spec=read, key=sides[0], value=sides[1],
                mean=cpu_mean(mean, turn),
            )  # fmt: skip
            for b, tokens in enumerate(lengths):
                one = [x[b : b + 1, :, :tokens] for x in (k32, k64, decoded[1])]
                wanted = _sdpa(q[b : b + 1].double(), one[1], one[2].double())
                theirs = _sdpa(q[b : b + 1], one[0], one[2])
                errors[variant].append((error(found[b : b + 1], wanted), error(theirs, wanted)))
    for variant, pairs in errors.items():  # of all cases: a score of hundreds is off by one rounding or by none
        ours, sdpas = torch.tensor(pairs).square().mean(0).sqrt().tolist()
        assert ours <= 2 * sdpas + 2e-7, (variant, ours, sdpas)


def turned_exactly(mean: Tensor, turn: Rotary, positions: Tensor) -> Tensor:
    """R_t mu in float64, from RoPE's definition: ``[B, H, n, D]``."""
    angle = positions.double()[:, None, :, None] * turn.frequencies.double()
    cos, sin, x = angle.cos() * turn.scaling, angle.sin() * turn.scaling, mean.double()[:, :, None]
    turns = 2 * len(turn.frequencies)
    out = x.expand(len(positions), -1, positions.shape[1], -1).clone()
    a, b = slice(turns // 2), slice(turns // 2, turns)
    if turn.interleaved:
        a, b = slice(0, turns, 2), slice(1, turns, 2)
    out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def filled(kind: Any, spec: str, batch: int = 2, heads: int = 2, tokens: int = 333, dim: int = 64) -> Any:
    cache = kind(packedkv.get(spec).for_layer(8, 24))
    k, v = draw(2, batch, heads, tokens, dim)
    for first, last in ((0, tokens - 7), (tokens - 7, tokens - 6), (tokens - 6, tokens)):
        cache.append(k[:, :, first:last], v[:, :, first:last])
    return cache


CACHES = ["saw-int4", "saw-int4:sink=3", "turboquant-4:window=5", "kivi-2", "kivi-sink-2", "innerq-hybrid", "octopus-3"]


@pytest.mark.parametrize("spec", CACHES)
@pytest.mark.parametrize("kind", [LayerCache, FusedLayerCache])
def test_caches_attend_as_the_reference(spec: str, kind: Any, variant: str) -> None:
    """One query token and several, sinks, soft caps and masks; tokens dense before and behind the pages."""
    cache = plain = filled(kind, spec)
    assert cache.unfused() == ""
    for n in (1, 5, 40):
        q, sinks = draw(2, 6, n, 64, seed=n), draw(6, seed=n)
        mask = torch.rand(2, 1, n, 333, generator=torch.Generator().manual_seed(n)) > 0.3
        close(cache.attend(q), attend(q, plain))
        close(cache.attend(q, sinks=sinks), attend(q, plain, sinks=sinks))
        if kind is LayerCache or n > 1:
            close(cache.attend(q, mask=mask), attend(q, plain, mask=mask))
            close(cache.attend(q, mask=mask.float() * 3), attend(q, plain, mask=mask.float() * 3))
            close(cache.attend(q, causal=False), attend(q, plain, causal=False))
        if kind is not LayerCache:
            close(cache.attend(q, softcap=2.0), attend(q, plain, softcap=2.0))
            start = torch.tensor([0, 40], dtype=torch.int32)
            own = torch.arange(333) <= 333 - n + torch.arange(n)[:, None]
            seen = (torch.arange(333) >= start[:, None])[:, None, None] & own
            close(cache.attend(q, start=start), attend(q, plain, mask=seen))


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert float((found.float() - wanted.float()).abs().max()) < (2e-5 if found.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_queries(dtype: torch.dtype, variant: str) -> None:
    cache = LayerCache(packedkv.get("int-4"))
    k, v = draw(2, 1, 2, 100, 64).to(dtype)
    cache.append(k, v)
    q = draw(1, 4, 1, 64).to(dtype)
    close(cache.attend(q), attend(q, cache))


def test_nan_stays_in_its_row(variant: str) -> None:
    cache = filled(LayerCache, "int-4")
    q = draw(2, 4, 3, 64)
    q[0, 1, 2, 5] = torch.nan
    found = cache.attend(q)
    assert found[0, 1, 2].isnan().all()
    found[0, 1, 2] = 0
    assert not found.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", ["int-4", "saw-int4", "kivi-4", "octopus-3", "innerq"])
def test_a_bad_single_token_is_refused_at_once(spec: str, dtype: torch.dtype) -> None:
    """With the sentence of the reference cache; the cache goes on as if the token had not come."""
    bad = [torch.nan, torch.inf, -torch.inf, *([65505.0, -65519.0, 1e30] if dtype == torch.float32 else [])]
    most = {torch.bfloat16: 65280.0}.get(dtype, 65504.0)
    for before in (0, 10):
        tokens = draw(2, 2, 2, before + 3, 64).to(dtype)
        tokens[0, 1, 0, -1, 7] = most  # held, not refused
        clean, other, reference = (make(packedkv.get(spec)) for make in (FusedLayerCache, FusedLayerCache, LayerCache))
        for cache in (clean, other):
            cache.append(*tokens[..., :before, :])
        for i in range(before, before + 3):
            good = tokens[..., i : i + 1, :]
            for number in bad:
                wrong = good.clone()
                wrong[i % 2, 1, 1, 0, 33] = number
                said = []
                for cache in (other, reference):
                    with pytest.raises(ValueError, match=r"is not finite|is above 65504") as error:
                        cache.append(*wrong)
                    said.append(str(error.value))
                assert said[0] == said[1]
                assert len(other) == i
            for cache in (clean, other):
                cache.append(*good)
        other.check()
        assert all(torch.equal(a, b) for a, b in zip(other.decode(), clean.decode(), strict=True))
        q = draw(2, 4, 1, 64).to(dtype)
        assert torch.equal(other.attend(q), clean.attend(q))


@pytest.mark.parametrize(
    "spec", ["int-4", "int-3:group=32", "saw-int4", "turboquant-4", "ultraquant", "octopus-3:window=0", "hqmq-s24_r3"]
)
def test_single_tokens_of_float32_are_held_as_fp16(spec: str, variant: str) -> None:
    """Kernels round them; in one call with others they are rounded before."""
    tokens = draw(2, 2, 2, 9, 64) * torch.logspace(-8, 4, 64)
    tokens[..., 4, :] = torch.linspace(1, 1 + 2.0**-6, 64)  # half-way between two fp16 numbers, among others
    one, many = FusedLayerCache(packedkv.get(spec)), FusedLayerCache(packedkv.get(spec))
    for i in range(9):
        one.append(*tokens[..., i : i + 1, :])
    many.append(*tokens)
    assert all(torch.equal(a, b) for a, b in zip(one.decode(), many.decode(), strict=True))


@pytest.mark.parametrize("threads", [2, 5])
def test_splits_over_threads(threads: int) -> None:
    """One KV head and more threads than heads: the history is split, and its parts are merged."""
    before = torch.get_num_threads()
    cache, q = filled(LayerCache, "int-4", batch=1, heads=1, tokens=5000), draw(1, 3, 1, 64)
    try:
        torch.set_num_threads(threads)
        close(cache.attend(q, sinks=torch.zeros(3)), attend(q, cache, sinks=torch.zeros(3)))
    finally:
        torch.set_num_threads(before)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_without_the_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chosen", lambda: sources.HERE / "missing.so")
    cache = filled(LayerCache, "int-4")
    assert "missing.so is missing" in cache.unfused()
    assert "compile.py" in cache.unfused()
    monkeypatch.setattr(cpu_layer, "attend", None)
    q = draw(2, 4, 1, 64)
    close(cache.attend(q), attend(q, cache))
    with pytest.raises(UnsupportedError, match=r"the CPU kernels are not compiled.*Use attention='decoded'"):
        filled(FusedLayerCache, "int-4")


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load.cache_clear()
    monkeypatch.setattr(library, "digest", lambda: "0" * 32)
    assert "compiled from other sources" in library.refusal(CPU)
    library.load.cache_clear()


def test_a_static_cache_is_refused() -> None:
    assert "leave max_len out" in refusal(packedkv.get("int-4"), 64, CPU, static=True)


def test_head_dims() -> None:
    assert refusal(packedkv.get("int-4"), 72, CPU).startswith("the CPU kernels take a head_dim of 16, 32, ... 512")
    assert refusal(packedkv.get("int-4"), 528, CPU)


def test_nothing_is_compiled_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "variants", lambda: {"portable": ("-O0",)})
    assert [path.name for path in sources.compile_missing(tmp_path)] == ["libpackedkv_portable.so"]
    assert sources.compile_missing(tmp_path) == []
    monkeypatch.setattr(sources, "digest", lambda: "another")
    assert sources.missing(tmp_path) == ["portable"]
    monkeypatch.setattr(sources, "compiler", lambda: None)
    with pytest.raises(FileNotFoundError, match="install g"):
        sources.compile_missing(tmp_path)
