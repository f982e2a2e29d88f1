"""Sample reports that differ in one known way, for tests of views that compare, explain and check."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from partita.observations.facts import AssignedNode, GraphNode
from partita.observations.records import ChainEntry
from partita.partition_reports.groups import find_file_nodes
from partita.partition_reports.phase_records import FileNode, NodePlacement, Phase, PhaseCost, SubgraphNode
from partita.partition_reports.records import Report
from tests.partition_reports.samples import CPU, GPU, GPU_CHAIN, MIXED_PLAN, event, mixed_facts, report_of

HOSTILE = "[bold]a[/nope]\x1b[31m\x07\r\n\u202eevil\u2028\x9b2Jé漢/Mul"
"""Terminal escapes of both kinds, a bell, line breaks, a change of direction, and rich's markup."""
HARMFUL = set("\x1b\x07\r\u202e\u2028\x9b")


def mixed(chain: tuple[ChainEntry, ...] = GPU_CHAIN, **changes: Any) -> Report:
    """The hand-made run on WebGPU and CPU: 13 nodes, 4 of them on the CPU, 3 Memcpy nodes."""
    return report_of(mixed_facts(**changes), chain)


def moved(*names: str, chain: tuple[ChainEntry, ...] = GPU_CHAIN) -> Report:
    """The same after an upgrade that sent these nodes to the CPU."""
    plan = [(name, op, CPU if name in names else provider) for name, op, provider in MIXED_PLAN]
    report = mixed(
        chain,
        events=tuple(
            event(run, order, name, op, provider, host_us=100, output_bytes=512)
            for run in range(4)
            for order, (name, op, provider) in enumerate(plan)
        ),
        assigned=tuple(
            AssignedNode(name, op, "", provider, number)
            for number, (name, op, provider) in enumerate(plan)
            if not name.startswith("Memcpy")
        ),
    )
    newer = report.environment.model_copy(update={"onnxruntime_version": "1.40.0"})
    return report.model_copy(update={"environment": newer})


def each_phase(report: Report, change: Callable[[Phase], dict[str, Any]]) -> Report:
    """The report with every phase changed, and with the rows of the changed nodes."""
    chain = [entry.provider for entry in report.chain]

    def changed(phase: Phase) -> Phase:
        made = phase.model_copy(update=change(phase))
        parts = made.subgraphs.function_nodes if made.subgraphs is not None else ()
        executed: list[NodePlacement | SubgraphNode] = [*made.nodes, *parts]
        ran = {name for node in executed for name in node.replaces}
        ran |= {node.name for node in made.nodes if "model_file" in node.sources}
        rows: list[FileNode | NodePlacement] = [*made.file_nodes, *made.nodes]
        known = {
            row.name: GraphNode(row.name, row.op_type or "", "", (), (), row.module) for row in rows if row.name in ran
        }
        index: Any = SimpleNamespace(file_nodes=known, subgraph_nodes={}, replacement_candidates={}, assignments={})
        return made.model_copy(update={"file_nodes": find_file_nodes(index, made.nodes, parts, chain)})

    return report.model_copy(update={"phases": tuple(map(changed, report.phases))})


def with_cost(phase: Phase, **changes: Any) -> PhaseCost:
    """The cost of a phase with some figures changed."""
    assert phase.cost is not None
    return phase.cost.model_copy(update=changes)


def each_node(report: Report, change: Callable[[NodePlacement], NodePlacement]) -> Report:
    """The report with every node of every phase changed."""
    return each_phase(report, lambda phase: {"nodes": tuple(change(node) for node in phase.nodes)})


def renamed(report: Report, names: dict[str, str]) -> Report:
    """The report with nodes of the plan under other names, wherever the report has them."""
    new = {name: names.get(name, name) for phase in report.phases for name in (node.name for node in phase.nodes)}

    def change(phase: Phase) -> dict[str, Any]:
        return {
            "nodes": tuple(node.model_copy(update={"name": new[node.name]}) for node in phase.nodes),
            "copies": tuple(
                copy.model_copy(
                    update={
                        "name": new.get(copy.name, copy.name),
                        "caused_by": tuple(new.get(name, name) for name in copy.caused_by),
                    }
                )
                for copy in phase.copies
            ),
        }

    fallbacks = tuple(entry.model_copy(update={"node": new.get(entry.node, entry.node)}) for entry in report.fallbacks)
    return each_phase(report, change).model_copy(update={"fallbacks": fallbacks})


def compiled(counter: int, *inside: str, provider: str = GPU) -> Callable[[Report], Report]:
    """A change that puts nodes of the file into one compiled subgraph, whose name has a counter of the process."""

    def change(phase: Phase) -> dict[str, Any]:
        gone = [node for node in phase.nodes if node.name in inside]
        whole = gone[0].model_copy(
            update={
                "name": f"EP_subgraph_{counter}_0",
                "op_type": "CompiledSubgraph",
                "provider": provider,
                "replaces": inside,
                "sources": ("plan_file", "assignment"),
            }
        )
        nodes = [whole if node is gone[0] else node for node in phase.nodes if node is gone[0] or node not in gone]
        return {"nodes": tuple(node.model_copy(update={"position": n}) for n, node in enumerate(nodes))}

    return lambda report: each_phase(report, change)
