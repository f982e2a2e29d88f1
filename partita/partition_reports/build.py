"""Builds the report from the facts of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from partita.diagnosis.explanation import find_fallbacks
from partita.diagnosis.kernel_paths import find_paths
from partita.diagnosis.records import Fallback, KernelPath
from partita.diagnosis.session_index import EVERY_PHASE, SessionIndex
from partita.observations.facts import RunFacts, StateFact, StepFact
from partita.observations.records import ChainEntry, Environment, PackageFacts, PhaseName, Source
from partita.observations.text_format import name_some, plural
from partita.partition_reports import cost
from partita.partition_reports.cost import node_times, phase_cost, speculation_figures, step_times, with_costs
from partita.partition_reports.groups import find_file_nodes, share_of, total_us, with_groups
from partita.partition_reports.outcome import summarise
from partita.partition_reports.phase_records import Phase
from partita.partition_reports.placement import (
    find_causes,
    find_conflicts,
    find_copies,
    find_partitions,
    find_subgraphs,
    place_nodes,
)
from partita.partition_reports.records import (
    Cache,
    CacheState,
    Check,
    DryRunFacts,
    ModelFacts,
    RejectedPart,
    Report,
    Request,
    SourceStatement,
    Totals,
)

SHOWN_NAMES = 3
"""Maximum nodes that a failed check names."""


def build_report(
    facts: RunFacts,
    *,
    environment: Environment,
    package: PackageFacts | None,
    request: Request,
    chain: tuple[ChainEntry, ...],
    created: str,
    partita_version: str,
    model: ModelFacts | None = None,
    device: DryRunFacts | None = None,
    judge: Callable[[Report], tuple[str, ...]] | None = None,
) -> Report:
    """The partition report of one run. `created`: UTC, ISO 8601. `chain`: the preferred provider first.

    `model`: the model, if it is not a package. `device`: the simulated device of a dry run, whose report has no times
    and no value-dependent sizes. `judge`: returns a sentence for each exceeded limit of the report. Raises
    pydantic.ValidationError for an invalid fact, e.g. an unknown finish reason.
    """
    if device is not None:
        facts = cost.without_times(facts)
    indexes = tuple(map(SessionIndex, facts.sessions))
    sessions = {name: index for index in reversed(indexes) for name in index.facts.phases}
    of_phase = [(name, sessions[name]) for name in EVERY_PHASE if name in sessions]
    rows = package.batch_size if package is not None else 1
    phases, fallbacks, paths = [], list[Fallback](), list[KernelPath]()
    for name, index in of_phase:
        phase = _build_phase(index, name, facts.steps, rows, chain, is_dry=device is not None)
        phases.append(phase)
        paths += _kernel_paths(index, phase, package)
        found = find_fallbacks(index, name, chain)
        fallbacks += with_costs(found, phase, chain[0]) if found else ()
    load_seconds = sum(session.load_seconds for session in facts.sessions)
    generated = facts.finish_reason is not None
    report = Report(
        created=created,
        partita_version=partita_version,
        environment=environment,
        package=package,
        model=model,
        request=request,
        chain=chain,
        phases=tuple(phases),
        fallbacks=tuple(fallbacks),
        kernel_paths=tuple(paths),
        rejected_parts=tuple(
            RejectedPart.copy_of(part, file=session.file, provider=entry.provider, evidence=part.message)
            for session in facts.sessions
            for entry in chain
            if (rejected := session.of(entry.provider).rejected) is not None
            for part in rejected.parts
        ),
        probing=facts.probing,
        interruptions=facts.interruptions,
        failure=facts.failure,
        cache=_build_cache(facts.states) if package is not None else None,
        memory=facts.memory,
        cpu=tuple(session.cpu for session in facts.sessions if session.cpu is not None),
        totals=Totals.copy_of(facts, session_load_seconds=load_seconds) if generated else None,
        speculation=speculation_figures(facts.speculation, facts.steps),
        dry_run=device,
        checks=tuple(_run_checks(indexes, phases, chain)),
        sources=tuple(_state_sources(facts, indexes)),
        conflicts=tuple(entry for name, index in of_phase for entry in find_conflicts(index, name)),
        notes=(*facts.notes, *_plan_notes(indexes)),
    )
    if judge is not None:
        report = report.model_copy(update={"exceeded_limits": judge(report)})
    return report.model_copy(update={"summary": summarise(report)})


def _build_phase(
    index: SessionIndex,
    name: PhaseName,
    steps: Sequence[StepFact],
    rows: int,
    chain: Sequence[ChainEntry],
    *,
    is_dry: bool,
) -> Phase:
    """Placement, partitions, copies and time of one phase. `rows`: batch size."""
    times, speed = node_times(index, name, rows, is_dry=is_dry), step_times(steps, name, rows)
    causes = find_causes(index)
    nodes, subgraphs = place_nodes(index, times, causes), find_subgraphs(index)
    partitions, copies = find_partitions(nodes), find_copies(index, name, nodes, causes)
    parts = subgraphs.function_nodes if subgraphs is not None else ()
    phase = Phase.copy_of(
        speed,
        name=name,
        file=index.facts.file,
        file_nodes=find_file_nodes(index, nodes, parts, [entry.provider for entry in chain]),
        nodes=nodes,
        providers=(),
        by_op_type=(),
        by_layer=(),
        by_module=(),
        partitions=partitions,
        copies=copies,
        cost=phase_cost(nodes, partitions, copies, times.tokens),
        subgraphs=subgraphs,
        folded_nodes=len(index.facts.graph) if not nodes and index.order_source == "plan_file" else None,
        observed_runs=times.observed_runs,
        timing_note=times.note if is_dry else f"{speed.timing_note}; {times.note}",
    )
    return with_groups(phase)


def _kernel_paths(index: SessionIndex, phase: Phase, package: PackageFacts | None) -> Iterator[KernelPath]:
    """The kernel of each executed node whose operator has several on its provider, in execution order."""
    times, whole = {node.name: node.host_us_per_run for node in phase.nodes}, total_us(phase.nodes)
    for path, _ in find_paths(index, phase.name, package):
        time = times[path.node]
        yield path.model_copy(update={"host_us_per_run": time, "time_share": share_of(time, whole)})


def _build_cache(states: Sequence[StateFact]) -> Cache:
    """Memory of the state buffers, and whether they stayed in place."""
    memories = Counter[str]()
    for state in states:
        memories[state.memory] += state.size_bytes
    checked = [state.checked_steps for state in states]
    known = [count for count in checked if count is not None]
    return Cache(
        states=len(states),
        size_bytes=memories.total(),
        memories=dict(memories),
        in_place_states=sum(state.same_address for state in states),
        address_changes=sum(state.address_changes for state in states),
        copied_bytes=sum(state.copied_bytes for state in states),
        checked_steps=min(known) if known and len(known) == len(checked) else None,
        entries=tuple(CacheState.copy_of(state, name=state.past, in_place=state.same_address) for state in states),
    )


def _plan_notes(indexes: Sequence[SessionIndex]) -> Iterator[str]:
    """One sentence per session whose nodes or order do not come from a single-stream plan."""
    for index in indexes:
        if index.facts.plan is None:
            source = index.order_source
            yield f"{index.facts.file}: ONNX Runtime wrote no plan; nodes and their order come from {source}"
        elif len(index.facts.plan) > 1:
            order = "in the order of the last profiled run" if index.events else "listed stream by stream"
            yield f"{index.facts.file}: the plan has {len(index.facts.plan)} streams; nodes are {order}"


def _state_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> Iterator[SourceStatement]:
    """One statement per source, available or not, with the amount of its data over all files."""
    sessions = facts.sessions
    providers = [known for session in sessions for known in session.providers.values()]
    rejected = sum(len(known.rejected.parts) for known in providers if known.rejected is not None)
    amounts: tuple[tuple[Source, int, str], ...] = (
        ("model_file", sum(len(session.graph) for session in sessions), "node"),
        ("optimised_model", sum(len(index.optimised.nodes) for index in indexes if index.optimised), "node"),
        ("plan_file", sum(len(index.order) for index in indexes if index.facts.plan is not None), "node"),
        ("assignment", sum(len(session.assigned or ()) for session in sessions), "node"),
        ("profile", sum(len(session.events) for session in sessions), "node execution"),
        ("native_log", sum(len(session.log) for session in sessions), "line"),
        ("probe", sum(len(known.probes) for known in providers) + rejected, "probed node"),
        ("memory_info", sum(len(session.ports) for session in sessions), "graph port"),
        ("binding", len(facts.states), "state buffer"),
        ("clock", len(facts.steps), "step"),
        ("process", int(facts.memory.peak_rss_bytes is not None), "process"),
    )
    missing = "; ".join(dict.fromkeys(filter(None, (session.optimised_missing_reason for session in sessions))))
    for source, amount, noun in amounts:
        there = amount > 0 or (source == "assignment" and any(each.assigned is not None for each in sessions))
        covers = plural(amount, noun) if there else "no data in this run"
        covers += f"; {missing}" if missing and source == "optimised_model" else ""
        yield SourceStatement(source=source, available=there, covers=covers)


def _run_checks(
    indexes: Sequence[SessionIndex], phases: Sequence[Phase], chain: Sequence[ChainEntry]
) -> Iterator[Check]:
    """Every check that the available sources allow: of plan and executed nodes per file, of providers per phase."""
    for index in indexes:
        file, ran = index.facts.file, frozenset(event.name for event in index.events)
        if index.facts.plan is None or not index.facts.events:
            continue
        inside = f"; {len(index.subgraphs)} more ran in control-flow subgraphs" if index.subgraphs else ""
        good = f"{plural(len(ran), 'executed node')}, all in the plan{inside}"
        title, bad = "every executed node is in the plan", "executed, but not in the plan"
        yield _check("executed_in_plan", file, title, sorted(ran - index.present), good, bad)
        idle = [name for name in index.order if name not in ran and name not in index.subgraphs]
        good = f"{plural(len(index.order), 'plan node')}, all executed"
        yield _check("plan_executed", file, "every plan node was executed", idle, good, "not executed")
    allowed = {entry.provider for entry in chain if entry.status == "active"}
    for phase in phases:
        good = plural(len(phase.nodes), "node")
        unplaced = [node.name for node in phase.nodes if node.provider is None]
        title, bad = "every node has a provider", "without a known provider"
        yield _check("nodes_have_provider", phase.name, title, unplaced, good, bad)
        outside = [node.name for node in phase.nodes if node.provider and node.provider not in allowed]
        title, bad = "every node is on a provider of the chain", "outside the chain"
        yield _check("nodes_in_chain", phase.name, title, outside, good, bad)


def _check(key: str, part: str, title: str, offenders: Sequence[str], good: str, bad: str) -> Check:
    """A check of a phase or file that fails if there are offenders; the detail names the first few."""
    named = name_some([offender or "(no name)" for offender in offenders], SHOWN_NAMES)
    detail = f"{len(offenders)} {bad}: {named}" if offenders else good
    return Check(key=key, part=part, name=f"{part}: {title}", passed=not offenders, detail=detail)
