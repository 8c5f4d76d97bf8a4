"""A headless Chromium under the DevTools protocol, over pipes: nothing but the standard library is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 60
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip

# Share of pixels that are not of the commonest colour, and how many colours there are.
_COLOURS = """
(async () => {
  const image = await createImageBitmap(await (await fetch("data:image/png;base64,%s")).blob());
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  return [1 - Math.max(...counts.values()) / pixels.length, counts.size];
})()
"""


def binary() -> str | None:
    """Where Chromium is, if it is."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One browser and what its page did since `open`.

    `requests` are the addresses that it asked for, `refused` those of them that its own policy stopped.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._sent, self._buffer = 0, b""
        self.requests: list[str] = []
        self.refused: list[str] = []
        self.problems: list[str] = []
        self._asked: dict[str, str] = {}
        self._blank = self._attach()
        self._page = self._attach()
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable", self._page)

    def open(self, path: Path, width: int = 1180, scheme: str = "light", media: str = "") -> None:
        """Load a file into a window of that width, in a colour scheme; `media` is print or empty."""
        self.requests, self.refused, self.problems, self._asked = [], [], [], {}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self._page, **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", self._page, media=media, features=features)
        self._call("Page.navigate", self._page, url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        # Two frames later whatever the page wants to load has been asked for.
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str, blank: bool = False) -> Any:
        """The value of an expression in the page, or in an empty page beside it."""
        session = self._blank if blank else self._page
        answer = self._call(
            "Runtime.evaluate", session, expression=expression, returnByValue=True, awaitPromise=True
        )  # fmt: skip
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def colours(self, box: dict[str, float]) -> tuple[float, int]:
        """(share of pixels that are not of the commonest colour, number of colours) of a box of the page."""
        shot = self._call(
            "Page.captureScreenshot", self._page, format="png", clip={**box, "scale": 1}, captureBeyondViewport=True
        )
        assert base64.b64decode(shot["data"])[:4] == b"\x89PNG"
        share, number = self.evaluate(_COLOURS % shot["data"], blank=True)
        return float(share), int(number)

    def _attach(self) -> str:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        return str(self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._read()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, f"no answer from the browser in {PATIENCE} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
            self._asked[parameters["requestId"]] = parameters["request"]["url"]
        elif event.get("method") == "Network.loadingFailed" and parameters.get("blockedReason") == "csp":
            self.refused.append(self._asked[parameters["requestId"]])
        elif event.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.problems.append(json.dumps(parameters))
        return event


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, ended afterwards."""
    program = binary()
    assert program is not None
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # The protocol is spoken on descriptors 3 and 4.
    launch = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", launch, "bash", program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        made = Browser(commands, answers)
        yield made
        made._call("Browser.close")
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
