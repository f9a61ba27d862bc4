"""A headless Chromium, driven over a pipe by its own protocol (`--remote-debugging-pipe`): no port, no driver, no library.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON, each with a null byte behind it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 60
_KEYS = {
    "Tab": 9, "Enter": 13, "Space": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
    "ArrowDown": 40,
}  # fmt: skip


def _pipe() -> tuple[int, int]:
    """Descriptors above 10, which a shell's redirections leave alone."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high


class Chromium:
    """One tab. ``problems``: script errors, errors on the console, and what the page's policy refused."""

    def __init__(self, profile: Path):
        (to_browser, write), (read, from_browser) = _pipe(), _pipe()
        # The browser expects its pipes as descriptors 3 and 4.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser} {to_browser}<&- {from_browser}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._read, self._write, self._buffer, self._number = read, write, b"", 0
        self._session, self._loaded, self.problems = None, 0, []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser ended" if ready else f"no answer in {PATIENCE_S} s")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Page.loadEventFired":
            self._loaded += 1

    def open(self, page: Path) -> None:
        before = self._loaded
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self._loaded == before:
            self._next()

    def reload(self) -> None:
        before = self._loaded
        self.call("Page.reload")
        while self._loaded == before:
            self._next()

    def value(self, expression: str):
        """Of a JavaScript expression, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"Space": " ", "Enter": "\r"}.get(key, key if len(key) == 1 else "")
            shared = {
                "key": " " if key == "Space" else key,
                "code": key,
                "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper())),
            }
            self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def theme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def screenshot(self, path: Path, selector: str | None = None, *, whole: bool = True) -> None:
        """``whole``: the page or the element, without scrollbars; otherwise what the window shows."""
        clip = {}
        if selector:
            box = self.value(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                " return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height, scale: 1}; })()"
            )
            clip = {"clip": box}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)["data"]
        Path(path).write_bytes(base64.b64decode(data))
