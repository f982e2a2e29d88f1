"""Starting the command line is quick, and loads no heavy library where none is needed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

HEAVY = ("torch", "onnxruntime", "transformers", "onnx", "numpy")
IMPORT_LIMIT_SECONDS = 0.06
"""CPU time, with a margin for a busy machine; on an idle one it takes 0.01 s."""
HELP_LIMIT = 2.5
"""CPU time in units of `import typer`, which takes 0.05 to 0.15 s; measured: 1.8."""

# Runs the command line, then tells on a marked last line what it ended with and what it had loaded.
RUN_AND_TELL = f"""
import json, sys
sys.argv[0] = "partita"
code = 0
try:
    from partita.cli import main
    code = main()
except SystemExit as exit:
    code = exit.code
loaded = [m for m in {HEAVY!r} if m in sys.modules]
print("LOADED " + json.dumps([code or 0, loaded]))
"""


def run_and_tell(*arguments: str, cwd: Path) -> tuple[int, list[str], str]:
    """Exit code, heavy modules that were loaded, and stderr."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{RUN_AND_TELL}", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    code, loaded = json.loads(done.stdout.rpartition("LOADED ")[2])
    return code, loaded, done.stderr


def cpu_seconds(*words: str, cwd: Path = REPOSITORY) -> tuple[float, str]:
    """The least CPU time of several runs of Python, and their output. The first run, which reads files, is left out."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds[1:]), done.stdout + done.stderr


def test_help_is_quick():
    seconds, shown = cpu_seconds("-m", "partita", "--help")
    assert "export" in shown and seconds < HELP_LIMIT * cpu_seconds("-c", "import typer")[0]


def test_the_import_is_quick():
    assert cpu_seconds("-c", "import partita")[0] < IMPORT_LIMIT_SECONDS


REFUSED = [
    *((f"{verb} missing -e cpu", "missing: no such folder") for verb in ("verify", "evaluate", "chat", "serve")),
    *((f"{verb} x -e gpu", "did you mean 'cuda' or 'webgpu'?") for verb in ("verify", "place", "bench", "support")),
    ("verify empty -e cpu", "empty: not a Partita package"),
    ("generate x prompt -e gpu", "did you mean 'cuda' or 'webgpu'?"),
    ("generate x prompt --top-p 2", "--top-p is 2.0; it must be above 0 and at most 1"),
    ("place missing.onnx -e cpu", "missing.onnx: no such file"),
    ("report show missing.json", "missing.json"),
    ("no-such-verb", "No such command"),
    ("export missing out", "missing: no such folder, and not a hub id"),
    ("export empty out", "empty: not a checkpoint, it has no config.json"),
    ("export checkpoint empty", "empty: exists already; choose another folder"),
    ("export checkpoint out --target gpu", "did you mean 'cuda' or 'webgpu'?"),
    ("export checkpoint out --precision fp5", "--precision fp5: choose one of auto, fp32"),
    ("export checkpoint out --max-length many", "integer"),
    ("export checkpoint out --max-length 65", "--max-length 65: the model supports at most 64 positions"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_can_be_refused_at_once_is(tmp_path, line, says):
    """An option, a provider, an output and a folder are checked before anything heavy is imported."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"max_position_embeddings": 64}', encoding="utf-8")
    code, loaded, err = run_and_tell(*line.split(), cwd=tmp_path)
    assert code in (1, 2) and loaded == []
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["generate", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(tmp_path, arguments):
    code, loaded, _ = run_and_tell(*arguments, cwd=tmp_path)
    assert (code, loaded) == (0, [])
