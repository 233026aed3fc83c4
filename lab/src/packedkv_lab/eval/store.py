"""The folder of a run: ``run.json``, ``items.jsonl``, ``results.json``; no finished item is lost if a run stops.

``items.jsonl`` has one line for each finished (spec, task, item), written completely or removed again.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packedkv.cli.measure.rows import Row, check_writable, plain, write_json
from packedkv.cli.page.rows import read_bytes, read_json, read_json_lines
from packedkv.errors import FormatError, KVError, check_former_name

FORMAT, VERSION = "packedkv-eval", 1
RUN, ITEMS, RESULTS, AGAINST = "run.json", "items.jsonl", "results.json", "against.json"
KEYS = ("spec", "task", "item")
Key = tuple[str, str, str]

FIXED = ("model", "device", "seed", "settings")
"""Parts of ``run.json`` that a further run must share. Of ``model``, the name is not compared: a folder may move."""

BY_NAME = ("tasks", "params", "bits", "recipes")
"""Parts that hold an entry per task or spec: a further run adds some, and may not change one."""


@dataclass
class Run:
    """What a folder holds: ``about`` is ``run.json``, ``lines`` are those of ``items.jsonl``, each item once."""

    folder: Path
    about: Row
    lines: list[Row]


def read_run(folder: str | Path) -> Run:
    """Read a folder without writing; a truncated last line is ignored."""
    path = Path(folder)
    about = read_json(path / RUN, "pass the folder that `packedkv eval --output` wrote")
    mark = about.get("format") if isinstance(about, dict) else None
    check_former_name(path / RUN, (mark,), FORMAT, f'set its "format" to "{FORMAT}"')
    if mark != FORMAT:
        raise FormatError(f"{path / RUN} is not that of a packedkv eval run; pass the folder that --output named.")
    if about.get("version") != VERSION:
        raise FormatError(
            f"{path / RUN} has version {about.get('version')}, this packedkv reads version {VERSION}; update packedkv."
        )
    lines, _ = _read_lines(path / ITEMS)
    return Run(path, about, lines)


class Store:
    """A run's folder, made or continued, open to be filled in a ``with`` block. ``about``: content of ``run.json``, the
    parts of ``FIXED``, ``tasks``, ``specs``, ``params``, ``bits``, ``versions``.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any]) -> None:
        self.folder = check_writable(folder)
        self.about: Row = json.loads(json.dumps(plain({"format": FORMAT, "version": VERSION, **about})))
        self.lines: list[Row] = []
        resumed = (self.folder / RUN).exists()
        if resumed:
            self.about = _merged(self.folder, read_run(self.folder).about, self.about)
        elif (self.folder / ITEMS).exists():
            raise FormatError(f"{self.folder} holds {ITEMS} and no {RUN}; choose another folder for --output.")
        self._file = _open_locked(self.folder / ITEMS)
        try:
            self.lines, whole = _read_lines(self.folder / ITEMS)
            os.ftruncate(self._file, whole)
            self.done = {key_of(line) for line in self.lines}
            self.resumed = len(self.lines)
            self._write_about()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def has(self, spec: str, task: str, item: str) -> bool:
        """Whether an item is finished."""
        return (spec, task, item) in self.done

    def add(self, line: Row) -> None:
        """Append the line of a finished item; a second one for the same item is dropped."""
        line = plain(line)
        if key_of(line) in self.done:
            return
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
        data = text.encode("utf-8", "replace")
        begin = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):  # a full disk may accept part of the line
                written += os.write(self._file, data[written:])
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begin)
            if isinstance(error, OSError):
                raise KVError(
                    f"{self.folder / ITEMS} cannot be written ({error.strerror or error}). The {len(self.lines)} items "
                    f"finished so far are kept: free some space and run the same command again."
                ) from error
            raise
        self.done.add(key_of(line))
        self.lines.append(line)

    def note(self, spec: str, text: str) -> bool:
        """Keep a remark on a spec in ``run.json``; False if it is there already."""
        notes = self.about.setdefault("notes", {}).setdefault(spec, [])
        if text in notes:
            return False
        notes.append(text)
        self._write_about()
        return True

    def run(self) -> Run:
        """Return what the folder holds now."""
        return Run(self.folder, self.about, self.lines)

    def _write_about(self) -> None:
        write_json(self.folder / RUN, self.about)


def key_of(line: Mapping[str, Any]) -> Key:
    """Spec, task and item of a line."""
    return line["spec"], line["task"], line["item"]


def _read_lines(path: Path) -> tuple[list[Row], int]:
    """Lines of ``items.jsonl``, each item once, and the bytes up to the end of the last whole line."""
    if not path.exists():
        return [], 0
    data = read_bytes(path, "give another folder")
    end = data.rfind(b"\n") + 1
    lines: dict[Key, Row] = {}
    for at, line in enumerate(read_json_lines(path, data[:end]), 1):
        try:
            lines.setdefault(key_of(line), line)
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path}, line {at} is damaged ({error}); remove that line.") from error
    return list(lines.values()), end


def _open_locked(path: Path) -> int:
    """Open for reading and appending; raise while another process has it open."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise KVError(f"{path} cannot be written ({error.strerror or error}); choose another --output.") from error
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise KVError(f"another run is writing to {path.parent}; wait for it, or choose another --output.") from error
    except OSError:  # a file system without locks
        pass
    return file


# -- continuing a run -----------------------------------------------------------------------------------------------


def _merged(folder: Path, old: Row, new: Row) -> Row:
    differences: list[str] = []
    for part in FIXED:
        differences += _differences(part, _compared(old.get(part)), _compared(new.get(part)))
    for kind in BY_NAME:
        for name in sorted(set(old.get(kind, {})) & set(new.get(kind, {}))):
            differences += _differences(name, _compared(old[kind][name]), _compared(new[kind][name]))
    if differences:
        raise KVError(
            f"{folder} holds a run that differs from this one: {'; '.join(differences)}. Repeat its settings to go on "
            f"with it, or choose another --output."
        )
    merged = old | {key: new[key] for key in new if key not in (*BY_NAME, "specs", "versions")}
    if devices := [about["device_name"] for about in (old, new) if about.get("device_name")]:
        names = dict.fromkeys(name for device in devices for name in device.split(", "))
        merged["device_name"] = ", ".join(names)  # of all that measured a part
    for kind in BY_NAME:
        merged[kind] = old.get(kind, {}) | new.get(kind, {})
    merged["specs"] = list(dict.fromkeys([*old.get("specs", []), *new.get("specs", [])]))
    if (here := new.get("versions")) != old.get("versions"):  # noted only: byte layouts have versions of their own
        merged["later_versions"] = [v for v in old.get("later_versions", []) if v != here] + [here]
    return merged


NOT_COMPARED = ("name", "origin", "limit", "items", "metrics", "file", "device_name")


def _compared(value: Any) -> Any:
    """Without what may change from one call to the next."""
    if not isinstance(value, Mapping):
        return value
    return {key: _compared(v) for key, v in value.items() if key not in NOT_COMPARED}


def _differences(name: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(f"{name} {key}", old.get(key), new.get(key))
    elif old != new:
        yield f"{name}: {_short(old)} there, {_short(new)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 24 else f"{text[:21]}..."
