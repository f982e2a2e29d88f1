"""Commands suggested by messages: quoted for a shell, specific to the input, and working when run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import partita
from partita import cli
from partita.cli import run
from partita.package.folder import MANIFEST, WEIGHTS
from partita.remedies import LFS_HEAD, Remedy
from tests.conftest import REPOSITORY
from tests.remedies import remedy_of

PROMPT = "return the value of"


@pytest.fixture
def gather(tmp_path: Path) -> Path:
    """A lookup in a table of four rows; `ids` is int64[n]."""
    text = (
        "g (int64[n] ids) => (float[n,2] y) <float[4,2] table = {0,0,0,0,0,0,0,0}> { [lookup] y = Gather (table, ids) }"
    )
    onnx.save(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]>\n{text}'), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def failed(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert run([str(argument) for argument in arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    return lines[-1]


@pytest.mark.parametrize("verb", ["generate", "place"])
def test_report_show_command_is_quoted_and_runs(package, tmp_path, capsys, verb, monkeypatch):
    folder = tmp_path / "my reports; $HOME"
    folder.mkdir()
    file = folder / "it's.json"
    given = {"generate": [PROMPT, "-n", 2, "--report", file], "place": ["--report", file]}
    assert run([str(word) for word in [verb, package, "-e", "cpu", *given[verb]]]) == 0
    (command,) = re.findall(r"show it with: (.*)\)\n", capsys.readouterr().err)
    program, *words = shlex.split(command)
    assert program == "partita" and words[-1] == str(file)
    assert run(words) == 0


def test_report_pages_on_stdout_are_always_utf_8(package, tmp_path, capsys):
    assert run(["place", str(package), "-e", "cpu", "--report", str(tmp_path / "r.json")]) == 0
    capsys.readouterr()
    for verb in (
        ["html", "r.json", "--out", "-"],
        ["markdown", "r.json"],
        ["show", "r.json"],
        ["show", "r.json", "--json"],
    ):
        given = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "partita", "report", *verb]
        done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), verb
        assert len(done.stdout.decode("utf-8")) > 100


def test_failed_run_report_fails_every_check(gather, tmp_path, capsys):
    file = tmp_path / "report.json"
    np.save(tmp_path / "far.npy", np.array([99], np.int64))
    given = ["--input", f"ids={tmp_path / 'far.npy'}", "--report", file, "--max-copies", 9]
    assert "failed" in failed(capsys, 1, "place", gather, "-e", "cpu", *given)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["summary"]["state"] == "failed" and report["failure"].startswith("a run on the given values of ids")
    assert report["exceeded_limits"] == ["--max-copies 9: cannot be confirmed: the run failed"]
    assert "2 of 2 checks failed" in failed(capsys, 5, "report", "check", file, "--require", "provider=cpu,share>=1")
    assert "its run failed" in partita.Report.read(file).to_markdown()
    with pytest.raises(partita.CheckFailedError, match="the run of the report failed"):
        partita.Report.read(file).check("provider=cpu,share>=1")


@pytest.mark.parametrize("process", ["this", "child"])
def test_report_of_default_chain_lists_unavailable_installed_provider(gather, monkeypatch, process):
    from partita.providers.resolve import Resolution, known_providers
    from partita.runtime.chain import provider_check

    known = known_providers()
    lost = Resolution(
        known["cuda"], "unavailable", "library_missing", "libcublas.so.13: not there", Remedy("install it")
    )
    chain = provider_check.DefaultChain((known["cpu"],), "cuda could not start (library_missing); so cpu", (lost,))
    monkeypatch.setattr(provider_check, "best_chain", lambda _: chain)
    report = partita.place(gather, shapes={"n": 1}, process=process, probe_seconds=0)
    assert [(entry.provider, entry.status) for entry in report.chain] == [
        ("CUDAExecutionProvider", "unavailable"),
        ("CPUExecutionProvider", "active"),
    ]
    assert report.chain[0].remedy == "install it" and report.request.chain == ("CPUExecutionProvider",)
    said = "Ran on CPU; CUDA is installed but could not start: library_missing"
    assert said in report.to_markdown()


# What is given in place of a package is called by its name, and the command that is named takes it as it is


POINTER = LFS_HEAD + b"\noid sha256:" + b"0" * 64 + b"\nsize 10498464\n"
VERBS = (("generate", "hi"), ("verify",), ("place",))
READ_PACKAGES = VERBS[1:]
"""Verbs that do not export."""


@pytest.fixture
def package(tiny_checkpoint, exported, tmp_path, monkeypatch) -> Path:
    """A package that a test may damage, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported(tiny_checkpoint("llama")), "pkg")
    return Path("pkg")


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that fails."""
    assert cli.run([*map(str, arguments)]) == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
    return line


@pytest.mark.parametrize("verb", READ_PACKAGES, ids=lambda verb: verb[0])
def test_checkpoint_error_suggests_working_export_command(verb, tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_checkpoint("llama"), "my checkpoint")
    line = told(capsys, verb[0], "my checkpoint", *verb[1:], "--provider", "cpu")
    assert "a checkpoint, not a package" in line and 'partita export "my checkpoint" "my checkpoint-package"' in line
    if verb[0] == "verify":  # one export is enough
        command = remedy_of(verb[0], "my checkpoint", *verb[1:], "--provider", "cpu").command
        assert cli.run([*command[1:], "--max-length", "32"]) == 0
        assert cli.run([verb[0], command[3], *verb[1:], "--provider", "cpu"]) == 0


def test_wrong_file_kind_error_suggests_matching_verb(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["place", "pkg", "--provider", "cpu", "--report", "run.json"]) == 0
    shutil.copy(package / "model.onnx", "alone.onnx")
    shutil.copy(package / WEIGHTS, WEIGHTS)
    capsys.readouterr()
    sizes = ("--provider", "cpu", "--shape", "logits_rows=1", "--shape", "sequence_length=1")
    for file, what, more in (("run.json", "the report of a run", ()), ("alone.onnx", "an ONNX file", sizes)):
        assert what in told(capsys, "generate", file, "hi", "--provider", "cpu")
        command = remedy_of("generate", file, "hi", "--provider", "cpu").command
        assert command[-1] == file
        assert cli.run([*command[1:], *more]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert "the report of a run" in told(capsys, "place", "run.json", "--provider", "cpu")


def test_path_that_is_no_package_is_described_with_a_remedy(package, capsys):
    Path("link").symlink_to("gone")
    Path("model.gguf").write_bytes(b"<html>not found</html>")
    for path, said in {
        "link": "link: a broken symbolic link to gone; name the package's folder",
        "model.gguf": "model.gguf: not a GGUF file: its first bytes are not `GGUF`; download it again",
        package / MANIFEST: "name pkg instead",
        Path().resolve(): f"name {Path().resolve() / 'pkg'} instead",
    }.items():
        assert said in told(capsys, "generate", path, "hi", "--provider", "cpu")
    assert remedy_of("verify", "owner/name").command == ("partita", "export", "owner/name", "name-package")
    assert remedy_of("verify", "nothing").command == ("partita", "export", "CHECKPOINT", "nothing")


# Git LFS


@pytest.mark.parametrize(("verb", "name"), [(VERBS[0], WEIGHTS), (VERBS[2], "model.onnx")])
def test_git_lfs_pointer_error_suggests_git_lfs_pull(package, name, verb, capsys):
    kept = (package / name).read_bytes()
    (package / name).write_bytes(POINTER)
    line = told(capsys, verb[0], package, *verb[1:], "--provider", "cpu")
    assert str(package / name) in line and "in pkg run: git lfs pull" in line
    (package / name).write_bytes(kept)  # which is what the command does
    assert cli.run([verb[0], "pkg", *verb[1:], "--provider", "cpu"]) == 0


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_folder_of_model_variants_error_lists_model_folders(verb, tmp_path, capsys):
    """Layout of onnxruntime-genai repositories on the hub: a folder per device and precision."""
    samples = Path(__file__).parent / "foreign" / "samples"
    home = tmp_path / "hub"
    for place in ("cpu/int4", "cuda/fp16"):
        shutil.copytree(samples / "genai-fp32-cpu", home / place)
    (home / "web" / "onnx").mkdir(parents=True)
    shutil.copy(samples / "optimum" / "model.onnx", home / "web" / "onnx")
    (home / "config.json").write_text("{}")
    said = told(capsys, verb, home, *(("1,2", "--token-ids") if verb == "generate" else ()))
    assert "3 folders with ONNX models below it" in said, said
    assert all(place in said for place in ("cpu/int4", "cuda/fp16", "web")) and "web/onnx" not in said
    assert f"name {home / 'cpu' / 'int4'} instead" in said or "web instead" in said
    (home / "model.safetensors").write_bytes(b"")
    assert "a checkpoint, not a package" in told(capsys, "verify", home)
