"""Where prompts come from: arguments in any locale, options, stdin with its line end, a terminal."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from partita.cli import run
from partita.commands.generate_options import argument_text, read_prompts
from partita.errors import UsageError
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


class Terminal(io.TextIOWrapper):
    """A stdin that somebody types into."""

    def isatty(self) -> bool:
        return True


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> None:
    monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"Raises\n", "Raises"),
        (b"Raises", "Raises"),
        (b"a\r\n", "a"),
        (b"a\n\n", "a\n"),
        (b"a\nb\n", "a\nb"),
        (b"a\r", "a\r"),
    ],
)
def test_one_line_end_behind_stdin_is_not_of_the_prompt(monkeypatch, capsys, data, prompt):
    stdin(monkeypatch, data)
    assert read_prompts(["-"]) == [prompt]
    assert capsys.readouterr().err == ""


def test_a_terminal_is_told_how_to_end_the_prompt(monkeypatch, capsys):
    stdin(monkeypatch, b"hi\n", Terminal)
    assert read_prompts(["-"]) == ["hi"]
    assert "until Ctrl-D" in capsys.readouterr().err


def test_a_closed_stdin_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="closed"):
        read_prompts(["-"])


def test_text_that_is_no_utf_8_is_named():
    with pytest.raises(UsageError, match="--stop is not UTF-8"):
        argument_text(b"caf\xe9".decode("utf-8", "surrogateescape"), "--stop")


def test_the_c_locale_changes_neither_prompt_nor_answer(package: Path) -> None:
    words = ["generate", str(package), "hé 你", "-n", "8", "-e", "cpu", "--stop", "ü§", "--json"]

    def ask(**environment: str) -> object:
        given = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
        command = [sys.executable, "-m", "partita", *words]
        done = subprocess.run(command, env=given, capture_output=True, check=False, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["rows"]

    wanted = ask(LC_ALL="C.UTF-8")
    assert ask(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == ask(LC_ALL="C") == wanted


def test_what_the_locale_cannot_show_is_no_error(tmp_path):
    """The answer of a model is any text; a terminal of another encoding shows a mark."""
    script = "import sys; from partita import cli; cli._accept_all_text(sys.stdout); print('hé 你')"
    for encoding, shown in (("ascii", "hé 你".encode()), ("latin-1", b"h\xe9 ?"), ("utf-8", "hé 你".encode())):
        given = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, check=True)
        assert done.stdout.strip() == shown


def test_a_prompt_may_be_an_option(package, capsys):
    def rows(*arguments: str) -> object:
        assert run(["generate", str(package), *arguments, "-n", "4", "-e", "cpu", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["rows"]

    assert rows("return the") == rows("-p", "return the") == rows("--prompt", "return the")


# Standard streams that were closed before the command started, or that cannot be written to


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
from partita import process
process.open_null_device()
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
