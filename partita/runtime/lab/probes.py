"""Placement experiments after a run: the nodes to probe, the time budget, and the results as facts for the report."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import onnx

from partita.diagnosis.explanation import PlacedNode, context_of, explain_provider, nodes_to_probe
from partita.diagnosis.kernel_paths import find_paths
from partita.diagnosis.reasons import reason_from_probes
from partita.diagnosis.session_index import SessionIndex
from partita.errors import ProviderError
from partita.observations.facts import AS_IS, FAILED, NodeProbe, ProbeRun, RejectedPart, RunFacts, SessionFacts
from partita.observations.names import CPU, INLINED, UNKNOWN
from partita.observations.records import ChainEntry, Probing, remedy_of
from partita.observations.text_format import name_some, plural
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.remedies import Remedy, any_of
from partita.runtime.chain.advice import export_again
from partita.runtime.chain.open_chain import ChainError, chain_entry, not_all_on
from partita.runtime.lab.bisection import Search, find_rejected
from partita.runtime.lab.change import with_attributes, without
from partita.runtime.lab.exploration import Node, Subject, explore, explore_surroundings, given_options
from partita.runtime.lab.graph import CannotProbeError, Graph, called_name, cut_graph
from partita.runtime.lab.laboratory import Lab, cache_for
from partita.runtime.lab.neighbours import holder_in_run
from partita.runtime.lab.variant import (
    Variant,
    fingerprint,
    function_variants,
    node_variant,
    part_model,
    to_run,
    variant_model,
    without_values,
)
from partita.runtime.ort.errors import NoKernelError, NotOpenedError
from partita.runtime.place.model_file import all_nodes, subgraphs_of
from partita.runtime.place.onnx_model import OnnxModel

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
GraphOf = Callable[[SessionFacts, Mapping[str, Sequence[str]]], Graph]
"""Graph of a session, with types observed in its run; see `Graph.with_observed_types`."""
MakeVariant = Callable[[], Variant]
"""Makes the variant of a node. Raises CannotProbeError."""


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

    def graph_of(session: SessionFacts, callers: Mapping[str, Sequence[str]]) -> Graph:
        outputs = {event.name: event.output_shapes for event in session.events}
        operators = {event.name: event.op_type for event in session.events}
        graph = cut_graph(models[session.file], sizes.get(session.file, {}))
        return graph.with_observed_types(outputs, callers, operators)

    began = time.monotonic()
    entries = tuple(map(chain_entry, resolutions))
    labs: list[Lab] = []
    for number, entry in enumerate(resolutions):
        with Lab(replace(entry, status="active"), cache_for(entry), began + seconds) as lab:
            labs.append(lab)
            if entry.provider.ort_name != CPU and entry.status == "active":
                sessions = _probe_nodes(sessions, entries, entries[number], graph_of, lab)
            elif entry.provider.ort_name != CPU and entry.reason in AT_FAULT:
                sessions, settled = _bisect(sessions, entry, graph_of, lab)
                resolutions = (*resolutions[:number], settled, *resolutions[number + 1 :])
            if entry.status == "active" and not any(name.startswith(PREFIX) for name in lab.environment):
                sessions = tuple(
                    _time_slow_kernels(each, graph_of, lab) if each.file in models else each for each in sessions
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
        missing_probes=tuple(
            dict.fromkeys(name for each in probes for name, probe in each.items() if probe.missing_probes)
        ),
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
    messages: list[str] = []
    helps: list[Remedy | None] = []
    changed, anew = False, None
    for was, now in zip(error.chain, chain, strict=True):
        entry = chain_entry(now)
        code, evidence, part = entry.reason or "", entry.evidence or "", session.of(entry.provider).rejected
        if part is not None:
            shown = explain_provider(context_of(SessionIndex(session), PlacedNode(part.nodes[0], None, UNKNOWN), entry))
            code, evidence = shown.reason, shown.evidence
        is_new, found = part is not None or now.reason != was.reason, None
        if is_new and anew is None:
            anew = found = export_again(error.path, (code, entry.reason or ""), entry.provider)
        changed |= is_new
        helps.append(found or remedy_of(entry.remedies))
        messages.append(f"{now.provider.name}: {entry.reason}: {evidence}")
    explained = ProviderError("; ".join(messages), path=error.path, remedy=any_of(filter(None, helps)))
    return explained if changed else error


def probe_missing_kernel(error: NoKernelError, model: OnnxModel, sizes: Sizes, seconds: float) -> ProviderError:
    """The error with its cause (operator, version or type), found by experiments with the node on the CPU provider.

    If the node has no name, nodes of its operator in the functions of the file's nodes are tested.
    """
    graph = cut_graph(model, sizes)
    nodes: dict[Node, MakeVariant] = {}
    if error.node:
        nodes[0, error.node] = partial(node_variant, graph, error.node)
    elif error.op_type:
        find = function_variants(graph)
        nodes = {(0, name): partial(find, (name,), error.op_type, ()) for name in graph.nodes}
    with _cpu_lab(seconds) as lab:
        subjects, _ = _subjects(nodes)
        explore(subjects, lab)
    at_fault = (each for each in subjects if each.outcome in ("rejected", *FAILED))
    if (subject := next(at_fault, None)) is None or (
        shown := reason_from_probes(subject.probe(0, error.node), CPU)
    ) is None:
        return error
    code, evidence = shown
    remedy, message = export_again(error.path, (code,), CPU, probing=False), error.message
    _, owner = subject.nodes[0]
    if not error.node:
        message += f"; the {error.op_type} is in the function of node {owner!r} ({graph.nodes[owner].op_type})"
    if remedy is None:  # the error already explains the node
        message += f"; {CPU}: {code}: {evidence.replace(f' ({subject.variants[0].message})', '')}"
    return NoKernelError(message, error.path, error.node, error.op_type, remedy=remedy)


def probe_not_opened(error: NotOpenedError, model: OnnxModel, sizes: Sizes, seconds: float) -> ProviderError:
    """The error with the smallest parts that the CPU provider does not open; its message names no node."""
    graph = cut_graph(model, sizes)
    with _cpu_lab(seconds) as lab:
        rejected = find_rejected(Search(graph, lab))
    parts = [part for part in rejected.parts if part.minimal] if rejected is not None else []
    if rejected is None or not parts:
        return error
    named = name_some([f"{name!r} ({graph.nodes[name].op_type})" for part in parts for name in part.nodes], MOST_NAMED)
    rest = "; it opens the rest" if rejected.rest_opens else ""
    return NotOpenedError(f"{error.message}; it fails on node {named}{rest}", path=error.path, remedy=error.remedy)


def _cpu_lab(seconds: float) -> Lab:
    """A laboratory for the CPU provider."""
    cpu = Resolution(known_providers()["cpu"], "active")
    return Lab(cpu, cache_for(cpu), time.monotonic() + seconds)


def _subjects(nodes: Mapping[Node, MakeVariant]) -> tuple[list[Subject], dict[Node, NodeProbe]]:
    """The distinct nodes to test, and the reasons for the nodes that cannot be tested.

    Nodes that differ only in their weights, as in the layers of a model, are tested once.
    """
    by_model: dict[str, list[tuple[Variant, Subject]]] = {}
    """Subjects by the hash of their model: comparing each with all others takes minutes for 10,000 nodes."""
    untestable: dict[Node, NodeProbe] = {}
    for node, make in nodes.items():
        try:
            variant = make()
        except CannotProbeError as error:
            untestable[node] = NodeProbe(node[1], (), str(error))
            continue
        kind = without_values(variant)
        alike = by_model.setdefault(fingerprint(variant_model(kind)), [])
        if (subject := next((each for known, each in alike if known == kind), None)) is None:
            alike.append((kind, subject := Subject(variant, [])))
        subject.nodes.append(node)
    return [subject for alike in by_model.values() for _, subject in alike], untestable


def _probes(subjects: Iterable[Subject], untestable: Mapping[Node, NodeProbe]) -> dict[Node, NodeProbe]:
    """The trials of every node."""
    return {**untestable, **{node: subject.probe(*node) for subject in subjects for node in subject.nodes}}


def _probe_nodes(
    sessions: Sessions, chain: Sequence[ChainEntry], preferred: ChainEntry, graph_of: GraphOf, lab: Lab
) -> Sessions:
    """Experiments on `preferred` with every unexplained node that is on a later provider of `chain`."""
    nodes: dict[Node, MakeVariant] = {}
    graphs: dict[int, Graph] = {}
    holders: dict[Node, str] = {}
    for number, session in enumerate(sessions):
        index = SessionIndex(session)
        names = nodes_to_probe(index, chain, preferred)
        if not names:
            continue
        callers = {name: index.replaces(name) for name in (*index.order, *names) if name.startswith(INLINED)}
        graph = graphs[number] = graph_of(session, callers)
        find = function_variants(graph)
        for name in names:
            if owners := index.possible_functions.get(name):  # a node without a name
                ran = next((event.output_shapes for event in session.events if event.name == name), ())
                nodes[number, name] = partial(find, owners, index.op_type(name), ran)
            else:
                nodes[number, name] = partial(node_variant, graph, name)
            if holder := holder_in_run(index, graph, name):
                holders[number, name] = holder
    subjects, untestable = _subjects(nodes)
    explore(subjects, lab)
    explore_surroundings(subjects, graphs, holders, lab)
    found = _probes(subjects, untestable)
    return tuple(
        session.with_provider(preferred.provider, probes=probes) if probes else session
        for number, session in enumerate(sessions)
        for probes in [{name: found[at, name] for at, name in nodes if at == number}]
    )


def _bisect(sessions: Sessions, failed: Resolution, graph_of: GraphOf, lab: Lab) -> tuple[Sessions, Resolution]:
    """The smallest part on which a provider fails that opens other graphs, and the state of that provider."""
    if not lab.starts():
        return sessions, failed
    found: list[SessionFacts] = []
    remedies: list[Remedy] = []
    for session in sessions:
        graph = graph_of(session, {})
        if _opens_when_fixed(graph, lab):
            evidence = f"{OPENS_WHEN_FIXED} ({failed.evidence})"
            return sessions, replace(failed, reason="dynamic_shape", evidence=evidence, remedy=FIX)
        search = Search(graph, lab)
        part = find_rejected(search)
        if part is None and failed.crashed and not search.untested:
            return sessions, replace(failed, evidence=f"{failed.evidence}; {CRASHED_LATER}")
        part = part or RejectedPart(  # the provider opens other graphs, and fails only on the unchanged graph
            tuple(node.name for node in graph.proto.graph.node),
            failed.evidence or "",
            minimal=False,
            attempts=search.attempts,
            is_whole_graph=True,
            untested=search.untested,
        )
        first, *others = (
            replace(each, rejected_subgraph_nodes=_failing_subgraph_nodes(graph, each, lab)) for each in part.parts
        )
        few = [each.nodes for each in part.parts if len(each.nodes) <= FEW_NODES]
        names = itertools.chain(*few, *(each.rejected_subgraph_nodes for each in (first, *others)))
        subjects, untestable = _subjects({(0, name): partial(node_variant, graph, name) for name in names})
        explore(subjects, lab)
        probes = {name: probe for (_, name), probe in _probes(subjects, untestable).items()}
        rejected = replace(first, other_parts=tuple(others))
        found.append(session.with_provider(failed.provider.ort_name, rejected=rejected, probes=probes))
        remedies += _without_a_switch(graph, lab)
    remedy = any_of([*remedies[:1], REJECTED_REMEDY])
    return tuple(found), replace(failed, reason="subgraph_rejected", remedy=remedy)


def _without_a_switch(graph: Graph, lab: Lab) -> Iterator[Remedy]:
    """The remedies to remove one option without which the provider opens the unchanged graph."""
    with contextlib.suppress(CannotProbeError):
        for option in given_options(lab):
            models = [part_model(graph, fixed=False)] if option.kind == "bool" else []
            for answer in lab.try_with(option.name, option.default, models, one_node=False):
                if answer is not None and answer.outcome == "supported":
                    switch = f"{lab.resolution.provider.name}.{option.name}={lab.resolution.options[option.name]}"
                    yield WITHOUT_SWITCH.filled(switch=switch)


def _opens_when_fixed(graph: Graph, lab: Lab) -> bool:
    """Whether the provider opens the graph with fixed sizes, but not unchanged."""
    try:
        models = [part_model(graph, fixed=False), part_model(graph)]
    except CannotProbeError:
        return False
    as_it_is, fixed = lab.try_all(models, one_node=False)
    return as_it_is is not None and fixed is not None and as_it_is.outcome in FAILED and fixed.outcome == "supported"


def _failing_subgraph_nodes(graph: Graph, part: RejectedPart, lab: Lab) -> tuple[str, ...]:
    """Subgraph nodes of the part on which the provider fails alone; without any, unsupported subgraph nodes."""
    inner = dict.fromkeys(
        node.name
        for name in part.nodes
        if name in graph.nodes and len(part.nodes) <= FEW_NODES
        for body in subgraphs_of(graph.nodes[name])
        for node in all_nodes(body)
        if node.name in graph.nodes
    )
    names = list(inner)[:MOST_INSIDE]
    answers = lab.try_nodes((graph, name) for name in names)
    outcomes = {name: answer.outcome for name, answer in zip(names, answers, strict=True) if answer is not None}
    failing = [name for name, outcome in outcomes.items() if outcome in FAILED]
    failing = failing or [name for name, outcome in outcomes.items() if outcome == "rejected"]
    return tuple(dict.fromkeys(called_name(name) or name for name in failing))[:FEW_NODES]


# --- times of nodes on slow kernel paths -----------------------------------------------------------------------------


def slow_kernels(session: SessionFacts, resolution: Resolution) -> dict[str, tuple[str, str]]:
    """Nodes that a rule puts on a slow kernel path of a provider -> `KernelRow.probe`, if the rule has one."""
    provider = resolution.provider.ort_name
    if resolution.status != "active" or not any(row.probe for row in session.of(provider).kernels):
        return {}
    index = SessionIndex(session)
    paths = [found for phase in session.phases for found in find_paths(index, phase)]
    rows = {path.node: row for path, row in paths if path.provider == provider and path.evidence_kind == "derived"}
    return {node: row.probe for node, row in rows.items() if row.probe is not None}


def _time_slow_kernels(session: SessionFacts, graph_of: GraphOf, lab: Lab) -> SessionFacts:
    """The session with the times of its slow nodes as probes. Nodes that ONNX Runtime added or fused have none."""
    provider, slow = lab.resolution.provider.ort_name, slow_kernels(session, lab.resolution)
    if not slow:
        return session
    graph, probes = graph_of(session, {}), dict(session.of(provider).probes)
    times: dict[object, tuple[ProbeRun, ...]] = {}
    for name, probe in slow.items():
        with contextlib.suppress(CannotProbeError):
            variant = node_variant(graph, name)
            kinds = [kind.SerializeToString() for feed in variant.feeds for kind in (feed.kind, feed.run_kind)]
            # Times do not depend on the values of constants.
            key = (probe, variant.node.SerializeToString(deterministic=True), *kinds)
            if key not in times:
                times[key] = _times(variant, *probe, lab)
            probes[name] = NodeProbe(name, times[key])
    return session.with_provider(provider, probes=probes)


def _times(variant: Variant, name: str, value: str, lab: Lab) -> tuple[ProbeRun, ...]:
    """The timed runs of a node, unchanged and with the change of a `KernelRow.probe`, which should make it faster."""
    if value:
        text = f"with {name}={value}"
        changed = with_attributes(variant, {name: onnx.helper.make_attribute(name, int(value))})
    else:
        text, changed = f"without {name}", without(variant, {int(name.removeprefix("input"))})
    answers = lab.try_all([to_run(variant_model(each), each, timed=True) for each in (variant, changed)])
    return tuple(
        ProbeRun(factor, words, answer.outcome, answer.message, seconds=answer.seconds)
        for factor, words, answer in zip((AS_IS, "attribute"), ("", text), answers, strict=True)
        if answer is not None
    )
