"""Many `partita` commands in one process: `python -m tests.planted.batch`, requests and outcomes as JSON.

What every command imports is imported once; each then runs its `main` in a fork of its own, two at a time, with its own
arguments, environment variables, folder and output. A command that crashes ends nobody else's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

AT_A_TIME = 2
IMPORTED = ("onnx", "partita.commands.place", "partita.library.place_run", "partita.partition_reports.views.json")
"""Nothing that loads ONNX Runtime, which has threads."""


def begin(request: dict[str, Any]) -> int:
    """Start a command; the id of its process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        folder = Path(request["folder"])
        os.chdir(folder)
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.environ.clear()
        os.environ.update(request["variables"])
        sys.path[:0] = request["path"]
        sys.argv = ["partita", *request["arguments"]]
        from partita.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exit code, stdout and stderr of every command."""
    waiting = list(reversed(range(len(requests))))
    running: dict[int, int] = {}
    codes: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            index = waiting.pop()
            running[begin(requests[index])] = index
        child, status = os.wait()
        codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
    return [outcome(Path(request["folder"]), codes[index]) for index, request in enumerate(requests)]


def outcome(folder: Path, code: int) -> dict[str, Any]:
    """What a command left behind."""
    out, err = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    return {"code": code, "out": out, "err": err}


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    sys.stdout.write(json.dumps(run(json.load(sys.stdin))))
