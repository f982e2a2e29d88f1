"""Probes of the target for the operators that passes write: one call; unsupported operators are not written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx
import onnx_ir as ir

from partita.export.passes import ORDER
from partita.export.passes.base import TracedGraph, nothing
from partita.export.passes.manager import question, run_on_copy
from partita.export.target import Question
from partita.library.place.target import supported_by_cpu
from tests.export.nets import Net, context, operators

WIDTH = 32


class Provider:
    """A provider that refuses some operators, and what it was asked."""

    def __init__(self, *refused: str) -> None:
        self.refused, self.asked = refused, list[list[str]]()

    def supports(self, questions: Sequence[Question]) -> list[bool]:
        nodes = [onnx.ModelProto.FromString(model).graph.node for model, _ in questions]
        assert all(len(each) == 1 for each in nodes), "a node alone"
        self.asked.append([each[0].op_type for each in nodes])
        return [each[0].op_type not in self.refused for each in nodes]


def net() -> ir.Model:
    """Two residual sums with a norm each, and an activation."""
    made = Net()
    a, b = made.input("a", [1, "s", WIDTH]), made.input("b", [1, "s", WIDTH])
    for _ in range(2):
        a = made.op("Add", a, b)
        made.give(a, f"sum{len(made.outputs)}")
        b = made.op("LayerNormalization", a, made.constant([1.0] * WIDTH), axis=-1, epsilon=1e-5)
        b = made.op("Mul", b, made.op("Sigmoid", b))
    made.give(b)
    return made.model()


def told(model: ir.Model) -> TracedGraph:
    return replace(context("contrib"), model=model)


def test_probes_are_deduplicated_and_sent_in_a_single_call() -> None:
    """Unsupported operators are not written, nor any without probe results."""
    for refused, left in (((), ["QuickGelu"]), (("QuickGelu",), ["Sigmoid", "Mul"])):
        provider, model = Provider(*refused), net()
        after, counts = run_on_copy(told(model), ORDER, provider.supports)
        assert provider.asked == [["QuickGelu", "SkipLayerNormalization"]]
        assert (counts["activations"], counts["skip_norms"]) == (0 if refused else 2, 2)
        assert operators(after.model) == ["SkipLayerNormalization", *left] * 2
        assert operators(model) == operators(net()), "the graph itself is as it was"
    after, counts = run_on_copy(replace(told(net()), supports=nothing), ORDER, None)
    assert (counts["activations"], counts["skip_norms"]) == (0, 0)
    assert operators(after.model) == operators(net())


def test_cpu_probe_reports_operators_with_kernels() -> None:
    """Operators without a schema, or with only a function body, have no kernel."""
    made = Net()
    x = made.input("x", [1, "s", WIDTH])
    known = made.op("com.microsoft::QuickGelu", x, alpha=1.0).producer()
    unknown = made.op("com.microsoft::NoSuchThing", x).producer()
    whole = made.op("Swish", x).producer()  # only as the nodes of its function
    asked = [question(node, opset) for node, opset in ((known, 21), (unknown, 21), (whole, 24))]
    assert supported_by_cpu([each for each in asked if each is not None]) == [True, False, False]
