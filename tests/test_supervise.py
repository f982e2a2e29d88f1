"""Native code that ends the process: a finding with an exit code, on the command line as its users run it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextvars import ContextVar
from pathlib import Path

import onnx
import psutil
import pytest
from onnx import parser

from partita.commands.supervise import ended_by, worth_it
from partita.errors import INTERRUPTED, ProviderError
from partita.library.crashes import Crashed, CrashError, despite_crashes
from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.resolve import parse_chain
from tests.conftest import Exported, TinyCheckpoint, require
from tests.test_cli import child_environment

ABORTS = "#include <stdlib.h>\n__attribute__((constructor)) static void boom(void) { abort(); }\n"
FAULTS = "__attribute__((constructor)) static void boom(void) { *(volatile int *)0 = 1; }\n"
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void wait(void) { sleep(60); }\n"


@pytest.fixture(scope="module")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


def library(folder: Path, source: str) -> Path:
    """A plugin library that never gets as far as offering a provider."""
    require("a C compiler", shutil.which("cc") is not None)
    (folder / "it.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libit.so", "it.c"], cwd=folder, check=True)
    return folder / "libit.so"


def command(package: Path, plugin: Path, *options: object) -> list[str]:
    words = ["generate", package, "1,2,3", "--token-ids", "--provider", "mine,cpu"]
    words += ["--provider-library", f"mine={plugin}"]
    return [sys.executable, "-m", "partita", *map(str, [*words, *options])]


LEAVES = "#include <stdlib.h>\n__attribute__((constructor)) static void bye(void) { exit(0); }\n"
KILLS = "#include <signal.h>\n__attribute__((constructor)) static void die(void) { raise(SIGKILL); }\n"


@pytest.mark.parametrize(("source", "code", "words"), [(LEAVES, 3, "with exit code 0"), (KILLS, 1, "SIGKILL")])
def test_no_other_end_of_native_code_passes_for_success(
    package: Path, tmp_path: Path, source: str, code: int, words: str
) -> None:
    temporary = tmp_path / "temp"
    temporary.mkdir()
    done = subprocess.run(
        command(package, library(tmp_path, source)),
        capture_output=True,
        text=True,
        env={**child_environment(), "TMPDIR": str(temporary)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert [path.name for path in temporary.iterdir() if path.name.startswith("partita")] == []


@pytest.mark.parametrize(("source", "name"), [(ABORTS, "SIGABRT"), (FAULTS, "SIGSEGV")])
def test_a_native_crash_is_one_line_and_exit_code_3(package: Path, tmp_path: Path, source: str, name: str) -> None:
    words = command(package, library(tmp_path, source))
    done = subprocess.run(words, capture_output=True, text=True, env=child_environment(), check=False)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("partita: ")]
    assert f"mine: initialisation_failed: native code ended the run with {name}" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["command line", "library"])
@pytest.mark.parametrize(("source", "name"), [(ABORTS, "SIGABRT"), (FAULTS, "SIGSEGV")])
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


def test_a_signal_to_the_command_ends_its_child_too(package: Path, tmp_path: Path) -> None:
    """Only the process that the user started gets the signal; nothing may be left running."""
    running = subprocess.Popen(
        command(package, library(tmp_path, HANGS)),
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    child = psutil.Process(running.pid)
    for _ in range(600):
        time.sleep(0.2)
        if grandchildren := child.children():
            break
    assert grandchildren, "the run was not supervised"
    time.sleep(1)
    running.terminate()
    _, err = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert psutil.wait_procs(grandchildren, timeout=60)[1] == []


GOES_ON = """
import os, signal, sys, time
from partita.commands import supervise
from partita.commands.build import OWN_PROCESS
from partita.library.chain import ChainOptions, read_chain_options
from partita.library.crashes import CrashError

def talk():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends the answer alone
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGABRT)

supervise.END_SECONDS = 4.0
try:
    OWN_PROCESS.set(True)
    target = read_chain_options(ChainOptions(provider="cuda,cpu"))
    sys.exit(supervise.supervised(talk, target, goes_on=sys.argv[2] == "True"))
except CrashError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("seconds", "goes_on", "code", "words"),
    [(0, True, INTERRUPTED, ""), (6, True, 1, "SIGABRT"), (0, False, INTERRUPTED, "")],
    ids=["at once", "later", "no conversation"],
)
def test_a_crash_is_taken_for_the_end_that_ctrl_c_asked_for_in_a_conversation_only_soon_after_it(
    seconds: int, goes_on: bool, code: int, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GOES_ON, str(seconds), str(goes_on)],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    assert done.returncode == code and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_signals_that_are_no_crash() -> None:
    assert ended_by(signal.SIGINT, ()) == INTERRUPTED
    assert ended_by(signal.SIGTERM, ()) == 128 + signal.SIGTERM
    with pytest.raises(ProviderError, match="SIGBUS"):
        ended_by(signal.SIGBUS, ())


def test_a_process_that_is_not_ours_is_never_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.library.chain import ChainOptions, read_chain_options

    for own, chain, forked in ((False, "cuda,cpu", False), (True, "cuda,cpu", True), (True, "cpu", False)):
        monkeypatch.setattr("partita.commands.supervise.OWN_PROCESS", ContextVar("own", default=own))
        assert worth_it(read_chain_options(ChainOptions(provider=chain))) is forked
