"""How the CPU kernels read and write a codec: a ``CpuReader`` and a ``CpuEncoder`` for each role, found by its module.

``packedkv/kernels/codecs/<stem>.py`` serves the codecs of ``packedkv/codecs/<stem>.py``. Beside the CUDA kernels'
``reader`` it defines ``cpu_reader``, a function of (codec, head_dim, role) that returns a ``CpuReader`` or raises
``UnsupportedError`` with the reason; and likewise ``cpu_encoder``, if the kernels write it. Bases are as in
``kernels/spec.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.spec import of_module, refuse_search
from packedkv.layout import PageLayout

OPTIONS = 8
PLANES = 8
WIDEST = 512
"""As in reader.h."""


@dataclass(frozen=True)
class CpuReader:
    """How the CPU kernels read one role.

    Parameters
    ----------
    name : str
        Of a function listed in ``readers.h``.
    options : tuple of int
        Up to eight numbers for it.
    tables : callable, optional
        Params -> uint8 ``[H or 1, bytes]``, or by sequence ``[B or 1, H, bytes]``, on their device: its look-up tables.
    factor : str or callable
        Name of the constant ``[B or 1, H, D]`` that multiplies queries (keys) or outputs (values), or a function that
        makes it of Params; empty: none.
    order : int
        Hadamard order; 1 for none.
    matrix : callable, optional
        Params -> float32 ``[1, H, D, D]``: what rows of queries (keys) or outputs (values) are multiplied with, in
        place of a factor and a rotation.
    alike : bool
        Whether the tables are the same in all layers, unless their constants come from a sample.
    tables_of : Codec, optional
        Whose constants the tables follow from, if not the codec's itself.
    """

    name: str
    options: tuple[int, ...] = ()
    tables: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    factor: str | Callable[[Params], Tensor] = ""
    order: int = 1
    matrix: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    alike: bool = False
    tables_of: Codec | None = None
    own: ClassVar[str] = ""
    divide: ClassVar[bool] = False

    @property
    def type(self) -> str:
        """Name of what reads the tables, apart from those of CUDA kernels."""
        return f"cpu {self.name}"

    @property
    def multiplies(self) -> bool:
        """Whether it has a factor."""
        return bool(self.factor)


@dataclass(frozen=True)
class CpuEncoder:
    """How the CPU kernels write one role.

    Parameters
    ----------
    name : str
        Of a function listed in ``encoders.h``.
    options, tables, order, alike, tables_of
        As ``CpuReader``; ``tables`` is what the function gets.
    factor : str or callable
        Name of, or function for, the constant ``[B or 1, H, D]`` that new tokens are multiplied with, or divided by;
        empty: none.
    divide : bool
    matrix : callable, optional
        Params -> float32 ``[1, H, D, D]``: integers, 2^15 times what new tokens are multiplied with (``ops/exact.py``)
        before the factor.
    """

    name: str
    options: tuple[int, ...] = ()
    tables: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    factor: str | Callable[[Params], Tensor] = ""
    divide: bool = False
    order: int = 1
    matrix: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    alike: bool = False
    tables_of: Codec | None = None
    own: ClassVar[str] = ""

    @property
    def type(self) -> str:
        """Name of what reads the tables, apart from those of readers and CUDA kernels."""
        return f"cpu encoder {self.name}"

    @property
    def multiplies(self) -> bool:
        """Whether it has a factor."""
        return bool(self.factor)


def cpu_encoder(codec: Codec, head_dim: int, role: Role) -> CpuEncoder:
    """Return how keys or values of this codec are written.

    Raises
    ------
    UnsupportedError
        PyTorch must do it; the text says why.
    """
    refuse_search(codec)
    found = of_module(type(codec).__module__, "cpu_encoder")
    if found is None:
        raise UnsupportedError(f"no CPU kernel encodes {codec}")
    encoder: CpuEncoder = found(codec, head_dim, role)
    return encoder


def cpu_reader(codec: Codec, head_dim: int, role: Role) -> CpuReader:
    """Return how keys or values of this codec are read.

    Raises
    ------
    UnsupportedError
        The kernels do not read them; the text says why.
    """
    found = of_module(type(codec).__module__, "cpu_reader")
    if found is None:
        raise UnsupportedError(f"no CPU kernel reads {codec}")
    if head_dim % 16 or head_dim > WIDEST:
        raise UnsupportedError(f"the CPU kernels take a head_dim of 16, 32, ... {WIDEST}, not {head_dim} ({codec})")
    reader: CpuReader = found(codec, head_dim, role)
    return reader


class CpuSpec(NamedTuple):
    """How the pages of two codecs are read and written.

    Parameters
    ----------
    key, value : CpuReader
    page : PageLayout
    write_key, write_value : CpuEncoder or None
        None: PyTorch encodes the role.
    """

    key: CpuReader
    value: CpuReader
    page: PageLayout
    write_key: CpuEncoder | None = None
    write_value: CpuEncoder | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a token."""
        return self.page.key.head_dim

    def encoder(self, role: Role) -> CpuEncoder | None:
        """Return what writes a role."""
        return self.write_key if role == "key" else self.write_value

    def offsets(self, role: Role) -> list[int]:
        """Byte of a page at which each plane of a role begins."""
        return [plane.offset for plane in self.page.planes if plane.role == role]


@lru_cache(maxsize=256)  # called for every layer of every cache
def cpu_spec(key: Codec, value: Codec, head_dim: int, page_tokens: int) -> CpuSpec:
    """Return how the pages of two codecs are read and written.

    Raises
    ------
    UnsupportedError
        The kernels do not read them; the text says why.
    """
    k, v = (cpu_reader(codec, head_dim, role) for codec, role in zip((key, value), ROLES, strict=True))
    page = PageLayout(key.layout(head_dim), value.layout(head_dim), page_tokens)
    return CpuSpec(k, v, page, _encoder_or_none(key, head_dim, "key"), _encoder_or_none(value, head_dim, "value"))


def _encoder_or_none(codec: Codec, head_dim: int, role: Role) -> CpuEncoder | None:
    try:
        return cpu_encoder(codec, head_dim, role)
    except UnsupportedError:
        return None
