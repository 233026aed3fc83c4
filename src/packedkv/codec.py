"""The codec interface: what a codec implements, and what it must guarantee."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import torch
from jaxtyping import Float
from torch import Tensor

from packedkv.errors import ShapeError, SpecError
from packedkv.layout import Field, Layout, PageLayout, page_tokens_for

Role = Literal["key", "value"]
ROLES: tuple[Role, Role] = ("key", "value")
Params = Mapping[str, Tensor]
"""Constants of a site. Leading dimension 1, or B when fitted on each sequence's prefill."""
Payload = Mapping[str, Tensor]
"""The packed bits: exactly ``layout(D).fields``, each ``[B, H, M, *field.shape]``."""

FP16_MAX = 65504.0


@dataclass(frozen=True)
class Site:
    """Place of a codec: one per (layer, role); H KV heads of ``head_dim`` channels, at least 1 of both (ShapeError).

    Parameters
    ----------
    seed : int
        Every random constant derives from (seed, layer, role, head), never from global state.
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

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.head_dim < 1:
            raise ShapeError(
                f"layer {self.layer}: {self.num_heads} KV heads of head_dim {self.head_dim}; expected at least 1 of "
                f"both: pass keys and values as [batch, kv_heads, tokens, head_dim]."
            )

    def generator(self, head: int, stream: int = 0) -> torch.Generator:
        """Return a CPU generator for one head; ``stream`` separates independent samples of a codec."""
        mixed = self.seed
        for part in (self.layer, 0 if self.role == "key" else 1, self.first_head + head, stream):
            mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
        return torch.Generator().manual_seed(mixed)


LIMIT = 2.0**24
"""Beyond every key, value, mean, scale or norm."""
LARGEST = torch.finfo(torch.float32).max
LEAST = 2.0**-149
"""Smallest float32 above 0."""


@dataclass(frozen=True)
class Constant:
    """Declaration of one constant of a site."""

    shape: tuple[int, ...]  # behind the leading dimension
    dtype: torch.dtype = torch.float32
    low: float = -LARGEST  # smallest and largest number, both included; NaN lies in no range
    high: float = LARGEST
    rule: Callable[[Tensor], bool] | None = None  # a further rule for a tensor [B, *shape] of that range
    text: str = ""  # the rule in words
    each: bool = False  # whether a prefill gives one for each sequence: the leading dimension is 1 or the batch, else 1

    @classmethod
    def sizes(cls, *shape: int) -> "Constant":
        """Divisors of the channels of each sequence: float32 from ``LEAST`` to ``FP16_MAX``."""
        return cls(shape, low=LEAST, high=FP16_MAX, each=True)

    @classmethod
    def order(cls, *shape: int, each: bool = False) -> "Constant":
        """Numbers of channels, int16: each of 0 to D - 1 once in a row."""

        def whole(x: Tensor) -> bool:
            return bool((x.sort(-1).values == torch.arange(shape[-1], device=x.device)).all())

        return cls(shape, torch.int16, 0, shape[-1] - 1, whole, f"each of 0..{shape[-1] - 1} once in a row", each)


@dataclass(frozen=True)
class Sample:
    """Data that a site's constants are fitted on, as far as it exists.

    Parameters
    ----------
    tensor : Tensor ``[B, H, N, D]``, optional
        Keys or values of the site, model basis.
    queries : Tensor ``[B, HQ, N, D]``, optional
        Queries of the layer, model basis (after RoPE); query head i belongs to KV head ``i // (HQ // H)``. They mark a
        calibration on a text, which fits all sequences together.
    gradients : Tensor ``[B, H, N, D]``, optional
        Of the model's loss by ``tensor``, with labels sampled from the model's own distribution; in any unit.
    energy : Tensor ``[1 or B, H, D]``, optional
        Mean squares of the channels of each KV head's queries, before or after RoPE; for keys, where no queries exist.
    """

    tensor: Tensor | None = None
    queries: Tensor | None = None
    gradients: Tensor | None = None
    energy: Tensor | None = None


NO_SAMPLE = Sample()
Part = Literal["tensor", "queries", "gradients"]

Constants = Mapping[str, Constant]
"""Declarations of a site's constants, by name."""


def one_of(*allowed: int, default: int) -> Any:
    """Declare a codec's option that takes a few whole numbers; of other options a ``Literal`` type names the values."""
    return field(default=default, metadata={"allowed": allowed})


@dataclass(frozen=True)
class Codec(ABC):
    """A map from K or V ``[B, H, N, D]`` of one site (layer, role) to packed bytes and back::

        model basis --to_code--> code basis --encode--> Payload --decode--> code basis --from_code--> model basis

    - A codec is a frozen dataclass of plain values. Everything fitted or random is in Params (``fit``), declared by
      ``constants``, and never changes afterwards.
    - ``encode`` is pure and append-invariant: blocks encoded one by one equal blocks encoded together; a slice of the
      batch equals the batch's slice.
    - ``from_code`` is linear, so for values it can be applied once to the attention output.
    """

    def __post_init__(self) -> None:
        """Raise SpecError for an option whose value is not one of those declared."""
        for option in fields(self):
            declared = get_args(option.type) if get_origin(option.type) is Literal else None
            allowed, came = option.metadata.get("allowed", declared), getattr(self, option.name)
            if allowed is not None and came not in allowed:
                *first, last = map(str, allowed)
                values = f"{', '.join(first)} or {last}" if first else last
                raise SpecError(f"{type(self).__name__}: {option.name}={came!r} is not allowed; use {values}.")

    @property
    def block_tokens(self) -> int:
        """Tokens per block of payload; G when groups run along tokens."""
        return 1

    @property
    def needs(self) -> frozenset[Part]:
        """Parts of a ``Sample`` that ``fit`` depends on.

        ``tensor``: a cache fits the constants on a sequence's first tokens, or ``packedkv fit`` on a text. ``queries``:
        only ``packedkv fit`` has them. ``gradients``: ``packedkv fit`` also runs the model backwards, where it can.
        """
        return frozenset()

    @property
    def fit_tokens(self) -> int:
        """How many first tokens a cache fits the constants on.

        1: the tokens of the first call. Above 1: exactly so many; a cache keeps tokens dense until it has them. The
        bytes then do not depend on how the calls were split.
        """
        return 1

    @property
    def fit_every(self) -> int:
        """Stride of these tokens, with ``fit_tokens`` above 1."""
        return 1

    @property
    def without_mean(self) -> bool:
        """Whether ``mean=auto`` encodes keys without their mean in every model, not only where biases are large."""
        return False

    @property
    def query_error(self) -> float:
        """Largest relative error of a component of ``query_to_code``; 0: none.

        If above 0, attention rounds queries as well, and ``to_code`` must be orthogonal.
        """
        return 0.0

    @property
    def searches(self) -> bool:
        """Whether ``encode`` tries several scales (an option ``scale=search``), which no kernel does."""
        return getattr(self, "scale", "") == "search"

    def for_dtype(self, dtype: torch.dtype) -> "Codec":
        """Return the codec for input of ``dtype``; itself, unless its layout depends on the dtype (``Dense``)."""
        return self

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype to which input of ``dtype`` is rounded before ``encode``; sink and window hold it as well."""
        return storage_dtype(dtype)

    @abstractmethod
    def layout(self, head_dim: int) -> Layout:
        """Fields of ONE block of ONE head; bytes and bits follow from it.

        Raises ShapeError if the codec cannot take ``head_dim``; the text names a head_dim that it can take.
        """

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Return the site's constants; raises FitError where the sample lacks a part that is needed.

        The leading dimension is 1; for constants fitted on first tokens alone (``sample.queries`` is None) it is B.
        """
        return {}

    def settle(self, fitted: Sequence[Params]) -> list[Params]:
        """Revise the constants of all layers together: ``packedkv fit`` calls it once per role, layers in order."""
        return list(fitted)

    def constants(self, site: Site) -> Constants:
        """Declare the constants that ``fit`` and ``settle`` return; constants from a file are compared with them.

        By default names, shapes and dtypes are those of a fit on random numbers. Declare ranges where a constant is an
        index, a width or a divisor: kernels take constants as they are.
        """
        x = torch.randn(2, site.num_heads, max(self.fit_tokens, 256), site.head_dim, generator=site.generator(0))
        fitted = self.fit(site, Sample(**dict.fromkeys(self.needs, x)))
        return {
            name: Constant(tuple(value.shape[1:]), value.dtype, each=value.shape[:1] == (2,))
            for name, value in self.settle([fitted])[0].items()
        }

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
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        inner = {k: v.config() if isinstance(v, Codec) else v for k, v in options.items()}
        return {"codec": type(self).__name__, **inner}


DenseDtype = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Dense(Codec):
    """The identity in 16 bit: baseline of every table, and the codec of layers that a scheme keeps dense.

    A cache fixes the dtype when it first sees the model's tensors (``for_dtype``): bf16 stays bf16, float32 is stored
    as fp16.
    """

    dtype: DenseDtype | None = None

    def for_dtype(self, dtype: torch.dtype) -> "Dense":
        """Fix the stored dtype for input of ``dtype``."""
        name: DenseDtype = "bfloat16" if dtype == torch.bfloat16 else "float16"
        return self if self.dtype else replace(self, dtype=name)

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of ``data``, so that nothing is rounded before ``encode``."""
        dense = getattr(torch, self.for_dtype(dtype).dtype or "float16")
        assert isinstance(dense, torch.dtype)
        return dense

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


@lru_cache(maxsize=256)  # called for every layer of every cache
def page_layout(key: Codec, value: Codec, key_dim: int, value_dim: int, page_tokens: int | None = None) -> PageLayout:
    """Byte map of a page of two codecs; ``page_tokens`` defaults to 64, rounded up to whole blocks."""
    layouts = key.layout(key_dim), value.layout(value_dim)
    return PageLayout(*layouts, page_tokens or page_tokens_for(*layouts))


def roundtrip(codec: Codec, x: Tensor, params: Params) -> Tensor:
    """Encode and decode ``x [B, H, N, D]`` in the model basis; float32, N a multiple of the block."""
    payload = codec.encode(codec.to_code(x.float(), params), params)
    return codec.from_code(codec.decode(payload, params), params)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``; decoded numbers beyond the range of fp16 become its largest, not Inf."""
    return (x.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else x).to(dtype)


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sinks, windows and dense layers are stored: 16-bit inputs as they are, float32 as fp16."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
