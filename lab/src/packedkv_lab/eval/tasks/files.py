"""Where a task's data comes from: a file below a path that the user gives, or the Hugging Face hub.

Records are plain dicts; the source file and its sha256 are returned for the results.
"""

import csv
import gzip
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packedkv.errors import FormatError, KVError
from packedkv_lab.eval.tasks.base import Needs, Source, TaskSettings

Record = dict[str, Any]


def find(task: str, needs: Needs, settings: TaskSettings) -> Path | None:
    """Return the task's file (its best pattern's first match), or None where the hub is to be asked.

    Raises
    ------
    KVError
        If the path given does not exist or holds no such file, or there is neither a path nor a way to the hub.
    """
    given = settings.data_of.get(task, settings.data)
    names = " or ".join(needs.patterns)
    wanted = f"{needs.form}, called {names}"
    hub = f"{needs.hub[0]} on the Hugging Face hub"
    if given is None:
        if importlib.util.find_spec("datasets") is None:
            raise KVError(
                f"{task} needs data: {wanted}. Pass --data with a file or a folder that holds it ({hub} has it), or "
                f"install the package datasets, which fetches it from there."
            )
        return None
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise KVError(f"{task}: --data {str(given)!r} does not exist; pass a file or a folder with {wanted}.")
    for pattern in needs.patterns:
        found = sorted(p for p in path.glob(f"**/{pattern}") if p.is_file())
        if found:
            return found[0]
    raise KVError(
        f"{task}: nothing below --data {str(given)!r} is called {names} ({needs.form}). Put it there ({hub} has it), "
        f"pass --data {task}=FILE, or leave the task out."
    )


def json_records(task: str, path: Path) -> tuple[list[Record], Source]:
    """Records of a JSON list, an object of them, or JSON lines; ``.gz`` is unpacked.

    Raises
    ------
    FormatError
        If it is neither.
    KVError
        If it cannot be read.
    """
    raw, source = read(task, path)
    try:
        text = raw.decode("utf-8")
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            data = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise FormatError(f"{task}: {path} is neither JSON nor JSON lines ({error}).") from error
    found = data if isinstance(data, list) else [data]
    if not found or not all(isinstance(record, dict) for record in found):
        raise FormatError(f"{task}: {path} holds no records; expected a list of objects, or one on each line.")
    return found, source


def csv_rows(task: str, path: Path) -> tuple[list[list[str]], Source]:
    """Rows of a CSV file, its header too.

    Raises
    ------
    FormatError, KVError
        As ``json_records``.
    """
    raw, source = read(task, path)
    try:
        rows = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline="")))
    except (ValueError, csv.Error) as error:
        raise FormatError(f"{task}: {path} is not a CSV file in UTF-8 ({error}).") from error
    return [row for row in rows if row], source


def read(task: str, path: Path) -> tuple[bytes, Source]:
    """Bytes of a file, unpacked if its name ends in ``.gz``; the sha256 is that of the file as it is."""
    try:
        raw = path.read_bytes()
        source = Source(path.name, hashlib.sha256(raw).hexdigest())
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw), source
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KVError(f"{task}: {path} cannot be read ({reason}).") from error


def hub_records(task: str, needs: Needs, split: str = "") -> tuple[list[Record], Source]:
    """Records of the task's data set on the hub, from its cache or over the network.

    Raises
    ------
    KVError
        If it cannot be loaded; the text says why and what to do.
    """
    import datasets

    name, config, usual = needs.hub
    try:
        data = datasets.load_dataset(name, config or None, split=split or usual)
        records = [dict(record) for record in data]
    except Exception as error:  # the loader raises any kind of error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise KVError(
            f"{task}: {name} cannot be had from the Hugging Face hub ({reason}). Pass --data with a file: {needs.form}."
        ) from error
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode())
    return records, Source(f"hub:{'/'.join(filter(None, (name, config, split or usual)))}", digest.hexdigest())


def joined(sources: Iterable[Source], name: str) -> Source:
    """One source of several files."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.sha256.encode())
    return Source(name, digest.hexdigest())


def parsed(task: str, records: Iterable[Any], parse: Callable[[Any], Any], source: Source, form: str) -> list[Any]:
    """Apply ``parse`` to every record; None leaves a record out.

    Raises
    ------
    FormatError
        If a record is not of the form; names its number and what is wrong.
    """
    found = []
    for number, record in enumerate(records, 1):
        try:
            one = parse(record)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            missing = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise FormatError(f"{task}: {source.name}, record {number}: {missing}; expected {form}.") from error
        if one is not None:
            found.append(one)
    if not found:
        raise FormatError(f"{task}: {source.name} holds nothing to ask; expected {form}.")
    return found
