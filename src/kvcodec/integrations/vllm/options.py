"""Options of the server: ``--additional-config '{"kvcodec": {"preset": "saw-int4"}}'``.

========== ===========================================================================================================
key        meaning
========== ===========================================================================================================
``preset`` any spec of ``kvcodec list``, with options; or the path of a recipe
``params`` path of a file of ``kvcodec fit``, for presets whose constants are fitted; ``fit``: the server makes the file
           at its first start and keeps it (see ``fitting``)
``window`` 0: serve a preset without its dense window of newest tokens
``sink``   0: serve a preset without its dense first tokens
``seed``   seed of random constants; default 0
``draft``  spec of a draft model's layers in speculative decoding; default ``dense``: drafts keep 16 bit
``probe``  for a preset that breaks on the model's key biases: ``refuse`` to start (default), ``warn`` in the log and
           go on, or ``off``: do not check
========== ===========================================================================================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcodec.errors import SpecError, UnsupportedError, nearest
from kvcodec.files.params import FittedParams, read_params
from kvcodec.key_bias import Probe, probe_option
from kvcodec.registry import get
from kvcodec.scheme import KVScheme, Mix

KEY = "kvcodec"
DTYPE = "kvcodec"
"""``--kv-cache-dtype``, where the engine lets plugins add one: alone, or ``kvcodec:PRESET``."""
FIT = "fit"
"""``params``: no file, but what ``kvcodec fit`` makes of the model when the server starts."""
NAMES = ("preset", "params", "window", "sink", "seed", "draft", "probe")
EXAMPLE = """--additional-config '{"kvcodec": {"preset": "saw-int4"}}'"""


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
    """

    scheme: KVScheme
    params: FittedParams | None = None
    seed: int = 0
    probe: Probe = "refuse"
    draft: KVScheme = field(default_factory=lambda: get("dense"))
    to_fit: str = ""

    @property
    def fitted(self) -> bool:
        """Whether constants come from a file, or will."""
        return self.params is not None or bool(self.to_fit)


def read_options(
    additional: Mapping[str, Any] | None, cache_dtype: str = "auto", made: Path | None = None
) -> Options | None:
    """Read the engine's ``additional_config`` and KV-cache dtype; None if kvcodec is not requested.

    ``made`` is the file that ``"params": "fit"`` stands for, once there is one.

    Raises
    ------
    SpecError
        Unknown keys, presets or values; the text says what is allowed.
    FormatError, FileNotFoundError
        The file of constants.
    """
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    named = cache_dtype.partition(":")[2] if cache_dtype.startswith(DTYPE) else ""
    if given is None and not cache_dtype.startswith(DTYPE):
        return None
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise SpecError(f"kvcodec: got {given!r}; expected an object, e.g. {EXAMPLE}.")
    for name in given:
        if name not in NAMES:
            raise SpecError(f"kvcodec: unknown key {name!r}.{nearest(str(name), NAMES)} Keys: {', '.join(NAMES)}.")
    preset = given.get("preset", named)
    if not isinstance(preset, str) or not preset:
        raise SpecError(f"kvcodec: preset={preset!r}; name one of `kvcodec list`, e.g. {EXAMPLE}.")
    if named and preset != named:
        raise SpecError(f"kvcodec: --kv-cache-dtype names {named!r}, additional-config {preset!r}; name one preset.")
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SpecError(f"kvcodec: seed={seed!r}; give an integer >= 0.")
    scheme = get(preset)
    params, path = None, given.get("params")
    if (fits := path == FIT) and not scheme.is_fitted:
        raise SpecError(f'kvcodec: {preset} has no constants to fit; leave "params": "{FIT}" out.')
    if (path := made if fits else path) is not None:
        params = read_params(path)
        if not scheme.allows(params.scheme):
            raise SpecError(f"kvcodec: {path} was fitted for {params.spec}, not for {preset}; serve that preset.")
        scheme = params.scheme
    draft = given.get("draft", "dense")
    if not isinstance(draft, str):
        raise SpecError(f"kvcodec: draft={draft!r}; name a spec of `kvcodec list`, or leave it out for 16 bit.")
    own = _without(get(draft), given)
    to_fit = preset if fits and params is None else ""
    return Options(_without(scheme, given), params, seed, _probe(given.get("probe", "refuse")), own, to_fit)


def _probe(given: Any) -> Probe:
    try:
        return probe_option(given)
    except SpecError as error:
        raise SpecError(f"kvcodec: {error}") from None


def _without(scheme: KVScheme, given: Mapping[str, Any]) -> KVScheme:
    for name in ("window", "sink"):
        if name in given and (isinstance(given[name], bool) or given[name] != 0):
            raise SpecError(f"kvcodec: {name}={given[name]!r}; only 0 can be served: no dense tokens beside the pages.")

    def bare(own: KVScheme) -> KVScheme:
        window, sink = (0 if name in given else getattr(own, name) for name in ("window", "sink"))
        return replace(own, window=window, sink=sink, recent=own.recent if window else None)

    if isinstance(scheme, Mix):
        scheme = replace(scheme, layers=tuple(map(bare, scheme.layers)))
    return bare(scheme)


def check_command(argv: Sequence[str]) -> None:
    """Raise if a vLLM command line for a GPU names a preset but no attention backend.

    vLLM would choose a backend of its own, ignore the options and silently serve 16 bit. Only vLLM's own commands are
    checked, except those that may name the backend elsewhere (``--config FILE``).

    Parameters
    ----------
    argv : sequence of str
        ``sys.argv``.

    Raises
    ------
    UnsupportedError
    """
    words = [word.replace("_", "-") if word.startswith("--") else word for word in argv[1:]]

    def names(option: str, text: str) -> bool:
        return any(word.startswith(option) and text in " ".join(words[i : i + 2]) for i, word in enumerate(words))

    elsewhere = any(names(option, "") for option in ("--attention-", "-ac", "--config"))
    if not names("--additional-config", KEY) or names("--kv-cache-dtype", DTYPE) or elsewhere:
        return
    program = Path(argv[0])
    if program.name == "vllm" or "vllm/entrypoints/" in program.as_posix():
        raise UnsupportedError(
            f"kvcodec: --additional-config names {KEY!r}, but vLLM would choose an attention backend of its own and "
            "serve 16 bit; add --attention-backend CUSTOM."
        )
