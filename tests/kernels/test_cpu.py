"""The CPU kernels against the reference: unpacked numbers bit by bit, attention against float64."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import FP16_MAX, ROLES, Codec, Dense, DenseDtype, Role, Sample, Site, page_layout
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.ghost import ALLOWED, Ghost
from packedkv.codecs.group_int import BITS, GroupInt
from packedkv.codecs.hqmq import RADII, SIZES, Hqmq
from packedkv.codecs.innerq import InnerQ, Reading
from packedkv.codecs.octopus import Octopus, OctopusQJL
from packedkv.codecs.outliers import Med
from packedkv.codecs.q4_0 import Q40
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.codecs.ultraquant import UltraQuant
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.choose import refusal
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import layer as cpu_layer
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import Piece, unpack
from packedkv.kernels.cpu.attend import attend as attend_pages
from packedkv.kernels.cpu.encode import encode, prepared
from packedkv.kernels.cpu.engine import CpuEngine
from packedkv.kernels.cpu.mean import cpu_mean
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.kernels.mean import RotatedMean
from packedkv.kernels.spec import function_of
from packedkv.kernels.tokens import NewTokens, Rules
from packedkv.ops.lloyd_max import midpoints
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore
from tests.kernels.conftest import ABLE, normal, use
from tests.kernels.decode_cases import Klt, two_dims_in_turn

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


def kernels_of(key: Codec, value: Codec, dim: int) -> tuple[Any, Any]:
    """Page layout of two codecs, and the kernels that read and write it."""
    layout = page_layout(key, value, dim, dim)
    return layout, cpu_spec(key, value, dim, layout.page_tokens)


def codecs(spec: str | Codec) -> list[tuple[Role, Codec]]:
    if isinstance(spec, Codec):
        return [("key", spec)]
    scheme = packedkv.get(spec).for_layer(8, 24)
    own = [(role, scheme.codec(role).for_dtype(torch.float32)) for role in ROLES]
    return [(role, Klt(x.bits, x.transform) if isinstance(x, Ghost) and "queries" in x.needs else x) for role, x in own]


@pytest.mark.parametrize("spec", [*SERVED, *OTHERS], ids=str)
def test_tables_follow_the_constants_whatever_mode_a_spec_was_made_in(spec: str | Codec) -> None:
    """Specs are cached for the process: a tensor made with one would keep the first caller's mode or default device."""
    for role, codec in codecs(spec):
        params = codec.fit(Site(0, role, 2, 128), Sample(normal(1, 2, 64, 128)))
        for name in ("reader", "encoder", "cpu_reader", "cpu_encoder"):
            made = []
            for place in (contextlib.nullcontext(), torch.inference_mode(), torch.device("meta")):
                with contextlib.suppress(UnsupportedError), place:
                    made.append(function_of(codec, name, "")(codec, 128, role))
            tables = [of.tables(params) for of in made if of.tables is not None]
            assert not any(x.is_inference() for x in tables)
            assert all(torch.equal(x, tables[0]) for x in tables)


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*SERVED, *OTHERS], ids=str)
def test_unpacks_what_the_codec_decodes(spec: str | Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, in any run of tokens, whatever the slots around it hold, by every instruction set."""
    found = 0
    for role, codec in codecs(spec):
        for dim in DIMS:
            try:
                page, read = kernels_of(codec, codec, dim)
            except (UnsupportedError, ShapeError):
                continue
            heads, tokens = 2, page.page_tokens
            x, site = normal(1, heads, tokens, dim, seed=dim).half().float(), Site(0, role, heads, dim)
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


def test_every_reader_and_encoder_is_tested() -> None:
    readers, encoders = set(), set()
    for _, codec in (own for spec in (*SERVED, *OTHERS) for own in codecs(spec)):
        with contextlib.suppress(UnsupportedError):
            _, spec = kernels_of(codec, codec, 128)
            readers |= {spec.key.name, spec.value.name}
    for codec in CODECS:
        _, spec = kernels_of(codec, codec, 64)
        encoders |= {encoder.name for role in ROLES if (encoder := spec.encoders[role]) is not None}
    for file, named in (("readers.h", readers), ("encoders.h", encoders)):
        lines = (sources.HERE / file).read_text().splitlines()
        assert {line.split('"')[1] for line in lines if line.startswith('    {"')} == named


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
        page, read = kernels_of(key, value, dim)
    except (UnsupportedError, ShapeError):
        pytest.skip("not at this head_dim")
    unit = page.page_tokens
    k, v = normal(2, 2, heads, 5 * unit, dim)
    columns = 5
    store = PageStore(page, 2, heads, CPU, columns * unit)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).int().view(2, columns)
    store.table = order
    sides, decoded = written(store, read, (key, value), (k, v))
    for group, lengths in ((1, (unit, 3)), (3, (2 * unit + 1, 0)), (4, (unit - 1, 7)), (6, (5 * unit - 3, unit + 17))):
        q = normal(2, heads * group, 1, dim, seed=group + 1)
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
    page, read = kernels_of(key, value, dim)
    unit = page.page_tokens
    errors: dict[str, list[tuple[float, float]]] = {variant: [] for variant in ABLE}
    for group, lengths, first, few in (
        (1, (2 * unit, 3), (100_037, -2), True),
        (3, (2 * unit - 3, 1), (0, 2_000_000), False),
        (4, (unit - 1, unit + 9), (-40, 17), True),
        (6, (2 * unit, 70), (16_384, 5), False),
    ):
        mean = 350 * normal(2 if group % 2 else 1, heads, dim, seed=group).sign()
        if few:
            mean[..., torch.arange(dim) % 11 > 0] = 0
        k, v = normal(2, 2, heads, 2 * unit, dim, seed=group)
        n = 1 if few else 5
        q = normal(2, heads * group, n, dim, seed=group + 1)
        store = PageStore(page, 2, heads, CPU, 2 * unit)
        sides, decoded = written(store, read, (key, value), (k, v))
        positions = torch.tensor(first)[:, None] + torch.arange(2 * unit)
        k32 = decoded[0] + turn.turn(mean[:, :, None], positions)
        k64 = decoded[0] + turned_exactly(mean, turn, positions)
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
    k, v = normal(2, batch, heads, tokens, dim)
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
        q, sinks = normal(2, 6, n, 64, seed=n), normal(6, seed=n)
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


def test_16_bit_queries_and_nan_in_its_row(variant: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        cache = LayerCache(packedkv.get("int-4"))
        cache.append(*normal(2, 1, 2, 100, 64).to(dtype))
        q = normal(1, 4, 1, 64).to(dtype)
        close(cache.attend(q), attend(q, cache))
    q = normal(2, 4, 3, 64)
    q[0, 1, 2, 5] = torch.nan
    found = filled(LayerCache, "int-4").attend(q)
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
        tokens = normal(2, 2, 2, before + 3, 64).to(dtype)
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
        assert all(map(torch.equal, other.decode(), clean.decode()))
        q = normal(2, 4, 1, 64).to(dtype)
        assert torch.equal(other.attend(q), clean.attend(q))


@pytest.mark.parametrize(
    "spec", ["int-4", "int-3:group=32", "saw-int4", "turboquant-4", "ultraquant", "octopus-3:window=0", "hqmq-s24_r3"]
)
def test_single_tokens_of_float32_are_held_as_fp16(spec: str, variant: str) -> None:
    """Kernels round them; in one call with others they are rounded before."""
    tokens = normal(2, 2, 2, 9, 64) * torch.logspace(-8, 4, 64)
    tokens[..., 4, :] = torch.linspace(1, 1 + 2.0**-6, 64)  # half-way between two fp16 numbers, among others
    one, many = FusedLayerCache(packedkv.get(spec)), FusedLayerCache(packedkv.get(spec))
    for i in range(9):
        one.append(*tokens[..., i : i + 1, :])
    many.append(*tokens)
    assert all(map(torch.equal, one.decode(), many.decode()))


@pytest.mark.parametrize("threads", [2, 5])
def test_splits_over_threads(threads: int, set_threads: Callable[[int], None]) -> None:
    """One KV head and more threads than heads: the history is split, and its parts are merged."""
    cache, q = filled(LayerCache, "int-4", batch=1, heads=1, tokens=5000), normal(1, 3, 1, 64)
    set_threads(threads)
    close(cache.attend(q, sinks=torch.zeros(3)), attend(q, cache, sinks=torch.zeros(3)))


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_without_the_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chosen", lambda: sources.HERE / "missing.so")
    cache = filled(LayerCache, "int-4")
    assert "missing.so is missing" in cache.unfused()
    assert "compile.py" in cache.unfused()
    monkeypatch.setattr(cpu_layer, "attend", None)
    q = normal(2, 4, 1, 64)
    close(cache.attend(q), attend(q, cache))
    with pytest.raises(UnsupportedError, match=r"the CPU kernels are not compiled.*Use attention='decoded'"):
        filled(FusedLayerCache, "int-4")


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = packedkv.get("int-4")
    assert "leave max_len out" in refusal(scheme, 64, CPU, static=True)
    assert refusal(scheme, 72, CPU).startswith("the CPU kernels take a head_dim of 16, 32, ... 512")
    assert refusal(scheme, 528, CPU)
    library.load.cache_clear()
    monkeypatch.setattr(library, "digest", lambda: "0" * 32)
    assert "compiled from other sources" in library.refusal(CPU)
    library.load.cache_clear()


def test_nothing_is_compiled_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "variants", lambda *_: {"portable": ("-O0",)})
    assert [path.name for path in sources.compile_missing(tmp_path)] == ["libpackedkv_portable.so"]
    assert sources.compile_missing(tmp_path) == []
    monkeypatch.setattr(sources, "digest", lambda *_: "another")
    assert sources.missing(tmp_path) == ["portable"]
    monkeypatch.setattr(sources, "compiler", lambda: None)
    with pytest.raises(FileNotFoundError, match="install g"):
        sources.compile_missing(tmp_path)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
READINGS: tuple[Reading, ...] = ("literal", "signed")
CODECS: tuple[Codec, ...] = (
    SawInt4(),
    SawInt4(1),
    SawInt4(zero="float"),
    *(TurboQuant(bits) for bits in (1, 2, 3, 4, 5, 6)),
    TurboQuant(4, "fp32"),
    *(GroupInt(bits, group) for bits in (2, 3, 4, 8) for group in (0, 32, 64)),
    *(GroupInt(bits, 0, symmetric=True) for bits in (2, 3, 4, 8)),
    *(GroupInt(bits, 32, along="tokens") for bits in (2, 3, 4, 8)),
    GroupInt(2, 64, along="tokens"),
    *(Fp8(scaled) for scaled in (False, True)),
    *(Ghost(bits) for bits in ALLOWED),
    Klt(3, "klt"),
    *(UltraQuant(scale=scale, rotate=rotate) for scale in ("real", "pow2") for rotate in (False, True)),
    *(GroupInt(bits, 16, along="tokens", symmetric=True) for bits in (4, 8)),
    Dense("float16"),
    Dense("bfloat16"),
    Dense("float32"),
    *(Octopus(*bits) for bits in ((1, 1), (3, 1), (4, 2), (5, 3), (3, 2), (4, 3), (5, 4), (2, 6), (6, 4), (7, 2))),
    *(Octopus(4, 2, rounding) for rounding in ("scalar", "local_2x2", "full")),
    *(Octopus(*bits, norm="fp32") for bits in ((3, 1), (5, 3))),
    *(Hqmq(s, r) for s in SIZES for r in RADII),
    Hqmq(24, 4, codebook="int8"),
    *(InnerQ(bits, along, reading) for bits in (2, 3) for along in ("channels", "tokens") for reading in READINGS),
    *(InnerQ(3, along, norm=True) for along in ("channels", "tokens")),
    *(UltraTQ(norm, table) for norm in ("token", "block") for table in ("gaussian", "sphere", "calibrated")),
    *(TurboQuantQJL(bits) for bits in (2, 3, 4)),
    TurboQuantQJL(3, "fp32"),
    *(OctopusQJL(*bits) for bits in ((1, 1), (3, 1), (4, 2), (5, 3))),
    OctopusQJL(5, 4, "full", "fp32"),
    *(Q40(rotation) for rotation in ("whole", "64", "none")),
)
HEADS = 2


@functools.cache
def _tokens(batch: int, count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Usual tokens, and extreme ones: zeros, the smallest and largest numbers, constant and one-sided rows."""
    x = normal(batch, HEADS, count, dim, seed=dim + count)
    x[..., ::7] *= 30
    special = torch.zeros(8, dim)
    special[1] = -0.0
    special[2] = 2.0**-24
    special[3, ::2], special[3, 1::2] = FP16_MAX, -FP16_MAX
    special[4] = FP16_MAX
    special[5] = torch.linspace(5, 6, dim)
    special[6] = torch.linspace(-3e-5, 2e-5, dim)  # denormal in fp16
    special[7, dim // 3] = -FP16_MAX
    x[:, :, : min(8, count)] = special[: min(8, count)]
    most = 65280.0 if dtype == torch.bfloat16 else FP16_MAX  # the largest that bf16 has below 65504
    return x.clamp(-most, most).to(dtype)


def _written(
    codec: Codec,
    x: Tensor,
    role: Role,
    first: int,
    rounded: bool = False,
    removed: tuple[Rotary, Tensor, Tensor] | None = None,
) -> tuple[Tensor, list[Tensor], set[int]]:
    """Pages of the reference, pages of each instruction set, and their flags; ``removed``: mean and positions."""
    dim, less = x.shape[3], None
    layout, spec = kernels_of(codec, codec, dim)
    rest = x.float()
    if removed is not None:
        turn, mean, positions = removed
        less = RotatedMean(mean, *turn.angles(positions), turn.interleaved)
        rest = rest - turn.turn(mean[:, :, None], positions)
    params = codec.fit(Site(0, role, HEADS, dim), Sample(rest))
    slots = first + x.shape[2]
    store = PageStore(layout, x.shape[0], HEADS, x.device, slots)
    store.pages.copy_(torch.arange(store.pages.numel()).view(store.pages.shape) % 251)  # whatever was there
    found, flags = [store.pages.clone() for _ in ABLE], set[int]()
    clean = (x.half() if rounded else x).float().nan_to_num(0.0, 0.0, 0.0)
    if removed is not None:
        clean = clean - turn.turn(mean[:, :, None], positions)
    store.write(role, first, codec.encode(codec.to_code(clean, params), params))
    at = torch.full((x.shape[0],), first, dtype=torch.int32)
    encoder = spec.encoders[role]
    assert encoder is not None
    own = {role: constants_for(encoder, params, HEADS, dim)}
    common, rounds = prepared(spec), (role,) if rounded else ()
    for variant, pages in zip(ABLE, found, strict=True):
        bad = torch.zeros(1, dtype=torch.int32)
        with pytest.MonkeyPatch.context() as patch:
            use(variant, patch)
            new = NewTokens({role: x}, at, bad, less)
            encode(new, pages, store.table, common=common, constants=own, rounded=rounds)
        flags.add(int(bad))
    return store.pages, found, flags


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_bytes_are_the_references(codec: Codec) -> None:
    unit = codec.block_tokens
    for i, dim in enumerate((64, 80, 96, 128, 256)):
        if (isinstance(codec, Q40) and dim % 32) or (isinstance(codec, TurboQuantQJL | OctopusQJL) and dim & (dim - 1)):
            continue
        if isinstance(codec, Ghost) and dim * codec.total % 64:
            continue
        for batch, count in ((1, 1), (2, 37), (1, 131)):
            x = _tokens(batch, -(-count // unit) * unit, dim, DTYPES[(i + count) % 3])
            if batch == 2:  # as models give them: token by token
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            want, found, flags = _written(codec, x, ROLES[i % 2], 3 * unit)
            assert flags == {0}
            assert all(torch.equal(pages, want) for pages in found), (dim, batch, count, x.dtype)


@pytest.mark.parametrize(
    ("turn", "dim"),
    [
        (Rotary(1e6 ** -(torch.arange(0, 1, 1 / 64))), 128),
        (Rotary(1e4 ** -(torch.arange(0, 1, 1 / 16)), scaling=1.2, interleaved=True), 64),
        (NOT_TURNED, 96),
    ],
    ids=["all of 128", "half of 64", "after RoPE"],
)
@pytest.mark.parametrize(
    "codec",
    [SawInt4(), TurboQuant(3), GroupInt(2, 32, along="tokens"), Octopus(), Hqmq(), Ghost(3), Fp8(), Dense("float16")],
    ids=str,
)
def test_keys_lose_their_mean(codec: Codec, turn: Rotary, dim: int) -> None:
    """To the bytes of the reference, which subtracts what RoPE's definition gives; a mean for all, or one each."""
    rng, unit = torch.Generator().manual_seed(3), codec.block_tokens
    for batch, count, dtype in ((1, 1, torch.float16), (2, 70, torch.float32), (3, 33, torch.bfloat16)):
        tokens = -(-count // unit) * unit
        mean = 40 * torch.randn(1 if batch == 2 else batch, HEADS, dim, generator=rng)
        mean[..., ::3] = 0
        positions = torch.tensor([-3, 100_000, 0][:batch])[:, None] + torch.arange(tokens)
        x = torch.randn(batch, HEADS, tokens, dim, generator=rng) + turn.turn(mean[:, :, None], positions)
        removed = (turn, mean, positions)
        want, found, flags = _written(codec, x.to(dtype), "key", unit, dtype == torch.float32, removed)
        assert flags == {0}
        assert all(torch.equal(pages, want) for pages in found), (batch, count)


def test_both_roles_are_encoded_by_kernels() -> None:
    for name in (
        "saw-int4", "int-4", "turboquant-4", "kivi-4", "kivi-tq-4", "fp8", "ultraquant", "octopus-3", "hqmq-s96_r4",
        "ultra-tq", "innerq-base", "innerq-small", "q4_0", "dense", "octopus-qjl-3", "turboquant-qjl-3", "ghost-3",
    ):  # fmt: skip
        scheme = packedkv.get(name).for_layer(4, 8)
        engine = CpuEngine(scheme.key, scheme.value, 64, 128)
        assert {engine.written_by(role) for role in ROLES} == {engine.name}, name


@pytest.mark.parametrize(
    "codec",
    [SawInt4(), TurboQuant(4), GroupInt(2, 32), GroupInt(2, 32, along="tokens"), Octopus(), Hqmq()],
    ids=str,
)
def test_threads_do_not_show(codec: Codec, set_threads: Callable[[int], None]) -> None:
    x, pages = _tokens(2, 192, 128, torch.float32), []
    for threads in (1, 2, 5):
        set_threads(threads)
        pages.append(torch.stack(_written(codec, x, "key", 0)[1]))
    assert all(torch.equal(pages[0], other) for other in pages[1:])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 65520.0, -1e30])
@pytest.mark.parametrize(
    "codec",
    [SawInt4(), TurboQuant(4), GroupInt(3, 32, along="tokens"), Octopus(4, 2), Hqmq(24, 4)],
    ids=str,
)
def test_what_cannot_be_held_is_zero_bytes_and_flagged(codec: Codec, number: float) -> None:
    x = _tokens(1, 64, 96, torch.float32).clone()
    x[0, 1, 40, 17] = number
    _, found, flags = _written(codec, x, "key", 0)
    assert flags == {1}
    layout, unit = page_layout(codec, codec, 96, 96), codec.block_tokens
    for pages in found:
        store = PageStore.over(layout, pages, torch.zeros(1, 1, dtype=torch.int32))
        for name, field in store.read("key", 0, 64).items():
            assert not field[0, 1, 40 // unit].view(torch.uint8).any(), name
            assert field[0, 0, 40 // unit].view(torch.uint8).any(), name


def test_tokens_behind_the_pages_are_dropped(variant: str) -> None:
    codec, x = SawInt4(), _tokens(1, 37, 64, torch.float16)
    (layout, spec), bad = kernels_of(codec, codec, 64), torch.zeros(1, dtype=torch.int32)
    store = PageStore(layout, 1, HEADS, x.device, layout.page_tokens)
    new = NewTokens({"key": x}, torch.tensor([layout.page_tokens - 10], dtype=torch.int32), bad)
    encode(new, store.pages, store.table, common=prepared(spec), constants={"key": Constants(None, None, 1)})
    assert int(bad) == 2
    want = codec.encode(codec.to_code(x[:, :, :10].float(), {}), {})
    got = store.read("key", layout.page_tokens - 10, layout.page_tokens)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", ["float16", "bfloat16", "float32"])
def test_a_step_rounds_as_the_reference(held: DenseDtype, dtype: torch.dtype) -> None:
    for scheme in (KVScheme(Dense(held), SawInt4()), KVScheme(SawInt4(), Dense(held))):
        fused, plain = FusedLayerCache(scheme), LayerCache(scheme)
        for seed in range(3):
            k, v = normal(2, 1, HEADS, 1, 64, seed=seed).to(dtype)
            fused.append(k, v)
            plain.append(k, v)
        assert set(fused.kernels().values()) == {f"cpu {library.variant()}"}
        assert all(map(torch.equal, fused.decode(), plain.decode()))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_numbers_at_the_walls_between_levels(bits: int, variant: str) -> None:
    codec, dim, rows = TurboQuant(bits), 64, 200
    (layout, spec), params = kernels_of(codec, codec, dim), codec.fit(Site(0, "key", HEADS, dim))
    walls = midpoints(params["levels"][0].double())
    u = walls[torch.arange(dim) % len(walls)] * (torch.arange(dim) < 8)
    u[-1] = (1 - (u[:-1] ** 2).sum()).sqrt()  # of unit length
    lengths = torch.linspace(0.5, 20, HEADS * rows, dtype=torch.float64).view(1, HEADS, rows, 1)
    x = (u * lengths).float()
    common, encoder = prepared(spec), spec.encoders["key"]
    common.key.order = 1  # rows are in the basis of the codes already
    assert encoder is not None
    own = constants_for(encoder, params, HEADS, dim)._replace(factor=None)
    store, first = PageStore(layout, 1, HEADS, x.device, rows), torch.zeros(2, 1, dtype=torch.int32)
    encode(NewTokens({"key": x}, *first), store.pages, store.table, common=common, constants={"key": own})
    want, got = codec.encode(x, params), store.read("key", 0, rows)
    assert all(torch.equal(got[name], want[name]) for name in want)
