"""SIGTERM and SIGHUP end every verb with its exit code, and leave neither temporary folders nor processes behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from partita.signals import TOGETHER_SECONDS, TerminatedError, ended_by_exception
from tests.conftest import DEMO_CHECKPOINT, Exported, TinyCheckpoint, require_dry_run
from tests.test_cli import child_environment

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


def heed() -> None:
    """In a child: what this run was told to ignore, by nohup for one, ends it all the same."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


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


@pytest.fixture(scope="module")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.heavy)], ids=["SIGTERM", "SIGHUP"]
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_signal_clears_away_what_was_begun(
    verb: str, number: signal.Signals, package: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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


def test_an_ignored_signal_stays_ignored(package: Path, tmp_path: Path) -> None:
    """As nohup has it."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ("generate", str(package), "1,2", "--token-ids", "--max-new-tokens", "60", "--provider", "cpu")
    process, temporary = start((*words, "--report", "R"), tmp_path, preexec_fn=ignore)
    wait_until(lambda: at_work("generate", tmp_path, temporary), process)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err.decode()
    assert (tmp_path / "R").is_file()


def test_signals_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ctrl_c_while_the_command_is_imported_is_one_line_and_its_exit_code() -> None:
    program = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from partita.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=child_environment())
    assert (done.returncode, done.stderr, done.stdout) == (130, "partita: interrupted\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_callback_whose_exceptions_python_drops_comes_again(number: int, code: int) -> None:
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
