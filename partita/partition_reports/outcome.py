"""Outcome of a run: share on the preferred provider, state of the cache, headline, and summary record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from partita.diagnosis.records import Fallback
from partita.observations.names import UNKNOWN
from partita.observations.native_text import cut
from partita.observations.text_format import human_bytes, in_phases, listing, plural, short_provider
from partita.partition_reports.cost import whole_percent
from partita.partition_reports.groups import (
    added_nodes,
    file_counts,
    folded_nodes,
    grouped,
    is_memcpy,
    provider_of,
    ran_by,
    report_rows,
    share_of,
    total_us,
)
from partita.partition_reports.records import Cache, FileNode, NodePlacement, Phase, PhaseSummary, Report, Summary

FEW_STEPS = 10
"""With fewer steps a speed is too uncertain to compare."""
TOO_FEW = "too few for a reliable speed"
HEADLINE_SHARE = 0.1
"""The headline names copies or fallback nodes with at least this share of the node time."""
LONGEST = 240
"""Maximum characters of a headline's reason."""
FallbackKey = tuple[str, str, str]
"""Phase, executed node and provider."""
StateName = Literal["all", "nearly", "partly", "none", "refused", "empty", "nothing", "failed"]


def state_name(report: Report) -> StateName:
    """Share of nodes on the preferred provider: all, nearly (all but harmless fallbacks), partly, none; or refused,
    empty (no nodes to run), nothing (no known nodes), failed (run failed).
    """
    if failure_of(report) is not None:
        return "failed"
    phases = used_phases(report)
    fallbacks = [node for phase in phases for node in fallback_nodes(report, phase)]
    if not phases:
        return "empty" if is_folded(report) else "nothing"
    if any(part.provider == preferred_of(report) for part in report.rejected_parts):
        return "refused"
    if not fallbacks and not report.fallbacks:
        return "all"
    if not _uses_preferred(report, phases):
        return "none"
    return "nearly" if _all_harmless(report) else "partly"


def _uses_preferred(report: Report, phases: Sequence[Phase]) -> bool:
    """Whether a node of the file, or a part of one, e.g. of a function, is on the preferred provider."""
    preferred = preferred_of(report)
    parts = (node for phase in phases for node in phase.nodes if not node.added)
    return any(file_counts(phase)[preferred] for phase in phases) or any(node.provider == preferred for node in parts)


def _all_harmless(report: Report) -> bool:
    """Whether every fallback is harmless; without times, as in a dry run, whether none requires a copy."""
    if any(copy.cause_missing_reason for phase in report.phases for copy in phase.copies):
        return False
    if any(phase.subgraphs is not None and phase.subgraphs.may_have_more_copies for phase in report.phases):
        return False
    if is_timed(report):
        return all(entry.cost is not None and entry.cost.harmless is True for entry in report.fallbacks)
    return all(entry.cost is not None and not entry.cost.copies for entry in report.fallbacks)


def failure_of(report: Report) -> str | None:
    """Why a run failed, on one line; None if none did. An interrupted run did not fail."""
    totals, reason = report.totals, report.failure
    if reason is None and totals is not None and totals.finish_reason == "error":
        reason = totals.finish_detail or "the generation ended with an error"
    return None if reason is None else " ".join(reason.split())


def was_interrupted(report: Report) -> bool:
    """Whether Ctrl-C ended the run."""
    return "runs" in report.interruptions or (
        report.totals is not None and report.totals.finish_reason == "interrupted"
    )


def is_default_without_first(report: Report) -> bool:
    """Whether the first provider of the default chain is installed but could not start."""
    return (
        bool(report.chain) and report.chain[0].status != "active" and preferred_of(report) not in report.request.chain
    )


def preferred_of(report: Report) -> str:
    """The first provider of the chain, by ONNX Runtime's name."""
    return report.chain[0].provider if report.chain else "no provider"


def active_of(report: Report) -> tuple[str, ...]:
    """Available providers of the chain, by ONNX Runtime's names."""
    return tuple(entry.provider for entry in report.chain if entry.status == "active")


def fallbacks_of(report: Report) -> tuple[Fallback, ...]:
    """The fallbacks relative to available providers.

    An unavailable provider is not the reason for a node that another preferred provider could run.
    """
    active = active_of(report)
    return tuple(entry.restricted_to(active) for entry in report.fallbacks)


def counted_rows(report: Report) -> dict[FallbackKey, tuple[str, ...]]:
    """Fallback -> the nodes that a table of reasons counts for it, so that the counts of all add up.

    These are the file nodes that its executed node ran; a file node that ran as several executed nodes is counted for
    the first of them on its provider. A node in a control-flow subgraph counts itself. Empty for a node that ONNX
    Runtime added.
    """
    found: dict[FallbackKey, tuple[str, ...]] = {}
    for phase in report.phases:
        executed = {(node.name, provider_of(node)) for node in phase.nodes}
        runs, done = ran_by(phase), set[str]()
        for entry in report.fallbacks:
            if entry.phase == phase.name:
                rows = [row.name for row in runs.get(entry.node, ()) if provider_of(row) == entry.provider]
                if rows or (entry.node, entry.provider) in executed:
                    found[key_of(entry)] = tuple(name for name in rows if name not in done)
                    done.update(rows)
                else:
                    found[key_of(entry)] = (entry.node,)
    return found


def key_of(entry: Fallback) -> FallbackKey:
    """The key of a fallback in `counted_rows`."""
    return entry.phase, entry.node, entry.provider


def used_phases(report: Report) -> tuple[Phase, ...]:
    """Phases with nodes."""
    return tuple(phase for phase in report.phases if phase.nodes)


def is_folded(report: Report) -> bool:
    """Whether ONNX Runtime folded every phase, so that outputs are constants or inputs."""
    return bool(report.phases) and all(phase.folded_nodes is not None for phase in report.phases)


def is_known(phase: Phase) -> bool:
    """Whether the nodes of the phase are known (there may be none)."""
    return bool(phase.nodes) or phase.folded_nodes is not None


def main_phase(report: Report) -> Phase | None:
    """Decode, or the only phase; None if no phase is known."""
    phases = used_phases(report) or tuple(filter(is_known, report.phases))
    return next((phase for phase in phases if phase.name == "decode"), phases[-1] if phases else None)


def too_few_steps(phase: Phase) -> bool:
    """Whether the speed of a phase has too few steps; prefill never counts as such."""
    return phase.name != "prefill" and 0 < phase.steps < FEW_STEPS


def fallback_nodes(report: Report, phase: Phase) -> list[FileNode | NodePlacement]:
    """File nodes, and nodes that ONNX Runtime added, that are not on the preferred provider."""
    return [node for node in report_rows(phase) if provider_of(node) != preferred_of(report)]


def is_timed(report: Report) -> bool:
    """Whether there are times; a dry run has none."""
    return report.dry_run is None


CacheStatus = Literal["no_cache", "not_checked", "copied", "moved", "in_place"]
"""no_cache: no cache or no states. not_checked: not observed. copied: past and present of a state were two buffers.
moved: one buffer whose address changed. in_place: one buffer at one address in every observed step.
"""


def status_of(cache: Cache | None) -> CacheStatus:
    """Status of a cache."""
    if cache is None or not cache.states:
        return "no_cache"
    if cache.checked_steps == 0:
        return "not_checked"
    if cache.in_place_states < cache.states:
        return "copied"
    return "moved" if cache.address_changes else "in_place"


def is_in_place(cache: Cache | None) -> bool | None:
    """Whether the cache stayed in place; None without a cache, or if not observed."""
    status = status_of(cache)
    return None if status in ("no_cache", "not_checked") else status == "in_place"


def merge_phases(phases: tuple[Phase, ...]) -> list[list[Phase]]:
    """Phases grouped by equal nodes, providers and copies."""

    def placement(phase: Phase) -> object:
        nodes = tuple((node.name, node.provider) for node in phase.nodes)
        return nodes, tuple((copy.kind, copy.name) for copy in phase.copies)

    return list(grouped(phases, placement).values())


def placement_text(phases: Sequence[Phase], first: str | None = None) -> str:
    """File nodes per provider, and added nodes, of phases with equal placement.

    `first`: the provider to begin with, even without nodes; None: the provider with the most nodes.
    """
    counts = file_counts(phases[0])
    ranked = [*counts.most_common(1), *((entry.provider, 0) for entry in phases[0].providers)]
    head = ranked[0][0] if first is None else first
    names = {each: "an unknown provider" if each == UNKNOWN else short_provider(each) for each in (head, *counts)}
    others = [f"{count:,} on {names[each]}" for each, count in counts.most_common() if each != head]
    placed = ", ".join([f"{counts[head]:,} of {plural(counts.total(), 'node')} on {names[head]}", *others])
    added = added_nodes(phases[0])
    more = f" (and {added:,} added by ONNX Runtime)" if added else ""
    return f"{placed}{more}{in_phases(phase.name for phase in phases)}"


def cache_text(cache: Cache) -> str:
    """Whether a cache with states stayed in place, and its memory."""
    where = f"{human_bytes(cache.size_bytes)} on {listing(sorted(cache.memories))}"
    status = status_of(cache)
    if status == "not_checked":
        return f"not checked: no step was observed ({where})"
    if status == "copied":
        copied = cache.states - cache.in_place_states
        size = f", {human_bytes(cache.copied_bytes)} in the last step" if cache.copied_bytes else ""
        return f"NOT in place: {copied} of {plural(cache.states, 'state')} copied{size} ({where})"
    if status == "moved":
        return f"NOT in place: its address changed {plural(cache.address_changes, 'time')} ({where})"
    return f"in place ({where})"


def headline(report: Report) -> str:
    """The outcome in one sentence, with shares of time if known."""
    name, preferred, phases = state_name(report), short_provider(preferred_of(report)), used_phases(report)
    timed = is_timed(report)  # a dry run does not run the model
    ran = "ran" if timed and any(phase.steps or phase.observed_runs for phase in report.phases) else "would run"
    used = listing(dict.fromkeys(short_provider(each.provider) for phase in report.phases for each in phase.providers))
    if (failed := failure_of(report)) is not None:
        return f"{f'Placed on {used}; its' if phases else 'The'} run failed: {cut(failed, LONGEST)}"
    if name == "empty":
        return "ONNX Runtime folded the whole graph at load time; nothing executes"
    if name == "nothing":
        return "No executed nodes are known"
    if name == "refused":
        rest = f"the rest {ran} on it" if _uses_preferred(report, phases) else f"nothing {ran} on it"
        return f"{preferred} rejected part of the graph; {rest}"
    if name == "all":
        return f"All nodes {ran} on {preferred}"
    if name == "none" and is_default_without_first(report):
        why = report.chain[0].reason or "no reason known"
        return f"{ran.capitalize()} on {used}; {preferred} is installed but could not start: {why}"
    if name == "none":
        first = report.chain[0] if report.chain else None
        reason = f": {first.reason or 'unavailable'}" if first is not None and first.status == "unavailable" else ""
        return f"Nothing {ran} on {preferred}{reason}"
    rows = [node for phase in report.phases for node in fallback_nodes(report, phase)]
    own = {node.name for node in rows if isinstance(node, FileNode)}
    names, noun = own or {node.name for node in rows}, "node" if own else "added node"
    fallbacks = plural(len(names), noun.replace("node", "fallback node")) if names else "fallbacks in control flow"
    if name == "nearly" and not names:
        return f"On {preferred}; {fallbacks}"
    if name == "nearly":
        copies = "" if timed else "; they cause no copies"
        return f"All but {plural(len(names), 'harmless node' if timed else 'node')} {ran} on {preferred}{copies}"
    copying = _copying_text(report, "causes" if len(names) == 1 else "cause")
    return _time_text(report) or f"Partly on {preferred}: {fallbacks}{copying}"


def _copying_text(report: Report, cause: str) -> str:
    """Copies that fallbacks cause in a run of the main phase; empty for none."""
    main = main_phase(report)
    entries = [entry for entry in report.fallbacks if main is not None and entry.phase == main.name]
    copies = {name for entry in entries if entry.cost is not None for name in entry.cost.copies}
    if main is None or not copies:
        return ""
    return f" {cause} {plural(len(copies), 'copy')} in every {'run' if main.name == 'run' else f'{main.name} run'}"


def _time_text(report: Report) -> str:
    """Share of the node time in copies or fallback nodes; empty if unknown."""
    phase, preferred = main_phase(report), preferred_of(report)
    whole = total_us(phase.nodes) if phase is not None and is_timed(report) else None
    if phase is None or not whole:
        return ""
    copied = {node.name for node in phase.nodes if is_memcpy(node)}
    fallbacks = [node for node in phase.nodes if node.provider != preferred and node.name not in copied]
    copies = (total_us(node for node in phase.nodes if node.name in copied) or 0.0) / whole
    on_fallback = (total_us(fallbacks) or 0.0) / whole
    count = sum(provider_of(row) != preferred and row.name not in copied for row in report_rows(phase))
    if not count and not copies:
        return ""  # the fallbacks are in another phase or in control flow
    of_phase = "of the node time" if phase.name == "run" else f"of {phase.name}'s node time"
    providers = dict.fromkeys(short_provider(provider_of(node)) for node in fallbacks)
    nodes = f"{plural(count, 'node')} on {listing(providers)}"
    if copies >= max(on_fallback, HEADLINE_SHARE):
        return f"{whole_percent(copies)} {of_phase} is in copies, which wait for the device"
    if on_fallback >= HEADLINE_SHARE:
        return f"{whole_percent(on_fallback)} {of_phase} is in {nodes}"
    parts = [*([nodes] if count else []), *(["copies"] if copies else [])]
    take = "takes" if parts == [nodes] and count == 1 else "take"
    share = whole_percent(copies + on_fallback)
    return f"Partly on {short_provider(preferred)}: {listing(parts)} {take} {share} {of_phase}"


def summarise(report: Report) -> Summary:
    """The summary of a report."""
    preferred, rows = preferred_of(report), counted_rows(report)
    entries, phases = grouped(fallbacks_of(report), lambda entry: entry.phase), []
    for phase in report.phases:
        counts, reasons = file_counts(phase), Counter[str]()
        for entry in entries.get(phase.name, ()):
            reasons[entry.reason] += len(rows[key_of(entry)])
        summary = PhaseSummary(
            phase=phase.name,
            nodes=counts.total(),
            nodes_by_provider=dict(counts.most_common()),
            share=share_of(counts[preferred], counts.total()),
            fallback_nodes=counts.total() - counts[preferred],
            added_nodes=added_nodes(phase),
            folded_nodes=folded_nodes(phase),
            reasons=dict(reasons),
            copies=len(phase.copies),
            copy_bytes_per_run=phase.cost.copy_bytes_per_run if phase.cost is not None else None,
            tokens_per_second=phase.tokens_per_second,
            step_p50_ms=phase.step_p50_ms,
        )
        phases.append(summary)
    failed = sum(not check.passed for check in report.checks)
    verdict = {
        f"dry run as {report.dry_run.device_name}" if report.dry_run else "": report.dry_run is not None,
        headline(report): True,
        f"{plural(failed, 'check')} FAILED": failed > 0,
        f"{plural(len(report.exceeded_limits), 'limit')} EXCEEDED": bool(report.exceeded_limits),
        "conflicting sources": bool(report.conflicts),
        "interrupted": was_interrupted(report),
    }
    return Summary(
        preferred_provider=preferred if report.chain else None,
        state=state_name(report),
        verdict="; ".join(text for text, applies in verdict.items() if applies),
        phases=tuple(phases),
        cache_in_place=is_in_place(report.cache),
        checks_failed=failed,
        limits_exceeded=len(report.exceeded_limits),
        conflicts=len({entry.node for entry in report.conflicts}),
    )
