"""Child processes that may crash or hang: started side by side, watched, and read as findings, never as our own end.

A child gets one JSON object on stdin and writes JSON lines to stdout; see `provider_child`. Both streams go through
files, so that a child which never stops printing cannot block us and what a crashed one said last is kept. Knows
nothing of providers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import partita
from partita.files import temporary_directory
from partita.orphans import PARENT
from partita.runtime.ort.native_log import clean_lines
from partita.signals import ended_by_exception, held

POLL_SECONDS = 0.005
END_SECONDS = 5.0
"""For a child to end its own children, once it is told to leave."""
LONGEST_OUTPUT_BYTES = 4 << 20
"""What is read of a stream at most, from its end."""


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """How a child ended, and what it said."""

    result: Mapping[str, Any] | None
    """Its result; None when it ended without one."""
    stage: str
    """The last stage that it announced; `start` when it announced none."""
    log: tuple[str, ...]
    """Lines of its stderr, without colours and time stamps."""
    ended: str | None
    """Why there is no result: it `was killed by SIGABRT`, `ended with exit code 1`, `gave no answer within 30 s`; None
    when there is one."""
    seconds: float
    late: bool = False
    """It was stopped because it did not finish in time."""
    signal: int | None = None
    """What killed it, as a number; None when nothing did, or when it was late."""


def run_children(
    module: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    timeout_seconds: float,
    slots: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[ChildOutcome, ...]:
    """Run `python -m module` once per request, at most `slots` at a time (None: one per core); outcomes in that order.

    A child that gives no result in `timeout_seconds` is killed with everything that it started. So are all of them when
    this is interrupted. Raises OSError when no process can be started at all.
    """
    slots = slots or os.cpu_count() or 1
    waiting = list(enumerate(requests))[::-1]
    running: list[tuple[int, Child]] = []
    outcomes: dict[int, ChildOutcome] = {}
    with temporary_directory() as folder, ended_by_exception():
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    index, request = waiting.pop()
                    with held():
                        running.append((index, Child(module, request, Path(folder) / str(index), environment)))
                done = [(index, child) for index, child in running if child.over(timeout_seconds)]
                for index, child in done:
                    outcomes[index] = child.outcome(timeout_seconds)
                running = [entry for entry in running if entry not in done]
                if not done:
                    time.sleep(POLL_SECONDS)
        finally:
            for _, child in running:
                child.kill()
    return tuple(outcomes[index] for index in range(len(requests)))


def run_patiently(
    module: str, request: Mapping[str, Any], *, timeout_seconds: float, environment: Mapping[str, str] | None = None
) -> ChildOutcome:
    """Run `python -m module` once; a child that has children of its own, and a result worth having when interrupted.

    The first Ctrl-C is passed on to it, and its result waited for; the second ends it. Raises KeyboardInterrupt when
    it gave no result after one.
    """
    interrupted = False
    # What it started may still be writing when it had to be killed.
    with temporary_directory() as folder, ended_by_exception():
        with ExitStack() as end:
            with held():
                child = Child(module, request, Path(folder) / "0", environment)
                end.callback(child.end)
            try:
                child.wait(timeout_seconds)
            except KeyboardInterrupt:
                interrupted = True
                child.tell(signal.SIGINT)
                child.wait(timeout_seconds)
        outcome = child.outcome(timeout_seconds)
    if interrupted and outcome.result is None:
        raise KeyboardInterrupt
    return outcome


class Child:
    """One child process and the files that its streams go to."""

    def __init__(
        self, module: str, request: Mapping[str, Any], place: Path, environment: Mapping[str, str] | None
    ) -> None:
        self.began, self.timed_out = time.perf_counter(), False
        self.paths = [place.with_suffix(suffix) for suffix in (".in", ".out", ".err")]
        self.paths[0].write_text(json.dumps(request), encoding="utf-8")
        with open_all(self.paths) as (given, out, err):
            # -P: the folder we were started in must not shadow a module. A session of its own: killed with what it
            # started, and not reached by the Ctrl-C that is meant for us.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=given,
                stdout=out,
                stderr=err,
                env={
                    **(os.environ if environment is None else environment),
                    "PYTHONPATH": search_path(),
                    PARENT: str(os.getpid()),
                },
                start_new_session=True,
            )

    def over(self, timeout_seconds: float) -> bool:
        """Whether it has ended; ends it when its time is up."""
        if self.process.poll() is not None:
            return True
        if time.perf_counter() - self.began < timeout_seconds:
            return False
        self.timed_out = True
        self.kill()
        return True

    def wait(self, timeout_seconds: float) -> None:
        """Wait until it has ended, or its time is up."""
        while self.process.poll() is None and not self.timed_out:
            self.timed_out = time.perf_counter() - self.began >= timeout_seconds
            time.sleep(POLL_SECONDS)

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to it alone, not to what it started."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> None:
        """Tell it to leave, so that it ends children that it gave sessions of their own; then end it."""
        self.tell(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it and everything that it started."""
        try:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        except (ProcessLookupError, PermissionError):  # it ended by itself meanwhile
            pass
        self.process.wait()

    def outcome(self, timeout_seconds: float) -> ChildOutcome:
        """What became of it; only when it is over."""
        lines = _json_lines(read_end(self.paths[1]))
        result = next((line["result"] for line in lines if isinstance(line.get("result"), dict)), None)
        stages = [str(line["stage"]) for line in lines if "stage" in line]
        why = f"gave no answer within {timeout_seconds:g} s" if self.timed_out else how_ended(self.process.returncode)
        return ChildOutcome(
            result=result,
            stage=stages[-1] if stages else "start",
            log=clean_lines(read_end(self.paths[2])),
            ended=why if result is None else None,
            seconds=time.perf_counter() - self.began,
            late=self.timed_out,
            signal=-self.process.returncode if self.process.returncode < 0 and not self.timed_out else None,
        )


@contextmanager
def open_all(paths: Sequence[Path]) -> Iterator[tuple[IO[bytes], ...]]:
    """The first file to read and the others to write; closed here, the child keeps its own copies."""
    files = [path.open("rb" if index == 0 else "wb") for index, path in enumerate(paths)]
    try:
        yield tuple(files)
    finally:
        for file in files:
            file.close()


def search_path() -> str:
    """PYTHONPATH of a child: this very Partita first, installed or not."""
    ours = str(Path(partita.__file__).resolve().parent.parent)
    return os.pathsep.join(part for part in (ours, os.environ.get("PYTHONPATH", "")) if part)


def how_ended(code: int) -> str:
    """`was killed by SIGSEGV` or `ended with exit code 1`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _json_lines(text: str) -> list[dict[str, Any]]:
    """The lines of `text` that are JSON objects; a line that was cut off by a crash is none."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read_end(path: Path) -> str:
    """The end of a file, as text."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - LONGEST_OUTPUT_BYTES, 0))
        return file.read().decode("utf-8", errors="replace")
