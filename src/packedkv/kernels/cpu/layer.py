"""Attention by the CPU kernels over the tokens of a cache that the host schedules: sink, runs of slots, window."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from packedkv.attention import Partial, Seen
from packedkv.codec import ROLES, Params, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import NO_CONSTANTS, Constants, constants
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import Piece, attend, concatenated
from packedkv.kernels.cpu.mean import CpuMean, cpu_mean
from packedkv.kernels.cpu.spec import CpuSpec, cpu_spec
from packedkv.kernels.tokens import Rules
from packedkv.ops.rope import NOT_TURNED, Rotary
from packedkv.store.pages import PageStore
from packedkv.store.role import RoleState

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
        out, lse = attend(
            q, store.pages, store.table,
            [pieces] * batch if mean is None or runs is None else _with_positions(pieces, runs, batch), rules,
            spec=spec, key=key, value=value,
            dense=(
                concatenated(roles["key"].sink, roles["key"].window),
                concatenated(roles["value"].sink, roles["value"].window),
            ),
            seen=_of_part(ranges(seen, batch, q.shape[2], total), first, tokens),
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
            side = spec.key if state.role == "key" else spec.value
            made = constants(side, state.codec, state.site, state.params, None, drawn=state.drawn)
            old = self.constants[state.role] = state.params, made
        return old[1]


def _pieces(key: RoleState, value: RoleState) -> list[Piece]:
    """Where the tokens of a cache lie; those held dense are numbered from the sink on."""
    pieces, sides = [], [list(_segments(state)) for state in (key, value)]
    at, ends = 0, [0, 0]
    total = sum(count for count, _ in sides[0])
    current = [(0, 0), (0, 0)]
    while at < total:
        for i, side in enumerate(sides):
            while ends[i] <= at:
                current[i] = side.pop(0)
                ends[i] += current[i][0]
        count = min(ends) - at
        k, v = (
            place + done if place >= 0 else place - done
            for (size, place), end in zip(current, ends, strict=True)
            for done in (size - (end - at),)
        )
        pieces.append(Piece(count, k, v))
        at += count
    return pieces


def _with_positions(pieces: Sequence[Piece], runs: Runs, batch: int) -> list[list[Piece]]:
    """The pieces of each sequence with their positions; they are cut where these are not consecutive."""
    ends = list(accumulate(piece.tokens for piece in pieces))
    edges = {0, *ends, *(end for end in accumulate(count for count, _ in runs) if end < ends[-1])}
    starts = [first.expand(batch).tolist() for _, first in runs]
    found: list[list[Piece]] = [[] for _ in range(batch)]
    i, j, before, placed = 0, 0, 0, 0  # the piece and the run, and how many tokens precede them
    for at, end in pairwise(sorted(edges)):
        while at >= before + pieces[i].tokens:
            i, before = i + 1, before + pieces[i].tokens
        while at >= placed + runs[j][0]:
            j, placed = j + 1, placed + runs[j][0]
        _, k, v, _ = pieces[i]
        done = at - before
        for b, own in enumerate(found):
            own.append(
                Piece(
                    end - at,
                    k + done if k >= 0 else k - done,
                    v + done if v >= 0 else v - done,
                    starts[j][b] + at - placed,
                )
            )
    return found


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


def _of_part(seen: tuple[Tensor, Tensor] | None, first: int, held: int) -> tuple[Tensor, Tensor] | None:
    """``ranges`` of the tokens ``[first, first + held)`` alone, counted from the first of them."""
    if seen is None:
        return None
    low, high = ((x - first).clamp(0, held) for x in seen)
    return low, high
