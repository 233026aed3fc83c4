"""Attention beside the packed kernels: what torch ships, and other libraries if importable, quantized ones included.

Every rival gets the same queries, keys and values in the layout it likes best; building that is not timed. Before it is
timed, its output is compared with torch's (``error_of``): a call that computes something else is no rival.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcodec_lab.bench import vllm_rivals
from kvcodec_lab.bench.shapes import Shape

Call = Callable[[], Tensor]
MOST_ERROR = {16.0: 0.02, 8.0: 0.2}
"""Largest relative difference from torch's 16-bit attention by bits; QUANTIZED_ERROR for what holds fewer."""
QUANTIZED_ERROR = 0.6
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Rival(NamedTuple):
    """One way to attend: name of the library or backend, form, bits of its cache, and how to get a call of it."""

    backend: str
    form: str
    bits: float
    make: Callable[[], Call]

    @property
    def spec(self) -> str:
        """What its rows are called: ``dense``, ``dense-fp8``, or ``rival`` for other libraries' quantized caches."""
        return {16.0: "dense", 8.0: "dense-fp8"}.get(self.bits, "rival")


class Dense:
    """Uncompressed queries, keys and values of one shape, bf16 ``[B, H, T, D]``.

    Parameters
    ----------
    shape : Shape
    device : torch.device
    seed : int
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)

        def draw(batch: int, heads: int, n: int) -> Tensor:
            size = (batch, heads, n, shape.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        self.q = draw(shape.batch, shape.query_heads, 1)
        held = [draw(shape.held, shape.kv_heads, shape.tokens) for _ in "kv"]
        self.k, self.v = (x.expand(shape.batch, -1, -1, -1) for x in held)

    @cached_property
    def expected(self) -> Tensor:
        """What attention gives, ``[B, HQ, D]``."""
        return self.sdpa(False)[:, :, 0].float()

    def error_of(self, found: Tensor) -> float:
        """Relative difference of a rival's output, of any shape with the elements in this order."""
        other = found.reshape(self.expected.shape).float()
        return float((other - self.expected).norm() / self.expected.norm())

    def sdpa(self, packed: bool) -> Tensor:
        """Attention by torch; ``packed``: the heads of a group as query rows, so that no head is read twice."""
        s = self.shape
        if packed:
            q = self.q.view(s.batch, s.kv_heads, s.group, s.head_dim)
            return scaled_dot_product_attention(q, self.k, self.v).view(self.q.shape)
        return scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=s.group > 1)

    def paged(self, page: int, heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in pages ``[n, H, P, D]`` or ``[n, P, H, D]``, in random order, and the table ``[B, M]``."""
        s = self.shape
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


def torch_rivals(dense: Dense) -> Iterator[Rival]:
    """SDPA by cuDNN and flash, with ``enable_gqa`` and with the heads of a group as query rows."""
    forms = {"group as query rows": True, "enable_gqa": False}
    for name, backend in BACKENDS.items():
        for form, packed in list(forms.items())[: 2 if dense.shape.group > 1 else 1]:

            def call(backend: SDPBackend = backend, packed: bool = packed) -> Tensor:
                with sdpa_kernel([backend]):
                    return dense.sdpa(packed)

            yield Rival(name, form, 16.0, lambda call=call: call)  # type: ignore[misc]


def library_rivals(dense: Dense) -> Iterator[Rival]:
    """FlexAttention, FlashInfer, FlashAttention-3 (its own package and vLLM's build), vLLM's quantized caches."""
    yield Rival("flex", "flex_attention, compiled", 16.0, lambda: _flex(dense))
    yield Rival("flashinfer", "paged decode", 16.0, lambda: _flashinfer(dense))
    yield Rival("flash-attention-3", "contiguous", 16.0, lambda: _flash3(dense, torch.bfloat16))
    yield Rival("flash-attention-3", "contiguous, fp8", 8.0, lambda: _flash3(dense, torch.float8_e4m3fn))
    yield Rival("flash-attention-3 of vllm", "paged", 16.0, lambda: vllm_rivals.flash3(dense, fp8=False))
    yield Rival("flash-attention-3 of vllm", "paged, fp8", 8.0, lambda: vllm_rivals.flash3(dense, fp8=True))
    for form, (bits, make) in vllm_rivals.QUANTIZED.items():
        yield Rival("vllm", form, bits, partial(make, dense))


def _flex(dense: Dense) -> Call:
    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    compiled: Any = torch.compile(flex, dynamic=False)
    return lambda: compiled(dense.q, dense.k, dense.v, enable_gqa=dense.shape.group > 1)


def _flashinfer(dense: Dense) -> Call:
    flashinfer: Any = importlib.import_module("flashinfer")
    s, device = dense.shape, dense.q.device
    k, v, table = dense.paged(16, heads_first=True)
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


def missing(error: BaseException) -> str:
    """Turn what stopped a rival into the status of its row."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    return f"not available: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
