"""Choice of the fused kernels for a layer, and the calls to them.

An engine holds only names and tensors, no module or compiled kernel, so that caches can be copied and saved.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcodec.attention import Seen
from kvcodec.cache.host import RoleState
from kvcodec.cache.pages import PageStore
from kvcodec.cache.site import RoleSite
from kvcodec.codec import ROLES, Codec, Payload, Role
from kvcodec.errors import UnsupportedError
from kvcodec.kernels import build
from kvcodec.kernels.constants import Constants, constants, joined
from kvcodec.kernels.cpu import library
from kvcodec.kernels.cpu.attend import Piece
from kvcodec.kernels.cpu.attend import attend as attend_cpu
from kvcodec.kernels.cpu.attend import workspace_bytes as workspace_bytes_cpu
from kvcodec.kernels.cpu.encode import encode as encode_cpu
from kvcodec.kernels.cpu.encode import prepared
from kvcodec.kernels.cpu.held import attend_held
from kvcodec.kernels.cpu.library import EncodeArgsStruct
from kvcodec.kernels.cpu.spec import CpuEncoder, CpuReader, cpu_spec
from kvcodec.kernels.decode import decode_attention, splits_of, workspace_numel
from kvcodec.kernels.decode import text_of as decode_text
from kvcodec.kernels.encode import Turned, encode_to_pages
from kvcodec.kernels.encode import text_of as encode_text
from kvcodec.kernels.history import History, Packed, attend_history, workspace_bytes
from kvcodec.kernels.mean import KeyMean
from kvcodec.kernels.spec import Encoder, Reader, decode_spec, encode_spec, encoder, reader
from kvcodec.layout import PageLayout
from kvcodec.scheme import KVScheme, page_layout


def choose(
    scheme: KVScheme,
    head_dim: int,
    device: torch.device,
    page_tokens: int | None = None,
    *,
    static: bool = False,
) -> "Engine":
    """Return the engine for a layer's scheme; nothing is compiled.

    Parameters
    ----------
    scheme : KVScheme
        Of one layer (``scheme.for_layer``), with its codecs for the dtype (``for_dtype``).
    head_dim : int
    device : torch.device
    page_tokens : int, optional
    static : bool
        Whether steps must not synchronise: both roles then need an encode kernel.

    Raises
    ------
    UnsupportedError
        No engine supports the scheme; the text says why.
    """
    tokens = page_tokens or page_layout(scheme.key, scheme.value, head_dim, head_dim).page_tokens
    if device.type == "cpu" and build.refusal(device):
        if reason := library.refusal(device):
            raise UnsupportedError(reason)
        if static:
            raise UnsupportedError("a static cache is for CUDA graphs; on a CPU leave max_len out")
        return CpuEngine(scheme.key, scheme.value, head_dim, tokens)
    decode_spec(scheme.key, scheme.value, head_dim, tokens)
    if static:
        for role in ROLES:
            try:
                encoder(scheme.codec(role), head_dim, role)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"{error}, and PyTorch's would synchronise in every step; leave max_len out"
                ) from error
    if reason := build.refusal(device):
        raise UnsupportedError(reason)
    return Engine(scheme.key, scheme.value, head_dim, tokens)


def refusal(
    scheme: KVScheme, head_dim: int, device: torch.device, page_tokens: int | None = None, *, static: bool = False
) -> str:
    """Return why ``choose`` finds no engine, or ``""`` if it finds one."""
    try:
        choose(scheme, head_dim, device, page_tokens, static=static)
    except UnsupportedError as error:
        return str(error)
    return ""


class Chosen(NamedTuple):
    """The kernels of a scheme's layers of one head_dim and dtype on one device.

    Parameters
    ----------
    engine : Engine
        Without constants: a layer takes ``fresh``.
    layout : PageLayout
    name : Hashable
        Key of all this, for objects that layers share.
    """

    engine: "Engine"
    layout: PageLayout
    name: Hashable


class Kernels:
    """The engines of a model's layers: chosen once for all layers of the same scheme and sizes.

    Parameters
    ----------
    page_tokens : int, optional
    static : bool
        As in ``choose``.
    """

    def __init__(self, page_tokens: int | None = None, *, static: bool = False) -> None:
        self.page_tokens, self.static = page_tokens, static
        self._chosen: dict[tuple[Codec, Codec, int, torch.dtype, torch.device], Chosen] = {}

    def serve(self, scheme: KVScheme, head_dim: int, dtype: torch.dtype, device: torch.device) -> Chosen:
        """Return the kernels for keys and values of this head_dim and dtype.

        Raises
        ------
        UnsupportedError
            No kernels support them; the text says why.
        """
        asked = scheme.key, scheme.value, head_dim, dtype, device
        if (known := self._chosen.get(asked)) is not None:
            return known
        key, value = (scheme.codec(role).for_dtype(dtype) for role in ROLES)
        engine = choose(KVScheme(key, value), head_dim, device, self.page_tokens, static=self.static)
        layout = page_layout(key, value, head_dim, head_dim, self.page_tokens)
        by = tuple(engine.written_by(role) for role in ROLES)
        chosen = Chosen(engine, layout, _name(key, value, head_dim, device, layout.page_tokens, by))
        self._chosen[asked] = chosen
        return chosen


@lru_cache(maxsize=1024)
def _name(*_what: Hashable) -> Hashable:
    """Intern: one object for equal arguments, which is faster to compare than codecs."""
    return object()


class Engine:
    """Reads and writes the pages of one layer with CUDA kernels, compiled for its two codecs at their first use.

    Parameters
    ----------
    key, value : Codec
    head_dim, page_tokens : int
    """

    name = "cuda"
    checks = False
    """Whether a cache checks single tokens before it stores them; else they are flagged on the device."""
    ready = False
    """Whether the constants of both roles are on the device."""
    mean: KeyMean | None = None
    """The mean that keys are held without; see ``hold_without``."""

    def __init__(self, key: Codec, value: Codec, head_dim: int, page_tokens: int) -> None:
        self.codecs: dict[Role, Codec] = {"key": key, "value": value}
        self.head_dim, self.page_tokens = head_dim, page_tokens
        self.reading: dict[Role, Constants] = {}
        self.writing: dict[Role, Constants] = {}
        self._find()

    def _find(self) -> None:
        """Look up the specs of the codecs and register them with the kernels."""
        key, value = self.codecs["key"], self.codecs["value"]
        sizes, pairs = (self.head_dim, self.page_tokens), 0 if self.mean is None else self.mean.pairs
        written = encode_spec(key, value, *sizes, mean=pairs > 0)
        self.decode_spec = decode_text(decode_spec(key, value, *sizes, pairs))
        self.encode_spec = encode_text(written)
        self.readers: Mapping[Role, Reader | CpuReader] = {r: reader(self.codecs[r], self.head_dim, r) for r in ROLES}
        self.encoders: Mapping[Role, Encoder | CpuEncoder | None] = {r: written.encoder(r) for r in ROLES}
        self.flags_all = None not in self.encoders.values()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the specs, which hold functions."""
        return {name: x for name, x in self.__dict__.items() if name not in ("readers", "encoders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in a process that may not have registered the specs yet."""
        self.__dict__.update(state)
        self._find()

    def fresh(self) -> "Engine":
        """The same kernels without constants, for another layer."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, reading={}, writing={}, ready=False)
        return other

    def hold_without(self, mean: KeyMean) -> None:
        """Hold keys without this mean: before any key is written, or the same for other sequences of the batch.

        Existing tensors keep their addresses if shapes allow.
        """
        old = self.mean
        if old is not None and (old.mean.shape, old.table.shape) == (mean.mean.shape, mean.table.shape):
            old.mean.copy_(mean.mean)
            old.table.copy_(mean.table)
            return
        self.mean = mean
        self._find()

    def prepare(self, roles: Mapping[Role, RoleSite]) -> None:
        """Set the constants of the roles; existing tensors keep their addresses if shapes allow."""
        for role in ROLES:
            for found, kept in ((self.readers[role], self.reading), (self.encoders[role], self.writing)):
                if found is None:  # PyTorch encodes it
                    kept[role] = Constants(None, None, 1)
                    continue
                state = roles[role]
                assert state.params is not None
                kept[role] = constants(
                    found, self.codecs[role], state.site, state.params, kept.get(role), drawn=state.drawn
                )
        self.ready = True

    def written_by(self, role: Role) -> str:
        """Return what encodes a role: the engine's name, or ``torch``."""
        return self.name if self.encoders[role] is not None else "torch"

    def tensors(self) -> list[Tensor]:
        """Constants on the device."""
        held = [*self.reading.values(), *self.writing.values()]
        own = [x for side in held for x in (side.tables, side.factor) if x is not None]
        return own if self.mean is None else [*own, self.mean.mean, self.mean.table]

    def encode(
        self, new: Mapping[Role, Tensor], store: PageStore, first: Tensor, bad: Tensor, less: Turned | None = None
    ) -> None:
        """Write new tokens ``[B, H, n, D]`` into the slots from ``first`` (int32 ``[B]``, on the device) on.

        Only roles that a kernel encodes (``written_by``). ``less``: what is subtracted from the keys, if they are held
        without a mean.
        """
        encode_to_pages(
            new.get("key"),
            new.get("value"),
            store.pages,
            store.table,
            first,
            spec=self.encode_spec,
            key=self.writing["key"],
            value=self.writing["value"],
            bad=bad,
            less=less,
        )

    def encode_side_by_side(self, keys: Tensor, engines: "Sequence[Engine]", store: PageStore) -> Payload | None:
        """Encode keys of several layers, heads concatenated: ``[1, L H, n, D]``; None: PyTorch has to.

        Nothing is stored. ``engines`` are those of the layers, alike but for their constants; ``store`` is a layer's.
        """
        unlike = not all(engine.ready and engine.mean is None for engine in engines)
        if self.encoders["key"] is None or unlike:
            return None
        heads, count = store.heads, keys.shape[2]
        side = {role: joined([engine.writing[role] for engine in engines], heads) for role in ROLES}
        page = PageStore(store.layout, 1, keys.shape[1], keys.device, count)
        # passed as values as well: the program for both roles is compiled already
        encode_to_pages(
            keys,
            None if self.encoders["value"] is None else keys,
            page.pages,
            page.table,
            torch.zeros(1, dtype=torch.int32, device=keys.device),
            spec=self.encode_spec,
            key=side["key"],
            value=side["value"],
        )
        return page.read("key", 0, count)

    def attend(self, q: Tensor, store: PageStore, seq_lens: Tensor, *, softcap: float, **options: Any) -> Tensor:
        """Attention of one query token; options as the kernels' ``decode_attention``, ``first`` with a mean."""
        out, _ = decode_attention(
            q,
            store.pages,
            store.table,
            seq_lens,
            spec=self.decode_spec,
            key=self.reading["key"],
            value=self.reading["value"],
            num_kv_heads=store.heads,
            softcap=softcap,
            mean=self.mean,
            **options,
        )
        return out

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """Upper bound of what a call needs beside the cache."""
        splits = splits_of(self.decode_spec, q, store.heads, store.table, dense)
        return 4 * workspace_numel(q.shape[0], q.shape[1], q.shape[3], splits, dense)

    def attend_many(
        self,
        q: Tensor,
        roles: Mapping[Role, RoleState],
        store: PageStore,
        *,
        scale: float,
        sinks: Tensor | None,
        seen: Seen,
        placed: Tensor | None = None,
    ) -> Tensor:
        """Attention of the newest ``q [B, HQ, n, D]`` over the host's sink, run of slots and window.

        ``placed``: as ``packed``.
        """
        key, value = roles["key"], roles["value"]
        first, last = key.runs[0] if key.runs else (0, 0)
        packed = self.packed(store.pages, store.table, placed)
        history = History(packed, first, last, (key.sink, value.sink), (key.window, value.window))
        return attend_history(q, history, scale, seen=seen, sinks=sinks)

    def packed(self, pages: Tensor, table: Tensor, placed: Tensor | None = None) -> Packed:
        """Return pages ``[num_pages, H, page_bytes]`` and a table of them, with what reads them.

        ``placed``: with a mean, the position of slot 0 of each sequence, int32 ``[B]``.
        """
        key, value = self.reading["key"], self.reading["value"]
        return Packed(pages, table, self.decode_spec, key, value, self.mean, placed)

    def many_workspace_bytes(self, q: Tensor, store: PageStore, packed: int, dense: int, flash: bool) -> int:
        """Upper bound of what ``attend_many`` needs beside a cache of ``packed`` packed and ``dense`` dense tokens.

        ``flash``: as ``Seen.flash``.
        """
        return workspace_bytes(q, store.heads, packed, dense, flash)


class CpuEngine(Engine):
    """Reads and writes the pages of one layer with the CPU kernels; PyTorch writes what they do not."""

    decode_spec = encode_spec = ""
    checks = True
    common: EncodeArgsStruct | None = None
    """What the calls of the encode kernels have in common; made at the first."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Engine and instruction set."""
        return f"cpu {library.variant()}"

    def _find(self) -> None:
        self.spec = cpu_spec(self.codecs["key"], self.codecs["value"], self.head_dim, self.page_tokens)
        self.readers = {"key": self.spec.key, "value": self.spec.value}
        self.encoders = {role: self.spec.encoder(role) for role in ROLES}
        self.flags_all = None not in self.encoders.values()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the spec, which holds functions, and what holds numbers of this process."""
        return {name: x for name, x in super().__getstate__().items() if name not in ("spec", "common")}

    def hold_without(self, mean: KeyMean) -> None:
        """Raise: no CPU kernel adds a mean to the scores."""
        raise UnsupportedError("the CPU kernels read keys with their mean; use mean=none")

    def encode(
        self, new: Mapping[Role, Tensor], store: PageStore, first: Tensor, bad: Tensor, less: Turned | None = None
    ) -> None:
        """As ``Engine.encode``."""
        if not new:
            return
        if self.common is None:
            self.common = prepared(self.spec)
        encode_cpu(new, store.pages, store.table, first, bad, common=self.common, constants=self.writing)

    def encode_side_by_side(self, keys: Tensor, engines: "Sequence[Engine]", store: PageStore) -> None:
        """PyTorch has to."""

    def attend(  # type: ignore[override]
        self,
        q: Tensor,
        store: PageStore,
        seq_lens: Tensor,
        *,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
        start: Tensor | None = None,
        dense_k: Tensor | None = None,
        dense_v: Tensor | None = None,
        dense_lens: Tensor | None = None,
        dense_start: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query token per sequence; arguments as the CUDA kernels' ``decode_attention``."""
        batch = q.shape[0]
        first, last = _numbers(start, batch, 0), seq_lens.tolist()
        dense = 0 if dense_k is None else dense_k.shape[2]
        dense_first, dense_last = _numbers(dense_start, batch, 0), _numbers(dense_lens, batch, dense)
        pieces: list[list[Piece]] = [
            [(max(0, last[b] - first[b]), first[b], first[b]), (max(0, z - a), ~a, ~a)]
            for b, (a, z) in enumerate(zip(dense_first, dense_last, strict=True))
        ]
        out, _ = attend_cpu(
            q, store.pages, store.table, pieces, spec=self.spec, key=self.reading["key"], value=self.reading["value"],
            dense_k=dense_k, dense_v=dense_v, scale=scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out

    def attend_many(
        self,
        q: Tensor,
        roles: Mapping[Role, RoleState],
        store: PageStore,
        *,
        scale: float,
        sinks: Tensor | None,
        seen: Seen,
        placed: Tensor | None = None,
    ) -> Tensor:
        """Attention of the newest ``q [B, HQ, n, D]`` over the host's sink, run of slots and window."""
        key, value = self.reading["key"], self.reading["value"]
        return attend_held(
            q, roles, store, spec=self.spec, key=key, value=value, scale=scale, seen=seen, sinks=sinks
        )  # fmt: skip

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """Upper bound of what a call needs beside the cache."""
        return workspace_bytes_cpu(q)

    def many_workspace_bytes(self, q: Tensor, store: PageStore, packed: int, dense: int, flash: bool) -> int:
        """Upper bound of what ``attend_many`` needs beside the cache and a mask."""
        return workspace_bytes_cpu(q) + 4 * dense * q.numel() // q.shape[2]

    def packed(self, pages: Tensor, table: Tensor, placed: Tensor | None = None) -> Packed:
        """Raise: nothing unpacks pages for other attention kernels."""
        raise UnsupportedError("the CPU kernels attend to packed pages; they do not unpack them for other kernels.")


def _numbers(x: Tensor | None, batch: int, default: int) -> list[int]:
    """Numbers of an int32 ``[B]`` on the CPU."""
    return [default] * batch if x is None else x.tolist()
