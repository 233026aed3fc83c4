"""One-shot compression of bare K and V tensors: ``compress``, ``Compressed``, ``fake_quant``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from packedkv.checks import check_constants, check_tensor, params_by_role
from packedkv.codec import ROLES, Codec, Params, Payload, Role, Sample, Site
from packedkv.errors import FitError, ShapeError, UnsupportedError
from packedkv.ops.precision import without_modes
from packedkv.registry import get
from packedkv.scheme import KVScheme


@dataclass(frozen=True)
class CompressedRole:
    """Keys or values, packed: payload fields ``[B, H, M, *shape]`` and the dense parts ``[B, H, n, D]``."""

    codec: Codec
    params: Params
    payload: Payload
    sink: Tensor
    window: Tensor

    @without_modes
    def decode(self) -> Tensor:
        """Decode to float32 ``[B, H, N, D]`` in the model basis."""
        x = self.codec.from_code(self.codec.decode(self.payload, self.params), self.params)
        return torch.cat([self.sink.float(), x, self.window.float()], 2)

    def nbytes(self, role: Role, head_dim: int) -> dict[str, int]:
        """Bytes by part."""
        parts: dict[str, int] = {}
        for field in self.codec.layout(head_dim).fields:
            name = f"{role}.{field.part}"
            parts[name] = parts.get(name, 0) + self.payload[field.name].nbytes
        for name in ("sink", "window"):
            if size := getattr(self, name).nbytes:
                parts[f"{role}.{name}"] = size
        return parts


@dataclass(frozen=True)
class Compressed:
    """Packed keys and values of one layer; see ``compress``."""

    scheme: KVScheme
    shape: tuple[int, int, int, int]
    key: CompressedRole
    value: CompressedRole

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"Compressed({str(self.scheme)!r}, {shape}, {sum(self.nbytes.values()):,} bytes)"

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part; the sum is the bytes of ``tensors()``."""
        dim = self.shape[3]
        return {**self.key.nbytes("key", dim), **self.value.nbytes("value", dim)}

    @property
    def effective_bits(self) -> float:
        """All bytes (sinks and windows included) x 8 / elements; 0 for no tokens."""
        b, h, n, d = self.shape
        return sum(self.nbytes.values()) * 8 / (2 * b * h * n * d) if n else 0.0

    def tensors(self) -> Iterator[Tensor]:
        """Every packed or dense tensor."""
        for role in (self.key, self.value):
            yield from (*role.payload.values(), role.sink, role.window)

    @without_modes
    def decode(self) -> tuple[Tensor, Tensor]:
        """Return ``(keys_hat, values_hat)``, float32 ``[B, H, N, D]``, model basis."""
        return self.key.decode(), self.value.decode()


@without_modes
def compress(
    spec: str | KVScheme,
    keys: Tensor,
    values: Tensor,
    *,
    layer: int = 0,
    num_layers: int = 1,
    seed: int = 0,
    params: Mapping[Role, Params] | None = None,
) -> Compressed:
    """Compress K and V of one layer.

    Parameters
    ----------
    spec : str or KVScheme
        E.g. ``"saw-int4"``.
    keys, values : Tensor ``[B, H, N, D]``
        Any floating dtype; finite, |x| <= 65504. float32 is stored as fp16 where the scheme keeps it dense.
    layer, num_layers : int
        Determine the random constants, and whether this is a dense boundary layer. With the default ``num_layers=1`` no
        layer is a boundary layer.
    seed : int
    params : mapping, optional
        Fitted constants by role; default: ``fit`` on the tensors themselves.

    Raises
    ------
    SpecError, ShapeError, ValueError
        Unknown spec; shapes or head_dim that do not fit; NaN, Inf or out-of-range values, with the position.
    UnsupportedError
        A scheme with age tiers.

    Examples
    --------
    >>> import torch
    >>> x = compress("saw-int4", torch.randn(1, 2, 64, 128), torch.randn(1, 2, 64, 128))
    >>> x
    Compressed('saw-int4', 1 x 2 x 64 x 128, 17,408 bytes)
    >>> x.effective_bits
    4.25
    """
    scheme = _bare(get(spec))
    for layer_scheme in scheme.layer_schemes:
        if layer_scheme.recent is not None:
            raise UnsupportedError(
                f"{layer_scheme}: age tiers are of a cache, from which tokens leave the newest tier as others come; "
                f"use LayerCache or cache_for, or recent=none."
            )
    if num_layers > 1:
        scheme = scheme.for_layer(layer, num_layers)
    check_tensor("keys", keys)
    check_tensor("values", values)
    if keys.shape != values.shape:
        raise ShapeError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ; "
            f"pass both as [batch, kv_heads, tokens, head_dim]."
        )
    fitted = params_by_role(params)
    roles = [
        _compress_role(scheme, role, x, layer, seed, fitted.get(role))
        for role, x in zip(ROLES, (keys, values), strict=True)
    ]
    b, h, n, d = keys.shape
    return Compressed(scheme, (b, h, n, d), roles[0], roles[1])


def fake_quant(
    spec: str | KVScheme,
    keys: Tensor,
    values: Tensor,
    *,
    layer: int = 0,
    num_layers: int = 1,
    seed: int = 0,
    params: Mapping[Role, Params] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize with sink = window = 0, like ``compress(...).decode()``.

    Tokens of an unfinished block (token-grouped codecs) stay dense. Arguments, result and errors as ``compress``.
    """
    scheme = _bare(get(spec)).without_windows()
    return compress(scheme, keys, values, layer=layer, num_layers=num_layers, seed=seed, params=params).decode()


def _bare(scheme: KVScheme) -> KVScheme:
    """Raise for schemes that need a model or a cache; without a model ``mean=auto`` is ``none``."""
    for layer in scheme.layer_schemes:
        if layer.mean in ("pre", "post"):
            raise FitError(
                f"{scheme}: mean={layer.mean} encodes keys without their mean, which bare tensors do not keep; only a "
                f"cache does: use cache_for(model, ...), or mean=none."
            )
    return scheme.with_means(["none"] * len(scheme.layer_schemes))


def _compress_role(
    scheme: KVScheme, role: Role, x: Tensor, layer: int, seed: int, params: Params | None
) -> CompressedRole:
    codec = scheme.codec(role).for_dtype(x.dtype)
    site = Site(layer, role, x.shape[1], x.shape[3], seed, x.device)
    codec.layout(site.head_dim)  # refuses a head_dim it cannot take, before any work
    x = x.to(codec.held_dtype(x.dtype))
    if params is None:
        params = codec.fit(site, Sample(x))
    else:
        check_constants(codec, site, params, x.shape[0])
    params = {name: constant.to(x.device) for name, constant in params.items()}
    sink = min(scheme.sink, x.shape[2])
    end = sink + scheme.encoded_tokens(role, x.shape[2])
    # a cache rounds float32 to fp16 in its window first; doing so here makes compress() equal to append()
    body = codec.to_code(x[:, :, sink:end].float(), params)
    payload = codec.encode(body, params)
    return CompressedRole(codec, params, payload, x[:, :, :sink].clone(), x[:, :, end:].clone())
