"""The interface between a layer's cache and its kernels: ``cuda/engine.py`` and ``cpu/engine.py`` implement it.

The state of an engine is names and tensors, no module or compiled kernel, so that caches can be copied and saved.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role
from packedkv.kernels.constants import NO_CONSTANTS, Constants, Side, constants
from packedkv.kernels.spec import of_module
from packedkv.kernels.tokens import ChunkTokens, GroupTokens, NewTokens, Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore
from packedkv.store.site import RoleSite

T = TypeVar("T")


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


class FitBuffers:
    """Buffers for device-fitted constants, which a cache's first layer allocates for all; fits share a ``launch``."""

    layers = 0
    """Number of layers of the cache, as far as known."""

    def __init__(self) -> None:
        self._left: dict[Hashable, list[Any]] = {}
        self.waiting: list[Callable[[], None]] = []

    def launch(self) -> None:
        """Launch the pending fits; later kernels on the stream read their constants."""
        waiting, self.waiting = self.waiting, []
        for launch in waiting:
            launch()

    def take(self, name: Hashable, make: Callable[[int], list[T]]) -> T:
        """Return memory for one layer; ``make`` allocates it for all layers of a ``name`` at once."""
        left = self._left.get(name)
        if not left:
            left = self._left[name] = make(max(1, self.layers))[::-1]
        one: T = left.pop()
        return one


class Fitter(NamedTuple):
    """Fits constants by kernels, with the numbers of the reference, for the codecs of one module.

    ``fit(codecs, head_dim, samples, buffers)`` returns the constants of the roles that have samples; they are valid
    after ``buffers.launch``. ``program(codecs, head_dim)`` is the program that it launches.
    """

    codecs: dict[Role, Codec]
    fit: Callable[[Mapping[Role, Codec], int, Mapping[Role, FirstTokens], FitBuffers], dict[Role, Fitted]]
    program: Callable[[Mapping[Role, Codec], int], Any]


def fitters(key: Codec, value: Codec) -> list[Fitter]:
    """Return what fits the constants of keys and values on a GPU: ``fit`` and ``fit_program`` of ``kernels/codecs``.

    PyTorch fits those of the other roles.
    """
    by_module: dict[str, Fitter] = {}
    for role, codec in zip(ROLES, (key, value), strict=True):
        if codec.needs == {"tensor"} and (fit := of_module(codec, "fit")) is not None:
            one = by_module.setdefault(type(codec).__module__, Fitter({}, fit, of_module(codec, "fit_program")))
            one.codecs[role] = codec
    return list(by_module.values())


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
    fitters: Sequence[Fitter] = ()
    mean: tuple[Any, ...] | None = None
    """The mean that is subtracted from keys; see ``hold_without``."""

    def __init__(self, key: Codec, value: Codec, head_dim: int, page_tokens: int) -> None:
        self.codecs: dict[Role, Codec] = {"key": key, "value": value}
        self.head_dim, self.page_tokens = head_dim, page_tokens
        self.reading: dict[Role, Constants] = {}
        self.writing: dict[Role, Constants] = {}
        self.fitted: dict[Role, Fitted] = {}
        self.buffers = FitBuffers()
        self._find()

    @abstractmethod
    def _find(self) -> None:
        """Look up readers and encoders of the codecs."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what holds functions, and memory for further layers."""
        left = "readers", "encoders", "fitters", "buffers"
        return {name: x for name, x in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look the functions up again; a copy has memory for fits of its own."""
        self.__dict__.update(state, buffers=FitBuffers())
        self._find()

    def fresh(self) -> Self:
        """Return the same kernels without constants, for another layer; ``buffers`` are shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, reading={}, writing={}, fitted={}, ready=False)
        return other

    def expect_layer(self) -> None:
        """Count one more layer with these kernels; memory for all of them is allocated at once."""
        self.buffers.layers += 1

    def prepare(self, roles: Mapping[Role, RoleSite]) -> None:
        """Set the constants of the roles; existing tensors keep their addresses if shapes allow."""
        for role in ROLES:
            fitted = self.fitted.get(role)
            if fitted is not None and fitted.params is roles[role].params:  # fitted on the device
                self.reading[role], self.writing[role] = fitted.reading, fitted.writing
                continue
            for kernel, sides in ((self.readers[role], self.reading), (self.encoders[role], self.writing)):
                if kernel is None:  # PyTorch encodes it
                    sides[role] = NO_CONSTANTS
                    continue
                state = roles[role]
                assert state.params is not None
                sides[role] = constants(
                    kernel, self.codecs[role], state.site, state.params, sides.get(role), seeded=state.seeded
                )
        self.ready = True

    def fits(self, role: Role) -> bool:
        """Whether a kernel fits a role's constants, with the reference's result."""
        return any(role in fitter.codecs for fitter in self.fitters)

    def fit(self, samples: Mapping[Role, FirstTokens]) -> dict[Role, Fitted]:
        """Fit the constants of roles that it ``fits``; they are valid after ``launch_fits``."""
        fitted: dict[Role, Fitted] = {}
        for fitter in self.fitters:
            if subset := {role: samples[role] for role in fitter.codecs if role in samples}:
                fitted |= fitter.fit(fitter.codecs, self.head_dim, subset, self.buffers)
        self.fitted |= fitted
        return fitted

    def launch_fits(self) -> None:
        """Launch the pending fits of this layer and of the layers that share its launch."""
        self.buffers.launch()

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
        sides = [*self.reading.values(), *self.writing.values()]
        tensors = [x for side in sides for x in (side.tables, side.factor, side.matrix) if x is not None]
        return [*tensors, *(x for x in self.mean or () if isinstance(x, Tensor))]

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
        """Attention of one query token per sequence, ``[B, HQ, 1, D]``; of ``rules.seen`` only the soft cap is used."""

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
