"""A copy of Partita to which a test adds files: what is shown there needs those files and edits, and no others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

RUN = '''
import contextlib, io, json, sys
from partita.cli import run

def told(*words):
    """One command line: its exit code, and what it wrote."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
        out.flush()
    return {"code": code, "out": out.buffer.getvalue().decode(), "err": err.getvalue()}

def answer(**found):
    """What the test is to see."""
    print("ANSWER " + json.dumps(found), file=sys.__stdout__)

'''


@dataclass
class Copy:
    """A folder with links to all files of Partita, its tools and its tests."""

    folder: Path
    touched: list[str] = field(default_factory=list)
    """Files added or edited, relative to the repository."""

    def add(self, path: str, text: str) -> None:
        """A file that was not there."""
        target = self.folder / path
        assert not target.exists()
        target.write_text(text, encoding="utf-8")
        self.touched.append(path)

    def edit(self, path: str, old: str, new: str) -> None:
        """Text in a file that is there, once."""
        target = self.folder / path
        text = target.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        target.unlink()  # a link
        target.write_text(text.replace(old, new), encoding="utf-8")
        self.touched.append(path)

    def python(self, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Python, with this copy in place of Partita."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "200"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **settings)

    def ask(self, script: str) -> dict[str, Any]:
        """What a script answers that may use `told` and `answer`, in the folder above the copy."""
        done = self.python("-c", RUN + script, cwd=self.folder.parent)
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert done.returncode == 0 and len(answers) == 1, done.stderr
        found: dict[str, Any] = json.loads(answers[0].removeprefix("ANSWER "))
        return found


def copy_of_partita(folder: Path) -> Copy:
    """A fresh copy in `folder`."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("partita", "tests", "tools"):
        shutil.copytree(REPOSITORY / name, folder / "copy" / name, copy_function=os.symlink, ignore=ignored)
    return Copy(folder / "copy")
