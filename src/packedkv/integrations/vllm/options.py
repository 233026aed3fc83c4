"""Options of the server: ``--additional-config '{"packedkv": {"preset": "saw-int4"}}'``; docs/serve.md lists them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from packedkv.errors import FORMER_NAME, SpecError, nearest
from packedkv.files.params import FittedParams, read_params
from packedkv.key_bias import Probe, probe_option
from packedkv.registry import get, presets
from packedkv.scheme import KVScheme

KEY = "packedkv"
DTYPE = "packedkv"
"""``--kv-cache-dtype``, where the engine lets plugins add one: alone, or ``packedkv:PRESET``."""
FIT = "fit"
"""``params``: the server runs ``packedkv fit`` at its start."""
NAMES = ("preset", "params", "window", "sink", "seed", "draft", "probe")
ALIKE = 0.7
"""Share of common letters from which a key counts as a misspelled ``packedkv``."""
EXAMPLE = """--additional-config '{"packedkv": {"preset": "saw-int4"}}'"""


@dataclass(frozen=True)
class Options:
    """Validated options."""

    scheme: KVScheme  # of the model; a mixture has one per layer
    params: FittedParams | None = None
    seed: int = 0
    probe: Probe = "refuse"
    draft: KVScheme = field(default_factory=lambda: get("dense"))  # of a draft model's layers
    to_fit: str = ""  # the preset as the user wrote it, if the server fits its constants and has not done so yet
    names_draft: bool = False  # whether the user gave ``draft``

    @property
    def fitted(self) -> bool:
        """Whether constants come from a file, or will."""
        return self.params is not None or bool(self.to_fit)


def read_options(
    additional: Mapping[str, Any] | None, cache_dtype: str = "auto", made: Path | None = None
) -> Options | None:
    """Read the engine's ``additional_config`` and KV-cache dtype; None if no preset is named.

    ``made``: the file that ``"params": "fit"`` stands for, once there is one. SpecError for unknown keys, presets or
    values; FormatError or FileNotFoundError for the file of constants.
    """
    additional = additional if isinstance(additional, Mapping) else {}
    _check_keys(additional)
    named = cache_dtype.partition(":")[2] if cache_dtype.startswith(DTYPE) else ""
    if KEY not in additional and not cache_dtype.startswith(DTYPE):
        return None
    given = additional.get(KEY, {})
    if not isinstance(given, Mapping):
        raise SpecError(
            f"packedkv: got {KEY!r}: {given!r}; expected an object, e.g. {EXAMPLE}, or no such key for 16 bit."
        )
    for name in given:
        if name not in NAMES:
            raise SpecError(f"packedkv: unknown key {name!r}.{nearest(str(name), NAMES)} Keys: {', '.join(NAMES)}.")
    preset = given.get("preset", named)
    if not isinstance(preset, str) or not preset:
        raise SpecError(f"packedkv: preset={preset!r}; name one of `packedkv list`, e.g. {EXAMPLE}.")
    if named and preset != named:
        raise SpecError(f"packedkv: --kv-cache-dtype names {named!r}, additional-config {preset!r}; name one preset.")
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SpecError(f"packedkv: seed={seed!r}; give an integer >= 0.")
    scheme = get(preset)
    params, path = None, given.get("params")
    if "params" in given and (not isinstance(path, str | Path) or not str(path)):
        raise SpecError(f'packedkv: params={path!r}; give the path of a file of `packedkv fit`, or "{FIT}".')
    if (fits := path == FIT) and not scheme.is_fitted:
        raise SpecError(f'packedkv: {preset} has no constants to fit; leave "params": "{FIT}" out.')
    # the file's scheme replaces the preset's, because a fit decides ``mean=auto``
    if (path := made if fits else path) is not None:
        params = read_params(path)
        if not scheme.allows(params.scheme):
            raise SpecError(f"packedkv: {path} was fitted for {params.spec}, not for {preset}; serve that preset.")
        scheme = params.scheme
    draft = given.get("draft", "dense")
    if not isinstance(draft, str):
        raise SpecError(f"packedkv: draft={draft!r}; name a spec of `packedkv list`, or leave it out for 16 bit.")
    try:
        probe = probe_option(given.get("probe", "refuse"))
    except SpecError as error:
        raise SpecError(f"packedkv: {error}") from None
    return Options(
        scheme=_without(scheme, given),
        params=params,
        seed=seed,
        probe=probe,
        draft=_without(get(draft), given),
        to_fit=preset if fits and params is None else "",
        names_draft="draft" in given,
    )


def _check_keys(additional: Mapping[str, Any]) -> None:
    """Raise for a misspelled ``packedkv`` and for options outside of its object; leave keys of other plugins alone."""
    for key, value in additional.items():
        if key == KEY:
            continue
        letters = re.sub(r"[^a-z0-9]", "", str(key).lower())
        preset = value.get("preset") if isinstance(value, Mapping) else None
        names_preset = isinstance(preset, str) and preset.partition(":")[0] in presets()
        if names_preset or letters == FORMER_NAME or SequenceMatcher(None, letters, KEY).ratio() >= ALIKE:
            raise SpecError(f"packedkv: --additional-config has {key!r}. Did you mean {KEY!r}? E.g. {EXAMPLE}.")
        if key == "preset" or (KEY in additional and key in NAMES):
            raise SpecError(
                f"packedkv: --additional-config has {key!r} outside of {KEY!r}; put it there, e.g. {EXAMPLE}."
            )


def _without(scheme: KVScheme, given: Mapping[str, Any]) -> KVScheme:
    """Remove the dense tokens that ``window`` and ``sink`` switch off, in all layers."""
    for name in ("window", "sink"):
        if name in given and (isinstance(given[name], bool) or given[name] != 0):
            raise SpecError(f"packedkv: {name}={given[name]!r}; only 0 is supported: pages hold all tokens.")

    def bare(part: KVScheme) -> KVScheme:
        window, sink = (0 if name in given else getattr(part, name) for name in ("window", "sink"))
        layers = tuple(map(bare, part.layers)) if part.layers else part.layers
        return replace(part, layers=layers, window=window, sink=sink, recent=part.recent if window else None)

    return bare(scheme)
