"""Attention by the CPU kernels over the tokens of a cache that the host schedules: sink, runs of slots, window."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from packedkv.attention import Partial, Seen
from packedkv.codec import ROLES, Params, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import NO_CONSTANTS, Constants, constants
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import Piece, attend, concatenated
from packedkv.kernels.cpu.mean import CpuMean, cpu_mean
from packedkv.kernels.cpu.spec import CpuReader, CpuSpec, cpu_spec
from packedkv.kernels.tokens import Rules
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.store.pages import PageStore
from packedkv.store.site import RoleState

Runs = Sequence[tuple[int, Tensor]]
"""Tokens of consecutive positions: how many, and the position of the first, ``[B or 1]``, as ``Positions.runs``."""


class CpuAttention:
    """Attention of one layer, with its kernels and constants; raises UnsupportedError if the kernels cannot read it."""

    def __init__(self, roles: Mapping[Role, RoleState], store: PageStore) -> None:
        key, value = roles["key"], roles["value"]
        if reason := library.refusal(store.pages.device):
            raise UnsupportedError(reason)
        if key.site.head_dim != value.site.head_dim:
            raise UnsupportedError(
                f"keys have head_dim {key.site.head_dim}, values {value.site.head_dim}; the kernels take one"
            )
        self.arguments = key.codec, value.codec, key.site.head_dim, store.layout.page_tokens
        cpu_spec(*self.arguments)  # not an attribute: it has functions, which are not pickled
        self.constants: dict[Role, tuple[Params, Constants]] = {}
        self.mean: tuple[Tensor, CpuMean] | None = None

    def attend(
        self,
        q: Tensor,
        roles: Mapping[Role, RoleState],
        store: PageStore,
        rules: Rules,
        *,
        mean: Tensor | None = None,
        rotary: Rotary = NOT_TURNED,
        runs: Runs | None = None,
        part: tuple[int, int] | None = None,
    ) -> Partial:
        """Attention of the newest queries ``q [B, HQ, n, D]``, model basis; ``out`` has q's shape and dtype.

        The roles have equally many tokens, but not necessarily the same dense ones. ``mean``, float32 ``[1 or B, H,
        D]``, was subtracted from the keys before they were packed; ``rotary`` turns it with the positions of all
        tokens, ``runs``. ``part``: the roles have the tokens from this one on, of so many in all, to which ``rules``
        refer; default: all.
        """
        spec, seen, pieces = cpu_spec(*self.arguments), rules.seen, _pieces(roles["key"], roles["value"])
        key, value = (self._constants_of(roles[role], spec) for role in ROLES)
        if mean is not None and (self.mean is None or self.mean[0] is not mean):
            self.mean = mean, cpu_mean(mean, rotary)
        batch, tokens = q.shape[0], sum(piece.tokens for piece in pieces)
        first, total = part or (0, tokens)
        if seen.mask is not None:
            rules = rules._replace(seen=seen._replace(mask=seen.mask[..., first : first + tokens]))
        if (visible := ranges(seen, batch, q.shape[2], total)) is not None:  # counted from the part's first token
            low, high = ((x - first).clamp(0, tokens) for x in visible)
            visible = low, high
        dense_k, dense_v = (concatenated(roles[role].sink, roles[role].window) for role in ROLES)
        out, lse = attend(
            q, store.pages, store.table,
            [pieces] * batch if mean is None or runs is None else _with_positions(pieces, runs, batch), rules,
            spec=spec, key=key, value=value, dense=(dense_k, dense_v), seen=visible,
            mean=None if mean is None or self.mean is None else self.mean[1],
        )  # fmt: skip
        return Partial(out, lse)

    def _constants_of(self, state: RoleState, spec: CpuSpec) -> Constants:
        """Constants of a role for the kernels, made once for its params; none before a fit: every token is dense."""
        if state.params is None:
            assert not state.encoded
            return NO_CONSTANTS
        old = self.constants.get(state.role)
        if old is None or old[0] is not state.params:
            side: CpuReader = getattr(spec, state.role)
            made = constants(side, state.codec, state.site, state.params, None, seeded=state.seeded)
            old = self.constants[state.role] = state.params, made
        return old[1]


def _pieces(key: RoleState, value: RoleState) -> list[Piece]:
    """Where the tokens of a cache lie; those held dense are numbered from the sink on."""
    return [
        Piece(count, *(_behind(place, done) for place, done in both))
        for count, both in _cut(list(_segments(key)), list(_segments(value)))
    ]


def _with_positions(pieces: Sequence[Piece], runs: Runs, batch: int) -> list[list[Piece]]:
    """The pieces of each sequence with their positions; they are cut where these are not consecutive."""
    starts = [(count, first.expand(batch).tolist()) for count, first in runs]
    cuts = list(_cut([(piece.tokens, piece) for piece in pieces], starts))
    return [
        [
            Piece(count, _behind(piece.key, done), _behind(piece.value, done), first[b] + more)
            for count, ((piece, done), (first, more)) in cuts
        ]
        for b in range(batch)
    ]


def _cut(*runs: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
    """Cut lists of ``(tokens, item)`` at the edges of all of them, up to the end of the first.

    Yields the tokens of each part, and the item of each list with how many of its tokens come before the part.
    """
    ends = [list(accumulate(count for count, _ in one)) for one in runs]
    edges = {0, *(end for one in ends for end in one if end <= ends[0][-1])}
    for at, end in pairwise(sorted(edges)):
        places = [bisect_right(row, at) for row in ends]
        yield end - at, [(one[i][1], at - row[i] + one[i][0]) for one, row, i in zip(runs, ends, places, strict=True)]


def _behind(place: int, tokens: int) -> int:
    """Return the place of a ``Piece`` that lies so many tokens after another one."""
    return place + tokens if place >= 0 else place - tokens


def _segments(state: RoleState) -> Iterator[tuple[int, int]]:
    """Runs of a role's tokens, oldest first: how many, and where (as in a Piece)."""
    sink = state.sink.shape[2]
    yield sink, ~0
    for first, last in state.runs:
        yield last - first, first
    yield state.window.shape[2], ~sink


def ranges(seen: Seen, batch: int, n: int, total: int) -> tuple[Tensor, Tensor] | None:
    """Tokens ``[low, high)`` that each of the newest n queries of ``batch`` sequences sees; None: all of them."""
    if seen.mask is not None or (n == 1 and not (seen.window or seen.chunk or any(seen.start))):
        return None
    low = torch.tensor([seen.first(i, n, total) for i in range(n)], dtype=torch.int32).expand(batch, n)
    if seen.start:
        low = torch.maximum(low, torch.tensor(seen.start, dtype=torch.int32)[:, None])
    high = torch.full((n,), total, dtype=torch.int32)
    if seen.causal:
        high = torch.arange(total - n + 1, total + 1, dtype=torch.int32)
    return low, high.expand(batch, n)
