"""How the CUDA kernels read and write a codec: a ``Reader`` and an ``Encoder`` for each role, found by its module.

``packedkv/kernels/codecs/<stem>.py`` serves the codecs of ``packedkv/codecs/<stem>.py``: ``reader`` and ``encoder``,
functions of (codec, head_dim, role), raise ``UnsupportedError`` with the reason.

Between model basis and code basis kernels apply two linear maps, in this order for queries and new tokens: times a
factor per head and channel (``[B or 1, H, D]``, a constant of the site), then a block-diagonal Hadamard. Outputs go
back in reverse order. Or one map takes their place, a [D, D] matrix of the head (``matrix``).
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

from packedkv.codec import ROLES, Codec, Role
from packedkv.errors import SpecError, UnsupportedError
from packedkv.kernels.constants import Side
from packedkv.layout import PageLayout

CSRC = Path(__file__).parent / "csrc"
"""Folder of the CUDA sources."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
"""A lane of a warp holds every 32nd channel of a row; 80, no multiple of 32, is only for what is ``uneven``."""


@dataclass(frozen=True)
class Reader(Side):
    """How the decode kernels read one role; raises SpecError if ``shared`` has neither ``tables`` nor ``computes``.

    ``tables`` return what the struct's ``fill`` reads, by sequence of an ORDERED struct (tile.cuh). ``matrix`` returns
    uint8 lines of mixed.cuh, of queries into the basis of the codes (keys, n = 2), and of outputs (values, n = 1) or,
    as the last of n, unpacked tokens out of it. The struct is ``Mixed`` then.
    """

    type: str  # the C++ struct with its template arguments
    header: str  # the file that defines it
    folder: str = str(CSRC)  # where that file is
    block: int = 1  # tokens per block
    shared: int = 0  # bytes of look-up tables in shared memory, the struct's TABLE
    fewer: tuple[int, ...] = ()  # ``shared`` with half of the room for copies of the tables, a quarter, ... KV_HALVINGS
    computes: bool = False  # whether ``fill`` computes the look-up tables and reads nothing
    # name of the tables' contents, and the struct that reads the tables of keys of the same name: values then need none
    # of their own
    shares_table_with: str = ""
    borrowing_type: str = ""
    # bytes of shared memory, beside ``shared``, for what of the tables belongs to a sequence and head: the struct's
    # OWN. What is in ``shared`` is then the same for all
    by_head: int = 0
    paired_type: str = ""  # the struct when one codec has keys and values; empty: ``type``
    also: tuple[str, ...] = ()  # further files that the struct needs
    queries: int = 1  # vectors that the kernel makes of a query; 2 for sketches
    scratch: int = 0  # bytes of shared memory that each warp needs for itself, the struct's SCRATCH
    min_shared: int = 0  # least bytes of shared memory that ``paired_type`` takes, its REACH
    tile: int = 64  # the longest tile for many sequences; look-ups with bank conflicts need more warps instead
    warps: int = 4  # warps of a CTA where two share a multiprocessor; of keys
    # warps of all teams of a CTA, at most; of keys. 0 of either role: no teams, as tables differ by sequence
    team_warps: int = 8
    uneven: bool = False  # whether the struct takes a head_dim that is no multiple of 32: 80

    def __post_init__(self) -> None:
        """Refuse look-up tables without contents: ``fill`` would read address 0."""
        if (self.shared or self.by_head) and self.tables is None and not self.computes:
            raise SpecError(
                f"{self.type}: shared={self.shared} needs tables, a function that returns what fill reads; "
                f"give tables=..., or computes=True where fill computes them."
            )


@dataclass(frozen=True)
class Encoder(Side):
    """How the encode kernels write one role; the fields that are not described are as of ``Reader``.

    A ``matrix``, as of ``Reader`` with n = 1, is of form "table".
    """

    type: str
    header: str
    folder: str = str(CSRC)
    block: int = 1
    # the kernel around the struct: "rows", encode_side of encode.cuh (a row at a time), "blocks", encode_blocks of
    # encode_blocks.cuh (a block of tokens), or "table", encode_with_table of encode_table.cuh
    form: Literal["rows", "blocks", "table"] = "rows"
    # blocks of threads that share a multiprocessor, if each makes tables of its own: no more are launched than run at
    # once on 132 of them. 0: as many as there are rows for
    resident: int = 0
    uneven: bool = False
    team: int = 8  # lanes that share a row, of form "table"
    # the same bytes by a struct that shares rows among more lanes: sooner where there are few rows
    small_batch: "Encoder | None" = None


def includes(*roles: Reader | Encoder) -> list[str]:
    """Lines that include what the structs of these roles need."""
    names = {name for x in roles for name in (x.header, *(x.also if isinstance(x, Reader) else ()))}
    return [f'#include "{name}"' for name in sorted(names)]


def flag(x: bool) -> str:
    """Return a bool as a C++ literal."""
    return "true" if x else "false"


# -- finding them ------------------------------------------------------------------------------------------------------

Found = TypeVar("Found", bound=Side)
_CudaSide = TypeVar("_CudaSide", Reader, Encoder)
_ADDED: dict[tuple[str, type], Callable[[Codec, int, Role], Side]] = {}


def add_reader(codec: type, find: Callable[[Codec, int, Role], Reader]) -> None:
    """Register the reader of a codec class of another package; subclasses need an entry of their own."""
    _ADDED["reader", codec] = find
    decode_spec.cache_clear()


def add_encoder(codec: type, find: Callable[[Codec, int, Role], Encoder]) -> None:
    """Register the encoder of a codec class of another package; subclasses need an entry of their own."""
    _ADDED["encoder", codec] = find
    encode_spec.cache_clear()


def reader(codec: Codec, head_dim: int, role: Role) -> Reader:
    """Return how keys or values of this codec are read; raises UnsupportedError with the reason if they are not."""
    return _asked(function_of(codec, "reader", "no CUDA kernel reads"), codec, head_dim, role)


def encoder(codec: Codec, head_dim: int, role: Role) -> Encoder:
    """Return how keys or values of this codec are written; raises UnsupportedError if the PyTorch reference must."""
    return _asked(function_of(codec, "encoder", "no CUDA kernel encodes"), codec, head_dim, role)


def function_of(codec: Codec, name: str, no_kernel: str) -> Callable[[Codec, int, Role], Any]:
    """Return what ``kernels/codecs`` defines by this name for a codec; raises UnsupportedError if there is nothing."""
    if codec.searches and name.endswith("encoder"):
        raise UnsupportedError(f"no kernel tries scales (scale=search), as {codec} does")
    function: Callable[[Codec, int, Role], Any] | None = _ADDED.get((name, type(codec))) or of_module(codec, name)
    if function is None:
        raise UnsupportedError(f"{no_kernel} {codec}")
    return function


def of_module(codec: Codec, name: str) -> Any:
    """Return the function of that name that serves the codec's module; None: there is none."""
    return getattr(_kernels(type(codec).__module__), name, None)


@lru_cache
def _kernels(module: str) -> ModuleType | None:
    package, _, stem = ("packedkv.codecs.dense" if module == "packedkv.codec" else module).rpartition(".")
    path = f"packedkv.kernels.codecs.{stem}"
    if package != "packedkv.codecs" or importlib.util.find_spec(path) is None:
        return None
    return importlib.import_module(path)


@lru_cache(maxsize=1024)  # called for every layer of every cache
def _asked(find: Callable[[Codec, int, Role], _CudaSide], codec: Codec, head_dim: int, role: Role) -> _CudaSide:
    if head_dim not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedError(f"the CUDA kernels take head_dim {dims}, not {head_dim} ({codec})")
    side = find(codec, head_dim, role)
    if head_dim % 32 and not side.uneven:
        raise UnsupportedError(
            f"the CUDA kernels take {codec} by 32 channels, and head_dim {head_dim} is no multiple of 32"
        )
    return side


# -- keys and values together ------------------------------------------------------------------------------------------


def align(n: int, to: int = 16) -> int:
    """Round up to a multiple."""
    return -(-n // to) * to


class DecodeSpec(NamedTuple):
    """What a decode program is compiled for."""

    key: Reader
    value: Reader
    head_dim: int
    page_tokens: int
    # (bytes, tokens) in the order of the page: one token in a plane of rows of tokens, a whole block in another one
    key_planes: tuple[tuple[int, int], ...]
    value_planes: tuple[tuple[int, int], ...]
    # pairs of channels with a mean before RoPE that keys are held without, mean.KeyMean.pairs; 0: with their mean
    pairs: int = 0

    @property
    def name(self) -> str:
        """Short text for messages."""
        return f"decode attention of {self.key.type} and {self.value.type}, pages of {self.page_tokens}"

    @property
    def joins(self) -> bool:
        """Whether 16-bit and packed tokens can share an accumulator: values are in the model's basis, factors aside."""
        return self.value.order == 1 and self.value.matrix is None

    @property
    def blocked(self) -> bool:
        """Whether a role has blocks of several tokens."""
        return max(self.key.block, self.value.block) > 1

    @property
    def least_tile(self) -> int:
        """Least tokens of a tile, which a warp unpacks: 16, or 32 with blocks of tokens."""
        return 32 if self.blocked else 16

    def heads(self, group: int) -> int:
        """Query heads of a CTA, 4 or 8, the columns of its products, where ``group`` heads share a KV head.

        Four heads have two columns each, which halves the work per column; outliers are added for eight heads only.
        """
        few = group <= 4 or self.head_dim > 256  # the sums of eight heads would not fit the registers
        return 4 if few and not max(self.key.scratch, self.value.scratch) else 8

    def tiles(self, group: int) -> int:
        """CTAs of a KV head, for each run of tokens."""
        return -(-group // self.heads(group))

    @property
    def table_shrink(self) -> int:
        """How often the room of the look-up tables can be halved."""
        return max(len(self.key.fewer), len(self.value.fewer))

    def halved(self, times: int) -> "DecodeSpec":
        """The same codecs with fewer copies of their look-up tables; programs begin with ``definitions(times)``."""
        return self if not times else self._replace(key=_halved(self.key, times), value=_halved(self.value, times))

    def tile_bytes(self, tokens: int) -> int:
        """Bytes of the planes of ``tokens`` tokens of a page, each plane padded to 16 bytes."""
        return sum(align(size * -(-tokens // per)) for size, per in (*self.key_planes, *self.value_planes))


def _halved(reader: Reader, times: int) -> Reader:
    if not reader.fewer:
        return reader
    shared = reader.fewer[:times][-1]
    # tables with fewer copies are not interleaved: addresses stay inside them
    return replace(reader, shared=shared, fewer=(), min_shared=reader.min_shared if shared == reader.shared else 0)


def definitions(table_shrink: int) -> list[str]:
    """First lines of a program whose look-up tables have so many times half of their room."""
    return [f"#define KV_HALVINGS {table_shrink}"] if table_shrink else []


@lru_cache(maxsize=256)  # called for every layer of every cache
def decode_spec(key: Codec, value: Codec, head_dim: int, page_tokens: int, pairs: int = 0) -> DecodeSpec:
    """Return how the pages of two codecs are read, or raise UnsupportedError; ``pairs`` as in ``DecodeSpec``."""
    k, v = reader(key, head_dim, "key"), reader(value, head_dim, "value")
    if key == value:
        k, v = replace(k, type=k.paired_type or k.type), replace(v, type=v.paired_type or v.type)
    else:
        k, v = replace(k, min_shared=0), replace(v, min_shared=0)
    if v.shares_table_with and k.shares_table_with == v.shares_table_with:
        v = replace(v, type=v.borrowing_type, shared=0, fewer=(), tables=v.tables if v.by_head else None)
    step = math.lcm(16, k.block, v.block)
    if page_tokens % step:
        more = page_tokens + -page_tokens % step
        raise UnsupportedError(f"page_tokens={page_tokens} is not a multiple of {step}; use e.g. {more}")
    page = PageLayout(key.layout(head_dim), value.layout(head_dim), page_tokens)
    planes: dict[str, list[tuple[int, int]]] = {"key": [], "value": []}
    for plane in page.planes:
        rows = page.side(plane.role).rows(plane.field)
        planes[plane.role].append((plane.field.nbytes // rows, page_tokens // plane.blocks // rows))
    return DecodeSpec(k, v, head_dim, page_tokens, tuple(planes["key"]), tuple(planes["value"]), pairs)


class EncodeSpec(NamedTuple):
    """Where both roles are written, and how; a role that no kernel encodes is None."""

    key: Encoder | None
    value: Encoder | None
    head_dim: int
    page_tokens: int
    page_bytes: int
    key_plane: int  # byte of a page at which the role's first plane begins
    value_plane: int
    mean: bool = False  # whether a mean is subtracted from keys before they are encoded

    def encoder(self, role: Role) -> Encoder | None:
        """Return what writes a role."""
        return self.key if role == "key" else self.value

    @property
    def encoders(self) -> dict[Role, Encoder]:
        """Return what writes each role that a kernel writes."""
        return {role: kernel for role in ROLES if (kernel := self.encoder(role)) is not None}

    @property
    def small_batch(self) -> "EncodeSpec":
        """The same for few rows, where a role has structs for them."""
        key, value = ((one and one.small_batch) or one for one in (self.key, self.value))
        return self._replace(key=key, value=value)

    @property
    def name(self) -> str:
        """Short text for messages."""
        return "encoding with " + " and ".join(dict.fromkeys(one.type for one in self.encoders.values()))


@lru_cache(maxsize=256)  # called for every layer of every cache
def encode_spec(key: Codec, value: Codec, head_dim: int, page_tokens: int, mean: bool = False) -> EncodeSpec:
    """Return how two codecs write their pages; a role without a kernel is None there (the reference encodes it).

    ``mean`` as in ``EncodeSpec``; blocks of tokens have no kernel that subtracts one.
    """
    k, v = or_none(encoder, key, head_dim, "key"), or_none(encoder, value, head_dim, "value")
    if mean and k is not None and k.form == "blocks":
        k = None
    page = PageLayout(key.layout(head_dim), value.layout(head_dim), page_tokens)
    at = {role: next(p.offset for p in page.planes if p.role == role) for role in ROLES}
    return EncodeSpec(k, v, head_dim, page_tokens, page.page_bytes, at["key"], at["value"], mean and k is not None)


def or_none(find: Callable[[Codec, int, Role], Found], codec: Codec, head_dim: int, role: Role) -> Found | None:
    """Return what ``find`` returns, or None if it raises UnsupportedError: PyTorch encodes the role."""
    try:
        return find(codec, head_dim, role)
    except UnsupportedError:
        return None


# -- names of specs ----------------------------------------------------------------------------------------------------

_NAMED: dict[str, DecodeSpec | EncodeSpec] = {}
"""Specs by the text that represents them in a compiled graph, and that is faster to hash."""
_Spec = TypeVar("_Spec", DecodeSpec, EncodeSpec)


@lru_cache(maxsize=512)
def text_of(spec: DecodeSpec | EncodeSpec) -> str:
    """Register a spec for the operators and return its name."""
    text = repr(tuple(spec))
    _NAMED[text] = spec
    return text


def spec_of(text: str, kind: type[_Spec]) -> _Spec:
    """Return the spec that ``text_of`` named; raises UnsupportedError if this process has not registered it."""
    if not isinstance(spec := _NAMED.get(text), kind):
        make = "decode_spec" if kind is DecodeSpec else "encode_spec"
        raise UnsupportedError(f"spec={text!r} is unknown; pass text_of({make}(...)).")
    return spec
