"""Coverage of each source, and consistency checks that compare sources; docs/report-schema.md has their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import RunFacts, StepFact
from partita.observations.records import ChainEntry, Source
from partita.observations.text_format import name_some, plural
from partita.partition_reports.records import Check, Phase, SourceStatement


def state_sources(facts: RunFacts, indexes: Sequence[SessionIndex]) -> tuple[SourceStatement, ...]:
    """One statement per source, available or not."""
    return tuple(
        SourceStatement(source=source, available=available, covers=covers if available else NO_DATA + "".join(reason))
        for source, available, covers, *reason in (
            *_sources_of_graphs(facts, indexes),
            *_sources_of_runs(facts, indexes),
        )
    )


NO_DATA = "no data in this run"
Coverage = tuple[Source, bool, str] | tuple[Source, bool, str, str]
"""Source, whether it is available, what it covers, and a suffix with the reason if it is not available."""


def _sources_of_graphs(facts: RunFacts, indexes: Sequence[SessionIndex]) -> Iterator[Coverage]:
    """Coverage of the graphs, per file."""
    sessions = facts.sessions
    nodes = [f"{session.file}: {plural(len(session.graph), 'node')} in the file" for session in sessions]
    yield "model_file", any(session.graph for session in sessions), "; ".join(nodes)
    missing = "; ".join(dict.fromkeys(filter(None, (session.optimised_missing_reason for session in sessions))))
    known = any(session.optimised is not None for session in sessions)
    yield "optimised_model", known, "; ".join(map(_cover_optimised, indexes)), f": {missing}" if missing else ""
    plans = [
        f"{index.facts.file}: {plural(len(index.order), 'node')} in {plural(len(index.facts.plan), 'stream')}"
        if index.facts.plan is not None
        else f"{index.facts.file}: no plan, nodes and order come from {index.order_source}"
        for index in indexes
    ]
    yield "plan_file", any(session.plan is not None for session in sessions), "; ".join(plans)
    listed = sum(len(session.assigned or ()) for session in sessions)
    present = sum(name in index.listed_names for index in indexes for name in index.order)
    inside = sum(len(nodes) for index in indexes for nodes in index.compiled.values())
    where = f", {inside} in {sum(len(index.compiled) for index in indexes)} compiled subgraphs" if inside else ""
    text = f"{plural(listed, 'node')} listed, {present} of them in the plan{where}"
    yield "assignment", any(session.assigned is not None for session in sessions), text


def _cover_optimised(index: SessionIndex) -> str:
    """Nodes of the optimised graph, or why there is none."""
    file, graph = index.facts.file, index.optimised
    if graph is None:
        return f"{file}: no data: {index.facts.optimised_missing_reason or 'not requested'}"
    return f"{file}: {plural(len(graph.nodes), 'node')}, {len(index.memcpy)} of them Memcpy"


def _sources_of_runs(facts: RunFacts, indexes: Sequence[SessionIndex]) -> Iterator[Coverage]:
    """Coverage of profile, log, probes, memory and clock, over all files."""
    events = sum(len(session.events) for session in facts.sessions)
    runs = sum(len(session.runs) for session in facts.sessions)
    yield "profile", bool(events), f"{plural(events, 'node execution')} in {plural(runs, 'session run')}"
    lines = sum(len(session.log) for session in facts.sessions)
    mentioned = sum(len(index.log) for index in indexes)
    yield (
        "native_log",
        bool(lines),
        f"{plural(lines, 'line')} of session creation, which name {plural(mentioned, 'node')}",
    )
    providers = [known for session in facts.sessions for known in session.providers.values()]
    probes = [probe for known in providers for probe in known.probes.values()]
    parts = sum(len(known.rejected.parts) for known in providers if known.rejected is not None)
    made = sum(map(len, {probe.variants for probe in probes}))  # equal nodes share theirs
    if facts.probing is not None:
        made = facts.probing.experiments + facts.probing.cached
    cut = sum(bool(probe.missing_probes) for probe in probes)
    text = f"{plural(made, 'probe')} of {plural(len(probes), 'node')}, incomplete for {cut} of them"
    text += f"; {plural(parts, 'rejected part')} found by bisection" if parts else ""
    yield "probe", bool(probes or parts), text, ": no probes"
    ports = sum(len(session.ports) for session in facts.sessions)
    yield "memory_info", bool(ports), f"graph inputs and outputs: {ports}"
    counts = [state.checked_steps for state in facts.states if state.checked_steps is not None]
    steps = f" at {plural(min(counts), 'step')}" if counts and len(counts) == len(facts.states) else ""
    yield "binding", bool(facts.states), f"{plural(len(facts.states), 'state buffer')}, compared by address{steps}"
    yield "clock", bool(facts.steps), plural(len(facts.steps), "step")
    resident = facts.memory.peak_rss_bytes is not None
    yield "process", resident, "resident memory before and after loading, and its peak"


SHOWN_NAMES = 3
INCOMPLETE = ("interrupted", "error")


def run_checks(
    facts: RunFacts, indexes: Sequence[SessionIndex], phases: Sequence[Phase], chain: Sequence[ChainEntry]
) -> tuple[Check, ...]:
    """Every check that the available sources allow."""
    checks = [check for index in indexes for check in _check_session(index)]
    for phase in phases:
        checks += check_phase(phase, chain)
    if facts.finish_reason is None or facts.requests is not None:  # the rows of a step end separately
        return tuple(checks)
    return (*checks, *_check_tokens(facts))


def _check_session(index: SessionIndex) -> Iterator[Check]:
    """Checks of the plan and the executed nodes of one session."""
    facts = index.facts
    ran = frozenset(event.name for event in index.events)
    if facts.plan is not None:
        counts = Counter(name for stream in facts.plan for name in stream)
        repeated = [name for name, count in counts.items() if count > 1]
        title, good = "every plan node appears once", plural(len(counts), "node")
        yield _make("plan_nodes_once", facts.file, title, repeated, good, "repeated")
    if facts.plan is not None and facts.events:
        unplanned = sorted(ran - index.present)
        inside = f"; {len(index.subgraphs)} more ran in control-flow subgraphs" if index.subgraphs else ""
        good = f"{plural(len(ran), 'executed node')}, all in the plan{inside}"
        title, bad = "every executed node is in the plan", "executed, but not in the plan"
        yield _make("executed_in_plan", facts.file, title, unplanned, good, bad)
        idle = [name for name in index.order if name not in ran and name not in index.subgraphs]
        good = f"{plural(len(index.order), 'plan node')}, all executed"
        yield _make("plan_executed", facts.file, "every plan node was executed", idle, good, "not executed")
    if facts.events:
        windows = {window.run for window in facts.runs}
        unknown = sorted({str(event.run) for event in index.events if event.run not in windows})
        good = f"every event is in one of {plural(len(windows), 'session run')}"
        yield _make("events_in_runs", facts.file, "every event belongs to a known run", unknown, good, "unknown runs")


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


def _check_tokens(facts: RunFacts) -> Iterator[Check]:
    """Tokens of all steps and rows match the prompts and the new tokens.

    Prefill returns the first new token, so n new tokens of a row take n - 1 decode steps, or n if the last token was
    dropped (stop token). An interrupted run may have fewer. A recomputation replaces a decode step.
    """
    each = facts.row_prompts is not None
    prompts = facts.row_prompts if facts.row_prompts is not None else (facts.prompt_tokens,)
    new = facts.new_tokens if facts.all_new_tokens is None else facts.all_new_tokens

    def tokens_of(step: StepFact) -> int:
        return step.row_tokens if each and step.row_tokens is not None else step.tokens

    prompt, extra = sum(prompts), 0
    prefill = sum(tokens_of(step) for step in facts.steps if step.phase == "prefill" and not step.is_repeated)
    if len(prompts) > 1:  # rows with complete prompts may decode during the prefill of other rows
        extra = min(max(prefill - prompt, 0), new)
    again = any(step.is_repeated for step in facts.steps)
    # A recomputation may include the rest of a prompt, or tokens of rows with complete prompts.
    less = facts.finish_reason in INCOMPLETE or (again and len(prompts) > 1)
    passed = prefill == prompt + extra or (less and prefill < prompt)
    where = f"the prompts of {len(prompts)} rows" if len(prompts) > 1 else "the prompt"
    detail = f"{plural(prefill, 'token')} in steps, {prompt} in {where}, finish reason {facts.finish_reason}"
    yield _check("prompt_tokens", "prefill", "steps add up to the prompt", detail, passed=passed)
    decode = extra + sum(tokens_of(step) for step in facts.steps if step.phase == "decode")
    least = 0 if less and len(prompts) > 1 else new - len(prompts) * (1 + again)
    passed = max(least, 0) <= decode <= new
    firsts = "the first" if len(prompts) == 1 else "the first of each row"
    detail = f"{plural(decode, 'token')} in steps, {new} new tokens, {firsts} from prefill"
    yield _check("new_tokens", "decode", "steps add up to the new tokens", detail, passed=passed)


def _make(key: str, part: str, title: str, offenders: Sequence[str], good: str, bad: str) -> Check:
    """A check of a phase or file that fails if there are offenders; the detail names the first few."""
    named = name_some([offender or "(no name)" for offender in offenders], SHOWN_NAMES)
    detail = f"{len(offenders)} {bad}: {named}" if offenders else good
    return _check(key, part, title, detail, passed=not offenders)


def _check(key: str, part: str, title: str, detail: str, *, passed: bool) -> Check:
    """A check of a phase or file."""
    return Check(key=key, part=part, name=f"{part}: {title}", passed=passed, detail=detail)
