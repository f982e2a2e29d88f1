"""Processes of `partita` that begin with its modules loaded: a server has imported them, and forks for each command.

A command then has a process of its own, as `python -m partita` gives it, without half a second of imports; so have its
workers, but for those that take other libraries. The server runs no session and no thread. It reads a line of JSON for
each command and answers with a line: the exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.planted.batch import IMPORTED, IN_PLACING, Forked, begin, load, outcome

VERBS = ("generate", "verify", "report", "place")
LOADED = (*IMPORTED, *IN_PLACING, "partita.library.engine.worker_loop", *(f"partita.commands.{verb}" for verb in VERBS))
LIBRARIES = "LD_LIBRARY_PATH"
"""The loader reads it when a program starts."""


class ForkedHere(Forked):
    """A worker that starts in what is imported already, where it is this Python with the same libraries.

    Only the command forks it, and only without other threads: a lock that one of them has would stay locked.
    """

    command = os.getpid()
    """Id of the server's process."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        alone = os.getppid() == self.command and len([*Path("/proc/self/task").iterdir()]) == 1
        same = (given[5] or os.environ).get(LIBRARIES) == os.environ.get(LIBRARIES)
        if alone and same and str(args[0]) == sys.executable:
            super()._execute_child(args, *given)
        else:
            super(Forked, self)._execute_child(args, *given)  # type: ignore[misc]


def run(arguments: list[str], folder: Path, variables: dict[str, str], seconds: int) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `partita` with these arguments; it is killed after so many seconds."""
    with tempfile.TemporaryDirectory() as streams:
        wanted = {"arguments": arguments, "folder": str(folder), "variables": variables, "streams": streams}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({**wanted, "seconds": seconds}) + "\n")
        server.stdin.flush()
        done = outcome(Path(streams), int(server.stdout.readline()))
        return done["code"], done["out"], done["err"]


@cache
def _server() -> subprocess.Popen[str]:
    """The server of this process; it ends when its standard input does."""
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    load(LOADED)
    for line in sys.stdin:
        wanted = json.loads(line)
        same = os.environ.get(LIBRARIES) == wanted["variables"].get(LIBRARIES)
        child = begin(wanted, ForkedHere if same else None)
        signal.signal(signal.SIGALRM, lambda *_, child=child: os.kill(child, signal.SIGKILL))
        signal.alarm(wanted["seconds"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(0)
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
