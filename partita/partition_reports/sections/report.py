"""A report as a document, and its views.

The top is equal in every view: outcome, warnings, reason, cost, remedy, placement, copies and speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from partita.diagnosis.records import Fallback
from partita.errors import ReportError
from partita.observations.text_format import decimals, in_phases, name_some, plural, short_provider
from partita.partition_reports.outcome import (
    cache_text,
    counted_rows,
    headline,
    is_default_without_first,
    key_of,
    placement_text,
    state_name,
)
from partita.partition_reports.phase_records import TOO_FEW, FileNode, Phase
from partita.partition_reports.records import Report, StateName
from partita.partition_reports.render.show import View, Views
from partita.partition_reports.sections import fallbacks, phases, placement
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Command,
    Document,
    Group,
    Line,
    Section,
    Tone,
    fields_of,
    pairs,
    table_of,
)
from partita.remedies import shell

SIGNS: dict[StateName, tuple[str, Tone]] = {
    "all": ("✓", "good"),
    "nearly": ("◕", "mild"),
    "partly": ("◐", "warn"),
    "none": ("✕", "bad"),
    "refused": ("⊘", "bad"),
    "empty": ("○", "good"),
    "nothing": ("–", "bad"),
    "failed": ("✕", "bad"),
}
"""A symbol for each state, and its tone."""


def sign_and_tone(report: Report) -> tuple[str, Tone]:
    """Symbol and tone of the outcome."""
    return SIGNS["partly" if is_default_without_first(report) and state_name(report) == "none" else state_name(report)]


def opening(report: Report) -> Iterator[Block]:
    """Warnings, the first reason with its cost and remedy, then placement, copies, cache and speed."""
    yield from (Line(text, label, "bad") for label, text in _warnings(report))
    reasons = _groups(report)
    yield from _reason(report, reasons)
    yield from remedies(report)
    slow, main = fallbacks.slow_groups(report), report.main_phase
    if slow:
        yield Line(f"{fallbacks.slow_text(slow[0])}{_more(slow, 'path')}", "slow")
    for each in report.placements:
        yield Line(placement_text(each, report.preferred), "placement")
    rows = counted_rows(report)
    for entries in reasons[:1]:
        names = [name for entry in entries for name in rows[key_of(entry)]] or [entry.node for entry in entries]
        yield Line(name_some(dict.fromkeys(names), 1), "nodes")
    if main is not None:
        yield Line(phases.copies_text(main), "copies")
    if report.cache is not None and report.cache.states:
        yield Line(cache_text(report.cache), "cache")
    yield Line(", ".join(filter(None, map(_speed, report.phases[::-1]))), "speed")


def _more(groups: Sequence[object], noun: str) -> str:
    """Suffix with the number of groups after the first."""
    return f"; and {plural(len(groups) - 1, f'more {noun}')}" if len(groups) > 1 else ""


def _speed(phase: Phase) -> str:
    """The speed of a phase and its basis; empty if unknown."""
    few = f"; {TOO_FEW}" if phase.has_few_steps else ""
    steps, where = plural(phase.steps, "run" if phase.name == "run" else f"{phase.name} step"), in_phases([phase.name])
    median = f"{decimals(phase.step_p50_ms)} ms"
    if phase.tokens_per_second is None:
        of = f"median of {steps}" if phase.steps > 1 else steps
        return "" if phase.step_p50_ms is None else f"{median} per run{where} ({of}{few})"
    if phase.steps > 1 and phase.step_p50_ms is not None:
        steps = f"mean of {steps}; median step {median}"
    return f"{decimals(phase.tokens_per_second)} tokens/s{where} ({steps}{few})"


def _warnings(report: Report) -> Iterator[tuple[str, str]]:
    """Label and text of each limit of the trust in the report."""
    if report.dry_run is not None:
        yield "dry run", f"as {report.dry_run.device_name}: no device was used, and there are no times"
    if report.package is not None and report.package.verification != "verified":
        yield "unverified package", report.package.verification_detail
    yield from (("limit exceeded", sentence) for sentence in report.exceeded_limits)
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        yield f"{plural(len(failed), 'check')} of this report failed", fallbacks.first_names(failed)
    if report.conflicts:
        yield "conflicting sources", f"for {plural(len({entry.node for entry in report.conflicts}), 'node')}"
    if report.was_interrupted:
        yield "the run ended early", "interrupted"


def _groups(report: Report) -> list[list[Fallback]]:
    """Fallbacks by reason, except the reasons of an unavailable provider."""
    return [entries for entries in fallbacks.by_reason(report) if entries[0].preferred_provider in report.active]


def _reason(report: Report, reasons: list[list[Fallback]]) -> Iterator[Line]:
    """An unavailable provider, then the reason with the highest cost, its cost, and the number of other reasons."""
    texts = [
        f"{short_provider(entry.provider)} is unavailable: {entry.reason or 'no reason known'}: "
        f"{entry.evidence or 'no evidence'}"
        for entry in report.unavailable[:1]
    ]
    target, cost = "", None
    for entries in reasons[:1]:
        nodes = f"{fallbacks.count_text(report, entries)} on {short_provider(entries[0].provider)}"
        texts.append(f"{nodes}: {fallbacks.reason_text(entries)} ({entries[0].reason}){_more(reasons, 'reason')}")
        target = f"{fallbacks.ANCHOR}{fallbacks.by_reason(report).index(entries)}"
        cost = fallbacks.cost_line(report, entries)
    yield from [Line("; ".join(texts), "fallbacks", target=target)] if texts else []
    yield from [Line(cost.text, "cost")] if cost is not None else []


def remedies(report: Report) -> Iterator[Line | Command]:
    """The remedies of unavailable providers, and of the first reason with its command."""
    if (failed := report.failure_text) is not None:  # an error message ends with its remedy
        yield Line(failed.rpartition("; ")[2], "remedy", "good")
        return
    missing = report.unavailable
    if not missing and state_name(report) in ("all", "nearly", "empty"):
        for first, *_ in fallbacks.slow_groups(report)[:1]:
            yield Line(f"{first.cause}: {first.remedy}", "remedy", "good")
        return
    for entry in missing:
        for remedy in entry.remedies:
            words = shell(remedy.options)
            yield Line(f"{remedy.text}{': ' if words else ''}{words}", "remedy", "good")
            yield from [Command(remedy.command)] if remedy.command else []
        if entry.remedy and not entry.remedies:
            yield Line(entry.remedy, "remedy", "good")
    action = next(fallbacks.top_actions(report), None)
    # With an unavailable provider, also show the remedy for an available one.
    reasons = _groups(report)
    if reasons and (action is None or missing):
        yield Line(reasons[0][0].remedy, "remedy", "good")
    if action is not None:
        yield from () if missing else (Line(action.title, "remedy", "good"),)
        yield Command(action.remedy.command, action.remedy.text)
    elif not missing and not reasons:
        yield Line("No remedy is known.", "remedy")


# Sections that show records as they are


def checks_blocks(report: Report) -> Iterator[Block]:
    """Failed checks, the number of passed checks, and nodes with conflicting sources."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    yield Line(f"{passed} of {plural(len(report.checks), 'check')} passed")
    yield from (Line(f"FAILED {check.name}: {check.detail}", tone="bad") for check in failed)
    names = ("node", "phase", "detail", "sources")
    yield table_of("Conflicting sources", report.conflicts, *names, most=MOST, obvious=False)


def sources_blocks(report: Report) -> Iterator[Block]:
    """Coverage of each source, then the notes of the run."""
    rows = (
        (entry.source.replace("_", " "), entry.covers if entry.available else f"NOT AVAILABLE: {entry.covers}")
        for entry in report.sources
    )
    yield pairs("Sources", rows)
    yield from (Line(note, "note") for note in report.notes)


def request_blocks(report: Report) -> Iterator[Block]:
    """The request, and the package or model."""
    rows = fields_of(report.package)
    rows += fields_of(report.package.quality if report.package is not None else None, prefix="quality: ")
    if report.model is not None:
        inputs = name_some(f"{port.name} {port.declared}" for port in report.model.inputs)
        rows += [*fields_of(report.model), ("inputs", inputs or "none")]
    request = report.request
    rows += fields_of(request, "chain", "chain_source")
    rows.append(("chain", f"{', '.join(request.chain) or 'none'} ({request.chain_source})"))
    for entry in report.chain:
        remedy = f"; remedy: {entry.remedy}" if entry.remedy else ""
        reason = f": {entry.reason or 'no reason known'}; {entry.evidence or 'no evidence'}{remedy}"
        rows.append((entry.provider, entry.status + ("" if entry.status == "active" else reason)))
    yield pairs("Request", rows)


def machine_blocks(report: Report) -> Iterator[Block]:
    """Memory, settings of the CPU provider, machine and software."""
    env = report.environment
    yield Group("Memory", (pairs("Memory", fields_of(report.memory, "source")),))
    for entry in report.cpu:
        settings = [*fields_of(entry, "file"), *fields_of(entry.attention, prefix="attention ")]
        yield Group(f"CPU provider in {entry.file}", (pairs("CPU provider", settings),))
    software = [
        *fields_of(env, "onnxruntime_version", "onnxruntime_build"),
        ("runtime", f"{env.runtime} ({env.onnxruntime_build})"),
        ("partita", f"{report.partita_version}, report of {report.created}"),
    ]
    yield Group("Machine and software", (pairs("Machine and software", software),))


PARTS: tuple[tuple[str, str, Callable[[Report], Iterable[Block]]], ...] = (
    ("phases", "Phases", phases.phase_blocks),
    ("speculation", "Speculative decoding", lambda run: [pairs("Speculative decoding", fields_of(run.speculation))]),
    ("dry_run", "Dry run", lambda run: [pairs("The device", fields_of(run.dry_run))]),
    ("fallbacks", "Fallbacks", fallbacks.fallback_blocks),
    ("kernels", "Kernel paths", fallbacks.kernel_blocks),
    ("placement", "Placement", placement.placement_blocks),
    ("copies", "Copies", phases.copies_blocks),
    ("cache", "KV cache", phases.cache_blocks),
    ("nodes", "Nodes", placement.nodes_blocks),
    ("checks", "Checks", checks_blocks),
    ("sources", "Sources", sources_blocks),
    ("request", "Request", request_blocks),
    ("machine", "Machine", machine_blocks),
)
"""Key, title and blocks of each section in display order, the most important first."""
EXPANDED = ("phases", "fallbacks")
"""Sections that are not collapsed in Markdown."""
ABOUT = {"fallbacks": fallbacks.fallback_count, "kernels": fallbacks.slow_count}
"""Section -> the suffix of its title."""


def document(report: Report) -> Document:
    """The report as a document."""
    name, (sign, tone) = report.model_name, sign_and_tone(report)
    about = {key: text(report) for key, text in ABOUT.items()}
    return Document(
        kind="Partition report",
        name=name,
        headline=(f"{name}: {headline(report)}",),
        sections=tuple(
            Section(key, title, tuple(blocks(report)), about.get(key, ""), folded=key not in EXPANDED)
            for key, title, blocks in PARTS
        ),
        opening=tuple(opening(report)),
        created=report.created,
        version=report.partita_version,
        sign=sign,
        tone=tone,
    )


# Node data for Google's Model Explorer. Format: node_data_builder.py of ai-edge-model-explorer 0.1.34, one
# `GraphNodeData`. Keys are node names, which model-explorer-onnx uses as node ids.


PREFERRED, FALLBACK, FOLDED, UNKNOWN = "#8ab4f8", "#f9ab00", "#dadce0", "#c58af9"
"""Background colours; the text colour is chosen by Model Explorer."""


def node_data(report: Report) -> str:
    """Node data of the last phase: decode, or the run of a model. Raises ReportError for a report without phases."""
    if not report.phases:
        raise ReportError("the report has no placement of nodes, so it has no node data")
    phase, preferred = report.phases[-1], report.preferred
    reasons = {each.node: each.reason for each in report.fallbacks if each.phase == phase.name}
    data = {
        "name": f"{phase.file}: provider in {phase.name}",
        "results": {node.name: _result(node, preferred, reasons.get(node.name)) for node in phase.file_nodes},
        "showExpandedSummaryOnGroupNode": True,
        "showLabelCountColumnsInChildrenStatsTable": True,
    }
    return json.dumps(data, indent=1) + "\n"


def _result(node: FileNode, preferred: str | None, reason: str | None) -> dict[str, str]:
    """Label and colour of one node."""
    if node.state == "folded":
        return {"value": "folded", "bgColor": FOLDED}
    if node.provider is None or node.state == "ambiguous":
        return {"value": "unknown", "bgColor": UNKNOWN}
    name = short_provider(node.provider)
    if node.provider == preferred:
        return {"value": name, "bgColor": PREFERRED}
    return {"value": f"{name}: {reason}" if reason else name, "bgColor": FALLBACK}


NODE_DATA = View("model-explorer", ".json", node_data, file_kind="node data")
VIEWS = Views(document, own={NODE_DATA.name: NODE_DATA})
