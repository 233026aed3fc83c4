"""Outlier probe: does the chosen codec survive the outlier channels of this model's keys?

On a GPU only a sample is kept while a layer is filled. ``settle`` then measures all layers with one synchronisation.
Kernels encode and unpack the samples of all layers that they serve in one launch each, as the heads of one layer.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codec import FP16_MAX, Codec, Dense, Sample, Site, roundtrip, storage_dtype
from packedkv.errors import BrokenPresetError, PackedKVWarning, ShapeError
from packedkv.kernels.engine import Engine
from packedkv.key_bias import KeyBiases, Probe
from packedkv.ops.precision import without_modes
from packedkv.registry import get
from packedkv.scheme import KVScheme
from packedkv.store.site import Removed

LIMIT = 0.5
"""channel_error from which a codec counts as broken: half of the channels keep less than two thirds of their signal."""
OUTLIERS = 10.0
"""outlier_ratio from which a broken codec is refused: keys without outlier channels have up to 6, others hundreds."""
SAMPLE_TOKENS = 256
FEWEST_TOKENS = 16
VIEW = 4
"""A sample is kept as a view if the memory behind it is at most this many times its size; otherwise as a copy."""
CANDIDATES = ("saw-int4", "kivi-tq-4", "kivi-4", "octopus-4", "int-8", "fp8")
"""Presets tried, in order of size, when the chosen one breaks."""


@dataclass(frozen=True)
class KeyProbe:
    """What the probe found in one layer."""

    layer: int
    outlier_ratio: float
    channel_error: float

    @property
    def broken(self) -> bool:
        """Whether the codec fails on these keys."""
        return self.channel_error >= LIMIT


def synchronizes(x: Tensor) -> bool:
    """Whether reading a number of ``x`` synchronises with a GPU."""
    return x.is_cuda


def outlier_ratio(keys: Tensor, layers: int = 1) -> Tensor:
    """Ratio of the largest to the median norm of four neighbouring channels of ``keys [B, H, N, D]``.

    Returns one number for each of ``layers`` along the heads.
    """
    norms = keys.float().unflatten(-1, (-1, 4)).norm(dim=-1)
    norms = norms.unflatten(1, (layers, -1)).transpose(0, 1).flatten(1)
    return norms.amax(1) / norms.median(1).values.clamp_min(1e-12)


def channel_error(keys: Tensor, decoded: Tensor, layers: int = 1) -> Tensor:
    """Relative error of the median channel, worst head, of each of ``layers`` along the heads of ``[B, H, N, D]``.

    0: lossless; 1: the differences between keys are lost. Both are centred over the tokens, because softmax ignores a
    constant. The median, because outlier channels survive and have most of the variance.
    """
    keys, decoded = keys.float(), decoded.float()
    signal = keys - keys.mean(2, keepdim=True)
    error = decoded - keys
    error = error - error.mean(2, keepdim=True)
    ratio = error.pow(2).sum((0, 2)) / signal.pow(2).sum((0, 2)).clamp_min(1e-12)
    return ratio.median(-1).values.view(layers, -1).amax(1)


@dataclass
class _Sample:
    """The newest keys ``[1, H, n, D]`` that filled a layer, what is subtracted from them, and the measured figures."""

    layer: int
    cache: LayerCache
    rows: Tensor
    removed: Removed | None
    figures: Tensor | None = None

    def keys(self) -> Tensor:
        """Return what is encoded of them."""
        return self.rows if self.removed is None else self.removed.from_keys(self.rows)


class OutlierProbe:
    """Watches the first prefill of a cache; warns once, or refuses.

    ``action``: what to do where the scheme that the user chose breaks on outlier channels. ``biases``: what is known
    from the weights. ``starts``: whether another spec is accepted in its place; the text names no others.
    """

    def __init__(
        self,
        scheme: KVScheme,
        action: Probe = "warn",
        biases: KeyBiases | None = None,
        starts: Callable[[str], bool] = lambda spec: True,
    ) -> None:
        self.scheme, self.action, self.biases, self.starts = scheme, action, biases, starts
        self.undo: Callable[[], None] = lambda: None
        """Called before a refusal, to drop the prefill."""
        self.results: dict[int, KeyProbe] = {}
        self.samples: dict[int, _Sample] = {}
        self.warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "biases": None, "starts": _starts_nothing}

    def __deepcopy__(self, memo: dict[int, Any]) -> "OutlierProbe":
        """Copy the probe; the copy is of the same model."""
        copied = memo[id(self)] = OutlierProbe(self.scheme, self.action, self.biases, self.starts)
        shared = "biases", "starts"
        copied.__dict__ |= {name: copy.deepcopy(x, memo) for name, x in self.__dict__.items() if name not in shared}
        return copied

    @without_modes
    def __call__(self, layer: int, cache: LayerCache, keys: Tensor) -> None:
        """Probe one layer's new keys ``[B, H, n, D]``; a second call for the layer does nothing.

        On a GPU the result comes with ``settle``.
        """
        if layer in self.results or layer in self.samples:
            return
        codec, (batch, _, fresh, dim) = cache.roles["key"].codec, keys.shape
        if isinstance(codec, Dense) or dim % 4 or not cache.is_fitted:
            return
        unit = cache.together or codec.block_tokens
        known_at = fresh if cache.site.mean is None else len(cache)  # a sliding layer forgets positions
        tokens = min(fresh, known_at, max(SAMPLE_TOKENS, unit)) // unit * unit
        if tokens < FEWEST_TOKENS:
            return
        sample = (keys if batch == 1 else keys[:1]).narrow(2, fresh - tokens, tokens)
        if sample.dtype != (dtype := storage_dtype(keys.dtype)):
            sample = sample.to(dtype)
        if sample.untyped_storage().nbytes() > VIEW * sample.nbytes:
            sample = sample.clone()
        removed = cache.removed_from_newest(tokens)
        self.samples[layer] = _Sample(layer, cache, sample, removed and removed.first())
        if not synchronizes(keys):
            self.settle()

    def forget(self, layer: int) -> None:
        """Drop the sample of a layer."""
        self.samples.pop(layer, None)

    @without_modes
    def measure(self) -> None:
        """Start the measurements on the GPU whose results ``settle`` reads."""
        groups: dict[Any, list[_Sample]] = {}
        for one in self.samples.values():
            if one.figures is None:
                engine = _engine(one.cache)
                kernels = None if engine is None else engine.alike
                turned = one.removed and (one.removed.turning, *map(id, one.removed.angles))
                alike = one.cache.roles["key"].codec, kernels, one.rows.shape, one.rows.device, turned
                groups.setdefault(alike, []).append(one)
        for group in groups.values():
            for one, figures in zip(group, _measured(group).unbind(1), strict=True):
                one.figures = figures

    @without_modes
    def settle(self) -> None:
        """Warn of the sampled layers, or refuse: one synchronization per device."""
        self.measure()
        samples, self.samples = list(self.samples.values()), {}
        for device in {one.rows.device for one in samples}:
            here = [one for one in samples if one.rows.device == device]
            figures = torch.stack([one.figures for one in here if one.figures is not None]).tolist()
            for one, (ratio, error) in zip(here, figures, strict=True):
                self.results[one.layer] = KeyProbe(one.layer, ratio, error)
        for one in samples:
            probe, codec, mean = self.results[one.layer], one.cache.roles["key"].codec, one.cache.scheme.mean
            if probe.broken and not (self.biases and self.biases.holds(one.layer, codec, mean)):
                self._warn_or_refuse(probe, one)

    def _warn_or_refuse(self, probe: KeyProbe, sample: _Sample) -> None:
        if self.action == "refuse" and probe.outlier_ratio >= OUTLIERS:
            self.results.clear()  # so that the next prefill is probed and refused as well
            self.undo()
            raise BrokenPresetError(self._text(probe, sample, "pass probe='warn' to go on"))
        if not self.warned:
            self.warned = True
            warnings.warn(self._text(probe, sample, "pass probe='off'"), PackedKVWarning, stacklevel=3)

    def report(self) -> dict[int, dict[str, float]]:
        """Return the results as plain values by layer."""
        return {
            layer: {"outlier_ratio": round(probe.outlier_ratio, 2), "channel_error": round(probe.channel_error, 4)}
            for layer, probe in self.results.items()
        }

    def _text(self, probe: KeyProbe, sample: _Sample, further: str) -> str:
        keys = sample.keys().float()
        text = (
            f"{self.scheme} breaks on this model's keys: in layer {probe.layer} the largest key chunk is "
            f"{probe.outlier_ratio:.0f} times the median one, and encoding loses {min(probe.channel_error, 1):.0%} of "
            f"what tells keys apart in the median channel."
        )
        for name in CANDIDATES:
            if (error := self._error_of(name, keys)) is not None and error < LIMIT and self.starts(name):
                return f"{text} Use {name!r} instead ({error:.0%} there), or {further}."
        return f"{text} Every preset tried does; use 'dense' or dense_keys where the codec has it, or {further}."

    def _error_of(self, name: str, sample: Tensor) -> float | None:
        codec: Codec = get(name).key
        keys = sample[:, :, : sample.shape[2] // codec.block_tokens * codec.block_tokens]
        if name == str(self.scheme) or not keys.shape[2]:
            return None
        try:
            codec.layout(keys.shape[3])
        except ShapeError:  # the codec does not support this head_dim
            return None
        params = codec.fit(Site(0, "key", keys.shape[1], keys.shape[3], device=keys.device), Sample(keys))
        return float(channel_error(keys, roundtrip(codec, keys, params)))


def _starts_nothing(spec: str) -> bool:
    return False


def _measured(layers: Sequence[_Sample]) -> Tensor:
    """Outlier ratios and channel errors, ``[2, layers]``, of layers that differ in their constants alone."""
    keys, store, removed = torch.cat([one.rows for one in layers], 1), layers[0].cache.store, layers[0].removed
    if removed is not None:
        means = torch.cat([one.removed.mean for one in layers if one.removed is not None], 1)
        keys = removed._replace(mean=means).from_keys(keys)
    engines = [engine for one in layers if (engine := _engine(one.cache)) is not None]
    decoded = engines[0].roundtrip(keys, engines, store) if engines and store is not None else None
    if decoded is None:
        # NaN and Inf may not have been checked yet
        rows = keys.float().nan_to_num_(0.0, 0.0, 0.0).clamp_(-FP16_MAX, FP16_MAX).chunk(len(layers), 1)
        states = [one.cache.roles["key"] for one in layers]
        params = [{name: x[:1] for name, x in (state.params or {}).items()} for state in states]
        decoded = torch.cat([roundtrip(states[0].codec, x, values) for x, values in zip(rows, params, strict=True)], 1)
    return torch.stack([outlier_ratio(keys, len(layers)), channel_error(keys, decoded, len(layers))])


def _engine(cache: LayerCache) -> Engine | None:
    return cache.engine if isinstance(cache, FusedLayerCache) else None
