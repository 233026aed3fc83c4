"""Choice of the kernels for a layer."""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import torch

from packedkv.codec import ROLES, Codec, page_layout
from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.engine import CpuEngine
from packedkv.kernels.cuda import build
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.engine import Engine
from packedkv.kernels.spec import decode_spec, encoder
from packedkv.layout import PageLayout
from packedkv.scheme import KVScheme


def choose(
    scheme: KVScheme, head_dim: int, device: torch.device, page_tokens: int | None = None, *, static: bool = False
) -> Engine:
    """Return the engine for a layer's scheme; nothing is compiled.

    ``scheme`` is the scheme of one layer (``scheme.for_layer``), with its codecs for the dtype (``for_dtype``).
    ``static``: steps must not synchronise, so that both roles need an encode kernel. Raises UnsupportedError with the
    reason if no engine supports the scheme.
    """
    if scheme.recent is not None:
        raise UnsupportedError(
            f"{scheme} holds its newest {scheme.window} tokens in {scheme.recent} (age tiers, recent=), and the caches "
            f"of fused attention have one codec for each role"
        )
    tokens = page_tokens or page_layout(scheme.key, scheme.value, head_dim, head_dim).page_tokens
    if device.type == "cpu" and build.refusal(device):
        if reason := library.refusal(device):
            raise UnsupportedError(reason)
        if static:
            raise UnsupportedError("a static cache is for CUDA graphs; on a CPU leave max_len out")
        return CpuEngine(scheme.key, scheme.value, head_dim, tokens)
    decode_spec(scheme.key, scheme.value, head_dim, tokens)
    for role in ROLES if static else ():
        try:
            encoder(scheme.codec(role), head_dim, role)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}, and PyTorch's would synchronise in every step; leave max_len out"
            ) from error
    if reason := build.refusal(device):
        raise UnsupportedError(reason)
    return CudaEngine(scheme.key, scheme.value, head_dim, tokens)


def refusal(
    scheme: KVScheme, head_dim: int, device: torch.device, page_tokens: int | None = None, *, static: bool = False
) -> str:
    """Return why ``choose`` finds no engine, or ``""`` if it finds one."""
    try:
        choose(scheme, head_dim, device, page_tokens, static=static)
    except UnsupportedError as error:
        return str(error)
    return ""


class Chosen(NamedTuple):
    """The kernels of a scheme's layers of one head_dim and dtype on one device."""

    engine: Engine  # without constants: a layer takes ``fresh``
    layout: PageLayout
    name: Hashable  # key of all this, for objects that layers share


class Kernels:
    """The engines of a model's layers: chosen once for all layers of the same scheme and sizes, with these options."""

    def __init__(self, page_tokens: int | None = None, *, static: bool = False) -> None:
        self.page_tokens, self.static = page_tokens, static
        self._chosen: dict[tuple[Codec, Codec, int, torch.dtype, torch.device], Chosen] = {}
        self._served: dict[tuple[int, int, torch.dtype, torch.device], tuple[KVScheme, Chosen]] = {}

    def serve(self, scheme: KVScheme, head_dim: int, dtype: torch.dtype, device: torch.device) -> Chosen:
        """Return the kernels for such keys and values; raises UnsupportedError with the reason if there are none."""
        same = id(scheme), head_dim, dtype, device  # codecs are slower to hash
        if (served := self._served.get(same)) is not None and served[0] is scheme:
            return served[1]
        if scheme.recent is not None:
            choose(scheme, head_dim, device)  # says why not
        asked = scheme.key, scheme.value, head_dim, dtype, device
        if (chosen := self._chosen.get(asked)) is None:
            key, value = (scheme.codec(role).for_dtype(dtype) for role in ROLES)
            engine = choose(KVScheme(key, value), head_dim, device, self.page_tokens, static=self.static)
            layout = page_layout(key, value, head_dim, head_dim, self.page_tokens)
            by = tuple(engine.written_by(role) for role in ROLES)
            name = _name(key, value, head_dim, device, layout.page_tokens, by)
            chosen = self._chosen[asked] = Chosen(engine, layout, name)
        self._served[same] = scheme, chosen
        return chosen


@lru_cache(maxsize=1024)
def _name(*_what: Hashable) -> Hashable:
    """Intern: one object for equal arguments, which is faster to compare than codecs."""
    return object()
