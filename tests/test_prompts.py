"""Where prompts come from: arguments in any locale, options, stdin with its line end, a terminal."""

from __future__ import annotations

import io
import json
import os
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


def test_an_empty_system_message_or_prompt_file_name_is_no_crash(package, capsys):
    assert run(["generate", str(package), "", "-e", "cpu"]) == 1
    assert "the prompt is empty" in capsys.readouterr().err
