"""A headless Chromium, spoken to through a pair of pipes: no driver, no library, no port.

Which one: the environment variable CHROMIUM, else the first that PATH or the tests' own environment has.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "headless_shell",
)
#: Where tests/run.sh unpacks one that it fetched, with the libraries that the machine lacks.
OWN = Path(sys.prefix) / "browser" / "usr" / "lib" / "chromium"
SECONDS = 60


def find_browser() -> str | None:
    """The browser to use, or None."""
    asked = os.environ.get("CHROMIUM")
    if asked:
        return shutil.which(asked)
    own = [str(OWN / name) for name in NAMES]
    return next((found for name in (*NAMES, *own) if (found := shutil.which(name))), None)


class Browser:
    """One running browser with one page.

    Attributes:
        events: Everything it said unasked since the last :meth:`open`.
    """

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            program,
            "--headless",
            "--no-sandbox",  # the page is ours and can run nothing; as root there is no sandbox to be had
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        environment = dict(os.environ)
        if Path(program).is_relative_to(OWN):
            libraries = sorted({str(p.parent) for p in OWN.parents[2].rglob("*.so*")})
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read, False)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One request and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            said = self._next(end)
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return said["result"]
            self.events.append(said)
        raise TimeoutError(method)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            try:
                data = os.read(self._read, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError("the browser says nothing") from None
                time.sleep(0.005)
                continue
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        one, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(one)

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        """Load a file and wait until it is there."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + SECONDS
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next(end))
        self.call("Emulation.setScriptExecutionDisabled", value=False)  # ours, from outside, work again

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in got:
            raise RuntimeError(got["exceptionDetails"])
        return got["result"].get("value")

    def screenshot(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        got = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(got["data"])
