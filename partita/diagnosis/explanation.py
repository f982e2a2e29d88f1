"""Reasons why a node is not on the preferred providers of the chain, and nodes of a refused chain. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from partita.diagnosis.evidence import Context
from partita.diagnosis.probe_conclusions import fullest
from partita.diagnosis.reasons import REASONS, findings, remedy_of
from partita.diagnosis.records import Fallback, SkippedProvider, VariantRecord
from partita.diagnosis.session_index import EVERY_PHASE, SessionIndex
from partita.observations.facts import FAILED, RejectedPart, SessionFacts
from partita.observations.names import CPU, INLINED, UNKNOWN
from partita.observations.records import ChainEntry, PhaseName

CONFIRM = "confirm it on a device of this kind: the dry run could not run the changed node"
"""Added to the remedy for a change that was placed but not run."""


class PlacedNode(NamedTuple):
    """A node on a provider."""

    name: str
    op_type: str | None
    provider: str
    """ONNX Runtime's name, or `unknown`."""
    in_subgraph: bool = False
    """It is in a control-flow subgraph and has the name of a node of the main graph."""


def _placed_nodes(index: SessionIndex) -> Iterator[PlacedNode]:
    """The executed nodes in order, then the nodes in control-flow subgraphs, once per name and provider.

    The plan does not include the latter, and their number of executions is unknown, so a phase's figures omit them.
    """
    main = [PlacedNode(name, index.op_type(name), index.provider(name) or UNKNOWN) for name in index.order]
    known = {(node.name, node.provider) for node in main}
    inner = (node for node in index.in_subgraphs() or () if node.name)
    yield from main
    for node in {(node.name, node.provider): node for node in inner}.values():
        if (node.name, node.provider) not in known:
            yield PlacedNode(node.name, node.op_type, node.provider, node.name in index.same_name_nodes)


def find_fallbacks(index: SessionIndex, phase: PhaseName, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Nodes that are not on the first provider of `chain`, in execution order; an unknown provider counts."""
    nodes = [node for node in _placed_nodes(index) if chain and node.provider != chain[0].provider]
    return tuple(explain_node(index, phase, node, chain) for node in nodes)


def preferred_entries(chain: Sequence[ChainEntry], provider: str) -> tuple[ChainEntry, ...]:
    """The entries of `chain` before `provider`, in order.

    Only the first entry for an unknown provider, and for a provider that is not in the chain.
    """
    known = itertools.takewhile(lambda entry: provider not in (entry.provider, UNKNOWN), chain)
    return tuple(known) or tuple(chain[:1])


def explain_node(index: SessionIndex, phase: PhaseName, node: PlacedNode, chain: Sequence[ChainEntry]) -> Fallback:
    """Why a node is on its provider and not on the preferred entries of `chain`."""
    entries = preferred_entries(chain, node.provider)
    first, *others = (explain_provider(context_of(index, node, entry)) for entry in entries)
    names = (node.name, *index.replaces(node.name, in_subgraph=node.in_subgraph))
    known = (index.of_file(name, in_subgraph=node.in_subgraph) for name in names)
    return Fallback.copy_of(
        first,
        phase=phase,
        node=node.name,
        op_type=node.op_type,
        preferred_provider=first.provider,
        provider=node.provider,
        module=index.module(node.name, in_subgraph=node.in_subgraph),
        source_line=next((each.source for each in known if each is not None and each.source), None),
        skipped=tuple(others),
    )


def explain_provider(context: Context) -> SkippedProvider:
    """Why the node is not on the preferred provider of the context, with the probes and all other reasons."""
    first, *others = (
        SkippedProvider(
            provider=context.skipped.provider,
            reason=found.code,
            evidence_kind=found.kind,
            evidence=found.evidence,
            remedy="; ".join([remedy_of(found), *([CONFIRM] if found.not_run else [])]),
            basis=found.basis,
        )
        for found in findings(context)
    )
    own: dict[str, object] = {"other_reasons": tuple(each for each in others if each.evidence_kind != "none")}
    if (probe := context.probe) is not None:
        variants = tuple(map(VariantRecord.copy_of, probe.variants))
        own |= {"variants": variants, "missing_probes": probe.missing_probes}
    return first.model_copy(update=own)


def context_of(index: SessionIndex, node: PlacedNode, skipped: ChainEntry) -> Context:
    """The input of the reasons for one node and one provider that it is not on.

    If a control-flow subgraph has a node of the same name, log lines may be about either node; pins and experiments are
    about the node of the main graph.
    """
    facts, pins, name = index.facts.of(skipped.provider), index.facts.pins, node.name
    context = Context(
        node=name,
        op_type=node.op_type,
        provider=node.provider,
        skipped=skipped,
        log=index.log.get(name, ()),
        patterns=facts.patterns,
        message_patterns=facts.message_patterns,
        session_log=index.graph_log,
        rejected_part=_part_of(facts.rejected, ()),
        budget=facts.budget,
    )
    if node.in_subgraph:
        return context
    names = index.probed_as(name)
    part = _part_of(facts.rejected, names)
    inside = [facts.probes[each] for each in (part.nodes if part is not None else ()) if each in facts.probes]
    return replace(
        context,
        is_added=name in index.present and index.is_added(name),
        replaces=names[1:],
        log=tuple(line for each in names for line in index.log.get(each, ())),
        pin=next((pins[each] for each in (name, *index.replaces(name)) if each in pins), None),
        probe=fullest(facts.probes, names),
        rejected_part=part,
        fails_alone=any(probe.variants and probe.variants[0].outcome in FAILED for probe in inside),
        blank_log=index.blank_log.get(skipped.provider, {}).get(name),
        rewritten_with=index.rewritten_with.get(name, ()),
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

    A fused node is replaced by its file nodes; a node without a name stays. Names that neither the file nor one of its
    functions has are omitted.
    """
    known = {*index.file_nodes, *index.subgraph_nodes, *index.possible_functions}
    names = dict[str, None]()
    for node in _placed_nodes(index):
        preferred = node.provider not in (UNKNOWN, entry.provider) and entry in preferred_entries(chain, node.provider)
        if preferred and not node.in_subgraph:
            found = findings(context_of(index, node, entry))[0]
            if REASONS[found.code].needs_probes or found.basis == "vague_line":
                names |= dict.fromkeys(index.probed_as(node.name))
    return tuple(name for name in names if name in known or name.startswith(INLINED))


def refused_nodes(facts: SessionFacts, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Every node that is on no active provider of `chain`, in execution order, with reason and evidence per provider.

    `provider` of a row is the provider that would run the node. Nodes that are not in the plan come last. A name occurs
    once in the main graph and once in control-flow subgraphs.
    """
    if not chain:
        return ()
    index = SessionIndex(facts)
    allowed = frozenset(entry.provider for entry in chain if entry.status == "active")
    nodes: dict[object, PlacedNode] = {}
    for number, node in enumerate(_outside_chain(index, allowed)):
        nodes.setdefault((node.name or number, node.in_subgraph), node)
    places = {(name, False): place for place, name in enumerate(index.order)}
    ordered = sorted(nodes.values(), key=lambda node: places.get((node.name, node.in_subgraph), len(places)))
    phase = next(phase for phase in EVERY_PHASE if phase in facts.phases)
    return tuple(explain_node(index, phase, node, chain) for node in ordered)


def _outside_chain(index: SessionIndex, allowed: frozenset[str]) -> Iterator[PlacedNode]:
    """Entries of the assignment list outside the chain, also those without a name, then nodes without an entry.

    The latter are nodes that another source places on a provider outside the chain, or that a log line rejects.
    """
    inside = set(index.listed_in_subgraphs)
    for node in index.facts.assigned or ():
        if node.provider not in allowed:
            in_subgraph = node in inside and node.name in index.same_name_nodes
            yield PlacedNode(node.name, node.op_type, node.provider, in_subgraph)
    patterns = [each for known in index.facts.providers.values() for each in known.patterns if each.names_node]
    for name in index.order:
        providers = frozenset[str]().union(*index.providers_by_source[name].values())
        if name in index.assignments or providers & allowed:
            continue
        if providers:
            yield PlacedNode(name, index.op_type(name), min(providers))
        elif any(pattern.is_about(line, name) for line in index.log.get(name, ()) for pattern in patterns):
            yield PlacedNode(name, index.op_type(name), CPU if CPU in index.facts.registered else UNKNOWN)
