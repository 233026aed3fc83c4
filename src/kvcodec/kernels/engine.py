"""Which fused kernels serve a layer, and how they are called: CUDA's, and Triton's where CUDA's cannot run.

An engine holds no module and no compiled kernel, only names and tensors: caches are copied and saved.
"""

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcodec.attention import Seen
from kvcodec.cache.host import RoleState
from kvcodec.cache.pages import PageStore
from kvcodec.codec import ROLES, Codec, Payload, Role
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.errors import UnsupportedError
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

    CUDA's kernels where they can run. Triton's know two codecs; they serve what CUDA's refuse: AMD GPUs, head_dim 80
    and 192, an environment without cuda-core.

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
    cuda = _cuda(scheme, head_dim, device, tokens, static)
    if isinstance(cuda, Engine):
        return cuda
    triton = _triton(scheme, head_dim, device)
    if isinstance(triton, Engine):
        return triton
    return f"{cuda}; {triton}" if triton and device.type == "cuda" else cuda


def order_of(codec: Codec, head_dim: int) -> int:
    """Order of the rotation that the Triton kernels apply for the codec; 1 for none."""
    return codec.block_for(head_dim) if isinstance(codec, SawInt4) else 1


def triton_stem(scheme: KVScheme) -> str:
    """Name of the Triton kernel module that serves both codecs, or ``""``; Triton is not imported."""
    # by type, not by the name alone: a codec of another package may have the same one
    stems = {c.kernel if isinstance(c, SawInt4 | GroupInt) else None for c in (scheme.key, scheme.value)}
    stem = stems.pop() if len(stems) == 1 else None
    return stem or ""


def _triton(scheme: KVScheme, head_dim: int, device: torch.device) -> "Engine | str":
    """Return the Triton engine, the reason why not, or ``""`` where no Triton kernel is for the scheme at all."""
    if not (stem := triton_stem(scheme)):
        return ""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install kvcodec[triton]"
    knobs = importlib.import_module("triton").knobs
    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"device {device} is not a GPU"
    kernels = importlib.import_module(f"kvcodec.kernels.triton.{stem}")
    orders = order_of(scheme.key, head_dim), order_of(scheme.value, head_dim)
    return str(kernels.supports(head_dim, *orders)) or TritonEngine(stem, *orders)


def _cuda(scheme: KVScheme, head_dim: int, device: torch.device, page_tokens: int, static: bool) -> "Engine | str":
    from kvcodec.kernels.build import refusal
    from kvcodec.kernels.decode import Pair, pair_for
    from kvcodec.kernels.sides import encoder

    pair = pair_for(scheme.key, scheme.value, head_dim, page_tokens)
    if not isinstance(pair, Pair):
        return pair
    if static:
        for role in ROLES:
            if isinstance(reason := encoder(scheme.codec(role), head_dim, role), str):
                return f"{reason}, and PyTorch's would synchronise in every step; leave max_len out"
    return refusal(device) or CudaEngine(scheme.key, scheme.value, head_dim, page_tokens)


def kernels_for(scheme: KVScheme, head_dim: int = 128) -> dict[str, str]:
    """As ``kvcodec.description.kernels_for``."""
    from kvcodec.kernels.decode import pair_for
    from kvcodec.kernels.sides import encoder

    step = math.lcm(16, scheme.key.block_tokens, scheme.value.block_tokens)
    if isinstance(pair_for(scheme.key, scheme.value, head_dim, step), str):
        name = "triton" if triton_stem(scheme) else "none"
        return {"encode": name, "decode": name}
    written = {r: "none" if isinstance(encoder(scheme.codec(r), head_dim, r), str) else "cuda" for r in ROLES}
    same = written["key"] == written["value"]
    encode = written["key"] if same else ", ".join(f"{role} {by}" for role, by in written.items())
    return {"encode": encode, "decode": "cuda"}


class Engine:
    """What reads and writes the pages of one layer."""

    name = ""
    """``triton`` or ``cuda``."""
    softcap = math.inf
    """Largest soft cap of scores that the kernels apply."""
    flags_all = False
    """Whether ``encode`` raises ``bad`` for every number of both roles that codecs cannot hold."""
    ready = False
    """Whether the constants of both roles are where the kernels find them."""

    def prepare(self, roles: Mapping[Role, RoleState]) -> None:
        """Take over the constants of the roles; tensors that were there keep their addresses if shapes allow."""
        self.ready = True

    def written_by(self, role: Role) -> str:
        """Return what encodes a role: the engine's name, or ``torch``."""
        return self.name

    def tensors(self) -> list[Tensor]:
        """Constants on the device."""
        return []

    def encode(
        self,
        new: Mapping[Role, Tensor],
        roles: Mapping[Role, RoleState],
        store: PageStore,
        first: Tensor,
        bad: Tensor,
    ) -> None:
        """Write new tokens ``[B, H, n, D]`` into the slots from ``first`` (int32 ``[B]``, on the device) on."""
        raise NotImplementedError

    def encode_side_by_side(self, keys: Tensor, engines: "Sequence[Engine]", store: PageStore) -> Payload | None:
        """Encode keys of several layers, their heads side by side: ``[1, L H, n, D]``; None: PyTorch has to.

        Nothing is stored. ``engines`` are those of the layers, alike but for their constants; ``store`` is a layer's.
        """
        return None

    def attend(self, q: Tensor, store: PageStore, seq_lens: Tensor, *, softcap: float, **options: Any) -> Tensor:
        """Attention of one query token; options as the kernels' ``decode_attention``."""
        raise NotImplementedError

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """Upper bound of what a call needs beside the cache."""
        raise NotImplementedError

    def many_refusal(self) -> str:
        """Return why ``attend_many`` cannot be called, or ``""`` if it can."""
        return f"the {self.name} kernels of this scheme take one query token"

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
        raise UnsupportedError(f"attention of several query tokens: {self.many_refusal()}.")

    def many_workspace_bytes(self, q: Tensor, store: PageStore, packed: int, dense: int, flash: bool) -> int:
        """Upper bound of what ``attend_many`` needs beside the cache of so many packed and dense tokens.

        ``flash``: as ``Seen.flash``.
        """
        raise NotImplementedError


class TritonEngine(Engine):
    """Triton kernels ``kvcodec/kernels/triton/<stem>.py``.

    Parameters
    ----------
    stem : str
    key_order, value_order : int
        Hadamard orders.
    """

    name = "triton"
    softcap = 0.0

    def __init__(self, stem: str, key_order: int, value_order: int) -> None:
        self.stem, self.key_order, self.value_order = stem, key_order, value_order

    def encode(
        self,
        new: Mapping[Role, Tensor],
        roles: Mapping[Role, RoleState],
        store: PageStore,
        first: Tensor,
        bad: Tensor,
    ) -> None:
        """As ``Engine.encode``; one launch."""
        from kvcodec.kernels.triton.decode_attention import CODECS

        CODECS[self.stem].encode_to_pages(
            new["key"],
            new["value"],
            store.pages,
            store.table,
            first,
            key_block=self.key_order,
            value_block=self.value_order,
            page_tokens=store.layout.page_tokens,
            bad=bad,
        )

    def attend(self, q: Tensor, store: PageStore, seq_lens: Tensor, *, softcap: float, **options: Any) -> Tensor:
        """As ``Engine.attend``."""
        from kvcodec.kernels.triton.decode_attention import decode_attention

        if softcap:
            raise UnsupportedError(f"the Triton kernels have no soft cap (got {softcap}); use attention='decoded'.")
        out = decode_attention(
            q,
            store.pages,
            store.table,
            seq_lens,
            key_block=self.key_order,
            value_block=self.value_order,
            page_tokens=store.layout.page_tokens,
            num_kv_heads=store.heads,
            codec=self.stem,
            **options,
        )
        assert isinstance(out, Tensor)
        return out

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """As ``Engine.workspace_bytes``: 512 splits are the most that the table of launch constants gives."""
        from kvcodec.kernels.triton.decode_attention import workspace_numel

        return 4 * workspace_numel(q.shape[0], q.shape[1], q.shape[3], 512, dense)


class CudaEngine(Engine):
    """CUDA kernels, compiled for the two codecs when they are first used.

    Parameters
    ----------
    key, value : Codec
    head_dim, page_tokens : int
    """

    name = "cuda"

    def __init__(self, key: Codec, value: Codec, head_dim: int, page_tokens: int) -> None:
        self.codecs: dict[Role, Codec] = {"key": key, "value": value}
        self.head_dim, self.page_tokens = head_dim, page_tokens
        self.reading: dict[Role, Any] = {}  # SideTensors
        self.writing: dict[Role, Any] = {}
        self._name_programs()

    def _name_programs(self) -> None:
        from kvcodec.kernels import decode as attention
        from kvcodec.kernels import encode

        key, value = self.codecs["key"], self.codecs["value"]
        pair = attention.pair_for(key, value, self.head_dim, self.page_tokens)
        assert not isinstance(pair, str)
        target = encode.target_for(key, value, self.head_dim, self.page_tokens)
        self.pair, self.target = attention.text_of(pair), encode.text_of(target)
        self.encoders: dict[Role, bool] = {role: target.side(role) is not None for role in ROLES}
        self.flags_all = all(self.encoders.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in a process that may not know the programs' names yet."""
        self.__dict__.update(state)
        self._name_programs()

    def prepare(self, roles: Mapping[Role, RoleState]) -> None:
        """As ``Engine.prepare``."""
        from kvcodec.kernels.constants import SideTensors, constants
        from kvcodec.kernels.sides import encoder, reader

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
        """As ``Engine.written_by``."""
        return self.name if self.encoders[role] else "torch"

    def tensors(self) -> list[Tensor]:
        """As ``Engine.tensors``."""
        held = [*self.reading.values(), *self.writing.values()]
        return [x for side in held for x in (side.tables, side.factor) if x is not None]

    def encode(
        self,
        new: Mapping[Role, Tensor],
        roles: Mapping[Role, RoleState],
        store: PageStore,
        first: Tensor,
        bad: Tensor,
    ) -> None:
        """As ``Engine.encode``; a role without a kernel is encoded by its codec into the same pages."""
        from kvcodec.kernels.encode import encode_to_pages

        for role, x in new.items():
            if not self.encoders[role]:
                state = roles[role]
                assert state.params is not None
                payload = state.codec.encode(state.codec.to_code(x.float(), state.params), state.params)
                store.write(role, state.next_slot, payload)
        encode_to_pages(
            new["key"] if self.encoders["key"] else None,
            new["value"] if self.encoders["value"] else None,
            store.pages,
            store.table,
            first,
            target=self.target,
            key=self.writing["key"],
            value=self.writing["value"],
            bad=bad,
        )

    def encode_side_by_side(self, keys: Tensor, engines: Sequence[Engine], store: PageStore) -> Payload | None:
        """As ``Engine.encode_side_by_side``: one launch, or one for each role."""
        from kvcodec.kernels.constants import SideTensors, joined
        from kvcodec.kernels.encode import encode_to_pages

        if not (self.encoders["key"] and all(engine.ready for engine in engines)):
            return None
        heads, count = store.heads, keys.shape[2]
        side: dict[Role, SideTensors] = {}
        for role in ROLES:
            made = [engine.writing[role] for engine in engines if isinstance(engine, CudaEngine)]
            side[role] = joined(made, heads)
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
        """As ``Engine.attend``."""
        from kvcodec.kernels.decode import decode_attention

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
        """As ``Engine.workspace_bytes``."""
        from kvcodec.kernels.decode import splits_of, workspace_numel

        splits = splits_of(self.pair, q, store.heads, store.table, dense)
        return 4 * workspace_numel(q.shape[0], q.shape[1], q.shape[3], splits, dense)

    def many_refusal(self) -> str:
        """As ``Engine.many_refusal``: there is no reason."""
        return ""

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
        """As ``Engine.attend_many``: pages unpacked into 16-bit numbers, and flash attention over these."""
        from kvcodec.kernels.history import attend_newest

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
        """As ``Engine.many_workspace_bytes``."""
        from kvcodec.kernels.history import workspace_bytes

        return workspace_bytes(q, store.heads, packed, dense, flash)
