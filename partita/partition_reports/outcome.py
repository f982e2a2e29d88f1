"""Outcome of a run: share on the preferred provider, state of the cache, headline, and summary record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from partita.diagnosis.records import Fallback
from partita.observations.grouping import grouped
from partita.observations.names import UNKNOWN
from partita.observations.native_text import cut
from partita.observations.text_format import human_bytes, in_phases, listing, percent, plural, short_provider
from partita.partition_reports.groups import is_memcpy, provider_of, share_of, total_us
from partita.partition_reports.phase_records import FileNode, Phase
from partita.partition_reports.records import Cache, PhaseSummary, Report, StateName, Summary

HEADLINE_SHARE = 0.1
"""The headline names copies or fallback nodes with at least this share of the node time."""
LONGEST = 240
"""Maximum characters of a headline's reason."""
FallbackKey = tuple[str, str, str]
"""Phase, executed node and provider."""


def state_name(report: Report) -> StateName:
    """The state of a run; see `Summary.state`."""
    if report.failure_text is not None:
        return "failed"
    phases = report.used_phases
    if not phases:
        return "empty" if report.is_folded else "nothing"
    if any(part.provider == report.preferred for part in report.rejected_parts):
        return "refused"
    if not report.fallbacks and not any(map(report.fallback_nodes, phases)):
        return "all"
    if not _uses_preferred(report, phases):
        return "none"
    return "nearly" if _all_harmless(report) else "partly"


def _uses_preferred(report: Report, phases: Sequence[Phase]) -> bool:
    """Whether a node of the file, or a part of one, e.g. of a function, is on the preferred provider."""
    preferred = report.preferred
    parts = (node for phase in phases for node in phase.nodes if not node.added)
    return any(phase.file_counts[preferred] for phase in phases) or any(node.provider == preferred for node in parts)


def _all_harmless(report: Report) -> bool:
    """Whether every fallback is harmless; without times, as in a dry run, whether none requires a copy."""
    if any(copy.cause_missing_reason for phase in report.phases for copy in phase.copies):
        return False
    if any(phase.subgraphs is not None and phase.subgraphs.may_have_more_copies for phase in report.phases):
        return False
    if report.is_timed:
        return all(entry.cost is not None and entry.cost.harmless is True for entry in report.fallbacks)
    return all(entry.cost is not None and not entry.cost.copies for entry in report.fallbacks)


def is_default_without_first(report: Report) -> bool:
    """Whether the first provider of the default chain is installed but could not start."""
    return bool(report.chain) and report.chain[0].status != "active" and report.preferred not in report.request.chain


def counted_rows(report: Report) -> dict[FallbackKey, tuple[str, ...]]:
    """Fallback -> the nodes that a table of reasons counts for it, so that the counts of all add up.

    These are the file nodes that its executed node ran; a file node that ran as several executed nodes is counted for
    the first of them on its provider. A node in a control-flow subgraph counts itself. Empty for a node that ONNX
    Runtime added.
    """
    found: dict[FallbackKey, tuple[str, ...]] = {key_of(entry): (entry.node,) for entry in report.fallbacks}
    for phase in report.phases:
        executed = {(node.name, provider_of(node)) for node in phase.nodes}
        runs, done = phase.ran_by, set[str]()
        for entry in report.fallbacks:
            if entry.phase == phase.name:
                rows = [row.name for row in runs.get(entry.node, ()) if provider_of(row) == entry.provider]
                if rows or (entry.node, entry.provider) in executed:
                    found[key_of(entry)] = tuple(name for name in rows if name not in done)
                    done.update(rows)
    return found


def key_of(entry: Fallback) -> FallbackKey:
    """The key of a fallback in `counted_rows`."""
    return entry.phase, entry.node, entry.provider


def placement_text(phases: Sequence[Phase], first: str | None = None) -> str:
    """File nodes per provider, and added nodes, of phases with equal placement.

    `first`: the provider to begin with, even without nodes; None: the provider with the most nodes.
    """
    counts = phases[0].file_counts
    ranked = [name for name, _ in counts.most_common()]
    head = first or [*ranked, *(entry.provider for entry in phases[0].providers), UNKNOWN][0]
    names = {each: "an unknown provider" if each == UNKNOWN else short_provider(each) for each in (head, *ranked)}
    others = [f"{counts[each]:,} on {names[each]}" for each in ranked if each != head]
    placed = ", ".join([f"{counts[head]:,} of {plural(counts.total(), 'node')} on {names[head]}", *others])
    added = phases[0].added_count
    more = f" (and {added:,} added by ONNX Runtime)" if added else ""
    return f"{placed}{more}{in_phases(phase.name for phase in phases)}"


def cache_text(cache: Cache) -> str:
    """Whether a cache with states stayed in place, and its memory."""
    where = f"{human_bytes(cache.size_bytes)} on {listing(sorted(cache.memories))}"
    status = cache.status
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
    name, preferred, phases = state_name(report), short_provider(report.preferred), report.used_phases
    timed = report.is_timed  # a dry run does not run the model
    ran = "ran" if timed and any(phase.steps or phase.observed_runs for phase in report.phases) else "would run"
    used = listing(dict.fromkeys(short_provider(each.provider) for phase in report.phases for each in phase.providers))
    if (failed := report.failure_text) is not None:
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
    rows = [node for phase in report.phases for node in report.fallback_nodes(phase)]
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
    main = report.main_phase
    entries = [entry for entry in report.fallbacks if main is not None and entry.phase == main.name]
    copies = {name for entry in entries if entry.cost is not None for name in entry.cost.copies}
    if main is None or not copies:
        return ""
    return f" {cause} {plural(len(copies), 'copy')} in every {'run' if main.name == 'run' else f'{main.name} run'}"


def _time_text(report: Report) -> str:
    """Share of the node time in copies or fallback nodes; empty if unknown."""
    phase, preferred = report.main_phase, report.preferred
    whole = total_us(phase.nodes) if phase is not None and report.is_timed else None
    if phase is None or not whole:
        return ""
    copied = {node.name for node in phase.nodes if is_memcpy(node)}
    fallbacks = [node for node in phase.nodes if node.provider != preferred and node.name not in copied]
    copies = (total_us(node for node in phase.nodes if node.name in copied) or 0.0) / whole
    on_fallback = (total_us(fallbacks) or 0.0) / whole
    count = sum(provider_of(row) != preferred and row.name not in copied for row in phase.rows)
    if not count and not copies:
        return ""  # the fallbacks are in another phase or in control flow
    of_phase = "of the node time" if phase.name == "run" else f"of {phase.name}'s node time"
    providers = dict.fromkeys(short_provider(provider_of(node)) for node in fallbacks)
    nodes = f"{plural(count, 'node')} on {listing(providers)}"
    if copies >= max(on_fallback, HEADLINE_SHARE):
        return f"{percent(copies, 0)} {of_phase} is in copies, which wait for the device"
    if on_fallback >= HEADLINE_SHARE:
        return f"{percent(on_fallback, 0)} {of_phase} is in {nodes}"
    parts = [*([nodes] if count else []), *(["copies"] if copies else [])]
    take = "takes" if parts == [nodes] and count == 1 else "take"
    share = percent(copies + on_fallback, 0)
    return f"Partly on {short_provider(preferred)}: {listing(parts)} {take} {share} {of_phase}"


def summarise(report: Report) -> Summary:
    """The summary of a report."""
    preferred, rows = report.preferred, counted_rows(report)
    entries, phases = grouped(report.active_fallbacks, lambda entry: entry.phase), []
    for phase in report.phases:
        counts, reasons = phase.file_counts, Counter[str]()
        for entry in entries.get(phase.name, ()):
            reasons[entry.reason] += len(rows[key_of(entry)])
        summary = PhaseSummary.copy_of(
            phase,
            phase=phase.name,
            nodes=counts.total(),
            nodes_by_provider=dict(counts.most_common()),
            share=share_of(counts[preferred], counts.total()),
            fallback_nodes=counts.total() - counts[preferred],
            added_nodes=phase.added_count,
            folded_nodes=phase.folded_count,
            reasons=dict(reasons),
            copies=len(phase.copies),
            copy_bytes_per_run=phase.cost.copy_bytes_per_run if phase.cost is not None else None,
        )
        phases.append(summary)
    failed = sum(not check.passed for check in report.checks)
    verdict = {
        f"dry run as {report.dry_run.device_name}" if report.dry_run else "": report.dry_run is not None,
        headline(report): True,
        f"{plural(failed, 'check')} FAILED": failed > 0,
        f"{plural(len(report.exceeded_limits), 'limit')} EXCEEDED": bool(report.exceeded_limits),
        "conflicting sources": bool(report.conflicts),
        "interrupted": report.was_interrupted,
    }
    return Summary(
        preferred_provider=preferred if report.chain else None,
        state=state_name(report),
        verdict="; ".join(text for text, applies in verdict.items() if applies),
        phases=tuple(phases),
        cache_in_place=report.cache_in_place,
        checks_failed=failed,
        limits_exceeded=len(report.exceeded_limits),
        conflicts=len({entry.node for entry in report.conflicts}),
    )
