"""A site's constants as kernels read them; those that codec and site determine are shared and never written to."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels.structs import address, step_of
from packedkv.shared import SHARED


@dataclass(frozen=True, kw_only=True)
class Side:
    """Which constants the kernels of one role take; the base of readers and encoders for GPUs and CPUs."""

    # look-up tables: params -> uint8 [H or 1, bytes], or by sequence [B or 1, H, bytes], on their device
    tables: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    # name of the constant [B or 1, H, D] that multiplies queries (keys), outputs (values) or new tokens, or a function
    # of the constants that returns it; empty: none
    factor: str | Callable[[Params], Tensor] = ""
    divide: bool = False  # whether new tokens are divided by the factor
    head_constant: str = ""  # name of a constant [B or 1, H] that takes the place of a factor; empty: none
    order: int = 1  # Hadamard order; 1 for none
    # params -> [n, H, ...]: what mixes the channels of a head, in place of a factor and a rotation
    matrix: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    layer_invariant: bool = False  # whether the tables are the same in all layers, unless they come from a sample
    tables_of: Codec | None = None  # whose constants the tables follow from, if not the codec's itself
    type: str

    @property
    def multiplies(self) -> bool:
        """Whether it has a factor, or a ``head_constant`` instead."""
        return bool(self.factor or self.head_constant)


class Constants(NamedTuple):
    """Constants of one role of a layer for the kernels, on its device."""

    tables: Tensor | None  # uint8 [H or 1, bytes]; [B or 1, H, bytes] where the kernels take tables by sequence
    # float32 [B or 1, H, D]; [B or 1, H] where an encoder has a ``head_constant``; float64 reciprocals where it divides
    factor: Tensor | None
    order: int  # of the Hadamard
    matrix: Tensor | None = None  # [n, H, ...] in the form of the kernels: what mixes the channels of a head


NO_CONSTANTS = Constants(None, None, 1)


def tensors_of(key: Constants, value: Constants) -> list[Tensor | None]:
    """Tensors of both roles, for an operator, which takes no other structure."""
    return [x for side in (key, value) for x in (side.tables, side.factor, side.matrix)]


def constants_of(tensors: Sequence[Tensor | None], orders: tuple[int, int]) -> tuple[Constants, Constants]:
    """Return both roles' constants from ``tensors_of`` them and their orders."""
    (a, b, c, d, e, f), (key, value) = tensors, orders
    return Constants(a, b, key, c), Constants(d, e, value, f)


def constants_for(
    kernel: Side,
    params: Params,
    heads: int,
    head_dim: int,
    lookup: Callable[[str, Callable[[], Tensor]], Tensor] = lambda _, build: build(),
) -> Constants:
    """Build the tensors of one role from the site's constants; ``lookup`` returns a field, built or an existing one.

    Raises UnsupportedError if ``params`` lack a constant that ``kernel`` names, or if tables have another shape or
    dtype than kernels take.
    """
    return Constants(
        lookup("tables", partial(_tables, kernel.tables, kernel.type, params, heads)) if kernel.tables else None,
        lookup("factor", partial(_factor, kernel, params, heads, head_dim)) if kernel.multiplies else None,
        kernel.order,
        lookup("matrix", partial(_matrix, kernel.matrix, params)) if kernel.matrix else None,
    )


def constants(
    kernel: Side, codec: Codec, site: Site, params: Params, old: Constants | None, *, seeded: bool
) -> Constants:
    """Build as ``constants_for`` does from the params of a site, and share tensors among caches where possible.

    New constants that belong to one cache are copied into the tensors of ``old``, its earlier constants, where shapes
    allow, because captured graphs hold their addresses. ``seeded``: whether constants that need no sample follow from
    codec and site.
    """

    def lookup(part: str, build: Callable[[], Tensor]) -> Tensor:
        source: Codec = codec
        scope: Hashable = site
        if part == "tables":
            source, scope = kernel.tables_of or codec, (site.head_dim, site.device) if kernel.layer_invariant else site
        name = (part, kernel.type, source, scope) if part != "matrix" and seeded and not source.needs else None
        return _shared(name, site.device, None if old is None else getattr(old, part), build)

    return constants_for(kernel, params, site.num_heads, site.head_dim, lookup)


def _shared(name: Hashable, device: torch.device, before: Tensor | None, build: Callable[[], Tensor]) -> Tensor:
    """Share the tensor of this name in the process; without a name it belongs to one cache and keeps its address."""

    def first() -> dict[str, Tensor]:
        made = build()
        if device.type == "cuda":  # one more launch: decode kernels read tables before they wait for the kernel ahead
            torch.zeros(1, device=device)
        return {"one": made}

    if name is not None:
        return SHARED.get(name, device, first)["one"]
    fresh = build()
    if before is None or before.shape != fresh.shape or before.device != fresh.device:
        return fresh
    return before.copy_(fresh)


def fill_factor(side: Any, constants: Constants) -> None:
    """Set the factor and the matrix of a role in a struct of kernels."""
    if (factor := constants.factor) is not None:
        side.factor, side.factor_batch = factor.data_ptr(), step_of(factor)
    side.matrix = address(constants.matrix)


def joined(layers: Sequence[Constants], heads: int) -> Constants:
    """Constants of several layers, concatenated along the heads; of one sequence."""
    if len(layers) == 1:
        return layers[0]._replace(factor=None if layers[0].factor is None else layers[0].factor[:1])
    tables = layers[0].tables
    if tables is not None and not (tables.dim() == 2 and len(tables) == 1 and all(x.tables is tables for x in layers)):
        parts, by_head = [x.tables for x in layers if x.tables is not None], tables.dim() == 2
        tables = torch.cat([x.expand(heads, -1) if by_head else x[:1] for x in parts], 0 if by_head else 1)
    factors = [x.factor[:1] for x in layers if x.factor is not None]
    matrices = [x.matrix for x in layers if x.matrix is not None]
    return Constants(
        tables,
        torch.cat(factors, 1) if factors else None,
        layers[0].order,
        torch.cat(matrices, 1) if matrices else None,
    )


def _tables(build: Callable[[Params], Tensor], name: str, params: Params, heads: int) -> Tensor:
    tables = build(params).contiguous()
    by_head = tables.dim() == 2 and tables.shape[0] in (1, heads)
    if tables.dtype != torch.uint8 or not (by_head or (tables.dim() == 3 and tables.shape[1] == heads)):
        raise UnsupportedError(
            f"{name}: tables are {tables.dtype} {list(tables.shape)}; expected uint8 [{heads} or 1, bytes], or "
            f"[batch or 1, {heads}, bytes] by sequence."
        )
    return tables


def _matrix(build: Callable[[Params], Tensor], params: Params) -> Tensor:
    return build(params).contiguous()


def _factor(kernel: Side, params: Params, heads: int, head_dim: int) -> Tensor:
    name = kernel.factor or kernel.head_constant
    if callable(name):
        factor = name(params).float()
    elif name in params:
        factor = params[name].float()
    else:
        names = ", ".join(map(repr, params)) or "none"
        raise UnsupportedError(f"{kernel.type} wants the constant {name!r}; its codec's fit returns {names}.")
    if kernel.divide:  # kv::FACTOR_INVERSE: exact quotients, without a division
        factor = factor.double().reciprocal()
    return factor.expand(factor.shape[0], heads, *(() if kernel.head_constant else (head_dim,))).contiguous()
