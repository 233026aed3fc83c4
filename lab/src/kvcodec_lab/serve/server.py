"""Start servers, query what they serve, and stop them with all of their processes."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcodec.errors import KVError, SpecError
from kvcodec_lab.serve.http import Endpoint, endpoint_of, get

SHOWN = 500
"""Characters of a server's last output that a row keeps."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_NOISE = re.compile(r"^\s*(?:\([^)]*\)\s*)*(?:(?:INFO|WARNING|ERROR)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?")
_ERROR = re.compile(r"(?:\b[\w.]*(?:Error|Exception)|\berror): (.+)")
_VALUE_ERROR = re.compile(r"Value error, (.+?)(?: \[type=.*)?$")


class RefusedToStartError(KVError):
    """A server ended, or timed out, before it was up."""


@dataclass(frozen=True)
class Start:
    """A server to start.

    Parameters
    ----------
    label : str
        Its name in rows.
    command : str
        As typed in a shell, with ``NAME=value`` before it if needed, but run without a shell.
    """

    label: str
    command: str

    def words(self) -> tuple[dict[str, str], list[str]]:
        """Variables and words of the command."""
        words = shlex.split(self.command)
        set_here = {}
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            set_here[name] = value
        return set_here, words

    def shown(self) -> str:
        """The command as rows have it: keys and tokens are hidden."""
        hide = re.compile(r"(?i)((?:--api-key|--hf-token|\b\w*(?:KEY|TOKEN|SECRET))(?:=|\s+))(?!-)\S+")
        return hide.sub(r"\1***", self.command)

    def endpoint(self, default: Endpoint) -> Endpoint:
        """Where it will listen: its ``--port``, else ``default``."""
        words = self.words()[1]
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            port = value if equals else "".join(words[i + 1 : i + 2])
            if name == "--port" and port.isdigit():
                return Endpoint(default.host, int(port), default.tls, default.base, default.headers)
        return default


def start_of(text: str) -> Start:
    """Read ``LABEL=COMMAND``.

    >>> start_of("fp8=vllm serve M --kv-cache-dtype fp8").label
    'fp8'

    Raises
    ------
    SpecError
    """
    label, equals, command = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.:,+-]+", label) or not command.strip():
        raise SpecError(f"--start {text!r}: write LABEL=COMMAND, e.g. --start fp8='vllm serve MODEL --port 8000'.")
    start = Start(label, command.strip())
    try:
        words = start.words()[1]
    except ValueError as error:
        raise SpecError(f"--start {text!r} cannot be read ({error}); mind its quotes.") from error
    if not words:
        raise SpecError(f"--start {text!r} has no command behind its variables.")
    return start


@asynccontextmanager
async def started(
    start: Start,
    endpoint: Endpoint,
    log: Path,
    *,
    timeout: float = 900.0,
    grace: float = 60.0,
    update: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[float]:
    """Start a server, wait until ``/health`` answers, finally stop it with all of its processes.

    Parameters
    ----------
    start : Start
    endpoint : Endpoint
    log : Path
        Gets what it prints.
    timeout : float
        Seconds that it may take to come up.
    grace : float
        Seconds that it may take to end before it is killed.
    update : callable
        Gets a passing line of text while it waits.

    Yields
    ------
    float
        Seconds until it was up.

    Raises
    ------
    RefusedToStartError
        With the reason, if it printed one.
    """
    if await get(endpoint, "/health", 2.0) is not None:
        raise RefusedToStartError(f"something answers at {endpoint.url} already: stop it, or give --port another one")
    variables, words = start.words()
    begin = time.monotonic()
    with log.open("wb") as output:
        try:
            # its own session: a keyboard interrupt reaches only us, and its workers end with it
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | variables, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RefusedToStartError(f"{words[0]}: {error.strerror or error}") from error
    try:
        while await get(endpoint, "/health", 2.0) is None:
            taken = time.monotonic() - begin
            if process.poll() is not None:
                raise RefusedToStartError(last_words(_read(log)) or f"ended with status {process.returncode}")
            if taken > timeout:
                said = last_words(_read(log))
                raise RefusedToStartError(f"not up after {timeout:g} s" + (f"; its last words: {said}" if said else ""))
            update(f"{start.label}: starting ... {taken:.0f} s")
            await asyncio.sleep(min(0.5, timeout / 10))
        yield time.monotonic() - begin
    finally:
        await _stop(process, grace)


async def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a process and its group: terminate, then kill."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if process.poll() is not None and not _lives(process.pid):
                return
            await asyncio.sleep(0.1)


def _lives(group: int) -> bool:
    """Whether a process of the group still runs; zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            states.append(path.read_text().rpartition(")")[2].split())
    return not states or any(state[2] == str(group) and state[0] not in "ZX" for state in states)


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def last_words(log: str) -> str:
    """Return the likely reason that a server printed before it ended.

    vLLM's parent processes repeat that their child failed; the error before that is returned.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    found = []
    for line in lines:
        match = _VALUE_ERROR.search(line) or _ERROR.search(line)
        if match and "See root cause above" not in line and "Engine core initialization failed" not in line:
            if "validation error" in match[1]:  # the next line says which
                continue
            found.append(match[1] if match.re is _VALUE_ERROR else line[match.start() :])
    words = found[-1] if found else _NOISE.sub("", lines[-1]) if lines else ""
    return words[:SHOWN]


# -- what a server reports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """What ``/v1/models`` and ``/version`` say.

    Parameters
    ----------
    model : str
    max_tokens : int, optional
        Of a request, prompt and output together.
    vocabulary : int, optional
        From the model's ``config.json``, where the server names a folder that is here.
    version : str, optional
    """

    model: str
    max_tokens: int | None = None
    vocabulary: int | None = None
    version: str | None = None


async def about(endpoint: Endpoint, model: str | None = None) -> About:
    """Ask a server what it serves.

    Raises
    ------
    KVError
        If it serves nothing, or not ``model``.
    """
    body = await get(endpoint, "/v1/models")
    if body is None:
        raise KVError(f"{endpoint.url}/v1/models does not answer; is an OpenAI-compatible server running there?")
    try:
        cards: Sequence[dict[str, Any]] = json.loads(body)["data"]
        names = [str(card["id"]) for card in cards]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise KVError(f"{endpoint.url}/v1/models lists no models; is it an OpenAI-compatible server?") from error
    if not names or (model is not None and model not in names):
        wanted = "" if model is None else f", not {model}"
        raise KVError(f"{endpoint.url} serves {', '.join(names) or 'no model'}{wanted}; pass one of them with --model.")
    card = cards[names.index(model) if model is not None else 0]
    most = card.get("max_model_len")
    version = await get(endpoint, "/version")
    return About(
        str(card["id"]),
        int(most) if most else None,
        _vocabulary(Path(str(card.get("root") or card["id"]))),
        _version(version),
    )


def _version(body: bytes | None) -> str | None:
    with contextlib.suppress(json.JSONDecodeError, AttributeError, UnicodeDecodeError):
        return str(json.loads(body or b"").get("version"))
    return None


def _vocabulary(folder: Path) -> int | None:
    with contextlib.suppress(OSError, json.JSONDecodeError, ValueError, TypeError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config.get("text_config", {})["vocab_size"])
    return None


def default_endpoint(url: str | None, headers: Sequence[str]) -> Endpoint:
    """Read URL and ``--header`` options.

    Raises
    ------
    SpecError
    """
    found = {}
    for text in headers:
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[\w-]+", name.strip()) or "\n" in value or "\r" in value:
            raise SpecError(f"--header {name!r}: write 'NAME: VALUE'.")
        found[name.strip()] = value.strip()
    return endpoint_of(url or "http://127.0.0.1:8000", found)
