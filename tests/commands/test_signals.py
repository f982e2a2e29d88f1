"""Signals and native crashes: exit codes, one-line errors, and no leftover files or processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import psutil
import pytest
from onnx import parser

from partita.library.engine.jobs import Crashed, CrashError, despite_crashes
from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.resolve import parse_chain
from partita.signals import TOGETHER_SECONDS, TerminatedError, ended_by_exception
from tests.commands.test_cli import child_environment, heed
from tests.conftest import DEMO_CHECKPOINT, require, require_dry_run

SECONDS = 300
GENERATE = ("generate", "PACKAGE", "1,2", "--token-ids", "--max-new-tokens", "60")
VERBS: dict[str, tuple[str, ...]] = {
    "export": ("export", str(DEMO_CHECKPOINT), "OUT"),
    # A chain with another provider than the CPU runs in a worker process.
    "generate in a worker": (*GENERATE, "--provider", "cuda,cpu", "--report", "R"),
    "verify": ("verify", "PACKAGE", "--provider", "cpu"),
    "place": ("place", "PACKAGE", "--provider", "cpu", "--runs", "1000"),
    "place in a dry run": ("place", "PACKAGE", "--provider", "cuda,cpu", "--dry-run", "--runs", "1000"),
    "bench": ("bench", "PACKAGE", "--provider", "cpu", "--rounds", "1000"),
}


def at_work(verb: str, folder: Path, temporary: Path) -> bool:
    """Whether the verb has begun what has to be cleared away: a temporary folder, or one beside OUT."""
    if verb == "export":
        return any(folder.glob(".OUT.partial-*"))
    return any(path.name.startswith("partita-") for path in temporary.iterdir())


def start(words: tuple[str, ...], folder: Path, **changes: object) -> tuple[subprocess.Popen[bytes], Path]:
    (temporary := folder / "temporary").mkdir()
    changes = {"preexec_fn": heed, **changes}
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**child_environment(), "TMPDIR": str(temporary)},
        start_new_session=True,
        **changes,  # type: ignore[call-overload]
    )
    return process, temporary


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def left_in(temporary: Path) -> list[str]:
    return [str(path) for path in temporary.rglob("*")]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.heavy)], ids=["SIGTERM", "SIGHUP"]
)
@pytest.mark.parametrize("verb", VERBS)
def test_signal_exits_with_code_and_removes_temporary_files(verb, number, package, tmp_path, request):
    if "dry run" in verb:
        require_dry_run()
        request.getfixturevalue("stand_ins")
    words = tuple(str(package) if word == "PACKAGE" else word for word in VERBS[verb])
    process, temporary = start(words, tmp_path)
    if verb == "verify":  # keeps nothing for long
        wait_until(lambda: psutil.Process(process.pid).memory_info().rss > 60e6, process)
    else:
        wait_until(lambda: at_work(verb, tmp_path, temporary), process)
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, err.decode()
    assert err.decode().rstrip().endswith(f"partita: ended by {number.name}") and b"Traceback" not in err, err.decode()
    assert left_in(temporary) == [] and [p.name for p in tmp_path.iterdir()] == ["temporary"]
    assert psutil.wait_procs(below, timeout=60)[1] == []


def test_ignored_sighup_stays_ignored(package: Path, tmp_path: Path) -> None:
    """As under nohup."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ("generate", str(package), "1,2", "--token-ids", "--max-new-tokens", "60", "--provider", "cpu")
    process, temporary = start((*words, "--report", "R"), tmp_path, preexec_fn=ignore)
    wait_until(lambda: at_work("generate", tmp_path, temporary), process)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err.decode()
    assert (tmp_path / "R").is_file()


def test_simultaneous_signals_raise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a run that nohup did not start
    now = [1000.0]
    monkeypatch.setattr("partita.signals.time.monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGTERM)
    cleared = False
    with ended_by_exception(), ended_by_exception():
        try:
            signal.raise_signal(signal.SIGTERM)
        except TerminatedError as error:
            assert (error.code, error.name) == (128 + signal.SIGTERM, "SIGTERM")
            signal.raise_signal(signal.SIGHUP)
            cleared = True
        assert cleared
        now[0] += TOGETHER_SECONDS
        with pytest.raises(TerminatedError):  # Python may have dropped the first one
            signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGHUP, ignored)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_lost_in_destructor_is_raised_again(number: int, code: int) -> None:
    program = (
        "import signal, time\n"
        "from partita.signals import TerminatedError, ended_by_exception\n"
        "class Dropped:\n"
        "    def __del__(self):\n"
        f"        signal.raise_signal({int(number)})\n"
        "with ended_by_exception():\n"
        "    try:\n"
        "        Dropped()\n"
        "        time.sleep(60)\n"
        "    except TerminatedError as error:\n"
        "        raise SystemExit(error.exit_code)\n"
        "    except KeyboardInterrupt:\n"
        "        raise SystemExit(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=child_environment(), capture_output=True, timeout=50)
    assert (done.returncode, done.stderr) == (code, b"")


# Native code that ends a process: one line and an exit code


NAMES_ENTRY = 'char text[] = "CreateEpFactories";\n'
"""The name that every plugin library has; here nothing is exported under it."""
ABORTS = "#include <stdlib.h>\n__attribute__((constructor)) static void boom(void) { abort(); }\n"
FAULTS = "__attribute__((constructor)) static void boom(void) { *(volatile int *)0 = 1; }\n"
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void wait(void) { sleep(60); }\n"


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
def test_native_crash_exits_with_code_and_single_line(package, tmp_path, verb, source, code, words):
    found = told(command(package, library(tmp_path, source), verb), tmp_path / "temporary")
    assert found[0] == code and words in found[1]


@pytest.mark.parametrize(("source", "name"), [(ABORTS, "SIGABRT"), (FAULTS, "SIGSEGV")])
def test_provider_crash_still_yields_placement_report(tmp_path: Path, source: str, name: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]>\ng (float[4] x) => (float[4] y) { [n] y = Neg(x) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    words = [*command(tmp_path / "m.onnx", library(tmp_path, source), "place"), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    first, last = report["chain"]
    assert (first["status"], first["reason"], last["status"]) == ("unavailable", "initialisation_failed", "active")
    assert first["evidence"].startswith("native code ended the ") and name in first["evidence"]
    (fallback,) = report["fallbacks"]
    assert (fallback["node"], fallback["reason"]) == ("n", "initialisation_failed")


def test_crashing_provider_is_identified_and_excluded() -> None:
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
