"""Encoding into pages as the GPU benches time it, and whether the bytes are the reference's.

``encode_operator`` knows how the kernels are called.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcodec.cache.fused import fused_refusal
from kvcodec.cache.pages import PageStore
from kvcodec.codec import ROLES, Params, Role, Site
from kvcodec.errors import UnsupportedError
from kvcodec_lab.bench.packed import LAYER, scheme_of
from kvcodec_lab.bench.shapes import Shape

FIT_TOKENS = 4096
CHECKED_TOKENS = 128


@dataclass
class Encoding:
    """Keys and values, empty pages in random order, and calls that write one into the other.

    Parameters
    ----------
    spec : str
    shape : Shape
    keys, values : Tensor bf16 ``[B, H, T, D]``
    store : PageStore
    params : dict of role to Params
    write : callable
        ``write(keys or None, values or None)``: encodes them from slot 0 on.
    path : str
        ``cuda`` or ``triton``.
    """

    spec: str
    shape: Shape
    keys: Tensor
    values: Tensor
    store: PageStore
    params: dict[Role, Params]
    write: Callable[[Tensor | None, Tensor | None], object]
    path: str

    def encode(self) -> None:
        """Encode all tokens, whole blocks of them."""
        key, value = (self.whole(role, x) for role, x in zip(ROLES, (self.keys, self.values), strict=True))
        self.write(key, value)

    def whole(self, role: Role, x: Tensor) -> Tensor:
        """Return ``x`` without an unfinished block at its end."""
        block = self.block(role)
        return x[:, :, : x.shape[2] // block * block]

    def block(self, role: Role) -> int:
        """Tokens of a block."""
        return scheme_of(self.spec).codec(role).block_tokens

    @property
    def bytes_moved(self) -> int:
        """Bytes that encoding must read and write: K and V in bf16, the planes of all whole blocks."""
        s, written = self.shape, 0
        for plane in self.store.layout.planes:
            tokens = self.store.layout.page_tokens // plane.blocks
            written += s.tokens // tokens * plane.field.nbytes * s.batch * s.kv_heads
        return s.bf16_bytes + written


def encode_operator(spec: str, shape: Shape, device: torch.device, seed: int, engine: str = "") -> Encoding:
    """Draw keys and values and find the kernel that encodes them: the one that a cache chooses, or Triton's.

    Raises
    ------
    UnsupportedError
        If no kernel encodes both roles; the text says why.
    """
    scheme = scheme_of(spec)
    layout = scheme.page_layout(shape.head_dim)
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    keys, values = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in ROLES)
    params: dict[Role, Params] = {}
    for role, x in zip(ROLES, (keys, values), strict=True):
        codec = scheme.codec(role)
        site = Site(LAYER, role, shape.kv_heads, shape.head_dim, seed)
        sample = x[:1, :, :FIT_TOKENS].float().cpu() if codec.needs_sample else None
        params[role] = {name: p.to(device) for name, p in codec.fit(site, sample).items()}
    store = PageStore(layout, shape.batch, shape.kv_heads, device, shape.tokens)
    order = torch.randperm(store.table.numel(), generator=generator, device=device)
    store.table = order.view(store.table.shape).int().contiguous()
    first = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    cuda = None if engine == "triton" else _cuda(scheme, shape, store, params, first)
    write, path = cuda or _triton(scheme, shape, store, first)
    return Encoding(spec, shape, keys, values, store, params, write, path)


Write = tuple[Callable[[Tensor | None, Tensor | None], object], str]


def _cuda(scheme: Any, shape: Shape, store: PageStore, params: dict[Role, Params], first: Tensor) -> Write | None:
    try:
        names = ("build", "encode", "sides")
        build, kernels, sides = (importlib.import_module(f"kvcodec.kernels.{name}") for name in names)
    except ModuleNotFoundError:
        return None
    if build.refusal(first.device):
        return None
    target = kernels.target_for(scheme.key, scheme.value, shape.head_dim, store.layout.page_tokens)
    if target.key is None or target.value is None:
        return None
    both = {role: sides.tensors_for(target.side(role), params[role], shape.kv_heads, shape.head_dim) for role in ROLES}
    text = kernels.text_of(target)

    def write(keys: Tensor | None, values: Tensor | None) -> None:
        kernels.encode_to_pages(
            keys, values, store.pages, store.table, first, target=text, key=both["key"], value=both["value"]
        )

    return write, "cuda"


def _triton(scheme: Any, shape: Shape, store: PageStore, first: Tensor) -> Write:
    stems = {codec.kernel for codec in (scheme.key, scheme.value)}
    # the same kernels serve attention, so its refusal is the encoder's
    reason = fused_refusal(scheme, shape.head_dim, first.device)
    stem = stems.pop()
    codecs: Any = {} if reason else importlib.import_module("kvcodec.kernels.triton.decode_attention").CODECS
    if reason or stem not in codecs:
        raise UnsupportedError(f"no kernel encodes {scheme}{': ' * bool(reason)}{reason}")
    orders = [c.block_for(shape.head_dim) if hasattr(c, "block_for") else 1 for c in (scheme.key, scheme.value)]

    def write(keys: Tensor | None, values: Tensor | None) -> None:
        codecs[stem].encode_to_pages(
            keys, values, store.pages, store.table, first, key_block=orders[0], value_block=orders[1],
            page_tokens=store.layout.page_tokens,
        )  # fmt: skip

    return write, "triton"


@torch.no_grad()
def differing_bytes(work: Encoding) -> float:
    """Share of bytes that differ from the reference on the CPU: first and last tokens of two sequences, all heads.

    On the CPU, because there the reference's bytes are defined.
    """
    work.encode()
    scheme, different, total = scheme_of(work.spec), 0, 0
    for role, x in zip(ROLES, (work.keys, work.values), strict=True):
        codec, block = scheme.codec(role), work.block(role)
        params = {name: p.cpu() for name, p in work.params[role].items()}
        whole = work.whole(role, x).shape[2]
        count = min(-(-CHECKED_TOKENS // block) * block, whole)
        for at in sorted({0, whole - count}):
            found = work.store.read(role, at, at + count)
            for b in sorted({0, work.shape.batch - 1}):
                part = x[b : b + 1, :, at : at + count].float().cpu()
                want = codec.encode(codec.to_code(part, params), params)
                for name, field in want.items():
                    a = field[0].contiguous().view(torch.uint8)
                    other = found[name][b].cpu().contiguous().view(torch.uint8)
                    different += int((a != other).sum())
                    total += a.numel()
    return different / max(total, 1)
