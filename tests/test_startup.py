"""Starting the command line is quick, and loads no heavy library where none is needed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

HEAVY = ("torch", "onnxruntime", "transformers", "onnx", "numpy", "starlette", "uvicorn", "prometheus_client")
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
    *((f"{verb} missing -e cpu", "missing: no such folder") for verb in ("verify", "evaluate")),
    *(
        (f"{verb} /gone -e cpu", "/gone: no such file or folder")
        for verb in ("run", "generate", "chat", "serve", "bench")
    ),
    *((f"{verb} x -e gpu", "did you mean 'cuda' or 'webgpu'?") for verb in ("verify", "place", "bench", "support")),
    ("verify empty -e cpu", "empty: not a Partita package"),
    ("bench nowhere -e cpu --rounds 0", "--rounds is 0"),
    ("generate x prompt -e gpu", "did you mean 'cuda' or 'webgpu'?"),
    ("generate x prompt --top-p 2", "--top-p is 2.0; it must be above 0 and at most 1"),
    ("place missing.onnx -e cpu", "missing.onnx: no such file"),
    ("report show missing.json", "missing.json"),
    ("no-such-verb", "No such command"),
    ("export /missing out", "/missing: no such file or folder, and not a hub id"),
    ("export ./missing out", "./missing: no such file or folder"),
    ("export empty out", "empty: not a checkpoint: config.json is missing"),
    ("export checkpoint empty", "empty: exists already; choose another folder"),
    ("export checkpoint out --target gpu", "did you mean 'cuda' or 'webgpu'?"),
    ("export checkpoint out --precision fp5", "--precision fp5: choose one of auto, fp32"),
    ("export checkpoint out --max-length many", "integer"),
    ("export checkpoint out --max-length 65", "--max-length 65: the model supports at most 64 positions"),
]


SHOWN = ("--help", "export --help", "generate --help", "bench --help")
RUN_ALL = f"""
import contextlib, io, json, sys
from partita.cli import run
ended = []
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line.split())
    ended.append([code, err.getvalue(), [m for m in {HEAVY!r} if m in sys.modules]])
print(json.dumps(ended))
"""


def test_help_and_what_can_be_refused_at_once_load_nothing_heavy(tmp_path: Path) -> None:
    """An option, a provider, an output and a folder are checked before anything heavy is imported."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"max_position_embeddings": 64}', encoding="utf-8")
    lines = [*SHOWN, *(line for line, _ in REFUSED)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input="\n".join(lines),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    ended = dict(zip(lines, json.loads(done.stdout), strict=True))
    assert [ended[line] for line in SHOWN] == [[0, "", []]] * len(SHOWN)
    for line, says in REFUSED:
        code, err, loaded = ended[line]
        assert code in (1, 2) and loaded == [], line
        assert says in err and err.count("\n") == 1, (line, err)
