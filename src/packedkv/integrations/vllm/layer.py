"""One attention layer over pages that an engine owns: storing tokens and attending. No engine is imported.

An engine's block of N tokens of one KV head, N x C bytes, is a page of N tokens in the layout of ``layout.py``: planes
of the keys, then of the values. Nothing is converted: the engine holds the bytes that the library writes.

=========  ========================================  ================================================================
by         tokens in                                 attention
=========  ========================================  ================================================================
GPU        ``SlotWriter``: all tokens of a step      one token per request: ``attend_step`` for all requests at once;
                                                     chunks of prompts: ``ChunkReader``, for all requests at once; too
                                                     long ones, and those that flash attention does not take,
                                                     ``attend_chunk``, request by request
CPU        ``Engine.encode``: decode steps, a        the same, chunks of prompts always ``Engine.attend_chunk``
           sequence per token; a chunk of a prompt,
           one sequence
reference  the codec itself, ``pages.write_blocks``  ``attention.attend_parts``, request by request
=========  ========================================  ================================================================

The reference serves on a CPU only, the layers that its kernels do not read, or where they are not compiled;
``EngineLayer.unserved`` says why.

Every token attends to what the pages hold, in a prefill too, so chunked prefill and prefix-cache hits do not change
results.

Keys may be held without their mean, which is the same for all requests. A token's place in its request is its position.

A preset's dense first tokens (``sink``) lie in 16 bit behind the codes of a request's first page (``store.kept_rows``).
A page has as many bytes a token as fill its tokens' share of that room.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.attention import Seen, attend_parts, rounded_queries
from packedkv.codec import FP16_MAX, ROLES, Params, Role, storage_dtype
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.integrations.vllm.servable import page_step
from packedkv.kernels.choose import choose
from packedkv.kernels.cuda.decode import MOST_SEQUENCES
from packedkv.kernels.cuda.encode import SlotWriter
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.history import STAGING_BYTES, workspace_bytes
from packedkv.kernels.cuda.prompts import ChunkReader, Chunks
from packedkv.kernels.engine import Engine
from packedkv.kernels.flash import WIDEST, Flash
from packedkv.kernels.mean import Turned
from packedkv.kernels.tokens import ChunkTokens, StepTokens
from packedkv.kernels.tokens import Rules as KernelRules
from packedkv.layout import PageLayout
from packedkv.scheme import KVScheme
from packedkv.store.kept_rows import keep_rows, kept_rows, rows_bytes
from packedkv.store.pages import PageStore, write_blocks
from packedkv.store.positions import angles_at
from packedkv.store.site import LayerSite, MeanRemoval

CHUNK_TOKENS = 1024
"""Tokens decoded at a time by the reference."""


class Live(NamedTuple):
    """Which tokens decode steps see.

    Parameters
    ----------
    start : Tensor int32 ``[B]`` or None
        First slot of each request that is read; None: 0.
    sunk, sunk_from : Tensor int32 ``[B]`` or None
        Dense first tokens ``[sunk_from, sunk)`` that are seen; None: there are none, and 0.
    """

    start: Tensor | None = None
    sunk: Tensor | None = None
    sunk_from: Tensor | None = None

    @classmethod
    def of(cls, seq_lens: Tensor, sink: int, window: int) -> "Live":
        """Return it for requests of ``seq_lens`` tokens."""
        if not sink and not window:
            return cls()
        oldest = (seq_lens - window).clamp_(min=0) if window else None
        if not sink:
            return cls(oldest)
        start = torch.full_like(seq_lens, sink) if oldest is None else oldest.clamp(min=sink)
        return cls(start, seq_lens.clamp(max=sink), oldest)


class Rules(NamedTuple):
    """Options of a layer's attention.

    Parameters
    ----------
    scale : float
        Multiplies the scores.
    window : int
        Tokens that a query sees, itself included; 0: all before it.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0: they stay.
    sinks : Tensor ``[HQ]`` or None
        Learned logits that only join the softmax's denominator.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def kernels(self) -> KernelRules:
        """The same for kernels."""
        return KernelRules(self.scale, Seen(window=self.window, softcap=self.softcap), self.sinks)


class Several(NamedTuple):
    """Query tokens of decode steps, several of each request; as ``kernels.decode.decode_attention``.

    Parameters
    ----------
    starts : Tensor int32 ``[B + 1]``
    queries, longest : int
    """

    starts: Tensor
    queries: int
    longest: int


class Pool(NamedTuple):
    """What writes an engine's blocks on a GPU, and reads them for prompts."""

    writer: SlotWriter
    reader: ChunkReader


@lru_cache(maxsize=64)
def _on_device(number: int, device: torch.device) -> Tensor:
    """The number as int32 ``[1]``, shared by the layers of a model."""
    with torch.inference_mode(False):
        return torch.full((1,), number, dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _zeros(device: torch.device) -> Tensor:
    """Position of slot 0 of every request: int32 ``[MOST_SEQUENCES]``."""
    with torch.inference_mode(False):
        return torch.zeros(MOST_SEQUENCES, dtype=torch.int32, device=device)


class EngineLayer:
    """Constants and pages of one layer whose codecs encode each token alone; others are ``groups.GroupedLayer``.

    Parameters
    ----------
    scheme : KVScheme
        Of this layer, without window.
    layer : int
        Layer index; with ``seed`` and the head's number it determines random constants.
    heads, head_dim : int
        KV heads that this process holds.
    dtype : torch.dtype
        Of the model's keys and values.
    device : torch.device
    first_head : int
        The model's number of the first of these heads.
    seed : int
    params : mapping of role to Params, optional
        Fitted constants.
    mean : MeanRemoval, optional
        What keys are held without, given.
    """

    unserved = ""
    """Why the reference serves the layer, on a CPU, and not kernels; see ``find_kernels``."""

    batched = False
    """Whether kernels take the prompts of several requests in one call: a GPU's, once they are looked up."""

    flash: Flash | None = None
    """The engine's own flash attention, if it has a better one than PyTorch."""

    def __init__(
        self,
        scheme: KVScheme,
        *,
        layer: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        first_head: int = 0,
        seed: int = 0,
        params: Mapping[Role, Params] | None = None,
        mean: MeanRemoval | None = None,
    ) -> None:
        key, value = scheme.key.for_dtype(dtype), scheme.value.for_dtype(dtype)
        self.scheme = KVScheme(key, value, scheme.sink, spec=scheme.spec)
        self.heads, self.head_dim, self.dtype, self.device = heads, head_dim, dtype, device
        self.sink = scheme.sink
        self.holds_dense = self.sink > 0  # beside the codes, in decode steps
        self.site = LayerSite(self.scheme, layer, seed, params, first_head, mean)
        self.mean: Tensor | None = None
        if mean is not None and mean.given is not None:
            self.mean, self.turning = mean.given.to(device), mean.turning
            if self.turning.frequencies.device != device:
                self.turning = replace(self.turning, frequencies=self.turning.frequencies.to(device))
            self.placed = _zeros(device)  # before any graph is captured
            self.turning.name  # noqa: B018  looks at the frequencies, once
        self.roles = self.site.roles(heads, (head_dim, head_dim), dtype, device)
        self.engines: dict[int, Engine] = {}
        self.layouts: dict[int, PageLayout] = {}
        self.pools: dict[tuple[int, torch.Size], Pool] = {}
        self.bad = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def step(self) -> int:
        """A page is a multiple of this many tokens."""
        return page_step(self.scheme)

    def token_bytes(self, page_tokens: int) -> int:
        """Bytes of a token of one KV head, keys and values, where a page has so many tokens and room for the sink."""
        return -(-(self.layout(page_tokens).page_bytes + rows_bytes(self.sink, self.head_dim)) // page_tokens)

    def layout(self, page_tokens: int) -> PageLayout:
        """Byte map of a page; cached, because it computes its sizes once."""
        if page_tokens not in self.layouts:
            self.layouts[page_tokens] = self.scheme.page_layout(self.head_dim, page_tokens)
        return self.layouts[page_tokens]

    def pages(self, cache: Tensor) -> tuple[PageLayout, Tensor]:
        """View the engine's blocks uint8 ``[num_blocks, H, N, C]`` as pages ``[num_blocks, H, N * C]``.

        Raises
        ------
        UnsupportedError
            If the strides differ: heads of a block, and bytes of a head, must be contiguous.
        """
        blocks, heads, tokens, content = cache.shape
        layout, least = self.layout(tokens), self.token_bytes(tokens)
        want = (heads * tokens * content, tokens * content, content, 1)
        # an engine may make blocks longer after it has asked for a token's bytes: there is room left then
        fits = content >= least if self.sink else content == least
        if heads != self.heads or not fits or cache.stride() != want:
            raise UnsupportedError(
                f"the engine's blocks are {cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}; pages "
                f"of {self.heads} heads and {tokens * least} bytes without gaps are needed (KV-cache layout LBHNC)."
            )
        return layout, cache.view(blocks, heads, -1)

    # -- the mean of the keys ------------------------------------------------------------------------------------------

    def _removed(self, positions: Tensor | None) -> Tensor | None:
        """What is subtracted from keys at ``positions [1, n]``, float32; None: they keep their mean."""
        if self.mean is None or self.site.mean is None:
            return None
        return self.site.mean.at(self.mean, self._needed(positions))

    def renew(self, mean: MeanRemoval | None) -> bool:
        """Hold keys without another mean; False if that needs another layer. Captured graphs remain valid."""
        old = self.site.mean
        if old is None or mean is None or self.mean is None or mean.given is None:
            return old is None and mean is None
        same = old.kind == mean.kind and self.mean.shape == mean.given.shape
        if not same or (old.rotary is not None and mean.rotary is not None and old.rotary.name != mean.rotary.name):
            return False
        self.site.mean = mean
        self.mean.copy_(mean.given)
        held = {engine: engine.mean for engine in self.engines.values()}
        for engine in held:
            engine.hold_without(self.mean, self.turning)
        return self.device.type == "cpu" or all(engine.mean is own for engine, own in held.items())

    def _turned(self, positions: Tensor) -> Turned:
        assert self.mean is not None
        return Turned(self.mean, *angles_at(positions, self.turning), self.turning.interleaved)

    def _needed(self, positions: Tensor | None) -> Tensor:
        if positions is None:
            raise ShapeError("keys are held without their mean: the positions of new tokens are needed.")
        return positions

    def _placed(self, requests: int) -> dict[str, Any]:
        """The engine's argument for reading the pages of so many requests."""
        return {} if self.mean is None else {"placed": self.placed[:requests]}

    # -- the reference -------------------------------------------------------------------------------------------------

    def write(
        self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor, positions: Tensor | None = None
    ) -> None:
        """Encode tokens into their slots with the codec itself; this synchronises on a GPU.

        Parameters
        ----------
        keys, values : Tensor ``[T, H, D]``
            Model basis. A row with NaN, Inf or a magnitude above 65504 is stored as zero bytes, as the kernels do.
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        slots : Tensor int64 ``[T]``
            Slot s is place ``s % N`` of block ``s // N``; below 0: the token is not stored.
        positions : Tensor of int ``[T]``, optional
            In their requests, for keys that are held without their mean.
        """
        kept = slots >= 0
        where = None if positions is None else positions[kept][None]
        for role, x in zip(ROLES, (keys, values), strict=True):
            self._put(role, x[kept].transpose(0, 1)[None], cache, slots[kept][None], where)

    def _put(self, role: Role, rows: Tensor, cache: Tensor, slots: Tensor, positions: Tensor | None) -> None:
        """Encode ``rows [1, H, n, D]`` into the blocks that begin at ``slots [1, M]``; ``positions [1, n]``."""
        layout, pages = self.pages(cache)
        site = self.roles[role]
        good, x = (rows.abs() <= FP16_MAX).all(-1), rows
        rows = rows.to(site.codec.held_dtype(self.dtype)).float()
        rows = rows.masked_fill(~good[..., None], 0.0)
        if role == "key" and (removed := self._removed(positions)) is not None:
            rows = rows - removed
        payload = site.encode(rows)
        if not bool(good.all()):
            bad = ~good.unflatten(2, (-1, site.codec.block_tokens)).all(-1)
            payload = {n: f.masked_fill(bad.view(*bad.shape, *(1,) * (f.dim() - 3)), 0) for n, f in payload.items()}
        write_blocks(layout, pages, role, slots, payload)
        if self.sink:
            keep_rows(layout, pages, role, x.to(self.dtype), slots, self.sink)

    def write_run(
        self, role: Role, rows: Tensor, cache: Tensor, row: Tensor, begin: int, positions: Tensor | None = None
    ) -> None:
        """Encode whole blocks of tokens ``[1, H, n, D]`` into a request's pages from token ``begin`` on, as ``write``.

        ``row``: block ids of the request; ``positions [1, n]``.
        """
        step, page_tokens = self.scheme.codec(role).block_tokens, cache.shape[2]
        at = torch.arange(begin, begin + rows.shape[2], step, device=row.device)
        self._put(role, rows, cache, (row[at // page_tokens].long() * page_tokens + at % page_tokens)[None], positions)

    def attend(self, q: Tensor, cache: Tensor, row: Tensor, length: int, rules: Rules) -> Tensor:
        """Attention of one request's newest queries by the reference.

        Parameters
        ----------
        q : Tensor ``[n, HQ, D]``
            Model basis; the keys and values of these n tokens are in the pages already.
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        row : Tensor ``[M]``
            Block ids of the request. Those before a sliding window are not read.
        length : int
            Tokens of the request, these n included.
        rules : Rules

        Returns
        -------
        Tensor ``[n, HQ, D]`` of q's dtype.
        """
        n, first, mask = q.shape[0], 0, None
        if rules.window:
            first = max(0, length - n - rules.window + 1)
            at = torch.arange(length - n, length, device=q.device)[:, None]
            seen = torch.arange(first, length, device=q.device)[None]
            mask = (seen <= at) & (seen > at - rules.window)
        return self._attend_parts(q, self._decoded(cache, row, first, length), length - first, rules, mask)

    def _decoded(self, cache: Tensor, row: Tensor, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values float32 ``[1, H, t, D]`` of a request's tokens ``[first, last)``, a chunk at a time."""
        store = self._store(cache, row[None])
        for at in range(first, last, CHUNK_TOKENS):
            end = min(at + CHUNK_TOKENS, last)
            removed = self._removed(torch.arange(at, end, device=cache.device)[None])
            k = self.roles["key"].read(store, at, end, torch.float32, removed)
            v = self.roles["value"].read(store, at, end, torch.float32)
            if at < self.sink and (dense := self._sink(cache, row, end)) is not None:
                own_k, own_v = (x[:, :, at:].float() for x in dense)
                k, v = (torch.cat([own, x[:, :, own.shape[2] :]], 2) for own, x in ((own_k, k), (own_v, v)))
            yield k, v

    def _rows(self, cache: Tensor) -> Tensor:
        """The 16-bit rows of all pages, ``[num_blocks, H, 2, sink, D]``."""
        return kept_rows(*self.pages(cache), self.sink, storage_dtype(self.dtype))

    def _sink(self, cache: Tensor, row: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values ``[1, H, t, D]`` of a request's dense first tokens, of ``length``; None: it has none."""
        if not self.sink:
            return None
        held = self._rows(cache).index_select(0, row[:1])[:, :, :, :length]
        return held[:, :, 0], held[:, :, 1]

    def _attend_parts(
        self, q: Tensor, parts: Iterator[tuple[Tensor, Tensor]], total: int, rules: Rules, mask: Tensor | None
    ) -> Tensor:
        """Attention of ``q [n, HQ, D]`` over decoded keys and values; as ``packedkv.attention.attend_parts``."""
        q, key = q.transpose(0, 1)[None], self.roles["key"]
        if key.params is not None:
            q = rounded_queries(q, key.codec, key.params, self.heads)
        out = attend_parts(q, parts, total, scale=rules.scale, mask=mask, sinks=rules.sinks, softcap=rules.softcap)
        return out[0].transpose(0, 1)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def find_kernels(self, page_tokens: int) -> None:
        """Look up the kernels for pages of this size.

        Raises
        ------
        UnsupportedError
            A GPU's kernels do not support the layer. On a CPU ``unserved`` says why instead.
        """
        try:
            self.engine(page_tokens)
        except UnsupportedError as error:
            if self.device.type != "cpu":
                raise
            self.unserved = str(error)

    def engine(self, page_tokens: int) -> Engine:
        """Kernels for pages of this size, with their constants; cached.

        Raises
        ------
        UnsupportedError
            Kernels do not support the layer; the text says why.
        """
        if page_tokens not in self.engines:
            try:
                found = choose(self.scheme, self.head_dim, self.device, page_tokens, static=self.device.type != "cpu")
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.scheme}: {error}.") from error
            if self.mean is not None:
                found.hold_without(self.mean, self.turning)
            found.prepare(self.roles)
            self.engines[page_tokens] = found
            self.batched = isinstance(found, CudaEngine)
        return self.engines[page_tokens]

    def _store(self, cache: Tensor, table: Tensor) -> PageStore:
        layout, pages = self.pages(cache)
        return PageStore.over(layout, pages, table)

    def pool(self, cache: Tensor) -> Pool:
        """What writes and reads these blocks on a GPU; cached, as are the addresses in it."""
        if (found := self.pools.get((cache.data_ptr(), cache.shape))) is None:
            engine, (_, pages) = self.engine(cache.shape[2]), self.pages(cache)
            assert isinstance(engine, CudaEngine)
            kept = self._rows(cache) if self.sink else None
            found = Pool(engine.writer(pages, self.bad, self.sink), engine.chunk_reader(pages, kept, self.flash))
            self.pools[cache.data_ptr(), cache.shape] = found
        return found

    def encode(
        self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor, positions: Tensor | None = None
    ) -> None:
        """Encode tokens into their slots with kernels; nothing synchronises on a GPU.

        Parameters
        ----------
        keys, values : Tensor ``[T, H, D]``
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        slots : Tensor int64 ``[T]``
            As ``write``.
        positions : Tensor of int ``[1, T]``, optional
            In their requests, for keys that are held without their mean.
        """
        less = None if self.mean is None else self._turned(self._needed(positions))
        if isinstance(self.engine(cache.shape[2]), CudaEngine):
            if keys.dtype == torch.float32:
                keys, values = self._rounded(keys, values)
            self.pool(cache).writer.write(keys, values, slots, less)
            return
        # each token is passed as a sequence of one page, because an engine gives slots, not sequences
        new: dict[Role, Tensor] = {"key": keys[:, :, None], "value": values[:, :, None]}
        if less is not None:
            less = less._replace(cosines=less.cosines.transpose(0, 1), sines=less.sines.transpose(0, 1))
        stored, tokens = slots >= 0, cache.shape[2]
        page, place = torch.where(stored, slots // tokens, 0), torch.where(stored, slots % tokens, tokens)
        where = None if positions is None else positions.transpose(0, 1)
        self._encode(new, cache, page[:, None].int(), place.int(), where, less)

    def _rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Round float32 tokens as caches store them, in one dtype; what exceeds fp16 becomes inf, which is refused."""
        held = [self.roles[role].codec.held_dtype(keys.dtype) for role in ROLES]
        key, value = (
            x.to(dtype).masked_fill(~(x.abs() <= FP16_MAX), torch.inf)
            for dtype, x in zip(held, (keys, values), strict=True)
        )
        return (key, value) if held[0] == held[1] else (key.float(), value.float())

    def _encode(
        self,
        new: Mapping[Role, Tensor],
        cache: Tensor,
        table: Tensor,
        first: Tensor,
        positions: Tensor | None = None,
        less: Turned | None = None,
    ) -> None:
        """Encode tokens ``[B, H, n, D]`` into the slots from ``first [B]`` on of the blocks ``table [B, M]``."""
        engine = self.engine(cache.shape[2])
        rest = [role for role in new if engine.encoders[role] is None]  # only on a CPU, where nothing synchronises
        written = {role: x for role, x in new.items() if role not in rest}
        engine.encode(written, self._store(cache, table), first, self.bad, less, self.sink)
        for role in rest:
            for b, begin in enumerate(first.tolist()):
                if begin < table.shape[1] * cache.shape[2]:
                    where = None if positions is None else positions[b : b + 1]
                    self.write_run(role, new[role][b : b + 1], cache, table[b], begin, where)

    def encode_chunk(
        self,
        keys: Tensor,
        values: Tensor,
        cache: Tensor,
        row: Tensor,
        length: int,
        positions: Tensor | None = None,
    ) -> None:
        """Encode a request's newest tokens with a CPU's kernels.

        Parameters
        ----------
        keys, values : Tensor ``[n, H, D]``
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        row : Tensor int32 ``[M]``
            Block ids of the request.
        length : int
            Tokens of the request, these n included.
        positions : Tensor of int ``[1, n]``, optional
            Those of these tokens, if layers share them; by default they are made where they are needed.
        """
        first = _on_device(length - keys.shape[0], cache.device)
        new: dict[Role, Tensor] = {"key": keys.transpose(0, 1)[None], "value": values.transpose(0, 1)[None]}
        if self.mean is not None and positions is None:
            positions = torch.arange(length - keys.shape[0], length, device=cache.device)[None]
        less = None if positions is None or self.mean is None else self._turned(positions)
        self._encode(new, cache, row[None], first, positions, less)

    def decode(
        self,
        q: Tensor,
        cache: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        rules: Rules,
        live: Live,
        workspace: Tensor | None = None,
        several: Several | None = None,
    ) -> Tensor:
        """Attention of one query token per request with kernels, or of several; nothing synchronises.

        Parameters
        ----------
        q : Tensor ``[B, HQ, D]``
            Or of all query tokens.
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        table : Tensor int32 ``[B, M]``
        seq_lens : Tensor int32 ``[B]``
            Number of tokens.
        rules : Rules
        live : Live
            ``Live.of`` them.
        workspace : Tensor float32, optional
            Of ``workspace_bytes``.
        several : Several, optional
            Where ``takes_several``.

        Returns
        -------
        Tensor ``[B, HQ, D]`` of q's dtype.
        """
        more: dict[str, Any] = {} if several is None else several._asdict()
        if self.sink:
            keys, values = self._rows(cache).unbind(2)
            more |= {"dense_k": keys, "dense_v": values, "dense_at": table[:, 0]}
            more |= {"dense_lens": live.sunk, "dense_start": live.sunk_from}
        more |= self._placed(table.shape[0])
        read = StepTokens(self.pages(cache)[1], table, seq_lens, live.start, workspace=workspace, **more)
        return self.engine(cache.shape[2]).attend_step(q[:, :, None], read, rules.kernels)[:, :, 0]

    def takes_several(self, rules: Rules) -> bool:
        """Whether ``decode`` takes several query tokens of a request."""
        return self.batched and not (self.holds_dense or rules.window)

    def takes_chunks(self, rules: Rules) -> bool:
        """Whether ``attend_chunks`` attends prompts; PyTorch's flash attention has no soft cap."""
        return self.batched and not (rules.softcap and self.flash is None)

    def most_tokens(self, longest: int) -> int:
        """Tokens of requests whose chunks are attended together, where at least one of ``longest`` tokens should be."""
        return min(longest, STAGING_BYTES // (2 * 2 * self.heads * self.head_dim))

    def prefill_bytes(self, tokens: int, length: int, query_heads: int, rules: Rules) -> int:
        """Upper bound of the bytes that prompts need: ``tokens`` new ones, of requests of ``length`` together."""
        q = torch.empty(1, query_heads, tokens, self.head_dim, dtype=self.dtype, device="meta")
        ways = {self.takes_chunks(rules) or not rules.softcap, not rules.softcap}  # too long ones are attended alone
        return max(workspace_bytes(q, self.heads, length, self.sink, way and self.head_dim <= WIDEST) for way in ways)

    def workspace_bytes(self, requests: int, query_heads: int, cache: Tensor, columns: int, rules: Rules) -> int:
        """Upper bound of the bytes that ``decode`` needs for up to ``requests`` requests."""
        engine = self.engine(cache.shape[2])
        # only shapes matter, but the device chooses the launch constants
        q = torch.empty(1, query_heads, 1, self.head_dim, dtype=self.dtype, device=self.device)
        table = torch.empty(1, columns, dtype=torch.int32, device=self.device)
        return max(
            engine.workspace_bytes(q.expand(n, -1, -1, -1), self._store(cache, table.expand(n, -1)), self.holds_dense)
            for n in range(1, requests + 1)
        )

    def prefill(self, q: Tensor, cache: Tensor, row: Tensor, length: int, rules: Rules) -> Tensor:
        """As ``attend``, by kernels; on a GPU where ``attend_chunks`` cannot."""
        sink, pages = self._sink(cache, row, length), self.pages(cache)[1]
        first = 0 if sink is None else sink[0].shape[2]
        read = ChunkTokens(pages, row[None], first, length, sink, **self._placed(1))
        out = self.engine(cache.shape[2]).attend_chunk(q.transpose(0, 1)[None], read, rules.kernels)
        return out[0].transpose(0, 1)

    def attend_chunks(self, q: Tensor, cache: Tensor, chunks: Chunks, rules: Rules, out: Tensor) -> None:
        """Attention of prompt chunks of several requests by a GPU's kernels, one launch per stage.

        Parameters
        ----------
        q, out : Tensor ``[n, HQ, D]``
            The chunks' queries, whose keys and values are in the pages already; the result is written to ``out``.
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        chunks : Chunks
            Of this layer's window.
        rules : Rules
            Where ``takes_chunks``.
        """
        self.pool(cache).reader.attend(q, chunks, rules.kernels, out)
