"""Other libraries at the jobs that are timed: decode attention on GPUs and CPUs, and quantizers. None is required.

Each gets the same queries, keys and values in its own layout, which is built before timing; a wrong output is not
timed. vLLM's attention is called by its operators, with the caches, split counts and launches of vLLM 0.33's backends.
llama.cpp is ``ggml_flash_attn_ext`` alone; storing and rotating the new token, and QuantizedCache's encoding every 128
tokens, are not counted. Quantizers take a token of a head as a row: ``group=128`` at head_dim 128 is the job of
``int-4``.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from packedkv.cli.measure.quantized_cache import PACKAGES, tensors_of
from packedkv.errors import KVError
from packedkv.kernels.flash import WIDEST
from packedkv.ops.hadamard import block_hadamard
from packedkv_lab.bench.shapes import Shape

Call = Callable[[], Tensor]
MOST_ERROR = {16.0: 0.02, 8.0: 0.2}
"""Largest relative difference from torch's 16-bit attention by bits; QUANTIZED_ERROR for what holds fewer."""
QUANTIZED_ERROR = 0.6
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
VLLM_OPS = "vllm.v1.attention.ops"
STORED_TOKENS = 1 << 16
"""Tokens that are stored at a time: the stores hold float32 copies of what they get."""
SEGMENTS = 16
LEAST_PROGRAMS = 128
"""vLLM's Triton attention splits sequences into SEGMENTS while sequences x KV heads are no more than this."""
TURBOQUANT_SPLITS = 32


class AttentionRival(NamedTuple):
    """An attention implementation: library or backend, form, bits of its cache, and a factory of the timed call."""

    backend: str
    form: str
    bits: float
    make: Callable[[], Call]

    @property
    def spec(self) -> str:
        """What its rows are called: ``dense``, ``dense-fp8``, or ``rival`` for other libraries' quantized caches."""
        return {16.0: "dense", 8.0: "dense-fp8"}.get(self.bits, "rival")


class Dense:
    """Uncompressed queries, keys and values of one shape, bf16 ``[B, H, T, D]``."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)

        def draw(batch: int, heads: int, n: int) -> Tensor:
            size = (batch, heads, n, shape.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        self.q = draw(shape.batch, shape.query_heads, 1)
        tensors = [draw(shape.kv_batch, shape.kv_heads, shape.tokens) for _ in "kv"]
        self.k, self.v = (x.expand(shape.batch, -1, -1, -1) for x in tensors)

    @cached_property
    def expected(self) -> Tensor:
        """The expected output, ``[B, HQ, D]``."""
        return self.sdpa(False)[:, :, 0].float()

    def error_of(self, output: Tensor) -> float:
        """Relative difference of a rival's output, of any shape with the elements in this order."""
        other = output.reshape(self.expected.shape).float()
        return float((other - self.expected).norm() / self.expected.norm())

    def sdpa(self, packed: bool) -> Tensor:
        """Attention by torch; ``packed``: the heads of a group as query rows, so that no head is read twice."""
        s = self.shape
        if packed:
            q = self.q.view(s.batch, s.kv_heads, s.group, s.head_dim)
            return scaled_dot_product_attention(q, self.k, self.v).reshape(self.q.shape)
        return scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=s.group > 1)

    def paged(self, heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """K and V in pages ``[n, H, 16, D]`` or ``[n, 16, H, D]`` in random order, and the table ``[B, M]``."""
        s, page = self.shape, 16
        columns = -(-s.tokens // page)
        generator = torch.Generator(self.q.device).manual_seed(1)
        order = torch.randperm(s.batch * columns, generator=generator, device=self.q.device)
        pools = []
        for x in (self.k, self.v):
            full = torch.nn.functional.pad(x, (0, 0, 0, columns * page - s.tokens))
            cut = full.view(s.batch, s.kv_heads, columns, page, s.head_dim)
            cut = cut.permute(0, 2, 1, 3, 4) if heads_first else cut.permute(0, 2, 3, 1, 4)
            pool = torch.empty_like(cut.flatten(0, 1), memory_format=torch.contiguous_format)
            pool[order] = cut.flatten(0, 1)
            pools.append(pool)
        return pools[0], pools[1], order.view(s.batch, columns).int()


def torch_rivals(dense: Dense) -> Iterator[AttentionRival]:
    """SDPA by cuDNN and flash, with ``enable_gqa`` and with the heads of a group as query rows.

    Of a head_dim that flash attention does not take, memory-efficient attention as well.
    """
    forms = {"group as query rows": True, "enable_gqa": False}
    backends = BACKENDS
    if dense.shape.head_dim > WIDEST:
        backends = BACKENDS | {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, backend in backends.items():
        for form, packed in list(forms.items())[: 2 if dense.shape.group > 1 else 1]:
            yield AttentionRival(name, form, 16.0, partial(_sdpa, dense, backend, packed))


def _sdpa(dense: Dense, backend: SDPBackend, packed: bool) -> Call:
    def call() -> Tensor:
        with sdpa_kernel([backend]):
            return dense.sdpa(packed)

    return call


def library_rivals(dense: Dense) -> Iterator[AttentionRival]:
    """FlexAttention, FlashInfer, FlashAttention-3 (its own package and vLLM's build), vLLM's quantized caches."""
    yield AttentionRival("flex", "flex_attention, compiled", 16.0, lambda: _flex(dense.q, dense.k, dense.v))
    yield AttentionRival("flashinfer", "paged decode", 16.0, lambda: _flashinfer(dense))
    yield AttentionRival("flash-attention-3", "contiguous", 16.0, lambda: _flash3(dense, torch.bfloat16))
    yield AttentionRival("flash-attention-3", "contiguous, fp8", 8.0, lambda: _flash3(dense, torch.float8_e4m3fn))
    yield AttentionRival("flash-attention-3 of vllm", "paged", 16.0, lambda: vllm_flash3(dense, fp8=False))
    yield AttentionRival("flash-attention-3 of vllm", "paged, fp8", 8.0, lambda: vllm_flash3(dense, fp8=True))
    for form, (bits, make) in VLLM_QUANTIZED.items():
        yield AttentionRival("vllm", form, bits, partial(make, dense))


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    compiled: Any = torch.compile(flex, dynamic=False)
    return lambda: compiled(q, k, v, enable_gqa=q.shape[1] > k.shape[1])


def _flashinfer(dense: Dense) -> Call:
    flashinfer: Any = importlib.import_module("flashinfer")
    s, device = dense.shape, dense.q.device
    k, v, table = dense.paged(heads_first=True)
    columns = table.shape[1]
    work = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "HND", use_tensor_cores=s.group > 1)
    starts = torch.arange(0, s.batch * columns + 1, columns, dtype=torch.int32, device=device)
    last = torch.full((s.batch,), s.tokens - (columns - 1) * 16, dtype=torch.int32, device=device)
    wrapper.plan(starts, table.flatten(), last, s.query_heads, s.kv_heads, s.head_dim, 16, q_data_type=torch.bfloat16)
    return lambda: wrapper.run(dense.q[:, :, 0], (k, v))


def _flash3(dense: Dense, dtype: torch.dtype) -> Call:
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    q, k, v = (x.transpose(1, 2).contiguous().to(dtype) for x in (dense.q, dense.k, dense.v))
    lengths = torch.full((dense.shape.batch,), dense.shape.tokens, dtype=torch.int32, device=q.device)
    return lambda: attend(q, k, v, cache_seqlens=lengths)


# -- vLLM --------------------------------------------------------------------------------------------------------------


class VllmBlocks:
    """A paged cache of any bytes: blocks of ``block`` tokens in random order behind a table.

    ``slot`` is the number of bytes of a token of a head.
    """

    def __init__(self, dense: Dense, block: int, slot: int) -> None:
        s, device = dense.shape, dense.q.device
        self.dense, self.block = dense, block
        columns = -(-s.tokens // block)
        generator = torch.Generator(device).manual_seed(1)
        order = torch.randperm(s.batch * columns, generator=generator, device=device)
        self.table = order.view(s.batch, columns).int()
        self.lengths = torch.full((s.batch,), s.tokens, dtype=torch.int32, device=device)
        self.starts = torch.arange(s.batch + 1, dtype=torch.int32, device=device)
        # [blocks, block, H, slot], as vLLM's kernels index it
        self.bytes = torch.zeros(s.batch * columns, block, s.kv_heads, slot, dtype=torch.uint8, device=device)

    def each(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values ``[n, H, D]`` and slots ``[n]``, some tokens at a time."""
        s = self.dense.shape
        for b in range(s.batch):
            for first in range(0, s.tokens, STORED_TOKENS):
                at = torch.arange(first, min(first + STORED_TOKENS, s.tokens), device=self.bytes.device)
                slots = self.table[b, at // self.block].long() * self.block + at % self.block
                key, value = (x[b, :, at].transpose(0, 1).contiguous() for x in (self.dense.k, self.dense.v))
                yield key, value, slots

    @property
    def q(self) -> Tensor:
        """Queries ``[B, HQ, D]``."""
        return self.dense.q[:, :, 0]


def hadamard(dim: int, device: torch.device) -> Tensor:
    """Orthonormal and symmetric, float32 ``[D, D]``."""
    return block_hadamard(torch.eye(dim, device=device), dim)


def _vllm_file(name: str) -> Any:
    """Load one file of vLLM's quantization layers; its packages would import the whole engine."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    path = Path(package.submodule_search_locations[0], "model_executor/layers/quantization", *name.split("."))
    spec = importlib.util.spec_from_file_location(f"packedkv_of_vllm.{name}", path.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def vllm_turboquant(dense: Dense, preset: str) -> Call:
    """``turboquant_4bit_nc`` or ``turboquant_3bit_nc``."""
    config: Any = _vllm_file("turboquant.config").TurboQuantConfig.from_cache_dtype(preset, dense.shape.head_dim)
    store = importlib.import_module(f"{VLLM_OPS}.triton_turboquant_store").triton_turboquant_store
    attend = importlib.import_module(f"{VLLM_OPS}.triton_turboquant_decode").triton_turboquant_decode_attention
    blocks = VllmBlocks(dense, 32, config.slot_size_aligned)
    device, dim = dense.q.device, dense.shape.head_dim
    centroids = _vllm_file("turboquant.centroids").get_centroids(dim, config.centroid_bits)
    centroids = centroids.to(device=device, dtype=torch.float32)
    ordered = centroids.sort().values
    midpoints, rotation = (ordered[:-1] + ordered[1:]) / 2, hadamard(dim, device)
    bits = {
        "mse_bits": config.key_mse_bits, "key_packed_size": config.key_packed_size,
        "value_quant_bits": config.effective_value_quant_bits,
    }  # fmt: skip
    for key, value, slots in blocks.each():
        store(key, value, blocks.bytes, slots, rotation, midpoints, **bits)
    return partial(
        attend, blocks.q.contiguous(), blocks.bytes, blocks.table, blocks.lengths, rotation, centroids, dim**-0.5,
        norm_correction=config.norm_correction, PiT=rotation, max_num_kv_splits=TURBOQUANT_SPLITS, **bits,
    )  # fmt: skip


def vllm_int4(dense: Dense) -> Call:
    """``int4_per_token_head``: keys and values rotated, a scale and zero per token and head in the record."""
    kernels: Any = importlib.import_module(f"{VLLM_OPS}.int4_per_token_head")
    s, device = dense.shape, dense.q.device
    # codes as wide as int8 ones, of which half are used, and a float32 scale behind them: vLLM's slot is half as wide
    half = s.head_dim // 2 + 4
    blocks = VllmBlocks(dense, 16, 2 * half)
    keys, values = blocks.bytes.split(half, dim=-1)
    scales = [x.view(torch.float32)[..., -1] for x in (keys, values)]
    sides = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
    for key, value, slots in blocks.each():
        kernels.reshape_and_cache_int4(key, value, keys, values, slots, **sides)
    segments: dict[str, Any] = {}
    if s.batch * s.kv_heads <= LEAST_PROGRAMS:
        size = s.batch, s.query_heads, SEGMENTS
        segments = {
            "seq_threshold_3D": LEAST_PROGRAMS // s.kv_heads, "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": torch.empty(*size, s.head_dim, device=device),
            "softmax_segm_max": torch.empty(size, device=device),
            "softmax_segm_expsum": torch.empty(size, device=device),
        }  # fmt: skip
    q = blocks.q.contiguous()
    out = torch.empty_like(q)

    def attend() -> Tensor:
        kernels.unified_attention_int4(
            q, keys, values, out, cu_seqlens_q=blocks.starts, max_seqlen_q=1, seqused_k=blocks.lengths,
            max_seqlen_k=s.tokens, softmax_scale=s.head_dim**-0.5, window_size=(-1, -1), block_table=blocks.table,
            softcap=0.0, sinks=None, alibi_slopes=None, use_alibi_sqrt=False, qq_bias=None, output_scale=None,
            mm_prefix_range=None, **sides, **segments,
        )  # fmt: skip
        return out

    return attend


def vllm_ultraquant(dense: Dense) -> Call:
    """``ultraquant_4bit``: FP4 with power-of-two scales, keys rotated, queries in fp8."""
    store = importlib.import_module(f"{VLLM_OPS}.ultraquant.triton_store").ultraquant_store
    attend = importlib.import_module(f"{VLLM_OPS}.ultraquant.triton_unified_attention").ultraquant_unified_attention
    slot = importlib.import_module(f"{VLLM_OPS}.ultraquant.format").slot_size(dense.shape.head_dim)
    blocks = VllmBlocks(dense, 64, slot)
    for key, value, slots in blocks.each():
        store(key, value, blocks.bytes, slots)
    return partial(
        attend, blocks.q.contiguous(), blocks.bytes, blocks.table, blocks.lengths, blocks.starts,
        dense.shape.head_dim**-0.5, PiT=hadamard(dense.shape.head_dim, dense.q.device), max_query_len=1,
        max_seq_len=dense.shape.tokens,
    )  # fmt: skip


def vllm_flash3(dense: Dense, fp8: bool) -> Call:
    """FlashAttention-3 over 16-bit or fp8 pages of 16 tokens; fp8 queries as well, as its kernel asks."""
    attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    s, device = dense.shape, dense.q.device
    k, v, table = dense.paged(heads_first=False)
    q, scales = dense.q[:, :, 0], {}
    if fp8:
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        one = torch.ones(s.batch, s.kv_heads, device=device)
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    starts = torch.arange(s.batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((s.batch,), s.tokens, dtype=torch.int32, device=device)
    return partial(
        attend, q, k, v, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=s.tokens, seqused_k=lengths,
        block_table=table, fa_version=3, **scales,
    )  # fmt: skip


VLLM_QUANTIZED: dict[str, tuple[float, Callable[[Dense], Call]]] = {
    "int4_per_token_head (Triton)": (4.25, vllm_int4),
    "turboquant_4bit_nc (Triton)": (4.1875, partial(vllm_turboquant, preset="turboquant_4bit_nc")),
    "turboquant_3bit_nc (Triton)": (3.1875, partial(vllm_turboquant, preset="turboquant_3bit_nc")),
    "ultraquant_4bit (Triton, made for another GPU)": (4.25, vllm_ultraquant),
}
"""Forms by name: bits per element at head_dim 128, and what makes the call."""


# -- attention on a CPU ------------------------------------------------------------------------------------------------


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # not even the package above it
        return True


class CpuRival(NamedTuple):
    """Attention on a CPU: name of its rows, distribution, module, largest relative difference from SDPA, factory.

    ``make(q, k, v)``, float32 ``[B, HQ, 1, D]`` and ``[B, H, T, D]``, returns the call that is timed, which returns
    ``[B, HQ, 1, D]``, and the bytes that the library holds.
    """

    spec: str
    package: str
    module: str
    error: float
    make: Callable[[Tensor, Tensor, Tensor], tuple[Call, int]]

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        return _missing(self.module)

    def version(self) -> dict[str, str]:
        """Return the library's version by its name, for the rows."""
        return {self.package: importlib.metadata.version(self.package)}

    @torch.no_grad()
    def checked(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, float]:
        """Return the call that is timed, and the bits of a number held; ``KVError`` if it does not attend as SDPA."""
        call, nbytes = self.make(q, k, v)
        want = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        error = float((call() - want).norm() / want.norm())
        if not error <= self.error:
            raise KVError(
                f"bench decode: {self.spec} differs from SDPA by {error:.2g} of its norm ({self.error} allowed)."
            )
        return call, 8 * nbytes / (k.numel() + v.numel())


def cpu_rivals() -> list[CpuRival]:
    """Every rival, installed or not."""
    return [
        CpuRival(
            "flex",
            "torch",
            "torch.nn.attention.flex_attention",
            1e-4,
            lambda q, k, v: (_flex(q, k, v), k.nbytes + v.nbytes),
        ),
        *(
            CpuRival(f"llama.cpp-{name}", "llama-cpp-python", "llama_cpp", error, partial(_llama, number))
            for name, (number, error) in GGML_TYPES.items()
        ),
        *(
            CpuRival(f"quantized-cache-{name}", package, module, 0.5, partial(_quantized_cache, QUANTIZED_CACHES[name]))
            for name, (module, package) in PACKAGES.items()
        ),
    ]


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
    package = importlib.util.find_spec("llama_cpp")
    assert package is not None
    assert package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0], "lib")
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
        tensors = [g.ggml_new_tensor_3d(context, kind, dim, heads, tokens) for _ in "kv"]
        views = [g.ggml_permute(context, x, 0, 2, 1, 3) for x in tensors]
        self.out = g.ggml_flash_attn_ext(context, self.q, *views, None, dim**-0.5, 0.0, 0.0)
        self.graph = g.ggml_new_graph(context)
        g.ggml_build_forward_expand(self.graph, self.out)
        self.backend = g.ggml_backend_cpu_init()
        g.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        self.buffer = g.ggml_backend_alloc_ctx_tensors(context, self.backend)
        self.nbytes = sum(g.ggml_nbytes(x) for x in tensors)
        self._set(self.q, q.contiguous())
        for tensor, x in zip(tensors, (k, v), strict=True):
            rows = x[0].transpose(0, 1).contiguous()  # a token's heads side by side
            packed = torch.empty(g.ggml_nbytes(tensor), dtype=torch.uint8)
            g.ggml_quantize_chunk(kind, rows.data_ptr(), packed.data_ptr(), 0, heads * tokens, dim, None)
            self._set(tensor, packed)
        self.result = torch.empty(q.shape)

    def _set(self, tensor: int, x: Tensor) -> None:
        self.ggml.ggml_backend_tensor_set(tensor, x.data_ptr(), 0, x.nbytes)

    def __call__(self) -> Tensor:
        if status := self.ggml.ggml_backend_graph_compute(self.backend, self.graph):
            raise KVError(f"bench decode: ggml's attention failed with status {status}.")
        self.ggml.ggml_backend_tensor_get(self.out, self.result.data_ptr(), 0, self.result.nbytes)
        return self.result

    def __del__(self) -> None:
        self.ggml.ggml_backend_buffer_free(self.buffer)
        self.ggml.ggml_backend_free(self.backend)
        self.ggml.ggml_free(self.context)


def _llama(kind: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, int]:
    if q.shape[0] != 1:
        raise KVError(f"bench decode: llama.cpp's attention is timed for one sequence, not {q.shape[0]}; --batch 1.")
    call = _LlamaAttention(kind, q, k, v)
    return call, call.nbytes


QUANTIZED_CACHES = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer"}
"""Layers of transformers by backend."""


def _quantized_cache(layer: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, int]:
    cache = getattr(importlib.import_module("transformers.cache_utils"), layer)()
    cache.update(k[:, :, :-1], v[:, :, :-1])
    new, dense = (k[:, :, -1:], v[:, :, -1:]), (cache.keys, cache.values)

    def call() -> Tensor:
        cache.keys, cache.values = dense  # so that the cache does not grow from call to call
        keys, values = cache.update(*new)
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return call, sum(x.nbytes for x in tensors_of([cache._quantized_keys, cache._quantized_values]))


# -- quantizers --------------------------------------------------------------------------------------------------------


class QuantizerRival(NamedTuple):
    """A quantizer: name of its rows, module, the spec whose job it does, and its calls on ``x [rows, D]``."""

    name: str
    module: str
    job: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]

    @property
    def missing(self) -> bool:
        """Whether the library is not installed, or cannot be imported."""
        if _missing(self.module):
            return True
        try:
            importlib.import_module(self.module)
        except ImportError:
            return True
        return False

    def nbytes(self, packed: Any) -> int:
        """Bytes of the tensors of what ``encode`` returned."""
        return sum(x.nbytes for x in tensors_of(packed))


def _hqq(bits: int, group: int, x: Tensor) -> Any:
    # optimize=False is plain rounding, the job of int-4; the default refines zero points for weights
    return importlib.import_module("hqq.core.quantize").Quantizer.quantize(
        x, nbits=bits, group_size=group, axis=1, optimize=False, device=str(x.device), compute_dtype=x.dtype
    )


def _quanto(bits: int, group: int, x: Tensor) -> Any:
    quanto = importlib.import_module("optimum.quanto")
    kind = {2: quanto.qint2, 4: quanto.qint4}[bits]
    scale, shift = quanto.MaxOptimizer()(x, qtype=kind, axis=0, group_size=group)
    return quanto.quantize_weight(x, qtype=kind, axis=0, scale=scale, shift=shift, group_size=group)


QUANTIZERS: dict[str, tuple[Callable[[int, int, Tensor], Any], Callable[[Any], Tensor]]] = {
    "hqq": (_hqq, lambda packed: importlib.import_module("hqq.core.quantize").Quantizer.dequantize(*packed)),
    "quanto": (_quanto, lambda packed: packed.dequantize()),
}


def quantizer_rivals(head_dim: int) -> list[QuantizerRival]:
    """Quantizers that do the job of ``int-4`` and ``int-2`` at this head_dim, installed or not."""
    return [
        QuantizerRival(f"{name}-{bits}", PACKAGES[name][0], f"int-{bits}", partial(encode, bits, head_dim), decode)
        for name, (encode, decode) in QUANTIZERS.items()
        for bits in (4, 2)
    ]
