"""Node support of a provider, from probes: unsupported and untested nodes."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from partita.runtime.lab.placement import Placement
from partita.runtime.lab.tables import measure_graph

ONE = {"x": (2,)}


def chain_of(*operators: str) -> bytes:
    """A model of one node after the other."""
    names = ["x", *(f"v{index}" for index in range(len(operators) - 1)), "y"]
    ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, [2]) for port in ("x", "y")]
    nodes = [helper.make_node(op, [names[i]], [names[i + 1]], name=op) for i, op in enumerate(operators)]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


@pytest.mark.parametrize(
    ("outcome", "whole", "unsupported", "untested", "failure"),
    [
        ("rejected", "supported", {"Sqrt": 1}, 0, ""),
        ("failed", "supported", {"Sqrt": 1}, 0, ""),
        ("crashed", "supported", {"Sqrt": 1}, 0, ""),
        ("timed_out", "supported", {}, 1, ""),
        ("invalid", "supported", {}, 1, ""),
        ("supported", "failed", {}, 0, "said"),
        ("supported", "crashed", {}, 0, "said"),
        ("supported", "timed_out", {}, 0, ""),
        ("supported", "supported", {}, 0, ""),
    ],
)
def test_graph_support_counts_nodes_by_outcome(bench, monkeypatch, outcome, whole, unsupported, untested, failure):
    """`outcome` of the Sqrt alone and of the whole graph."""

    def try_all(models, *, one_node=True):
        square_roots = ["Sqrt" in {node.op_type for node in model.graph.node} for model in models]
        return [Placement((outcome if root else "supported") if one_node else whole, "said") for root in square_roots]

    lab = bench.lab()
    monkeypatch.setattr(lab, "try_all", try_all)
    assert measure_graph(chain_of("Relu", "Sqrt", "Exp"), ONE, lab) == (3, unsupported, failure, untested)
