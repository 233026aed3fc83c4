"""The interface between a layer's cache and its kernels: ``cuda/engine.py`` and ``cpu/engine.py`` implement it.

The state of an engine is names and tensors, no module or compiled kernel, so that caches can be copied and saved.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role
from packedkv.kernels.constants import NO_CONSTANTS, Constants, Side, constants
from packedkv.kernels.tokens import ChunkTokens, GroupTokens, NewTokens, Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore
from packedkv.store.site import RoleSite


class FirstTokens(NamedTuple):
    """First tokens of keys or values on which kernels fit a role's constants, and their rotation angles."""

    x: Tensor  # [B, H, n, D], model basis; the last axis contiguous
    tokens: int = 0  # number of tokens in the sample; 0: all
    every: int = 1  # step between tokens of the sample: 1 takes every token, 2 every second one
    padding: Tensor | None = None  # int32 [B]: padding tokens of each sequence before its first token
    # Rotary.angles of x, float32 [1 or B, n, R / 2] each: the mean of the keys before RoPE is fitted as well
    angles: tuple[Tensor, Tensor] | None = None
    back: tuple[Tensor, Tensor] | None = None  # angles of the inverse rotation; None: the same angles, mirrored
    interleaved: bool = False  # as in Rotary
    energy: Tensor | None = None  # [1, H, D], as in packedkv.codec.Sample


class Fitted(NamedTuple):
    """Constants of a role, for the reference and for the kernels; the mean before RoPE if there is one."""

    params: Params
    reading: Constants
    writing: Constants
    mean: Tensor | None = None


class Engine(ABC):
    """Reads and writes the pages of one layer with kernels for its two codecs."""

    name: str
    """Name of the kernels in reports."""
    refuses_at_once: bool
    """Whether a cache refuses a bad single token at once; otherwise ``check`` does, from a flag on the device."""
    ready = False
    """Whether the constants of both roles are on the device."""
    readers: Mapping[Role, Side]
    encoders: Mapping[Role, Side | None]
    """None: PyTorch encodes the role."""
    mean: tuple[Any, ...] | None = None
    """The mean that is subtracted from keys; see ``hold_without``."""

    def __init__(self, key: Codec, value: Codec, head_dim: int, page_tokens: int) -> None:
        self.codecs: dict[Role, Codec] = {"key": key, "value": value}
        self.head_dim, self.page_tokens = head_dim, page_tokens
        self.reading: dict[Role, Constants] = {}
        self.writing: dict[Role, Constants] = {}
        self._find()

    @abstractmethod
    def _find(self) -> None:
        """Look up readers and encoders of the codecs."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out readers and encoders, which hold functions."""
        return {name: x for name, x in self.__dict__.items() if name not in ("readers", "encoders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look the readers and encoders up again."""
        self.__dict__.update(state)
        self._find()

    def fresh(self) -> Self:
        """Return the same kernels without constants, for another layer."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, reading={}, writing={}, ready=False)
        return other

    def expect_layer(self) -> None:
        """Count one more layer with these kernels; memory for all of them is allocated at once."""
        return  # nothing is shared

    def prepare(self, roles: Mapping[Role, RoleSite]) -> None:
        """Set the constants of the roles; existing tensors keep their addresses if shapes allow."""
        for role in ROLES:
            if self.take_fitted(role, roles[role].params):
                continue
            for found, kept in ((self.readers[role], self.reading), (self.encoders[role], self.writing)):
                if found is None:  # PyTorch encodes it
                    kept[role] = NO_CONSTANTS
                    continue
                state = roles[role]
                assert state.params is not None
                kept[role] = constants(
                    found, self.codecs[role], state.site, state.params, kept.get(role), seeded=state.seeded
                )
        self.ready = True

    def take_fitted(self, role: Role, params: Params | None) -> bool:
        """Set the constants of a role if the engine fitted these params itself; returns whether it did."""
        return False

    def fits(self, role: Role) -> bool:
        """Whether a kernel fits a role's constants, with the reference's result."""
        return False

    def fit(self, samples: Mapping[Role, FirstTokens]) -> dict[Role, Fitted]:
        """Fit the constants of roles that it ``fits``; they are valid after ``launch_fits``."""
        return {}

    def launch_fits(self) -> None:
        """Launch the pending fits of this layer and of the layers that share its launch."""
        return  # nothing is fitted

    @abstractmethod
    def hold_without(self, mean: Tensor, rotary: Rotary, *, look: bool = True) -> None:
        """Subtract ``mean``, float32 ``[1 or B, H, D]``, from keys; ``rotary`` rotates it by position.

        Called before any key is written, or after the batch is rearranged. ``look``: whether to look for pairs of
        channels without a mean, which synchronises.
        """

    @property
    def flags_all(self) -> bool:
        """Whether kernels encode both roles, and so flag every number that codecs cannot represent."""
        return None not in self.encoders.values()  # other encoders where keys have no mean

    def written_by(self, role: Role) -> str:
        """Return the encoder of a role: the engine's name, or ``torch``."""
        return self.name if self.encoders[role] is not None else "torch"

    def tensors(self) -> list[Tensor]:
        """Constants on the device, including the mean."""
        held = [*self.reading.values(), *self.writing.values()]
        own = [x for side in held for x in (side.tables, side.factor, side.matrix) if x is not None]
        return [*own, *(x for x in self.mean or () if isinstance(x, Tensor))]

    @abstractmethod
    def encode(self, new: NewTokens, store: PageStore) -> None:
        """Write new tokens into their slots; only roles that a kernel encodes (``written_by``)."""

    @property
    def alike(self) -> Hashable:
        """Equal for engines of layers whose keys ``roundtrip`` takes together."""
        return None

    def roundtrip(self, keys: Tensor, engines: "Sequence[Engine]", store: PageStore) -> Tensor | None:
        """Encode and dequantize keys of several layers, heads concatenated: ``[1, L H, n, D]``; None: not supported.

        Nothing is stored. ``engines`` are of the layers and differ in their constants alone; ``store`` is of one layer.
        The mean is subtracted from the keys already.
        """
        return None

    @abstractmethod
    def attend_step(self, q: Tensor, tokens: StepTokens, rules: Rules) -> Tensor:
        """Attention of one query token per sequence, ``[B, HQ, 1, D]``; nothing synchronises on a GPU.

        Of ``rules.seen`` the soft cap alone.
        """

    @abstractmethod
    def attend_chunk(self, q: Tensor, tokens: ChunkTokens, rules: Rules) -> Tensor:
        """Attention of the newest ``q [B, HQ, n, D]``, which ``tokens`` include."""

    @abstractmethod
    def attend_groups(self, q: Tensor, tokens: GroupTokens, rules: Rules) -> Tensor:
        """Attention of the newest ``q [1, HQ, n, D]``; CUDA kernels take no window and no soft cap."""

    @abstractmethod
    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """Upper bound of what ``attend_step`` needs beside the cache."""

    @abstractmethod
    def chunk_workspace_bytes(self, q: Tensor, heads: int, packed: int, dense: int, flash: bool) -> int:
        """Upper bound of what ``attend_chunk`` needs beside a cache of ``packed`` packed and ``dense`` dense tokens.

        ``heads``: KV heads. ``flash``: as ``flash.by_flash``.
        """
