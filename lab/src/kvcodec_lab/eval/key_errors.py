"""Errors of attention scores on a model's own keys: which layer and channel a preset fails on, and what mends it.

The uncompressed model reads a window once; every layer's keys and its newest queries are recorded after RoPE. A preset
encodes and decodes each layer's keys by itself. With q the recorded queries, k the keys before all of them, k^ the
decoded ones, the error of a head is, as in ``kvcodec.key_bias`` but on a text::

    e = scale * q . (k^ - k),     error = sqrt(mean over queries and tokens of (e - mean over tokens of e)^2)   nats
                                  shift = sqrt(mean over queries of (mean over tokens of e)^2)                  nats

Softmax does not see the shift as long as all tokens are encoded. Tokens held exactly (sinks, a window) do not have it.

``MENDS`` change the keys before the codec and undo it behind, each measured apart. Their constants come from the same
window, so they are at their best. A scheme with ``mean=pre`` has ``mean before RoPE`` to begin with, and no mends;
``mean=auto`` is none here:

- ``mean``: the mean key of each head, after RoPE, is subtracted;
- ``mean before RoPE``: the same of the keys before RoPE, as a bias is added, rotated to each position;
- ``channel scales``: each channel is divided by its root mean square;
- ``outliers``: Med3 with room for 8 chunks a token (64 bits each) around the codec.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcodec.cache.host import LayerCache
from kvcodec.cli.measure.fidelity import LayerRecord
from kvcodec.cli.measure.rows import Row
from kvcodec.codec import Codec, Dense, Sample, Site, roundtrip
from kvcodec.codecs.outliers import Med
from kvcodec.errors import BrokenPresetError, KVCodecWarning, KVError
from kvcodec.key_bias import KeyBiases
from kvcodec.probe import OutlierProbe
from kvcodec.registry import get
from kvcodec.scheme import KVScheme

Undo = Callable[[Tensor], Tensor]
Change = Callable[[LayerRecord, Tensor | None], tuple[Tensor, Undo]]
MENDED_LAYERS = 6
"""Mends are measured in so many layers, those with the largest errors."""
ROOM = 8


def score_error(record: LayerRecord, decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Error and shift of one layer's scores with ``decoded [1, H, N, D]`` in place of its keys.

    Returns
    -------
    Tensor, Tensor
        ``[H]`` each, nats.
    """
    before = record.k.shape[2] - record.q.shape[2]
    lost = (decoded.float() - record.k.float())[:, :, : max(before, 1)]
    queries = record.q.float().unflatten(1, (lost.shape[1], -1)).flatten(2, 3)
    e = queries @ lost.transpose(2, 3) * record.scale
    mean = e.mean(-1, keepdim=True)
    return (e - mean).square().mean((0, 2, 3)).sqrt(), mean.square().mean((0, 2, 3)).sqrt()


# -- mends -------------------------------------------------------------------------------------------------------------


def less_mean(record: LayerRecord, frequencies: Tensor | None) -> tuple[Tensor, Undo]:
    """Subtract each head's mean key."""
    mean = record.k.float().mean(2, keepdim=True)
    return record.k.float() - mean, lambda x: x + mean


def less_unrotated_mean(record: LayerRecord, frequencies: Tensor | None) -> tuple[Tensor, Undo]:
    """Subtract each head's mean key before RoPE, rotated to the position of each token."""
    if frequencies is None:
        return less_mean(record, None)
    k = record.k.float()
    mean = rotated(rotated(k, frequencies, -1).mean(2, keepdim=True).expand_as(k), frequencies)
    return k - mean, lambda x: x + mean


def scaled(record: LayerRecord, frequencies: Tensor | None) -> tuple[Tensor, Undo]:
    """Divide each channel by its root mean square over the tokens."""
    size = record.k.float().square().mean(2, keepdim=True).sqrt().clamp_min(1e-6)
    return record.k.float() / size, lambda x: x * size


def rotated(x: Tensor, frequencies: Tensor, sign: int = 1) -> Tensor:
    """RoPE at positions 0 ... N - 1 of ``x [..., N, D]``, pairs (i, i + R/2); ``sign=-1`` undoes it."""
    half = frequencies.shape[0]
    angle = torch.arange(x.shape[-2])[:, None] * frequencies * sign
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


MENDS: Mapping[str, Change] = {"mean": less_mean, "mean before RoPE": less_unrotated_mean, "channel scales": scaled}
OUTLIERS = "outliers"


# -- one preset --------------------------------------------------------------------------------------------------------


def key_errors(
    records: Sequence[LayerRecord],
    spec: str | KVScheme,
    *,
    frequencies: Tensor | None = None,
    biases: KeyBiases | None = None,
    mends: bool = True,
) -> Row:
    """Measure one preset on recorded layers.

    Parameters
    ----------
    records : sequence of LayerRecord
        One per layer that has K and V of its own.
    spec : str or KVScheme
        Layers whose keys it holds dense have no error.
    frequencies : Tensor, optional
        Of RoPE; None: the mean before RoPE is the mean.
    biases : KeyBiases, optional
        The check of the weights is told beside.
    mends : bool
        Whether ``MENDS`` are measured as well.

    Returns
    -------
    dict
        ``spec, key_bits, layer, head, error, shift`` (of the head with the largest error), ``by_layer`` (the worst head
        of each layer; None where keys are dense), ``mends`` (name -> the largest error left, None where the codec
        cannot take it), ``check`` and ``probe``: whether each warns, and of what.
    """
    scheme = get(spec)
    scheme = scheme.with_means(["none" if of.mean == "auto" else of.mean for of in scheme.layer_schemes])
    own = [scheme.for_layer(i, len(records)) for i in range(len(records))]
    codecs, changes = [of.key for of in own], [less_unrotated_mean if of.mean == "pre" else None for of in own]
    found = [
        None if isinstance(codec, Dense) else _errors(r, codec, change, frequencies)
        for r, codec, change in zip(records, codecs, changes, strict=True)
    ]
    layers = [i for i, of in enumerate(found) if of is not None]
    row: Row = {"spec": str(scheme), "key_bits": scheme.key_bits(records[0].k.shape[-1])}
    row |= dict.fromkeys(("layer", "head", "error", "shift")) | {"mends": {}}
    if layers:
        worst = max(layers, key=lambda i: float(found[i][0].max()))  # type: ignore[index]
        errors, shifts = found[worst]  # type: ignore[misc]
        head = int(errors.argmax())
        row |= {"layer": records[worst].layer, "head": head, "error": float(errors[head]), "shift": float(shifts[head])}
    row["by_layer"] = [None if of is None else float(of[0].max()) for of in found]
    if mends and layers and not any(changes):
        chosen = sorted(layers, key=lambda i: -float(found[i][0].max()))[:MENDED_LAYERS]  # type: ignore[index]
        here = [(records[i], codecs[i]) for i in chosen]
        row["mends"] = {name: _left(here, change, frequencies) for name, change in MENDS.items()}
        row["mends"][OUTLIERS] = _left([(r, Med(c, 3, ROOM)) for r, c in here if not isinstance(c, Med)])
    return row | {"check": _check(scheme, biases), "probe": _probe(records, scheme, biases, frequencies)}


def _errors(record: LayerRecord, codec: Codec, change: Change | None = None, frequencies: Tensor | None = None) -> Any:
    keys, undo = (record.k.float(), lambda x: x) if change is None else change(record, frequencies)
    unit = codec.block_tokens
    tokens = keys.shape[2] // unit * unit
    site = Site(record.layer, "key", keys.shape[1], keys.shape[3])
    sample = keys[:, :, :tokens].half().float()
    decoded = keys.clone()
    params = codec.fit(site, Sample(sample, record.q.float() if "queries" in codec.needs else None))
    decoded[:, :, :tokens] = roundtrip(codec, sample, params)
    return score_error(record, undo(decoded))


def _left(
    here: Sequence[tuple[LayerRecord, Codec]], change: Change | None = None, frequencies: Tensor | None = None
) -> float | None:
    """The largest error left in some layers; None where a codec refuses."""
    try:
        return max((float(_errors(r, c, change, frequencies)[0].max()) for r, c in here), default=None)
    except KVError:
        return None


def _check(scheme: KVScheme, biases: KeyBiases | None) -> Row | None:
    """Result of the check of the weights; None where it finds no bias."""
    worst = biases.worst(scheme) if biases else None
    if worst is None:
        return None
    return {"warned": worst.broken, "layer": worst.layer, "error": worst.error, "without": worst.plain}


def _probe(
    records: Sequence[LayerRecord], scheme: KVScheme, biases: KeyBiases | None, frequencies: Tensor | None
) -> Row:
    """Result of the probe of the first prefill: whether it warns, and the layer with the largest error."""
    probe, warned = OutlierProbe(scheme, "warn", biases), False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", KVCodecWarning)
        for i, record in enumerate(records):
            own = scheme.for_layer(i, len(records))
            keys = (less_unrotated_mean(record, frequencies)[0] if own.mean == "pre" else record.k).half()
            cache = LayerCache(replace(own, value=Dense(), mean="none"), layer=record.layer)
            cache.append(keys, record.v.half())
            try:
                probe(record.layer, cache, keys)
            except BrokenPresetError:
                warned = True
        warned = warned or any(issubclass(w.category, KVCodecWarning) for w in told)
    worst = max(probe.found.values(), key=lambda f: f.channel_error, default=None)
    row: Row = {"warned": warned, "layer": None, "outlier_ratio": None, "channel_error": None}
    if worst is not None:
        row |= {"layer": worst.layer, "outlier_ratio": worst.outlier_ratio, "channel_error": worst.channel_error}
    return row
