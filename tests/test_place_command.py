"""`partita place` as a command: what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from partita.cli import run
from tests.conftest import REPOSITORY
from tests.test_cli import heed_interrupts

SECONDS = 300
PLACE_DRY = ("place", "--provider", "cuda,cpu", "--dry-run")


def whole_numbers(path: Path) -> Path:
    """A model with a MatMul of int32, for which CUDA has no kernel: worth an experiment."""
    ports = [helper.make_tensor_value_info(name, TensorProto.INT32, [4, 4]) for name in ("x", "y")]
    nodes = [
        helper.make_node("Abs", ["x"], ["a"], name="a"),
        helper.make_node("MatMul", ["a", "x"], ["b"], name="b"),
        helper.make_node("Abs", ["b"], ["y"], name="c"),
    ]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def interrupt(command: list[str], variables: dict[str, str], begun: Callable[[], object]) -> tuple[int, str, str]:
    """Run the command line, press Ctrl-C as soon as `begun` holds; exit code, stdout and stderr."""
    child = subprocess.Popen(
        [sys.executable, "-m", "partita", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        preexec_fn=heed_interrupts,
    )
    deadline = time.monotonic() + SECONDS
    while not begun() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=SECONDS)
    return child.returncode, out, err


def test_ctrl_c_during_the_experiments_of_a_dry_run_keeps_the_report(tmp_path, stand_ins):
    temporary, report = tmp_path / "tmp", tmp_path / "r.json"
    temporary.mkdir()
    code, out, err = interrupt(
        [*PLACE_DRY, str(whole_numbers(tmp_path / "m.onnx")), "--report", str(report)],
        {"TMPDIR": str(temporary), "PARTITA_CACHE_DIR": str(tmp_path / "cache")},
        lambda: list(temporary.glob("*/*/stderr")),
    )
    assert code == 130, err
    assert "nodes on CUDA" in out and "Traceback" not in err
    written = json.loads(report.read_text())
    assert written["interrupted"] == ["experiments"] and any("were interrupted" in note for note in written["notes"])
    assert not list(temporary.glob("partita-*"))


def press_ctrl_c(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "cut_short", "says"),
    [
        ("partita.runtime.lab.probes.probe_run", "experiments", "experiments on fallback nodes were"),
        ("partita.runtime.ort.session.Binding.run", "runs", "run 1 of 3 was interrupted"),
    ],
)
def test_ctrl_c_after_the_model_is_open_keeps_the_report(tmp_path, monkeypatch, capsys, where, cut_short, says):
    monkeypatch.setattr(where, press_ctrl_c)
    model, report = whole_numbers(tmp_path / "m.onnx"), tmp_path / "r.json"
    assert run(["place", str(model), "--provider", "cpu", "--report", str(report)]) == 130
    assert "3 of 3 nodes" in capsys.readouterr().out.replace("All 3", "3 of 3")
    written = json.loads(report.read_text())
    assert written["interrupted"] == [cut_short] and any(note.startswith(says) for note in written["notes"])


def test_values_of_inputs_are_given_as_files(tmp_path, capsys, stand_ins):
    model, file, report = whole_numbers(tmp_path / "m.onnx"), tmp_path / "x.npy", tmp_path / "r.json"
    np.save(file, np.ones((4, 4), np.int32))
    for chain in (("--provider", "cpu"), PLACE_DRY[1:]):
        arguments = ["place", str(model), *chain, "--input", f"x={file}", "--probe-seconds", "0"]
        assert run([*arguments, "--report", str(report)]) == 0, capsys.readouterr().err
        assert json.loads(report.read_text())["request"]["options"]["input"] == f"x={file}"
        np.save(file, np.ones((4, 5), np.int32))
        assert run(arguments) == 2
        assert "size 1 of x is fixed to 4" in capsys.readouterr().err
        np.save(file, np.ones((4, 4), np.int32))
    assert run(["place", str(tmp_path), "--input", f"x={file}", "--provider", "cpu"]) == 2
    assert "--input is for ONNX files" in capsys.readouterr().err


def test_the_text_is_the_brief_report_and_with_full_every_table(tmp_path, capsys):
    command = [
        "place",
        str(whole_numbers(tmp_path / "m.onnx")),
        "--provider",
        "cpu",
        "--report",
        str(tmp_path / "r.json"),
    ]
    assert run(command) == 0
    short = capsys.readouterr().out
    assert run(["report", "show", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out == short and len(short.splitlines()) <= 10
    assert run([*command, "--full"]) == 0
    assert "Placement" in capsys.readouterr().out
    assert run([*command, "--full", "--json"]) == 2
    assert "--full and --json select different views" in capsys.readouterr().err
