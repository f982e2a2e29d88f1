"""Reasons why a node is not on the preferred providers of the chain, and nodes of a refused chain. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from partita.diagnosis.evidence import CONFIRM, Context, name_in, names_a_node
from partita.diagnosis.probe_conclusions import fullest
from partita.diagnosis.reasons import REASONS, explain, findings
from partita.diagnosis.records import Fallback, SkippedProvider, VariantRecord
from partita.diagnosis.session_index import EVERY_PHASE, SessionIndex, index_session
from partita.observations.facts import FAILED, AssignedNode, RejectedPart, SessionFacts
from partita.observations.names import CPU, INLINED, UNKNOWN
from partita.observations.records import ChainEntry, PhaseName


def find_fallbacks(index: SessionIndex, phase: PhaseName, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Nodes that are not on the first provider of `chain`, in execution order; an unknown provider counts."""
    if not chain:
        return ()
    main = [(name, index.op_type(name), index.provider(name) or UNKNOWN) for name in index.order]
    inner = [(node.name, node.op_type, node.provider) for node in _subgraph_nodes(index)]
    there = {(name, provider) for name, _, provider in main}
    return tuple(
        explain_node(index, phase, name, op_type, provider, chain, in_subgraph=in_subgraph)
        for nodes, in_subgraph in ((main, False), (inner, True))
        for name, op_type, provider in nodes
        if provider != chain[0].provider and not (in_subgraph and (name, provider) in there)
    )


def _subgraph_nodes(index: SessionIndex) -> tuple[AssignedNode, ...]:
    """Nodes in control-flow subgraphs, once per name and provider.

    The plan does not include them, and their number of executions is unknown, so a phase's figures omit them.
    """
    counted = (node for node in index.in_subgraphs() or () if node.name)
    return tuple({(node.name, node.provider): node for node in counted}.values())


def preferred_entries(chain: Sequence[ChainEntry], provider: str) -> tuple[ChainEntry, ...]:
    """The entries of `chain` before `provider`, in order.

    Only the first entry for an unknown provider, and for a provider that is not in the chain.
    """
    if provider == UNKNOWN:
        return tuple(chain[:1])
    return tuple(itertools.takewhile(lambda entry: entry.provider != provider, chain)) or tuple(chain[:1])


def explain_node(
    index: SessionIndex,
    phase: PhaseName,
    name: str,
    op_type: str | None,
    provider: str,
    chain: Sequence[ChainEntry],
    *,
    in_subgraph: bool = False,
) -> Fallback:
    """Why the node `name` is on `provider` and not on the preferred entries of `chain`.

    The node is not on the first provider of `chain`. `in_subgraph`: the node is in a control-flow subgraph and may have
    the name of a node of the main graph.
    """
    in_subgraph = in_subgraph and name in index.same_name_nodes
    first, *others = [
        explain_provider(context_of(index, name, op_type, provider, entry, in_subgraph=in_subgraph))
        for entry in preferred_entries(chain, provider)
    ]
    names = (name, *index.replaces(name, in_subgraph=in_subgraph))
    known = (index.of_file(each, in_subgraph=in_subgraph) or index.subgraph_nodes.get(each) for each in names)
    origins = (node.source for node in known if node is not None)
    return Fallback.copy_of(
        first,
        phase=phase,
        node=name,
        op_type=op_type,
        preferred_provider=first.provider,
        provider=provider,
        module=index.module(name, in_subgraph=in_subgraph),
        source_line=next((origin for origin in origins if origin), None),
        skipped=tuple(others),
    )


def explain_provider(context: Context) -> SkippedProvider:
    """Why the node is not on the preferred provider of the context, with the probes and all other reasons."""
    found = [
        SkippedProvider(
            provider=context.skipped.provider,
            reason=reason.code,
            evidence_kind=finding.kind,
            evidence=finding.evidence,
            remedy="; ".join(filter(None, (finding.remedy or reason.remedy, CONFIRM if finding.not_run else ""))),
            basis=finding.basis,
        )
        for reason, finding in findings(context)
    ]
    probe = context.probe
    return found[0].model_copy(
        update={
            "variants": tuple(map(VariantRecord.copy_of, probe.variants)) if probe is not None else (),
            "missing_probes": probe.missing_probes if probe is not None else "",
            "other_reasons": tuple(each for each in found[1:] if each.evidence_kind != "none"),
        }
    )


def context_of(
    index: SessionIndex,
    name: str,
    op_type: str | None,
    provider: str,
    skipped: ChainEntry,
    *,
    in_subgraph: bool = False,
) -> Context:
    """The input of the reasons for one node and one provider that it is not on.

    If a control-flow subgraph has a node of the same name, log lines may be about either node; pins and experiments are
    about the node of the main graph.
    """
    facts, pins = index.facts.of(skipped.provider), index.facts.pins
    names = () if in_subgraph else index.probed_as(name)
    blank = None if in_subgraph else index.blank_log.get(skipped.provider, {}).get(name)
    part = _part_of(facts.rejected, names)
    inside = [facts.probes[each] for each in (part.nodes if part is not None else ()) if each in facts.probes]
    return Context(
        node=name,
        op_type=op_type,
        provider=provider,
        skipped=skipped,
        is_added=not in_subgraph and name in index.present and index.is_added(name),
        replaces=tuple(each for each in names if each != name),
        log=tuple(line for each in dict.fromkeys((name, *names)) for line in index.log.get(each, ())),
        patterns=facts.patterns,
        session_log=index.graph_log,
        pin=next((pins[each] for each in (name, *index.replaces(name)) if each in pins and not in_subgraph), None),
        probe=fullest(facts.probes, names),
        rejected_part=part,
        fails_alone=any(probe.variants and probe.variants[0].outcome in FAILED for probe in inside),
        budget=facts.budget,
        blank_log=blank,
        rewritten_with=() if in_subgraph else index.rewritten_with.get(name, ()),
    )


def _part_of(rejected: RejectedPart | None, names: Sequence[str]) -> RejectedPart | None:
    """The rejected part with a node or a node that it replaces, and the other parts; else the first part."""
    if rejected is None:
        return None
    own = next((part for part in rejected.parts if set(names) & {*part.nodes, *part.rejected_subgraph_nodes}), rejected)
    others = tuple(part for part in rejected.parts if part is not own)
    return replace(own, other_parts=others, rest_opens=rejected.rest_opens)


def nodes_to_probe(index: SessionIndex, chain: Sequence[ChainEntry], entry: ChainEntry) -> tuple[str, ...]:
    """Nodes, in execution order, that are not on the preferred provider `entry` of `chain` for an undecided reason.

    A fused node is replaced by its file nodes; a node without a name stays.
    """
    placed = [(name, index.op_type(name), index.provider(name)) for name in index.order]
    inner = (node for node in _subgraph_nodes(index) if node.name not in index.same_name_nodes)
    placed += [(node.name, node.op_type, node.provider) for node in inner]
    undecided = {reason.code for reason in REASONS.values() if reason.needs_probes}
    found: list[str] = []
    for name, op_type, provider in placed:
        if provider is not None and provider != entry.provider and entry in preferred_entries(chain, provider):
            reason, finding = explain(context_of(index, name, op_type, provider, entry))
            if reason.code in undecided or finding.basis == "vague_line":
                found += [each for each in index.probed_as(name) if _can_be_probed(index, each)]
    return tuple(dict.fromkeys(found))


def _can_be_probed(index: SessionIndex, name: str) -> bool:
    """Whether the file contains the node, or a function that contains it."""
    return (
        name in index.file_nodes
        or name in index.subgraph_nodes
        or name in index.possible_functions
        or name.startswith(INLINED)
    )


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
    inside = set(map(id, index.listed_in_subgraphs))
    for node in index.facts.assigned or ():
        if node.provider not in allowed:
            yield node.name, node.op_type, node.provider, id(node) in inside and node.name in index.same_name_nodes


def _placed_outside_chain(index: SessionIndex, allowed: frozenset[str]) -> Iterator[FallbackNode]:
    """Nodes without an entry that another source places on a provider outside the chain, or that the log rejects."""
    for name in index.order:
        if name in index.assignments:
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
