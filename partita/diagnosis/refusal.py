"""Nodes that no provider of the chain takes: what a refusal has to show.

From the facts of a permissive opening (the chain, and the CPU provider behind it), which need no run. Pure.
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
"""Name, operator and provider of a node that is not on the chain, and whether it is in a control-flow subgraph and has
the name of a node of the main graph.
"""


def refused_nodes(facts: SessionFacts, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Every node that is on no active provider of `chain`, in execution order, with the reason of each
    provider of the chain and its evidence.

    `provider` of a row is the provider that would take the node. Memcpy nodes follow from the others and are left out.
    """
    index = index_session(facts)
    if not chain:
        return ()
    allowed = frozenset(entry.provider for entry in chain if entry.status == "active")
    strays = _in_order(index, [*_assigned_outside_chain(index, allowed), *_placed_outside_chain(index, allowed)])
    phase = next(phase for phase in EVERY_PHASE if phase in facts.phases)
    return tuple(
        explain_node(index, phase, name, op_type, provider, chain, twin=twin)
        for name, op_type, provider, twin in strays
    )


def _assigned_outside_chain(index: SessionIndex, allowed: frozenset[str]) -> Iterator[FallbackNode]:
    """Entries of the assignment list outside the chain. Nodes without a name have an entry each, so they all count."""
    inside = set(map(id, index.inside)) - set(map(id, index.doubtful))
    for node in index.facts.assigned or ():
        if node.provider not in allowed:
            yield node.name, node.op_type, node.provider, id(node) in inside and node.name in index.same_name_nodes


def _placed_outside_chain(index: SessionIndex, allowed: frozenset[str]) -> Iterator[FallbackNode]:
    """Nodes without an entry: another source has them on a provider that is not allowed, or the log rejects them."""
    for name in index.order:
        if name in index.listed:
            continue
        providers = frozenset().union(*index.providers_by_source[name].values())
        if providers and not providers & allowed:
            yield name, index.op_type(name), min(providers), False
        elif not providers and _turned_down(index, name):
            yield name, index.op_type(name), CPU if CPU in index.facts.registered else UNKNOWN, False


def _turned_down(index: SessionIndex, name: str) -> bool:
    """True when a log line that a pattern knows names the node."""
    known = index.facts.providers.values()
    patterns = [pattern for each in known for pattern in each.patterns if names_a_node(pattern)]
    return any(name_in(line, pattern, name) for line in index.log.get(name, ()) for pattern in patterns)


def _in_order(index: SessionIndex, strays: list[FallbackNode]) -> list[FallbackNode]:
    """Nodes in execution order, each name once in the main graph and once in control-flow subgraphs; nodes that are not
    in the plan come last, as listed.
    """
    position = {name: number for number, name in enumerate(index.order)}
    named = {(name, twin): (name, op_type, home, twin) for name, op_type, home, twin in reversed(strays) if name}
    nameless = [stray for stray in strays if not stray[0]]
    last = len(position)
    return [*sorted(named.values(), key=lambda stray: last if stray[3] else position.get(stray[0], last)), *nameless]
