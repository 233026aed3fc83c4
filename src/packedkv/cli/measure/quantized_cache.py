"""Other libraries' caches as specs of ``packedkv eval``: transformers' QuantizedCache on optimum-quanto and hqq.

The library's own code quantizes and dequantizes, with three changes around it:

- ``prefill="decoded"``: attention reads what the cache holds after the call. By itself QuantizedCache hands out the
  fresh K and V in the call that fills it; that is what ``prefill="exact"`` measures.
- Tokens are padded with copies of the last one where a tensor's groups do not fill whole bytes, which hqq cannot read
  back at 2 bits. The copies are dropped after reading, and their bytes are counted.
- Bytes are those of every tensor held; float32 counts as 16 bits an element, as for the uncompressed model.

hqq refines its zeros over all groups of a call, so its numbers depend a little on which sequences share a call.
"""

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from packedkv.cli.measure.caches import Prefill
from packedkv.errors import SpecError, UnsupportedError, nearest
from packedkv.registry import get
from packedkv.scheme import KVScheme

BITS = {"quanto": (4, 2), "hqq": (8, 4, 2)}
"""hqq's other widths are left out: 3 bits cannot be read back, and 1 bit is worse than storing nothing."""
PACKAGES = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq.core.quantize", "hqq")}
"""Module to import, and package to install."""
AXIS = {"quanto": 0, "hqq": 1}
OPTIONS = {"bits": 4, "group": 64, "residual": 128}


@dataclass(frozen=True)
class QuantizedCacheSpec:
    """One setting of a cache of transformers.

    ``group`` elements share a scale and a zero; the ``residual`` newest tokens are kept unquantized until there are so
    many.

    >>> str(QuantizedCacheSpec("hqq", 2, residual=32)), QuantizedCacheSpec("hqq", 2).key_bits(128)
    ('hqq-2:residual=32', 2.5)
    """

    backend: str
    bits: int = 4
    group: int = 64
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in BITS[self.backend]:
            offered = " or ".join(f"{self.backend}-{bits}" for bits in BITS[self.backend])
            raise SpecError(f"{self.backend}: bits={self.bits} is not offered; use {offered}.")
        for name in ("group", "residual"):
            if getattr(self, name) < 1:
                raise SpecError(f"{self.backend}: {name}={getattr(self, name)} is not allowed; use a positive number.")

    def __str__(self) -> str:
        given = [
            f"{name}={getattr(self, name)}" for name in ("group", "residual") if getattr(self, name) != OPTIONS[name]
        ]
        return f"{self.backend}-{self.bits}" + (f":{','.join(given)}" if given else "")

    def key_bits(self, head_dim: int) -> float:
        """Bits of a quantized element: the code, and a 16-bit scale and zero of its group."""
        return self.bits + 32 / self.group

    value_bits = key_bits

    def check(self) -> None:
        """Validate, before a model is loaded, that the libraries are installed."""
        for module, package in (("transformers", "packedkv[transformers]"), PACKAGES[self.backend]):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise UnsupportedError(
                    f"{self} is transformers' QuantizedCache on {self.backend}, and {module} cannot be imported "
                    f"({error}); run: pip install '{package}'."
                ) from error

    @property
    def version(self) -> str:
        """Version of the library."""
        return importlib.metadata.version(PACKAGES[self.backend][1])


def quantized_cache_of(spec: object) -> QuantizedCacheSpec | None:
    """Read a spec that names a cache of this module; None if it names none.

    >>> quantized_cache_of("hf-quanto:bits=2,residual=64"), quantized_cache_of("saw-int4")
    (QuantizedCacheSpec(backend='quanto', bits=2, group=64, residual=64), None)
    """
    if isinstance(spec, QuantizedCacheSpec) or not isinstance(spec, str):
        return spec if isinstance(spec, QuantizedCacheSpec) else None
    base, _, tail = spec.strip().partition(":")
    backend, dash, width = base.removeprefix("hf-").partition("-")
    if backend not in BITS:
        return None
    given: dict[str, str] = {"bits": width} if dash else {}
    for item in filter(None, tail.split(",")):
        key, equals, text = (part.strip() for part in item.partition("="))
        if key not in OPTIONS:
            raise SpecError(
                f"{spec!r}: {backend} has no option {key!r}.{nearest(key, OPTIONS)} Its options: {', '.join(OPTIONS)}."
            )
        if not equals or key in given:
            raise SpecError(f"{spec!r}: option {key!r} {'is given twice' if equals else 'has no value'}.")
        given[key] = text
    if wrong := [f"{key}={text}" for key, text in given.items() if not text.isdigit()]:
        raise SpecError(f"{spec!r}: {', '.join(wrong)} is not allowed; use whole numbers.")
    return QuantizedCacheSpec(backend, **{key: int(text) for key, text in given.items()})


def scheme_of(spec: str | KVScheme | QuantizedCacheSpec) -> KVScheme | QuantizedCacheSpec:
    """Return the scheme, or quantized cache, of a spec."""
    return quantized_cache_of(spec) or get(spec)  # type: ignore[arg-type]  # what is a QuantizedCacheSpec is one


def check_unlike(schemes: Sequence[object], purpose: str) -> None:
    """Raise ``SpecError`` for an empty list of schemes or a repeated one."""
    if not schemes:
        raise SpecError(f"no spec to {purpose}; pass at least one, e.g. saw-int4.")
    names = [str(scheme) for scheme in schemes]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise SpecError(f"given twice: {', '.join(twice)}; name each spec once.")


class QuantizedCacheMaker:
    """Makes empty caches of one ``QuantizedCacheSpec`` for one model, as ``caches.CacheMaker`` does of a scheme."""

    def __init__(self, model: Any, spec: QuantizedCacheSpec, *, prefill: Prefill = "decoded") -> None:
        self.model, self.scheme, self.prefill = model, spec, prefill

    @contextmanager
    def attending(self) -> Iterator[Callable[[], Any]]:
        """Yield the function that makes a cache; the model's attention is not changed."""
        yield self.new_cache

    def new_cache(self) -> Any:
        """Make an empty cache."""
        self.scheme.check()
        from transformers import QuantizedCache

        spec, axis = self.scheme, AXIS[self.scheme.backend]
        options = spec.bits, axis, axis, spec.group, spec.residual
        try:
            cache = QuantizedCache(spec.backend, self.model.config, *options)
        except (ValueError, ImportError) as error:
            raise UnsupportedError(f"{spec}: transformers refuses this cache for the model: {error}") from error
        stored = _layer_class(spec.backend)
        cache.layers = [stored(*options) for _ in cache.layers]
        for layer in cache.layers:
            layer.hands_out_stored = self.prefill == "decoded"
        return cache

    def held(self, cache: Any) -> tuple[int, int]:
        """Bytes and elements of one sequence."""
        layers = [layer for layer in cache.layers if layer.is_initialized]
        batch = max((layer.shape[0] for layer in layers), default=1)
        tensors = [x for layer in layers for x in tensors_of(layer.everything())]
        nbytes = sum(x.numel() * (2 if x.dtype == torch.float32 else x.dtype.itemsize) for x in tensors)
        elements = sum(2 * math.prod(layer.shape) * layer.get_seq_length() for layer in layers)
        return nbytes // batch, elements // batch


def tensors_of(content: Any) -> Iterator[Tensor]:
    """Every plain tensor in what a library holds: tensors made of others, tuples, dictionaries."""
    if isinstance(content, Tensor):
        if hasattr(content, "__tensor_flatten__"):
            for name in content.__tensor_flatten__()[0]:
                yield from tensors_of(getattr(content, name))
        else:
            yield content
    elif isinstance(content, dict):
        yield from tensors_of(list(content.values()))
    elif isinstance(content, Sequence) and not isinstance(content, str):
        for one in content:
            yield from tensors_of(one)


@lru_cache
def _layer_class(backend: str) -> Any:
    """Subclass of transformers' layer for a backend, with the changes that the module's docstring describes."""
    from transformers import cache_utils

    base: Any = {"quanto": cache_utils.QuantoQuantizedLayer, "hqq": cache_utils.HQQQuantizedLayer}[backend]

    class Stored(base):  # type: ignore[misc]  # its base is known once transformers is imported
        """A layer that can return its decoded content, and whose groups fill whole bytes."""

        hands_out_stored = False
        shape: tuple[int, int, int] = (0, 0, 0)  # batch, heads, channels

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            batch, heads, _, dim = key_states.shape
            self.shape = batch, heads, dim
            fresh: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            if not self.hands_out_stored:
                return fresh
            return self._whole(self._quantized_keys, self.keys), self._whole(self._quantized_values, self.values)

        def everything(self) -> tuple[Any, ...]:
            """What is held: two quantized tensors and the residual tokens."""
            return self._quantized_keys, self._quantized_values, self.keys, self.values

        def _whole(self, quantized: Any, residual: Tensor) -> Tensor:
            decoded = self._dequantize(quantized)
            return torch.cat([decoded, residual], -2) if residual.dim() == 4 else decoded

        def _quantize(self, tensor: Tensor, axis: int) -> Any:
            tokens, unit = tensor.shape[-2], self.q_group_size * (8 // self.nbits)
            per_token = tensor.numel() // tokens
            missing = -tokens % (unit // math.gcd(unit, per_token))
            if missing:
                tensor = torch.cat([tensor, tensor[..., -1:, :].expand(-1, -1, missing, -1)], -2).contiguous()
            return super()._quantize(tensor, axis), tokens

        def _dequantize(self, q_tensor: Any) -> Tensor:
            quantized, tokens = q_tensor
            decoded: Tensor = super()._dequantize(quantized)
            return decoded[..., :tokens, :]

    return Stored
