"""LayerCache: the packed cache of one attention layer: sink | encoded pages | window; every token is encoded once."""

import bisect
import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from packedkv.attention import Partial, Seen, attend_parts, check_queries, merge, rounded_queries, with_sinks
from packedkv.checks import check_shapes, check_tensors
from packedkv.codec import ROLES, Params, Role, Sample, saturated
from packedkv.errors import ShapeError, SpecError, UnsupportedError
from packedkv.kernels.cpu.layer import CpuAttention
from packedkv.kernels.tokens import Rules
from packedkv.ops.precision import without_modes
from packedkv.ops.rope import NOT_TURNED
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore
from packedkv.store.positions import Positions
from packedkv.store.site import WITHOUT_MODEL, LayerSite, MeanRemoval, Removed, RoleState, no_tokens


class State(NamedTuple):
    """Attributes that an append replaces. No tensor is copied: sink and window are new tensors after an append."""

    cache: dict[str, Any]
    roles: dict[Role, dict[str, Any]]
    positions: list[tuple[int, Tensor]]
    recent: int


class LayerCache:
    """The packed cache of one layer.

    Parameters
    ----------
    scheme : KVScheme or LayerSite
        Scheme of this layer (``scheme.for_layer``); or its site, which includes ``layer``, ``seed``, ``params`` and
        ``first_head``.
    layer, seed : int
        Layer index and seed, which determine the random constants.
    params : mapping of role to Params, optional
        Fitted constants by role (``{"key": ..., "value": ...}``).
    page_tokens : int, optional
        P; default 64, rounded up to whole blocks.
    capacity : int
        Tokens to allocate pages for at once; 0 grows on demand.
    first_head : int
        The model's number of KV head 0 here, ``Site.first_head``.
    remember : bool
        Keep decoded tokens, so that every slot is decoded once: for evaluations, where time matters and memory does
        not. The decoded copies are not among ``tensors()``.

    Examples
    --------
    >>> import packedkv, torch
    >>> cache = LayerCache(packedkv.get("saw-int4"))
    >>> k, v = torch.randn(2, 1, 2, 100, 64)
    >>> cache.append(k, v)
    >>> len(cache), cache.attend(torch.randn(1, 4, 1, 64)).shape
    (100, torch.Size([1, 4, 1, 64]))
    """

    store: PageStore | None = None  # the pages; None until the first append
    static = False  # whether lengths lie on the device, where a captured step changes them
    recent: "LayerCache | None" = None  # with age tiers, the newest tokens, behind the pages
    together: int | None = None  # tokens of both roles that leave the window together, where kernels wrote some
    rolls = False  # whether pages without a live token are reused instead of freed
    dtype: torch.dtype  # of the appended tensors; unset before the first append

    def __init__(
        self,
        scheme: KVScheme | LayerSite,
        *,
        layer: int = 0,
        seed: int = 0,
        params: Mapping[Role, Params] | None = None,
        page_tokens: int | None = None,
        capacity: int = 0,
        first_head: int = 0,
        remember: bool = False,
    ) -> None:
        if not isinstance(scheme, KVScheme | LayerSite):
            raise SpecError(f"LayerCache takes a KVScheme, got {scheme!r}; pass packedkv.get({str(scheme)!r}).")
        if capacity < 0 or (page_tokens is not None and page_tokens < 1):
            raise ShapeError(f"capacity={capacity}, page_tokens={page_tokens}: expected at least 0 and 1.")
        self.site = LayerSite(scheme, layer, seed, params, first_head) if isinstance(scheme, KVScheme) else scheme
        self.page_tokens, self.reserve, self.remember = page_tokens, capacity, remember
        self.reset()

    @without_modes
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the cache. A copy made in inference mode is a cache like any other."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(without_modes(copy.deepcopy)(state) if torch.is_inference_mode_enabled() else state)

    def reset(self) -> None:
        """Forget everything, the allocation included."""
        self.roles: dict[Role, RoleState] = {}
        self.store = None
        if self.site.recent is not None:
            self.recent = LayerCache(self.site.recent, page_tokens=self.page_tokens)
        self._cpu_attention: CpuAttention | str | None = None  # or why there is none
        self.start = 0  # absolute position of the oldest live token
        self.length = 0  # live tokens
        self.positions = Positions()  # only with a mean, or constants that are fitted on a number of tokens
        mean = self.site.mean
        self.mean: Tensor | None = None if mean is None else mean.given  # float32 [1 or B, H, D]; None: not known yet

    def give_mean(self, mean: MeanRemoval | None) -> None:
        """Give a cache that was read from a file the mean removal of its model, which no file holds."""
        self.site.mean = mean
        vars(self.site).pop("recent", None)  # the site of the newest tokens has the same mean
        if self.recent is not None and self.site.recent is not None:
            self.recent.site = self.site.recent
        if self.mean is None and mean is not None:
            self.mean = mean.given
        if self.mean is not None and self.store is not None:
            self.mean = self.mean.to(self.store.pages.device)

    @property
    def scheme(self) -> KVScheme:
        """Scheme of this layer."""
        return self.site.scheme

    def __len__(self) -> int:
        """Live tokens per sequence."""
        return self.length

    @property
    def batch(self) -> int:
        """Sequences held; 0 before the first append."""
        return self.store.table.shape[0] if self.store else 0

    @property
    def template(self) -> tuple[Sequence[Tensor], torch.dtype | None]:
        """Sinks of both roles, and the dtype of the appended tensors, which new tokens must fit: ``check_shapes``."""
        return [state.sink for state in self.roles.values()], self.dtype if self.roles else None

    # -- writing ---------------------------------------------------------------------------------------------------

    @without_modes
    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """Add tokens; whole blocks that leave the window are encoded, once.

        Parameters
        ----------
        keys, values : Tensor ``[B, H, n, D]``
            New tokens in the model basis (after RoPE); n may be 0.
        positions : Tensor of int ``[B, n]`` or ``[1, n]``, optional
            Positions of the keys' RoPE, below 0 or clipped there for left padding; used with a mean, and where
            constants are fitted on a number of tokens. Default: they follow the cached tokens.

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504, with the position; the cache is unchanged then.
        ShapeError
            Shapes that do not fit each other or the cached tokens.
        """
        check_tensors(keys, values)
        check_shapes(keys, values, *self.template)
        if first := self.store is None:
            self.roles, self.store = self.site.allocate(keys, values, self.page_tokens, self.reserve)
            self.dtype, self.mean = keys.dtype, None if self.mean is None else self.mean.to(keys.device)
        assert self.store is not None
        n, before = keys.shape[2], self.state()
        try:
            if self.places_tokens:
                if positions is None:
                    positions = self.positions.next(n, self.start + self.length, keys.device)
                self.positions.append(positions)
            leaving = self._pass_dense(self._rounded(keys, values), self._waits())
            for role, x in leaving.items():
                if count := x.shape[2]:
                    self._encode(self.roles[role], x)
                    self.roles[role].extend(count)
            if self.recent is not None and leaving:
                self.recent._remove(0, leaving["key"].shape[2])
        except BaseException:  # out of memory, an interrupt: keep keys and values consistent
            if first:  # refused first tokens leave no batch and no dtype behind
                self.reset()
            else:
                self._restore(before)
            raise
        self.length += n

    def state(self) -> State:
        """Return a copy of what an append replaces."""
        roles = {role: {**vars(of), "runs": [*of.runs]} for role, of in self.roles.items()}
        return State({**vars(self)}, roles, [*self.positions.runs], len(self.recent or ()))

    def _restore(self, state: State) -> None:
        """Undo the appends since ``state``, but for the pages that they allocated."""
        vars(self).update(state.cache)
        self.positions.runs = state.positions
        for role, of in state.roles.items():
            vars(self.roles[role]).update(of)
        if self.recent is not None:
            self.recent.crop(state.recent)

    @property
    def places_tokens(self) -> bool:
        """Whether positions are needed: for a mean, or to distinguish tokens from padding in a fit."""
        return self.site.mean is not None or self.site.fit_tokens > 1

    @property
    def needs_order(self) -> bool:
        """Whether positions must count up: for a mean before RoPE. Otherwise they only mark padding."""
        return self.site.mean is not None and self.site.mean.kind == "pre"

    @property
    def is_fitted(self) -> bool:
        """Whether all constants are known; before the first append, whether all are given."""
        known = self.site.mean is None or self.mean is not None
        return known and None not in [state.params for state in self.roles.values()]

    def _waits(self) -> bool:
        """Whether constants are missing, and the tokens so far are too few to fit them on."""
        if self.is_fitted or (tokens := self.site.fit_tokens) <= 1 or not (count := len(self.positions)):
            return False
        fresh = count - self.length
        sink = self.roles["key"].sink.shape[2] + min(max(self.scheme.sink - self.start - self.length, 0), fresh)
        return count < sink + tokens + self._most_padding(sink)

    def _most_padding(self, sink: int) -> int:
        return int(self._padding(sink).max())

    def _padding(self, sink: int) -> Tensor:
        """Tokens behind the ``sink`` first ones that are left padding: int64 ``[B]``, or ``[1]`` for all."""
        return (self.positions.padding() - sink).clamp_min(0)

    def _fit(self, behind: Mapping[Role, Tensor], whole: Mapping[Role, Tensor] | None) -> None:
        """Fit the missing constants on new tokens ``behind`` the sink; ``whole``: all, where one call brought them."""
        for role, state in self.roles.items():
            if state.params is None or (role == "key" and self.site.mean is not None and self.mean is None):
                self._fit_role(state, state.pending(behind[role]), None if whole is None else whole[role])

    def _fit_role(self, state: RoleState, pending: Tensor, whole: Tensor | None) -> None:
        mean = self.site.mean if state.role == "key" else None
        if (tokens := self.site.fit_tokens) > 1:
            batch, heads, _, head_dim = pending.shape
            sink = state.sink.shape[2]
            padding = self._padding(sink).to(pending.device).expand(batch)
            at = padding[:, None] + torch.arange(0, tokens, state.codec.fit_every, device=pending.device)
            sample = pending.gather(2, at[:, None, :, None].expand(-1, heads, -1, head_dim))
            if mean is not None:
                positions = self.positions.of(0, len(self.positions)).expand(batch, -1).gather(1, at + sink)
                if self.mean is None:
                    self.mean = mean.of(sample, positions)
                sample = sample.float() - mean.at(self.mean, positions)
        else:  # everything seen so far is the sample
            sample = torch.cat([state.sink, pending], 2) if whole is None else whole
            if (removed := self._mean(state.role, 0, sample.shape[2])) is not None:
                sample = sample.float() - removed
        if state.params is None:
            of = self.site.energy if state.role == "key" else None
            energy = None if of is None else of.to(sample.device)
            state.params = state.codec.fit(state.site, Sample(sample, energy=energy))

    def _rounded(self, keys: Tensor, values: Tensor) -> dict[Role, Tensor]:
        """New tokens in the dtype of dense ones."""
        dtypes = [self.roles[role].sink.dtype for role in ROLES]
        both = zip(ROLES, (keys, values), dtypes, strict=True)
        return {role: x if x.dtype == dtype else x.to(dtype) for role, x, dtype in both}  # ``to`` alone is slower

    def _encode(self, state: RoleState, x: Tensor) -> None:
        assert self.store is not None
        at = state.sink.shape[2] + state.encoded
        mean = self._mean(state.role, at, at + x.shape[2])
        state.write(self.store, x, mean)

    def _pass_dense(self, new: Mapping[Role, Tensor], waits: bool = False) -> dict[Role, Tensor]:
        """Put new tokens into sinks and windows; return tokens that leave the windows, in whole blocks.

        Missing constants are fitted in between, unless it ``waits``: then all tokens stay dense, too few to fit on.
        """
        dense, sink = self.roles["key"].dense_tokens, self.scheme.sink
        room = sink - self.start - self.length if sink else 0  # a static cache reads its length from the device
        behind = {role: _to_sink(self.roles[role], x, room) for role, x in new.items()}
        if not waits and not self.is_fitted and dense + new["key"].shape[2]:
            self._fit(behind, None if dense else new)
        if self.recent is not None and not waits:
            return self._pass_recent(self.recent, behind)
        leaving: dict[Role, Tensor] = {}
        for role, x in behind.items():
            of = self.roles[role]
            unit = self.together or of.codec.block_tokens
            count = 0 if waits else max(0, of.window.shape[2] + x.shape[2] - self.scheme.window) // unit * unit
            leaving[role] = _to_window(of, x, count)
        return leaving

    def _pass_recent(self, recent: "LayerCache", behind: Mapping[Role, Tensor]) -> dict[Role, Tensor]:
        """Put new tokens into the newest tier; return tokens that leave it, decoded, in whole blocks of both roles."""
        new = {role: self.roles[role].pending(x) for role, x in behind.items()}  # those that waited for a fit
        n = new["key"].shape[2]
        for role, x in new.items():
            self.roles[role].window = no_tokens(x.shape[0], x.shape[1], x.shape[3], x.dtype, x.device)
        recent.mean = None if recent.site.mean is None else self.mean
        at, total = 0, len(self.positions)
        runs = self.positions.within(total - n, total) if recent.places_tokens else [(n, None)]
        for count, start in runs:  # tokens that waited may have lost others between them
            positions = None if start is None else start[:, None] + torch.arange(count, device=start.device)
            key, value = (new[role].narrow(2, at, count).to(self.dtype) for role in ROLES)
            recent.append(key, value, positions)
            at += count
        unit = self.scheme.unit("key")
        if not (count := max(0, len(recent) - self.scheme.window) // unit * unit):
            return {}
        aged = zip(ROLES, recent.decode(0, count), strict=True)
        return {role: x.to(self.roles[role].sink.dtype) for role, x in aged}

    def removed_from_newest(self, n: int) -> Removed | None:
        """Return what is subtracted from the newest n keys; None: they keep their mean, or it is not known yet."""
        if self.site.mean is None or self.mean is None:
            return None
        turning, positions = self.site.mean.turning, self.positions.of(self.length - n, self.length)
        return Removed(self.mean, turning, turning.angles(positions.to(self.mean.device)))

    def _mean(self, role: Role, first: int, last: int) -> Tensor | None:
        """Return what is subtracted from the live tokens ``[first, last)`` of a role, as ``MeanRemoval.at``."""
        if self.site.mean is None or role == "value":
            return None
        return self.site.mean.at(self.mean, self.positions.of(first, last))

    # -- reading ---------------------------------------------------------------------------------------------------

    @without_modes
    def decode(
        self, first: int = 0, last: int | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decoded keys and values of the live tokens ``[first, last)``.

        Parameters
        ----------
        first, last : int
        dtype : torch.dtype, optional
            Default: that of the input. float32 holds what the codec decodes, without rounding it.

        Returns
        -------
        (Tensor, Tensor) ``[B, H, last - first, D]`` each, model basis.
        """
        return self.decode_role("key", first, last, dtype), self.decode_role("value", first, last, dtype)

    @without_modes
    def decode_role(
        self, role: Role, first: int = 0, last: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """``decode`` of the keys or the values alone."""
        if self.store is None:
            raise UnsupportedError("the cache is empty: append keys and values before decoding.")
        last = self.length if last is None else last
        if not 0 <= first <= last <= self.length:
            raise ShapeError(f"decode({first}, {last}): the cache holds tokens 0..{self.length}; pass a range of them.")
        state, dtype = self.roles[role], dtype or self.dtype
        sink, window = state.sink, state.window
        parts = [sink[:, :, first:last].to(dtype)] if first < sink.shape[2] else []
        at = sink.shape[2]
        if (lo := max(first - at, 0)) < (hi := min(last - at, state.encoded)):
            parts += [self._recall(state, lo, hi, dtype)] if self.remember else self._decode_slots(state, lo, hi, dtype)
        at += state.encoded
        if self.recent is not None:
            lo, hi = max(first - at, 0), min(last - at, len(self.recent))
            if lo < hi:
                parts.append(self.recent.decode_role(role, lo, hi, dtype))
            at += len(self.recent)
        if last > at:
            parts.append(window[:, :, max(first - at, 0) : last - at].to(dtype))
        if not parts:
            return window[:, :, :0].to(dtype)
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def _recall(self, state: RoleState, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return dequantized tokens in one piece, each dequantized once and then kept in float32."""
        known = [] if state.remembered is None else [state.remembered]
        if last > (count := known[0].shape[2] if known else 0):
            state.remembered = torch.cat([*known, *self._decode_slots(state, count, last, torch.float32)], 2)
        assert state.remembered is not None
        return saturated(state.remembered[:, :, first:last], dtype)

    def _forget_decoded(self) -> None:
        """Drop the decoded copies: the tokens have other numbers after this."""
        for state in self.roles.values():
            state.remembered = None

    def _decode_slots(self, state: RoleState, first: int, last: int, dtype: torch.dtype) -> list[Tensor]:
        """Dequantize the encoded tokens ``[first, last)``, counted from the first; one tensor per run."""
        assert self.store is not None
        parts, at, sink = [], 0, state.sink.shape[2]
        for a, b in state.runs:
            lo, hi = max(first, at), min(last, at + b - a)
            if lo < hi:
                mean = self._mean(state.role, sink + lo, sink + hi)
                parts.append(state.read(self.store, a + lo - at, a + hi - at, dtype, mean))
            at += b - a
        return parts

    @without_modes
    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        chunk: int = 1024,
    ) -> Tensor:
        """Attend to the live tokens as ``packedkv.cache.layer.attend``, by kernels unless ``unfused``."""
        mask = _checked_mask(q, self, mask, causal, chunk)
        if self.unfused():
            return attend(q, self, scale=scale, mask=mask, causal=causal, sinks=sinks, chunk=chunk)
        rules = Rules(q.shape[-1] ** -0.5 if scale is None else scale, Seen(causal=causal, mask=mask), sinks)
        if self.recent is None or not len(self.recent):
            return self._by_kernels(q, rules).out
        key, total, rules = self.roles["key"], self.length, rules._replace(sinks=None)
        aged = total - len(self.recent)
        rounded = rounded_queries(q, key.codec, key.params or {}, key.site.num_heads)
        both = self.recent._by_kernels(rounded, rules, part=(aged, total))
        if aged:
            both = merge(self._by_kernels(q, rules, part=(0, total)), both)
        return saturated(with_sinks(both, sinks), q.dtype)

    def _by_kernels(self, q: Tensor, rules: Rules, part: tuple[int, int] | None = None) -> Partial:
        """Attention over sink, pages and window; ``part``: as ``CpuAttention.attend``."""
        assert self.store is not None
        assert isinstance(self._cpu_attention, CpuAttention)
        rotary = NOT_TURNED if self.site.mean is None else self.site.mean.turning
        return self._cpu_attention.attend(
            q, self.roles, self.store, rules, mean=self.mean, rotary=rotary, runs=self.positions.runs, part=part
        )

    def unfused(self) -> str:
        """Return why ``attend`` uses the PyTorch reference, or ``""`` if it uses the CPU kernels."""
        if self.store is None:
            return "the cache is empty"
        if self.site.mean is not None and self.site.mean.kind == "pre" and self.site.mean.rotary is None:
            return WITHOUT_MODEL
        if self._cpu_attention is None:
            try:
                self._cpu_attention = CpuAttention(self.roles, self.store)
            except UnsupportedError as error:
                self._cpu_attention = str(error)
        if isinstance(self._cpu_attention, str):
            return self._cpu_attention
        return self.recent.unfused() if self.recent is not None and len(self.recent) else ""

    # -- removing and rearranging ----------------------------------------------------------------------------------

    @without_modes
    def crop(self, length: int) -> None:
        """Keep the oldest ``length`` tokens; later ones are dropped."""
        if not 0 <= length <= self.length:
            raise ShapeError(f"crop({length}): the cache holds {self.length} tokens; pass 0..{self.length}.")
        self._remove(length, self.length)

    @without_modes
    def evict(self, n: int, keep: int = 0) -> None:
        """Drop the oldest ``n`` tokens after the first ``keep``.

        ``keep > 0`` is the StreamingLLM pattern: the first tokens stay, tokens behind them are dropped. Keys keep the
        rotary positions with which they were appended; renumbering positions is left to the caller.
        """
        if n < 0 or keep < 0 or keep + n > self.length:
            raise ShapeError(
                f"evict({n}, keep={keep}): the cache holds {self.length} tokens; keep + n may not exceed that."
            )
        self._remove(keep, keep + n)
        self.start += n

    def _remove(self, first: int, last: int) -> None:
        if first == last or self.store is None:
            return
        self._forget_decoded()
        if self.places_tokens:
            self.positions.remove(first, last)
        newest, key = len(self.recent or ()), self.roles["key"]
        aged = key.sink.shape[2] + key.encoded
        for state in self.roles.values():
            sink, window = state.sink, state.window
            s, e = sink.shape[2], state.encoded
            r = s + e + newest  # before the window
            if first < s:
                state.sink = torch.cat([sink[:, :, :first], sink[:, :, min(last, s) :]], 2)
            if first < s + e and last > s:
                state.remove(max(first - s, 0), min(last - s, e))
            if last > r:
                a, b = max(first - r, 0), last - r
                state.window = torch.cat([window[:, :, :a], window[:, :, b:]], 2)
        if self.recent is not None and first < aged + newest and last > aged:
            self.recent._remove(max(first - aged, 0), min(last - aged, newest))
        self.length -= last - first
        self._free_dead_pages()

    def _free_dead_pages(self) -> None:
        """Free the pages that hold no live token and into which no role will write; or put them behind the others."""
        assert self.store is not None
        tokens = self.store.layout.page_tokens
        states = self.roles.values()
        if not self.rolls:
            self.store.trim(max(self.reserve, *(s.next_slot for s in states)))
        written = min(s.next_slot for s in states) // tokens  # the role behind still writes later pages
        live = {page for s in states for a, b in s.runs for page in range(a // tokens, -(-b // tokens))}
        dead = sorted(set(range(written)) - live)
        if not dead:
            return
        if self.rolls:
            stretches = [[*run] for _, run in groupby(range(len(dead)), key=lambda i: dead[i] - i)]
            for stretch in reversed(stretches):
                self.store.put_last(dead[stretch[0]], dead[stretch[-1]] + 1)
        else:
            self.store.keep(sorted(set(range(self.store.table.shape[1])).difference(dead)))
        for state in states:
            shifts = [tokens * bisect.bisect_left(dead, a // tokens) for a, _ in state.runs]
            state.runs = [(a - shift, b - shift) for (a, b), shift in zip(state.runs, shifts, strict=True)]

    @without_modes
    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` of the batch, in that order, repeats allowed (beam search, batch split)."""
        if self.store is None:
            return
        index = torch.as_tensor(indices, device=self.store.table.device)
        index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
        if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.batch:
            raise ShapeError(
                f"select: {index.tolist()} does not fit a batch of {self.batch}; pass 0..{self.batch - 1}."
            )
        self._select(index)

    def _select(self, index: Tensor) -> None:
        assert self.store is not None
        batch = self.batch
        self._forget_decoded()
        for state in self.roles.values():
            state.sink = state.sink.index_select(0, index)
            state.window = state.window.index_select(0, index)
            if state.codec.needs and state.params is not None and batch > 1:
                state.params = {
                    k: p.index_select(0, index) if p.shape[0] == batch else p for k, p in state.params.items()
                }
        if self.mean is not None and 1 < self.mean.shape[0] == batch:
            self.mean = self.mean.index_select(0, index)
        self.positions.select(index)
        self.store.select(index)
        if self.recent is not None:
            self.recent.select(index)

    @without_modes
    def repeat(self, times: int) -> None:
        """Repeat every sequence ``times`` times, as ``repeat_interleave`` does."""
        if self.store is not None:
            self.select(torch.arange(self.batch).repeat_interleave(times))

    # -- accounting ------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held for the sequences (constants of the site are not among them)."""
        if self.store is not None:
            yield from self.store.tensors()
            yield from (dense for _, dense in self._dense_tensors())
        if self.recent is not None:
            yield from self.recent.tensors()

    def _dense_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Memory of the dense tokens, by the name of its part."""
        for role, state in self.roles.items():
            yield f"{role}.sink", state.sink
            yield f"{role}.window", state.window

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, by part; the sum is the bytes of ``tensors()``.

        Keys: ``key.codes``, ``value.scales``, ... (planes of live slots), ``key.sink``, ``key.window``, ...,
        ``reserve`` (free slots, dead slots and plane padding) and ``table``. With age tiers ``key.recent`` and
        ``value.recent``, whose own reserve and table count with the others.
        """
        if self.store is None:
            return {}
        parts: dict[str, int] = {}
        used = 0
        for plane in self.store.layout.planes:
            state = self.roles["key" if plane.role == "key" else "value"]
            tokens = self.store.layout.page_tokens // plane.blocks
            blocks = sum(-(-b // tokens) - a // tokens for a, b in state.runs)
            size = blocks * plane.field.nbytes * self.batch * self.store.heads
            name = f"{plane.role}.{plane.field.part}"
            parts[name] = parts.get(name, 0) + size
            used += size
        for name, dense in self._dense_tensors():
            if bytes_ := _storage_bytes(dense):
                parts[name] = bytes_
        parts["reserve"] = _storage_bytes(self.store.pages) - used
        parts["table"] = _storage_bytes(self.store.table)
        for name, size in ({} if self.recent is None else self.recent.nbytes()).items():
            of, dot, _ = name.partition(".")
            kind = f"{of}.recent" if dot else name
            parts[kind] = parts.get(kind, 0) + size
        return parts

    def constant_bytes(self) -> int:
        """Bytes of the sites' constants (signs, codebooks): their size does not depend on the length."""
        size = sum(p.nbytes for s in self.roles.values() if s.params is not None for p in s.params.values())
        return size if self.recent is None else size + self.recent.constant_bytes()

    def elements(self) -> int:
        """Elements of K and V of the live tokens."""
        dims = sum(s.site.head_dim for s in self.roles.values())
        return self.batch * (self.store.heads if self.store else 0) * self.length * dims


def _to_sink(of: RoleState, x: Tensor, room: int) -> Tensor:
    """Put the first ``room`` of new tokens into the sink; return the others."""
    if (count := min(max(room, 0), x.shape[2])) == 0:
        return x
    first = x.narrow(2, 0, count)
    of.sink = torch.cat([of.sink, first], 2) if of.sink.shape[2] else first.clone()
    return x.narrow(2, count, x.shape[2] - count)


def _to_window(of: RoleState, x: Tensor, count: int) -> Tensor:
    """Put new tokens into the window; return the oldest ``count`` tokens, which leave it."""
    old, width = of.window, of.window.shape[2]
    total = width + x.shape[2]
    if count == total:
        if not width:
            return x
        of.window = no_tokens(x.shape[0], x.shape[1], x.shape[3], x.dtype, x.device)
        return torch.cat([old, x], 2)
    if width and count <= width:  # each copied once: most steps
        of.window = torch.cat([old.narrow(2, count, width - count), x], 2)
        return old.narrow(2, 0, count)
    pending = torch.cat([old, x], 2) if width else x
    # a clone: a view would keep the prefill's 16-bit tensor alive
    of.window = pending.narrow(2, count, total - count).clone()
    return pending.narrow(2, 0, count)


def _storage_bytes(x: Tensor) -> int:
    """Bytes of the memory behind ``x``: a view that keeps a larger tensor alive counts in full."""
    return x.untyped_storage().nbytes()


def attend(
    q: Tensor,
    cache: LayerCache,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    chunk: int = 1024,
) -> Tensor:
    """Attention of the newest queries ``q [B, HQ, n, D]``, model basis, over all that a cache holds: as q.

    ``scale``: by default ``D ** -0.5``. ``mask``, boolean (True = attend) or additive, broadcastable to ``[B, HQ, n,
    N]``, replaces ``causal``, by which query i sees tokens ``0 .. N - n + i``. ``sinks``: learned sink logits ``[HQ]``
    (GPT-OSS), which enter the softmax's denominator only. ``softcap``: scores become ``softcap * tanh(score /
    softcap)`` (Gemma 2); 0: they stay. ``chunk``: tokens decoded at a time. ShapeError if q does not fit the cache.
    """
    mask = _checked_mask(q, cache, mask, causal, chunk)
    total, state = len(cache), cache.roles["key"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rounded = q if state.params is None else rounded_queries(q, state.codec, state.params, state.site.num_heads)
    parts = (cache.decode(first, min(first + chunk, total), torch.float32) for first in range(0, total, chunk))
    return attend_parts(rounded, parts, total, scale=scale, mask=mask, causal=causal, sinks=sinks, softcap=softcap)


def _checked_mask(q: Tensor, cache: LayerCache, mask: Tensor | None, causal: bool, chunk: int) -> Tensor | None:
    """Return the mask of ``attend`` for all tokens; ShapeError if arguments do not fit the cache or each other."""
    total = len(cache)
    if total == 0:
        raise ShapeError("attend: the cache is empty; append keys and values first.")
    check_queries(q, cache.batch, cache.roles["key"].site)
    n = q.shape[2]
    if chunk < 1 or (causal and mask is None and n > total):
        raise ShapeError(
            f"attend: chunk={chunk}, {n} queries over {total} tokens; expected chunk >= 1 and no more queries than "
            f"cached tokens."
        )
    if mask is not None:
        if mask.shape[-1] not in (1, total):
            raise ShapeError(
                f"attend: mask {tuple(mask.shape)} does not fit {total} tokens; its last axis must be 1 or {total}."
            )
        mask = mask.expand(*mask.shape[:-1], total)
    return mask
