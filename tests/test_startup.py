"""Starting the command line is quick, and loads no heavy library where none is needed."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

HEAVY = ("torch", "onnxruntime", "transformers")
HELP_LIMIT_SECONDS = 0.3

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


def test_help_is_quick():
    command = [sys.executable, "-m", "partita", "--help"]
    seconds = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "export" in done.stdout
    # Of the processor, which on an idle machine is the time that a user waits: other work may run beside this test. The
    # first run reads files from disk and may compile them; a user pays for that once.
    assert min(seconds[1:]) < HELP_LIMIT_SECONDS, seconds


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["generate", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(tmp_path, arguments):
    code, loaded, _ = run_and_tell(*arguments, cwd=tmp_path)
    assert (code, loaded) == (0, [])


@pytest.mark.parametrize(
    "arguments",
    [["no-such-verb"], ["generate"], ["export", "a", "b", "--max-length", "many"], ["report", "show"]],
    ids=" ".join,
)
def test_usage_error_is_exit_2_and_loads_nothing_heavy(tmp_path, arguments):
    code, loaded, stderr = run_and_tell(*arguments, cwd=tmp_path)
    assert (code, loaded) == (2, [])
    assert stderr.strip() and "Traceback" not in stderr


def test_missing_report_is_one_line_and_loads_nothing_heavy(tmp_path):
    code, loaded, stderr = run_and_tell("report", "show", "missing.json", cwd=tmp_path)
    assert (code, loaded) == (1, [])
    assert "missing.json" in stderr
    assert len(stderr.strip().splitlines()) == 1, stderr


def test_a_page_is_written_without_heavy_libraries(tmp_path):
    from partita.partition_reports import storage
    from tests.partition_reports.pages import mixed_report

    storage.write(mixed_report(), tmp_path / "run.json")
    code, loaded, stderr = run_and_tell("report", "html", "run.json", cwd=tmp_path)
    assert (code, loaded) == (0, []), stderr
    assert (tmp_path / "run.html").is_file()


@pytest.mark.parametrize(("arguments", "exit_code"), [(["--target", "gpu"], 2), ([], 1)])
def test_an_export_that_can_be_refused_at_once_is(tmp_path, arguments, exit_code):
    """An output that is there, and a provider that nobody knows: neither takes torch to see."""
    out = tmp_path / ("new" if arguments else "")
    code, loaded, err = run_and_tell("export", "owner/name", str(out), *arguments, cwd=tmp_path)
    assert (code, loaded) == (exit_code, [])
    assert "did you mean 'cuda' or 'webgpu'?" in err if arguments else "exists already; choose another folder" in err
