"""Faults planted in one node are found in that node, and a graph without a fault has no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.demo import checkpoint_path
from tests.conftest import Exported
from tests.drift.planted import Fault, compare, faults, judge
from tests.foreign.conftest import SAMPLES

PRECISIONS = {"demo-fp32": "fp32", "demo-int4": "int4", "demo-fp16": "fp16"}
"""Packages of the embedded checkpoint by graph; other graphs are samples of other exporters."""


def folder_of(graph: str, exported: Exported) -> Path:
    """The folder with a graph."""
    if graph in PRECISIONS:
        return exported(checkpoint_path(), precision=PRECISIONS[graph], max_length=256)
    return SAMPLES / graph


def marked(name: str, *values: object) -> object:
    """A case; packages of the embedded checkpoint take a minute to export."""
    return pytest.param(*values, id=name, marks=[pytest.mark.heavy] if str(values[0]) in PRECISIONS else [])


@pytest.mark.parametrize("graph", [marked(graph, graph) for graph in sorted({fault.graph for fault in faults()})])
def test_a_graph_without_a_fault_has_no_finding(graph: str, exported: Exported) -> None:
    folder = folder_of(graph, exported)
    found = compare(folder, folder)
    assert found.is_within and not found.nodes and found.not_finite is None
    assert found.layers and all(layer.own_error is not None for layer in found.layers)


@pytest.mark.parametrize(
    ("graph", "fault"), [marked(f"{fault.graph}.{fault.name}", fault.graph, fault) for fault in faults()]
)
def test_a_fault_is_found_in_its_node(graph: str, fault: Fault, exported: Exported, tmp_path: Path) -> None:
    layer, node, found = judge(folder_of(graph, exported), fault, tmp_path / "faulty")
    assert layer and node, (found.first_layer, found.first_node, found.basis)
    assert (found.not_finite is None) is fault.finite
    assert fault.finite or found.not_finite is not None and found.not_finite.node == fault.node
