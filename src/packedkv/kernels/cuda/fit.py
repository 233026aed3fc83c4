"""Constants that kernels fit on the first tokens of keys and values, where the reference's fit takes many operations.

``packedkv/kernels/codecs/<stem>.py`` defines ``fit`` and ``fit_program`` for codecs of ``packedkv/codecs/<stem>.py``
whose constants kernels fit. PyTorch fits the constants of all other codecs.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role
from packedkv.kernels.constants import Constants
from packedkv.kernels.cuda.build import Program
from packedkv.kernels.spec import of_module

T = TypeVar("T")


class Sample(NamedTuple):
    """First tokens of keys or values, and how they are turned: what a role's constants are fitted on.

    Parameters
    ----------
    x : Tensor ``[B, H, n, D]``
        Model basis; the last axis contiguous.
    tokens : int
        How many are taken; 0: all.
    every : int
        Which: every, every second, and so on.
    padding : Tensor int32 ``[B]``, optional
        How many before them are not.
    angles : (Tensor float32 ``[1 or B, n, R / 2]``, Tensor), optional
        ``Rotary.angles`` of ``x``: keys are held without their mean before RoPE, which is fitted as well.
    back : (Tensor, Tensor), optional
        Those of the inverse rotation; None: the same angles, mirrored.
    interleaved : bool
        As in ``Rotary``.
    energy : Tensor ``[1, H, D]``, optional
        As in ``packedkv.codec.Sample``.
    """

    x: Tensor
    tokens: int = 0
    every: int = 1
    padding: Tensor | None = None
    angles: tuple[Tensor, Tensor] | None = None
    back: tuple[Tensor, Tensor] | None = None
    interleaved: bool = False
    energy: Tensor | None = None


class Fitted(NamedTuple):
    """Constants of a role, for the reference and for the kernels; the mean before RoPE if there is one."""

    params: Params
    reading: Constants
    writing: Constants
    mean: Tensor | None = None


class Rooms:
    """Memory for the constants that kernels fit for the layers of a cache: allocated for all by the first of them.

    Kernels that fit several layers at once wait for ``launch``.
    """

    layers = 0
    """How many are known to come."""

    def __init__(self) -> None:
        self._left: dict[Hashable, list[Any]] = {}
        self.waiting: list[Callable[[], None]] = []

    def launch(self) -> None:
        """Launch what waits: the constants of layers are there for the kernels behind."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for launch in waiting:
                launch()

    def take(self, name: Hashable, make: Callable[[int], list[T]]) -> T:
        """Return the memory of one layer; ``make`` allocates that of so many, which is asked for by ``name``."""
        left = self._left.get(name)
        if not left:
            left = self._left[name] = make(max(1, self.layers))[::-1]
        one: T = left.pop()
        return one


class Fitter(NamedTuple):
    """What fits constants by kernels, to the numbers of the reference; for the codecs of one module.

    Parameters
    ----------
    codecs : mapping of role to Codec
    fit : callable
        ``(codecs, head_dim, samples, rooms) -> fitted``: the constants of the roles of which there are samples, which
        are there after ``rooms.launch``.
    program : callable
        ``(codecs, head_dim)``: what it launches.
    """

    codecs: Mapping[Role, Codec]
    fit: Callable[[Mapping[Role, Codec], int, Mapping[Role, Sample], Rooms], dict[Role, Fitted]]
    program: Callable[[Mapping[Role, Codec], int], Program]

    @property
    def name(self) -> str:
        """Of the codecs."""
        return ", ".join(f"{codec} of {role}s" for role, codec in self.codecs.items())


def fitters(key: Codec, value: Codec) -> list[Fitter]:
    """Return what fits the constants of keys and values; PyTorch fits those of roles that are missing there."""
    found: dict[str, dict[Role, Codec]] = {}
    for role, codec in zip(ROLES, (key, value), strict=True):
        module = type(codec).__module__
        if codec.needs == {"tensor"} and of_module(module, "fit") is not None:
            found.setdefault(module, {})[role] = codec
    return [Fitter(codecs, of_module(m, "fit"), of_module(m, "fit_program")) for m, codecs in found.items()]
