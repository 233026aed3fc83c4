"""Wrapper: a codec around another one; the brick of codecs that change what an inner codec sees.

Whatever a subclass leaves alone is the inner codec's: layout, bases, bytes, what it needs. The inner codec's constants
lie among the wrapper's own under ``inner.NAME``; wrappers nest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcodec.codec import Codec, Constants, Params, Payload, Site
from kvcodec.errors import SpecError
from kvcodec.layout import Layout

MARK = "inner."


def inside(params: Params) -> Params:
    """Constants of the inner codec, under its own names."""
    return {name.removeprefix(MARK): value for name, value in params.items() if name.startswith(MARK)}


def around(own: Params, inner: Params) -> Params:
    """Constants of a wrapper: its own, and the inner codec's under ``inner.NAME``."""
    return {**own, **{MARK + name: value for name, value in inner.items()}}


@dataclass(frozen=True)
class Wrapper(Codec):
    """What an inner codec does, unchanged.

    Parameters
    ----------
    inner : Codec
    """

    inner: Codec

    def __post_init__(self) -> None:
        """Refuse to wrap what is no codec."""
        if not isinstance(self.inner, Codec):
            raise SpecError(f"{type(self).__name__}: inner={self.inner!r} is not a codec; pass one, e.g. SawInt4().")

    @property
    def block_tokens(self) -> int:
        """The inner codec's."""
        return self.inner.block_tokens

    @property
    def needs_sample(self) -> bool:
        """The inner codec's."""
        return self.inner.needs_sample

    @property
    def fit_tokens(self) -> int:
        """The inner codec's."""
        return self.inner.fit_tokens

    @property
    def fit_every(self) -> int:
        """The inner codec's."""
        return self.inner.fit_every

    @property
    def without_mean(self) -> bool:
        """The inner codec's."""
        return self.inner.without_mean

    @property
    def needs_queries(self) -> bool:
        """The inner codec's."""
        return self.inner.needs_queries

    @property
    def query_error(self) -> float:
        """The inner codec's."""
        return self.inner.query_error

    @property
    def searches(self) -> bool:
        """The inner codec's."""
        return self.inner.searches

    def for_dtype(self, dtype: torch.dtype) -> Codec:
        """Wrap the inner codec for ``dtype``."""
        return replace(self, inner=self.inner.for_dtype(dtype))

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Hold what the inner codec holds."""
        return self.inner.held_dtype(dtype)

    def layout(self, head_dim: int) -> Layout:
        """Fields of the inner codec."""
        return self.inner.layout(head_dim)

    def constants(self, site: Site) -> Constants:
        """Declare the inner codec's; a subclass that adds some declares these too."""
        return {MARK + name: constant for name, constant in self.inner.constants(site).items()}

    def fit(self, site: Site, sample: Tensor | None = None) -> Params:
        """Fit the inner codec."""
        return around({}, self.inner.fit(site, sample))

    def calibrate(self, site: Site, sample: Tensor, queries: Tensor) -> Params:
        """Calibrate the inner codec."""
        return around({}, self.inner.calibrate(site, sample, queries))

    def settle(self, fitted: Sequence[Params]) -> list[Params]:
        """Let the inner codec decide across layers; what is the wrapper's own stays."""
        settled = self.inner.settle([inside(params) for params in fitted])
        own = [{n: v for n, v in params.items() if not n.startswith(MARK)} for params in fitted]
        return [dict(around(o, s)) for o, s in zip(own, settled, strict=True)]

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        """Basis of the inner codec."""
        return self.inner.to_code(x, inside(params))

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        """Dual of the inner codec."""
        return self.inner.query_to_code(q, inside(params))

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        """Inverse of the inner codec's."""
        return self.inner.from_code(x, inside(params))

    def encode(self, x: Tensor, params: Params) -> Payload:
        """Bytes of the inner codec."""
        return self.inner.encode(x, inside(params))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        """Values of the inner codec."""
        return self.inner.decode(payload, inside(params))
