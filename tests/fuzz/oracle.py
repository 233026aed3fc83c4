"""What the cache of one layer must hold and attend: plain tensors, one state per token, attention in float64.

The oracle shares ``encode``, ``decode`` and ``fit`` of the codecs and ``MeanRemoval`` with the library, and nothing
else: it has no pages, slots, runs, kernels or chunks. Tokens are encoded late, many in one call, so that how a cache
split its calls would show.
"""

import copy
import functools
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Dense, Params, Role, Sample, Site, roundtrip
from packedkv.store.site import LayerSite, codec_params

SINK, AGED, RECENT, DENSE = range(4)
"""Where a token lies: dense for ever, encoded, encoded by the codecs of ``recent``, dense in the window."""
CLOSE = 1e-5
"""Largest error of attention, as a share of the largest value."""


class Mismatch(AssertionError):
    """A cache does not hold or attend what the oracle does."""


class Stopped(Exception):
    """A refusal that the documentation names, after which layers differ: the program ends."""


class Machine(ABC):
    """Runs the operations of one setting on its caches, ``held``; raises ``Mismatch`` if one differs from its oracle.

    An operation is the method of its name with ``_`` before.
    """

    held: list[Any]

    def run(self, operations: list[list[Any]]) -> None:
        for i, (name, who, *numbers) in enumerate(operations):
            of = self.held[who % len(self.held)]
            try:
                self.operate(getattr(self, f"_{name}"), of, numbers)
                self.check(of)
            except Stopped:
                return
            except Mismatch as error:
                raise Mismatch(f"operation {i}, {name}: {error}") from None
            except Exception as error:  # with the three innermost places: a bare ``assert`` says nothing else
                frames = reversed(extract_tb(error.__traceback__)[-3:])
                at = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
                raise Mismatch(f"operation {i}, {name}: {type(error).__name__}: {error} (at {at})") from error
        for of in self.held:
            self.check(of)

    def operate(self, operation: Callable[..., None], of: Any, numbers: list[int]) -> None:
        operation(of, *numbers)

    @abstractmethod
    def check(self, of: Any) -> None:
        """Compare a cache with its oracle."""

    @abstractmethod
    def go_on(self, of: Any, cache: Any, both: int) -> None:
        """Go on with a copy, or with both."""

    def _deepcopy(self, of: Any, *numbers: int) -> None:
        self.go_on(of, copy.deepcopy(of.cache), numbers[-1])

    def _pickle(self, of: Any, *numbers: int) -> None:
        self.go_on(of, pickle.loads(pickle.dumps(of.cache)), numbers[-1])


def _apart(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the caller's inference mode: the oracle writes its tensors in any mode."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **options)

    return run


class RoleTokens:
    """Keys or values: what came (``raw``, held dtype), what attention reads of it (``read``, float32), and where."""

    def __init__(self, codec: Codec, site: Site, params: Params | None, drawn: bool, empty: Tensor) -> None:
        self.codec, self.site, self.params, self.fitted = codec, site, params, not drawn and params is None
        self.raw, self.read = empty.to(codec.held_dtype(empty.dtype)), empty.float()
        self.where: list[int] = []
        self.place: list[int] = []  # of an encoded token in its block
        self.late: list[int] = []  # tokens that are to be encoded: consecutive, whole blocks


class LayerTokens:
    """The oracle of one layer.

    Parameters
    ----------
    site : LayerSite
        As of the cache.
    together : bool
        Keys and values leave the window together, as in the caches of kernels.
    """

    def __init__(self, site: LayerSite, together: bool = False) -> None:
        self.site, self.scheme, self.together = site, site.scheme, together
        self.reset()

    def reset(self) -> None:
        self.roles: dict[Role, RoleTokens] = {}
        self.start = 0
        self.positions = torch.empty(1, 0, dtype=torch.long)
        self.mean = None if self.site.mean is None else self.site.mean.given

    @_apart
    def copy(self) -> "LayerTokens":
        other = copy.copy(self)
        other.roles = {role: copy.copy(tokens) for role, tokens in self.roles.items()}
        for tokens in other.roles.values():
            tokens.raw, tokens.read = tokens.raw.clone(), tokens.read.clone()
            tokens.where, tokens.place, tokens.late = list(tokens.where), list(tokens.place), list(tokens.late)
        return other

    def __len__(self) -> int:
        return len(self.roles["key"].where) if self.roles else 0

    @property
    def batch(self) -> int:
        return self.roles["key"].raw.shape[0] if self.roles else 0

    @property
    def sink(self) -> int:
        """Tokens that lie in the sink."""
        return self.roles["key"].where.count(SINK) if self.roles else 0

    # -- writing -----------------------------------------------------------------------------------------------------

    @_apart
    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """``positions [B or 1, n]`` count up; those of padding are below 0."""
        n, held, both = keys.shape[2], len(self), dict(zip(ROLES, (keys, values), strict=True))
        if not self.roles:
            self.dtype = keys.dtype
            for role, x in both.items():
                self.roles[role] = self._role(role, x)
        if positions is None:
            positions = self.start + held + torch.arange(n)[None]
        rows = max(len(positions), len(self.positions)) if held else len(positions)
        self.positions = torch.cat([self.positions[:, :held].expand(rows, -1), positions.expand(rows, -1)], 1)
        sink = min(max(self.scheme.sink - self.start - held, 0), n)
        for role, x in both.items():
            tokens = self.roles[role]
            raw = x.to(tokens.raw.dtype)
            tokens.raw, tokens.read = torch.cat([tokens.raw, raw], 2), torch.cat([tokens.read, raw.float()], 2)
            tokens.where += [SINK] * sink + [DENSE] * (n - sink)
            tokens.place += [0] * n
        if len(self) and self._fit():
            self._age()

    def _role(self, role: Role, x: Tensor) -> RoleTokens:
        codec = self.scheme.codec(role).for_dtype(x.dtype)
        of = self.site
        site = Site(of.layer, role, x.shape[1], x.shape[3], of.seed, x.device, of.first_head)
        given = codec_params(of.fitted, role)
        params = given if given is not None or "tensor" in codec.needs else codec.fit(site)
        return RoleTokens(codec, site, params, given is not None or "tensor" not in codec.needs, x[:, :, :0])

    @property
    def missing(self) -> bool:
        """Whether constants are not known yet."""
        mean = self.site.mean is not None and self.mean is None
        return mean or any(tokens.params is None for tokens in self.roles.values())

    def _fit(self) -> bool:
        """Fit what is missing; False: there are too few tokens for it."""
        if not self.missing:
            return True
        wanted, sink, batch = self.site.fit_tokens, self.sink, self.batch
        padding = ((self.positions < 0).long().cumprod(1).sum(1) - sink).clamp_min(0).expand(batch)
        if wanted > 1 and len(self) < sink + wanted + int(padding.max()):
            return False
        for role, tokens in self.roles.items():
            if wanted > 1:
                at = padding[:, None] + sink + torch.arange(0, wanted, tokens.codec.fit_every)
            else:  # on all tokens of the first call
                at = torch.arange(len(self)).expand(batch, -1)
            sample = torch.stack([tokens.raw[b][:, at[b]] for b in range(batch)])
            if role == "key" and self.site.mean is not None:
                placed = self.positions.expand(batch, -1).gather(1, at)
                if self.mean is None:
                    self.mean = self.site.mean.of(sample, placed)
                sample = sample.float() - self.site.mean.at(self.mean, placed)
            if tokens.params is None and role == "key" and self.site.energy is not None:
                tokens.params = tokens.codec.fit(tokens.site, Sample(sample, energy=self.site.energy))
            elif tokens.params is None:
                tokens.params = tokens.codec.fit(tokens.site, Sample(sample))
        return True

    def _unit(self, role: Role) -> int:
        if self.together or self.scheme.recent is not None:
            return math.lcm(self.scheme.key.block_tokens, self.scheme.value.block_tokens)
        return self.scheme.codec(role).block_tokens

    def _age(self) -> None:
        """Mark what leaves the window, in whole blocks, oldest first."""
        window, recent = self.scheme.window, self.scheme.recent
        for role, tokens in self.roles.items():
            unit, codec, leaving = self._unit(role), tokens.codec, DENSE
            if recent is not None:
                self._encode_late(role)
                young = [i for i, where in enumerate(tokens.where) if where == DENSE]
                if young:
                    self._encode_recent(role, young)
                leaving = RECENT
            lying = [i for i, where in enumerate(tokens.where) if where == leaving]
            out = lying[: unit * max(0, (len(lying) - window) // unit)]
            for j, i in enumerate(out):
                tokens.where[i], tokens.place[i] = AGED, j % codec.block_tokens
            if recent is not None and out:
                tokens.raw[:, :, out] = self._rounded(tokens.read[:, :, out]).to(tokens.raw.dtype)
            tokens.late += out

    def _encode_recent(self, role: Role, young: list[int]) -> None:
        recent, tokens = self.scheme.recent, self.roles[role]
        assert recent is not None
        codec = recent.codec(role).for_dtype(self.dtype)
        x = tokens.raw[:, :, young].to(self.dtype).to(codec.held_dtype(self.dtype))
        with_mean = not isinstance(recent.key, Dense)
        tokens.read[:, :, young] = self._packed(codec, codec.fit(tokens.site), role, x, young, with_mean)
        for i in young:
            tokens.where[i] = RECENT

    def _encode_late(self, role: Role) -> None:
        tokens = self.roles[role]
        if not tokens.late:
            return
        at, tokens.late = tokens.late, []
        assert tokens.params is not None
        tokens.read[:, :, at] = self._packed(tokens.codec, tokens.params, role, tokens.raw[:, :, at], at, True)

    def _packed(self, codec: Codec, params: Params, role: Role, x: Tensor, at: list[int], with_mean: bool) -> Tensor:
        """What attention reads of tokens ``x`` at these places of the cache, once they are encoded."""
        if role == "value" or self.site.mean is None or not with_mean:
            return roundtrip(codec, x, params)
        mean = self.site.mean.at(self.mean, self.positions[:, at])
        return roundtrip(codec, x.float() - mean, params) + mean

    @_apart
    def encode(self) -> None:
        """Encode all tokens that are to be encoded, in one call."""
        for role in self.roles:
            self._encode_late(role)

    # -- removing and rearranging --------------------------------------------------------------------------------------

    def refuses(self, first: int, last: int) -> bool:
        """Whether a cache of kernels refuses to drop ``[first, last)``: two runs, or a block that was cut."""
        if not self.roles or first == last:
            return False
        if first and last < len(self) and first != self.sink:
            return True
        tokens = self.roles["key"]
        unit, end = self._unit("key"), first + 1
        aged = [i for i, where in enumerate(tokens.where) if where == AGED]
        if unit == 1 or not aged or not aged[0] < first <= aged[-1]:
            return False
        # places of a block of both roles: counted back from the newest encoded token, which ends one
        return (aged[-1] - end + 2) % unit != 0

    @_apart
    def remove(self, first: int, last: int) -> None:
        self.encode()
        if not self.roles or first == last:
            return
        left = [*range(first), *range(last, len(self))]
        self.positions = self.positions[:, left]
        for tokens in self.roles.values():
            tokens.raw, tokens.read = tokens.raw[:, :, left], tokens.read[:, :, left]
            tokens.where, tokens.place = [tokens.where[i] for i in left], [tokens.place[i] for i in left]

    def crop(self, length: int) -> None:
        self.remove(length, len(self))

    def evict(self, n: int, keep: int = 0) -> None:
        self.remove(keep, keep + n)
        self.start += n

    @_apart
    def select(self, index: Tensor) -> None:
        self.encode()
        if not self.roles:
            return
        batch = self.batch
        if len(self.positions) > 1:
            self.positions = self.positions[index]
        if self.mean is not None and self.site.mean is not None and self.site.mean.given is None:
            self.mean = self.mean[index]
        for tokens in self.roles.values():
            tokens.raw, tokens.read = tokens.raw[index], tokens.read[index]
            if tokens.fitted and tokens.params is not None:
                own = tokens.params.items()
                tokens.params = {name: x[index] if len(x) == batch and batch > 1 else x for name, x in own}

    # -- reading -----------------------------------------------------------------------------------------------------

    def _rounded(self, x: Tensor) -> Tensor:
        return (x.clamp(-65504, 65504) if self.dtype == torch.float16 else x).to(self.dtype)

    def decode(self) -> tuple[Tensor, Tensor]:
        """Keys and values as ``LayerCache.decode`` returns them."""
        self.encode()
        return self._rounded(self.roles["key"].read), self._rounded(self.roles["value"].read)

    def check_decoded(
        self, found: tuple[Tensor, Tensor], first: int = 0, last: int | None = None, of: str = ""
    ) -> None:
        """Compare decoded keys and values of the tokens ``[first, last)``, bit by bit.

        Of padding only the values: with a mean, its keys turn with the row when what follows it shows where it begins.
        """
        padding = (self.positions[:, first:last] < 0)[:, None, :, None]
        for role, x, y in zip(ROLES, found, self.decode(), strict=True):
            y = y[:, :, first:last]
            if role == "key" and self.site.mean is not None and x.shape == y.shape:
                x, y = x.masked_fill(padding, 0), y.masked_fill(padding, 0)
            if x.shape != y.shape or x.dtype != y.dtype:
                raise Mismatch(f"{of}{role}: {x.dtype} {list(x.shape)}, expected {y.dtype} {list(y.shape)}")
            if not torch.equal(x, y):
                wrong = (x != y).any(-1).nonzero()
                off = float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30))
                raise Mismatch(
                    f"{of}{role}: {len(wrong)} of {x[..., 0].numel()} rows differ by up to {off:.2g} of the largest, "
                    f"the first at [batch, head, token] {wrong[0].tolist()}, the last at {wrong[-1].tolist()}; "
                    f"states {_runs(self.roles[role].where)}"
                )

    def attention(self, q: Tensor, visible: Tensor, **rules: Any) -> Tensor:
        """``attention64`` over the tokens of the cache; ``visible`` broadcasts to ``[B, HQ, n, N]``."""
        self.encode()
        return attention64(q, *(tokens.read for tokens in self.roles.values()), visible, **rules)

    def check_attention(self, found: Tensor, want: Tensor, of: str = "") -> None:
        """Compare attention's result, of any dtype, with the right one in float64."""
        if found.shape != want.shape:
            raise Mismatch(f"{of}: shape {list(found.shape)}, expected {list(want.shape)}")
        largest, kind = float(self.roles["value"].read.abs().max()), torch.finfo(found.dtype)
        off = (found.double() - want).abs()
        if found.dtype != torch.float32:  # what is returned is rounded; with age tiers each part is, before the merge
            near = want.abs() if self.scheme.recent is None else 2 * largest
            off = off - kind.eps / 2 * 1.01 * near - kind.smallest_normal * kind.eps
        if not bool((off <= CLOSE * largest + 1e-30).all()):  # NaN as well
            row = int(off.amax(-1).flatten().nan_to_num(torch.inf).argmax())
            b, rest = divmod(row, found.shape[1] * found.shape[2])
            raise Mismatch(
                f"{of}: off by {float(off.max()) / largest:.2g} of the largest value, at [batch, head, query] "
                f"{[b, *divmod(rest, found.shape[2])]} of {list(found.shape[:3])}, {len(self)} tokens; "
                f"states {_runs(self.roles['key'].where)}"
            )


def attention64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention in float64; a query that sees nothing gives zeros."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(ratio, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v


def causal(n: int, total: int, window: int = 0, chunk: int = 0, place: int = 0) -> Tensor:
    """Which of ``total`` tokens the newest n see: bool ``[n, total]``."""
    own, keys = torch.arange(total - n, total)[:, None], torch.arange(total)
    seen = keys <= own
    if window:
        seen &= keys > own - window
    if chunk:
        seen &= (place + keys) // chunk == (place + own) // chunk
    return seen


def _runs(where: list[int]) -> str:
    """Text of the states of a role's tokens, e.g. ``4 sink, 64 encoded, 3 dense``."""
    names, out = ("sink", "encoded", "recent", "dense"), list[Any]()
    for state in where:
        if out and out[-1][1] == state:
            out[-1][0] += 1
        else:
            out.append([1, state])
    return ", ".join(f"{n} {names[state]}" for n, state in out)
