"""Native code that ends a process: one line and an exit code, on the command line as its users run it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import psutil
import pytest
from onnx import parser

from partita.errors import INTERRUPTED
from partita.library.engine.jobs import Crashed, CrashError, despite_crashes
from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.resolve import parse_chain
from tests.conftest import Exported, TinyCheckpoint, require
from tests.test_cli import child_environment

NAMES_ENTRY = 'char text[] = "CreateEpFactories";\n'
"""The name that every plugin library has; here nothing is exported under it."""
ABORTS = "#include <stdlib.h>\n__attribute__((constructor)) static void boom(void) { abort(); }\n"
FAULTS = "__attribute__((constructor)) static void boom(void) { *(volatile int *)0 = 1; }\n"
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void wait(void) { sleep(60); }\n"


@pytest.fixture(scope="module")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


def library(folder: Path, source: str) -> Path:
    """A plugin library that never gets as far as offering a provider."""
    require("a C compiler", shutil.which("cc") is not None)
    (folder / "it.c").write_text(source + NAMES_ENTRY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libit.so", "it.c"], cwd=folder, check=True)
    return folder / "libit.so"


def command(package: Path, plugin: Path, verb: str = "generate") -> list[str]:
    """A verb on a chain that begins with the plugin."""
    prompt = ["1,2,3", "--token-ids"] if verb == "generate" else []
    chain = ["--provider", "mine,cpu", "--provider-library", f"mine={plugin}"]
    return [sys.executable, "-m", "partita", verb, str(package), *prompt, *chain]


def told(words: list[str], temporary: Path) -> tuple[int, str]:
    """Exit code and the error line of a command, which prints nothing else and leaves no temporary file."""
    temporary.mkdir()
    environment = {**child_environment(), "TMPDIR": str(temporary)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert [path.name for path in temporary.iterdir() if path.name.startswith("partita")] == []
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("partita: ")]
    return done.returncode, line


LEAVES = "#include <stdlib.h>\n__attribute__((constructor)) static void bye(void) { exit(0); }\n"
KILLS = "#include <signal.h>\n__attribute__((constructor)) static void die(void) { raise(SIGKILL); }\n"


@pytest.mark.parametrize(
    ("verb", "source", "code", "words"),
    [
        ("generate", ABORTS, 3, "mine: initialisation_failed: native code ended the run: it was killed by SIGABRT"),
        ("generate", LEAVES, 3, "mine: initialisation_failed: native code ended the run: it ended with exit code 0"),
        ("verify", KILLS, 1, "the run was killed (SIGKILL), probably out of memory"),
    ],
)
def test_a_crash_is_one_line_and_an_exit_code(
    package: Path, tmp_path: Path, verb: str, source: str, code: int, words: str
) -> None:
    found = told(command(package, library(tmp_path, source), verb), tmp_path / "temporary")
    assert found[0] == code and words in found[1]


@pytest.mark.parametrize(
    ("source", "name", "how"),
    [
        (ABORTS, "SIGABRT", "command line"),
        (FAULTS, "SIGSEGV", "library"),
        pytest.param(ABORTS, "SIGABRT", "library", marks=pytest.mark.heavy),
        pytest.param(FAULTS, "SIGSEGV", "command line", marks=pytest.mark.heavy),
    ],
)
def test_a_crash_over_a_model_still_gets_a_placement_report(tmp_path: Path, source: str, name: str, how: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]>\ng (float[4] x) => (float[4] y) { [n] y = Neg(x) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    plugin = library(tmp_path, source)
    words = [
        "-m",
        "partita",
        "place",
        "m.onnx",
        "--provider",
        "mine,cpu",
        "--provider-library",
        f"mine={plugin}",
        "--json",
    ]
    if how == "library":
        code = (
            f"partita.place('m.onnx', ['mine', 'cpu'], provider_libraries={{'mine': {str(plugin)!r}}}).save('r.json')"
        )
        words = ["-c", f"import partita; {code}"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=child_environment(), check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text() if how == "library" else done.stdout)
    first, last = report["chain"]
    assert (first["status"], first["reason"], last["status"]) == ("unavailable", "initialisation_failed", "active")
    assert first["evidence"].startswith("native code ended the ") and name in first["evidence"]
    (fallback,) = report["fallbacks"]
    assert (fallback["node"], fallback["reason"]) == ("n", "initialisation_failed")


def test_of_several_providers_the_one_is_left_out_that_crashes() -> None:
    chain = parse_chain("openvino,webgpu,cpu")
    tried: list[Crashed] = []

    def place(crashed: Crashed) -> str:
        tried.append(crashed)
        if "webgpu" not in crashed:
            raise CrashError(chain, "ended the run with SIGSEGV")
        return "a report"

    assert despite_crashes(chain, place) == "a report"
    assert [list(crashed) for crashed in tried] == [[], [RUN], [RUN, EXPERIMENTS], ["openvino"], ["webgpu"]]
    assert tried[-1]["webgpu"] == "native code ended the run with SIGSEGV"
    tried.clear()
    assert despite_crashes(chain, place, package=True) == "a report"
    assert [list(crashed) for crashed in tried] == [[], ["openvino"], ["webgpu"]]


def test_a_model_that_crashes_in_a_run_is_placed_without_one() -> None:
    def place(crashed: Crashed) -> str:
        if RUN not in crashed:
            raise CrashError(parse_chain("webgpu,cpu"), "ended the run with SIGABRT")
        return crashed[RUN]

    assert despite_crashes(parse_chain("webgpu,cpu"), place) == "native code ended the run with SIGABRT"


def test_a_process_that_always_crashes_is_an_error_after_all() -> None:
    def place(crashed: Crashed) -> str:
        raise CrashError(parse_chain("qnn,cpu"), "ended the run with SIGABRT")

    with pytest.raises(CrashError, match="qnn: initialisation_failed: native code ended the run with SIGABRT"):
        despite_crashes(parse_chain("qnn,cpu"), place)


@pytest.mark.parametrize(("verb", "number"), [("generate", signal.SIGTERM), ("place", signal.SIGINT)])
def test_a_signal_to_the_command_ends_its_worker_too(
    package: Path, tmp_path: Path, verb: str, number: signal.Signals
) -> None:
    """Only the process that the user started gets the signal; nothing may be left running."""
    running = subprocess.Popen(
        command(package, library(tmp_path, HANGS), verb),
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    child = psutil.Process(running.pid)
    for _ in range(600):
        time.sleep(0.2)
        if grandchildren := child.children():
            break
    assert grandchildren, "it ran in the process of the command"
    time.sleep(1)
    running.send_signal(number)
    if verb == "place" and number == signal.SIGINT:  # the first asks it to report what there is
        time.sleep(1)
        running.send_signal(number)
    _, err = running.communicate(timeout=120)
    assert running.returncode == (INTERRUPTED if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in err
    assert psutil.wait_procs(grandchildren, timeout=60)[1] == []
