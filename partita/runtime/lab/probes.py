"""Placement experiments after a run: the nodes to probe, the time budget, and the results as facts for the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from partita.diagnosis.explanation import context_of, explain_provider, nodes_to_probe
from partita.diagnosis.probe_conclusions import unprobed_nodes
from partita.diagnosis.reasons import reason_from_probes
from partita.diagnosis.session_index import index_session
from partita.errors import ProviderError
from partita.observations.facts import FAILED, NodeProbe, RejectedPart, RunFacts, SessionFacts
from partita.observations.names import CPU, INLINED, UNKNOWN
from partita.observations.records import ChainEntry, Probing, remedy_of
from partita.observations.text_format import name_some, plural
from partita.providers.resolve import Resolution
from partita.remedies import Remedy, any_of
from partita.runtime.chain.advice import export_again
from partita.runtime.chain.open_chain import ChainError, chain_entry, not_all_on
from partita.runtime.lab.bisection import Search, find_rejected
from partita.runtime.lab.exploration import Subject, explore, explore_surroundings, given_options
from partita.runtime.lab.functions import Functions
from partita.runtime.lab.graph import CannotProbeError, Graph, cut_graph
from partita.runtime.lab.laboratory import Cache, Lab, cache_for
from partita.runtime.lab.neighbours import holder_in_run
from partita.runtime.lab.slow_kernels import time_slow_kernels
from partita.runtime.lab.variant import fingerprint, node_variant, part_model, variant_model
from partita.runtime.ort.errors import NoKernelError, NotOpenedError
from partita.runtime.place.model_file import all_nodes, subgraphs_of
from partita.runtime.place.onnx_model import OnnxModel

if TYPE_CHECKING:
    import onnx

Sizes = Mapping[str, tuple[int, ...]]
Sessions = tuple[SessionFacts, ...]
AT_FAULT = frozenset({"initialisation_failed"})
"""Reasons for leaving out a provider that may be caused by the graph."""
FIX = Remedy(
    "declare fixed sizes in the file: for the model's inputs or, if these are fixed, for the outputs of its nodes"
)
WITHOUT_SWITCH = Remedy("remove {switch}; without it the provider opens this graph")
REJECTED_REMEDY = Remedy("change the part that fails, or use another provider; this provider opens other graphs")
OPENS_WHEN_FIXED = "the provider opens the graph with all shapes static; unchanged, it fails"
CRASHED_LATER = "in an experiment the provider opened the graph, so it crashes later, in a run or at exit"
MOST_NAMED = 5
MOST_INSIDE = 40
"""Maximum number of subgraph nodes of a rejected part to test."""
FEW_NODES = 3
"""Rejected parts up to this number of nodes are tested node by node."""


def probe_run(
    facts: RunFacts,
    resolutions: tuple[Resolution, ...],
    models: Mapping[str, OnnxModel],
    sizes: Mapping[str, Sizes],
    seconds: float,
) -> tuple[RunFacts, tuple[Resolution, ...]]:
    """The facts with experiment results, and the chain, in which a provider that failed on this graph has its reason.

    `models`, `sizes` (of graph inputs): by file name. `seconds`: the budget; 0: no experiments.
    """
    sessions, resolutions, probing = _probe_sessions(facts.sessions, resolutions, models, sizes, seconds)
    if probing is None:
        return facts, resolutions
    notes = (*facts.notes, *notes_on_gaps(sessions))
    return replace(facts, sessions=sessions, probing=probing, notes=notes), resolutions


def _probe_sessions(
    sessions: Sessions,
    resolutions: tuple[Resolution, ...],
    models: Mapping[str, OnnxModel],
    sizes: Mapping[str, Sizes],
    seconds: float,
) -> tuple[Sessions, tuple[Resolution, ...], Probing | None]:
    """The sessions with experiment results, the chain, and the record of the experiments; None without any."""
    if seconds <= 0:
        return sessions, resolutions, None
    began = time.monotonic()
    entries = tuple(map(chain_entry, resolutions))
    labs: list[Lab] = []
    for number, preferred in enumerate(resolutions):
        if preferred.provider.ort_name == CPU or (preferred.status != "active" and preferred.reason not in AT_FAULT):
            continue
        with Lab(replace(preferred, status="active"), cache_for(preferred), began + seconds) as lab:
            labs.append(lab)
            if preferred.status == "active":
                sessions = _probe_nodes(sessions, entries, entries[number], models, sizes, lab)
            else:
                sessions, preferred = _bisect(sessions, preferred, models, sizes, lab)
                resolutions = (*resolutions[:number], preferred, *resolutions[number + 1 :])
    for entry in resolutions:
        with Lab(entry, Cache(None), began + seconds) as lab:
            labs.append(lab)
            sessions = tuple(
                time_slow_kernels(session, models[session.file], sizes.get(session.file, {}), lab)
                if session.file in models and not lab.dry_run
                else session
                for session in sessions
            )
    probes = [known.probes for session in sessions for known in session.providers.values() if known.probes]
    if not probes and not any(lab.experiments or lab.cached for lab in labs):
        return sessions, resolutions, None
    probing = Probing(
        seconds=time.monotonic() - began,
        budget_seconds=seconds,
        experiments=sum(lab.experiments for lab in labs),
        cached=sum(lab.cached for lab in labs),
        crashes=sum(lab.crashes for lab in labs),
        missing_probes=tuple(dict.fromkeys(name for each in probes for name in unprobed_nodes(each))),
    )
    return sessions, resolutions, probing


def notes_on_gaps(sessions: Iterable[SessionFacts]) -> Iterator[str]:
    """A note for each reason of missing experiments, with the nodes."""
    nodes: dict[str, list[str]] = {}
    for known in (known for session in sessions for known in session.providers.values()):
        for name, probe in known.probes.items():
            if probe.missing_probes and name not in nodes.setdefault(probe.missing_probes, []):
                nodes[probe.missing_probes].append(name)
    for ground, names in nodes.items():
        count, named = plural(len(names), "node"), name_some(names, MOST_NAMED)
        yield f"experiments on {count} are missing or incomplete: {ground}: {named}"


def probe_refusal(error: ChainError, model: OnnxModel, sizes: Sizes, seconds: float) -> ProviderError:
    """The error with the experiments' results: the reason of each node, or the part on which the provider fails."""
    facts = error.facts or SessionFacts(model.path.name, ("run",), model.nodes)
    models, shapes = {facts.file: model}, {facts.file: sizes}
    (session,), chain, _ = _probe_sessions((facts,), error.chain, models, shapes, seconds)
    if error.facts is not None:
        return not_all_on(error.path, chain, session)
    changed = [
        now.reason != was.reason or session.of(now.provider.ort_name).rejected is not None
        for was, now in zip(error.chain, chain, strict=True)
    ]
    return _refusal_error(error, session, chain, changed) if any(changed) else error


def _refusal_error(
    error: ChainError, session: SessionFacts, chain: Sequence[Resolution], changed: Sequence[bool]
) -> ProviderError:
    """The error after experiments, provider by provider. `changed`: the providers with new findings."""
    messages: list[str] = []
    helps: list[Remedy | None] = []
    anew = None
    for resolution, news in zip(chain, changed, strict=True):
        entry = chain_entry(resolution)
        code, evidence = entry.reason or "", entry.evidence or ""
        if (part := session.of(entry.provider).rejected) is not None:
            shown = explain_provider(context_of(index_session(session), part.nodes[0], None, UNKNOWN, entry))
            code, evidence = shown.reason, shown.evidence
        found = None
        if anew is None and news:
            anew = found = export_again(error.path, (code, entry.reason or ""), entry.provider)
        helps.append(found or remedy_of(entry.remedies))
        messages.append(f"{resolution.provider.name}: {entry.reason}: {evidence}")
    return ProviderError("; ".join(messages), path=error.path, remedy=any_of(filter(None, helps)))


def probe_missing_kernel(
    error: NoKernelError, preferred: Resolution, model: OnnxModel, sizes: Sizes, seconds: float
) -> ProviderError:
    """The error with its cause (operator, version or type), found by experiments with the node on `preferred`."""
    if seconds <= 0 or not (error.node or error.op_type):
        return error
    graph, subject = cut_graph(model, sizes), None
    with Lab(preferred, cache_for(preferred), time.monotonic() + seconds) as lab:
        for each in _subjects_without_kernel(graph, error):
            explore([each], lab)
            if each.variants and each.variants[0].outcome in ("rejected", *FAILED):
                subject = each
                break
    shown = reason_from_probes(subject.probe(error.node), preferred.provider.ort_name) if subject is not None else None
    if subject is None or shown is None:
        return error
    code, evidence = shown
    remedy, message = export_again(error.path, (code,), preferred.provider.ort_name, probing=False), error.message
    ((_, owner),) = subject.nodes
    if not error.node:
        message += f"; the {error.op_type} is in the function of node {owner!r} ({graph.nodes[owner].op_type})"
    if remedy is None:  # the error already explains the node
        message += (
            f"; {preferred.provider.ort_name}: {code}: {evidence.replace(f' ({subject.variants[0].message})', '')}"
        )
    return NoKernelError(message, error.path, error.node, error.op_type, remedy=remedy)


def _subjects_without_kernel(graph: Graph, error: NoKernelError) -> Iterator[Subject]:
    """The node of the error; for an unnamed node, the nodes of its operator in functions of the file's nodes."""
    functions = Functions(graph)
    for owner in (error.node,) if error.node else graph.nodes:
        with contextlib.suppress(CannotProbeError):
            variant = node_variant(graph, owner) if error.node else functions.variant((owner,), error.op_type, ())
            yield Subject(variant, [(0, owner)])


def probe_not_opened(
    error: NotOpenedError, preferred: Resolution, model: OnnxModel, sizes: Sizes, seconds: float
) -> ProviderError:
    """The error with the smallest parts of the graph that `preferred` does not open; its message names no node."""
    if seconds <= 0:
        return error
    graph = cut_graph(model, sizes)
    with Lab(preferred, cache_for(preferred), time.monotonic() + seconds) as lab:
        rejected = find_rejected(Search(graph, lab))
    parts = [part for part in rejected.parts if part.minimal] if rejected is not None else []
    if not parts:
        return error
    listed = ((name, graph.nodes[name].op_type) for part in parts for name in part.nodes)
    named = name_some([f"{name!r} ({op_type})" for name, op_type in listed], MOST_NAMED)
    rest = "; it opens the rest" if rejected is not None and rejected.rest_opens else ""
    return NotOpenedError(f"{error.message}; it fails on node {named}{rest}", path=error.path, remedy=error.remedy)


def _probe_nodes(
    sessions: Sessions,
    chain: Sequence[ChainEntry],
    preferred: ChainEntry,
    models: Mapping[str, OnnxModel],
    sizes: Mapping[str, Sizes],
    lab: Lab,
) -> Sessions:
    """Experiments on `preferred` with every unexplained node that is on a later provider of `chain`."""
    subjects: list[Subject] = []
    found: list[dict[str, NodeProbe]] = [{} for _ in sessions]
    graphs: dict[int, Graph] = {}
    by_model: dict[str, list[Subject]] = {}
    """Subjects by the hash of their model: comparing each with all others takes minutes for 10,000 nodes."""
    holders: dict[tuple[int, str], str] = {}
    for number, session in enumerate(sessions):
        index = index_session(session)
        names = nodes_to_probe(index, chain, preferred)
        if not names or session.file not in models:
            continue
        callers = {name: index.replaces(name) for name in (*index.order, *names) if name.startswith(INLINED)}
        graph = _session_graph(session, models[session.file], sizes.get(session.file, {}), callers)
        functions, graphs[number] = Functions(graph), graph
        for name in names:
            try:
                if name in index.possible_functions:  # a node without a name
                    ran = next((event.output_shapes for event in session.events if event.name == name), ())
                    variant = functions.variant(index.possible_functions[name], index.op_type(name), ran)
                else:
                    variant = node_variant(graph, name)
            except CannotProbeError as error:
                found[number][name] = NodeProbe(name, (), str(error))
                continue
            alike = by_model.setdefault(fingerprint(variant_model(variant)), [])
            if (subject := next((each for each in alike if each.variant == variant), None)) is None:
                alike.append(subject := Subject(variant, []))
                subjects.append(subject)
            subject.nodes.append((number, name))
            if holder := holder_in_run(index, graph, name):
                holders[number, name] = holder
    explore(subjects, lab)
    explore_surroundings(subjects, graphs, holders, lab)
    for subject in subjects:
        for number, name in subject.nodes:
            found[number][name] = subject.probe(name, number)
    return tuple(
        session.with_provider(preferred.provider, probes=probes) if probes else session
        for session, probes in zip(sessions, found, strict=True)
    )


def _session_graph(
    session: SessionFacts, model: OnnxModel, sizes: Sizes, callers: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Graph:
    """The graph of a session, with types observed in its run. `callers`: see `Graph.with_observed_types`."""
    return cut_graph(model, sizes).with_observed_types(
        {event.name: event.output_shapes for event in session.events}, callers
    )


def _bisect(
    sessions: Sessions, failed: Resolution, models: Mapping[str, OnnxModel], sizes: Mapping[str, Sizes], lab: Lab
) -> tuple[Sessions, Resolution]:
    """The smallest part on which a provider fails that opens other graphs, and the state of that provider."""
    found: list[SessionFacts] = []
    remedies: list[Remedy] = []
    for session in sessions:
        if session.file in models:
            graph = _session_graph(session, models[session.file], sizes.get(session.file, {}))
            if not lab.starts():
                return sessions, failed
            if _opens_when_fixed(graph, lab):
                evidence = f"{OPENS_WHEN_FIXED} ({failed.evidence})"
                return sessions, replace(failed, reason="dynamic_shape", evidence=evidence, remedy=FIX)
            search = Search(graph, lab)
            part = find_rejected(search)
            if part is None and failed.crashed and not search.untested:
                return sessions, replace(failed, evidence=f"{failed.evidence}; {CRASHED_LATER}")
            if part is None:  # the provider opens other graphs, and fails only on the unchanged graph
                names, message = tuple(node.name for node in graph.proto.graph.node), failed.evidence or ""
                part = RejectedPart(
                    names,
                    message,
                    minimal=False,
                    attempts=search.attempts,
                    is_whole_graph=True,
                    untested=search.untested,
                )
            first, *others = (
                replace(each, rejected_subgraph_nodes=_failing_subgraph_nodes(graph, each, lab)) for each in part.parts
            )
            part = replace(first, other_parts=tuple(others))
            probes: dict[str, NodeProbe] = {}
            for each in part.parts:
                few = each.nodes if len(each.nodes) <= FEW_NODES else ()
                probes |= _probe_each(graph, (*few, *each.rejected_subgraph_nodes), lab)
            session = session.with_provider(failed.provider.ort_name, rejected=part, probes=probes)
            remedies = [*remedies, *_without_a_switch(graph, lab)]
        found.append(session)
    if tuple(found) == sessions:
        return sessions, failed
    remedy = any_of([*remedies[:1], REJECTED_REMEDY])
    return tuple(found), replace(failed, reason="subgraph_rejected", remedy=remedy)


def _without_a_switch(graph: Graph, lab: Lab) -> Iterator[Remedy]:
    """The remedies to remove one option without which the provider opens the unchanged graph."""
    names = tuple(node.name for node in graph.proto.graph.node)
    with contextlib.suppress(CannotProbeError):
        for option in given_options(lab):
            models = [part_model(graph, names, fixed=False)] if option.kind == "bool" else []
            for answer in lab.try_with(option.name, option.default, models, one_node=False):
                if answer is not None and answer.outcome == "supported":
                    switch = f"{lab.resolution.provider.name}.{option.name}={lab.resolution.options[option.name]}"
                    yield WITHOUT_SWITCH.filled(switch=switch)


def _opens_when_fixed(graph: Graph, lab: Lab) -> bool:
    """Whether the provider opens the graph with fixed sizes, but not unchanged."""
    names = tuple(node.name for node in graph.proto.graph.node)
    try:
        models = [part_model(graph, names, fixed=False), part_model(graph, names)]
    except CannotProbeError:
        return False
    if fingerprint(models[0]) == fingerprint(models[1]):
        return False
    as_it_is, fixed = lab.try_all(models, one_node=False)
    return as_it_is is not None and fixed is not None and as_it_is.outcome in FAILED and fixed.outcome == "supported"


def _failing_subgraph_nodes(graph: Graph, part: RejectedPart, lab: Lab) -> tuple[str, ...]:
    """Subgraph nodes of the part on which the provider fails alone; without any, unsupported subgraph nodes."""
    inner = {
        node.name: node
        for name in part.nodes
        if name in graph.nodes and len(part.nodes) <= FEW_NODES
        for body in subgraphs_of(graph.nodes[name])
        for node in all_nodes(body)
        if node.name in graph.nodes
    }
    cases: dict[str, onnx.ModelProto] = {}
    for name in list(inner)[:MOST_INSIDE]:
        with contextlib.suppress(CannotProbeError):
            cases[name] = variant_model(node_variant(graph, name), auxiliary=lab.compiles)
    answers = lab.try_all(list(cases.values()))
    outcomes = {name: answer.outcome for name, answer in zip(cases, answers, strict=True) if answer is not None}
    failing = [name for name, outcome in outcomes.items() if outcome in FAILED]
    failing = failing or [name for name, outcome in outcomes.items() if outcome == "rejected"]
    names = {own: name for name, calls in graph.inlined_nodes.items() for own in calls}  # ONNX Runtime's
    return tuple(dict.fromkeys(names.get(name, name) for name in failing))[:FEW_NODES]


def _probe_each(graph: Graph, names: Sequence[str], lab: Lab) -> dict[str, NodeProbe]:
    """Experiments on rejected nodes; each node is tested alone."""
    found: dict[str, NodeProbe] = {}
    for name in names:
        try:
            subject = Subject(node_variant(graph, name), [(0, name)])
        except CannotProbeError as error:
            found[name] = NodeProbe(name, (), str(error))
            continue
        explore([subject], lab)
        found[name] = subject.probe(name)
    return found
