"""Encoding into pages for the GPU benches, and the check of the bytes against the reference.

``encode_operator`` knows how the kernels are called.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.codec import ROLES, Params, Role, Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import Constants, constants_for
from packedkv.kernels.cuda import build, encode
from packedkv.kernels.mean import Turned
from packedkv.kernels.spec import encode_spec, text_of
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore
from packedkv.store.site import MeanRemoval
from packedkv_lab.bench.key_means import mean_of
from packedkv_lab.bench.packed import LAYER, scheme_of
from packedkv_lab.bench.shapes import Shape

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
    mean : MeanRemoval or None
        What is subtracted from the keys, whose positions count from 0.
    write : callable
        ``write(keys or None, values or None)``: encodes them from slot 0 on.
    """

    spec: str
    shape: Shape
    keys: Tensor
    values: Tensor
    store: PageStore
    params: dict[Role, Params]
    mean: MeanRemoval | None
    write: Callable[[Tensor | None, Tensor | None], object]
    path = "cuda"
    """Which kernels encode, as rows name them."""

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


def encode_operator(spec: str, shape: Shape, device: torch.device, seed: int) -> Encoding:
    """Draw keys and values and find the kernel that encodes them.

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
        sample = x[:1, :, :FIT_TOKENS].float().cpu()
        params[role] = {name: p.to(device) for name, p in codec.fit(site, Sample(sample)).items()}
    store = PageStore(layout, shape.batch, shape.kv_heads, device, shape.tokens)
    order = torch.randperm(store.table.numel(), generator=generator, device=device)
    store.table = order.view(store.table.shape).int().contiguous()
    first = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    if (mean := mean_of(scheme, shape.kv_heads, shape.head_dim, device)) is not None:
        keys += mean.at(mean.given, torch.arange(shape.tokens, device=device)[None]).to(keys.dtype)
    write = writer(scheme, shape, store, params, first, mean)
    return Encoding(spec, shape, keys, values, store, params, mean, write)


Write = Callable[[Tensor | None, Tensor | None], object]


def writer(
    scheme: KVScheme,
    shape: Shape,
    store: PageStore,
    params: dict[Role, Params],
    first: Tensor,
    mean: MeanRemoval | None = None,
) -> Write:
    """Return the call that encodes keys and values into the pages.

    Raises
    ------
    UnsupportedError
        If no kernel encodes both roles here; the text says why.
    """
    if reason := build.refusal(first.device):
        raise UnsupportedError(f"no kernel encodes {scheme}: {reason}")
    target = encode_spec(scheme.key, scheme.value, shape.head_dim, store.layout.page_tokens, mean=mean is not None)
    both: dict[Role, Constants] = {}
    for role in ROLES:
        if (found := target.encoder(role)) is None:
            raise UnsupportedError(f"no kernel encodes the {role}s of {scheme}")
        both[role] = constants_for(found, params[role], shape.kv_heads, shape.head_dim)
    text, less = text_of(target), None
    if mean is not None and mean.given is not None:
        at = torch.arange(shape.tokens, device=first.device)[None]
        less = Turned(mean.given, *mean.turning.angles(at), mean.turning.interleaved)

    def write(keys: Tensor | None, values: Tensor | None) -> None:
        own = less if less is None or keys is None else less._replace(
            cosines=less.cosines[:, : keys.shape[2]], sines=less.sines[:, : keys.shape[2]]
        )  # fmt: skip
        encode.encode_to_pages(
            keys, values, store.pages, store.table, first, spec=text, key=both["key"], value=both["value"], less=own
        )

    return write


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
                if role == "key" and work.mean is not None and work.mean.given is not None:
                    places, turning = torch.arange(at, at + count)[None], work.mean.turning
                    part = part - turning.turned(work.mean.given.cpu()[:, :, None], *turning.angles(places))
                want = codec.encode(codec.to_code(part, params), params)
                for name, field in want.items():
                    a = field[0].contiguous().view(torch.uint8)
                    other = found[name][b].cpu().contiguous().view(torch.uint8)
                    different += int((a != other).sum())
                    total += a.numel()
    return different / max(total, 1)
