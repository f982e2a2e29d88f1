"""On a provider that compiles, what could decide nothing any more is not tried; on others everything is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import onnx
import pytest
from onnx import parser

from partita.diagnosis.probe_verdict import conclusions
from partita.observations.facts import OTHER_FORM
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.exploration import Subject, explore
from partita.runtime.lab.graph import cut_graph
from partita.runtime.lab.laboratory import Answer, Cache, Lab
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.variant import node_variant
from partita.runtime.onnx_model import read_onnx
from partita.runtime.worker.parent import Worker

Takes = Callable[[onnx.NodeProto, onnx.ModelProto], bool]


class ScriptedLab(Lab):
    """Takes the node of a model or leaves it."""

    def __init__(self, provider: str, takes: Takes) -> None:
        super().__init__(Resolution(known_providers()[provider], "active"), Cache(None), 1e12)
        self.takes = takes

    def _start(self) -> bool:
        self._worker = cast("Worker", SimpleNamespace(kill=lambda: None))
        return True

    def _send(self, model: onnx.ModelProto, one_node: bool) -> Future[Placement]:
        probe = next(node for node in model.graph.node if node.name == "probe")
        future: Future[Placement] = Future()
        future.set_result(Placement("taken" if self.takes(probe, model) else "left"))
        return future

    def _wait(self, future: Future[Placement], seconds: float, fresh: bool) -> Answer | None:
        return Answer(future.result().outcome, "")


def tried(provider: str, takes: Takes, folder: Path) -> tuple[Subject, int]:
    """A LeakyRelu of float64 with an attribute, and how many experiments were made on it."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        "g (double[4,16] x) => (double[4,16] y) {\n  [node] y = LeakyRelu<alpha=0.3>(x)\n}"
    )
    onnx.save(parser.parse_model(text), folder / "m.onnx")
    subject = Subject(node_variant(cut_graph(read_onnx(folder / "m.onnx"), {}), "node"), [(0, "node")])
    lab = ScriptedLab(provider, takes)
    explore([subject], lab)
    return subject, lab.experiments


def of_float(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    return model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def without_alpha(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    return not node.attribute


def either(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    return of_float(node, model) or without_alpha(node, model)


def both(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    return of_float(node, model) and model.opset_import[0].version < 16


@pytest.mark.parametrize("takes", [of_float, without_alpha, either, both])
def test_what_decides_is_the_same_with_fewer_experiments(takes: Takes, tmp_path: Path) -> None:
    compiled, few = tried("openvino", takes, tmp_path)
    asked, many = tried("webgpu", takes, tmp_path)
    first, other = (conclusions(subject.probe("node"))[0] for subject in (compiled, asked))
    assert first.factors == other.factors
    assert few < many or takes is without_alpha
    assert not compiled.unprobed and not asked.unprobed


def test_a_factor_that_helps_leaves_out_those_after_it(tmp_path: Path) -> None:
    subject, _ = tried("openvino", either, tmp_path)
    assert {trial.factor for trial in subject.trials} == {"as_is", "type"}
    subject, _ = tried("openvino", without_alpha, tmp_path)
    assert {"type", "attribute"} <= {trial.factor for trial in subject.trials}


def test_a_combination_that_helps_leaves_out_other_nodes_of_the_operator(tmp_path: Path) -> None:
    subject, _ = tried("openvino", both, tmp_path)
    assert OTHER_FORM not in {trial.factor for trial in subject.trials}
    subject, _ = tried("webgpu", both, tmp_path)
    assert OTHER_FORM in {trial.factor for trial in subject.trials}


def test_where_nothing_helps_everything_is_tried(tmp_path: Path) -> None:
    subject, _ = tried("openvino", lambda node, model: False, tmp_path)
    assert {"type", "attribute", "combined", OTHER_FORM} <= {trial.factor for trial in subject.trials}
    assert [shown.code for shown in conclusions(subject.probe("node"))] == ["no_kernel_op"]
