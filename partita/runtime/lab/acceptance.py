"""Asking a provider about a graph that is not written yet: every distinct node alone, then the graph as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.observations.facts import Outcome
from partita.runtime.lab.graph import CannotProbeError, Graph, cut_proto
from partita.runtime.lab.laboratory import Lab
from partita.runtime.lab.variant import fingerprint, node_variant, part_model, variant_model, zeros_needed

Sizes = Mapping[str, tuple[int, ...]]
NOT_TAKEN: frozenset[Outcome] = frozenset({"left", "failed", "crashed"})
"""What says that a provider does not take a node. A crash is one: it came again in a fresh process. That an answer did
not come in time says something of the machine alone, and a variant that is no model something of the question.
"""
WHOLE_LIMIT_BYTES = 1 << 30
"""Most weights, made up of zeros, with which a graph is opened as a whole only to ask."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a provider said of a graph."""

    nodes: int
    left: Mapping[str, int]
    """Nodes that it does not take when they are alone, by operator."""
    fails: str
    """What it said when it failed over the whole graph; empty when it opens it, or was not given it."""
    unasked: int
    """Nodes for which there was no answer."""


def ask(model: bytes, sizes: Sizes, lab: Lab) -> Asked:
    """Ask about a model whose weights are not there. `sizes`: of its inputs in the step that is asked about."""
    import onnx

    graph = cut_proto(onnx.ModelProto.FromString(model), Path(), sizes)
    models: dict[str, tuple[onnx.ModelProto, list[str]]] = {}
    unasked = 0
    for name, node in graph.nodes.items():
        try:
            made = variant_model(node_variant(graph, name), auxiliary=lab.compiles)
        except CannotProbeError:
            unasked += 1
            continue
        models.setdefault(fingerprint(made), (made, []))[1].append(node.op_type)
    answers = lab.try_all([made for made, _ in models.values()])
    left: Counter[str] = Counter()
    for (_, operators), answer in zip(models.values(), answers, strict=True):
        if answer is not None and answer.outcome in NOT_TAKEN:
            left.update(operators)
        elif answer is None or answer.outcome != "taken":
            unasked += len(operators)
    fails = "" if left else _failure_over(graph, lab)
    return Asked(len(graph.nodes), dict(left), fails, unasked)


def takes_each(models: Sequence[tuple[bytes, Sizes]], lab: Lab) -> list[bool]:
    """For each model of one node, whether the provider takes the node as the operator that it is.

    False where there was no answer, and where it takes only the nodes of the operator's function.
    """
    import onnx

    cases: list[onnx.ModelProto | None] = []
    for model, sizes in models:
        graph = cut_proto(onnx.ModelProto.FromString(model), Path(), sizes)
        (name,) = graph.nodes
        try:
            cases.append(variant_model(node_variant(graph, name), auxiliary=lab.compiles))
        except CannotProbeError:
            cases.append(None)
    answers = iter(lab.try_all([case for case in cases if case is not None]))
    found = [next(answers) if case is not None else None for case in cases]
    return [answer is not None and answer.outcome == "taken" and not answer.unfolded for answer in found]


def _failure_over(graph: Graph, lab: Lab) -> str:
    """What the provider says when it fails over the whole graph; empty when it does not, or the graph is too large."""
    try:
        model = part_model(graph, tuple(graph.nodes))
    except CannotProbeError:
        return ""
    if zeros_needed([model]) > WHOLE_LIMIT_BYTES:
        return ""
    (answer,) = lab.try_all([model], one_node=False)
    failed = answer is not None and answer.outcome in NOT_TAKEN - {"left"}
    return answer.said or answer.outcome if answer is not None and failed else ""
