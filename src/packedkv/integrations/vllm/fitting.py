"""Constants that a server fits at its first start and keeps: ``{"preset": "ghost-3", "params": "fit"}``.

``packedkv fit`` runs in a child process: only the end of a process frees all memory of a second model, before the
engine measures what is free; and vLLM changes the default dtype and device.
"""

import hashlib
import json
import logging
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from packedkv import version
from packedkv.atomic import cache_dir
from packedkv.errors import FitError, FormatError, ModelError
from packedkv.files.params import FittedParams, digest_of, other_weights, read_params, weight_files
from packedkv.integrations.vllm.options import FIT, Options
from packedkv.registry import get

logger = logging.getLogger("vllm.packedkv")

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")
"""Load formats that read a checkpoint as transformers does."""
NEEDED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Files of a repository that a model and its tokenizer are made of."""
ROOM = 2 << 30
"""GPU bytes that sampling and fitting take beside the weights, for up to 32 KV heads of 128 channels and 256k words."""


@dataclass(frozen=True)
class Fit:
    """A fit of a preset's constants to the checkpoint in a folder; model, device and dtype as the engine names them."""

    folder: Path
    model: str
    spec: str
    seed: int
    device: str
    dtype: str

    def file(self) -> Path:
        """Name the file; the digest is of weights, codecs, seed and packedkv's version."""
        scheme = json.loads(replace(get(self.spec), spec="").to_json())
        given = json.dumps([digest_of(self.folder), scheme, self.seed, version.__version__], sort_keys=True)
        words = (self.spec, f"seed{self.seed}", Path(self.model).name)
        short = (re.sub(r"[^\w.=-]+", "-", word)[-60:] for word in words)
        name = "_".join([*short, hashlib.sha256(given.encode()).hexdigest()[:16]])
        return cache_dir() / "params" / f"{name}.safetensors"

    def arguments(self, file: Path | str) -> list[str]:
        """List the arguments of the command ``packedkv`` that writes the file."""
        options = ["--seed", str(self.seed), "--device", self.device, "--dtype", self.dtype]
        return ["fit", str(self.folder), self.spec, "-o", str(file), *options]

    def error(self, why: object) -> FitError:
        """Make the error that says why there is no file, and which command makes one."""
        return FitError(
            f"packedkv: {self.spec} was not fitted to {self.model}: {why} "
            f'Run {shlex.join(["packedkv", *self.arguments("FILE")])} and give {{"params": FILE}}.'
        )


def fitted_file(config: Any, options: Options) -> Path:
    """Return the file of constants of an engine's model; fit them if there is none, or raise FitError."""
    fit = fit_of(config, options)
    try:
        file, made = fit.file(), False
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with locked(file):
                if made := not file.exists():
                    run(fit, file)
        if not made:
            logger.info("packedkv: constants of %s were fitted before and lie in %s", fit.spec, file)
        read_params(file)  # codecs, model and seed are compared later, as with any file
    except FormatError as error:
        raise FitError(f"packedkv: {error} Or delete {file}, and the next start fits again.") from error
    except (OSError, ModelError) as error:
        raise fit.error(error) from error
    return file


def fit_of(config: Any, options: Options) -> Fit:
    """Return the fit of an engine's model; FitError if transformers would not load the weights that it serves."""
    model, form, folder, why = config.model_config, str(config.load_config.load_format), Path(), ""
    if any(getattr(part, "quantization_config", None) for part in (model.hf_config, model.hf_config.get_text_config())):
        why = "its checkpoint is quantized"
    elif form not in FORMATS:
        why = f"--load-format {form} takes its weights from elsewhere"
    elif model.hf_overrides:
        why = "--hf-overrides changes it"
    else:
        try:
            folder = folder_of(config)
        except Exception as error:  # of the network and of the hub's client
            reason = str(error).partition("\n")[0]
            why = f"it is neither a folder nor in reach on the hub ({reason})"
    if why:
        raise FitError(
            f'packedkv: "params": "{FIT}" fits {options.to_fit} to the unquantized model as transformers loads it, and '
            f"cannot do so for {model.model}: {why}; run packedkv fit MODEL {shlex.quote(options.to_fit)} -o FILE "
            'with a MODEL that has these layers in 16 bit, and give {"params": FILE}.'
        )
    device, dtype = str(config.device_config.device_type), str(model.dtype).removeprefix("torch.")
    return Fit(folder, model.model, options.to_fit, options.seed, device, dtype)


def folder_of(config: Any, local_files_only: bool = False) -> Path:
    """Return the folder of an engine's checkpoint, downloaded if need be; the hub's errors are OSError."""
    from huggingface_hub import snapshot_download  # comes with the engine

    model = config.model_config
    if (folder := Path(model.model).expanduser()).is_dir():
        return folder.resolve()
    path: str = snapshot_download(
        model.model,
        revision=model.revision,
        cache_dir=config.load_config.download_dir,
        allow_patterns=list(NEEDED),
        ignore_patterns=["original/**", "consolidated*"],  # the same weights once more
        local_files_only=local_files_only,
    )
    return Path(path)


def _device(fit: Fit) -> str:
    """This process's GPU if the weights fit there, else the CPU."""
    if fit.device != "cuda":
        return "cpu"
    device = f"cuda:{torch.cuda.current_device()}"
    free, size = torch.cuda.mem_get_info(device)[0], sum(path.stat().st_size for path in weight_files(fit.folder))
    if size + ROOM <= free:
        return device
    logger.warning(
        "packedkv: fitting on the CPU, which is slow: the model takes %.1f GB, and %s has %.1f GB free",
        *(size / 1e9, device, free / 1e9),
    )
    return "cpu"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other process makes the file."""
    import fcntl  # where the engine runs there is one

    with file.with_suffix(".lock").open("w") as lock:  # closing it, or the end of the process, lets the next one in
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("packedkv: another process makes %s; this one waits for it", file)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(fit: Fit, file: Path) -> None:
    """Make the file in a child process, whose output goes to the log; FitError if that fails."""
    begun, fit = time.monotonic(), replace(fit, device=_device(fit))
    logger.info("packedkv: fitting %s to %s on %s in %s", fit.spec, fit.model, fit.device, fit.dtype)
    status, lines = _output([sys.executable, "-m", "packedkv", *fit.arguments(file)])
    if status != 0 or not file.exists():
        raise fit.error(lines[-1] if lines else f"exit status {status}")
    logger.info("packedkv: fitted in %.1f s; kept in %s for the next start", time.monotonic() - begun, file)


def _output(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command with its output in the log; return its exit status and the lines that are not empty."""
    lines: list[str] = []
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=pipe, stderr=both, text=True, errors="replace") as child:
        try:
            assert child.stdout is not None
            for line in filter(str.strip, child.stdout):
                lines.append(line.strip())
                logger.info("packedkv fit: %s", line.rstrip())
        except BaseException:  # the server is stopped
            child.kill()
            raise
    return child.returncode, lines


def check_same_model(config: Any, params: FittedParams) -> None:
    """Raise FormatError if constants were fitted to other weights than an engine has loaded from safetensors."""
    try:
        folder = folder_of(config, local_files_only=True)
        differ = other_weights(folder, params.model.weights)
    except (OSError, ValueError, ModelError):  # weights from elsewhere, or in another form
        return
    if differ:
        raise FormatError(
            f"packedkv: {params.file} was fitted to {params.model.name}, whose {differ[0]} is not that of "
            f'{config.model_config.model}; run packedkv fit with this model (with "params": "{FIT}" delete the file).'
        )
