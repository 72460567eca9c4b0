"""A headless Chromium, driven through its remote-debugging pipe: real mouse, real keys, real console.

No driver package: the pipe is file descriptors 3 and 4 with JSON messages that end in a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium, or None; ``MEGACOMPILE_BROWSER`` names one."""
    named = os.environ.get("MEGACOMPILE_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. ``problems`` holds what its console, its scripts and its network complained of."""

    def __init__(self, binary: str, profile: Path, size: tuple[int, int] = (1440, 900)) -> None:
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        command = [
            binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", "--no-first-run", "--disable-extensions", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "about:blank",
        ]  # fmt: skip

        def arrange() -> None:
            os.dup2(read_end, 3)
            os.dup2(write_end, 4)

        # the ends are moved beyond 3 and 4 first, so that neither overwrites the other
        read_end, write_end = _beyond(read_end), _beyond(write_end)
        self._process = subprocess.Popen(
            command, preexec_fn=arrange, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_end)
        os.close(write_end)
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1],
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def call(self, method: str, **parameters: Any) -> Any:
        """Send one command and return its result; what happens meanwhile is looked through for problems."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("The browser has ended.")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        name, given = event.get("method", ""), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.problems.append(
                given["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        elif name == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{given['type']}: {[a.get('value') for a in given['args']]}")
        elif name == "Log.entryAdded":
            self.problems.append(f"{given['entry']['level']}: {given['entry']['text']}")
        elif name == "Network.requestWillBeSent":
            url = given["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.problems.append(f"request to {url}")

    def open(self, path: Path) -> None:
        """Load a page and wait until it has drawn itself."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : onload = done)")
        self.settle()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", str(found)))
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait for two frames, after which everything asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="none" if kind == "mouseMoved" else "left", clickCount=1)

    def key(self, *names: str) -> None:
        for name in names:
            text = {"text": name} if len(name) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.settle()

    def scheme(self, name: str) -> None:
        """Light or dark, as the system would say."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
        self.settle()

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
        except (RuntimeError, OSError):
            self._process.kill()
        self._process.wait(20)
        for end in (self._read, self._write):
            os.close(end)


def _beyond(descriptor: int, least: int = 10) -> int:
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, least)
    os.close(descriptor)
    return moved


def texts(browser: Browser, selector: str) -> Sequence[str]:
    """The text of every element that a selector finds."""
    found: list[str] = browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )
    return found
