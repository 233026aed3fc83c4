"""Wrapper: a codec around another one; the brick of codecs that change what an inner codec sees.

A wrapper forwards every member of the contract that its class does not define: flags, bases, layout, bytes. The inner
codec's constants lie among the wrapper's own under ``inner.NAME``; wrappers nest.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Constants, Params, Payload, Sample, Site
from packedkv.errors import SpecError
from packedkv.layout import Layout

MARK = "inner."


def inside(params: Params) -> Params:
    """Constants of the inner codec, under its own names."""
    return {name.removeprefix(MARK): value for name, value in params.items() if name.startswith(MARK)}


def around(constants: Params, inner: Params) -> Params:
    """Constants of a wrapper: its own, and the inner codec's under ``inner.NAME``."""
    return {**constants, **{MARK + name: value for name, value in inner.items()}}


def forwarded(name: str, member: Any) -> Any:
    """Return the property or method that calls the inner codec's, with the inner codec's constants."""
    if isinstance(member, property):
        return property(lambda self: getattr(self.inner, name), doc=member.__doc__)
    if "params" in inspect.signature(member).parameters:
        return lambda self, x, params: getattr(self.inner, name)(x, inside(params))
    return lambda self, *args: getattr(self.inner, name)(*args)


@dataclass(frozen=True)
class Wrapper(Codec):
    """An inner codec, unchanged."""

    inner: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Codec):
            raise SpecError(f"{type(self).__name__}: inner={self.inner!r} is not a codec; pass one, e.g. SawInt4().")

    # The wrapper's name and constants are its own, and a checker of types must see what is abstract in Codec.
    config = Codec.config

    def for_dtype(self, dtype: torch.dtype) -> Codec:
        return replace(self, inner=self.inner.for_dtype(dtype))

    def constants(self, site: Site) -> Constants:
        """Declare the inner codec's constants; a subclass that adds some declares these too."""
        return {MARK + name: constant for name, constant in self.inner.constants(site).items()}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        return around({}, self.inner.fit(site, sample))

    def settle(self, fitted: Sequence[Params]) -> list[Params]:
        settled = self.inner.settle([inside(params) for params in fitted])
        constants = [{n: v for n, v in params.items() if not n.startswith(MARK)} for params in fitted]
        return [dict(around(o, s)) for o, s in zip(constants, settled, strict=True)]

    def layout(self, head_dim: int) -> Layout:
        return self.inner.layout(head_dim)

    def encode(self, x: Tensor, params: Params) -> Payload:
        return self.inner.encode(x, inside(params))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return self.inner.decode(payload, inside(params))


for _name, _member in vars(Codec).items():
    if not _name.startswith("_") and _name not in vars(Wrapper):
        setattr(Wrapper, _name, forwarded(_name, _member))
