"""Where optimum's environment is, and how something is asked of it: in a child process, which ends with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import InstallationError, UnsupportedModelError
from partita.export.optimum import child
from partita.remedies import Remedy

VARIABLE = "PARTITA_OPTIMUM_PYTHON"
"""Environment variable with the interpreter of the environment."""
FOLDER = Path(".venvs") / "optimum"
"""What `make env-optimum` creates, below the folder of a clone."""
MAKE = Remedy(
    f"set {VARIABLE} to the Python of an environment of its own, made by",
    ("pip", "install", "optimum-onnx", "onnxruntime", "accelerate"),
)
LOG_LINES = 3
DISTRIBUTION = "optimum-onnx"


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter that has optimum."""

    python: Path

    def covers(self, model_type: str) -> bool:
        """Whether optimum exports decoders of that type. Raises PartitaError when the environment cannot be asked."""
        return child.TASK in self._ask({"do": "covers", "model_type": model_type}, None)["tasks"]

    def export(self, checkpoint: Path, out: Path, model_type: str, precision: str, opset: int | None) -> dict[str, str]:
        """Have optimum write `out`; the versions of what did it.

        Raises UnsupportedModelError when optimum does not know the type or fails over the model, PartitaError when the
        child ends before it has answered.
        """
        request = {
            "do": "export",
            "model_type": model_type,
            "checkpoint": str(checkpoint.resolve()),
            "out": str(out.resolve()),
            "precision": precision,
            "opset": opset,
        }
        found = self._ask(request, out.parent)
        if child.TASK not in found["tasks"]:
            version = found["versions"].get(DISTRIBUTION, "")
            raise UnsupportedModelError(
                f"optimum-onnx {version} does not export decoders of type {model_type}; `exporter=native` may"
            )
        versions: dict[str, str] = found["versions"]
        return versions

    def _ask(self, request: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        """The answer of a child process. Raises PartitaError with the end of what it wrote when there is none."""
        with tempfile.TemporaryDirectory(prefix="partita-optimum-") as name:
            answer, log = Path(name) / "answer.json", Path(name) / "log.txt"
            told = {**request, "answer": str(answer)}
            with log.open("wb") as stream:
                code = _run(self.python, json.dumps(told), stream, folder or Path(name))
            found: dict[str, Any] = {}
            with suppress(OSError, ValueError):
                found = json.loads(answer.read_text(encoding="utf-8"))
            if "lacks" in found:
                raise InstallationError(f"the environment of optimum lacks the module {found['lacks']}", remedy=MAKE)
            if "error" in found:
                raise _failed(found["error"])
            if "tasks" not in found:
                ended = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise _failed(f"its process ended with {ended}{_end_of(log)}")
            return found


def find() -> Environment | None:
    """The environment that the variable names, or that was made in this clone; None when there is neither."""
    given = os.environ.get(VARIABLE)
    if given:
        # It is started in another folder. Not resolved: the python of an environment is a link.
        return Environment(Path(given).absolute())
    for home in (Path.cwd(), Path(__file__).parents[3]):
        for python in (home / FOLDER / "bin" / "python", home / FOLDER / "Scripts" / "python.exe"):
            if python.is_file():
                return Environment(python)
    return None


def required() -> Environment:
    """The environment. Raises InstallationError, which says how to make one, when there is none."""
    found = find()
    if found is None:
        raise InstallationError(
            "exporter optimum runs in an environment of its own, as optimum-onnx needs transformers before 4.58, and "
            "there is none",
            remedy=MAKE,
        )
    if not found.python.is_file():
        raise InstallationError(f"{VARIABLE} is {str(found.python)!r}, and no such file is there", remedy=MAKE)
    return found


def _run(python: Path, request: str, log: Any, folder: Path) -> int:
    """Run the script to its end; its exit code. However this block is left, it has ended. Raises InstallationError."""
    # -I: neither PYTHONPATH nor the user's site may bring this environment's libraries into the other one.
    command = [str(python), "-I", child.__file__]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["HF_HUB_OFFLINE"] = "1"
    try:
        running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=sys.platform != "win32",  # Ctrl-C comes to this process, which ends the other
        )
    except OSError as error:
        raise InstallationError(f"{python}: cannot be started ({error.strerror or error})", remedy=MAKE) from error
    assert running.stdin is not None
    try:
        with suppress(BrokenPipeError):
            running.stdin.write(f"{request}\n")
            running.stdin.flush()
        return running.wait()  # stdin stays open until then: its end is the end of this process
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()
        with suppress(BrokenPipeError):
            running.stdin.close()


def _failed(said: str) -> UnsupportedModelError:
    """The error for an export that optimum did not do."""
    return UnsupportedModelError(f"optimum's exporter failed: {said[:400]}")


def _end_of(log: Path) -> str:
    """The last lines that the child wrote, as the end of a sentence."""
    lines = [" ".join(line.split()) for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = " / ".join(filter(None, lines[-LOG_LINES:]))
    return f": {last}" if last else ""
