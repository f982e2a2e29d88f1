"""`partita place` as a command: Ctrl-C, input files, text views and models with control flow."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import partita
from partita.cli import run
from tests.commands.test_cli import child_environment, heed

SECONDS = 300
HEAD = '<ir_version: 10, opset_import: ["" : 21, "my" : 1]>\n'
PLACE_DRY = ("place", "--provider", "cuda,cpu", "--dry-run")


def whole_numbers(path: Path) -> Path:
    """A model with a MatMul of int32, for which CUDA has no kernel: worth an experiment."""
    text = "g (int32[4,4] x) => (int32[4,4] y) { [a] p = Abs (x) [b] q = MatMul (p, x) [c] y = Abs (q) }"
    onnx.save(parser.parse_model(HEAD + text), path)
    return path


def interrupt(command: list[str], variables: dict[str, str], begun: Callable[[], object]) -> tuple[int, str, str]:
    """Run the command line, press Ctrl-C as soon as `begun` holds; exit code, stdout and stderr."""
    child = subprocess.Popen(
        [sys.executable, "-m", "partita", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**child_environment(), **variables},
        preexec_fn=heed,
    )
    deadline = time.monotonic() + SECONDS
    while not begun() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=SECONDS)
    return child.returncode, out, err


def test_ctrl_c_during_dry_run_probes_writes_report(tmp_path, stand_ins):
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
    assert written["interruptions"] == ["experiments"] and any("were interrupted" in note for note in written["notes"])
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
def test_ctrl_c_after_model_is_open_writes_report(tmp_path, monkeypatch, capsys, where, cut_short, says):
    monkeypatch.setattr(where, press_ctrl_c)
    model, report = whole_numbers(tmp_path / "m.onnx"), tmp_path / "r.json"
    assert run(["place", str(model), "--provider", "cpu", "--report", str(report)]) == 130
    assert "3 of 3 nodes" in capsys.readouterr().out.replace("All 3", "3 of 3")
    written = json.loads(report.read_text())
    assert written["interruptions"] == [cut_short] and any(note.startswith(says) for note in written["notes"])


def test_input_values_are_read_from_files(tmp_path, capsys, stand_ins):
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


BODIES = """g (bool flag, int64 n, float[1,64,64] x) => (float[1,64,64] z) {
  [m_If] y = If(flag) <
    then_branch = then () => (float[1,64,64] a) { [then_Mul] t = Mul(x, x)  [then_Relu] a = Relu(t) },
    else_branch = other () => (float[1,64,64] b) { [else_Neg] b = Neg(x) }>
  [m_Loop] w = Loop(n, flag, y) <
    body = body (int64 i, bool c, float[1,64,64] v) => (bool on, float[1,64,64] twice) {
      [loop_Add] twice = Add(v, v)  [loop_Identity] on = Identity(c) }>
  [m_Sqrt] z = Sqrt(w)
}"""


def test_control_flow_nodes_have_output_bytes_and_subgraph_nodes_are_counted(tmp_path):
    """Runs of the installed ONNX Runtime through the then branch and three turns of the loop."""
    onnx.save(parser.parse_model(HEAD + BODIES), tmp_path / "m.onnx")
    inputs = {name: tmp_path / f"{name}.npy" for name in ("flag", "n")}
    for name, value in (("flag", np.array(True)), ("n", np.array(3))):
        np.save(inputs[name], value)
    report = partita.place(tmp_path / "m.onnx", "cpu", inputs=inputs)
    (phase,) = report.phases
    names = ("m_If", "m_Loop", "m_Sqrt")
    assert {node.name: node.output_bytes for node in phase.nodes} == dict.fromkeys(names, 64 * 64 * 4)
    assert all(check.passed for check in report.checks) and report.conflicts == ()
    (check,) = [check for check in report.checks if check.key == "executed_in_plan"]
    assert "4 more ran in control-flow subgraphs" in check.detail


def test_place_prints_brief_report_and_full_tables(tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (
            "g (bfloat16[4] x) => (bfloat16[4] y) { [n] y = Sigmoid(x) }",
            "CPUExecutionProvider: no_kernel_type: with float32, float16 or float64 in place of bfloat16 the provider",
        ),
        (
            "g (float[2,8,8,4] x, float[4] s, float[4] b) => (float[2,8,8,4] y) {"
            " [n] y = com.microsoft.GroupNorm<groups=2, activation=0>(x, s, b) }",
            "CPUExecutionProvider: no_kernel_op: tested in isolation, the provider does not support it",
        ),
        (
            "g (int16[4] x, int16 low, int16 high) => (int16[4] y) { [n] y = Clip(x, low, high) }",
            "is in the function of node 'n' (Clip); CPUExecutionProvider: no_kernel_type: with float32",
        ),
    ],
    ids=["type", "operator", "node of a function"],
)
def test_node_without_any_kernel_is_rejected_with_cause(tmp_path, capsys, graph, told):
    onnx.save(parser.parse_model(HEAD.replace('"my"', '"com.microsoft"') + graph), tmp_path / "m.onnx")
    assert run(["place", str(tmp_path / "m.onnx"), "--provider", "cpu"]) == 3
    err = capsys.readouterr().err
    assert told in err and err.count("Could not find an implementation") == 1


@pytest.mark.parametrize(("kind", "says"), [("seq(float[4])", "x is a sequence"), ("int4[4]", "x is a tensor of int4")])
def test_model_with_ungeneratable_inputs_is_placed_but_not_run(tmp_path, kind, says):
    text = f"g ({kind} x, float[4] z) => (float[4] y) {{ [n] y = Celu(z) }}"
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    report = partita.place(tmp_path / "m.onnx", "cpu", probe_seconds=0)
    (phase,) = report.phases
    assert phase.nodes and phase.observed_runs == 0 and all(check.passed for check in report.checks)
    assert any("not run" in note and says in note for note in report.notes)


def test_second_dry_run_uses_stored_experiments_of_its_device(tmp_path, stand_ins):
    """The sizes are of this test alone: others run in the same cache."""
    text = "g (float[5,7,11] x) => (float[5,7,11] y) { [a] h = Abs(x) [b] y = Celu<alpha=2.5>(h) }"
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    found = []
    for device in ("h100", "h100", "t4"):
        report = partita.place(tmp_path / "m.onnx", "cuda,cpu", dry_run=True, device=device)
        assert report.probing is not None and [entry.node for entry in report.fallbacks] == ["b"]
        found.append((report.probing.experiments > 0, report.probing.cached > 0))
    assert found == [(True, False), (False, True), (True, False)]
