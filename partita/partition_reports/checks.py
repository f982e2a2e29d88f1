"""Consistency checks of a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import RunFacts, StepFact
from partita.observations.names import UNKNOWN
from partita.observations.records import ChainEntry
from partita.observations.text_format import name_some, plural
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.file_nodes import added_nodes, placed
from partita.partition_reports.partitions import SESSION
from partita.partition_reports.records import Check, GroupShare, Phase, ProviderShare

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
        yield _make(
            "plan_nodes_once",
            facts.file,
            "every plan node appears once",
            repeated,
            plural(len(counts), "node"),
            "repeated",
        )
    if facts.plan is not None and facts.events:
        unplanned = sorted(ran - index.present)
        inside = f"; {len(index.subgraphs)} more ran in control-flow subgraphs" if index.subgraphs else ""
        good = f"{plural(len(ran), 'executed node')}, all in the plan{inside}"
        yield _make(
            "executed_in_plan",
            facts.file,
            "every executed node is in the plan",
            unplanned,
            good,
            "executed, but not in the plan",
        )
        idle = [name for name in index.order if name not in ran and name not in index.subgraphs]
        good = f"{plural(len(index.order), 'plan node')}, all executed"
        yield _make("plan_executed", facts.file, "every plan node was executed", idle, good, "not executed")
    if facts.events:
        windows = {window.run for window in facts.runs}
        unknown = sorted({str(event.run) for event in index.events if event.run not in windows})
        good = f"every event is in one of {plural(len(windows), 'session run')}"
        yield _make("events_in_runs", facts.file, "every event belongs to a known run", unknown, good, "unknown runs")


def check_phase(phase: Phase, chain: Sequence[ChainEntry]) -> Iterator[Check]:
    """Checks of the sums, partitions and providers of one phase."""
    for key, label, groups in _groupings(phase):
        whole, total = len(placed(phase)) + added_nodes(phase), sum(entry.nodes + entry.added_nodes for entry in groups)
        detail, passed = f"{total} of {plural(whole, 'node')}", total == whole
        yield _check(f"nodes_per_{key}", phase.name, f"nodes per {label} add up", detail, passed=passed)
        if phase.nodes and any(entry.time_share is not None for entry in groups):
            shares = math.fsum(entry.time_share or 0.0 for entry in groups)
            passed = math.isclose(shares, 1.0, abs_tol=1e-6)
            title = f"time shares per {label} sum to 1"
            yield _check(f"time_shares_per_{key}", phase.name, title, f"{shares:.6f}", passed=passed)
    yield _check_partitions(phase)
    yield from _check_costs(phase)
    good = plural(len(phase.nodes), "node")
    unplaced = [node.name for node in phase.nodes if node.provider is None]
    yield _make(
        "nodes_have_provider", phase.name, "every node has a provider", unplaced, good, "without a known provider"
    )
    allowed = {entry.provider for entry in chain if entry.status == "active"}
    outside = [node.name for node in phase.nodes if node.provider and node.provider not in allowed]
    yield _make(
        "nodes_in_chain", phase.name, "every node is on a provider of the chain", outside, good, "outside the chain"
    )


def _groupings(phase: Phase) -> tuple[tuple[str, str, Sequence[ProviderShare | GroupShare]], ...]:
    """The four groupings of a phase's nodes: key, name, groups."""
    return (
        ("provider", "provider", phase.providers),
        ("op_type", "op type", phase.by_op_type),
        ("layer", "layer", phase.by_layer),
        ("module", "module", phase.by_module),
    )


def _check_partitions(phase: Phase) -> Check:
    """Partitions cover all nodes without gaps, each on the provider of its nodes."""
    expected = 0
    for part in phase.partitions:
        inside = phase.nodes[part.first_position : part.first_position + part.nodes]
        mixed = any((node.provider or UNKNOWN) != part.provider for node in inside)
        if part.first_position != expected or part.nodes < 1 or mixed:
            break
        expected += part.nodes
    detail = f"{plural(len(phase.partitions), 'partition')} for {expected} of {plural(len(phase.nodes), 'node')}"
    passed = expected == len(phase.nodes)
    return _check("partitions_cover_plan", phase.name, "partitions cover the plan", detail, passed=passed)


def _check_costs(phase: Phase) -> Iterator[Check]:
    """Every Memcpy node is a copy with a cause in the plan, and the phase's sums match its parts."""
    memcpy = [copy for copy in phase.copies if copy.kind == "memcpy_node"]
    missing = sorted({node.name for node in phase.nodes if is_memcpy(node)} ^ {copy.name for copy in memcpy})
    good = plural(len(memcpy), "Memcpy node")
    yield _make("memcpy_are_copies", phase.name, "every Memcpy node is a copy", missing, good, "without a match")
    names = {node.name for node in phase.nodes}
    without_cause = [copy.name for copy in memcpy if bool(copy.caused_by) == bool(copy.cause_missing_reason)]
    unplanned = [name for copy in memcpy for name in copy.caused_by if name not in names]
    offenders = list(dict.fromkeys((*without_cause, *unplanned)))
    unknown = sum(bool(copy.cause_missing_reason) for copy in memcpy)
    good = f"known causes: {len(memcpy) - unknown}, unknown causes with a reason: {unknown}"
    yield _make(
        "memcpy_have_cause",
        phase.name,
        "every Memcpy node has a cause in the plan",
        offenders,
        good,
        "without a cause in the plan",
    )
    cost = phase.cost
    if cost is None:
        return
    received = sum(
        tensor.direction == "in" and tensor.other_side != SESSION for p in phase.partitions for tensor in p.boundary
    )
    counted = (cost.partitions, cost.copies, cost.crossings)
    passed = counted == (len(phase.partitions), len(phase.copies), received)
    crossings = f"{plural(counted[2], 'tensor')} sent and {received} received"
    detail = f"{plural(counted[0], 'partition')}, {plural(counted[1], 'copy')}, {crossings}"
    yield _check("cost_counts", phase.name, "cost counts partitions, copies and crossings", detail, passed=passed)
    known = sum(copy.bytes_per_run for copy in phase.copies if copy.bytes_per_run is not None)
    detail = f"{cost.copy_bytes_at_least} bytes in the cost, {known} in the copies"
    passed = cost.copy_bytes_at_least == known
    yield _check("copy_bytes", phase.name, "bytes copied add up", detail, passed=passed)


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
