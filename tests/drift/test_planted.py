"""Faults planted in one node are found in that node, and a graph without a fault has no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.demo import checkpoint_path
from tests.conftest import Exported, TinyCheckpoint
from tests.contract.packages import PACKAGES
from tests.drift.planted import Fault, compare, faults, judge
from tests.foreign.conftest import SAMPLES

OPTIONS = {
    **{f"demo-{name}": {"precision": name, "max_length": 256} for name in ("fp32", "int4", "fp16")},
    **{
        name: PACKAGES[name]
        for name in ("demo-primitives-fp32", "demo-primitives-fp16-static", "llama-primitives-fp32")
    },
}
"""Packages of the embedded or a tiny checkpoint by graph; other graphs are samples of other exporters."""


def folder_of(graph: str, exported: Exported, tiny_checkpoint: TinyCheckpoint) -> Path:
    """The folder with a graph."""
    if graph in OPTIONS:
        checkpoint = checkpoint_path() if graph.startswith("demo") else tiny_checkpoint("llama")
        return exported(checkpoint, **OPTIONS[graph])
    return SAMPLES / graph


def marked(name: str, *values: object) -> object:
    """A case; packages of the embedded checkpoint take a minute to export."""
    return pytest.param(*values, id=name, marks=[pytest.mark.heavy] if str(values[0]) in OPTIONS else [])


@pytest.mark.parametrize("graph", [marked(graph, graph) for graph in sorted({fault.graph for fault in faults()})])
def test_a_graph_without_a_fault_has_no_finding(
    graph: str, exported: Exported, tiny_checkpoint: TinyCheckpoint
) -> None:
    folder = folder_of(graph, exported, tiny_checkpoint)
    found = compare(folder, folder)
    assert found.is_within and not found.nodes and found.not_finite is None
    assert found.layers and all(layer.own_error is not None for layer in found.layers)


@pytest.mark.parametrize(
    ("graph", "fault"), [marked(f"{fault.graph}.{fault.name}", fault.graph, fault) for fault in faults()]
)
def test_a_fault_is_found_in_its_node(
    graph: str, fault: Fault, exported: Exported, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    layer, node, found = judge(folder_of(graph, exported, tiny_checkpoint), fault, tmp_path / "faulty")
    assert layer and node, (found.first_layer, found.first_node, found.basis)
    assert (found.not_finite is None) is fault.finite
    assert fault.finite or found.not_finite is not None and found.not_finite.node == fault.node


@pytest.mark.heavy
@pytest.mark.parametrize(
    "fault", [fault for fault in faults() if fault.graph == "demo-fp32"], ids=lambda each: each.name
)
def test_a_fault_is_found_against_the_source_model(
    fault: Fault, exported: Exported, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = folder_of(fault.graph, exported, tiny_checkpoint)
    layer, node, found = judge(folder, fault, tmp_path / "faulty", source=checkpoint_path())
    assert layer and node, (found.first_layer, found.first_node, found.basis)
