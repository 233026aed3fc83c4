"""What the kernels get of a site's constants, tables and a factor for each role: built once in a process, if possible.

What follows from codec and site alone is shared by all caches, and none writes it. What comes from a sample or a file
is a cache's own.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvcodec.codec import SHARED, Codec, Params, Site
from kvcodec.codecs.med import Med
from kvcodec.errors import UnsupportedError

if TYPE_CHECKING:
    from kvcodec.kernels.sides import Encoder, Reader


class SideTensors(NamedTuple):
    """What the kernels get for one role of a layer, on its device.

    Parameters
    ----------
    tables : Tensor uint8 ``[H or 1, bytes]`` or None
    factor : Tensor float32 ``[B or 1, H, D]`` or None
        ``[B or 1, H]`` where an encoder has a constant of its ``own``; float64 reciprocals where it divides.
    order : int
    """

    tables: Tensor | None
    factor: Tensor | None
    order: int


def tensors_for(side: "Reader | Encoder", params: Params, heads: int, head_dim: int) -> SideTensors:
    """Build the tensors of one role from the site's constants.

    Raises
    ------
    UnsupportedError
        The constants do not have the shape that the kernels take.
    """
    tables = None if side.tables is None else _tables(side, params, heads)
    factor = _factor(side, params, heads, head_dim) if side.multiplies else None
    return SideTensors(tables, factor, side.order)


def constants(
    side: "Reader | Encoder", codec: Codec, site: Site, params: Params, old: SideTensors | None, *, drawn: bool
) -> SideTensors:
    """As ``tensors_for``, shared where that is possible.

    Parameters
    ----------
    side : Reader or Encoder
    codec : Codec
    site : Site
    params : Params
        The site's.
    old : SideTensors, optional
        What a cache had before. Constants of its own stay in these tensors where shapes allow: captured graphs hold
        their addresses.
    drawn : bool
        Whether what needs no sample follows from codec and site.
    """

    def one(name: str, of: Codec, where: Hashable, build: Callable[[], Tensor]) -> Tensor:
        if drawn and not of.needs_sample:
            return SHARED.get((name, side, of, where), site.device, lambda: {name: build()})[name]
        before: Tensor | None = getattr(old, name, None)
        fresh = build()
        if before is None or before.shape != fresh.shape or before.device != fresh.device:
            return fresh
        return before.copy_(fresh)

    tables = factor = None
    if side.tables is not None:
        inner = codec.inner if isinstance(codec, Med) else codec  # outliers have a threshold, and no tables
        where = (site.head_dim, site.device) if side.alike else site
        tables = one("tables", inner, where, lambda: _tables(side, params, site.num_heads))
    if side.multiplies:
        factor = one("factor", codec, site, lambda: _factor(side, params, site.num_heads, site.head_dim))
    return SideTensors(tables, factor, side.order)


def joined(layers: Sequence[SideTensors], heads: int) -> SideTensors:
    """Constants of layers of so many heads, as one layer has them whose heads are those of all; of one sequence."""
    if len(layers) == 1:
        return layers[0]._replace(factor=None if layers[0].factor is None else layers[0].factor[:1])
    tables = [x.tables.expand(heads, -1) for x in layers if x.tables is not None]
    factors = [x.factor[:1] for x in layers if x.factor is not None]
    return SideTensors(
        torch.cat(tables) if tables else None, torch.cat(factors, 1) if factors else None, layers[0].order
    )


def _tables(side: "Reader | Encoder", params: Params, heads: int) -> Tensor:
    assert side.tables is not None
    tables = side.tables(params).contiguous()
    if tables.dtype != torch.uint8 or tables.dim() != 2 or tables.shape[0] not in (1, heads):
        raise UnsupportedError(
            f"{side.type}: tables are {tables.dtype} {list(tables.shape)}; expected uint8 [{heads} or 1, bytes]."
        )
    return tables


def _factor(side: "Reader | Encoder", params: Params, heads: int, head_dim: int) -> Tensor:
    own = getattr(side, "own", "")
    factor = params[side.factor or own].float()
    if getattr(side, "divide", False):  # kv::FACTOR_INVERSE: the quotient's bits, without a division
        factor = 1.0 / factor.double()
    return factor.expand(factor.shape[0], heads, *(() if own else (head_dim,))).contiguous()
