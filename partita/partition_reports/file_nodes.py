"""Rows of the report: the nodes of the ONNX file, with the executed nodes that ran them. Pure.

The share of a provider is the number of file nodes on it, divided by the number of file nodes that ONNX Runtime did not
fold. Nodes that ONNX Runtime added are counted separately and are in no share. A file node that ran as several executed
nodes counts once, on the least preferred of their providers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from partita.diagnosis import naming
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import GraphNode
from partita.observations.names import UNKNOWN
from partita.partition_reports.records import FileNode, NodePlacement, NodeState, Phase, SubgraphNode


def find_file_nodes(
    index: SessionIndex, nodes: Sequence[NodePlacement], parts: Sequence[SubgraphNode], chain: Sequence[str]
) -> tuple[FileNode, ...]:
    """The nodes of one phase in the order of the file, then executed nodes of branches that ONNX Runtime inlined.

    Args:
        nodes: Executed nodes.
        parts: Nodes in control-flow subgraphs of functions that ONNX Runtime inlined.
        chain: Providers, the preferred one first.
    """
    if not index.file_nodes:
        return without_file(nodes)
    named = {**index.subgraph_nodes, **index.file_nodes}
    assigned = {
        name: index.assignments[name].provider for name in index.replacement_candidates if name in index.assignments
    }
    return join_rows(named, tuple(index.file_nodes), nodes, parts, chain, index.replacement_candidates, assigned)


def join_rows(
    named: Mapping[str, GraphNode],
    file: Sequence[str],
    nodes: Sequence[NodePlacement],
    parts: Sequence[SubgraphNode] = (),
    chain: Sequence[str] = (),
    ambiguous: Mapping[str, Sequence[str]] = MappingProxyType({}),
    assigned: Mapping[str, str] = MappingProxyType({}),
) -> tuple[FileNode, ...]:
    """As `find_file_nodes`.

    Args:
        named: File nodes, with those in control-flow subgraphs.
        file: Nodes of the main graph, in order.
        ambiguous: File node -> executed nodes that may have run it.
        assigned: Ambiguous file node -> its provider in the assignment list.
    """
    ran: dict[str, list[NodePlacement | SubgraphNode]] = {}
    executed: list[NodePlacement | SubgraphNode] = [*nodes, *parts]
    for node in executed:
        for name in _file_nodes_of(node):
            ran.setdefault(name, []).append(node)
    by_name = {node.name: node for node in nodes}
    rows = []
    for name in dict.fromkeys((*file, *ran)):
        found = ran.get(name) or [by_name[each] for each in ambiguous.get(name, ()) if each in by_name]
        own = named.get(name)
        state: NodeState = "executed" if name in ran else "ambiguous" if name in ambiguous else "folded"
        module = own.module if own is not None else naming.module_in(name)
        rows.append(
            FileNode(
                name=name,
                op_type=own.op_type if own is not None else None,
                module=module,
                layer=naming.layer_of(module),
                provider=_least_preferred([node.provider for node in found], chain) or assigned.get(name),
                ran_as=tuple(dict.fromkeys(node.name for node in found)),
                state=state,
            )
        )
    return tuple(rows)


def _file_nodes_of(node: NodePlacement | SubgraphNode) -> tuple[str, ...]:
    """File nodes that an executed node runs: itself, the nodes that it replaces, or both."""
    own = isinstance(node, NodePlacement) and "model_file" in node.sources
    return (*((node.name,) if own else ()), *node.replaces)


def _least_preferred(providers: Iterable[str | None], chain: Sequence[str]) -> str | None:
    """The provider that is last in the chain; None if there is none or one is unknown."""
    found = set(providers)
    if None in found or not found:
        return None
    return max(filter(None, found), key=lambda name: (chain.index(name) if name in chain else len(chain), name))


def without_file(nodes: Iterable[NodePlacement]) -> tuple[FileNode, ...]:
    """Rows for an unknown file: every executed node except nodes that ONNX Runtime added."""
    return tuple(FileNode.copy_of(node, ran_as=(node.name,), state="executed") for node in nodes if not node.added)


def placed(phase: Phase) -> tuple[FileNode, ...]:
    """File nodes of a phase that ONNX Runtime did not fold, the base of every share."""
    return tuple(row for row in phase.file_nodes if row.state != "folded")


def report_rows(phase: Phase) -> list[FileNode | NodePlacement]:
    """The rows of a phase: file nodes that were not folded, then nodes that ONNX Runtime added."""
    return [*placed(phase), *(node for node in phase.nodes if node.added)]


def file_counts(phase: Phase) -> Counter[str]:
    """File nodes of a phase per provider, without folded nodes."""
    return Counter(row.provider or UNKNOWN for row in placed(phase))


def added_nodes(phase: Phase) -> int:
    """Number of nodes that ONNX Runtime added."""
    return sum(node.added for node in phase.nodes)


def folded_nodes(phase: Phase) -> int:
    """Number of file nodes that ONNX Runtime folded."""
    return len(phase.file_nodes) - len(placed(phase))


def ran_by(phase: Phase) -> dict[str, tuple[FileNode, ...]]:
    """Executed node -> the file nodes that it runs."""
    found: dict[str, tuple[FileNode, ...]] = {}
    for row in phase.file_nodes:
        for name in row.ran_as:
            found[name] = (*found.get(name, ()), row)
    return found
