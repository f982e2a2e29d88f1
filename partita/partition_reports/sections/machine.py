"""The request, memory, machine and software of the run; the simulated device of a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from partita.observations.records import ChainEntry
from partita.observations.text_format import families, plural
from partita.partition_reports.groups import grouped
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import ModelInput
from partita.partition_reports.sections.model import Block, Group, Pairs, Section, fields_of, pairs
from partita.partition_reports.sections.shared import runtime_name


def section(report: Report) -> Section:
    """Memory, settings of the CPU provider, machine and software."""
    env = report.environment
    blocks: list[Block] = [Group("Memory", (pairs("Memory", fields_of(report.memory, "source")),))]
    for entry in report.cpu:
        attention = [] if entry.attention is None else fields_of(entry.attention, prefix="attention ")
        settings = pairs("CPU provider", [*fields_of(entry, "file"), *attention])
        blocks.append(Group(f"CPU provider in {entry.file}", (settings,)))
    software = [
        *fields_of(env, "onnxruntime_version", "onnxruntime_build"),
        ("runtime", f"{runtime_name(env)} ({env.onnxruntime_build})"),
        ("partita", f"{report.partita_version}, report of {report.created}"),
    ]
    blocks.append(Group("Machine and software", (pairs("Machine and software", software),)))
    return Section("machine", "Machine", tuple(blocks))


def dry_run_section(report: Report) -> Section | None:
    """The simulated device; None for a real device."""
    device = report.dry_run
    if device is None:
        return None
    return Section("dry_run", "Dry run", (pairs("The device", fields_of(device)),))


def request_section(report: Report) -> Section:
    """The request, and the package or model."""
    rows: list[tuple[str, tuple[str, ...]]] = [(name, (value,)) for name, value in _model_fields(report)]
    if report.model is not None:
        rows.append(("inputs", tuple(_describe_inputs(report.model.inputs)) or ("none",)))
    request = report.request
    rows += [(name, (value,)) for name, value in fields_of(request, "chain", "chain_source")]
    chain = f"{', '.join(request.chain) or 'none'} ({request.chain_source})"
    rows.append(("chain", (chain, *(text for entry in report.chain for text in _describe_entry(entry)))))
    return Section("request", "Request", (Pairs("Request", tuple(rows)),))


def _model_fields(report: Report) -> Iterator[tuple[str, str]]:
    """The package with its quality, or the ONNX file."""
    if report.package is not None:
        yield from fields_of(report.package)
        if report.package.quality is not None:
            yield from fields_of(report.package.quality, prefix="quality: ")
    if report.model is not None:
        yield from fields_of(report.model)


def _describe_inputs(ports: tuple[ModelInput, ...]) -> Iterator[str]:
    """Inputs with type and shape; names that differ only in numbers share a line."""
    found = {
        members[0]: f"{name} {kind}" + (f" ({plural(len(members), 'input')})" if len(members) > 1 else "")
        for kind, members_of_kind in grouped(ports, lambda port: port.declared).items()
        for name, members in families(port.name for port in members_of_kind).items()
    }
    yield from (found[port.name] for port in ports if port.name in found)


def _describe_entry(entry: ChainEntry) -> Iterator[str]:
    """Availability of a provider, with the remedy if it is unavailable."""
    if entry.status == "active":
        yield f"{entry.provider} active"
        return
    reason, evidence = entry.reason or "no reason known", entry.evidence or "no evidence"
    yield f"{entry.provider} {entry.status}: {reason}; {evidence}"
    if entry.remedy:
        yield f"remedy: {entry.remedy}"
