"""A headless Chromium over its debugging pipe: what a page logs, throws and asks the network for; keys, clicks, pixels.

No package is needed: messages are JSON, ended by a zero byte, on two pipes that the browser finds as files 3 and 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars", "about:blank")  # fmt: skip
INTO_3_AND_4 = (
    "import os, sys; r, w = int(sys.argv[1]), int(sys.argv[2]);"
    "r, w = os.dup(r), os.dup(w); r, w = os.dup(r), os.dup(w);"  # neither is 3 or 4 then
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
SECONDS = 60.0


def find() -> str | None:
    """Path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; use it in a ``with`` block."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        command = [sys.executable, "-c", INTO_3_AND_4, str(to_read), str(to_write), program, *FLAGS[:-1]]
        command += [f"--user-data-dir={profile}", FLAGS[-1]]
        pipes = (to_read, to_write)
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=pipes, stdin=quiet, stdout=quiet, stderr=quiet)
        for pipe in pipes:
            os.close(pipe)
        self._buffer, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{part}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") != self._count:
                self.events.append(found)
                continue
            if "error" in found:
                raise RuntimeError(f"{method}: {found['error']}")
            return dict(found["result"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError("Chromium did not answer")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError("Chromium ended")
            self._buffer += read
        raw, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(raw))

    def open(self, page: Path, width: int, height: int = 800, dark: bool = False, scripts: bool = True) -> None:
        """Load a file at a width; returns when it has loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """Value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def asked(self) -> list[str]:
        """Addresses that were asked for."""
        return [event["params"]["request"]["url"] for event in self._of("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Exceptions, and what the console was told of trouble."""
        found = [str(e["params"]["exceptionDetails"]) for e in self._of("Runtime.exceptionThrown")]
        found += [str(e["params"]) for e in self._of("Runtime.consoleAPICalled")]
        return found + [str(e["params"]["entry"]) for e in self._of("Log.entryAdded")]

    def _of(self, method: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event.get("method") == method]

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
