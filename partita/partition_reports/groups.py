"""Rows of a phase, and sums over them by provider, op type, layer and module. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from partita.diagnosis import naming
from partita.diagnosis.graphs import MEMCPY_OPS
from partita.diagnosis.session_index import SessionIndex
from partita.observations.grouping import grouped
from partita.observations.names import UNKNOWN
from partita.partition_reports.phase_records import (
    FileNode,
    GroupShare,
    Node,
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
Key = Callable[[Node], str]


def provider_of(node: Node) -> str:
    """The node's provider, or `unknown`."""
    return node.provider or UNKNOWN


def is_copy(name: str, op_type: str | None) -> bool:
    """Whether ONNX Runtime inserted an executed node as a copy; without a profile by its name."""
    if op_type is None:
        return name == "Memcpy" or name.startswith("Memcpy_token_")
    return op_type in MEMCPY_OPS


def is_memcpy(node: NodePlacement) -> bool:
    """Whether ONNX Runtime inserted the node as a copy."""
    return is_copy(node.name, node.op_type)


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
    inside = sorted(position(node) for node in phase.rows if node.layer is not None)

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
    """The phase with its groups: layers in order, otherwise the slowest first."""

    def slowness(entry: GroupShare) -> tuple[float, int, str]:
        return -(entry.host_us_per_run or 0.0), -entry.nodes, entry.name

    layers = _group(phase, layer_key(phase), SEVERAL_LAYERS)
    groups = {
        "providers": _by_provider(phase),
        "by_op_type": tuple(sorted(_group(phase, op_type_of), key=slowness)),
        "by_layer": tuple(sorted(layers, key=lambda entry: layer_order(entry.name))),
        "by_module": tuple(sorted(_group(phase, module_name, SEVERAL_MODULES), key=slowness)),
    }
    return phase.model_copy(update=groups)


def _by_provider(phase: Phase) -> tuple[ProviderShare, ...]:
    """Share of each provider, sorted by number of file nodes."""
    rows, ran, whole = grouped(phase.placed, provider_of), grouped(phase.nodes, provider_of), total_us(phase.nodes)
    shares = []
    for provider in dict.fromkeys((*rows, *ran)):
        nodes, members = ran.get(provider, []), rows.get(provider, [])
        time = total_us(nodes)
        share = ProviderShare(
            provider=provider,
            nodes=len(members),
            added_nodes=sum(node.added for node in nodes),
            executed_nodes=len(nodes),
            op_types=dict(Counter(map(op_type_of, members)).most_common()),
            host_us_per_run=time,
            time_share=share_of(time, whole),
        )
        shares.append(share)
    return tuple(sorted(shares, key=lambda entry: (-entry.nodes, -entry.executed_nodes)))


def _group(phase: Phase, key: Key, several: str = "") -> list[GroupShare]:
    """One share per group of `key`.

    The time of an executed node belongs to the group of the file nodes that it ran. If these are in several groups, it
    belongs to the group `several`, by default to that of the executed node.
    """
    rows, runs, whole = grouped(phase.rows, key), phase.ran_by, total_us(phase.nodes)

    def group_of(node: NodePlacement) -> str:
        names = {key(row) for row in runs.get(node.name, ())}
        return names.pop() if len(names) == 1 else several if names and several else key(node)

    ran = grouped((node for node in phase.nodes if node.host_us_per_run is not None), group_of)
    shares = []
    for name in dict.fromkeys((*rows, *ran)):
        members, time = rows.get(name, []), total_us(ran.get(name, ()))
        counts = Counter(provider_of(row) for row in members if isinstance(row, FileNode))
        share = GroupShare(
            name=name,
            nodes=counts.total(),
            added_nodes=len(members) - counts.total(),
            nodes_by_provider=dict(counts.most_common()),
            host_us_per_run=time,
            time_share=share_of(time, whole),
        )
        shares.append(share)
    return shares


def find_file_nodes(
    index: SessionIndex, nodes: Sequence[NodePlacement], parts: Sequence[SubgraphNode], chain: Sequence[str]
) -> tuple[FileNode, ...]:
    """The nodes of one phase in the order of the file, then executed nodes of branches that ONNX Runtime inlined.

    Without a file these are the executed nodes that ONNX Runtime did not add.

    Args:
        nodes: Executed nodes.
        parts: Nodes in control-flow subgraphs of functions that ONNX Runtime inlined.
        chain: Providers, the preferred one first.
    """
    if not index.file_nodes:
        return without_file(nodes)
    ambiguous, by_name = index.replacement_candidates, {node.name: node for node in nodes}
    ran: dict[str, list[NodePlacement | SubgraphNode]] = {}
    executed: list[NodePlacement | SubgraphNode] = [*nodes, *parts]
    for node in executed:
        own = (node.name,) if isinstance(node, NodePlacement) and "model_file" in node.sources else ()
        for name in (*own, *node.replaces):
            ran.setdefault(name, []).append(node)
    rows = []
    for name in dict.fromkeys((*index.file_nodes, *ran)):
        found = ran.get(name) or [by_name[each] for each in ambiguous.get(name, ()) if each in by_name]
        in_file = index.file_nodes.get(name) or index.subgraph_nodes.get(name)
        state: NodeState = "executed" if name in ran else "ambiguous" if name in ambiguous else "folded"
        module = in_file.module if in_file is not None else naming.module_in(name)
        provider = _least_preferred([node.provider for node in found], chain)
        if provider is None and name in ambiguous and name in index.assignments:
            provider = index.assignments[name].provider
        row = FileNode(
            name=name,
            op_type=in_file.op_type if in_file is not None else None,
            module=module,
            layer=naming.layer_of(module),
            provider=provider,
            ran_as=tuple(dict.fromkeys(node.name for node in found)),
            state=state,
        )
        rows.append(row)
    return tuple(rows)


def _least_preferred(providers: Iterable[str | None], chain: Sequence[str]) -> str | None:
    """The provider that is last in the chain; None if there is none or one is unknown."""
    found = set(providers)
    if None in found or not found:
        return None
    return max(filter(None, found), key=lambda name: (chain.index(name) if name in chain else len(chain), name))


def without_file(nodes: Iterable[NodePlacement]) -> tuple[FileNode, ...]:
    """Rows for an unknown file: every executed node except nodes that ONNX Runtime added."""
    return tuple(FileNode.copy_of(node, ran_as=(node.name,), state="executed") for node in nodes if not node.added)
