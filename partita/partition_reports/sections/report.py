"""A report as a document, and its views.

The top is equal in every view: outcome, warnings, reason, cost, remedy, placement, copies and speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from partita.diagnosis.records import Fallback
from partita.errors import ReportError
from partita.observations.records import ChainEntry
from partita.observations.text_format import (
    decimals,
    families,
    in_phases,
    listing,
    name_some,
    plural,
    short_provider,
)
from partita.partition_reports.groups import grouped
from partita.partition_reports.outcome import (
    TOO_FEW,
    StateName,
    active_of,
    cache_text,
    counted_rows,
    failure_of,
    headline,
    is_default_without_first,
    key_of,
    main_phase,
    placement_text,
    preferred_of,
    state_name,
    too_few_steps,
    was_interrupted,
)
from partita.partition_reports.records import FileNode, Phase, Report
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
NAMED_CHECKS = 3
"""Maximum failed checks named at the top."""
MOST_PLACEMENTS = 2
"""prefill and decode may have different placements."""


def model_name(report: Report) -> str:
    """Name of the package or file."""
    if report.package is not None:
        return report.package.name
    return report.model.file if report.model is not None else "unknown model"


def sign_and_tone(report: Report) -> tuple[str, Tone]:
    """Symbol and tone of the outcome."""
    return SIGNS["partly" if is_default_without_first(report) and state_name(report) == "none" else state_name(report)]


def opening(report: Report) -> Iterator[Block]:
    """Warnings, the first reason with its cost and remedy, then placement, copies, cache and speed."""
    yield from (Line(text, label, "bad") for label, text in _warnings(report))
    yield from _reason(report)
    yield from remedies(report)
    slow, main = fallbacks.slow_groups(report), main_phase(report)
    if slow:
        yield Line(f"{fallbacks.slow_text(slow[0])}{_more(slow, 'path')}", "slow")
    for each in placement.placements(report)[:MOST_PLACEMENTS]:
        yield Line(placement_text(each, preferred_of(report)), "placement")
    rows = counted_rows(report)
    for entries in _groups(report)[:1]:
        names = [name for entry in entries for name in rows[key_of(entry)]] or [entry.node for entry in entries]
        yield Line(name_some(dict.fromkeys(names), 1), "nodes")
    if main is not None:
        yield Line(phases.copies_text(main), "copies")
    if report.cache is not None and report.cache.states:
        yield Line(cache_text(report.cache), "cache")
    if speeds := [*filter(None, map(_speed, report.phases[::-1]))]:
        yield Line(", ".join(speeds), "speed")


def _more(groups: Sequence[object], noun: str) -> str:
    """Suffix with the number of groups after the first."""
    return f"; and {plural(len(groups) - 1, f'more {noun}')}" if len(groups) > 1 else ""


def _speed(phase: Phase) -> str:
    """The speed of a phase and its basis; empty if unknown."""
    few = f"; {TOO_FEW}" if too_few_steps(phase) else ""
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
    device = report.dry_run
    if device is not None:
        yield "dry run", f"as {device.device_name}: no device was used, and there are no times"
    if report.package is not None and report.package.verification != "verified":
        yield "unverified package", report.package.verification_detail
    yield from (("limit exceeded", sentence) for sentence in report.exceeded_limits)
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        more = [f"{len(failed) - NAMED_CHECKS} more"] if len(failed) > NAMED_CHECKS else []
        yield f"{plural(len(failed), 'check')} of this report failed", listing([*failed[:NAMED_CHECKS], *more])
    if report.conflicts:
        yield "conflicting sources", f"for {plural(len({entry.node for entry in report.conflicts}), 'node')}"
    if was_interrupted(report):
        yield "the run ended early", "interrupted"


def _unavailable(report: Report) -> list[ChainEntry]:
    """Unavailable providers of the chain."""
    return [entry for entry in report.chain if entry.status == "unavailable"]


def _groups(report: Report) -> list[list[Fallback]]:
    """Fallbacks by reason, except the reasons of an unavailable provider."""
    groups, active = fallbacks.by_reason(report), active_of(report)
    return [each for each in groups if each[0].preferred_provider in active] if _unavailable(report) else groups


def _reason(report: Report) -> Iterator[Line]:
    """An unavailable provider, then the reason with the highest cost, its cost, and the number of other reasons."""
    texts = [
        f"{short_provider(entry.provider)} is unavailable: {entry.reason or 'no reason known'}: "
        f"{entry.evidence or 'no evidence'}"
        for entry in _unavailable(report)[:1]
    ]
    groups = _groups(report)
    if not groups:
        yield from (Line(text, "fallbacks") for text in texts)
        return
    entries, first = groups[0], groups[0][0]
    nodes = f"{fallbacks.count_text(report, entries)} on {short_provider(first.provider)}"
    texts.append(f"{nodes}: {fallbacks.reason_text(entries)} ({first.reason}){_more(groups, 'reason')}")
    anchor = fallbacks.reason_anchor(fallbacks.by_reason(report).index(entries))
    yield Line("; ".join(texts), "fallbacks", target=anchor)
    cost = fallbacks.cost_line(report, entries)
    if cost is not None:
        yield Line(cost.text, "cost")


def remedies(report: Report) -> Iterator[Line | Command]:
    """The remedies of unavailable providers, and of the first reason with its command."""
    if (failed := failure_of(report)) is not None:  # an error message ends with its remedy
        yield Line(failed.rpartition("; ")[2], "remedy", "good")
        return
    missing, state = _unavailable(report), state_name(report)
    if not missing and state in ("all", "nearly", "empty"):
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


def checks_section(report: Report) -> Section:
    """Failed checks, the number of passed checks, and nodes with conflicting sources."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    blocks: list[Block] = [Line(f"{passed} of {plural(len(report.checks), 'check')} passed")]
    blocks += [Line(f"FAILED {check.name}: {check.detail}", tone="bad") for check in failed]
    names = ("node", "phase", "detail", "sources")
    blocks.append(table_of("Conflicting sources", report.conflicts, *names, most=MOST, obvious=False))
    return Section("checks", "Checks", tuple(blocks))


def sources_section(report: Report) -> Section:
    """Coverage of each source, then the notes of the run."""
    rows = (
        (entry.source.replace("_", " "), entry.covers if entry.available else f"NOT AVAILABLE: {entry.covers}")
        for entry in report.sources
    )
    notes = tuple(Line(note, "note") for note in report.notes)
    return Section("sources", "Sources", (pairs("Sources", rows), *notes))


def dry_run_section(report: Report) -> Section | None:
    """The simulated device; None for a real device."""
    device = report.dry_run
    return None if device is None else Section("dry_run", "Dry run", (pairs("The device", fields_of(device)),))


def request_section(report: Report) -> Section:
    """The request, and the package or model."""
    rows: list[tuple[str, str]] = []
    if report.package is not None:
        rows += fields_of(report.package)
        if report.package.quality is not None:
            rows += fields_of(report.package.quality, prefix="quality: ")
    if report.model is not None:
        inputs = []
        for kind, alike in grouped(report.model.inputs, lambda port: port.declared).items():
            for name, members in families(port.name for port in alike).items():
                count = f" ({plural(len(members), 'input')})" if len(members) > 1 else ""
                inputs.append(f"{name} {kind}{count}")
        rows += [*fields_of(report.model), ("inputs", "; ".join(inputs) or "none")]
    request = report.request
    rows += fields_of(request, "chain", "chain_source")
    rows.append(("chain", f"{', '.join(request.chain) or 'none'} ({request.chain_source})"))
    for entry in report.chain:
        remedy = f"; remedy: {entry.remedy}" if entry.remedy else ""
        reason = f": {entry.reason or 'no reason known'}; {entry.evidence or 'no evidence'}{remedy}"
        rows.append((entry.provider, entry.status + ("" if entry.status == "active" else reason)))
    return Section("request", "Request", (pairs("Request", rows),))


def machine_section(report: Report) -> Section:
    """Memory, settings of the CPU provider, machine and software."""
    env = report.environment
    blocks = [Group("Memory", (pairs("Memory", fields_of(report.memory, "source")),))]
    for entry in report.cpu:
        attention = [] if entry.attention is None else fields_of(entry.attention, prefix="attention ")
        settings = pairs("CPU provider", [*fields_of(entry, "file"), *attention])
        blocks.append(Group(f"CPU provider in {entry.file}", (settings,)))
    software = [
        *fields_of(env, "onnxruntime_version", "onnxruntime_build"),
        ("runtime", f"{env.runtime} ({env.onnxruntime_build})"),
        ("partita", f"{report.partita_version}, report of {report.created}"),
    ]
    blocks.append(Group("Machine and software", (pairs("Machine and software", software),)))
    return Section("machine", "Machine", tuple(blocks))


PARTS = (
    phases.section,
    phases.speculation_section,
    dry_run_section,
    fallbacks.section,
    fallbacks.kernel_section,
    placement.section,
    placement.layers_section,
    phases.work_section,
    phases.copies_section,
    phases.cache_section,
    placement.nodes_section,
    checks_section,
    sources_section,
    request_section,
    machine_section,
)
"""In display order, the most important first."""
EXPANDED = ("phases", "fallbacks")
"""Sections that are not collapsed in Markdown."""


def sections(report: Report) -> tuple[Section, ...]:
    """Every section that is not empty."""
    found = filter(None, (part(report) for part in PARTS))
    return tuple(replace(section, folded=section.key not in EXPANDED) for section in found)


def document(report: Report) -> Document:
    """The report as a document."""
    name = model_name(report)
    sign, tone = sign_and_tone(report)
    return Document(
        kind="Partition report",
        name=name,
        headline=(f"{name}: {headline(report)}",),
        sections=sections(report),
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
    phase, preferred = report.phases[-1], preferred_of(report)
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
