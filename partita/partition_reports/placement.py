"""Where every node of the final plan runs, and where two sources say different things about it."""

from __future__ import annotations

from partita.partition_reports import naming
from partita.partition_reports.records import Disagreement, NodePlacement, PhaseName, Source
from partita.partition_reports.session_index import Claims, SessionIndex
from partita.partition_reports.timing import NodeTimes


def place_nodes(index: SessionIndex, times: NodeTimes) -> tuple[NodePlacement, ...]:
    """One record per node, in execution order."""
    return tuple(place_node(index, times, position, name) for position, name in enumerate(index.order))


def place_node(index: SessionIndex, times: NodeTimes, position: int, name: str) -> NodePlacement:
    """Join what the sources say about one node."""
    module = index.module(name)
    return NodePlacement(
        position=position,
        name=name,
        op_type=index.op_type(name),
        provider=choose_provider(index.claims[name]),
        module=module,
        layer=naming.layer_of(module),
        host_us_per_run=times.host_us.get(name),
        output_bytes=times.output_bytes.get(name),
        replaces=index.replaces(name),
        sources=sources_of(index, name),
    )


def choose_provider(claims: Claims) -> str | None:
    """The provider named by the strongest source: profile, then assignment, then native log."""
    for providers in claims.values():
        return min(providers)
    return None


def sources_of(index: SessionIndex, name: str) -> tuple[Source, ...]:
    """Sources that know a node of this name."""
    known: list[Source] = ["plan_file"] if index.order_source == "plan_file" else []
    if name in index.exported:
        known.append("model_file")
    if index.optimised is not None and name in index.optimised.nodes:
        known.append("optimised_model")
    return (*known, *(source for source in index.claims[name]))


def find_disagreements(index: SessionIndex, phase: PhaseName) -> tuple[Disagreement, ...]:
    """Nodes that two sources place differently, and nodes that no source places at all."""
    found = []
    for name in index.order:
        claims = index.claims[name]
        providers = frozenset().union(*claims.values()) if claims else frozenset()
        if len(providers) != 1:
            detail = describe(claims) if claims else "no source names a provider for this node"
            sources = tuple(claims) or (index.order_source,)
            found.append(Disagreement(phase=phase, node=name, detail=detail, sources=sources))
    return tuple(found)


def describe(claims: Claims) -> str:
    """Each source with the provider it names."""
    return "; ".join(f"{source} says {' and '.join(sorted(providers))}" for source, providers in claims.items())
