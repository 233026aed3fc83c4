"""First tokens of every page, a second time: in 16 bit behind its codes, where an engine serves presets with a sink.

The library's caches hold their sink beside the pages. An engine has nothing but pages: requests share them, they are
evicted, sent to other servers and found again. So a page has room behind its planes for S tokens::

    planes of the keys | planes of the values | keys [S, D] in 16 bit | values [S, D] in 16 bit

Its first S tokens are written to both places, and attention reads the rows of a sequence's first page instead of their
codes. Rows of other pages are never read, but written all the same: so the bytes of a page depend on nothing but its
own tokens' keys and values, and what writes a token needs to know its slot only.
"""

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, ROLES, Role, storage_dtype
from packedkv.layout import PageLayout


def rows_bytes(kept: int, head_dim: int) -> int:
    """Bytes of the rows of ``kept`` tokens of one head, keys and values."""
    return len(ROLES) * 2 * kept * head_dim


def sink_rows(layout: PageLayout, pages: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """View the rows of all pages, ``[num_pages, H, 2, kept, D]``: keys, then values.

    Parameters
    ----------
    layout : PageLayout
    pages : Tensor uint8 ``[num_pages, H, bytes]``
        Longer than the layout by ``rows_bytes`` or more.
    kept : int
    dtype : torch.dtype
        fp16 or bf16.
    """
    head_dim = layout.key.head_dim
    raw = pages[..., layout.page_bytes : layout.page_bytes + rows_bytes(kept, head_dim)]
    return raw.view(dtype).unflatten(-1, (len(ROLES), kept, head_dim))


def write_sink_rows(layout: PageLayout, pages: Tensor, role: Role, x: Tensor, slots: Tensor, kept: int) -> None:
    """Write the rows of those new tokens that are among the first of their page; this synchronises on a GPU.

    Parameters
    ----------
    layout, pages, kept
        As ``sink_rows``.
    role : Role
    x : Tensor ``[B, H, n, D]``
        Model basis. A row with NaN, Inf or a magnitude above 65504 is held as zeros, as its codes are.
    slots : Tensor int64 ``[B, n]``
        Slot s of the pool is place ``s % P`` of page ``s // P``; below 0: the token is not stored.
    """
    sequence, token = ((slots >= 0) & (slots % layout.page_tokens < kept)).nonzero(as_tuple=True)
    if not len(token):
        return
    where, x = slots[sequence, token], x[sequence, :, token]
    held = x.to(storage_dtype(x.dtype)).masked_fill((~(x.abs() <= FP16_MAX)).any(-1, keepdim=True), 0.0)
    rows = sink_rows(layout, pages, kept, held.dtype)
    rows[where // layout.page_tokens, :, ROLES.index(role), where % layout.page_tokens] = held
