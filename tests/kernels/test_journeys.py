"""How far a value travels: the files of the library with a function that is given it, as one call runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.attention import packedkv_attention
from packedkv.kernels.cuda import build
from packedkv.scheme import KVScheme
from tests.conftest import tiny_model

LIBRARY = Path(packedkv.__file__).parent
MOST = 7
PASSED_ON = {"ops/precision.py"}
"""A decorator around the caches' methods, which looks at no argument."""
SPEC = "kivi-2"


def entered(call: Callable[[], Any], is_it: Callable[[Any], bool]) -> tuple[Any, list[str]]:
    """What a call returns, and the files that the value enters: alone, or in a tuple, list or dict."""

    def given(x: Any) -> bool:
        inside = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
        return is_it(x) or any(is_it(y) for y in inside)

    files: dict[str, None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(LIBRARY)) or code.co_name.startswith("<"):
            return
        sys.setprofile(None)
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        if any(given(frame.f_locals.get(name)) for name in code.co_varnames[:count]):
            files[str(Path(code.co_filename).relative_to(LIBRARY))] = None
        sys.setprofile(watch)

    sys.setprofile(watch)
    try:
        out = call()
    finally:
        sys.setprofile(None)
    return out, [file for file in files if file not in PASSED_ON]


def memory_of(x: Tensor) -> Callable[[Any], bool]:
    """Whether something is this tensor, or a view of it."""
    where = x.untyped_storage().data_ptr()
    return lambda y: isinstance(y, Tensor) and y.device == x.device and y.untyped_storage().data_ptr() == where


def is_spec(x: Any) -> bool:
    return isinstance(x, KVScheme) or (isinstance(x, str) and x == SPEC)


def rows(tokens: int, heads: int = 2) -> Tensor:
    return torch.randn(1, heads, tokens, 64, generator=torch.Generator().manual_seed(tokens)).half()


@pytest.mark.parametrize("way", ["decoded", "streamed", "fused"])
def test_spec_in_cache_for(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "refusal", lambda device: "")
    model = tiny_model("llama-gqa")
    model.set_attn_implementation("packedkv")
    _, files = entered(lambda: cache_for(model, SPEC, attention=way), is_spec)
    assert 3 <= len(files) <= MOST, files


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("way", ["streamed", "fused"])
def test_query_in_the_attention_function(way: Any, tokens: int, machine: dict[str, Any]) -> None:
    model = tiny_model("llama-gqa")
    model.set_attn_implementation("packedkv")
    cache = cache_for(model, SPEC, attention=way, probe="off")
    query, module = rows(tokens, 4), model.model.layers[0].self_attn
    cache.update(rows(80), rows(80), 0)
    keys, values = cache.update(rows(tokens), rows(tokens), 0)
    _, files = entered(lambda: packedkv_attention(module, query, keys, values, None), memory_of(query))
    assert 3 <= len(files) <= MOST, files


@pytest.mark.parametrize("capacity", [0, 256])
@pytest.mark.parametrize("made", [packedkv.LayerCache, FusedLayerCache])
def test_keys_in_append(made: Any, capacity: int, machine: dict[str, Any]) -> None:
    cache, keys = made(packedkv.get("int-8"), capacity=capacity), rows(80)
    _, files = entered(lambda: cache.append(keys, rows(80)), memory_of(keys))
    assert 2 <= len(files) <= MOST, files
    assert ("kernels/cuda/encode.py" in files) == (made is FusedLayerCache)
