"""Which classes of causes a planted case bears on: by the case and its graph, never by what is answered.

A case counts in every class that it bears on, so the rows of the table add up to more than all cases; those that bear
on none, an operator that a provider simply lacks, are a row of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import onnx

from partita.observations.names import INLINED
from tests.planted.case import NO_FALLBACK, Case
from tests.planted.cases import CASES
from tests.planted.graphs import build

CLASSES: Mapping[int, str] = {
    1: "another form runs there",
    2: "the provider's own words",
    3: "functions, unfolded",
    4: "nothing left to fall back",
    5: "pins",
    6: "neighbours and insertions",
    7: "inputs with defaults",
    8: "a remedy to be applied",
    9: "several causes in a graph",
    10: "crashes, option values",
    11: "alone or in company",
}
"""In the order of the issue that asked for them, with the number there."""
NONE = 0
NONE_TITLE = "none of these"
FORMS = frozenset({"attribute_unsupported", "no_kernel_type", "no_kernel_version"})
BESIDE = frozenset({"runtime_inserted", "not_claimed"})
APPLIED = frozenset({"option_needed", "dynamic_shape"})
COMPILING = frozenset({"openvino", "qnn", "plugins"})
"""Environments whose providers compile: a node is tried with a Neg beside it."""
OURS = ("with ", "together with ", "and not in the body", "which fail without it", "the smallest part", "in place of")
"""Parts of what Partita says itself, which a case can ask for like words of a provider."""
UNFOLDED = frozenset(
    {
        "AffineGrid",
        "Bernoulli",
        "CastLike",
        "CenterCropPad",
        "GroupNormalization",
        "MeanVarianceNormalization",
        "Mish",
        "NegativeLogLikelihoodLoss",
        "SequenceMap",
        "SoftmaxCrossEntropyLoss",
        "Swish",
    }
)
"""Operators that ONNX Runtime unfolds where the provider has no kernel of its own for them."""


def classes_of(case: Case) -> tuple[int, ...]:
    """The classes that a case bears on, by number; `NONE` alone where there is none."""
    graph = _graph(case.run.model)
    fallback = case.expected != NO_FALLBACK
    bears_on = {
        1: case.expected in FORMS or (fallback and _holds_the_culprit(case, graph)),
        2: bool(case.says) and not any(words in case.says for words in OURS),
        3: bool(graph.functions) or not UNFOLDED.isdisjoint(_operators(graph)) or case.node.startswith(INLINED),
        4: not fallback,
        5: "--pin" in case.arguments,
        6: case.expected in BESIDE or "offload_graph_io" in f"{case.run.options} {case.says}",
        7: any(port.name in {tensor.name for tensor in graph.graph.initializer} for port in graph.graph.input),
        8: case.expected in APPLIED,
        9: fallback and len(_culprits(case)) > 1,
        10: case.expected == "option_rejected" or "crashes" in case.planted,
        11: fallback and case.environment in COMPILING and "probed" in case.kinds,
    }
    return tuple(number for number, holds in bears_on.items() if holds) or (NONE,)


@cache
def _graph(text: str) -> onnx.ModelProto:
    return build(text)


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    """Nodes in bodies of control flow, however deep."""
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.g.node
            yield from _bodies(attribute.g.node)


def _operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in (*model.graph.node, *_bodies(model.graph.node))}


def _holds_the_culprit(case: Case, model: onnx.ModelProto) -> bool:
    """Whether the planted node is in a body: what is said of it must not be said of what has the body."""
    return case.node in {node.name for node in _bodies(model.graph.node)}


@cache
def _culprits_by_run() -> Mapping[str, frozenset[str]]:
    """By run: the planted nodes that are causes themselves, and do not go down with others."""
    found: dict[str, set[str]] = {}
    for case in CASES:
        if case.expected not in ("subgraph_rejected", "not_claimed", NO_FALLBACK):
            found.setdefault(case.command, set()).add(case.node or case.op_type)
    return {command: frozenset(nodes) for command, nodes in found.items()}


def _culprits(case: Case) -> frozenset[str]:
    return _culprits_by_run().get(case.command, frozenset())


def table(right: Mapping[str, bool], environments: Sequence[str]) -> list[str]:
    """A row per class with right / all in each environment. `right`: by name of the case."""
    known = {case.name: case for case in CASES}
    counts: dict[tuple[int, str], list[bool]] = {}
    for name, is_right in right.items():
        for number in classes_of(known[name]):
            counts.setdefault((number, known[name].environment), []).append(is_right)
    rows = [["class", *environments, "all"]]
    for number, title in (*CLASSES.items(), (NONE, NONE_TITLE)):
        cells = [counts.get((number, environment), []) for environment in environments]
        cells.append([each for cell in cells for each in cell])
        shown = [f"{sum(cell)} / {len(cell)}" if cell else "-" for cell in cells]
        rows.append([f"{number} {title}" if number else title, *shown])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
