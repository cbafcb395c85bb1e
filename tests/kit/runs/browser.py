"""Drive a headless Chromium over the pipe of its DevTools protocol: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OFF = ("gpu", "quic", "background-networking", "dev-shm-usage", "component-update", "sync")
_ON = ("headless", "no-sandbox", "no-first-run", "hide-scrollbars", "remote-debugging-pipe", "window-size=1300,1500")
_FLAGS = [*(f"--disable-{name}" for name in _OFF), *(f"--{name}" for name in _ON)]
_SEVERE = ["serious", "critical"]
_TIMEOUT = 60.0  # seconds


class Page:
    """A page in the browser."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer, self._id = send, receive, b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._id:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Open a report and wait until it is drawn."""
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + _TIMEOUT
        while not self.run(f"location.href === {url!r} && document.documentElement?.dataset.ready"):
            assert time.monotonic() < deadline and not self.errors, self.errors
            time.sleep(0.05)

    @contextlib.contextmanager
    def inside_frame(self) -> Iterator[None]:
        """Run scripts in the page's frame, which has an origin and so a session of its own, once it is drawn."""
        outer = self._session
        deadline = time.monotonic() + _TIMEOUT
        while not (frames := self._list_frames()):
            assert time.monotonic() < deadline, "the page has no frame"
            time.sleep(0.05)
        self._session = self.call("Target.attachToTarget", targetId=frames[0], flatten=True)["sessionId"]
        for domain in ("Runtime", "Log"):
            self.call(f"{domain}.enable")
        while not self.run("document.documentElement?.dataset.ready"):
            assert time.monotonic() < deadline and not self.errors, self.errors
            time.sleep(0.05)
        yield
        self._session = outer

    def _list_frames(self) -> list[str]:
        targets = self.call("Target.getTargets")["targetInfos"]
        return [target["targetId"] for target in targets if target["type"] == "iframe"]

    def run(self, script: str) -> Any:
        """Return the value of an expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after another, by their names in events."""
        for key in keys:
            text = {"text": key if len(key) == 1 else "\r"} if len(key) == 1 or key == "Enter" else {}
            code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def show_as(self, *, width: int = 1280, is_dark: bool = False) -> None:
        """Choose the width of the window, in pixels, and the theme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def find_violations(self) -> list[str]:
        """Return what axe-core finds of serious or critical impact, one line each, and rules that fail to run."""
        self.run(f"{files('axe_core_python').joinpath('axe.min.js').read_text(encoding='utf-8')}; 0")
        nodes = "each.nodes.map((node) => `${each.id} (${each.impact}): ${node.target} ${node.failureSummary}`)"
        found = f"result.violations.filter((each) => {_SEVERE}.includes(each.impact)).flatMap((each) => {nodes})"
        failed = "result.incomplete.filter((each) => !each.nodes.length).map((each) => `${each.id} cannot run`)"
        return self.run(f"axe.run().then((result) => [...{found}, ...{failed}])")

    def screenshot(self, path: str) -> None:
        """Write a PNG of the full page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """Start a browser with an empty profile; it ends with the block."""
    assert PROGRAM is not None
    to_browser, send = map(_lift, os.pipe())
    receive, from_browser = map(_lift, os.pipe())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = os.posix_spawn(
            PROGRAM,
            [PROGRAM, f"--user-data-dir={profile}", *_FLAGS],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, to_browser, 3),
                (os.POSIX_SPAWN_DUP2, from_browser, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(send, receive)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(send)
            os.close(receive)


def _lift(fd: int) -> int:
    """Return a copy of a descriptor that is above those of the protocol, and close the original."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(fd)
