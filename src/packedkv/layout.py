"""Memory layout: fields of a block, planes of a page, and the effective bits that follow from them.

A page, on disk, CPU and GPU: ``| K.codes (all blocks) | K.scale ... | V.codes (all blocks) | V.scale ... |``.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from packedkv.errors import ShapeError

PAGE_TOKENS = 64
PLANE_ALIGN = 16


@dataclass(frozen=True)
class Field:
    """One packed tensor of a block of one head.

    Parameters
    ----------
    name : str
        Key of the payload, e.g. ``"codes"``.
    dtype : str
        A torch dtype by name, e.g. ``"uint8"``, ``"float16"``.
    shape : tuple of int
    part : str
        Category of the bytes in a report: ``codes``, ``scales``, ``norms``, ``outliers``, ``flags``, ``dense``.
    reads : str
        Dtype of the numbers that its bytes are, where some bytes are NaN; default ``dtype``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str = "codes"
    reads: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The field's torch dtype."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block of one head."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The fields of one block of one head, and their bytes.

    Parameters
    ----------
    head_dim, block_tokens : int
        Channels D of a token; tokens G that a block encodes together.
    fields : tuple of Field
        In memory order.
    nominal_bits : float
        Bits per element of the codes alone (what papers print); never used for accounting.
    version : int
        Increased when the meaning of the bytes changes; saved with every file.
    """

    head_dim: int
    block_tokens: int
    fields: tuple[Field, ...]
    nominal_bits: float
    version: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one head, all fields."""
        return sum(f.nbytes for f in self.fields)

    @property
    def token_bytes(self) -> float:
        """Bytes of a token of one head, all fields."""
        return self.block_bytes / self.block_tokens

    @property
    def effective_bits(self) -> float:
        """Bytes x 8 / elements of a block."""
        return self.block_bytes * 8 / (self.block_tokens * self.head_dim)

    def rows(self, field: Field) -> int:
        """Rows of a field, one for each token of a block; 1: its numbers belong to the block."""
        return self.block_tokens if len(field.shape) > 1 and field.shape[0] == self.block_tokens else 1

    def field(self, name: str) -> Field:
        """Return the field called ``name``."""
        return next(f for f in self.fields if f.name == name)


@dataclass(frozen=True)
class Plane:
    """One field of one role inside a page: ``blocks`` blocks from byte ``offset`` on."""

    role: str
    field: Field
    offset: int
    blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the plane (padding to the next plane not included)."""
        return self.field.nbytes * self.blocks


@dataclass(frozen=True)
class PageLayout:
    """Byte map of a page: ``page_tokens`` tokens of one head, keys and values in one contiguous run.

    Raises ShapeError if a block does not divide the page.

    >>> import packedkv
    >>> scheme = packedkv.get("saw-int4")
    >>> PageLayout(scheme.key.layout(128), scheme.value.layout(128)).page_bytes
    8704
    """

    key: Layout
    value: Layout
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        for layout in (self.key, self.value):
            if self.page_tokens % layout.block_tokens:
                raise ShapeError(
                    f"page_tokens={self.page_tokens} is not a multiple of block_tokens="
                    f"{layout.block_tokens}; use a multiple, e.g. {page_tokens_for(self.key, self.value)}."
                )

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """All planes in memory order."""
        planes, offset = [], 0
        for role, layout in (("key", self.key), ("value", self.value)):
            for field in layout.fields:
                plane = Plane(role, field, offset, self.page_tokens // layout.block_tokens)
                planes.append(plane)
                offset += -(-plane.nbytes // PLANE_ALIGN) * PLANE_ALIGN
        return tuple(planes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page of one head, plane padding included."""
        return sum(-(-p.nbytes // PLANE_ALIGN) * PLANE_ALIGN for p in self.planes)

    def side(self, role: str) -> Layout:
        """Layout of one role."""
        return self.key if role == "key" else self.value

    def view_plane(self, pages: torch.Tensor, plane: Plane) -> torch.Tensor:
        """View a plane of ``pages``, uint8 ``[num_pages, H, page_bytes]``: ``[num_pages, H, blocks, *field.shape]``."""
        raw = pages[..., plane.offset : plane.offset + plane.nbytes]
        typed = raw.view(plane.field.torch_dtype)
        return typed.unflatten(-1, (plane.blocks, *plane.field.shape))


def page_tokens_for(*layouts: Layout, at_least: int = PAGE_TOKENS) -> int:
    """Smallest multiple of every block size that is >= ``at_least`` tokens."""
    step = math.lcm(*(layout.block_tokens for layout in layouts))
    return -(-at_least // step) * step


def check_head_dim(method: str, head_dim: int, step: int = 8) -> None:
    """Raise ShapeError unless a head_dim is a positive multiple of ``step``; with 8, codes of any width fill bytes."""
    if head_dim < step or head_dim % step:
        rule = f"a multiple of {step}" if step > 1 else "a positive number"
        *some, last = (str(dim) for dim in (64, 80, 96, 128, 192, 256) if dim % step == 0)
        raise ShapeError(f"{method}: head_dim={head_dim} is not {rule}; use {', '.join(some)} or {last}.")
