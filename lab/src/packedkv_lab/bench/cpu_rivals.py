"""Decode attention of other libraries on a CPU, for ``packedkv bench decode --device cpu``; none of them is required.

What is timed, one layer and one new token:

``flex``
    ``flex_attention`` of PyTorch, compiled, on float32 keys and values.
``llama.cpp-f16``, ``llama.cpp-q8_0``, ``llama.cpp-q4_0``
    The operator ``ggml_flash_attn_ext`` alone, by ggml's CPU backend in the libraries that llama-cpp-python brings.
    Keys and values lie as in llama.cpp's cache (a token's heads side by side), without a mask, which it would add.
    Storing the new token, and rotating it, are not counted.
``quantized-cache-quanto``, ``quantized-cache-hqq``
    A layer of transformers' ``QuantizedCache`` with its default options: ``update``, which decodes everything, and SDPA
    on what it returns. That it encodes everything again every 128 tokens is not counted.

Each output is compared with float32 SDPA before it is timed.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.errors import KVError
from packedkv_lab.bench.quantizer_rivals import held_bytes

Call = Callable[[], Tensor]


class CpuRival(NamedTuple):
    """Attention of another library over keys and values that it has made its own.

    Parameters
    ----------
    spec : str
        Name of its rows.
    package : str
        The distribution that it comes from.
    module : str
        What must be importable.
    error : float
        Largest relative difference from SDPA.
    make : callable
        (q ``[B, HQ, 1, D]``, k, v ``[B, H, T, D]``, float32) -> the call that is timed, which returns
        ``[B, HQ, 1, D]``, and the bytes that it holds.
    """

    spec: str
    package: str
    module: str
    error: float
    make: Callable[[Tensor, Tensor, Tensor], tuple[Call, int]]

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        try:
            return importlib.util.find_spec(self.module) is None
        except ModuleNotFoundError:  # not even the package above it
            return True

    def version(self) -> dict[str, str]:
        """Return the library's version by its name, for the rows."""
        return {self.package: importlib.metadata.version(self.package)}

    @torch.no_grad()
    def checked(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, float]:
        """Return the call that is timed, and the bits of a number held.

        Raises
        ------
        KVError
            Its output is not that of SDPA.
        """
        call, held = self.make(q, k, v)
        want = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        found = float((call() - want).norm() / want.norm())
        if not found <= self.error:
            raise KVError(
                f"bench decode: {self.spec} differs from SDPA by {found:.2g} of its norm ({self.error} allowed)."
            )
        return call, 8 * held / (k.numel() + v.numel())


def cpu_rivals() -> list[CpuRival]:
    """Every rival, installed or not."""
    return [
        CpuRival("flex", "torch", "torch.nn.attention.flex_attention", 1e-4, _flex),
        *(
            CpuRival(f"llama.cpp-{name}", "llama-cpp-python", "llama_cpp", error, partial(_llama, number))
            for name, (number, error) in GGML_TYPES.items()
        ),
        *(
            CpuRival(f"quantized-cache-{name}", package, module, 0.5, partial(_quantized_cache, layer, module))
            for name, package, module, layer in QUANTIZED_CACHES
        ),
    ]


def _flex(q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, int]:
    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    compiled: Any = torch.compile(flex, dynamic=False)
    return lambda: compiled(q, k, v, enable_gqa=q.shape[1] > k.shape[1]), k.nbytes + v.nbytes


# -- llama.cpp ---------------------------------------------------------------------------------------------------------

GGML_TYPES = {"f16": (1, 0.2), "q8_0": (8, 5e-2), "q4_0": (2, 0.5)}
"""ggml_type and largest difference, by name; over f16 it sums values in fp16, which shows at 64k tokens."""
F32 = 0


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (c_void_p, (_InitParams,)),
    "ggml_new_tensor_3d": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64)),
    "ggml_permute": (c_void_p, (c_void_p, c_void_p, c_int, c_int, c_int, c_int)),
    "ggml_flash_attn_ext": (c_void_p, (c_void_p,) * 5 + (c_float,) * 3),
    "ggml_new_graph": (c_void_p, (c_void_p,)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_quantize_chunk": (c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
    "ggml_backend_cpu_init": (c_void_p, ()),
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_free": (None, (c_void_p,)),
    "ggml_free": (None, (c_void_p,)),
}
"""Results and arguments of ggml's functions by name."""


@cache
def _ggml() -> Any:
    """Functions of both of ggml's libraries that are called here."""
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0], "lib")
    libraries = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu")]
    functions = SimpleNamespace()
    for name, (result, arguments) in FUNCTIONS.items():
        function = next(getattr(one, name) for one in libraries if hasattr(one, name))
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    return functions


class _LlamaAttention:
    """One graph of one ``ggml_flash_attn_ext`` over a cache of a type, for one sequence."""

    def __init__(self, kind: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.ggml = g = _ggml()
        self.context = context = g.ggml_init(_InitParams(1 << 20, None, True))
        heads, tokens, dim = k.shape[1:]
        self.q = g.ggml_new_tensor_3d(context, F32, dim, 1, q.shape[1])
        held = [g.ggml_new_tensor_3d(context, kind, dim, heads, tokens) for _ in "kv"]
        views = [g.ggml_permute(context, x, 0, 2, 1, 3) for x in held]
        self.out = g.ggml_flash_attn_ext(context, self.q, *views, None, dim**-0.5, 0.0, 0.0)
        self.graph = g.ggml_new_graph(context)
        g.ggml_build_forward_expand(self.graph, self.out)
        self.backend = g.ggml_backend_cpu_init()
        g.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        self.buffer = g.ggml_backend_alloc_ctx_tensors(context, self.backend)
        self.nbytes = sum(g.ggml_nbytes(x) for x in held)
        self._set(self.q, q.contiguous())
        for tensor, x in zip(held, (k, v), strict=True):
            rows = x[0].transpose(0, 1).contiguous()  # a token's heads side by side
            packed = torch.empty(g.ggml_nbytes(tensor), dtype=torch.uint8)
            g.ggml_quantize_chunk(kind, rows.data_ptr(), packed.data_ptr(), 0, heads * tokens, dim, None)
            self._set(tensor, packed)
        self.found = torch.empty(q.shape)

    def _set(self, tensor: int, x: Tensor) -> None:
        self.ggml.ggml_backend_tensor_set(tensor, x.data_ptr(), 0, x.nbytes)

    def __call__(self) -> Tensor:
        if status := self.ggml.ggml_backend_graph_compute(self.backend, self.graph):
            raise KVError(f"bench decode: ggml's attention failed with status {status}.")
        self.ggml.ggml_backend_tensor_get(self.out, self.found.data_ptr(), 0, self.found.nbytes)
        return self.found

    def __del__(self) -> None:
        self.ggml.ggml_backend_buffer_free(self.buffer)
        self.ggml.ggml_backend_free(self.backend)
        self.ggml.ggml_free(self.context)


def _llama(kind: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, int]:
    if q.shape[0] != 1:
        raise KVError(f"bench decode: llama.cpp's attention is timed for one sequence, not {q.shape[0]}; --batch 1.")
    call = _LlamaAttention(kind, q, k, v)
    return call, call.nbytes


# -- transformers ------------------------------------------------------------------------------------------------------


QUANTIZED_CACHES = (
    ("quanto", "optimum-quanto", "optimum.quanto", "QuantoQuantizedLayer"),
    ("hqq", "hqq", "hqq.core.quantize", "HQQQuantizedLayer"),
)


def _quantized_cache(layer: str, module: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, int]:
    cache = getattr(importlib.import_module("transformers.cache_utils"), layer)()
    cache.update(k[:, :, :-1], v[:, :, :-1])
    new, dense = (k[:, :, -1:], v[:, :, -1:]), (cache.keys, cache.values)

    def call() -> Tensor:
        cache.keys, cache.values = dense  # so that the cache does not grow from call to call
        keys, values = cache.update(*new)
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return call, sum(held_bytes(module, x) for x in (cache._quantized_keys, cache._quantized_values))
