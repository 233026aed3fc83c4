"""Options of the server: ``--additional-config '{"packedkv": {"preset": "saw-int4"}}'``.

========== ===========================================================================================================
key        meaning
========== ===========================================================================================================
``preset`` any spec of ``packedkv list``, with options; or the path of a recipe
``params`` path of a file of ``packedkv fit``, for presets whose constants are fitted; ``fit``: the server makes the
           file at its first start and keeps it (see ``fitting``)
``window`` 0: serve a preset without its dense window of newest tokens
``sink``   0: serve a preset without its dense first tokens
``seed``   seed of random constants; default 0
``draft``  spec of a draft model's layers in speculative decoding; default ``dense``: drafts keep 16 bit;
           refused without a draft model
``probe``  for a preset that breaks on the model's key biases: ``refuse`` to start (default), ``warn`` in the log and
           go on, or ``off``: do not check
========== ===========================================================================================================
"""

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
"""``params``: no file, but what ``packedkv fit`` makes of the model when the server starts."""
NAMES = ("preset", "params", "window", "sink", "seed", "draft", "probe")
ALIKE = 0.7
"""Share of letters in common from which a key is taken for a misspelled ``packedkv``."""
EXAMPLE = """--additional-config '{"packedkv": {"preset": "saw-int4"}}'"""


@dataclass(frozen=True)
class Options:
    """Validated options.

    Parameters
    ----------
    scheme : KVScheme
        Of the model; its layers may differ.
    params : FittedParams or None
    seed : int
    probe : {"refuse", "warn", "off"}
    draft : KVScheme
        Of the layers of a draft model.
    to_fit : str
        The preset as it was named, if its constants are yet to be fitted; ``params`` is None until they are.
    names_draft : bool
        Whether ``draft`` was given.
    """

    scheme: KVScheme
    params: FittedParams | None = None
    seed: int = 0
    probe: Probe = "refuse"
    draft: KVScheme = field(default_factory=lambda: get("dense"))
    to_fit: str = ""
    names_draft: bool = False

    @property
    def fitted(self) -> bool:
        """Whether constants come from a file, or will."""
        return self.params is not None or bool(self.to_fit)


def read_options(
    additional: Mapping[str, Any] | None, cache_dtype: str = "auto", made: Path | None = None
) -> Options | None:
    """Read the engine's ``additional_config`` and KV-cache dtype; None if packedkv is not requested.

    ``made`` is the file that ``"params": "fit"`` stands for, once there is one.

    Raises
    ------
    SpecError
        Unknown keys, presets or values; the text says what is allowed.
    FormatError, FileNotFoundError
        The file of constants.
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
    if (path := made if fits else path) is not None:
        params = read_params(path)
        if not scheme.allows(params.scheme):
            raise SpecError(f"packedkv: {path} was fitted for {params.spec}, not for {preset}; serve that preset.")
        scheme = params.scheme
    draft = given.get("draft", "dense")
    if not isinstance(draft, str):
        raise SpecError(f"packedkv: draft={draft!r}; name a spec of `packedkv list`, or leave it out for 16 bit.")
    own = _without(get(draft), given)
    to_fit = preset if fits and params is None else ""
    probe = _probe(given.get("probe", "refuse"))
    return Options(_without(scheme, given), params, seed, probe, own, to_fit, "draft" in given)


def _check_keys(additional: Mapping[str, Any]) -> None:
    """Raise for keys beside ``packedkv`` that are meant for it: misspelled, or options that lie outside of its object.

    Keys of other plugins are left alone.
    """

    def letters(key: Any) -> str:
        return re.sub(r"[^a-z0-9]", "", str(key).lower())

    def is_ours(value: Any) -> bool:
        preset = value.get("preset") if isinstance(value, Mapping) else None
        return isinstance(preset, str) and preset.partition(":")[0] in presets()

    for key, value in additional.items():
        if key == KEY:
            continue
        alike = SequenceMatcher(None, letters(key), KEY).ratio() >= ALIKE
        if alike or letters(key) == FORMER_NAME or is_ours(value):
            raise SpecError(f"packedkv: --additional-config has {key!r}. Did you mean {KEY!r}? E.g. {EXAMPLE}.")
        if key == "preset" or (KEY in additional and key in NAMES):
            raise SpecError(
                f"packedkv: --additional-config has {key!r} outside of {KEY!r}; put it there, e.g. {EXAMPLE}."
            )


def _probe(given: Any) -> Probe:
    try:
        return probe_option(given)
    except SpecError as error:
        raise SpecError(f"packedkv: {error}") from None


def _without(scheme: KVScheme, given: Mapping[str, Any]) -> KVScheme:
    for name in ("window", "sink"):
        if name in given and (isinstance(given[name], bool) or given[name] != 0):
            raise SpecError(f"packedkv: {name}={given[name]!r}; only 0 is supported: pages hold all tokens.")

    def bare(own: KVScheme) -> KVScheme:
        window, sink = (0 if name in given else getattr(own, name) for name in ("window", "sink"))
        return replace(own, window=window, sink=sink, recent=own.recent if window else None)

    if scheme.layers:
        scheme = replace(scheme, layers=tuple(map(bare, scheme.layers)))
    return bare(scheme)
