"""Profiles of control-flow nodes from the installed ONNX Runtime match the report builder's expectations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import partita
from tests.partition_reports.samples import failed

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (bool flag, int64 n, float[1,64,64] x) => (float[1,64,64] z) {
  [m_If] y = If (flag) <
    then_branch = then () => (float[1,64,64] a) { [then_Mul] t = Mul (x, x)  [then_Relu] a = Relu (t) },
    else_branch = other () => (float[1,64,64] b) { [else_Neg] b = Neg (x) }>
  [m_Loop] w = Loop (n, flag, y) <
    body = body (int64 i, bool c, float[1,64,64] v) => (bool on, float[1,64,64] twice) {
      [loop_Add] twice = Add (v, v)  [loop_Identity] on = Identity (c) }>
  [m_Sqrt] z = Sqrt (w)
}"""
NODES = ("m_If", "m_Loop", "m_Sqrt")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> partita.Report:
    """Three runs through the then branch and three turns of the loop."""
    folder = tmp_path_factory.mktemp("run")
    onnx.save(parser.parse_model(MODEL), folder / "m.onnx")
    inputs: dict[str, Path] = {}
    for name, value in (("flag", np.array(True)), ("n", np.array(3))):
        inputs[name] = folder / f"{name}.npy"
        np.save(inputs[name], value)
    return partita.place(folder / "m.onnx", "cpu", inputs=inputs)


def test_checks_pass_without_conflicts(report: partita.Report) -> None:
    assert failed(report) == [] and report.conflicts == ()


def test_control_flow_nodes_report_output_size_and_subgraph_nodes(report: partita.Report) -> None:
    (phase,) = report.phases
    assert {node.name: node.output_bytes for node in phase.nodes} == dict.fromkeys(NODES, 64 * 64 * 4)
    (check,) = [check for check in report.checks if "every executed node" in check.name]
    assert "4 more ran in control-flow subgraphs" in check.detail
