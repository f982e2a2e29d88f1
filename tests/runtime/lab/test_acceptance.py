"""Node support of a provider, from probes: unsupported and untested nodes."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from partita.observations.facts import Outcome
from partita.runtime.lab.laboratory import Lab
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.tables import GraphSupport, measure_graph

ONE = {"x": (2,)}


def chain_of(*operators: str) -> bytes:
    """A model of one node after the other."""
    names = ["x", *(f"v{index}" for index in range(len(operators) - 1)), "y"]
    ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, [2]) for port in ("x", "y")]
    nodes = [helper.make_node(op, [names[i]], [names[i + 1]], name=op) for i, op in enumerate(operators)]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def asked(lab: Lab, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, whole: Outcome = "supported") -> GraphSupport:
    """What is told when a Neg has this outcome, and the whole graph that one."""

    def try_all(models, *, one_node=True):
        outcomes = []
        for model in models:
            operators = {node.op_type for node in onnx.ModelProto.FromString(model.SerializeToString()).graph.node}
            of_node: Outcome = outcome if "Sqrt" in operators else "supported"
            outcomes.append(Placement(of_node if one_node else whole, "said"))
        return outcomes

    monkeypatch.setattr(lab, "try_all", try_all)
    return measure_graph(chain_of("Relu", "Sqrt", "Exp"), ONE, lab)


@pytest.mark.parametrize("outcome", ["rejected", "failed", "crashed"])
def test_rejected_failed_and_crashed_nodes_count_as_unsupported(bench, monkeypatch, outcome):
    told = asked(bench.lab(), monkeypatch, outcome)
    assert (told.nodes, told.unsupported, told.untested) == (3, {"Sqrt": 1}, 0)


@pytest.mark.parametrize("outcome", ["timed_out", "invalid"])
def test_timed_out_and_invalid_nodes_count_as_untested(bench, monkeypatch, outcome):
    told = asked(bench.lab(), monkeypatch, outcome)
    assert (told.nodes, told.unsupported, told.untested, told.failure) == (3, {}, 1, "")


@pytest.mark.parametrize(
    ("outcome", "fails"), [("failed", "said"), ("crashed", "said"), ("timed_out", ""), ("supported", "")]
)
def test_timeout_of_whole_graph_is_not_a_failure(bench, monkeypatch, outcome, fails):
    assert asked(bench.lab(), monkeypatch, "supported", outcome).failure == fails
