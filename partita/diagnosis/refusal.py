"""Nodes that would leave the provider chain, for the error of a refused chain. Pure.

The facts are those of a session with the CPU provider appended to the chain; no run is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import name_in, names_a_node
from partita.diagnosis.explanation import explain_node
from partita.diagnosis.records import Fallback
from partita.diagnosis.session_index import EVERY_PHASE, SessionIndex, index_session
from partita.observations.facts import SessionFacts
from partita.observations.names import CPU, UNKNOWN
from partita.observations.records import ChainEntry

FallbackNode = tuple[str, str | None, str, bool]
"""Name, operator and provider of a node outside the chain, and whether it is a control-flow subgraph's node with a name
of the main graph.
"""


def refused_nodes(facts: SessionFacts, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Every node that is on no active provider of `chain`, in execution order, with reason and evidence per provider.

    `provider` of a row is the provider that would run the node. Memcpy nodes are omitted: they follow from the others.
    """
    index = index_session(facts)
    if not chain:
        return ()
    allowed = frozenset(entry.provider for entry in chain if entry.status == "active")
    fallbacks = _in_order(index, [*_assigned_outside_chain(index, allowed), *_placed_outside_chain(index, allowed)])
    phase = next(phase for phase in EVERY_PHASE if phase in facts.phases)
    return tuple(
        explain_node(index, phase, name, op_type, provider, chain, in_subgraph=in_subgraph)
        for name, op_type, provider, in_subgraph in fallbacks
    )


def _assigned_outside_chain(index: SessionIndex, allowed: frozenset[str]) -> Iterator[FallbackNode]:
    """Entries of the assignment list outside the chain, including each node without a name."""
    inside = set(map(id, index.listed_in_subgraphs)) - set(map(id, index.listed_in_either))
    for node in index.facts.assigned or ():
        if node.provider not in allowed:
            yield node.name, node.op_type, node.provider, id(node) in inside and node.name in index.same_name_nodes


def _placed_outside_chain(index: SessionIndex, allowed: frozenset[str]) -> Iterator[FallbackNode]:
    """Nodes without an entry that another source places on a provider outside the chain, or that the log rejects."""
    for name in index.order:
        if name in index.listed_names:
            continue
        providers = frozenset().union(*index.providers_by_source[name].values())
        if providers and not providers & allowed:
            yield name, index.op_type(name), min(providers), False
        elif not providers and _is_rejected(index, name):
            yield name, index.op_type(name), CPU if CPU in index.facts.registered else UNKNOWN, False


def _is_rejected(index: SessionIndex, name: str) -> bool:
    """Whether a log line that matches a pattern of a provider names the node."""
    known = index.facts.providers.values()
    patterns = [pattern for each in known for pattern in each.patterns if names_a_node(pattern)]
    return any(name_in(line, pattern, name) for line in index.log.get(name, ()) for pattern in patterns)


def _in_order(index: SessionIndex, nodes: list[FallbackNode]) -> list[FallbackNode]:
    """Nodes in execution order, each name once in the main graph and once in control-flow subgraphs.

    Nodes that are not in the plan come last, in the given order.
    """
    position = {name: number for number, name in enumerate(index.order)}
    named = {(node[0], node[3]): node for node in reversed(nodes) if node[0]}
    nameless = [node for node in nodes if not node[0]]
    last = len(position)
    return [*sorted(named.values(), key=lambda node: last if node[3] else position.get(node[0], last)), *nameless]
