"""A child process that is kept alive and asked one thing at a time: JSON lines in, JSON lines out.

Like `children`, it may crash or hang, and that is a finding; unlike there, it answers more than once. Its stdin
and stdout are pipes: it says one line per question, and what native code prints goes to a file.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from partita.runtime.ort.native_log import clean_lines
from partita.runtime.process.children import how_ended, read_end, search_path

END_SECONDS = 5.0
"""For a child to leave by itself, once it is told to or has closed its stdout."""
SAID = 200


class ChildLostError(Exception):
    """The child gave no answer: what became of it, in words."""


class LiveChild:
    """One child process. `close` ends it, whatever it is doing.

    `arguments`: words of its command line. `farewell`: a line that it is told before its stdin ends, where it has to
    know that from the end of this process. `environment`: its variables; None: ours.
    """

    def __init__(
        self,
        module: str,
        folder: Path,
        arguments: Sequence[str] = (),
        farewell: str = "",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.farewell = farewell
        folder.mkdir()
        self.log = folder / "stderr"
        self.lines: queue.Queue[str | None] = queue.Queue()
        with self.log.open("wb") as log:
            # See `children`. What a crash leaves behind goes with the folder.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={
                    **(os.environ if environment is None else environment),
                    "PYTHONPATH": search_path(),
                    "TMPDIR": str(folder),
                },
                start_new_session=True,
            )
        self.lost = ""
        """What became of it, once it gave no answer."""
        self.late = False
        """It was ended because it gave no answer in time."""
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # closed while it was read
            for line in self.process.stdout:
                self.lines.put(line)
        self.lines.put(None)

    def ask(self, question: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The answer of the child. Raises ChildLostError when it ends, hangs, or says something else, now or before."""
        if self.lost:
            raise ChildLostError(self.lost)
        assert self.process.stdin is not None
        written = json.dumps(question) + "\n"
        # One that has ended is noticed by its stdout; so is one that another thread has closed meanwhile (ValueError).
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(written)
            self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=timeout_seconds)
        except queue.Empty:
            self.late = True
            raise self.give_up(f"gave no answer within {timeout_seconds:g} s{self.last_line()}") from None
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
            self.kill()
            raise self.give_up(f"{how_ended(self.process.returncode)}{self.last_line()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self.give_up(f"sent an unexpected response: {line[:SAID].strip()!r}")
        return answer

    def give_up(self, why: str) -> ChildLostError:
        """End the child; the error that says why."""
        self.lost = why
        self.kill()
        return ChildLostError(why)

    def last_line(self) -> str:
        """What it wrote last on stderr, in words; empty when it wrote nothing."""
        lines = clean_lines(read_end(self.log))
        return f"; last line: {lines[-1][:SAID]}" if lines else ""

    def close(self) -> None:
        """Let it leave, and end it when it does not."""
        if self.process.poll() is None and self.process.stdin is not None:
            with suppress(OSError, ValueError):
                self.process.stdin.write(self.farewell)
                self.process.stdin.close()  # the end of the questions
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it and everything that it started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                if hasattr(os, "killpg"):
                    os.killpg(self.process.pid, signal.SIGKILL)
                else:
                    self.process.kill()
        self.process.wait()
        self.listener.join(END_SECONDS)
        if self.process.stdin is not None:
            with suppress(OSError):  # what was not written yet has no reader
                self.process.stdin.close()
        if self.process.stdout is not None and not self.listener.is_alive():
            self.process.stdout.close()
