"""Constants that a server makes at its first start and keeps: ``{"preset": "ghost-3", "params": "fit"}``.

The command ``packedkv fit`` runs on the checkpoint that the engine is about to load, in a process of its own: when it
ends its memory is free again, and the engine has allocated next to nothing yet. The file lies in the folder of caches
under a name that says for which weights, preset and seed it is, so that the next start finds it. Of the processes of a
server (and of servers that start together) one fits, and the others wait for it and read the same file.
"""

import hashlib
import json
import logging
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from packedkv import version
from packedkv.errors import FitError, FormatError, ModelError
from packedkv.files.checkpoint import digest_of, other_weights, weight_files
from packedkv.files.params import FittedParams, read_params
from packedkv.integrations.vllm.options import FIT, Options
from packedkv.paths import cache_dir
from packedkv.registry import get

logger = logging.getLogger("vllm.packedkv")

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors")
"""Load formats that read a checkpoint as transformers does."""
NEEDED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Files of a repository that a model and its tokenizer are made of."""
ROOM = 2 << 30
"""Bytes that drawing tokens and fitting take on a GPU beside the weights, 32 KV heads of 128 channels and a vocabulary
of 256k included."""
KEPT = 20
"""Lines of the command's output that an error may need."""


@dataclass(frozen=True)
class Fit:
    """What is to be fitted.

    Parameters
    ----------
    folder : Path
        The checkpoint.
    model : str
        As the engine calls it.
    spec : str
    seed : int
    device, dtype : str
        Where the model runs, and in which numbers.
    """

    folder: Path
    model: str
    spec: str
    seed: int
    device: str
    dtype: str

    def file(self) -> Path:
        """Where the constants are kept; the digest in the name is of weights, codecs, seed and packedkv's version."""
        scheme = json.loads(replace(get(self.spec), spec="").to_json())
        given = json.dumps([digest_of(self.folder), scheme, self.seed, version.__version__], sort_keys=True)
        words = (self.spec, f"seed{self.seed}", Path(self.model).name)
        short = (re.sub(r"[^\w.=-]+", "-", word)[-60:] for word in words)
        return (
            cache_dir()
            / "params"
            / f"{'_'.join([*short, hashlib.sha256(given.encode()).hexdigest()[:16]])}.safetensors"
        )

    def arguments(self, file: Path | str) -> list[str]:
        """Arguments of the command ``packedkv`` that writes the file."""
        options = ["--seed", str(self.seed), "--device", self.device, "--dtype", self.dtype]
        return ["fit", str(self.folder), self.spec, "-o", str(file), *options]


def fitted_file(config: Any, options: Options) -> Path:
    """Return the file of constants of an engine's model, which is made if there is none.

    Parameters
    ----------
    config : VllmConfig
    options : Options
        With ``to_fit``.

    Raises
    ------
    FitError
        The checkpoint cannot be fitted here, fitting failed, or the file that was kept is damaged.
    """
    fit = fit_of(config, options)
    try:
        file, made = fit.file(), False
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with alone(file):
                if made := not file.exists():
                    run(fit, file)
        if not made:
            logger.info("packedkv: constants of %s were fitted before and lie in %s", fit.spec, file)
        check_kept(file)
    except (OSError, ModelError) as error:
        raise FitError(f"packedkv: {fit.spec} was not fitted to {fit.model}: {error} {by_hand(fit)}") from error
    return file


def fit_of(config: Any, options: Options) -> Fit:
    """Return what is to be fitted for an engine.

    Raises
    ------
    FitError
        transformers would not load what the engine serves.
    """
    model = config.model_config
    form = str(config.load_config.load_format)
    parts = (model.hf_config, model.hf_config.get_text_config())
    reasons = {
        "its checkpoint is quantized": any(getattr(part, "quantization_config", None) for part in parts),
        f"--load-format {form} takes its weights from elsewhere": form not in FORMATS,
        "--hf-overrides changes it": bool(model.hf_overrides),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    folder = Path()
    if not why:
        try:
            folder = folder_of(config)
        except Exception as error:  # of the network and of the hub's client
            why = f"it is neither a folder nor in reach on the hub ({str(error).splitlines()[0]})"
    if why:
        raise FitError(
            f'packedkv: "params": "{FIT}" fits {options.to_fit} to the unquantized model as transformers loads it, and '
            f"cannot do so for {model.model}: {why}; run packedkv fit MODEL {shlex.quote(options.to_fit)} -o FILE with "
            f'a MODEL that has these layers in 16 bit, and give {{"params": FILE}}.'
        )
    device, dtype = str(config.device_config.device_type), str(model.dtype).removeprefix("torch.")
    return Fit(folder, model.model, options.to_fit, options.seed, device, dtype)


def folder_of(config: Any, local_files_only: bool = False) -> Path:
    """Return the folder of an engine's checkpoint, which is downloaded if need be; the hub's errors are OSError."""
    from huggingface_hub import snapshot_download  # comes with the engine

    model = config.model_config
    if (folder := Path(model.model).expanduser()).is_dir():
        return folder.resolve()
    return Path(
        snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=config.load_config.download_dir,
            allow_patterns=list(NEEDED),
            ignore_patterns=["original/**", "consolidated*"],  # the same weights once more
            local_files_only=local_files_only,
        )
    )


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
def alone(file: Path) -> Iterator[None]:
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
    """Make the file by the command line, whose output goes to the log.

    Raises
    ------
    FitError
        It failed.
    """
    begun, fit = time.monotonic(), replace(fit, device=_device(fit))
    logger.info("packedkv: fitting %s to %s on %s in %s", fit.spec, fit.model, fit.device, fit.dtype)
    status, lines = _output([sys.executable, "-m", "packedkv", *fit.arguments(file)])
    if status != 0 or not file.exists():
        raise FitError(
            f"packedkv: {fit.spec} was not fitted to {fit.model}: {lines[-1] if lines else f'exit status {status}'} "
            f"{by_hand(fit)}"
        )
    logger.info("packedkv: fitted in %.1f s; kept in %s for the next start", time.monotonic() - begun, file)


def _output(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command with its output in the log; return its exit status and its last lines."""
    last: deque[str] = deque(maxlen=KEPT)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as own:
        try:
            assert own.stdout is not None
            for line in filter(str.strip, own.stdout):
                last.append(line.strip())
                logger.info("packedkv fit: %s", line.rstrip())
        except BaseException:  # the server is stopped
            own.kill()
            raise
    return own.returncode, list(last)


def by_hand(fit: Fit) -> str:
    """What to do instead, in a sentence."""
    return f'Run {shlex.join(["packedkv", *fit.arguments("FILE")])} and give {{"params": FILE}}.'


def check_kept(file: Path) -> None:
    """Validate that a file can be read; codecs, model and seed are compared as those of any file.

    Raises
    ------
    FitError
    """
    try:
        read_params(file)
    except FormatError as error:
        raise FitError(f"packedkv: {error} Or delete {file}, and the next start fits again.") from error


def check_same_model(config: Any, params: FittedParams) -> None:
    """Validate that constants were fitted to the weights that an engine has loaded, where these lie in safetensors.

    Raises
    ------
    FormatError
    """
    try:
        folder = folder_of(config, local_files_only=True)
        differ = other_weights(folder, params.model.weights)
    except (OSError, ValueError, ModelError):  # they come from elsewhere, or in another form
        return
    if differ:
        raise FormatError(
            f"packedkv: {params.file} was fitted to {params.model.name}, whose {differ[0]} is not that of "
            f'{config.model_config.model}; run packedkv fit with this model (with "params": "{FIT}" delete the file).'
        )
