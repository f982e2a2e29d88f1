"""Text remedies of ONNX files: the error names the remedy, and the file that follows it is placed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import partita
from partita.diagnosis.reasons import REASONS
from partita.errors import PartitaError
from partita.observations.codes import PROVIDER_CODES
from partita.remedies import Remedy
from partita.runtime.ort import errors
from tests.planted import cases
from tests.planted.graphs import build
from tests.remedies import alternatives, pattern


def one_node(op_type: str, path: Path, *, ir_version: int = 10, opset: int = 17, **node: Any) -> Path:
    """A model of one node with an input x and an output y."""
    element, domain = node.pop("element", TensorProto.FLOAT), node.get("domain", "")
    ports = [helper.make_tensor_value_info(name, element, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], name="n", **node)], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path)
    return path


@pytest.mark.parametrize(
    ("remedy", "wrong"),
    [
        (errors.OTHER_NODE, {"op_type": "Sin", "element": TensorProto.BFLOAT16, "opset": 22}),
        (errors.OTHER_VERSION, {"op_type": "Relu", "newest": 1}),
        (errors.NEWER_RUNTIME, {"op_type": "Relu", "opset": 99}),
        (errors.OTHER_RUNTIME, {"op_type": "Foo", "domain": "my.operators"}),
        (errors.LOWER_IR, {"op_type": "Relu", "ir_version": 99}),
    ],
    ids=["type", "attribute", "opset", "operator", "IR version"],
)
def test_rewritten_file_resolves_the_error(remedy: Remedy, wrong: dict[str, Any], tmp_path: Path) -> None:
    path = one_node(path=tmp_path / "model.onnx", **wrong)
    with pytest.raises(PartitaError) as caught:
        partita.place(path, "cpu")
    texts = [each.text for each in alternatives(caught.value.remedy)]
    assert any(re.fullmatch(pattern(remedy), each) for each in texts), (texts, str(caught.value))
    last = re.search(r"set ir_version in the file to (\d+)", str(caught.value))
    assert (last is not None) == (remedy is errors.LOWER_IR)
    partita.place(one_node("Relu", path, ir_version=int(last[1]) if last else 10), "cpu")


# Reasons of nodes: tests/planted has a cause and a graph without it for all but two


@pytest.mark.usefixtures("stand_ins")
def test_inserted_cast_disappears_with_supported_operator(tmp_path: Path) -> None:
    planted = next(case.run.model for case in cases.CASES if case.name == "cuda-inserted-cast")
    found = []
    for model in (planted, planted.replace("Asin", "Cos")):
        onnx.save(build(model), tmp_path / "model.onnx")
        report = partita.place(tmp_path / "model.onnx", "cuda,cpu", dry_run=True, probe_seconds=0)
        found.append("runtime_inserted" in {fallback.reason for fallback in report.fallbacks})
    assert found == [True, False]


def test_every_node_reason_has_a_planted_case_with_control_graph() -> None:
    of_nodes = set(REASONS).difference(PROVIDER_CODES)
    planted = {case.expected for case in cases.CASES if case.control}
    assert of_nodes - planted == {"runtime_inserted", "unexplained"}
