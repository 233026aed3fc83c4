"""K-outlier probe: does the chosen codec survive this model's keys?

Two numbers per layer, taken once, on the newest tokens of the first prefill:

- ``outlier_ratio``: largest norm of four neighbouring channels of a key, over the median one. A few channels with a
  large constant offset (the K bias of Qwen2-like models) give hundreds.
- ``channel_error``: what the codec really does to these keys. With E the error of the keys, and both centred over the
  tokens (softmax does not see a constant),  ``|E - mean E|^2 / |K - mean K|^2``  per channel; the median channel of the
  worst head. 0: lossless; 1: what told keys apart there is gone. The median, because the outlier channels themselves
  survive, and after RoPE they swing more than all the others together.

A codec that puts one scale over outlier and ordinary channels rounds the ordinary ones away: its error is near 1.
The probe warns from ``LIMIT`` on and names a preset that it has measured on the same keys. Asked to refuse, it does so
where outlier channels are the reason (``OUTLIERS``): what is merely coarse is a warning. Of layers with biases in their
weights the error of the scores is known (``key_bias``); where that is small the probe says nothing: it does not know
which channels queries look at.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvcodec.cache import LayerCache
from kvcodec.codec import Codec, Site, roundtrip, storage_dtype
from kvcodec.codecs.dense import Dense
from kvcodec.errors import BrokenPresetError, KVCodecWarning, ShapeError
from kvcodec.key_bias import KeyBiases, Probe
from kvcodec.registry import get, presets
from kvcodec.scheme import KVScheme

LIMIT = 0.5
"""channel_error from which a codec counts as broken: half of the channels keep less than two thirds of their signal."""
OUTLIERS = 10.0
"""outlier_ratio from which a broken codec is refused: keys without outlier channels have up to 6, others hundreds."""
SAMPLE_TOKENS = 256
FEWEST_TOKENS = 16
CANDIDATES = ("saw-int4", "kivi-4", "octopus-4", "int-8", "fp8")
"""Presets tried, in order of size, when the chosen one breaks."""


@dataclass(frozen=True)
class KeyProbe:
    """What the probe found in one layer.

    Parameters
    ----------
    layer : int
    outlier_ratio : float
        K_max / K_median of the norms of four-channel chunks.
    channel_error : float
        Relative error of the median channel, worst head; see the module's text.
    """

    layer: int
    outlier_ratio: float
    channel_error: float

    @property
    def broken(self) -> bool:
        """Whether the codec fails on these keys."""
        return self.channel_error >= LIMIT


def outlier_ratio(keys: Tensor) -> float:
    """K_max / K_median of four-channel chunk norms of ``keys [B, H, N, D]``."""
    norms = keys.float().unflatten(-1, (-1, 4)).norm(dim=-1).flatten()
    return float(norms.max() / norms.median().clamp_min(1e-12))


def channel_error(keys: Tensor, decoded: Tensor) -> float:
    """Relative error of the median channel, worst head; see the module's text. Both ``[B, H, N, D]``."""
    signal = keys.float() - keys.float().mean(2, keepdim=True)
    error = decoded.float() - keys.float()
    error = error - error.mean(2, keepdim=True)
    ratio = error.pow(2).sum((0, 2)) / signal.pow(2).sum((0, 2)).clamp_min(1e-12)
    return float(ratio.median(-1).values.max())


class OutlierProbe:
    """Watches the first prefill of a cache; warns once, or refuses.

    Parameters
    ----------
    scheme : KVScheme
        The scheme the user chose, for the text of the warning.
    action : {"refuse", "warn"}
        What to do where it breaks on outlier channels.
    biases : KeyBiases, optional
        What is known from the weights.
    """

    def __init__(self, scheme: KVScheme, action: Probe = "warn", biases: KeyBiases | None = None) -> None:
        self.scheme, self.action, self.biases = scheme, action, biases
        self.undo: Callable[[], None] = lambda: None
        """Called before a refusal: nothing of the prefill shall stay."""
        self.found: dict[int, KeyProbe] = {}
        self.warned = False

    def __call__(self, layer: int, cache: LayerCache, keys: Tensor) -> None:
        """Probe one layer's fresh keys ``[B, H, n, D]``; a second call for the layer does nothing."""
        state = cache.roles["key"]
        if layer in self.found or isinstance(state.codec, Dense) or keys.shape[-1] % 4:
            return
        unit = state.codec.block_tokens
        tokens = min(keys.shape[2], max(SAMPLE_TOKENS, unit)) // unit * unit
        if tokens < FEWEST_TOKENS or state.params is None:
            return
        sample = keys[:, :, -tokens:].to(storage_dtype(keys.dtype)).float()
        decoded = roundtrip(state.codec, sample, state.params)
        found = KeyProbe(layer, outlier_ratio(sample), channel_error(sample, decoded))
        self.found[layer] = found
        if found.broken and not (self.biases and self.biases.holds(layer, state.codec)):
            self._tell(found, sample)

    def _tell(self, found: KeyProbe, sample: Tensor) -> None:
        if self.action == "refuse" and found.outlier_ratio >= OUTLIERS:
            self.found.clear()  # another prefill is refused as well
            self.undo()
            raise BrokenPresetError(self._text(found, sample, "pass probe='warn' to go on"))
        if not self.warned:
            self.warned = True
            warnings.warn(self._text(found, sample, "pass probe=False"), KVCodecWarning, stacklevel=3)

    def _text(self, found: KeyProbe, sample: Tensor, further: str) -> str:
        text = (
            f"{self.scheme} breaks on this model's keys: in layer {found.layer} the largest key chunk is "
            f"{found.outlier_ratio:.0f} times the median one, and encoding loses {min(found.channel_error, 1):.0%} of "
            f"what tells keys apart in the median channel."
        )
        better = [(name, e) for name in CANDIDATES if (e := self._error_of(name, sample)) is not None and e < LIMIT]
        if not better:
            return f"{text} Every preset tried does; use 'dense' or dense_keys where the codec has it, or {further}."
        return f"{text} Use {better[0][0]!r} instead ({better[0][1]:.0%} there), or {further}."

    def _error_of(self, name: str, sample: Tensor) -> float | None:
        if name not in presets() or name == str(self.scheme):
            return None
        codec: Codec = get(name).key
        tokens = sample.shape[2] // codec.block_tokens * codec.block_tokens
        try:
            codec.layout(sample.shape[3])
        except ShapeError:
            return None
        if tokens == 0:
            return None
        keys = sample[:, :, :tokens]
        site = Site(0, "key", keys.shape[1], keys.shape[3], device=keys.device)
        params = codec.fit(site, keys if codec.needs_sample else None)
        return channel_error(keys, roundtrip(codec, keys, params))


def report(probe: OutlierProbe) -> dict[int, dict[str, float]]:
    """Return what a probe found, as plain values by layer."""
    return {
        layer: {"outlier_ratio": round(found.outlier_ratio, 2), "channel_error": round(found.channel_error, 4)}
        for layer, found in probe.found.items()
    }
