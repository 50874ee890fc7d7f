"""A headless chromium, driven through a pipe, for tests of pages."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0  # until an answer must have come


class Browser:
    """Chromium's devtools protocol: messages of JSON with a zero byte after each."""

    def __init__(self, program: str, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # what we write, what it writes
        far = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (ours[0], theirs[1])]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}"]
        # The program reads from 3 and writes to 4.
        start = f"import os, sys; os.dup2({far[0]}, 3); os.dup2({far[1]}, 4)"
        start += "; os.execv(sys.argv[1], sys.argv[1:])"
        self.log = (folder / "log.txt").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, program, *flags, "about:blank"],
            pass_fds=far,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        for end in (ours[0], theirs[1], *far):
            os.close(end)
        self.to, self.back = ours[1], theirs[0]
        self.numbers, self.buffer = itertools.count(1), b""
        self.heard: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **given: Any) -> Any:
        """Return the answer to a command; events that come meanwhile are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": given}
        message |= {"sessionId": session} if session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = self._read(end)
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            self.heard.append(found)
        raise TimeoutError(method)

    def hear(self, method: str, session: str) -> None:
        """Wait for an event."""
        end = time.monotonic() + SECONDS
        wanted = {"method": method, "sessionId": session}
        while not any(wanted.items() <= event.items() for event in self.heard):
            self.heard.append(self._read(end))

    def _read(self, end: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self.back, selectors.EVENT_READ)
            while b"\0" not in self.buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError("chromium says nothing")
                part = os.read(self.back, 1 << 20)
                if not part:
                    raise ConnectionError("chromium has ended")
                self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError, TimeoutError):
            self.send("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for end in (self.to, self.back):
            os.close(end)
        self.log.close()


class Page:
    """A page that is open in the browser."""

    def __init__(self, browser: Browser, path: Path, width: int, *, is_dark: bool = False) -> None:
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.target, self.session = target, attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width)
        if is_dark:
            feature = {"name": "prefers-color-scheme", "value": "dark"}
            self.send("Emulation.setEmulatedMedia", features=[feature])
        browser.heard.clear()
        self.send("Page.navigate", url=path.as_uri())
        browser.hear("Page.loadEventFired", self.session)
        assert self.run("'drawn' in document.documentElement.dataset"), self.problems()

    def send(self, method: str, **given: Any) -> Any:
        return self.browser.send(method, self.session, **given)

    def resize(self, width: int, height: int = 900) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **sizes)

    def run(self, code: str) -> Any:
        """Return the value of an expression."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, code: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.run(code):
            assert time.monotonic() < end, f"never true: {code}; {self.problems()}"
            time.sleep(0.02)

    def problems(self) -> list[Any]:
        """Return errors and warnings of the console, exceptions, and requests to a network."""
        self.run("0")
        found: list[Any] = []
        for event in self.browser.heard:
            method, given = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(given["exceptionDetails"])
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
                found.append(given["args"])
            elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                found.append(given["entry"])
            elif method == "Network.requestWillBeSent":
                url = given["request"]["url"]
                found += [] if url.startswith(("file:", "data:", "about:")) else [url]
        return found

    def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        found = self.send("Page.captureScreenshot", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    found = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def open_one(path: Path, width: int = 1200, **options: Any) -> Page:
        pages.append(Page(browser, path, width, **options))
        return pages[-1]

    yield open_one
    for page in pages:
        page.close()
