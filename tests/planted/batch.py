"""Many `partita` commands in one process: `python -m tests.planted.batch`, requests and outcomes as JSON.

What every command imports is imported once; each then runs its `main` in a fork of its own, two at a time, with its own
arguments, environment variables, folder and output. A command that crashes ends nobody else's. With the word `forked`,
the process of a dry run, too, is a fork of what is imported here; the libraries that the loader finds are those of this
process then.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partita.runtime.worker.parent import PROGRAM

AT_A_TIME = 2
FORKED = "forked"
IMPORTED = ("onnx", "partita.commands.place", "partita.library.place.place_run", "partita.partition_reports.storage")
PACKAGES = (
    "partita.providers",
    "partita.runtime.lab",
)
"""All modules of these, which a command finds by their names."""
WORKER = "partita.runtime.worker"
IN_PLACING = (
    f"{WORKER}.child",
    "partita.library.engine.jobs",
    "partita.library.place.placement",
    "partita.library.place.place_run",
    "numpy.random",
    "partita.diagnosis.explanation",
    "partita.library.place.probing",
    "partita.partition_reports.storage",
    "partita.runtime.place.run_phases",
)
"""And what its process imports besides."""


class Forked(subprocess.Popen[Any]):
    """A process that starts in what is imported already, where it is that of a dry run."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        if list(args)[1:4] != ["-P", "-c", PROGRAM]:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        environment, (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite) = given[5], given[9:15]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
            return
        try:
            os.setsid()
            for number, file in enumerate((p2cread, c2pwrite, errwrite)):
                os.dup2(file, number)
            os.closerange(3, 1024)
            os.environ.clear()
            os.environ.update(environment)
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
            sys.argv, tempfile.tempdir = [WORKER, *list(args)[4:]], None
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            importlib.import_module(f"{WORKER}.child").main()
        finally:
            os._exit(1)


def load(modules: Iterable[str]) -> None:
    """Import these modules, and all of `PACKAGES`."""
    for module in modules:
        importlib.import_module(module)
    for package in PACKAGES:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(found.name)


def begin(request: dict[str, Any], popen: type[subprocess.Popen[Any]] | None = None) -> int:
    """Start a command; the id of its process. `popen`: in place of subprocess's, for its workers."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(request["folder"])
        streams = Path(request.get("streams", request["folder"]))
        for path, number in ((Path(os.devnull), 0), (streams / "out", 1), (streams / "err", 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY, 0o600), number)
        os.environ.clear()
        os.environ.update(request["variables"])
        sys.path[:0] = request.get("path", ())
        sys.argv = ["partita", *request["arguments"]]
        from partita.__main__ import main

        if popen is not None:
            subprocess.Popen = popen  # type: ignore[misc, assignment]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exit code, stdout and stderr of every command."""
    waiting = list(reversed(range(len(requests))))
    running: dict[int, int] = {}
    codes: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            index = waiting.pop()
            running[begin(requests[index], Forked if FORKED in sys.orig_argv else None)] = index
        child, status = os.wait()
        codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
    return [outcome(Path(request["folder"]), codes[index]) for index, request in enumerate(requests)]


def outcome(folder: Path, code: int) -> dict[str, Any]:
    """What a command left behind."""
    out, err = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    return {"code": code, "out": out, "err": err}


if __name__ == "__main__":
    load((*IMPORTED, *(IN_PLACING if FORKED in sys.argv else ())))
    sys.stdout.write(json.dumps(run(json.load(sys.stdin))))
