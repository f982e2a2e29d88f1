"""A headless Chromium over its DevTools protocol, through two pipes: no web driver and no socket library needed."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 120


def find_chromium() -> str | None:
    """Path of an installed Chromium."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


class Tab:
    """One page. `problems` collects what the console and the security policy complained about."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.numbers = itertools.count(1)
        self.pending = b""
        self.session: str | None = None
        self.problems: list[str] = []
        self.events: list[str] = []

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self.pending:
            if not select.select([self.from_browser], [], [], ANSWER_SECONDS)[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self.from_browser, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self.pending += part
        raw, _, self.pending = self.pending.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self.note(message)
        return message

    def note(self, message: dict[str, Any]) -> None:
        """Keep what went wrong in the page."""
        method, content = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(content["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.problems.append(content["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(content["args"]))
        elif method == "Network.requestWillBeSent" and not content["request"]["url"].startswith("file:"):
            self.problems.append(f"request to {content['request']['url']}")

    def open(self, page: Path | str, **metrics: Any) -> float:
        """Load a file or address; return the seconds until it had loaded and was laid out. Metrics: width, height."""
        if metrics:
            self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **metrics)
        self.events.clear()
        start = time.perf_counter()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self.receive()
        self.run("document.body.offsetHeight")
        return time.perf_counter() - start

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def prefer(self, **features: str) -> None:
        """Emulate media features; `_` stands for `-`: prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)


@contextmanager
def chromium(profile: Path, *more_options: str) -> Iterator[Tab]:
    """A browser with an empty profile in the folder `profile`, and one tab of it."""
    program = find_chromium()
    assert program, "no Chromium is installed"
    command_in, command_out = os.pipe()
    answer_in, answer_out = os.pipe()
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        *more_options,
    ]
    # Chromium reads commands from file descriptor 3 and writes answers to 4.
    shell = f'exec "$0" "$@" 3<&{command_in} 4>&{answer_out}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", shell, program, *options, "about:blank"],
        pass_fds=(command_in, answer_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_in)
    os.close(answer_out)
    try:
        tab = Tab(command_out, answer_in)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        yield tab
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=ANSWER_SECONDS)
        os.close(command_out)
        os.close(answer_in)
