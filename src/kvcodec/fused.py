"""FusedLayerCache: a LayerCache whose writes and one-token attention run in the fused kernels.

Same pages, same bytes, same results as ``LayerCache``; what differs is who reads and writes them. Lengths live on the
device, so a decode step of a cache with a fixed capacity neither synchronises nor reallocates: it can be captured in a
CUDA graph and traced by ``torch.compile``. Host bookkeeping is brought up to date only when a host operation (decode,
crop, select, nbytes ...) needs it.

There is no fall-back: a scheme, head_dim or device that the kernels cannot take is refused with a reason.
"""

import importlib

import torch
from torch import Tensor

from kvcodec.cache import LayerCache
from kvcodec.codec import ROLES, Codec, check_tensor
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.scheme import KVScheme

SERVED = "int-4 (one asymmetric grid per token) and saw-int4 (zero=rounded, pack=neighbours, no kmeans or hessian)"


def fused_refusal(scheme: KVScheme, head_dim: int, device: torch.device, capacity: int = 0) -> str:
    """Return why the fused kernels cannot serve this scheme here, or ``""`` if they can.

    ``capacity`` as in ``FusedLayerCache``: a static cache has no place for tokens held dense.
    """
    # by type, not by the name alone: a codec of another package may have the same one
    stems = [c.kernel if isinstance(c, SawInt4 | GroupInt) else None for c in (scheme.key, scheme.value)]
    if not all(stems):
        return f"fused kernels exist for {SERVED}, not for {scheme}"
    if stems[0] != stems[1]:
        return f"keys and values need the same kernel, not {stems[0]} and {stems[1]} as in {scheme}"
    if capacity and (scheme.sink or scheme.window):
        return f"sink={scheme.sink}, window={scheme.window} need a cache that grows; leave max_len out"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install kvcodec[triton]"
    knobs = importlib.import_module("triton").knobs
    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"device {device} is not a GPU"
    kernels = importlib.import_module(f"kvcodec.kernels.{stems[0]}")
    return str(
        kernels.supports(head_dim, _hadamard_order(scheme.key, head_dim), _hadamard_order(scheme.value, head_dim))
    )


def _hadamard_order(codec: Codec, head_dim: int) -> int:
    """Order of the rotation that the kernels apply for the codec; 1 for none."""
    return codec.block_for(head_dim) if isinstance(codec, SawInt4) else 1


class FusedLayerCache(LayerCache):
    """The packed cache of one layer, served by the fused kernels.

    Parameters
    ----------
    scheme, layer, seed, params, page_tokens
        As ``LayerCache``.
    capacity : int
        Tokens to allocate pages for. With a capacity the cache is *static*: it never grows or synchronises in a decode
        step. 0 grows on demand.

    Raises
    ------
    UnsupportedError
        At the first append, if the kernels cannot take the scheme, head_dim or device; the text says why.
    """

    seq_lens: Tensor | None = None
    """Slots written per sequence, int32 ``[B]`` on the device; None until the first append."""

    def reset(self) -> None:
        """Forget every token; a static cache keeps its pages, because captured graphs hold their addresses."""
        if self.seq_lens is not None and self.reserve:
            self.seq_lens.zero_()
            self.first.zero_()
            self.bad.zero_()
            self.start = 0
            self.emptied = True
            return
        self.emptied = False
        self.seq_lens = None
        self._host_length = 0
        super().reset()

    @property
    def length(self) -> int:
        """Live tokens per sequence; reads the device when the cache is static."""
        if self.seq_lens is None or not self.reserve:
            return self._host_length
        return int(self.seq_lens[0]) - int(self.first[0])

    @length.setter
    def length(self, value: int) -> None:
        self._host_length = value

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        if reason := fused_refusal(self.scheme, keys.shape[-1], keys.device, self.reserve):
            raise UnsupportedError(f"fused attention: {reason}. Use attention='decoded' or 'streamed'.")
        super()._allocate(keys, values)
        assert self.store is not None
        batch, device = keys.shape[0], keys.device
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)  # slots written
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)  # first live slot
        self.bad = torch.zeros(1, dtype=torch.int32, device=device)
        dim = keys.shape[-1]
        assert self.scheme.key.kernel is not None
        self.kernel = self.scheme.key.kernel  # a name and not the module: caches are copied and saved
        self.key_block = _hadamard_order(self.scheme.key, dim)
        self.value_block = _hadamard_order(self.scheme.value, dim)
        if self.reserve:
            for tensor in (self.store.pages, self.store.table, self.seq_lens, self.first, self.bad):
                torch._dynamo.mark_static_address(tensor)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Encode and write tokens in one launch.

        Several tokens at once are checked as in ``LayerCache``. One token is not (that would synchronise): a NaN or Inf
        is stored as a zero row and raises a device flag that ``check`` reads.
        """
        from kvcodec.kernels.decode_attention import CODECS

        n = keys.shape[2]
        if n != 1:
            check_tensor("keys", keys)
            check_tensor("values", values)
        if self.emptied:  # other sequences than before the reset get pages of their own
            self.emptied = False
            b, h, _, d = self.roles["key"].dense("sink").shape
            if (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype) != (b, h, d, self._dtype):
                self.seq_lens = None
                super().reset()
        self._check_shapes(keys, values)
        if self.store is None:
            self._allocate(keys, values)
        assert self.store is not None
        assert self.seq_lens is not None
        held = self.roles["key"].dense("sink").dtype
        keys, values = keys.to(held), values.to(held)
        if self.scheme.sink or self.scheme.window:
            both = zip(ROLES, (keys, values), strict=True)
            keys, values = (self._pass_window(self.roles[role], x) for role, x in both)
        if not self.reserve:
            self._host_length += n
            self.store.ensure(self._host_slots() + keys.shape[2], exact=n > 1)
        n = keys.shape[2]
        if n == 0:
            return
        if self.reserve and n > 1 and int(self.seq_lens[0]) + n > self.store.capacity:  # evicted slots stay used
            raise ShapeError(
                f"the static cache holds {self.store.capacity} tokens per sequence; {self.length} + {n} do not "
                f"fit. Make it larger (max_len) or crop it."
            )
        CODECS[self.kernel].encode_to_pages(
            keys,
            values,
            self.store.pages,
            self.store.table,
            self.seq_lens,
            key_block=self.key_block,
            value_block=self.value_block,
            page_tokens=self.store.layout.page_tokens,
            bad=self.bad,
        )
        self.seq_lens.add_(n)
        if not self.reserve:
            for state in self.roles.values():
                state.extend(n)

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
    ) -> Tensor:
        """Fused attention of one query token per sequence over the packed pages.

        Parameters
        ----------
        q : Tensor ``[B, HQ, 1, D]``
        scale, sinks
            As ``kvcodec.attention.attend``.
        start : Tensor int32 ``[B]``, optional
            Left padding: tokens before it are not attended.

        Raises
        ------
        UnsupportedError
            For several query tokens, or a mask (pass ``start`` for left padding).
        """
        from kvcodec.kernels.decode_attention import decode_attention

        if q.shape[2] != 1 or mask is not None:
            raise UnsupportedError(
                f"fused attention takes one query token and no mask; got q {tuple(q.shape)}"
                f"{' with a mask' if mask is not None else ''}. Pass start= for left padding, or use "
                f"kvcodec.attention.attend."
            )
        if self.store is None or (not self.reserve and self._host_length == 0):
            raise ShapeError("attend: the cache is empty; append keys and values first.")
        site = self.roles["key"].site
        if q.shape[0] != self.batch or q.shape[1] % site.num_heads or q.shape[3] != site.head_dim:
            raise ShapeError(
                f"attend: q {tuple(q.shape)} does not fit a cache of batch={self.batch}, "
                f"kv_heads={site.num_heads}, head_dim={site.head_dim}; query heads must be a multiple of the KV heads."
            )
        assert self.seq_lens is not None
        first = self.first if start is None else self.first + start
        dense_k = dense_v = None
        if self.scheme.sink or self.scheme.window:
            if start is not None:
                raise UnsupportedError(
                    "fused attention takes no left padding together with a sink or window. Use attention='streamed'."
                )
            dense_k, dense_v = (torch.cat([s.dense("sink"), s.dense("window")], 2) for s in self.roles.values())
        out = decode_attention(
            q,
            self.store.pages,
            self.store.table,
            self.seq_lens,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            key_block=self.key_block,
            value_block=self.value_block,
            page_tokens=self.store.layout.page_tokens,
            num_kv_heads=self.store.heads,
            dense_k=dense_k,
            dense_v=dense_v,
            sinks=sinks,
            start=first,
            codec=self.kernel,
        )
        assert isinstance(out, Tensor)
        return out

    def check(self) -> None:
        """Raise if a decode step met what it could not stop for (one host sync).

        Raises
        ------
        ValueError
            A token was NaN or Inf; it was stored as a zero row.
        ShapeError
            A captured or compiled step went on when the static cache was full; its tokens were dropped.
        """
        flag = int(self.bad.item()) if self.seq_lens is not None else 0
        if flag == 2:
            assert self.store is not None
            raise ShapeError(
                f"layer {self.layer}: the static cache of {self.store.capacity} tokens per sequence is full; later "
                f"tokens were dropped. Make it larger (max_len)."
            )
        if flag:
            raise ValueError(
                f"layer {self.layer}: a key or value appended in a decode step is not finite; it was stored as a "
                f"zero row. Check the model's dtype (fp16 overflow?)."
            )

    # -- host operations: bring the host state up to date first, and the device state afterwards ---------------------

    def _host_slots(self) -> int:
        runs = self.roles["key"].runs
        return runs[-1][1] if runs else 0

    def _pull(self) -> None:
        """Set the host's runs from the device's lengths (a static cache's host state is stale)."""
        if self.reserve and self.seq_lens is not None:
            first, last = int(self.first[0]), int(self.seq_lens[0])
            for state in self.roles.values():
                state.runs = [(first, last)] if last > first else []

    def _push(self) -> None:
        """Set the device's lengths from the host's runs."""
        if self.seq_lens is None or self.store is None:
            return
        runs = self.roles["key"].runs
        if len(runs) > 1:
            raise UnsupportedError(
                "fused attention reads one run of tokens; evict(keep > 0) leaves two. Use attention='streamed'."
            )
        first, last = runs[0] if runs else (0, 0)
        if last <= self.store.capacity:  # what did not fit has been cropped away
            self.bad.masked_fill_(self.bad == 2, 0)
        if self.seq_lens.shape[0] == self.batch:  # in place: captured graphs hold the addresses
            self.seq_lens.fill_(last)
            self.first.fill_(first)
        else:
            device = self.store.table.device
            self.seq_lens = torch.full((self.batch,), last, dtype=torch.int32, device=device)
            self.first = torch.full((self.batch,), first, dtype=torch.int32, device=device)

    def decode(self, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Decoded keys and values, as ``LayerCache.decode`` (PyTorch reference path)."""
        self._pull()
        self.check()  # a full static cache has no slots for its last tokens
        return super().decode(first, last)

    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self._pull()
        super().select(indices)
        self._push()

    def _remove(self, first: int, last: int) -> None:
        self._pull()
        if first and last < self.length:
            raise UnsupportedError(
                "fused attention reads one run of tokens; evict(keep > 0) leaves two. Use attention='streamed'."
            )
        if self.reserve and first < last < self.length:
            raise UnsupportedError("a static cache does not use evicted slots again; leave max_len (capacity) out.")
        super()._remove(first, last)
        self._push()

    def _free_dead_pages(self) -> None:
        if not self.reserve:  # captured graphs hold the pages' addresses
            super()._free_dead_pages()

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, as ``LayerCache.nbytes``; also raises what ``check`` raises."""
        self._pull()
        self.check()
        return super().nbytes()
