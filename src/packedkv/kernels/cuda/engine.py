"""The engine of NVIDIA GPUs."""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import NO_CONSTANTS, joined
from packedkv.kernels.cuda import decode
from packedkv.kernels.cuda.basis import out_of_codes
from packedkv.kernels.cuda.encode import SlotWriter, encode_to_pages
from packedkv.kernels.cuda.prefill import ChunkReader, Packed, attend_chunk, unpack, workspace_bytes
from packedkv.kernels.cuda.prefill_groups import GroupChunkReader, attend_groups
from packedkv.kernels.engine import Engine, Fitter, fitters
from packedkv.kernels.flash import Flash
from packedkv.kernels.mean import KeyMean, RotatedMean, key_mean
from packedkv.kernels.spec import Encoder, Reader, decode_spec, encode_spec, reader, text_of
from packedkv.kernels.tokens import ChunkTokens, GroupTokens, NewTokens, Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore


@lru_cache(maxsize=256)  # for every layer of a cache whose means come with its first tokens
def _kernels(
    key: Codec, value: Codec, head_dim: int, page_tokens: int, pairs: int
) -> tuple[str, str, Mapping[Role, Reader], Mapping[Role, Encoder | None], Sequence[Fitter]]:
    """Names of the specs by which launches know them, readers and encoders of each role, and fitters."""
    written = encode_spec(key, value, head_dim, page_tokens, mean=pairs > 0)
    return (
        text_of(decode_spec(key, value, head_dim, page_tokens, pairs)),
        text_of(written),
        {role: reader(codec, head_dim, role) for role, codec in zip(ROLES, (key, value), strict=True)},
        {role: written.encoder(role) for role in ROLES},
        fitters(key, value),
    )


class CudaEngine(Engine):
    """Reads and writes the pages of one layer with CUDA kernels, compiled for its two codecs at their first use."""

    name = "cuda"
    refuses_at_once = False
    mean: KeyMean | None = None

    def _find(self) -> None:
        """Look up the specs of the codecs and register them with the launches."""
        key, value = self.codecs["key"], self.codecs["value"]
        pairs = 0 if self.mean is None else self.mean.pairs
        kernels = _kernels(key, value, self.head_dim, self.page_tokens, pairs)
        self.decode_spec, self.encode_spec, self.readers, self.encoders, self.fitters = kernels

    def hold_without(self, mean: Tensor, rotary: Rotary, *, look: bool = True) -> None:
        """As ``Engine.hold_without``; existing tensors keep their addresses if shape and pairs stay the same."""
        old = self.mean
        new = key_mean(mean, rotary.radians, scaling=rotary.scaling, interleaved=rotary.interleaved, look=look)
        if old is not None and old.mean.shape == new.mean.shape and old.table is new.table:
            old.mean.copy_(new.mean)
            return
        self.mean = new
        self._find()

    def encode(self, new: NewTokens, store: PageStore) -> None:
        key, value = self.writing["key"], self.writing["value"]
        # a cache checks its tensors itself
        encode_to_pages(new, store.pages, store.table, spec=self.encode_spec, key=key, value=value, checked=True)

    def writer(self, pages: Tensor, bad: Tensor, sink: int = 0) -> SlotWriter:
        """Return what encodes all tokens of a step, of any requests, in one launch."""
        return SlotWriter(pages, self.encode_spec, self.writing["key"], self.writing["value"], bad, sink)

    def chunk_reader(self, pages: Tensor, page_sinks: Tensor | None, flash: Flash | None) -> ChunkReader:
        """Return what attends to prompt chunks of several requests; codecs of token groups have one of their own."""
        kind = GroupChunkReader if any(codec.block_tokens > 1 for codec in self.codecs.values()) else ChunkReader
        return kind(self.packed(pages, torch.empty(0)), page_sinks, flash)

    @property
    def alike(self) -> Hashable:
        return self.encode_spec, self.decode_spec

    def roundtrip(self, keys: Tensor, engines: Sequence[Engine], store: PageStore) -> Tensor | None:
        """As ``Engine.roundtrip``, in one launch each way."""
        if self.encoders["key"] is None or not all(engine.ready for engine in engines):
            return None
        heads, count = store.heads, keys.shape[2]
        write = {role: joined([engine.writing[role] for engine in engines], heads) for role in ROLES}
        read = {role: joined([engine.reading[role] for engine in engines], heads) for role in ROLES}
        page = PageStore(store.layout, 1, keys.shape[1], keys.device, count)
        begin = torch.zeros(1, dtype=torch.int32, device=keys.device)
        less = mean = None
        if self.mean is not None:  # the programs of the layers, with a mean of zeros
            none = keys.new_zeros(1, keys.shape[1], self.head_dim, dtype=torch.float32)
            angle = none.new_zeros(1, count, self.head_dim // 2)
            less, mean = RotatedMean(none, angle, angle), KeyMean(none, self.mean.table[:1], self.mean.pairs)
        # passed as values as well: the program for both roles is compiled already
        new = NewTokens({role: keys for role in ROLES if self.encoders[role] is not None}, begin, less=less)
        encode_to_pages(new, page.pages, page.table, spec=self.encode_spec, key=write["key"], value=write["value"])
        origin = None if mean is None else begin
        packed = Packed(page.pages, page.table, self.decode_spec, read["key"], read["value"], mean, origin)
        rows, _ = unpack(packed, 0, count)
        return out_of_codes(rows, read["key"])

    def attend_step(self, q: Tensor, tokens: StepTokens, rules: Rules) -> Tensor:
        key, value = self.reading["key"], self.reading["value"]
        return decode.decode_attention(q, tokens, rules, spec=self.decode_spec, key=key, value=value, mean=self.mean)[0]

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        return decode.workspace_bytes(self.decode_spec, q, store.heads, store.table, dense)

    def attend_chunk(self, q: Tensor, tokens: ChunkTokens, rules: Rules) -> Tensor:
        """By flash attention, or by scores in PyTorch (soft caps, masks)."""
        return attend_chunk(q, self.packed(tokens.pages, tokens.table, tokens.origin), tokens, rules)

    def attend_groups(self, q: Tensor, tokens: GroupTokens, rules: Rules) -> Tensor:
        """By flash attention; raises UnsupportedError with a soft cap or a window."""
        if not rules.seen.plain:
            raise UnsupportedError("chunks over groups of tokens take neither a soft cap nor a window")
        return attend_groups(q, self.packed(tokens.pages, tokens.table), tokens, rules)

    def chunk_workspace_bytes(self, q: Tensor, heads: int, packed: int, dense: int, flash: bool) -> int:
        return workspace_bytes(q, heads, packed, dense, flash)

    def packed(self, pages: Tensor, table: Tensor, origin: Tensor | None = None) -> Packed:
        """Return pages and a table of them, with what reads them.

        Before constants are known there is nothing to read, and the basis of the codes is the model's.
        """
        key, value = (self.reading.get(role, NO_CONSTANTS) for role in ROLES)
        return Packed(pages, table, self.decode_spec, key, value, self.mean, origin)
