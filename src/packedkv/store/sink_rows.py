"""Sink tokens inside pages: the first tokens of every page in 16 bit behind its codes, for engines that own the pages.

The library's caches store their sink beside the pages. An engine has only pages, which requests share and which it
evicts, transfers and finds again. A page therefore has space behind its planes for S tokens::

    planes of the keys | planes of the values | keys [S, D] in 16 bit | values [S, D] in 16 bit

The first S tokens of a page are written to both places. Attention reads the rows of a sequence's first page instead of
their codes, and no rows of other pages. All pages have rows, so that the bytes of a page depend only on the keys and
values of its own tokens, and a token is written with its slot alone.
"""

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, ROLES, Role, storage_dtype
from packedkv.layout import PageLayout


def rows_bytes(sink: int, head_dim: int) -> int:
    """Bytes of the rows of ``sink`` tokens of one head, keys and values."""
    return len(ROLES) * 2 * sink * head_dim


def sink_rows(layout: PageLayout, pages: Tensor, sink: int, dtype: torch.dtype) -> Tensor:
    """View the rows of all pages as ``dtype`` (fp16 or bf16), ``[num_pages, H, 2, sink, D]``: keys, then values.

    ``pages``: uint8 ``[num_pages, H, bytes]``, longer than the layout by ``rows_bytes`` or more.
    """
    head_dim = layout.key.head_dim
    raw = pages[..., layout.page_bytes : layout.page_bytes + rows_bytes(sink, head_dim)]
    return raw.view(dtype).unflatten(-1, (len(ROLES), sink, head_dim))


def write_sink_rows(layout: PageLayout, pages: Tensor, role: Role, x: Tensor, slots: Tensor, sink: int) -> None:
    """Write the rows of those new tokens that are among the first of their page; this synchronises on a GPU.

    ``x [B, H, n, D]`` is in the model basis. A row with NaN, Inf or a magnitude above 65504 is stored as zeros, as its
    codes are. ``slots`` int64 ``[B, n]`` are as in ``pages.write_blocks``; below 0: the token is not stored.
    """
    sequence, token = ((slots >= 0) & (slots % layout.page_tokens < sink)).nonzero(as_tuple=True)
    if not len(token):
        return
    where, x = slots[sequence, token], x[sequence, :, token]
    stored = x.to(storage_dtype(x.dtype)).masked_fill((~(x.abs() <= FP16_MAX)).any(-1, keepdim=True), 0.0)
    rows = sink_rows(layout, pages, sink, stored.dtype)
    rows[where // layout.page_tokens, :, ROLES.index(role), where % layout.page_tokens] = stored
