"""Prompts and sampling options of `partita generate`, and standard streams that are closed or full."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from partita.cli import run
from partita.commands.arguments import parse_ids, read_prompts
from partita.errors import UsageError
from tests.conftest import REPOSITORY
from tests.runtime.handmade_packages import reseal


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


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
def test_final_line_ending_of_stdin_is_removed(monkeypatch, capsys, data, prompt):
    stdin(monkeypatch, data)
    assert read_prompts(["-"]) == [prompt]
    assert capsys.readouterr().err == ""


def test_c_locale_does_not_change_generation(package: Path) -> None:
    words = ["generate", str(package), "hé 你", "-n", "8", "-e", "cpu", "--stop", "ü§", "--json"]

    def ask(**environment: str) -> object:
        given = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
        command = [sys.executable, "-m", "partita", *words]
        done = subprocess.run(command, env=given, capture_output=True, check=False, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["rows"]

    wanted = ask(LC_ALL="C.UTF-8")
    assert ask(LC_ALL="C") == wanted


# Standard streams that were closed before the command started, or that cannot be written to


def shell(words: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as a shell does with the redirection; output is buffered, as it is by default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"exec {shlex.join([sys.executable, '-m', 'partita', *words])} {redirection}"
    return subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", [["--version"], ["inspect", "{model}", "--json"]], ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [(">&-", 0, ""), (">/dev/full", 1, "partita: No space left on device; check the disk and its permissions\n")],
    ids=["closed", "full"],
)
def test_full_stdout_is_an_error_and_closed_stdout_is_ignored(words, redirection, code, said, model) -> None:
    done = shell([word.format(model=model) for word in words], redirection)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"], ids=["full", "closed"])
def test_unwritable_stderr_does_not_fail_generate(package, redirection) -> None:
    words = ["generate", str(package), "5,6", "--token-ids", "-n", "4", "--provider", "cpu", "--json"]
    done = shell(words, redirection)
    assert done.returncode == 0 and len(json.loads(done.stdout)["rows"][0]["tokens"]) == 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest ONNX model that can be inspected."""
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(
        parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[1] x) => (float[1] y) { y = Abs (x) }'),
        path,
    )
    return path


def test_control_characters_are_escaped_on_terminal_only() -> None:
    """A generated token may contain any text, e.g. an escape sequence that sets the window title."""
    text = "a\x1b]0;pwn\x07\r\x7f\x9b2J\tb\n"
    program = f"from partita.commands.terminal import write_stdout; write_stdout({text!r})"
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=True).stdout == text.encode()
    master, slave = os.openpty()
    subprocess.run(words, cwd=REPOSITORY, stdout=slave, check=True)
    os.close(slave)
    assert os.read(master, 1000) == b"a\\x1b]0;pwn\\x07\\x0d\\x7f\\x9b2J\tb\r\n"
    os.close(master)


# Sampling: what is ignored is printed, a run can be repeated, and a checkpoint may suggest settings


PROMPT = "return the value of"
SUGGESTS = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 2}


@pytest.fixture
def suggesting(package: Path, tmp_path: Path):
    """A copy of the package whose generation_config.json says what it is given."""

    def write(config: dict[str, Any]) -> Path:
        folder = shutil.copytree(package, tmp_path / "suggesting", dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
        reseal(folder)
        return folder

    return write


@pytest.fixture
def generated(capsys: pytest.CaptureFixture[str]):
    """Runs generate; stdout and stderr."""

    def generate(package: Path, *options: object, code: int = 0) -> tuple[str, str]:
        arguments = ["generate", package, PROMPT, "-n", 10, "--provider", "cpu", *options]
        assert run([str(a) for a in arguments]) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out, captured.err

    return generate


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--top-k", 5], "--top-k is ignored"),
        (["--top-k", 5, "--seed", 4, "--temperature", 0], "--top-k and --seed are ignored"),
    ],
    ids=str,
)
def test_greedy_run_names_ignored_options(package, generated, options, named):
    plain, _ = generated(package)
    text, err = generated(package, *options)
    assert text == plain
    assert f"note: {named}: temperature 0" in err and "--temperature" in err
    assert err.count("ignored") == 1


def test_random_seed_is_reported_and_reproduces_the_run(package, generated, tmp_path):
    out, err = generated(package, "--temperature", 2, "--json", "--report", tmp_path / "r.json")
    seed = int(re.findall(r"--seed (\d+) repeats this run", err)[0])
    answer, report = json.loads(out), json.loads((tmp_path / "r.json").read_text())
    assert answer["options"]["seed"] == seed
    assert report["request"]["options"]["seed"] == str(seed)
    again = json.loads(generated(package, "--temperature", 2, "--json", "--seed", seed)[0])
    assert again["rows"] == answer["rows"]
    seeds = {re.findall(r"seed (\d+)", generated(package, "--temperature", 2)[1])[0] for _ in range(3)}
    assert len(seeds) == 3, "a seed that is not given is not the same again"


def test_checkpoint_sampling_is_suggested_and_applied_on_request(suggesting, package, generated):
    folder = suggesting(SUGGESTS)
    text, err = generated(folder)
    assert text == generated(package)[0], "greedy by default"
    line = "the checkpoint suggests temperature 0.7, top-k 50, top-p 0.9: --sampling checkpoint"
    assert line in err
    out, err = generated(folder, "--sampling", "checkpoint", "--seed", 3, "--json")
    assert "suggests" not in err
    options = json.loads(out)["options"]
    assert (options["temperature"], options["top_k"], options["top_p"], options["seed"]) == (0.7, 50, 0.9, 3)
    same = generated(package, "-t", 0.7, "--top-k", 50, "--top-p", 0.9, "--seed", 3, "--json")[0]
    assert json.loads(out)["rows"] == json.loads(same)["rows"]


@pytest.mark.parametrize("given", ["5,,6", ",5", "5,", "5, ,6", "٥,6", "1_0", "+5", "0x5", "5.0"])
def test_invalid_token_id_list_is_rejected(given):
    assert parse_ids(" 5, 6\t7\n") == [5, 6, 7]
    with pytest.raises(UsageError, match="is not a list of token ids such as 1,45,7"):
        parse_ids(given)
