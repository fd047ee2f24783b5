"""A headless Chromium, driven by its DevTools protocol: open a page, ask it, see what its console said, photograph it.

with Browser.start(folder) as browser:
    browser.open("http://127.0.0.1:8400/")
    browser.wait("document.title.includes('digits')", "the job's name")
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 30.0
CALL_S = 20.0
LOOK_S = 0.05
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--password-store=basic",
    "--lang=en-GB",
    # All other names fail at once: the page must need nothing from outside.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def find_chromium() -> str | None:
    """The browser's program, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    """One browser with one page."""

    process: subprocess.Popen[bytes]
    socket: websocket.WebSocket
    console: list[str] = field(default_factory=list)
    """What the console said that is an error or a warning, and exceptions nobody caught."""
    requests: list[str] = field(default_factory=list)
    """Every address that was asked for."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def start(cls, folder: Path) -> Browser:
        """Start Chromium with a profile of its own in the folder."""
        program = find_chromium()
        assert program is not None, "there is no Chromium here; ask find_chromium() first"
        profile = folder / "profile"
        profile.mkdir(parents=True)
        # As root Chromium starts without its sandbox only.
        flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={profile}"]
        with (folder / "chromium.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *flags, "about:blank"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            port = _port(profile / "DevToolsActivePort", process, folder / "chromium.log")
            address = _page_address(port)
            link = websocket.create_connection(address, timeout=CALL_S, suppress_origin=True)
        except BaseException:
            _end(process)
            raise
        browser = cls(process, link)
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        return browser

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        _end(self.process)

    # The protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; returns its result."""
        number = next(self._numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.console.append(" ".join(str(item.get("value", item)) for item in parameters["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                entry = parameters["entry"]
                self.console.append(f"{entry['text']} {entry.get('url', '')}".strip())
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    # The page

    def open(self, url: str) -> None:
        """Go to an address and wait until the page and its files are there."""
        result = self.call("Page.navigate", url=url)
        assert not result.get("errorText"), f"{url}: {result['errorText']}"
        self.wait("document.readyState === 'complete'", f"{url} to be loaded")

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """Text of the first element of a selector; empty where there is none."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait(self, expression: str, what: str, *, limit_s: float = 30.0) -> float:
        """Wait until a JavaScript expression is true; returns how many seconds it took."""
        start_s = time.monotonic()
        never = threading.Event()
        while not self.ask(f"Boolean({expression})"):
            if time.monotonic() - start_s > limit_s:
                shown = self.ask("document.body?.innerText.slice(0, 3000)")
                raise AssertionError(
                    f"{what}: not within {limit_s:g} s; the console: {self.console}; the page:\n{shown}"
                )
            never.wait(LOOK_S)
        return time.monotonic() - start_s

    # How it looks

    def resize(self, width: int, height: int, *, scale: float = 1.0, phone: bool = False) -> None:
        """Set the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def prefer(self, scheme: str) -> None:
        """Set what the person prefers: "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def photograph(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))


def _port(path: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that Chromium chose, from the file it writes it to."""
    deadline_s = time.monotonic() + START_S
    never = threading.Event()
    while True:
        lines = path.read_text().splitlines() if path.is_file() else []
        if len(lines) >= 2:
            return int(lines[0])
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise AssertionError(f"Chromium did not start within {START_S:g} s: {log.read_text(errors='replace')}")
        never.wait(LOOK_S)


def _page_address(port: int) -> str:
    """Where the one open page is driven."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=CALL_S) as reply:
        pages = [item for item in json.load(reply) if item["type"] == "page"]
    return str(pages[0]["webSocketDebuggerUrl"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the browser and the processes it started; it leads a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(5.0)
    except (subprocess.TimeoutExpired, ProcessLookupError):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5.0)
