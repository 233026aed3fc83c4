"""Load models by path, name or hub id (``load``), and the texts that they are measured on (``load_text``)."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from packedkv.atomic import cache_dir
from packedkv.errors import ModelError, nearest
from packedkv.models.gguf_tokenizer import check_tokenizer
from packedkv.models.named import NAMED, NAMES, SMOLLM2, NamedModel, find_file, first_line
from packedkv.progress import Progress

ModelDtype = Literal["float32", "float16", "bfloat16"]
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")
PACKAGED_TEXT = "wikitext2_test_head.txt"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run, and where it came from."""

    model: Any  # a transformers.PreTrainedModel in eval mode
    tokenizer: Any
    name: str  # that was passed
    origin: str  # what was loaded: a path, a named model's file and its package, a hub id
    sha256: str | None = None  # of the weight file, where there is one file that was checked


def usable_device(device: str) -> torch.device:
    """Return the device; ``ModelError`` if torch does not know it, or cannot use it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ModelError(
            f"device {device!r} cannot be used here ({reason}); pass cpu, or a GPU that torch sees."
        ) from error


def load(
    name: str, *, progress: bool | Progress = True, device: str = "cpu", dtype: ModelDtype = "float32"
) -> LoadedModel:
    """Load a model and its tokenizer, and show ``progress`` on standard error.

    ``name``: a folder, a ``.gguf`` file, a name of ``named.NAMED``, or a hub id (its cache first). Raises ModelError if
    nothing was found, or could not be loaded; the text says what was tried and what to do.
    """
    shown = progress if isinstance(progress, Progress) else Progress(progress)
    usable_device(device)
    path = Path(name).expanduser()
    if path.exists():
        folder, gguf = _local(path)
        model, tokenizer = _from_pretrained(str(folder), gguf, name, device, dtype, shown)
        return LoadedModel(model, tokenizer, name, str(path))
    if name.lower() in NAMED:
        return _load_named(NAMED[name.lower()], name, device, dtype, shown)
    if name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r}: no such file or folder; pass a folder with config.json, a .gguf file, a hub id such as "
            f"{SMOLLM2.hub_id}, or one of: {NAMES}.{nearest(name, NAMED)}"
        )
    model, tokenizer = _from_hub(name, name, device, dtype, shown)
    return LoadedModel(model, tokenizer, name, f"hub: {name}")


@dataclass(frozen=True)
class SampleText:
    """A text, what it is called, and its sha256 (of its UTF-8 bytes)."""

    text: str
    name: str
    sha256: str


def load_text(path: str | Path | None = None) -> SampleText:
    """Read a UTF-8 text file; None: the packaged head of WikiText-2's raw test split. ``ModelError`` if it is missing,
    empty or not UTF-8.
    """
    if path is None:
        source = importlib.resources.files("packedkv") / "data" / PACKAGED_TEXT
        raw, name = source.read_bytes(), "WikiText-2 raw test, head"
    else:
        try:
            raw, name = Path(path).expanduser().read_bytes(), Path(path).name
        except OSError as error:
            raise ModelError(
                f"the text {str(path)!r} cannot be read ({error.strerror or error}); pass a UTF-8 text file, or leave "
                f"--text out for the packaged sample."
            ) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"the text {str(path)!r} is not UTF-8 ({error.reason} at byte {error.start}).") from error
    if not text.strip():
        raise ModelError(f"the text {str(path)!r} is empty; pass real text of at least one window.")
    return SampleText(text, name, hashlib.sha256(raw).hexdigest())


def _load_named(entry: NamedModel, name: str, device: str, dtype: ModelDtype, progress: Progress) -> LoadedModel:
    _require("transformers", "gguf")
    try:
        path = find_file(entry, progress)
    except ModelError as error:
        if not entry.requirement:  # the hub was tried for the file itself
            raise
        progress.say(f"{error} Trying the hub's weights instead.")
        try:
            model, tokenizer = _from_hub(entry.hub_id, name, device, dtype, progress)
        except ModelError as second:
            raise ModelError(
                f"{name}: tried the cache ({cache_dir()}), the package {entry.requirement} and the hub "
                f"({entry.hub_id}). Package: {error} Hub: {second} Once {entry.file} is on this machine, pass "
                f"its path as the model."
            ) from error
        return LoadedModel(model, tokenizer, name, f"hub: {entry.hub_id} (not the packaged Q4_1 weights)")
    model, tokenizer = _from_pretrained(str(path.parent), path.name, name, device, dtype, progress)
    return LoadedModel(model, tokenizer, name, entry.origin, entry.sha256)


def _local(path: Path) -> tuple[Path, str | None]:
    """Folder and GGUF name (or None) behind a path that exists."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {str(path)!r} is a file but not a .gguf; pass a .gguf or a folder.")
        return path.parent, path.name
    if (path / "config.json").is_file():
        return path, None
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if len(ggufs) == 1:
        return path, ggufs[0]
    files = f"{len(ggufs)} .gguf files: pass the path of one of them" if ggufs else "no config.json and no .gguf file"
    raise ModelError(f"model folder {str(path)!r} holds {files}; a model folder is what save_pretrained writes.")


def _from_hub(hub_id: str, name: str, device: str, dtype: ModelDtype, progress: Progress) -> tuple[Any, Any]:
    _require("transformers")
    from transformers import AutoConfig

    try:
        with progress.busy(f"looking for {hub_id} in the hub's cache and on the hub"), _quiet():
            try:
                AutoConfig.from_pretrained(hub_id, local_files_only=True)
            except (OSError, ValueError):
                AutoConfig.from_pretrained(hub_id)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r}: {hub_id} is neither in the hub's cache nor reachable on the hub "
            f"({first_line(error)}). Check the id and the network, or pass a local folder or .gguf file, or "
            f"one of: {NAMES}.{nearest(name, NAMED)}"
        ) from error
    return _from_pretrained(hub_id, None, name, device, dtype, progress)


def _from_pretrained(
    where: str, gguf: str | None, name: str, device: str, dtype: ModelDtype, progress: Progress
) -> tuple[Any, Any]:
    _require("transformers", *(["gguf", "accelerate"] if gguf else []))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra = {"gguf_file": gguf} if gguf else {}
    once = _gguf_read_once() if gguf else contextlib.nullcontext()
    try:
        with progress.busy(f"loading {name} in {dtype}"), _quiet(), once:
            tokenizer = AutoTokenizer.from_pretrained(where, **extra)
            # the file as transformers names it, so that it is read once
            note = check_tokenizer(tokenizer, os.path.join(where, gguf)) if gguf else ""
            model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **extra)
            model = model.eval().to(device)
            if gguf:  # its weights are plain tensors now: transformers would refuse to save them as quantized ones
                model.hf_quantizer, model.is_quantized = None, False
                del model.config.quantization_config
    except ModelError:
        raise
    except Exception as error:  # loaders raise any kind of error on a bad file
        raise ModelError(
            f"model {name!r} could not be loaded from {where}{'/' + gguf if gguf else ''}: "
            f"{type(error).__name__}: {first_line(error)} It must be a causal language model that transformers "
            f"{importlib.metadata.version('transformers')} can read, with its tokenizer."
        ) from error
    if note:
        progress.say(note)
    return model, tokenizer


def _require(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise ModelError(
            f"loading a model needs {' and '.join(missing)}; install them with: pip install 'packedkv[demo]'."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loaders' progress bars and notices; errors are still raised."""
    from transformers.utils import logging  # imported before the redirection: its handler keeps the stream it sees

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Parse a GGUF's header and name table once per load.

    transformers parses them four times (and the table once per module), which is most of a small model's loading time;
    the parsed objects are only read, so sharing them during one load is safe.
    """
    import gguf

    with (
        mock.patch.object(gguf, "GGUFReader", functools.lru_cache(maxsize=1)(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield
