"""One cluster, workers in three environments, each with the wheel that its provider needs: `make test-ray`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.commands.batch import RowBar
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint, require
from tests.contract.expectations import SOFTWARE_VULKAN
from tests.library.cluster.test_cluster_run import end_the_busiest
from tests.runtime.handmade import handmade, known_tokens

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]  # Ray warns of what Ray Data itself does
COUNT = 600
LONG = 2400
"""Rows that last until the slowest kind of worker has started, and beyond."""


@pytest.fixture
def venvs(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environments, and Ray beside them."""
    named = os.environ.get("PARTITA_VENVS", "")
    require("the environments of `make test-ray`", bool(named) and (Path(named) / "ray").is_dir())
    for name, value in SOFTWARE_VULKAN.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(Path(named) / "ray")]))
    return Path(named)


def test_workers_of_three_wheels_answer_one_file_although_one_is_killed(
    venvs: Path, exported: Exported, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    killed: list[int] = []
    shown = RowBar.hear

    def hear(bar: RowBar, at: Any, looked: Any) -> None:
        shown(bar, at, looked)
        if not killed and len(at.journal) >= LONG // 6:
            killed.append(end_the_busiest())

    monkeypatch.setattr(RowBar, "hear", hear)
    package = exported(tiny_checkpoint("llama"), attention="gqa")
    source, report = tmp_path / "in.jsonl", tmp_path / "workers.json"
    rows = [{"id": n, "tokens": [3 + n % 50, 4 + n % 7], "max_new_tokens": 40} for n in range(LONG)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = ["generate", str(package), "-i", str(source), "--token-ids"]
    kinds = [f"webgpu={venvs}/webgpu/bin/python", f"openvino,cpu={venvs}/openvino/bin/python", f"cpu={sys.executable}"]
    several = ["--address", "local", "--workers", "3", *(word for kind in kinds for word in ("--worker", kind))]
    assert run([*given, "-o", str(tmp_path / "several.jsonl"), "--report", str(report), *several]) == 0
    assert run([*given, "-o", str(tmp_path / "alone.jsonl"), "-e", "cpu"]) == 0
    answers = [
        [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        for name in ("several.jsonl", "alone.jsonl")
    ]
    assert [answer["id"] for answer in answers[0]] == list(range(LONG))
    assert [answer["tokens"] for answer in answers[0]] == [answer["tokens"] for answer in answers[1]]
    told = json.loads(report.read_text(encoding="utf-8"))
    worked = [worker for worker in told["workers"] if worker["rows"]]
    assert {worker["chain"][0] for worker in worked} == {
        "WebGpuExecutionProvider",
        "OpenVINOExecutionProvider",
        "CPUExecutionProvider",
    }
    assert len({worker["onnxruntime"] for worker in worked}) == 3
    assert told["rows"] == LONG and killed and len({worker["pid"] for worker in told["workers"]} | set(killed)) > 3


def test_a_command_that_is_killed_goes_on_and_loses_and_doubles_nothing(tmp_path: Path):
    require("ray")
    package, source, out = handmade(tmp_path / "package", batch=3), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows: list[dict[str, Any]] = [
        {"id": n, "tokens": [n % 60 + 1, n % 7 + 1], "max_new_tokens": 30} for n in range(COUNT)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["generate", str(package), "-i", str(source), "-o", str(out), "--token-ids", "-e", "cpu", "--threads", "1"]
    command = [sys.executable, "-m", "partita", *words, "--address", "local", "--workers", "2"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.DEVNULL)
    journal, deadline = tmp_path / "out.jsonl.partial", time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it was to be ended"
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = journal.read_bytes().count(b"\n") - 1
    assert 0 < kept < COUNT and not out.exists()
    assert run(words) == 0  # a run on a cluster goes on without one
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [answer["id"] for answer in answers] == list(range(COUNT))
    assert all(answer["tokens"] == known_tokens(row["tokens"], 30) for answer, row in zip(answers, rows, strict=True))


@pytest.mark.usefixtures("no_bytecode")
@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_disk_that_is_full_in_the_middle_is_one_line_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    require("ray")
    import resource

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])))
    before, shown = resource.getrlimit(resource.RLIMIT_FSIZE), RowBar.hear
    package, source, out = handmade(tmp_path / "package", batch=3), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.partial"
    rows: list[dict[str, Any]] = [
        {"id": n, "tokens": [n % 60 + 1, n % 7 + 1], "max_new_tokens": 30} for n in range(COUNT)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["generate", str(package), "-i", str(source), "-o", str(out), "--token-ids", "-e", "cpu", "--threads", "1"]
    words += ["--address", "local", "--workers", "2"]

    def hear(bar: RowBar, at: Any, looked: Any) -> None:
        shown(bar, at, looked)
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 2000, before[1]))

    with monkeypatch.context() as patched:
        patched.setattr(RowBar, "hear", hear)
        try:
            code = run(words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err.splitlines()
    assert code == 1 and sum(line.startswith("partita: ") for line in said) == 1, said
    assert any("cannot be written" in line and "make room for it" in line for line in said), said
    kept = journal.read_bytes()
    assert kept.endswith(b"}\n") and 0 < kept.count(b"\n") - 1 < COUNT and not out.exists()
    assert run(words) == 0
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [answer["id"] for answer in answers] == list(range(COUNT)) and not journal.exists()
    assert all(answer["tokens"] == known_tokens(row["tokens"], 30) for answer, row in zip(answers, rows, strict=True))


def test_an_interpreter_with_another_partita_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A script in the place of an interpreter: the one of the command, which has another Partita before Ray adds the
    paths of the command to its own.
    """
    require("ray")
    other = tmp_path / "other"
    other.mkdir()
    lines = ["import sys, types", "found = sys.modules['partita'] = types.ModuleType('partita')"]
    lines += ["found.__version__ = '0.0.0'"]
    (other / "sitecustomize.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={other}\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    package, source = handmade(tmp_path / "package"), tmp_path / "in.jsonl"
    source.write_text('{"tokens": [1]}\n', encoding="utf-8")
    words = ["generate", str(package), "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--token-ids"]
    assert run([*words, "--address", "local", "--worker", f"cpu={python}"]) == 2
    said = capsys.readouterr().err
    assert "has Partita 0.0.0, and the command is of" in said and said.count("\n") == 1


def test_an_interpreter_that_is_not_there_is_one_line(venvs: Path, tmp_path: Path, capsys):
    package, source = handmade(tmp_path / "package"), tmp_path / "in.jsonl"
    source.write_text('{"tokens": [1]}\n', encoding="utf-8")
    words = ["generate", str(package), "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--token-ids"]
    assert run([*words, "--address", "local", "--worker", f"cpu={tmp_path}/nowhere/python"]) == 2
    assert "no worker starts with" in capsys.readouterr().err
