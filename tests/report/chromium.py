"""A real headless Chromium, driven over its debugging pipe: no driver, no network, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

ANSWER_S = 120.0


def find_chromium() -> str | None:
    """The browser's program, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of a browser; `problems` are its console errors and failed requests."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to = to_browser
        self._from = from_browser
        self._answers: Queue[dict[str, Any]] = Queue()
        self._loaded = threading.Event()
        self._next_id = 0
        self._session: str | None = None
        self.problems: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Shows a file in a window of this size and waits until it is loaded."""
        self.problems.clear()
        self._loaded.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.absolute().as_uri())
        assert self._loaded.wait(ANSWER_S), f"{page} did not load"

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole_page: bool = True) -> None:
        """Saves the page as PNG."""
        options = {"captureBeyondViewport": whole_page, "format": "png"}
        if whole_page:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**size, "x": 0, "y": 0, "scale": 1}
        data = self.ask("Page.captureScreenshot", **options)["data"]
        path.write_bytes(base64.b64decode(data))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._answers.get(timeout=ANSWER_S)
        assert answer["id"] == self._next_id, answer
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._from, 1 << 20):
            *messages, rest = (rest + chunk).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._answers.put(message)
                else:
                    self._note_event(message["method"], message["params"])

    def _note_event(self, method: str, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {event['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.problems.append(f"console: {event['args']}")
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {event['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = event["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.problems.append(f"request: {url}")


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    program = find_chromium()
    assert program, "needs Chromium: apt-get install chromium fonts-dejavu-core"
    browser_in, to_browser = _high_pipe()
    from_browser, browser_out = _high_pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={profile}"]
    place_pipes = f'exec "$@" 3<&{browser_in} 4>&{browser_out}'  # where Chromium wants them
    process = subprocess.Popen(
        ["bash", "-c", place_pipes, "bash", program, *flags],
        pass_fds=(browser_in, browser_out), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(browser_in)
    os.close(browser_out)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are clear of the numbers 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
