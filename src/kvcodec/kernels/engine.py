"""Which fused kernels serve a layer, and how they are called.

An engine holds no module and no compiled kernel, only names and tensors: caches are copied and saved.
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
from kvcodec.kernels.constants import SideTensors, constants, joined
from kvcodec.kernels.decode import decode_attention, splits_of, workspace_numel
from kvcodec.kernels.decode import text_of as pair_text
from kvcodec.kernels.encode import encode_to_pages, target_for
from kvcodec.kernels.encode import text_of as target_text
from kvcodec.kernels.history import attend_newest, workspace_bytes
from kvcodec.kernels.sides import encoder, reader
from kvcodec.kernels.spec import Pair, pair_for
from kvcodec.layout import PageLayout
from kvcodec.scheme import KVScheme, page_layout


def choose(
    scheme: KVScheme,
    head_dim: int,
    device: torch.device,
    page_tokens: int | None = None,
    *,
    static: bool = False,
) -> "Engine | str":
    """Return the engine for a layer's scheme, or the reason why there is none.

    Parameters
    ----------
    scheme : KVScheme
        Of one layer (``scheme.for_layer``), its codecs as they are for the dtype (``for_dtype``).
    head_dim : int
    device : torch.device
    page_tokens : int, optional
    static : bool
        Whether steps must not synchronise: then both roles need a kernel to encode.
    """
    tokens = page_tokens or page_layout(scheme.key, scheme.value, head_dim, head_dim).page_tokens
    pair = pair_for(scheme.key, scheme.value, head_dim, tokens)
    if not isinstance(pair, Pair):
        return pair
    if static:
        for role in ROLES:
            if isinstance(reason := encoder(scheme.codec(role), head_dim, role), str):
                return f"{reason}, and PyTorch's would synchronise in every step; leave max_len out"
    return build.refusal(device) or Engine(scheme.key, scheme.value, head_dim, tokens)


class Chosen(NamedTuple):
    """What serves a scheme's layers of one head_dim and dtype on one device.

    Parameters
    ----------
    engine : Engine
        Without constants: a layer takes ``fresh``.
    layout : PageLayout
    name : Hashable
        Of all this, for what layers share.
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
        """Return what serves keys and values of this head_dim and dtype.

        Raises
        ------
        UnsupportedError
            Nothing does; the text is the reason.
        """
        asked = scheme.key, scheme.value, head_dim, dtype, device
        if (known := self._chosen.get(asked)) is not None:
            return known
        key, value = (scheme.codec(role).for_dtype(dtype) for role in ROLES)
        engine = choose(KVScheme(key, value), head_dim, device, self.page_tokens, static=self.static)
        if isinstance(engine, str):
            raise UnsupportedError(engine)
        layout = page_layout(key, value, head_dim, head_dim, self.page_tokens)
        by = tuple(engine.written_by(role) for role in ROLES)
        chosen = Chosen(engine, layout, _name(key, value, head_dim, device, layout.page_tokens, by))
        self._chosen[asked] = chosen
        return chosen


@lru_cache(maxsize=1024)
def _name(*_what: Hashable) -> Hashable:
    """One object for equal arguments: to compare it costs nothing, to compare codecs does."""
    return object()


class Engine:
    """Reads and writes the pages of one layer with CUDA kernels, compiled for its two codecs at their first use.

    Parameters
    ----------
    key, value : Codec
    head_dim, page_tokens : int
    """

    name = "cuda"
    ready = False
    """Whether the constants of both roles are where the kernels find them."""

    def __init__(self, key: Codec, value: Codec, head_dim: int, page_tokens: int) -> None:
        self.codecs: dict[Role, Codec] = {"key": key, "value": value}
        self.head_dim, self.page_tokens = head_dim, page_tokens
        self.reading: dict[Role, SideTensors] = {}
        self.writing: dict[Role, SideTensors] = {}
        self._name_programs()

    def _name_programs(self) -> None:
        key, value = self.codecs["key"], self.codecs["value"]
        pair = pair_for(key, value, self.head_dim, self.page_tokens)
        assert not isinstance(pair, str)
        target = target_for(key, value, self.head_dim, self.page_tokens)
        self.pair, self.target = pair_text(pair), target_text(target)
        self.encoders: dict[Role, bool] = {role: target.side(role) is not None for role in ROLES}
        self.flags_all = all(self.encoders.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in a process that may not know the programs' names yet."""
        self.__dict__.update(state)
        self._name_programs()

    def fresh(self) -> "Engine":
        """The same kernels without constants, for another layer."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, reading={}, writing={}, ready=False)
        return other

    def prepare(self, roles: Mapping[Role, RoleSite]) -> None:
        """Take over the constants of the roles; tensors that were there keep their addresses if shapes allow."""
        for role in ROLES:
            state, codec = roles[role], self.codecs[role]
            both = (
                (reader(codec, self.head_dim, role), self.reading),
                (encoder(codec, self.head_dim, role), self.writing),
            )
            for side, kept in both:
                assert state.params is not None
                if isinstance(side, str):  # PyTorch encodes it
                    kept[role] = SideTensors(None, None, 1)
                    continue
                kept[role] = constants(side, codec, state.site, state.params, kept.get(role), drawn=state.drawn)
        self.ready = True

    def written_by(self, role: Role) -> str:
        """Return what encodes a role: the engine's name, or ``torch``."""
        return self.name if self.encoders[role] else "torch"

    def tensors(self) -> list[Tensor]:
        """Constants on the device."""
        held = [*self.reading.values(), *self.writing.values()]
        return [x for side in held for x in (side.tables, side.factor) if x is not None]

    def encode(self, new: Mapping[Role, Tensor], store: PageStore, first: Tensor, bad: Tensor) -> None:
        """Write new tokens ``[B, H, n, D]`` into the slots from ``first`` (int32 ``[B]``, on the device) on.

        Only roles that a kernel encodes (``written_by``).
        """
        encode_to_pages(
            new.get("key"),
            new.get("value"),
            store.pages,
            store.table,
            first,
            target=self.target,
            key=self.writing["key"],
            value=self.writing["value"],
            bad=bad,
        )

    def encode_side_by_side(self, keys: Tensor, engines: "Sequence[Engine]", store: PageStore) -> Payload | None:
        """Encode keys of several layers, their heads side by side: ``[1, L H, n, D]``; None: PyTorch has to.

        Nothing is stored. ``engines`` are those of the layers, alike but for their constants; ``store`` is a layer's.
        """
        if not (self.encoders["key"] and all(engine.ready for engine in engines)):
            return None
        heads, count = store.heads, keys.shape[2]
        side = {role: joined([engine.writing[role] for engine in engines], heads) for role in ROLES}
        page = PageStore(store.layout, 1, keys.shape[1], keys.device, count)
        # as values as well: the program that encodes both roles is there, another one would have to be compiled
        encode_to_pages(
            keys,
            keys if self.encoders["value"] else None,
            page.pages,
            page.table,
            torch.zeros(1, dtype=torch.int32, device=keys.device),
            target=self.target,
            key=side["key"],
            value=side["value"],
        )
        return page.read("key", 0, count)

    def attend(self, q: Tensor, store: PageStore, seq_lens: Tensor, *, softcap: float, **options: Any) -> Tensor:
        """Attention of one query token; options as the kernels' ``decode_attention``."""
        out, _ = decode_attention(
            q,
            store.pages,
            store.table,
            seq_lens,
            pair=self.pair,
            key=self.reading["key"],
            value=self.reading["value"],
            num_kv_heads=store.heads,
            softcap=softcap,
            **options,
        )
        return out

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """Upper bound of what a call needs beside the cache."""
        splits = splits_of(self.pair, q, store.heads, store.table, dense)
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
    ) -> Tensor:
        """Attention of the newest ``q [B, HQ, n, D]`` over the host's sink, run of slots and window."""
        key, value = roles["key"], roles["value"]
        first, last = key.runs[0] if key.runs else (0, 0)
        return attend_newest(
            q,
            (key.sink, value.sink),
            (key.window, value.window),
            store.pages,
            store.table,
            first,
            last,
            pair=self.pair,
            key=self.reading["key"],
            value=self.reading["value"],
            scale=scale,
            sinks=sinks,
            seen=seen,
        )

    def many_workspace_bytes(self, q: Tensor, store: PageStore, packed: int, dense: int, flash: bool) -> int:
        """Upper bound of what ``attend_many`` needs beside the cache of so many packed and dense tokens.

        ``flash``: as ``Seen.flash``.
        """
        return workspace_bytes(q, store.heads, packed, dense, flash)
