"""Constants that kernels fit on the first tokens of keys and values: ``fit`` and ``fit_program`` of ``kernels/codecs``.

PyTorch fits the constants of all other codecs: the reference's fit takes hundreds of small operations in a layer.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

from packedkv.codec import ROLES, Codec, Role
from packedkv.kernels.cuda.build import Program
from packedkv.kernels.engine import FirstTokens, Fitted
from packedkv.kernels.spec import of_module

T = TypeVar("T")


class FitBuffers:
    """Buffers for device-fitted constants; the first layer of a cache allocates them for all layers.

    Fits of several layers share a launch, ``launch``.
    """

    layers = 0
    """Number of layers of the cache, as far as known."""

    def __init__(self) -> None:
        self._left: dict[Hashable, list[Any]] = {}
        self.waiting: list[Callable[[], None]] = []

    def launch(self) -> None:
        """Launch the pending fits; later kernels on the stream read their constants."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for launch in waiting:
                launch()

    def take(self, name: Hashable, make: Callable[[int], list[T]]) -> T:
        """Return memory for one layer; ``make`` allocates it for all layers of a ``name`` at once."""
        left = self._left.get(name)
        if not left:
            left = self._left[name] = make(max(1, self.layers))[::-1]
        one: T = left.pop()
        return one


class Fitter(NamedTuple):
    """Fits constants by kernels, with the numbers of the reference, for the codecs of one module.

    ``fit(codecs, head_dim, samples, buffers)`` returns the constants of the roles that have samples; they are valid
    after ``buffers.launch``. ``program(codecs, head_dim)`` is the program that it launches.
    """

    codecs: dict[Role, Codec]
    fit: Callable[[Mapping[Role, Codec], int, Mapping[Role, FirstTokens], FitBuffers], dict[Role, Fitted]]
    program: Callable[[Mapping[Role, Codec], int], Program]


def fitters(key: Codec, value: Codec) -> list[Fitter]:
    """Return what fits the constants of keys and values; PyTorch fits those of roles that are missing there."""
    found: dict[str, Fitter] = {}
    for role, codec in zip(ROLES, (key, value), strict=True):
        if codec.needs == {"tensor"} and (fit := of_module(codec, "fit")) is not None:
            one = found.setdefault(type(codec).__module__, Fitter({}, fit, of_module(codec, "fit_program")))
            one.codecs[role] = codec
    return list(found.values())
