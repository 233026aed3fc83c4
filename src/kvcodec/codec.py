"""The codec interface: what a codec implements, and what it must guarantee.

A codec maps K or V of one site (layer, role) to packed bytes and back::

    model basis --to_code--> code basis --encode--> Payload --decode--> code basis --from_code--> model basis

- **Config is the object**: a frozen dataclass of plain values, so equality, hash, repr and JSON need no code.
- **Everything learned or drawn lives in Params** (``fit``), constant afterwards: signs, codebooks, thresholds.
- **encode is pure and append-invariant**: blocks encoded one by one equal blocks encoded together; a slice of the
  batch equals the batch's slice. Nothing may depend on the rest of the call.
- **Payload is exactly the layout**: the fields of ``layout(D)``, each ``[B, H, M, *field.shape]`` with
  ``M = N / block_tokens``.
- **decode returns float32 in the code basis**; ``from_code`` is linear, so for values it can be applied once to the
  attention output.

Tensors are ``[B, H, N, D]`` as Hugging Face caches are; B batch, H KV heads, N tokens, D head_dim.
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvcodec.errors import FitError, ShapeError
from kvcodec.layout import Field, Layout

Role = Literal["key", "value"]
ROLES: tuple[Role, Role] = ("key", "value")
Params = Mapping[str, Tensor]
"""Constants of a site. Leading dimension 1, or B when fitted on each sequence's prefill."""
Payload = Mapping[str, Tensor]
"""The packed bits: exactly ``layout(D).fields``, each ``[B, H, M, *field.shape]``."""

FP16_MAX = 65504.0

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """Where a codec works: one per (layer, role).

    Parameters
    ----------
    layer : int
    role : {"key", "value"}
    num_heads : int
        KV heads H.
    head_dim : int
    seed : int
        Every random constant derives from (seed, layer, role, head), never from global state.
    device : torch.device
    first_head : int
        The model's number of head 0 here: above 0 where tensor parallelism gives a process some of the heads.
    """

    layer: int
    role: Role
    num_heads: int
    head_dim: int
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    first_head: int = 0

    def generator(self, head: int, stream: int = 0) -> torch.Generator:
        """Return a CPU generator for one head; ``stream`` separates independent draws of a codec."""
        mixed = self.seed
        for part in (self.layer, 0 if self.role == "key" else 1, self.first_head + head, stream):
            mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
        return torch.Generator().manual_seed(mixed)


@dataclass(frozen=True)
class Codec(ABC):
    """A map from K or V to bytes and back; see the module's text for what it must guarantee."""

    @property
    def block_tokens(self) -> int:
        """Tokens per block of payload; G when groups run along tokens."""
        return 1

    @property
    def needs_sample(self) -> bool:
        """Whether ``fit`` must see data (a calibration file, or the prefill)."""
        return False

    @property
    def fit_tokens(self) -> int:
        """Tokens on which ``fit`` wants to see constants fitted, where ``needs_sample``.

        1: those of the first call, however many. Above 1: exactly so many; a cache holds tokens dense until it has
        them, fits, and then encodes, so that how the calls were split does not show in the bytes.
        """
        return 1

    @property
    def fit_every(self) -> int:
        """Which of these tokens ``fit`` gets: every, every second, and so on, from the first. Needs ``fit_tokens``."""
        return 1

    @property
    def without_mean(self) -> bool:
        """Whether ``mean=auto`` encodes keys without their mean in every model, not only where biases break it."""
        return False

    @property
    def needs_queries(self) -> bool:
        """Whether the constants need the model's queries: only ``calibrate`` has them, a prefill does not."""
        return False

    @property
    def query_error(self) -> float:
        """Largest relative error of a component of ``query_to_code``; 0: none.

        If above 0, attention rounds queries as well, and ``to_code`` must be orthogonal.
        """
        return 0.0

    @property
    def searches(self) -> bool:
        """Whether ``encode`` tries several scales (``ops/scale_search``), which no kernel does."""
        return False

    def for_dtype(self, dtype: torch.dtype) -> "Codec":
        """Return the codec for input of ``dtype``; itself, unless its layout depends on the dtype (``Dense``)."""
        return self

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype to which input of ``dtype`` is rounded before ``encode``; sink and window hold it as well."""
        return storage_dtype(dtype)

    @abstractmethod
    def layout(self, head_dim: int) -> Layout:
        """Fields of ONE block of ONE head; bytes and bits follow from it.

        Raises
        ------
        ShapeError
            If this codec cannot take ``head_dim``; the text names what it can take.
        """

    def fit(self, site: Site, sample: Tensor | None = None) -> Params:
        """Return the site's constants. ``sample`` is ``[B, H, N, D]`` in the model basis, or None."""
        return {}

    def fit_with(self, site: Site, sample: Tensor, energy: Tensor) -> Params:
        """Return what ``fit`` does, knowing how loud queries are; by default that is left aside.

        Parameters
        ----------
        site : Site
        sample : Tensor ``[B, H, N, D]``
        energy : Tensor ``[1 or B, H, D]``
            Mean squares of the channels of each KV head's queries, before or after RoPE.
        """
        return self.fit(site, sample)

    def calibrate(self, site: Site, sample: Tensor, queries: Tensor) -> Params:
        """Return the site's constants from a model run over a text (``kvcodec fit``); by default what ``fit`` gives.

        Parameters
        ----------
        site : Site
        sample : Tensor ``[B, H, N, D]``
            Keys or values of the site, model basis.
        queries : Tensor ``[B, HQ, N, D]``
            The layer's queries, model basis (after RoPE); query head i belongs to KV head ``i // (HQ // H)``.
        """
        return self.fit(site, sample if self.needs_sample else None)

    def settle(self, fitted: Sequence[Params]) -> list[Params]:
        """Decide across layers: called once with the constants that ``calibrate`` gave every layer, in order."""
        return list(fitted)

    def to_code(self, x: Float[Tensor, "B H N D"], params: Params) -> Float[Tensor, "B H N D"]:
        """Model basis -> code basis; linear and invertible."""
        return x

    def query_to_code(self, q: Float[Tensor, "B H N D"], params: Params) -> Float[Tensor, "B H N D"]:
        """Dual map for queries: ``<query_to_code(q), to_code(k)> == <q, k>``.

        The caller folds the query heads of one KV head into N, so H is the number of KV heads.
        Override when ``to_code`` is not orthogonal.
        """
        return self.to_code(q, params)

    def from_code(self, x: Float[Tensor, "B H N D"], params: Params) -> Float[Tensor, "B H N D"]:
        """Inverse of ``to_code``."""
        return x

    @abstractmethod
    def encode(self, x: Float[Tensor, "B H N D"], params: Params) -> Payload:
        """Pack ``x`` (code basis, float32, N a multiple of ``block_tokens``) into the layout's fields."""

    @abstractmethod
    def decode(self, payload: Payload, params: Params) -> Float[Tensor, "B H N D"]:
        """Unpack to float32 in the code basis."""

    def config(self) -> dict[str, Any]:
        """Plain values of this codec, for JSON: ``{"codec": class name, **options}``."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        inner = {k: v.config() if isinstance(v, Codec) else v for k, v in own.items()}
        return {"codec": type(self).__name__, **inner}


DenseDtype = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Dense(Codec):
    """The identity in 16 bit: baseline of every table, and the codec of layers that a scheme keeps dense.

    Bytes of a token: D x 2. Bits: 16. A cache fixes the dtype when it first sees the model's tensors (``for_dtype``):
    bf16 stays bf16, float32 is held as fp16.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"} or None
        None: the 16-bit dtype of the input, fp16 for float32 input.
    """

    dtype: DenseDtype | None = None

    def for_dtype(self, dtype: torch.dtype) -> "Dense":
        """Fix the stored dtype for input of ``dtype``."""
        name: DenseDtype = "bfloat16" if dtype == torch.bfloat16 else "float16"
        return self if self.dtype else replace(self, dtype=name)

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of ``data``, so that nothing is rounded before ``encode``."""
        held = getattr(torch, self.for_dtype(dtype).dtype or "float16")
        assert isinstance(held, torch.dtype)
        return held

    def layout(self, head_dim: int) -> Layout:
        """One field, ``data [D]``."""
        field = Field("data", self.dtype or "float16", (head_dim,), "dense")
        return Layout(head_dim, 1, (field,), nominal_bits=field.nbytes * 8 / head_dim)

    def encode(self, x: Tensor, params: Params) -> Payload:
        """Cast."""
        return {"data": x.to(getattr(torch, self.dtype or "float16"))}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        """Cast back to float32."""
        return payload["data"].float()


@dataclass
class _Held:
    value: Any
    tensors: tuple[Tensor, ...]
    asked: int
    """When it was last requested."""


def _values(constants: Params) -> Iterable[Tensor]:
    return constants.values()


class Shared:
    """An LRU store of constants: built once in a process, shared by all caches, never written to.

    The least recently used entries are dropped while all tensors together exceed a limit.

    Parameters
    ----------
    limit : int
        Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Hashable, _Held] = {}
        self._uses: Counter[Tensor] = Counter()  # one tensor may be held by several: its bytes count once
        self._bytes = self._asked = 0
        self._lock = threading.Lock()

    def get(
        self,
        key: Hashable,
        device: torch.device,
        build: Callable[[], T],
        tensors: Callable[[T], Iterable[Tensor]] = _values,  # type: ignore[assignment]  # of Params
    ) -> T:
        """Return the entry of this key; ``build`` makes it if it is missing.

        Parameters
        ----------
        key
            Everything that the entry depends on, the device included.
        device : torch.device
            Where its tensors are.
        build : callable
        tensors : callable
            Returns the tensors of an entry; by default an entry is a mapping to tensors.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return build()  # its memory belongs to the graph, and every replay overwrites it
        with self._lock:
            if (held := self._held.get(key)) is not None:  # one look-up: hashing and comparing a key is slow
                held.asked = self._asked = self._asked + 1
                found: T = held.value
                return found
        with torch.inference_mode(False), torch.no_grad():  # inference tensors are of no use outside of it
            built = build()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will read them
        with self._lock:
            self._asked += 1
            if key in self._held:  # another thread was faster
                other: T = self._held[key].value
                return other
            self._held[key] = _Held(built, tuple(tensors(built)), self._asked)
            for tensor in self._held[key].tensors:
                self._bytes += 0 if self._uses[tensor] else tensor.nbytes
                self._uses[tensor] += 1
            while self._bytes > self.limit and len(self._held) > 1:
                self._forget(min(self._held, key=lambda one: self._held[one].asked))
            return built

    def _forget(self, key: Hashable) -> None:
        for tensor in self._held.pop(key).tensors:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                del self._uses[tensor]
                self._bytes -= tensor.nbytes

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._held.clear()
            self._uses.clear()
            self._bytes = 0


SHARED = Shared(512 << 20)
"""Of this process: constants that codecs draw (``drawn``), and the kernel tables made from them."""


def drawn(codec: Codec, site: Site) -> Params:
    """Constants of a codec that needs no sample: ``codec.fit(site)``, the same tensors every time."""
    return SHARED.get(("drawn", codec, site), site.device, lambda: codec.fit(site))


def roundtrip(codec: Codec, x: Tensor, params: Params) -> Tensor:
    """Encode and decode ``x [B, H, N, D]`` in the model basis; float32, N a multiple of the block."""
    payload = codec.encode(codec.to_code(x.float(), params), params)
    return codec.from_code(codec.decode(payload, params), params)


def largest(x: Tensor) -> Tensor:
    """Largest magnitude of ``x``, without synchronising: 0-d on its device, NaN if ``x`` has one; 0 if it is empty."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)  # one launch
    low, high = x.detach().aminmax()
    return torch.maximum(-low, high)


def largest_of(xs: Sequence[Tensor]) -> Tensor:
    """``largest`` of several tensors of one device, none of them empty: a few launches for all."""
    return torch.nn.utils.get_total_norm(xs, torch.inf)


def check_tensor(name: str, x: Tensor) -> None:
    """Validate that codecs can store a tensor.

    Raises
    ------
    ShapeError
        If ``x`` is not a floating ``[B, H, N, D]`` tensor.
    ValueError
        If ``x`` holds NaN, Inf, or a magnitude above fp16's 65504; names the tensor and the first position.
    """
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        came = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{name}: got {came}; expected a floating point tensor [batch, kv_heads, tokens, head_dim].")
    if x.numel() == 0:
        return
    if float(largest(x)) <= FP16_MAX:  # false for NaN
        return
    bad = (~(x.abs().float() <= FP16_MAX)).nonzero()[0].tolist()
    value = x[tuple(bad)].item()
    what = "is not finite" if value != value or abs(value) == float("inf") else "is above 65504"
    raise ValueError(
        f"{name}[batch={bad[0]}, head={bad[1]}, token={bad[2]}, channel={bad[3]}] = {value} {what}; "
        f"codecs store finite values within the fp16 range. Check the model's dtype (fp16 overflow?) "
        f"or the attention mask of that token."
    )


def check_tensors(keys: Tensor, values: Tensor, *more: Tensor) -> list[float]:
    """``check_tensor`` of both, by one synchronisation; also returns the numbers of ``more``, tensors ``[1]``."""
    both = (keys, values)
    fit = all(isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() and x.numel() for x in both)
    if fit and keys.device.type == values.device.type == "cpu":  # numbers, not tensors: much faster for one token
        if all(-FP16_MAX <= bound.item() <= FP16_MAX for x in both for bound in x.aminmax()):  # false for NaN
            return [x.item() for x in more]
    elif fit and keys.device == values.device:
        key, value, *told = torch.cat([*(largest(x).float().view(1) for x in both), *more]).tolist()
        if key <= FP16_MAX and value <= FP16_MAX:  # false for NaN
            return told
    check_tensor("keys", keys)
    check_tensor("values", values)
    return [x.item() for x in more]


def check_fitted(method: str, site: Site, given: Mapping[str, Tensor]) -> None:
    """Validate what a ``calibrate`` fits on, by name: tensors ``[B, H or HQ, N, D]`` of at least one token.

    Raises
    ------
    FitError
    """
    for name, x in given.items():
        if x.ndim != 4 or not x.numel() or x.shape[-1] != site.head_dim:
            raise FitError(
                f"{method}: got {name} {tuple(x.shape)} for head_dim={site.head_dim}; a fit takes at least one token "
                f"[batch, heads, tokens, head_dim] of that head_dim. Calibrate on a longer text."
            )


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sinks, windows and dense layers are held: 16-bit inputs as they are, float32 as fp16."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
