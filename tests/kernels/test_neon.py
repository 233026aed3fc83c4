"""The CPU kernels of 64-bit ARM processors, emulated: the tests of the other instruction sets, at fewer shapes.

What is checked is what the kernels compute, not how fast.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codec import Codec
from packedkv.codecs.ghost import Ghost
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import library
from packedkv.ops.rope import Rotary
from tests.kernels import aarch64, test_cpu, test_cpu_encode
from tests.kernels.decode_cases import two_dims_in_turn

pytestmark = [
    pytest.mark.aarch64,
    pytest.mark.slow,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(bool(aarch64.missing()), reason=aarch64.missing() or "-"),
]


@pytest.fixture(scope="module")
def process() -> Iterator[aarch64.Emulated]:
    emulated = aarch64.Emulated()
    yield emulated
    emulated.close()


@pytest.fixture(autouse=True)
def neon(process: aarch64.Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The emulated kernels serve; readers and encoders have the same numbers everywhere."""
    native = library.chosen()
    monkeypatch.setattr(library, "chosen", lambda: native)
    monkeypatch.setattr(library, "library", lambda: process)
    monkeypatch.setattr(library, "variant", lambda: "neon")
    for module in (test_cpu, test_cpu_encode):
        monkeypatch.setattr(module, "ABLE", ["neon"])
        monkeypatch.setattr(module, "use", lambda *_: None)
    with process.watching(monkeypatch):
        yield


@pytest.mark.parametrize("spec", [*test_cpu.SERVED, *test_cpu.OTHERS], ids=str)
def test_readers(spec: str | Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cpu, "DIMS", (64, 80))
    test_cpu.test_unpacks_what_the_codec_decodes(spec, monkeypatch)


def encoders() -> list[Any]:
    """The first codec of each kind and a third of the others; the rest is wide: x86's tests encode with all of them."""
    kinds = [type(codec) for codec in test_cpu_encode.CODECS]
    return [
        pytest.param(codec, marks=[] if i % 3 == 0 or kinds.index(kinds[i]) == i else [pytest.mark.wide])
        for i, codec in enumerate(test_cpu_encode.CODECS)
    ]


@pytest.mark.parametrize("codec", encoders(), ids=str)
def test_encoders(codec: Codec) -> None:
    test_cpu_encode.test_bytes_are_the_references(codec)


@pytest.mark.parametrize(("spec", "dim"), two_dims_in_turn(test_cpu.SERVED, (64, 80)))
def test_attention(spec: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_cpu.test_attention_is_as_exact_as_float32(spec, dim, monkeypatch)


@pytest.mark.parametrize("spec", ["saw-int4", "ghost-3"])
def test_means(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Rotary(1e4 ** -(torch.arange(0, 1, 1 / 16)), scaling=1.2, interleaved=True)
    test_cpu.test_means_of_350_are_as_exact_as_float32(spec, turn, monkeypatch)
    test_cpu_encode.test_keys_lose_their_mean(SawInt4() if spec == "saw-int4" else Ghost(3), turn, 64)


@pytest.mark.parametrize("kind", [LayerCache, FusedLayerCache])
def test_caches(kind: Any) -> None:
    test_cpu.test_caches_attend_as_the_reference("kivi-sink-2", kind, "neon")
    assert "cpu neon" in test_cpu.filled(FusedLayerCache, "saw-int4").kernels().values()


def test_splits() -> None:
    test_cpu.test_splits_over_threads(5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_queries(dtype: torch.dtype) -> None:
    test_cpu.test_16_bit_queries(dtype, "neon")


def test_nan_stays_in_its_row() -> None:
    test_cpu.test_nan_stays_in_its_row("neon")


@pytest.mark.parametrize("codec", [SawInt4(), Octopus(4, 2)], ids=str)
@pytest.mark.parametrize("number", [torch.nan, -torch.inf, 65520.0])
def test_what_cannot_be_held(codec: Codec, number: float) -> None:
    test_cpu_encode.test_what_cannot_be_held_is_zero_bytes_and_flagged(codec, number)


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_the_neon_kernels_are_chosen_on_arm(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch calls its own kernels there."""
    monkeypatch.undo()
    monkeypatch.setattr(sources.platform, "machine", lambda: machine)
    library._variant.cache_clear()
    try:
        assert list(sources.variants()) == ["neon"]
        assert {library._variant(name) for name in ("DEFAULT", "SVE256", "NO AVX")} == {"neon"}
    finally:
        library._variant.cache_clear()
