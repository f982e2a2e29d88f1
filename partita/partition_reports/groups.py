"""Sums over the nodes of one phase: by provider, op type, layer and module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from partita.diagnosis import naming
from partita.diagnosis.records import Fallback
from partita.observations.names import UNKNOWN
from partita.partition_reports.records import FileNode, GroupShare, NodePlacement, ProviderShare

OUTSIDE_LAYERS = "outside layers"


def provider_of(node: FileNode | NodePlacement) -> str:
    """The node's provider, or `unknown`."""
    return node.provider or UNKNOWN


def is_about(entry: Fallback, node: NodePlacement) -> bool:
    """Whether a fallback is about a plan node; a node in a control-flow subgraph may have the same name, on another
    provider.
    """
    return (entry.node, entry.provider) == (node.name, provider_of(node))


def op_type_of(node: FileNode | NodePlacement) -> str:
    """The node's operator, or `unknown`."""
    return node.op_type or UNKNOWN


def _layer_name(node: NodePlacement) -> str:
    """Name of the group of a node's layer."""
    return OUTSIDE_LAYERS if node.layer is None else f"layer {node.layer}"


def module_name(node: NodePlacement) -> str:
    """Name of the group of a node's module, equal in every layer."""
    return naming.module_group(node.module)


def total_us(nodes: Iterable[NodePlacement]) -> float | None:
    """Sum of the known node times; None if none is known."""
    known = [node.host_us_per_run for node in nodes if node.host_us_per_run is not None]
    return sum(known) if known else None


def share_of(part: float | None, whole: float | None) -> float | None:
    """`part` of `whole`, 0 .. 1; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole else None


def _split(nodes: Iterable[NodePlacement], key: Callable[[NodePlacement], str]) -> dict[str, list[NodePlacement]]:
    """Nodes grouped by `key`, in order of appearance."""
    groups: dict[str, list[NodePlacement]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return groups


def by_provider(
    file_nodes: Sequence[FileNode], nodes: Sequence[NodePlacement], compiled: Mapping[str, Sequence[str]] | None = None
) -> tuple[ProviderShare, ...]:
    """Share of each provider, sorted by number of file nodes. `compiled`: compiled node -> its operators."""
    whole = total_us(nodes)
    counts = Counter(row.provider or UNKNOWN for row in file_nodes if row.state != "folded")
    by_name = {**dict.fromkeys(counts, ()), **_split(nodes, provider_of)}
    inside = compiled or {}
    shares = [
        ProviderShare(
            provider=provider,
            nodes=counts[provider],
            added=sum(node.added for node in members),
            executed=len(members),
            op_types=dict(
                Counter(op for node in members for op in inside.get(node.name, (op_type_of(node),))).most_common()
            ),
            host_us_per_run=total_us(members),
            time_share=share_of(total_us(members), whole),
        )
        for provider, members in by_name.items()
    ]
    return tuple(sorted(shares, key=lambda entry: (-entry.nodes, -entry.executed)))


def group(nodes: tuple[NodePlacement, ...], key: Callable[[NodePlacement], str]) -> tuple[GroupShare, ...]:
    """Nodes and time per group of `key`, the slowest group first."""
    shares = _grouped(nodes, key)
    return tuple(sorted(shares, key=lambda entry: (-(entry.host_us_per_run or 0.0), -entry.nodes, entry.name)))


def by_layer(nodes: tuple[NodePlacement, ...]) -> tuple[GroupShare, ...]:
    """Nodes and time per layer, in layer order; nodes outside layers come last."""
    first = {name: members[0].layer for name, members in _split(nodes, _layer_name).items()}
    shares = {entry.name: entry for entry in _grouped(nodes, _layer_name)}
    names = sorted(shares, key=lambda name: (first[name] is None, first[name] or 0))
    return tuple(shares[name] for name in names)


def _grouped(nodes: tuple[NodePlacement, ...], key: Callable[[NodePlacement], str]) -> list[GroupShare]:
    """One share per group, in order of appearance."""
    whole = total_us(nodes)
    return [
        GroupShare(
            name=name,
            nodes=len(members),
            nodes_by_provider=dict(Counter(provider_of(node) for node in members).most_common()),
            host_us_per_run=total_us(members),
            time_share=share_of(total_us(members), whole),
        )
        for name, members in _split(nodes, key).items()
    ]
