"""Rows of the report and sums over them: by provider, op type, layer and module. Pure.

Rows are the nodes of the ONNX file, with the executed nodes that ran them. The share of a provider is the number of
file nodes on it, divided by the number of file nodes that ONNX Runtime did not fold. Nodes that ONNX Runtime added are
counted separately and are in no share. A file node that ran as several executed nodes counts once, on the least
preferred of their providers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from partita.diagnosis import naming
from partita.diagnosis.graphs import MEMCPY_OPS
from partita.diagnosis.records import Fallback
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import GraphNode
from partita.observations.names import UNKNOWN
from partita.partition_reports.records import (
    FileNode,
    GroupShare,
    NodePlacement,
    NodeState,
    Phase,
    ProviderShare,
    SubgraphNode,
)

BEFORE, BETWEEN, AFTER, WHOLE = "before the layers", "between the layers", "after the layers", "the whole graph"
SEVERAL_LAYERS, SEVERAL_MODULES = "several layers", "several modules"
ORDER = {BEFORE: 0, WHOLE: 0, BETWEEN: 2, AFTER: 3}
LAYER = "layer "
Node = FileNode | NodePlacement
Key = Callable[[Node], str]
Item = TypeVar("Item")
GroupKey = TypeVar("GroupKey")


def grouped(items: Iterable[Item], key: Callable[[Item], GroupKey]) -> dict[GroupKey, list[Item]]:
    """Key -> its items, in their order."""
    found: dict[GroupKey, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def provider_of(node: Node) -> str:
    """The node's provider, or `unknown`."""
    return node.provider or UNKNOWN


def is_about(entry: Fallback, node: NodePlacement) -> bool:
    """Whether a fallback is about a plan node; a node in a control-flow subgraph may have the same name, on another
    provider.
    """
    return (entry.node, entry.provider) == (node.name, provider_of(node))


def is_memcpy(node: NodePlacement) -> bool:
    """Whether ONNX Runtime inserted the node as a copy; without a profile by its name."""
    if node.op_type is None:
        return node.name == "Memcpy" or node.name.startswith("Memcpy_token_")
    return node.op_type in MEMCPY_OPS


def op_type_of(node: Node) -> str:
    """The node's operator, or `unknown`."""
    return node.op_type or UNKNOWN


def module_name(node: Node) -> str:
    """Name of the group of a node's module, equal in every layer."""
    return naming.module_group(node.module)


def positions_in(phase: Phase) -> Callable[[Node], int]:
    """Position of a node in the execution order; a file node has that of the first node that ran it."""
    positions = {node.name: node.position for node in phase.nodes}
    at: dict[str, int] = {}
    last = 0
    for row in phase.file_nodes:
        last = at[row.name] = next((positions[name] for name in row.ran_as if name in positions), last)
    return lambda node: at[node.name] if isinstance(node, FileNode) else node.position


def layer_key(phase: Phase) -> Key:
    """The function that names the group of a node's layer. Other nodes are before, between or after the layers."""
    position = positions_in(phase)
    inside = sorted(position(node) for node in report_rows(phase) if node.layer is not None)

    def key(node: Node) -> str:
        if node.layer is not None:
            return f"{LAYER}{node.layer}"
        if not inside:
            return WHOLE
        return BEFORE if position(node) < inside[0] else AFTER if position(node) > inside[-1] else BETWEEN

    return key


def layer_order(name: str) -> tuple[int, int]:
    """Sort key of the groups of `layer_key`."""
    return (1, int(name.removeprefix(LAYER))) if name.startswith(LAYER) else (ORDER.get(name, 4), 0)


def total_us(nodes: Iterable[NodePlacement]) -> float | None:
    """Sum of the known node times; None if none is known."""
    known = [node.host_us_per_run for node in nodes if node.host_us_per_run is not None]
    return sum(known) if known else None


def share_of(part: float | None, whole: float | None) -> float | None:
    """`part` of `whole`, 0 .. 1; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole else None


def with_groups(phase: Phase) -> Phase:
    """The phase with its groups."""
    return phase.model_copy(
        update={
            "providers": _by_provider(phase),
            "by_op_type": _slowest_first(_group(phase, op_type_of)),
            "by_layer": tuple(
                sorted(_group(phase, layer_key(phase), SEVERAL_LAYERS), key=lambda entry: layer_order(entry.name))
            ),
            "by_module": _slowest_first(_group(phase, module_name, SEVERAL_MODULES)),
        }
    )


def _by_provider(phase: Phase) -> tuple[ProviderShare, ...]:
    """Share of each provider, sorted by number of file nodes."""
    counts, whole = file_counts(phase), total_us(phase.nodes)
    shares = []
    for provider in dict.fromkeys((*counts, *map(provider_of, phase.nodes))):
        ran = [node for node in phase.nodes if provider_of(node) == provider]
        rows = [row for row in placed(phase) if provider_of(row) == provider]
        time = total_us(ran)
        shares.append(
            ProviderShare(
                provider=provider,
                nodes=counts[provider],
                added_nodes=sum(node.added for node in ran),
                executed_nodes=len(ran),
                op_types=dict(Counter(map(op_type_of, rows)).most_common()),
                host_us_per_run=time,
                time_share=share_of(time, whole),
            )
        )
    return tuple(sorted(shares, key=lambda entry: (-entry.nodes, -entry.executed_nodes)))


def _group(phase: Phase, key: Key, several: str = "") -> list[GroupShare]:
    """One share per group of `key`.

    The time of an executed node belongs to the group of the file nodes that it ran. If these are in several groups, it
    belongs to the group `several`, by default to that of the executed node.
    """
    rows, runs, whole = grouped(report_rows(phase), key), ran_by(phase), total_us(phase.nodes)

    def group_of(node: NodePlacement) -> str:
        names = {key(row) for row in runs.get(node.name, ())}
        return names.pop() if len(names) == 1 else several if names and several else key(node)

    ran = grouped((node for node in phase.nodes if node.host_us_per_run is not None), group_of)
    shares = []
    for name in dict.fromkeys((*rows, *ran)):
        members, time = rows.get(name, []), total_us(ran.get(name, ()))
        counts = Counter(provider_of(row) for row in members if isinstance(row, FileNode))
        shares.append(
            GroupShare(
                name=name,
                nodes=counts.total(),
                added_nodes=len(members) - counts.total(),
                nodes_by_provider=dict(counts.most_common()),
                host_us_per_run=time,
                time_share=share_of(time, whole),
            )
        )
    return shares


def _slowest_first(shares: Iterable[GroupShare]) -> tuple[GroupShare, ...]:
    """The slowest group first."""
    return tuple(sorted(shares, key=lambda entry: (-(entry.host_us_per_run or 0.0), -entry.nodes, entry.name)))


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
