"""The command line: output, exit codes, and one-line error messages."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest
from onnx import parser

from partita.cli import run
from partita.commands.arguments import parse_ids, read_prompts
from partita.errors import UsageError
from partita.library.exporting import run_export
from partita.package.folder import KNOWN_ANSWER, MANIFEST
from tests.conftest import REPOSITORY
from tests.runtime.handmade_packages import handmade, reseal

PROMPT = "return the value of"


def fails(capsys: pytest.CaptureFixture[str], code: int, words: str, *arguments: object) -> str:
    """Run, and check the exit code, that stderr is one line with `words`, and that stdout is empty."""
    assert run([str(a) for a in arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("partita: ") and err.count("\n") == 1, err
    assert words in err, err
    return err


def succeeds(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert run([str(a) for a in arguments]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out, captured.err


# export


def test_export_prints_summary_and_json(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    summaries: list[Any] = []

    def noted(*given: Any) -> Any:
        summaries.append(run_export(*given))
        return summaries[-1]

    monkeypatch.setattr("partita.commands.export.run_export", noted)
    given = ("export", tiny_checkpoint("mistral"), tmp_path / "p", "--max-length", 64)
    out, _ = succeeds(capsys, *given)
    assert "MistralForCausalLM exported, verified" in out
    for words in (
        "parameters",
        "nodes",
        "window 8",
        "bytes per token",
        "peak memory",
        "took",
        "next        partita generate",
    ):
        assert words in out
    monkeypatch.setattr("partita.commands.export.run_export", lambda *given: summaries[0])
    assert succeeds(capsys, *given, "--quiet", "--force")[0] == ""
    found = json.loads(succeeds(capsys, *given, "--json", "--quiet", "--force")[0])
    jsonschema.validate(found, json.loads((REPOSITORY / "docs" / "export.schema.json").read_text("utf-8")))
    assert found["manifest"] == json.loads((tmp_path / "p" / MANIFEST).read_text("utf-8"))


def test_unverified_package_is_reported_by_generate_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package, report = handmade(tmp_path / "p"), tmp_path / "r.json"
    words = ("1,2", "--token-ids", "--max-new-tokens", 4, "--report", report)
    _, err = succeeds(capsys, "generate", package, *words)
    assert "this package is unverified" in err
    out, _ = succeeds(capsys, "report", "show", report, "--full")
    assert "\n\n  unverified package: " in out
    (package / KNOWN_ANSWER).unlink()
    reseal(package)
    fails(capsys, 1, "the package has no known_answer.safetensors", "verify", package, "--provider", "cpu")


# generate


def test_generate_prints_text_to_stdout_and_timings_to_stderr(package, capsys) -> None:
    plain, err = succeeds(capsys, "generate", package, PROMPT, "--max-new-tokens", 8)
    assert plain.endswith("\n") and len(plain) > 1
    assert "tokens/s" in err and "finish: length" in err and "load" in err
    out, _ = succeeds(capsys, "generate", package, PROMPT, "--max-new-tokens", 8, "--json")
    answer = json.loads(out)
    assert answer["rows"][0]["text"] + "\n" == plain
    assert len(answer["rows"][0]["tokens"]) == 8 and answer["rows"][0]["finish_reason"] == "length"
    assert answer["timings"]["decode_tokens_per_second"] > 0


def test_completion_ends_where_the_cache_is_full(package, capsys):
    out, _ = succeeds(capsys, "generate", package, "5,6,7", "--token-ids", "--max-new-tokens", 1000, "--json")
    (row,) = json.loads(out)["rows"]
    assert row["finish_reason"] == "cache_full" and len(row["tokens"]) == 64 - 3


def test_multiple_prompts_run_as_batch_rows(tiny_checkpoint, exported, capsys):
    package = exported(tiny_checkpoint("qwen2"), batch_size=2)
    out, _ = succeeds(capsys, "generate", package, PROMPT, "the list", "--max-new-tokens", 4)
    assert out.startswith("[1] ") and "\n[2] " in out
    alone, _ = succeeds(capsys, "generate", package, PROMPT, "--max-new-tokens", 4)
    assert out.startswith(f"[1] {alone}")
    out, err = succeeds(capsys, "generate", package, *PROMPT.split(), "--max-new-tokens", 1)
    assert f"[{len(PROMPT.split())}] " in out and "quote" in err


def test_invalid_prompts_are_rejected(package, capsys, monkeypatch):
    fails(capsys, 2, "unpaired surrogate", "generate", package, b"caf\xe9".decode("utf-8", "surrogateescape"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff")))
    fails(capsys, 2, "stdin is not UTF-8 (byte 3)", "generate", package, "-")


# verify


def test_verify_mismatch_exits_4(package, own_copy, capsys) -> None:
    """The known answer is replaced, with a matching hash, to simulate a graph whose outputs drifted."""
    spoil_known_answer(own_package := own_copy(package))
    assert run(["verify", str(own_package), "--provider", "cpu"]) == 4
    out, err = capsys.readouterr()
    assert "FAILED: outputs differ from the source model's on CPUExecutionProvider" in out and "unverified" not in out
    assert "first difference in decode" in err and err.count("\n") == 1
    assert err.rstrip().endswith(f"partita drift {own_package} --provider cpu --against original")


# everything


def heed() -> None:
    """Run in a child before its program: what this run was told to ignore, by nohup for one, ends it all the same."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def child_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}


def test_ctrl_c_exits_130_and_writes_report(tiny_checkpoint, exported, tmp_path):
    package, report = exported(tiny_checkpoint("llama"), max_length=256), tmp_path / "r.json"
    slow = (
        "import sys, time\n"
        "from partita.runtime.ort.binding import Binding\n"
        "quick = Binding.run\n"
        "def slow(self, *given):\n"
        "    time.sleep(0.1)\n"
        "    return quick(self, *given)\n"
        "Binding.run = slow\n"
        "from partita.cli import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    arguments = ["generate", str(package), "1 5 9", "--token-ids", "--max-new-tokens", "200", "--report", str(report)]
    child = subprocess.Popen(
        [sys.executable, "-c", slow, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        preexec_fn=heed,
    )
    assert child.stdout is not None and child.stderr is not None
    first = child.stdout.read(1)
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 130, err.decode()
    assert (first + out).endswith(b"\n") and b"finish: interrupted" in err and b"Traceback" not in err
    totals = json.loads(report.read_text())["totals"]
    assert totals["finish_reason"] == "interrupted" and 0 < totals["new_tokens"] < 200


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "show", str(tmp_path / "absent.json")], debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def shell(words: Sequence[object], redirection: str, first: str = "", **variables: str):
    """Run a command line as a shell does with the redirection; output is buffered, as it is by default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = shlex.join([sys.executable, "-m", "partita", *map(str, words)])
    command = ["bash", "-o", "pipefail", "-c", f"({first}exec {line}) {redirection}"]
    given = {**environment, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def into_closed_pipe(*words: object, **variables: str):
    """Run a verb whose stdout nobody reads; `head -c 0` is gone before anything is written."""
    done = shell(words, "| head -c 0", "sleep 0.2; ", **variables)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(("options", "unbuffered"), [((), ""), (("--json",), "1")])
def test_closed_stdout_exits_0_and_writes_report(package, tmp_path, options, unbuffered):
    report = tmp_path / "r.json"
    arguments = ("generate", package, PROMPT, "--max-new-tokens", 40, "--report", report, *options)
    done = into_closed_pipe(*arguments, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0, done.stderr
    totals = json.loads(report.read_text())["totals"]
    assert totals["finish_reason"] == "length" or "stdout was closed" in totals["finish_detail"]


def test_closed_stdout_keeps_exit_codes_of_other_commands(package, own_copy, tmp_path) -> None:
    report = tmp_path / "r.json"
    into_closed_pipe("generate", package, PROMPT, "--report", report)
    for words in (["report", "show", report], ["--help"]):
        assert into_closed_pipe(*words).returncode == 0, words
    spoil_known_answer(spoilt := own_copy(package))
    done = into_closed_pipe("verify", spoilt)
    assert done.returncode == 4, "a closed pipe hid that the package is wrong"


def spoil_known_answer(package: Path) -> None:
    """Another known answer, listed as if it had always been there."""
    from safetensors.numpy import load_file, save_file

    answer = package / KNOWN_ANSWER
    tensors = load_file(answer)
    tensors["decode_logits"] = tensors["decode_logits"][:, ::-1].copy()
    save_file(tensors, answer)
    reseal(package)


def test_control_characters_in_file_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, 1, "absent", "report", "show", tmp_path / "absent\x1b[31m\n.json")
    assert "\x1b" not in err


# Prompts, sampling options, and standard streams that are closed or full


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
