"""Builds the report from the facts of a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from partita.diagnosis.explanation import find_fallbacks
from partita.diagnosis.kernel_paths import find_paths
from partita.diagnosis.records import Fallback, KernelPath
from partita.diagnosis.session_index import EVERY_PHASE, SessionIndex
from partita.diagnosis.steps import checkpoint_of, same_precision
from partita.observations.facts import RunFacts, SessionFacts, StateFact, StepFact
from partita.observations.records import ChainEntry, Environment, PackageFacts, PhaseName, Source
from partita.observations.text_format import name_some, plural
from partita.partition_reports import dry_run
from partita.partition_reports.cost import (
    node_time_note,
    node_times,
    phase_cost,
    speculation_figures,
    step_times,
    tokens_per_run,
    with_costs,
)
from partita.partition_reports.groups import find_file_nodes, share_of, total_us, with_groups
from partita.partition_reports.outcome import summarise
from partita.partition_reports.placement import (
    find_conflicts,
    find_copies,
    find_partitions,
    find_subgraphs,
    in_layers,
    place_nodes,
)
from partita.partition_reports.records import (
    Cache,
    CacheState,
    Check,
    Phase,
    RejectedPart,
    Report,
    SourceStatement,
    Totals,
)
from partita.partition_reports.request_records import DryRunFacts, ModelFacts, Request


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
        facts = dry_run.without_times(facts)
    indexes = tuple(map(SessionIndex, facts.sessions))
    phases, fallbacks, paths = [], list[Fallback](), list[KernelPath]()
    rows = package.batch_size if package is not None else 1
    for name, index in _phase_sessions(indexes):
        phase = _build_phase(index, name, facts.steps, rows, chain, timed=device is None)
        phases.append(phase)
        paths += _kernel_paths(index, phase, package)
        found = find_fallbacks(index, name, chain)
        fallbacks += with_costs(found, phase, chain[0], timed=device is None) if found else ()
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
        rejected_parts=find_rejected(facts.sessions, chain),
        probing=facts.probing,
        interruptions=facts.interruptions,
        failure=facts.failure,
        cache=_build_cache(facts.states) if package is not None else None,
        memory=facts.memory,
        cpu=tuple(session.cpu for session in facts.sessions if session.cpu is not None),
        totals=(
            Totals.copy_of(facts, session_load_seconds=sum(session.load_seconds for session in facts.sessions))
            if facts.finish_reason is not None
            else None
        ),
        speculation=speculation_figures(facts.speculation, facts.steps),
        dry_run=device,
        checks=tuple(run_checks(indexes, phases, chain)),
        sources=state_sources(facts, indexes),
        conflicts=tuple(entry for name, index in _phase_sessions(indexes) for entry in find_conflicts(index, name)),
        notes=(*facts.notes, *_plan_notes(indexes)),
    )
    if judge is not None:
        report = report.model_copy(update={"exceeded_limits": judge(report)})
    return report.model_copy(update={"summary": summarise(report)})


def _phase_sessions(indexes: Sequence[SessionIndex]) -> list[tuple[PhaseName, SessionIndex]]:
    """Each phase with the first session that runs it; phases without a session are omitted."""
    found = {name: index for index in reversed(indexes) for name in index.facts.phases}
    return [(phase, found[phase]) for phase in EVERY_PHASE if phase in found]


def _build_phase(
    index: SessionIndex,
    name: PhaseName,
    steps: Sequence[StepFact],
    rows: int,
    chain: Sequence[ChainEntry],
    *,
    timed: bool = True,
) -> Phase:
    """Placement, partitions, copies and time of one phase. `rows`: batch size; `timed`: False for a dry run."""
    times = node_times(index, name)
    if not timed:
        times = dry_run.without_values(index, times)
    speed = step_times(steps, name, rows)
    nodes = place_nodes(index, times)
    partitions, copies = find_partitions(nodes), find_copies(index, name, nodes)
    nodes, subgraphs = in_layers(index, nodes, copies), find_subgraphs(index)
    file_nodes = find_file_nodes(
        index, nodes, subgraphs.function_nodes if subgraphs is not None else (), [entry.provider for entry in chain]
    )
    phase = Phase.copy_of(
        speed,
        name=name,
        file=index.facts.file,
        file_nodes=file_nodes,
        nodes=nodes,
        providers=(),
        by_op_type=(),
        by_layer=(),
        by_module=(),
        partitions=partitions,
        copies=copies,
        cost=phase_cost(partitions, copies, tokens_per_run(index, name, rows), timed=timed),
        subgraphs=subgraphs,
        folded_nodes=len(index.facts.graph) if not nodes and index.order_source == "plan_file" else None,
        observed_runs=times.observed_runs,
        timing_note=f"{speed.note}; {node_time_note(times)}" if timed else dry_run.TIMING_NOTE,
    )
    return with_groups(phase)


def _kernel_paths(index: SessionIndex, phase: Phase, package: PackageFacts | None) -> tuple[KernelPath, ...]:
    """The kernel of each executed node whose operator has several on its provider, in execution order."""
    blanks: dict[str, object] = {
        "checkpoint": checkpoint_of(package),
        "out": "OUT" if package is None else f"{package.name}-fast",
        "same_precision": same_precision(package),
    }
    nodes, whole = {node.name: node for node in phase.nodes}, total_us(phase.nodes)
    found = []
    for each in find_paths(index, phase.name):
        node, row = nodes[each.node], each.row
        found.append(
            KernelPath(
                phase=phase.name,
                node=node.name,
                op_type=node.op_type,
                provider=each.provider,
                path=each.path,
                is_slow=row is not None and bool(row.cause),
                evidence_kind=each.evidence_kind,
                evidence=each.evidence,
                cause=row.cause if row is not None else "",
                remedy=str(row.remedy.filled(**blanks)) if row is not None and row.remedy is not None else "",
                unknown=each.unknown,
                module=node.module,
                host_us_per_run=node.host_us_per_run,
                time_share=share_of(node.host_us_per_run, whole),
            )
        )
    return tuple(found)


def _build_cache(states: Sequence[StateFact]) -> Cache:
    """Memory of the state buffers, and whether they stayed in place."""
    memories: dict[str, int] = {}
    for state in states:
        memories[state.memory] = memories.get(state.memory, 0) + state.size_bytes
    entries = tuple(CacheState.copy_of(state, name=state.past, in_place=state.same_address) for state in states)
    return Cache(
        states=len(states),
        size_bytes=sum(state.size_bytes for state in states),
        memories=memories,
        in_place_states=sum(state.same_address for state in states),
        address_changes=sum(state.address_changes for state in states),
        copied_bytes=sum(state.copied_bytes for state in states),
        checked_steps=_fewest([state.checked_steps for state in states]),
        entries=entries,
    )


def _fewest(counts: Sequence[int | None]) -> int | None:
    """The smallest count; None if there are none or one is unknown."""
    known = [count for count in counts if count is not None]
    return min(known) if known and len(known) == len(counts) else None


def _plan_notes(indexes: Sequence[SessionIndex]) -> Iterator[str]:
    """One sentence per session whose nodes or order do not come from a single-stream plan."""
    for index in indexes:
        if index.facts.plan is None:
            source = index.order_source
            yield f"{index.facts.file}: ONNX Runtime wrote no plan; nodes and their order come from {source}"
        elif len(index.facts.plan) > 1:
            order = "in the order of the last profiled run" if index.events else "listed stream by stream"
            yield f"{index.facts.file}: the plan has {len(index.facts.plan)} streams; nodes are {order}"


def find_rejected(sessions: Sequence[SessionFacts], chain: Sequence[ChainEntry]) -> tuple[RejectedPart, ...]:
    """One entry per ONNX file, rejecting provider of the chain, and rejected part."""
    return tuple(
        RejectedPart.copy_of(part, file=session.file, provider=entry.provider, evidence=part.message)
        for session in sessions
        for entry in chain
        if (rejected := session.of(entry.provider).rejected) is not None
        for part in rejected.parts
    )


def state_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> tuple[SourceStatement, ...]:
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
    found = []
    for source, amount, noun in amounts:
        there = amount > 0 or (source == "assignment" and any(each.assigned is not None for each in sessions))
        covers = plural(amount, noun) if there else "no data in this run"
        covers += f"; {missing}" if missing and source == "optimised_model" else ""
        found.append(SourceStatement(source=source, available=there, covers=covers))
    return tuple(found)


SHOWN_NAMES = 3


def run_checks(
    indexes: Sequence[SessionIndex], phases: Sequence[Phase], chain: Sequence[ChainEntry]
) -> Iterator[Check]:
    """Every check that the available sources allow."""
    for index in indexes:
        yield from _check_session(index)
    for phase in phases:
        yield from check_phase(phase, chain)


def _check_session(index: SessionIndex) -> Iterator[Check]:
    """Checks of the plan and the executed nodes of one session."""
    facts = index.facts
    if facts.plan is None or not facts.events:
        return
    ran = frozenset(event.name for event in index.events)
    inside = f"; {len(index.subgraphs)} more ran in control-flow subgraphs" if index.subgraphs else ""
    good = f"{plural(len(ran), 'executed node')}, all in the plan{inside}"
    title, bad = "every executed node is in the plan", "executed, but not in the plan"
    yield _make("executed_in_plan", facts.file, title, sorted(ran - index.present), good, bad)
    idle = [name for name in index.order if name not in ran and name not in index.subgraphs]
    good = f"{plural(len(index.order), 'plan node')}, all executed"
    yield _make("plan_executed", facts.file, "every plan node was executed", idle, good, "not executed")


def check_phase(phase: Phase, chain: Sequence[ChainEntry]) -> Iterator[Check]:
    """Checks of the providers of one phase."""
    good = plural(len(phase.nodes), "node")
    unplaced = [node.name for node in phase.nodes if node.provider is None]
    title, bad = "every node has a provider", "without a known provider"
    yield _make("nodes_have_provider", phase.name, title, unplaced, good, bad)
    allowed = {entry.provider for entry in chain if entry.status == "active"}
    outside = [node.name for node in phase.nodes if node.provider and node.provider not in allowed]
    title, bad = "every node is on a provider of the chain", "outside the chain"
    yield _make("nodes_in_chain", phase.name, title, outside, good, bad)


def _make(key: str, part: str, title: str, offenders: Sequence[str], good: str, bad: str) -> Check:
    """A check of a phase or file that fails if there are offenders; the detail names the first few."""
    named = name_some([offender or "(no name)" for offender in offenders], SHOWN_NAMES)
    detail = f"{len(offenders)} {bad}: {named}" if offenders else good
    return Check(key=key, part=part, name=f"{part}: {title}", passed=not offenders, detail=detail)
