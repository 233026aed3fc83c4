"""One attention layer over pages that an engine owns: stores tokens and attends. No engine is imported.

An engine's block of N tokens of one KV head, N x C bytes, is a page of N tokens in the layout of ``layout.py``: planes
of the keys, then of the values. Every token attends to what the pages hold, in a prefill too: chunked prefill and
prefix-cache hits do not change results.

=========  ========================================  ================================================================
by         tokens in                                 attention
=========  ========================================  ================================================================
GPU        ``SlotWriter``: all tokens of a step      one token per request: ``attend_step`` for all requests at once;
                                                     chunks of prompts: ``ChunkReader``, for all requests at once;
                                                     ``attend_chunk``, request by request, for chunks that are too
                                                     long or that flash attention does not support
CPU        ``Engine.encode``: decode steps, a        the same, chunks of prompts always ``Engine.attend_chunk``
           sequence per token; a chunk of a prompt,
           one sequence
reference  the codec itself, ``pages.write_blocks``  ``attention.attend_parts``, request by request
=========  ========================================  ================================================================
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from packedkv.attention import attend_parts, rounded_queries
from packedkv.codec import FP16_MAX, ROLES, Params, Role, storage_dtype
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.choose import choose
from packedkv.kernels.cuda.decode import MOST_SEQUENCES
from packedkv.kernels.cuda.encode import SlotWriter
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.prefill import STAGING_BYTES, ChunkReader, Chunks, workspace_bytes
from packedkv.kernels.engine import Engine
from packedkv.kernels.flash import WIDEST, Flash
from packedkv.kernels.mean import RotatedMean
from packedkv.kernels.tokens import ChunkTokens, NewTokens, Rules, StepTokens
from packedkv.layout import PageLayout
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore, rows_bytes, sink_rows, write_blocks, write_sink_rows
from packedkv.store.positions import angles_at
from packedkv.store.site import LayerSite, MeanRemoval

CHUNK_TOKENS = 1024
"""Tokens that the reference dequantizes at a time."""


def visible(seq_lens: Tensor, sink: int, window: int) -> dict[str, Any]:
    """Return the fields of ``StepTokens`` that say which tokens of requests of ``seq_lens`` decode steps attend to.

    Each is int32 ``[B]``. ``start``: the first packed token. ``[dense_start, dense_lens)``: dense first tokens.
    """
    oldest = (seq_lens - window).clamp_(min=0) if window else None
    if not sink:
        return {} if oldest is None else {"start": oldest}
    fields = {"start": torch.full_like(seq_lens, sink), "dense_lens": seq_lens.clamp(max=sink)}
    return fields if oldest is None else {**fields, "start": oldest.clamp(min=sink), "dense_start": oldest}


@lru_cache(maxsize=8)
def _zeros(device: torch.device) -> Tensor:
    """Position of slot 0 of every request: int32 ``[MOST_SEQUENCES]``."""
    with torch.inference_mode(False):
        return torch.zeros(MOST_SEQUENCES, dtype=torch.int32, device=device)


class EngineLayer:
    """Constants and pages of one layer whose codecs encode each token alone; others are ``groups.GroupedLayer``.

    Arguments of its methods: ``keys, values [n, H, D]`` and ``q [n, HQ, D]``, new tokens in the model's basis;
    ``cache``, the engine's blocks, uint8 ``[num_blocks, H, N, C]``; ``blocks`` int32 ``[M]`` of one request, or
    ``block_table`` int32 ``[B, M]`` of several; ``seq_len``, or ``seq_lens`` int32 ``[B]``, new tokens included;
    ``slots`` int64 ``[n]``: slot s is place ``s % N`` of block ``s // N``, below 0 the token is not stored; ``positions
    [1, n]`` in their requests, only if keys are stored without their mean; ``rules`` of this layer's attention, of
    whose ``seen`` window and soft cap are used.

    A token with NaN, Inf or a magnitude above 65504 is stored as zero bytes. Attention returns ``[n, HQ, D]`` of q's
    dtype, and reads the keys and values of the queries' own tokens from the pages.

    ``scheme``: of this layer, without window. ``heads``: KV heads of this process; the model's number of the first is
    ``first_head``. ``dtype``: of the model's keys and values. ``params``: calibrated constants. ``mean``, with its
    values, is subtracted from keys before they are encoded.
    """

    unserved = ""
    """Why the reference serves the layer, on a CPU that has no kernels for it."""
    batched = False
    """Whether kernels take the prompts of several requests in one call, as on a GPU; set by ``engine``."""
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
            self.origins = _zeros(device)  # before any graph is captured
            self.turning.name  # noqa: B018  reads the frequencies, once
        self.roles = self.site.roles(heads, (head_dim, head_dim), dtype, device)
        self.engines: dict[int, Engine] = {}
        self.layouts: dict[int, PageLayout] = {}
        self.pools: dict[tuple[int, torch.Size], tuple[SlotWriter, ChunkReader]] = {}
        self.bad = torch.zeros(1, dtype=torch.int32, device=device)

    def token_bytes(self, page_tokens: int) -> int:
        """Bytes per token and KV head for this page size, keys, values and sink rows included."""
        return -(-(self.layout(page_tokens).page_bytes + rows_bytes(self.sink, self.head_dim)) // page_tokens)

    def layout(self, page_tokens: int) -> PageLayout:
        """Byte map of a page; cached, because it computes its sizes once."""
        if page_tokens not in self.layouts:
            self.layouts[page_tokens] = self.scheme.page_layout(self.head_dim, page_tokens)
        return self.layouts[page_tokens]

    def pages(self, cache: Tensor) -> tuple[PageLayout, Tensor]:
        """View the engine's blocks as pages ``[num_blocks, H, N * C]``; UnsupportedError if they have gaps."""
        blocks, heads, tokens, content = cache.shape
        layout, least = self.layout(tokens), self.token_bytes(tokens)
        want = (heads * tokens * content, tokens * content, content, 1)
        # an engine may lengthen blocks after it has asked for a token's bytes: sink rows then leave bytes unused
        fits = content >= least if self.sink else content == least
        if heads != self.heads or not fits or cache.stride() != want:
            raise UnsupportedError(
                f"the engine's blocks are {cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}; pages "
                f"of {self.heads} heads and {tokens * least} bytes without gaps are needed (KV-cache layout LBHNC)."
            )
        return layout, cache.view(blocks, heads, -1)

    def _store(self, cache: Tensor, block_table: Tensor) -> PageStore:
        layout, pages = self.pages(cache)
        return PageStore.over(layout, pages, block_table)

    # -- the mean of the keys ------------------------------------------------------------------------------------------

    def renew(self, mean: MeanRemoval | None) -> bool:
        """Replace the mean; False if that needs another layer. Captured graphs remain valid."""
        old = self.site.mean
        if old is None or mean is None or self.mean is None or mean.given is None:
            return old is None and mean is None
        same = old.kind == mean.kind and self.mean.shape == mean.given.shape
        if not same or (old.rotary is not None and mean.rotary is not None and old.rotary.name != mean.rotary.name):
            return False
        self.site.mean = mean
        self.mean.copy_(mean.given)
        before = {engine: engine.mean for engine in self.engines.values()}
        for engine in before:
            engine.hold_without(self.mean, self.turning)
        return self.device.type == "cpu" or all(engine.mean is tensor for engine, tensor in before.items())

    def _removed(self, positions: Tensor | None) -> Tensor | None:
        """The mean at these positions, float32; None: keys keep it."""
        if self.mean is None or self.site.mean is None:
            return None
        return self.site.mean.at(self.mean, self._needed(positions))

    def _turned(self, positions: Tensor | None) -> RotatedMean | None:
        """The mean at these positions, as kernels take it."""
        if self.mean is None:
            return None
        return RotatedMean(self.mean, *angles_at(self._needed(positions), self.turning), self.turning.interleaved)

    def _needed(self, positions: Tensor | None) -> Tensor:
        if positions is None:
            raise ShapeError("keys are held without their mean: the positions of new tokens are needed.")
        return positions

    def _first_positions(self, requests: int) -> Tensor | None:
        return None if self.mean is None else self.origins[:requests]

    # -- the reference -------------------------------------------------------------------------------------------------

    def write(
        self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor, positions: Tensor | None = None
    ) -> None:
        """Encode tokens into their slots with the codec itself. This synchronises on a GPU."""
        stored = slots >= 0
        where = None if positions is None else positions[:, stored]
        for role, x in zip(ROLES, (keys, values), strict=True):
            self._put(role, x[stored].transpose(0, 1)[None], cache, slots[stored][None], where)

    def _put(self, role: Role, rows: Tensor, cache: Tensor, slots: Tensor, positions: Tensor | None) -> None:
        """Encode ``rows [1, H, n, D]`` into the code blocks that begin at ``slots [1, M]``."""
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
            write_sink_rows(layout, pages, role, x.to(self.dtype), slots, self.sink)

    def write_run(
        self, role: Role, rows: Tensor, cache: Tensor, blocks: Tensor, begin: int, positions: Tensor | None = None
    ) -> None:
        """Encode whole code blocks of tokens ``[1, H, n, D]`` into a request's pages from token ``begin`` on."""
        step, page_tokens = self.scheme.codec(role).block_tokens, cache.shape[2]
        at = torch.arange(begin, begin + rows.shape[2], step, device=blocks.device)
        slots = blocks[at // page_tokens].long() * page_tokens + at % page_tokens
        self._put(role, rows, cache, slots[None], positions)

    def attend(self, q: Tensor, cache: Tensor, blocks: Tensor, seq_len: int, rules: Rules) -> Tensor:
        """Attention of one request's newest queries by the reference. Blocks before a sliding window are not read."""
        n, first, mask, window = q.shape[0], 0, None, rules.seen.window
        if window:
            first = max(0, seq_len - n - window + 1)
            at = torch.arange(seq_len - n, seq_len, device=q.device)[:, None]
            key_at = torch.arange(first, seq_len, device=q.device)[None]
            mask = (key_at <= at) & (key_at > at - window)
        return self._attend_parts(q, self._decoded(cache, blocks, first, seq_len), seq_len - first, rules, mask)

    def _decoded(self, cache: Tensor, blocks: Tensor, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Dequantize a request's tokens ``[first, last)``, a chunk at a time: float32 ``[1, H, t, D]``."""
        store = self._store(cache, blocks[None])
        for at in range(first, last, CHUNK_TOKENS):
            end = min(at + CHUNK_TOKENS, last)
            removed = self._removed(torch.arange(at, end, device=cache.device)[None])
            k = self.roles["key"].read(store, at, end, torch.float32, removed)
            v = self.roles["value"].read(store, at, end, torch.float32)
            if at < self.sink and (dense := self._sink(cache, blocks, end)) is not None:
                k, v = (
                    torch.cat([rows[:, :, at:].float(), x[:, :, rows.shape[2] - at :]], 2)
                    for rows, x in zip(dense, (k, v), strict=True)
                )
            yield k, v

    def _sink_rows(self, cache: Tensor) -> Tensor:
        """The 16-bit rows of all pages, ``[num_blocks, H, 2, sink, D]``."""
        return sink_rows(*self.pages(cache), self.sink, storage_dtype(self.dtype))

    def _sink(self, cache: Tensor, blocks: Tensor, seq_len: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values ``[1, H, t, D]`` of a request's dense first tokens; None: it has none."""
        if not self.sink:
            return None
        rows = self._sink_rows(cache).index_select(0, blocks[:1])[:, :, :, :seq_len]
        return rows[:, :, 0], rows[:, :, 1]

    def _attend_parts(
        self, q: Tensor, parts: Iterator[tuple[Tensor, Tensor]], total: int, rules: Rules, mask: Tensor | None
    ) -> Tensor:
        q, key = q.transpose(0, 1)[None], self.roles["key"]
        if key.params is not None:
            q = rounded_queries(q, key.codec, key.params, self.heads)
        cap = rules.seen.softcap
        out = attend_parts(q, parts, total, scale=rules.scale, mask=mask, sinks=rules.sinks, softcap=cap)
        return out[0].transpose(0, 1)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def find_kernels(self, page_tokens: int) -> None:
        """Load the kernels for pages of this size, as ``engine``; on a CPU ``unserved`` gets the error's text."""
        try:
            self.engine(page_tokens)
        except UnsupportedError as error:
            if self.device.type != "cpu":
                raise
            self.unserved = str(error)

    def engine(self, page_tokens: int) -> Engine:
        """Kernels for pages of this size, with their constants; cached. UnsupportedError if there are none."""
        if page_tokens not in self.engines:
            try:
                engine = choose(self.scheme, self.head_dim, self.device, page_tokens, static=self.device.type != "cpu")
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.scheme}: {error}.") from error
            if self.mean is not None:
                engine.hold_without(self.mean, self.turning)
            engine.prepare(self.roles)
            self.engines[page_tokens] = engine
            self.batched = isinstance(engine, CudaEngine)
        return self.engines[page_tokens]

    def pool(self, cache: Tensor) -> tuple[SlotWriter, ChunkReader]:
        """Return the writer of these blocks on a GPU and their reader for prompts, cached: both hold addresses."""
        if (pool := self.pools.get((cache.data_ptr(), cache.shape))) is None:
            engine, (_, pages) = self.engine(cache.shape[2]), self.pages(cache)
            assert isinstance(engine, CudaEngine)
            sink_rows = self._sink_rows(cache) if self.sink else None
            pool = engine.writer(pages, self.bad, self.sink), engine.chunk_reader(pages, sink_rows, self.flash)
            self.pools[cache.data_ptr(), cache.shape] = pool
        return pool

    def encode(
        self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor, positions: Tensor | None = None
    ) -> None:
        """Encode tokens into their slots with kernels; nothing synchronises on a GPU."""
        less = self._turned(positions)
        if isinstance(self.engine(cache.shape[2]), CudaEngine):
            if keys.dtype == torch.float32:
                keys, values = self._rounded(keys, values)
            self.pool(cache)[0].write(keys, values, slots, less)
            return
        # the engine gives slots, the kernels take sequences: each token is a sequence of one page
        new: dict[Role, Tensor] = {"key": keys[:, :, None], "value": values[:, :, None]}
        if less is not None:
            less = less._replace(cosines=less.cosines.transpose(0, 1), sines=less.sines.transpose(0, 1))
        stored, tokens = slots >= 0, cache.shape[2]
        page, place = torch.where(stored, slots // tokens, 0), torch.where(stored, slots % tokens, tokens)
        where = None if positions is None else positions.transpose(0, 1)
        self._encode(new, cache, page[:, None].int(), place.int(), where, less)

    def _rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Round float32 tokens as caches store them, in one dtype; numbers beyond fp16 become inf, which is refused."""
        dtypes = [self.roles[role].codec.held_dtype(keys.dtype) for role in ROLES]
        key, value = (
            x.to(dtype).masked_fill(~(x.abs() <= FP16_MAX), torch.inf)
            for dtype, x in zip(dtypes, (keys, values), strict=True)
        )
        return (key, value) if dtypes[0] == dtypes[1] else (key.float(), value.float())

    def _encode(
        self,
        new: Mapping[Role, Tensor],
        cache: Tensor,
        block_table: Tensor,
        first: Tensor,
        positions: Tensor | None = None,
        less: RotatedMean | None = None,
    ) -> None:
        """Encode tokens ``[B, H, n, D]`` into the slots from ``first [B]`` on of each request's blocks."""
        engine = self.engine(cache.shape[2])
        by_torch = [role for role in new if engine.encoders[role] is None]  # on a CPU, where nothing synchronises
        by_kernel = {role: x for role, x in new.items() if role not in by_torch}
        engine.encode(NewTokens(by_kernel, first, self.bad, less, self.sink), self._store(cache, block_table))
        for role in by_torch:
            for b, begin in enumerate(first.tolist()):
                if begin < block_table.shape[1] * cache.shape[2]:
                    where = None if positions is None else positions[b : b + 1]
                    self.write_run(role, new[role][b : b + 1], cache, block_table[b], begin, where)

    def encode_chunk(
        self,
        keys: Tensor,
        values: Tensor,
        cache: Tensor,
        blocks: Tensor,
        seq_len: int,
        positions: Tensor | None = None,
    ) -> None:
        """Encode a request's newest tokens as one sequence; positions are computed if they are needed."""
        begin = seq_len - keys.shape[0]
        first = torch.full((1,), begin, dtype=torch.int32, device=cache.device)
        new: dict[Role, Tensor] = {"key": keys.transpose(0, 1)[None], "value": values.transpose(0, 1)[None]}
        if self.mean is not None and positions is None:
            positions = torch.arange(begin, seq_len, device=cache.device)[None]
        self._encode(new, cache, blocks[None], first, positions, self._turned(positions))

    def decode(self, q: Tensor, tokens: StepTokens, rules: Rules) -> Tensor:
        """Attention of one query token per request with kernels, or of several; nothing synchronises.

        ``tokens.pages`` are the engine's blocks; ``visible`` gives the other fields. With ``tokens.starts``, only where
        ``takes_several``, ``q`` has all query tokens.
        """
        cache, table = tokens.pages, tokens.table
        tokens = tokens._replace(pages=self.pages(cache)[1], origin=self._first_positions(table.shape[0]))
        if self.sink:
            keys, values = self._sink_rows(cache).unbind(2)
            tokens = tokens._replace(dense_k=keys, dense_v=values, dense_at=table[:, 0])
        return self.engine(cache.shape[2]).attend_step(q[:, :, None], tokens, rules)[:, :, 0]

    def takes_several(self, rules: Rules) -> bool:
        """Whether ``decode`` takes several query tokens of a request."""
        return self.batched and not (self.holds_dense or rules.seen.window)

    def takes_chunks(self, rules: Rules) -> bool:
        """Whether ``attend_chunks`` supports these rules; PyTorch's flash attention has no soft cap."""
        return self.batched and not (rules.seen.softcap and self.flash is None)

    def most_tokens(self, longest: int) -> int:
        """Tokens of requests whose chunks are attended together; enough for one of ``longest`` tokens, if possible."""
        return min(longest, STAGING_BYTES // (2 * 2 * self.heads * self.head_dim))

    def prefill_bytes(self, tokens: int, length: int, query_heads: int, rules: Rules) -> int:
        """Upper bound of the bytes that prompts need: ``tokens`` new ones, of requests of ``length`` together."""
        q = torch.empty(1, query_heads, tokens, self.head_dim, dtype=self.dtype, device="meta")
        alone = not rules.seen.softcap  # of chunks that are too long to join others
        ways = {self.takes_chunks(rules) or alone, alone}
        return max(workspace_bytes(q, self.heads, length, self.sink, way and self.head_dim <= WIDEST) for way in ways)

    def workspace_bytes(self, requests: int, query_heads: int, cache: Tensor, columns: int, rules: Rules) -> int:
        """Upper bound of the bytes that ``decode`` needs for up to ``requests`` requests."""
        engine = self.engine(cache.shape[2])
        # only shapes matter, but the device chooses the launch constants
        q = torch.empty(1, query_heads, 1, self.head_dim, dtype=self.dtype, device=self.device)
        block_table = torch.empty(1, columns, dtype=torch.int32, device=self.device)
        stores = (self._store(cache, block_table.expand(n, -1)) for n in range(1, requests + 1))
        return max(
            engine.workspace_bytes(q.expand(n, -1, -1, -1), store, self.holds_dense)
            for n, store in enumerate(stores, 1)
        )

    def prefill(self, q: Tensor, cache: Tensor, blocks: Tensor, seq_len: int, rules: Rules) -> Tensor:
        """Attention of one request's newest queries by kernels; on a GPU for chunks that ``attend_chunks`` refuses."""
        sink = self._sink(cache, blocks, seq_len)
        first = 0 if sink is None else sink[0].shape[2]
        pages, origin = self.pages(cache)[1], self._first_positions(1)
        tokens = ChunkTokens(pages, blocks[None], first, seq_len, sink, origin=origin)
        out = self.engine(cache.shape[2]).attend_chunk(q.transpose(0, 1)[None], tokens, rules)
        return out[0].transpose(0, 1)

    def attend_chunks(self, q: Tensor, cache: Tensor, chunks: Chunks, rules: Rules, out: Tensor) -> None:
        """Attention of prompt chunks of several requests by a GPU's kernels, into ``out``, if ``takes_chunks``."""
        self.pool(cache)[1].attend(q, chunks, rules, out)
