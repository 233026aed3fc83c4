"""DeviceCache: a LayerCache whose writes and attention run in the fused kernels.

Same pages, same bytes, same results as ``LayerCache``, but kernels read and write them. ``GrowingCache``
(``growing.py``) grows page by page, ``StaticCache`` (``static.py``) has a fixed capacity and can be captured in a CUDA
graph; ``FusedLayerCache`` (``fused.py``) makes one or the other.

There is no fall-back: a scheme, head_dim or device that the kernels do not support raises ``UnsupportedError`` with the
reason. Where kernels read a codec but do not encode it, PyTorch encodes into the same pages; ``kernels`` says so.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.attention import BEFORE_IT, Seen, check_queries
from packedkv.cache.host import LayerCache
from packedkv.codec import ROLES, Params, Role
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.choose import Kernels
from packedkv.kernels.engine import Engine
from packedkv.kernels.tokens import ChunkTokens, Rules, StepTokens
from packedkv.ops.precision import without_modes
from packedkv.scheme import KVScheme
from packedkv.shared import SHARED
from packedkv.store.pages import PageStore
from packedkv.store.role import RoleState
from packedkv.store.site import LayerSite, RoleSite

ONE_RUN = (
    "fused attention reads one run of packed tokens; evict(keep > 0) leaves two, unless it keeps the scheme's sink. "
    "Use attention='streamed'."
)


class _Ready(NamedTuple):
    """Constants that follow from a layer's site alone; its caches share them, and none writes them."""

    roles: Mapping[Role, RoleSite]
    engine: Engine


class DeviceCache(LayerCache):
    """What ``GrowingCache`` and ``StaticCache`` share.

    Tokens leave the window for keys and values together, in blocks of the least common multiple of both codecs'
    ``block_tokens``: where one codec groups G tokens, the other one's window holds up to G - 1 tokens more than in
    ``LayerCache`` (and is counted with them).

    Parameters
    ----------
    scheme, layer, seed, params, page_tokens, capacity, first_head, remember
        As ``LayerCache``.
    kernels : Kernels, optional
        Of this page size and kind of cache, where layers share them.

    Raises
    ------
    UnsupportedError
        At the first append, if the kernels cannot take the scheme, head_dim or device; the text says why.
    """

    engine: Engine | None = None
    """Reads and writes the pages; None until the first append."""
    seq_lens: Tensor | None = None
    """Slots written per sequence, int32 ``[B]`` on the device; None until the first append."""
    bad: Tensor | None = None
    """Error flag int32 ``[1]`` on the device, set by decode steps, which do not synchronise; see ``check``."""

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
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(
            scheme, layer=layer, seed=seed, params=params, page_tokens=page_tokens, capacity=capacity,
            first_head=first_head, remember=remember,
        )  # fmt: skip
        scheme = self.scheme
        self.unit = math.lcm(scheme.key.block_tokens, scheme.value.block_tokens)
        """Tokens that leave the window together."""
        self.served_by = kernels or Kernels(page_tokens, static=capacity > 0)

    @property
    def holds_dense(self) -> bool:
        """Whether a token may be held dense: in the sink, the window, an unfinished block, or until a fit."""
        scheme = self.scheme
        kept = bool(scheme.sink or scheme.window or self.unit > 1)
        return kept or (self.site.fit_tokens > 1 and not self.is_fitted)

    def kernels(self) -> dict[str, str]:
        """What serves this layer: ``decode``, ``encode.key``, ``encode.value``; empty before the first append."""
        if self.engine is None:
            return {}
        return {"decode": self.engine.name, **{f"encode.{role}": self.engine.written_by(role) for role in ROLES}}

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, *, flag: Tensor | None = None
    ) -> None:
        """Encode and write what leaves the window, in one launch where the codecs allow.

        Several tokens at once are checked as in ``LayerCache``. A single one is not (that would synchronise): NaN, Inf
        or a magnitude above 65504 is stored as a zero row and raises a device flag that ``check`` reads. With a
        ``flag``, int32 ``[1]``, several are not checked either: the caller reads the flag later, and checks the numbers
        itself where ``unflagged`` says so. Positions are those of ``LayerCache.append``.
        """
        raise NotImplementedError

    def _start(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Allocate constants, kernels and pages of ``slots`` slots for the first tokens."""
        heads, head_dim = keys.shape[1], keys.shape[3]
        if values.shape[3] != head_dim:
            raise UnsupportedError(
                f"fused attention: keys have head_dim {head_dim}, values {values.shape[3]}; the kernels take one. "
                f"Use attention='decoded' or 'streamed'."
            )
        try:
            chosen = self.served_by.serve(self.scheme, head_dim, keys.dtype, keys.device)
        except UnsupportedError as error:
            raise UnsupportedError(f"fused attention: {error}. Use attention='decoded' or 'streamed'.") from error
        site, mean = self.site, self.site.mean
        where = chosen.name, site.layer, site.seed, site.first_head, heads
        find = partial(site.roles, heads, (head_dim, head_dim), keys.dtype, keys.device)

        def build() -> _Ready:
            # without those of a file, and before a fit, they are the same in all caches
            roles = find() if site.fitted else SHARED.get(("roles", *where), keys.device, find, _constants_of)
            engine = chosen.engine.fresh()
            if mean is not None and mean.given is not None:
                engine.hold_without(mean.given.to(keys.device), mean.turning)
            if all(role.params is not None for role in roles.values()) and (mean is None or mean.given is not None):
                engine.prepare(roles)
            return _Ready(roles, engine)

        if site.is_drawn and (mean is None or mean.given is not None):  # the same in all caches
            ready = SHARED.get((*where, None if mean is None else mean.name), keys.device, build, _tensors)
        else:
            ready = build()
        self.engine = ready.engine
        self._hold(keys, ready.roles, PageStore(chosen.layout, keys.shape[0], heads, keys.device, slots))

    def _unit(self, state: RoleState) -> int:
        return self.unit

    def _held(self, keys: Tensor, values: Tensor) -> dict[Role, Tensor]:
        """New tokens in the dtype in which the cache holds them."""
        dtype = {role: state.sink.dtype for role, state in self.roles.items()}
        both = zip(ROLES, (keys, values), strict=True)
        return {role: x if x.dtype == dtype[role] else x.to(dtype[role]) for role, x in both}

    def _prepare(self) -> bool:
        """Pass the constants to the engine; False if they are fitted on tokens that have not come yet."""
        assert self.engine is not None
        if not self.engine.ready:
            if not self.is_fitted:
                return False
            mean = self.site.mean
            if mean is not None and mean.given is None and self.mean is not None:
                self.engine.hold_without(self.mean, mean.turning, look=False)  # of first tokens no pair is zero
            self.engine.prepare(self.roles)
        return True

    def _write(self, new: Mapping[Role, Tensor], first: Tensor, bad: Tensor) -> None:
        """Encode tokens into the slots from ``first`` on, by kernels or, where there are none, by the codec."""
        assert self.engine is not None
        assert self.store is not None
        self._prepare()
        if not self.engine.flags_all:
            for role in ROLES:
                if self.engine.written_by(role) == "torch":
                    state, x = self.roles[role], new[role]
                    if role == "key" and (removed := self._removed(state.next_slot, x.shape[2])) is not None:
                        x = x.float() - removed
                    self.store.write(role, state.next_slot, state.encode(x))
            new = {role: x for role, x in new.items() if self.engine.written_by(role) != "torch"}
        self.engine.encode(new, self.store, first, bad, **self._less(new))

    def _removed(self, slot: int, count: int) -> Tensor | None:
        """What is subtracted from the keys of ``count`` slots from ``slot`` on, float32; None: they keep their mean."""
        return None

    def _less(self, new: Mapping[Role, Tensor]) -> dict[str, Any]:
        """The engine's arguments for keys that are encoded without their mean."""
        return {}

    def _placed(self) -> dict[str, Any]:
        """The engine's arguments for reading keys that are held without their mean."""
        return {}

    def unflagged(self, keys: Tensor) -> list[Tensor] | None:
        """Tensors that hold the tokens just appended which no kernel has checked for NaN, Inf and overflow.

        A kernel that encodes flags every number that codecs cannot hold. None: the caller has to look at all of them.
        """
        return None if self.holds_dense or not self._are_flagged(keys) else []

    def _are_flagged(self, keys: Tensor) -> bool:
        """Whether kernels encode both roles, and see what was appended before it is rounded."""
        assert self.engine is not None
        return keys.dtype == self.roles["key"].sink.dtype and self.engine.flags_all

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        chunk: int = 1024,
        start: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Fused attention over the packed pages: ``attend_token``, or ``attend_chunk`` of several query tokens.

        Parameters
        ----------
        q : Tensor ``[B, HQ, n, D]``
        scale, sinks, mask, causal
            As ``packedkv.cache.host.attend``; the last two only with several query tokens.
        start : Tensor int32 ``[B]``, optional
            Left padding: tokens before it are not attended.
        softcap : float
            Scores become ``softcap * tanh(score / softcap)``; 0: they stay.

        Raises
        ------
        UnsupportedError
            For a mask with a single query token.
        """
        if q.shape[2] == 1:
            if mask is not None:
                raise UnsupportedError(
                    "fused attention takes no mask of a single query token; pass start= for padding."
                )
            return self.attend_token(q, scale=scale, sinks=sinks, start=start, softcap=softcap)
        seen = Seen(causal, start=() if start is None else tuple(start.tolist()), softcap=softcap, mask=mask)
        return self.attend_chunk(q, scale=scale, sinks=sinks, seen=seen)

    @without_modes
    def attend_token(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        start: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention of one query token per sequence, ``[B, HQ, 1, D]``; arguments as ``attend``."""
        engine, store = self._readable(q)
        if not engine.ready:  # all tokens are dense
            seen = Seen(start=() if start is None else tuple(start.tolist()), softcap=softcap)
            return self.attend_chunk(q, scale=scale, sinks=sinks, seen=seen)
        seq_lens, first = self._device_lengths()
        dense: dict[str, Any] = self._dense() if self.holds_dense else {}
        if start is not None and self.holds_dense:
            first, dense["dense_start"] = self._start_from(start, seq_lens, first)
        elif start is not None:
            first = first + start
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        tokens = StepTokens(store.pages, store.table, seq_lens, start=first, **dense, **self._placed())
        return engine.attend_step(q, tokens, Rules(scale, Seen(softcap=softcap), sinks))

    @torch.no_grad()
    @without_modes
    def attend_chunk(
        self, q: Tensor, *, scale: float | None = None, sinks: Tensor | None = None, seen: Seen = BEFORE_IT
    ) -> Tensor:
        """Attention of the newest n tokens, which the cache holds already; ``q [B, HQ, n, D]``.

        Pages are unpacked on the GPU, part by part, to 16 bit: for flash attention, or for scores in PyTorch
        (soft caps, any mask). Synchronises the host's state.

        Parameters
        ----------
        scale, sinks
            As ``packedkv.cache.host.attend``.
        seen : Seen
            Which tokens a query sees; default: all up to its own.

        Raises
        ------
        ShapeError
            If the cache holds fewer than n tokens, or ``seen`` does not fit it.
        """
        engine, store = self._readable(q)
        self.synchronize()
        n, held = q.shape[2], self.host_tokens()
        if n > held:
            raise ShapeError(f"attend: {n} queries over {held} tokens; queries are tokens held.")
        if len(seen.start) not in (0, q.shape[0]) or (seen.window and not seen.causal):
            raise ShapeError(
                f"attend: start of {len(seen.start)} sequences, window={seen.window}, causal={seen.causal}; one start "
                f"for each of {q.shape[0]} sequences or none is taken, and a window of causal attention."
            )
        if seen.mask is not None and (seen.mask.shape[-1] != held or seen.mask.shape[-2] not in (1, n)):
            raise ShapeError(f"attend: mask {tuple(seen.mask.shape)} does not fit {n} queries over {held} tokens.")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        full = self.rolls and self.start > 0  # from the first eviction on the cache is as long at every frame
        key, value = self.roles["key"], self.roles["value"]
        first, last = key.runs[0] if key.runs else (0, 0)
        tokens = ChunkTokens(
            store.pages, store.table, first, last, (key.sink, value.sink), (key.window, value.window), recurring=full,
            **self._placed(),
        )  # fmt: skip
        return engine.attend_chunk(q, tokens, Rules(scale, seen, sinks))

    def host_tokens(self) -> int:
        """Tokens held per sequence, as the host knows them."""
        return self.roles["key"].encoded + self.roles["key"].dense_tokens

    def _readable(self, q: Tensor) -> tuple[Engine, PageStore]:
        """Validate queries; return the engine and the pages."""
        if self.store is None or self.engine is None or self._is_empty() or not (self._prepare() or self.host_tokens()):
            raise ShapeError("attend: the cache is empty; append keys and values first.")
        check_queries(q, self.batch, self.roles["key"].site)
        return self.engine, self.store

    def _is_empty(self) -> bool:
        """Whether the host knows that no token is held."""
        raise NotImplementedError

    def _device_lengths(self) -> tuple[Tensor, Tensor]:
        """Slots written and first live slot of each sequence, int32 ``[B]`` on the device."""
        raise NotImplementedError

    def _dense(self) -> dict[str, Tensor | None]:
        """Tokens held dense, sink first, as ``StepTokens`` takes them."""
        raise NotImplementedError

    def _sink_tokens(self) -> int:
        """How many of the tokens of ``_dense`` precede the packed ones."""
        raise NotImplementedError

    def _start_from(self, start: Tensor, seq_lens: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """First live slot, and first live token of those held dense, where the first ``start`` tokens are padding.

        Tokens lie in the order sink, pages, window, so padding covers the sink before any page, and all pages before
        any token of the window.
        """
        sink = self._sink_tokens()
        behind = (start - (seq_lens - first)).clamp(min=sink)
        dense_start = torch.minimum(start, behind).to(torch.int32)
        return first + (start - sink).clamp(min=0), dense_start

    def workspace_bytes(self, q: Tensor) -> int:
        """Upper bound of what ``attend_token`` needs beside the cache."""
        if self.engine is None or self.store is None:
            return 0
        return self.engine.workspace_bytes(q, self.store, self.holds_dense)

    def chunk_workspace_bytes(self, q: Tensor, flash: bool = True) -> int:
        """Upper bound of what ``attend_chunk`` needs beside the cache; ``flash``: as ``flash.by_flash``."""
        if self.engine is None or self.store is None:
            return 0
        key = self.roles["key"]
        return self.engine.chunk_workspace_bytes(q, self.store.heads, key.encoded, key.dense_tokens, flash)

    # -- errors flagged on the device ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the errors that decode steps have flagged (one synchronisation).

        Raises
        ------
        ValueError
            A token was NaN, Inf or above 65504 in magnitude; it was stored as a zero row.
        ShapeError
            A captured or compiled step went on when the static cache was full; its tokens were dropped.
        """
        self.refuse(0 if self.bad is None else int(self.bad.item()))

    def refuse(self, flag: float = 0) -> None:
        """Raise the error that a non-zero flag stands for."""
        if flag == 2:
            assert self.store is not None
            raise ShapeError(
                f"layer {self.layer}: the static cache of {self.store.capacity} tokens per sequence is full; later "
                f"tokens were dropped. Make it larger (max_len)."
            )
        if flag:
            raise ValueError(
                f"layer {self.layer}: a key or value appended in a decode step is not finite or above 65504; it was "
                f"stored as a zero row. Check the model's dtype (fp16 overflow?)."
            )

    # -- host operations -----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Bring the host's state up to date; raises what ``check`` raises (synchronises)."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Bring the device's state up to date after a change of the host's."""
        raise NotImplementedError

    def _range(self, first: int, last: int | None) -> tuple[int, int]:
        self.synchronize()
        return super()._range(first, last)

    @without_modes
    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        super().select(indices)
        own_mean = self.site.mean is not None and self.site.mean.given is None
        if self.engine is not None and (own_mean or not self.site.is_drawn):
            self.engine.ready = False  # constants may belong to a sequence

    def _one_run(self, first: int, last: int) -> None:
        """Raise if removing tokens would leave two runs of slots, or a run that ends inside a block."""
        state = self.roles.get("key")
        if first == last:
            return
        if first and last < self.length and (state is None or first != state.sink.shape[2]):
            raise UnsupportedError(ONE_RUN)
        if self.unit == 1 or state is None or not state.runs:
            return
        encoded = first - state.sink.shape[2]
        over = (state.runs[-1][0] + encoded) % self.unit
        if 0 < encoded < state.encoded and over:
            raise UnsupportedError(
                f"crop({first}) cuts a block of {self.unit} tokens that is encoded already, behind which the fused "
                f"kernels cannot go on; crop to {first - over}, or use attention='streamed'."
            )


def _constants_of(roles: Mapping[Role, RoleSite]) -> list[Tensor]:
    return [x for role in roles.values() for x in (role.params or {}).values()]


def _tensors(ready: _Ready) -> list[Tensor]:
    return [*_constants_of(ready.roles), *ready.engine.tensors()]
