"""Why a node is not on a provider that the chain prefers to the node's provider."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from partita.diagnosis.evidence import Context
from partita.diagnosis.precedence import explain, findings
from partita.diagnosis.probe_conclusions import fullest
from partita.diagnosis.reasons.base import load_reasons
from partita.diagnosis.records import Fallback, SkippedProvider
from partita.diagnosis.records import VariantRecord as TrialRecord
from partita.diagnosis.session_index import SessionIndex, choose_provider
from partita.observations.facts import FAILED, AssignedNode, RejectedPart
from partita.observations.names import INLINED, UNKNOWN
from partita.observations.records import ChainEntry, PhaseName


def find_fallbacks(index: SessionIndex, phase: PhaseName, chain: tuple[ChainEntry, ...]) -> tuple[Fallback, ...]:
    """Nodes off the first provider of `chain`, in execution order. A node whose provider is unknown counts."""
    if not chain:
        return ()
    main = [
        (name, index.op_type(name), choose_provider(index.providers_by_source[name]) or UNKNOWN) for name in index.order
    ]
    inner = [(node.name, node.op_type, node.provider) for node in _subgraph_nodes(index)]
    there = {(name, provider) for name, _, provider in main}
    return tuple(
        explain_node(index, phase, name, op_type, provider, chain, twin=twin)
        for nodes, twin in ((main, False), (inner, True))
        for name, op_type, provider in nodes
        if provider != chain[0].provider and not (twin and (name, provider) in there)
    )


def _subgraph_nodes(index: SessionIndex) -> tuple[AssignedNode, ...]:
    """Nodes in control-flow subgraphs, each name once for each provider. They are in no plan and run an unknown number
    of times, so they are not in a phase's figures.
    """
    fused = {name.partition("/")[0].rpartition("_")[0] for name in index.order if name.endswith("/")}
    counted = [
        node
        for node in index.in_subgraphs() or ()
        if node.name and (index.optimised is not None or not _was_fused(node.name, fused))
    ]
    return tuple({(node.name, node.provider): node for node in counted}.values())


def _was_fused(name: str, fused: Collection[str]) -> bool:
    """Whether a listed node of a function was fused into another node of the main graph, by the names of both.

    What ONNX Runtime fuses, after the list is taken, is called after one of its nodes and ends with a slash.
    """
    return name.startswith(INLINED) and name.rpartition("_")[0] in fused


def passed_over(chain: Sequence[ChainEntry], provider: str) -> tuple[ChainEntry, ...]:
    """The entries of `chain` that were preferred to `provider`, in order; only the first when it is not known.

    A node may be on a provider that is not in the chain: then, too, the first.
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
    twin: bool = False,
) -> Fallback:
    """Why the node `name` is on `provider` and on none of the entries of `chain` that were preferred to it.

    `chain` begins with a provider that the node is not on. With the flag, the node is in a control-flow subgraph and
    may have the name of a node of the main graph.
    """
    twin = twin and name in index.same_name_nodes
    passed = passed_over(chain, provider)
    wanted, *others = [explain_provider(index, name, op_type, provider, entry, twin=twin) for entry in passed]
    names = (name, *index.replaces(name, twin=twin))
    known = (index.of_file(each, twin=twin) or index.inner.get(each) for each in names)
    origins = (node.source for node in known if node is not None)
    return Fallback.copy_of(
        wanted,
        phase=phase,
        node=name,
        op_type=op_type,
        preferred_provider=wanted.provider,
        provider=provider,
        module=index.module(name, twin=twin),
        source_line=next((origin for origin in origins if origin), None),
        skipped=tuple(others),
    )


def explain_provider(
    index: SessionIndex, name: str, op_type: str | None, provider: str, skipped: ChainEntry, *, twin: bool = False
) -> SkippedProvider:
    """Why the node `name`, which is on `provider`, is not on the preferred provider `skipped`."""
    context = _context_of(index, name, op_type, provider, skipped, twin=twin)
    found = [
        SkippedProvider(
            provider=skipped.provider,
            reason=reason.code,
            evidence_kind=finding.kind,
            evidence=finding.evidence,
            remedy=finding.remedy or reason.remedy,
            ground=finding.ground,
        )
        for reason, finding in findings(context)
    ]
    probe = context.probe
    return found[0].model_copy(
        update={
            "variants": tuple(map(TrialRecord.copy_of, probe.variants)) if probe is not None else (),
            "missing_probes": probe.missing_probes if probe is not None else "",
            "lost": tuple(each for each in found[1:] if each.evidence_kind != "none"),
        }
    )


def _context_of(
    index: SessionIndex, name: str, op_type: str | None, provider: str, skipped: ChainEntry, *, twin: bool = False
) -> Context:
    """Everything that the reasons may look at, of one node and one provider that it is not on.

    Of two nodes of one name, in the main graph and in a control-flow subgraph, log lines may be about either; pins and
    experiments are about the main graph's node.
    """
    facts = index.facts.of(skipped.provider)
    names = index.probed_as(name, twin=twin)
    blank = () if twin else index.blank_log.get(skipped.provider, {}).get(name, ())
    part = _part_of(facts.rejected, names)
    inside = [facts.probes[each] for each in (part.nodes if part is not None else ()) if each in facts.probes]
    return Context(
        node=name,
        op_type=op_type,
        provider=provider,
        skipped=skipped,
        exported=name in index.inner or (not twin and name in index.exported),
        replaces=tuple(each for each in names if each != name),
        log=(*blank, *(line for each in dict.fromkeys((name, *names)) for line in index.log.get(each, ()))),
        patterns=facts.patterns,
        session_log=index.graph_log,
        pin=_pin_of(index, name, twin=twin),
        probe=fullest(facts.probes, names),
        rejected=part,
        fails_alone=any(probe.variants and probe.variants[0].outcome in FAILED for probe in inside),
        budget=facts.budget,
        nameless=not twin and name in index.parts,
        copied_as=index.copied_as.get(name, ()),
        rewritten_with=() if twin else index.rewritten_with.get(name, ()),
    )


def _pin_of(index: SessionIndex, name: str, *, twin: bool) -> str | None:
    """The pin that covers a node, or one that it replaces; None where there is none.

    A node that ONNX Runtime added while it rewrote pinned ones, before it placed them, has their mark: it is in the
    list, as the Reshapes around the Gemm that it makes of a MatMul and an Add. Others follow what they were added to.
    """
    pins = index.facts.pins
    names = index.probed_as(name, twin=True) if twin else (name, *index.replaces(name))
    own = next((pins[each] for each in names if each in pins), None)
    around = set(index.rewritten_with.get(name, ()))
    if twin or own is not None or not pins or not around or name not in index.listed:
        return own
    works = [other for other in index.file_nodes_of if not around.isdisjoint(index.replaces(other))]
    found = {next((pins[each] for each in (other, *index.replaces(other)) if each in pins), None) for other in works}
    return found.pop() if len(found) == 1 else None


def _part_of(rejected: RejectedPart | None, names: Sequence[str]) -> RejectedPart | None:
    """The rejected part that a node is in, by its own name or one that it replaces, with the others; else the first."""
    if rejected is None:
        return None
    own = next((part for part in rejected.parts if set(names) & {*part.nodes, *part.inside}), rejected)
    others = tuple(part for part in rejected.parts if part is not own)
    return replace(own, others=others, rest_opens=rejected.rest_opens)


def nodes_to_probe(index: SessionIndex, chain: Sequence[ChainEntry], entry: ChainEntry) -> tuple[str, ...]:
    """Nodes of the file, in execution order, that are not on the preferred provider `entry` of `chain` for a reason
    that only experiments show.

    A fused node stands for the nodes that it replaces, a node without a name for itself.
    """
    placed = [
        (name, index.op_type(name), choose_provider(index.providers_by_source[name]), False) for name in index.order
    ]
    placed += [
        (node.name, node.op_type, node.provider, node.name in index.same_name_nodes) for node in _subgraph_nodes(index)
    ]
    undecided = {reason.code for reason in load_reasons() if reason.undecided}
    found: list[str] = []
    for name, op_type, provider, twin in placed:
        if provider is not None and provider != entry.provider and entry in passed_over(chain, provider):
            reason, finding = explain(_context_of(index, name, op_type, provider, entry, twin=twin))
            if reason.code in undecided or finding.ground == "vague_line":
                found += [each for each in index.probed_as(name, twin=twin) if _can_be_tried(index, each)]
    return tuple(dict.fromkeys(found))


def _can_be_tried(index: SessionIndex, name: str) -> bool:
    """Whether the file has the node, or a function that ONNX Runtime has the node from."""
    return name in index.exported or name in index.inner or name in index.parts or name.startswith(INLINED)
