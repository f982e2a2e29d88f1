"""Processes of `partita` that begin with its modules loaded: a server has imported them, and forks for each command.

A command then has a process of its own, as `python -m partita` gives it, without half a second of imports; so have its
workers, but for those that take other libraries. The server runs no session and no thread. It reads a line of JSON for
each command and answers with a line: the exit code.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.planted.batch import IMPORTED, IN_PLACING, PACKAGES, Forked

VERBS = ("generate", "verify", "report", "place")
LOADED = (*IMPORTED, *IN_PLACING, "partita.library.engine.worker_loop", *(f"partita.commands.{verb}" for verb in VERBS))
LIBRARIES = "LD_LIBRARY_PATH"
"""The loader reads it when a program starts."""


class ForkedHere(Forked):
    """A worker that starts in what is imported already, where it is this Python with the same libraries.

    Only the command forks it, and only without other threads: a lock that one of them has would stay locked.
    """

    command = 0
    """Id of the command's process."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        alone = os.getpid() == self.command and len([*Path("/proc/self/task").iterdir()]) == 1
        same = (given[5] or os.environ).get(LIBRARIES) == os.environ.get(LIBRARIES)
        if alone and same and str(args[0]) == sys.executable:
            super()._execute_child(args, *given)
        else:
            super(Forked, self)._execute_child(args, *given)  # type: ignore[misc]


def run(arguments: list[str], folder: Path, environment: dict[str, str], seconds: int) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `partita` with these arguments; it is killed after so many seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        paths = [str(Path(temporary) / name) for name in ("out", "err")]
        wanted = {"arguments": arguments, "folder": str(folder), "environment": environment, "paths": paths}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({**wanted, "seconds": seconds}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(path).read_text(encoding="utf-8") for path in paths)
        return code, out, err


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
    for module in LOADED:
        importlib.import_module(module)
    for package in PACKAGES:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(found.name)
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if not child:
            _begin(wanted)
        signal.signal(signal.SIGALRM, lambda *_, child=child: os.kill(child, signal.SIGKILL))
        signal.alarm(wanted["seconds"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(0)
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _begin(wanted: dict[str, Any]) -> None:
    """Be the command: its streams, folder, environment and words."""
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number, path in enumerate((os.devnull, *wanted["paths"])):
            place = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY, 0o600)
            os.dup2(place, number)
            os.close(place)
        os.chdir(wanted["folder"])
        same = os.environ.get(LIBRARIES) == wanted["environment"].get(LIBRARIES)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        if same:
            ForkedHere.command = os.getpid()
            subprocess.Popen = ForkedHere  # type: ignore[misc]
        sys.argv = ["partita", *wanted["arguments"]]
        from partita.__main__ import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
