"""The container of all saved files (``docs/format.md``): safetensors with a version and a sha256, written atomically.

The checksum detects damage and accidental edits; it is not a signature.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from packedkv.atomic import whole_file
from packedkv.errors import FormatError, check_former_name
from packedkv.version import __version__

BROKEN_JSON = ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError
"""What reading JSON of any form raises."""


@dataclass(frozen=True)
class Kind:
    """A type of file."""

    mark: str  # name of the only metadata entry (several would be written in random order)
    version: int  # highest version that this library writes and reads
    noun: str  # its name in messages: "cache"
    writer: str  # its writer: "save"
    again: str  # the remedy for an unusable file: "save the cache again"


def write(path: Path, kind: Kind, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write a file and return its sha256; an older file is replaced only when the new one is complete.

    ``header`` holds plain JSON values, to which ``version``, ``packedkv`` and ``sha256`` are added; ``tensors`` are
    contiguous, on the CPU. Raises OSError, or a subclass, if the path cannot be written; the text says why.
    """
    check_target(path, kind)
    whole: dict[str, Any] = {"version": kind.version, "packedkv": __version__, **header}
    whole["sha256"] = digest(whole, tensors)
    try:
        with whole_file(path) as part:
            save_file(dict(tensors), part, metadata={kind.mark: json.dumps(whole, sort_keys=True)})
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {error}; check the folder's rights and the free space.") from error
    return str(whole["sha256"])


def read(path: Path, kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a file, on the CPU.

    Raises FileNotFoundError or IsADirectoryError if there is no file; FormatError if the file is cut, altered, foreign,
    or newer than this packedkv: the text says which and what to do.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the file that {kind.writer} wrote.")
    if not path.exists():
        raise FileNotFoundError(f"{path} was not found; pass the file that {kind.writer} wrote.")
    if not path.is_file():  # opening a FIFO would not end
        raise FormatError(f"{path} is not a regular file; pass the file that {kind.writer} wrote.")
    while True:
        with path.open("rb") as file:
            try:
                return _read(path, file, kind)
            except FormatError:
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise
        # else another process replaced the file while it was read


def _read(path: Path, file: BinaryIO, kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header = _read_header(path, file, kind)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise FormatError(f"{path} is damaged: {error}; {kind.again}.") from error
    stored = header.get("sha256", "")
    if digest({k: v for k, v in header.items() if k != "sha256"}, tensors) != stored:
        raise FormatError(
            f"{path} was altered after it was written: its sha256 does not match; copy it again or {kind.again}."
        )
    return header, tensors


def check_target(path: Path, kind: Kind) -> None:
    """Raise a subclass of OSError, before any work, if a path cannot be written."""
    folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(f"cannot save to {path}: the folder {folder} does not exist; create it first.")
    if not folder.is_dir():
        raise NotADirectoryError(f"cannot save to {path}: {folder} is a file, not a folder.")
    if path.is_dir():
        example = path / f"{kind.noun}.safetensors"
        raise IsADirectoryError(f"cannot save to {path}: that is a folder; name a file in it, e.g. {example}.")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot save to {path}: the folder {folder} is not writable; choose another one.")


def digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the metadata and every tensor's name, dtype, shape and bytes."""
    sha = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(_bytes(tensor))
    return sha.hexdigest()


def store_params(params: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Put constants among ``tensors`` under the hash of their bytes, so that layers share equal tensors.

    Returns the name of each constant's tensor, for the header.
    """
    names = {}
    for key, value in params.items():
        kind = json.dumps([str(value.dtype), list(value.shape)]).encode()
        name = f"params.{hashlib.sha256(kind + _bytes(value)).hexdigest()[:16]}"
        tensors.setdefault(name, value.detach().cpu().contiguous().clone())
        names[key] = name
    return names


def load_params(names: Mapping[str, str], tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Take constants back out of a file's tensors: the inverse of ``store_params``."""
    return {key: tensors[name].to(device) for key, name in names.items()}


def _read_header(path: Path, file: BinaryIO, kind: Kind) -> dict[str, Any]:
    """Read and validate the metadata; every error names the fault."""
    foreign = f"{path} is not a packedkv {kind.noun}"
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise FormatError(
            f"{foreign}, or it is cut ({size} bytes); pass a file written by {kind.writer}, or {kind.again}."
        )
    try:
        entries = json.loads(file.read(length))
        metadata = entries.pop("__metadata__", {})
        end = max((int(e["data_offsets"][1]) for e in entries.values()), default=0)
        header = json.loads(metadata[kind.mark]) if kind.mark in metadata else None
    except BROKEN_JSON as error:
        raise FormatError(f"{foreign}: its header is not safetensors JSON, or was altered; {kind.again}.") from error
    check_former_name(path, metadata, kind.mark, kind.again)
    if header is None:
        raise FormatError(
            f"{foreign}: a safetensors file without the mark {kind.mark!r}; pass a file written by {kind.writer}."
        )
    if not isinstance(header, dict) or not isinstance(version := header.get("version"), int):
        raise FormatError(f"{path} was altered: its header names no version; {kind.again}.")
    if version > kind.version:
        raise FormatError(
            f"{path} has format version {version}, written by packedkv {header.get('packedkv', 'unknown')}; this "
            f"packedkv reads up to version {kind.version}. Update packedkv."
        )
    if size != 8 + length + end:
        raise FormatError(
            f"{path} is cut: {size} bytes of {8 + length + end}; copy it again or {kind.again}."
            if size < 8 + length + end
            else f"{path} was altered: {size - 8 - length - end} bytes follow its end; copy it again or {kind.again}."
        )
    return header


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)
