"""A report as a document, and its views: checks, sources, request and machine are records as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from partita.errors import ReportError
from partita.observations.records import ChainEntry
from partita.observations.text_format import families, plural, short_provider
from partita.partition_reports.groups import grouped
from partita.partition_reports.outcome import headline, preferred_of
from partita.partition_reports.records import FileNode, Report
from partita.partition_reports.render.show import View, Views
from partita.partition_reports.request_records import ModelInput
from partita.partition_reports.sections import fallbacks, overview, phases, placement
from partita.partition_reports.sections.model import (
    MOST,
    Block,
    Document,
    Group,
    Line,
    Section,
    fields_of,
    pairs,
    table_of,
)


def checks_section(report: Report) -> Section:
    """Failed checks, the number of passed checks, and nodes with conflicting sources."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    blocks: list[Block] = [Line(f"{passed} of {plural(len(report.checks), 'check')} passed")]
    blocks += [Line(f"FAILED {check.name}: {check.detail}", tone="bad") for check in failed]
    if report.conflicts:
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
        rows += [*fields_of(report.model), ("inputs", "; ".join(_describe_inputs(report.model.inputs)) or "none")]
    request = report.request
    rows += fields_of(request, "chain", "chain_source")
    rows.append(("chain", f"{', '.join(request.chain) or 'none'} ({request.chain_source})"))
    rows += [(entry.provider, _describe_entry(entry)) for entry in report.chain]
    return Section("request", "Request", (pairs("Request", rows),))


def _describe_inputs(ports: tuple[ModelInput, ...]) -> Iterator[str]:
    """Inputs with type and shape; names that differ only in numbers are merged."""
    for kind, alike in grouped(ports, lambda port: port.declared).items():
        for name, members in families(port.name for port in alike).items():
            yield f"{name} {kind}" + (f" ({plural(len(members), 'input')})" if len(members) > 1 else "")


def _describe_entry(entry: ChainEntry) -> str:
    """Availability of a provider, with the remedy if it is unavailable."""
    if entry.status == "active":
        return entry.status
    remedy = f"; remedy: {entry.remedy}" if entry.remedy else ""
    return f"{entry.status}: {entry.reason or 'no reason known'}; {entry.evidence or 'no evidence'}{remedy}"


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
    name = overview.model_name(report)
    sign, tone = overview.sign_and_tone(report)
    return Document(
        kind="Partition report",
        name=name,
        headline=(f"{name}: {headline(report)}",),
        sections=sections(report),
        opening=tuple(overview.opening(report)),
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
