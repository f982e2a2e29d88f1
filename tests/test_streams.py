"""Standard streams that were closed before the command started, or that cannot be written to."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Exported, TinyCheckpoint

CLOSED = "partita: standard output is closed; redirect it to a file or to /dev/null\n"


def shell(words: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as a shell does with the redirection; output is buffered, as it is by default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"exec {shlex.join([sys.executable, '-m', 'partita', *words])} {redirection}"
    return subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "words",
    [["--version"], ["inspect", "{model}", "--json"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("redirection", "said"),
    [(">&-", CLOSED), (">/dev/full", "partita: No space left on device; check the disk\n")],
    ids=["closed", "full"],
)
def test_what_cannot_be_written_is_an_error(words: list[str], redirection: str, said: str, model: Path) -> None:
    done = shell([word.format(model=model) for word in words], redirection)
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    ("form", "redirection", "detail"),
    [([], ">&-", "stdout was closed"), (["--json"], ">/dev/full", "stdout: No space left on device")],
    ids=["closed", "full"],
)
def test_its_report_is_written_all_the_same(
    tiny_checkpoint: TinyCheckpoint,
    exported: Exported,
    tmp_path: Path,
    form: list[str],
    redirection: str,
    detail: str,
) -> None:
    package, path = exported(tiny_checkpoint("llama")), tmp_path / "run.json"
    words = ["generate", str(package), "def", "-n", "4", "--provider", "cpu", "--report", str(path), *form]
    done = shell(words, redirection)
    assert done.returncode == 1 and f"report: {path}" in done.stderr, done.stderr
    assert json.loads(path.read_text(encoding="utf-8"))["totals"]["finish_detail"] == detail


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"], ids=["full", "closed"])
def test_a_verb_does_not_fail_because_its_notes_cannot_be_written(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, redirection: str
) -> None:
    """As where a log is on a full disk: what is asked for is on stdout."""
    package = exported(tiny_checkpoint("llama"))
    words = ["generate", str(package), "5,6", "--token-ids", "-n", "4", "--provider", "cpu", "--json"]
    done = shell(words, redirection)
    assert done.returncode == 0 and len(json.loads(done.stdout)["rows"][0]["tokens"]) == 4


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """What native code prints would be written into it."""
    program = """
import os
from partita import streams
streams.open_null_device()
assert os.open(os.devnull, os.O_RDONLY) > 2
for descriptor, use in ((0, lambda: os.read(0, 1)), (1, lambda: os.write(1, b"x"))):
    assert os.get_inheritable(descriptor)
    try:
        use()
    except OSError:
        continue
    raise AssertionError(descriptor)
assert os.get_inheritable(2)
os.write(2, b"x")
os._exit(7)
"""
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=REPOSITORY, check=False).returncode == 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest ONNX model that can be inspected."""
    import onnx

    node = onnx.helper.make_node("Abs", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(onnx.helper.make_model(graph), str(path))
    return path


def test_a_terminal_gets_no_control_characters_of_a_text_and_a_pipe_all_of_them() -> None:
    """A token of a model may be any text, as one that sets the title of the window."""
    text = "a\x1b]0;pwn\x07\r\x7f\x9b2J\tb\n"
    program = f"from partita.commands.terminal import write_stdout; write_stdout({text!r})"
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=True).stdout == text.encode()
    master, slave = os.openpty()
    subprocess.run(words, cwd=REPOSITORY, stdout=slave, check=True)
    os.close(slave)
    assert os.read(master, 1000) == b"a\\x1b]0;pwn\\x07\\x0d\\x7f\\x9b2J\tb\r\n"
    os.close(master)
