"""How the CPU kernels read and write a codec: ``cpu_reader`` and ``cpu_encoder`` of ``kernels/codecs/<stem>.py``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

from packedkv.codec import ROLES, Codec, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import Side
from packedkv.kernels.spec import function_of, or_none
from packedkv.layout import PageLayout, Plane

OPTIONS = 8
PLANES = 8
WIDEST = 512
"""As in reader.h."""


@dataclass(frozen=True)
class CpuReader(Side):
    """How the CPU kernels read one role.

    ``matrix`` returns float32 ``[1, H, D, D]``, what rows of queries (keys) or outputs (values) are multiplied with.
    """

    name: str  # of a function listed in readers.h
    options: tuple[int, ...] = ()  # up to eight numbers for it
    type: str = field(init=False)
    kind: ClassVar = "cpu"

    def __post_init__(self) -> None:
        """Name what reads the tables, apart from CUDA kernels and from the other kind."""
        object.__setattr__(self, "type", f"{self.kind} {self.name}")


@dataclass(frozen=True)
class CpuEncoder(CpuReader):
    """How the CPU kernels write one role, by a function listed in ``encoders.h``; fields are as of ``CpuReader``.

    ``matrix`` returns integers, 2^15 times what new tokens are multiplied with (``ops/exact.py``) before the factor.
    """

    kind: ClassVar = "cpu encoder"


def cpu_encoder(codec: Codec, head_dim: int, role: Role) -> CpuEncoder:
    """Return how keys or values of this codec are written; raises UnsupportedError if PyTorch must."""
    encoder: CpuEncoder = function_of(codec, "cpu_encoder", "no CPU kernel encodes")(codec, head_dim, role)
    return encoder


def cpu_reader(codec: Codec, head_dim: int, role: Role) -> CpuReader:
    """Return how keys or values of this codec are read; raises UnsupportedError with the reason if they are not."""
    find = function_of(codec, "cpu_reader", "no CPU kernel reads")
    if head_dim % 16 or head_dim > WIDEST:
        raise UnsupportedError(f"the CPU kernels take a head_dim of 16, 32, ... {WIDEST}, not {head_dim} ({codec})")
    reader: CpuReader = find(codec, head_dim, role)
    return reader


class CpuSpec(NamedTuple):
    """How the pages of two codecs are read and written."""

    key: CpuReader
    value: CpuReader
    page: PageLayout
    encoders: Mapping[Role, CpuEncoder | None]  # None: PyTorch encodes the role

    def planes(self, role: Role) -> list[Plane]:
        """Planes of a role in a page."""
        return [plane for plane in self.page.planes if plane.role == role]


@lru_cache(maxsize=256)  # called for every layer of every cache
def cpu_spec(key: Codec, value: Codec, head_dim: int, page_tokens: int) -> CpuSpec:
    """Return how the pages of two codecs are read and written; raises UnsupportedError if no kernels read them."""
    codecs = dict(zip(ROLES, (key, value), strict=True))
    k, v = (cpu_reader(codec, head_dim, role) for role, codec in codecs.items())
    page = PageLayout(key.layout(head_dim), value.layout(head_dim), page_tokens)
    return CpuSpec(k, v, page, {role: or_none(cpu_encoder, codec, head_dim, role) for role, codec in codecs.items()})
