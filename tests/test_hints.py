"""What messages tell to type can be typed: quoted for a shell, about what was really given, and in the right number."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import partita
from partita.cli import run
from partita.commands.terminal import fold
from partita.remedies import Remedy
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint

PROMPT = "return the value of"


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


@pytest.fixture
def gather(tmp_path: Path) -> Path:
    """A lookup in a table of four rows; `ids` is int64[n]."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [4, 2], [0.0] * 8)
    node = helper.make_node("Gather", ["table", "ids"], ["y"], name="lookup")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph([node], "g", [ids], [y], [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def decoder(path: Path, layers: int) -> Path:
    """Inputs as a decoder of onnxruntime-genai's builder has them, added up into one number each."""
    sizes: dict[str, list[str | int]] = {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
    }
    caches: dict[str, list[str | int]] = {
        f"past_key_values.{layer}.{kind}": ["batch_size", 2, "past_sequence_length", 4]
        for layer in range(layers)
        for kind in ("key", "value")
    }
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in {**sizes, **caches}.items()
    ]
    nodes = [helper.make_node("ReduceSum", [port.name], [f"sum.{port.name}"], keepdims=0) for port in inputs]
    nodes.append(helper.make_node("Sum", [node.output[0] for node in nodes], ["y"]))
    # A mask has to be as long as what was there and what comes.
    nodes.append(helper.make_node("Concat", ["past_key_values.0.key", "past_key_values.0.value"], ["z"], axis=2))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "z")]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def failed(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert run([str(argument) for argument in arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    return lines[-1]


@pytest.mark.parametrize("verb", ["generate", "place"])
def test_the_command_that_shows_a_report_can_be_typed(package, tmp_path, capsys, verb, monkeypatch):
    folder = tmp_path / "my reports; $HOME"
    folder.mkdir()
    file = folder / "it's.json"
    given = {
        "generate": [PROMPT, "-n", 2, "--report", file],
        "place": ["--report", file],
    }
    assert run([str(word) for word in [verb, package, "-e", "cpu", *given[verb]]]) == 0
    (command,) = re.findall(r"show it with: (.*)\)\n", capsys.readouterr().err)
    program, *words = shlex.split(command)
    assert program == "partita" and words[-1] == str(file)
    assert run(words) == 0


def test_many_inputs_without_sizes_are_few_words_and_options_that_work(tmp_path, capsys):
    model = decoder(tmp_path / "my decoder.onnx", 24)
    given = ["place", str(model), "--provider", "cpu", "--max-copies", "0", "--report", str(tmp_path / "report.json")]
    error = failed(capsys, 2, *given)
    assert len(error) < 800, error
    assert "50 inputs need sizes" in error and "past_key_values.{0..23}.key" in error
    added = shlex.split(error.partition("as in: ")[2])
    assert set(added[::2]) == {"--shape"}, "a whole command would have to repeat the limits and the report"
    symbols = ("batch_size", "past_sequence_length", "sequence_length", "total_sequence_length")
    assert sorted(word.partition("=")[0] for word in added[1::2]) == sorted(symbols)
    assert "total_sequence_length=2" in added, "the mask is as long as what was there and what comes"
    assert run([*given, *added]) == 0, capsys.readouterr().err
    assert (tmp_path / "report.json").is_file()


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_line_is_broken_between_words_on_a_terminal_and_nowhere_else(monkeypatch):
    line = "  attention   gqa (auto: cpu supports 328 of 328 nodes); opset ai.onnx 21, com.microsoft 1"
    monkeypatch.setenv("COLUMNS", "60")
    lines = fold(line, Tty(), 14).splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 60
    assert lines[1].startswith(" " * 14) and " ".join(" ".join(lines).split()) == " ".join(line.split())
    assert fold(line, io.StringIO(), 14) == line
    monkeypatch.setenv("COLUMNS", "12")
    assert fold(line, Tty(), 14) == line, "too narrow for any layout"


def test_a_page_is_utf_8_whatever_stdout_takes(package, tmp_path, capsys):
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


def test_a_report_of_a_run_that_failed_passes_no_gate(gather, tmp_path, capsys):
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
def test_a_default_chain_tells_which_installed_provider_could_not_start(gather, monkeypatch, process):
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
    said = "Ran on CPU; CUDA is installed but could not start: library_missing; install it"
    assert said in report.to_markdown()
    with pytest.raises(partita.CheckFailedError, match="1 provider could not start: CUDAExecutionProvider"):
        report.check("unavailable=0")
