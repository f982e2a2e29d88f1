"""Startup and shell completion of the command line are fast and import no heavy library."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from partita.cli import run
from tests.conftest import REPOSITORY

HEAVY = ("torch", "onnxruntime", "transformers", "onnx", "numpy", "starlette", "uvicorn", "prometheus_client")
IMPORT_LIMIT_SECONDS = 0.06
"""CPU time, with a margin for a busy machine; on an idle one it takes 0.01 s."""
HELP_LIMIT = 2.5
"""CPU time in units of `import typer`, which takes 0.05 to 0.15 s; measured: 1.8."""


def cpu_seconds(*words: str, **variables: str) -> tuple[float, str]:
    """The least CPU time of several runs of Python, and their output. The first run, which reads files, is left out."""
    seconds = []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds[1:]), done.stdout + done.stderr


def test_help_meets_cpu_time_limit():
    seconds, shown = cpu_seconds("-m", "partita", "--help")
    assert "export" in shown and seconds < HELP_LIMIT * cpu_seconds("-c", "import typer")[0]


def test_import_meets_cpu_time_limit():
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


def loaded_by(lines: Sequence[str], folder: Path) -> dict[str, tuple[int, str, list[str]]]:
    """Exit code, stderr and heavy modules that were loaded, by command line; all are run in one process."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        command, input="\n".join(lines), cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def test_help_and_early_errors_import_no_heavy_library(tmp_path: Path) -> None:
    """Options, providers, output paths and folders are checked before heavy imports."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"max_position_embeddings": 64}', encoding="utf-8")
    ended = loaded_by([*SHOWN, *(line for line, _ in REFUSED)], tmp_path)
    assert [ended[line] for line in SHOWN] == [(0, "", [])] * len(SHOWN)
    for line, says in REFUSED:
        code, err, loaded = ended[line]
        assert code in (1, 2) and loaded == [], line
        assert says in err and err.count("\n") == 1, (line, err)


# Completion, requested as the shells request it


LIMIT_SECONDS = 0.4
PROVIDERS = ("cpu", "cuda", "openvino", "webgpu")


def variables(shell: str, line: str) -> dict[str, str]:
    """Environment of a question about a line; a blank at the end begins a new word."""
    words = line.split(" ")
    return {"_PARTITA_COMPLETE": f"complete_{shell}", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}


Offered = Callable[[str], list[str]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offered:
    """Words that bash is offered for a line."""

    def ask(line: str) -> list[str]:
        for name, value in variables("bash", line).items():
            monkeypatch.setenv(name, value)
        assert run([]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return str(out).split()

    return ask


def test_completion_offers_commands_and_options(offered: Offered) -> None:
    assert offered("partita ex") == ["export"]
    assert {"show", "html", "diff", "check"} <= set(offered("partita report "))
    assert set(offered("partita generate p --te")) == {"--temperature", "--temp"}


def test_completion_offers_option_values(offered: Offered) -> None:
    assert offered("partita export c o --precision ") == ["auto", "fp32", "fp16", "bf16", "int8", "int4"]
    assert offered("partita export c o --activations ") == ["fp32", "fp16", "bf16", "int8"]
    assert offered("partita export c o --prefill-precision ") == ["int8"]
    assert offered("partita export c o --attention p") == ["primitives"]
    assert set(PROVIDERS) <= set(offered("partita export c o --target "))
    assert set(PROVIDERS) <= set(offered("partita generate p --provider "))
    assert offered("partita verify p -e webg") == ["webgpu"]
    assert set(PROVIDERS) <= set(offered("partita bench p --providers webgpu "))
    assert offered("partita report show r --view ma") == ["markdown"]
    assert offered("partita report diff a b --view ma") == ["markdown"]
    assert set(offered("partita providers --view ")) == {"brief", "html", "json", "markdown", "text"}


def test_completion_offers_only_unused_providers_in_chain(offered: Offered) -> None:
    chains = offered("partita generate p --provider webgpu,")
    assert "webgpu,cpu" in chains and "webgpu,webgpu" not in chains
    assert offered("partita generate p --provider webgpu,cp") == ["webgpu,cpu"]


def test_completion_is_fast_and_imports_no_heavy_library():
    tell = (
        "import atexit, json, sys\n"
        "heavy = ('torch', 'onnxruntime', 'transformers', 'numpy')\n"
        "atexit.register(lambda: print(json.dumps([m for m in heavy if m in sys.modules]), file=sys.stderr))\n"
        "from partita.cli import main\nmain()"
    )
    seconds, printed = cpu_seconds("-c", tell, **variables("bash", "partita generate p --provider "))
    assert "webgpu" in printed.split() and printed.endswith("[]\n")
    # A slow or busy machine is as slow with an empty command line.
    assert seconds < max(LIMIT_SECONDS, 5 * cpu_seconds("-c", "import typer.main")[0])
