"""Measures of a whole report: nodes on the CPU, copies, reasons, the cache, speed. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita.observations.names import CPU
from partita.observations.text_format import decimals, listing, name_some, plural
from partita.partition_reports.cache_state import is_in_place, status_of
from partita.partition_reports.copies import subgraph_copies
from partita.partition_reports.outcome import TOO_FEW, is_known, main_phase, too_few_steps
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.verdict import describe_cache

NOT_ALL_SEEN = "some copies in control-flow subgraphs may be unknown"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured value with texts for every outcome."""

    value: float | None
    """None: unknown."""
    held: str
    """Text if the requirement holds."""
    unmet_text: str = ""
    """Text if it does not hold; empty: `held`."""
    most: float | None = None
    """Upper bound of a partly unknown value; None: `value`."""
    unsure: str = ""
    """Text if it holds for `value` but not for `most`."""


def cpu_nodes(phase: Phase) -> list[str]:
    """Nodes on the CPU provider with their operators, including control-flow subgraphs."""
    main = [(node.name, node.op_type) for node in phase.nodes if node.provider == CPU]
    inside = [(node.name, node.op_type) for node in (phase.subgraphs.on_cpu if phase.subgraphs else ())]
    return [f"{name} ({op_type})" if op_type else name for name, op_type in (*main, *inside)]


def _count_cpu_nodes(report: Report) -> Measurement:
    """Nodes on the CPU provider, in the phase with the most."""
    counted = [(phase, cpu_nodes(phase)) for phase in report.phases if is_known(phase)]
    phase, names = max(reversed(counted), key=lambda entry: len(entry[1]))
    unsure_in, unknown = max(
        ((each, [node.name for node in each.nodes if node.provider is None]) for each, _ in reversed(counted)),
        key=lambda entry: len(cpu_nodes(entry[0])) + len(entry[1]),
    )
    unlisted = [each.name for each, _ in counted if each.subgraphs is not None and not each.subgraphs.listed]
    unsure = f"unknown in {unsure_in.name}: no source names a provider for {name_some(unknown)}"
    if unlisted:
        unsure = f"cannot be confirmed in {listing(unlisted)}: nodes in control-flow subgraphs are not listed"
    return Measurement(
        value=len(names),
        held=f"at most {len(names)} in a phase",
        unmet_text=f"{plural(len(names), 'node')} on {CPU} in {phase.name}: {name_some(names)}",
        most=math.inf if unlisted else len(cpu_nodes(unsure_in)) + len(unknown),
        unsure=unsure,
    )


def _count_memcpy_nodes(report: Report) -> Measurement:
    """Memcpy nodes of decode or the only phase, including control-flow subgraphs."""
    phase = main_phase(report)
    assert phase is not None
    names = [copy.name for copy in phase.copies if copy.kind == "memcpy_node"]
    inside = phase.subgraphs.copies if phase.subgraphs else 0
    count = len(names) + (inside or 0)
    named = [*names, f"{inside} in control-flow subgraphs"] if inside else names
    return Measurement(
        value=count,
        held=f"{count} in {phase.name}{f', {inside} of them in control-flow subgraphs' if inside else ''}",
        unmet_text=f"{plural(count, 'Memcpy node')} in {phase.name}: {name_some(named)}",
        most=math.inf if subgraph_copies(phase) is None else None,
        unsure=f"cannot be confirmed in {phase.name}: {NOT_ALL_SEEN}",
    )


def _count_copy_bytes(report: Report) -> Measurement:
    """Bytes copied per run of decode or the only phase; unbounded with a copy of unknown size."""
    phase = main_phase(report)
    assert phase is not None
    total = sum(copy.bytes_per_run or 0 for copy in phase.copies)
    unknown = [copy.name for copy in phase.copies if copy.bytes_per_run is None]
    if subgraph_copies(phase) != 0:
        unknown.append("copies in control-flow subgraphs")
    more = f" and {plural(len(unknown), 'copy')} of unknown size" if unknown else ""
    run = f"{plural(len(phase.copies), 'copy')} per run of {phase.file} ({phase.name})"
    return Measurement(
        value=total,
        held=f"{total:,} in {phase.name}",
        unmet_text=f"{total:,} bytes in {run}{more}",
        most=math.inf if unknown else None,
        unsure=f"cannot be confirmed in {phase.name}: the size of {plural(len(unknown), 'copy')} is unknown: "
        f"{name_some(unknown)}",
    )


def _count_unavailable(report: Report) -> Measurement:
    """Installed providers that could not start; providers missing from the build do not count."""
    lost = [entry for entry in report.chain if entry.status == "unavailable" and entry.reason != "not_in_build"]
    text = f"{plural(len(lost), 'provider')} could not start"
    named = listing(f"{entry.provider} ({entry.reason or 'no reason known'}: {entry.evidence})" for entry in lost)
    return Measurement(len(lost), held=text, unmet_text=f"{text}: {named}")


def _count_unexplained(report: Report) -> Measurement:
    """Fallbacks without a reason, in the phase with the most."""
    per_phase: dict[str, list[str]] = {}
    for entry in report.fallbacks:
        if "unexplained" in entry.codes:
            per_phase.setdefault(entry.phase, []).append(f"{entry.node} ({entry.op_type or 'unknown'})")
    none: tuple[str, list[str]] = ("all phases", [])
    phase, nodes = max(reversed(per_phase.items()), key=lambda item: len(item[1]), default=none)
    return Measurement(
        value=len(nodes),
        held=f"{len(nodes)} in {phase}",
        unmet_text=f"{plural(len(nodes), 'node')} in {phase}: {name_some(nodes)}",
    )


def is_cache_in_place(report: Report) -> Measurement:
    """1 if every state stayed in one buffer, 0 if one did not; unknown if not observed."""
    cache, held = report.cache, is_in_place(report.cache)
    if cache is None or status_of(cache) == "no_cache":
        return Measurement(value=None, held="", unmet_text="cannot be confirmed: the report has no cache")
    if held is None:
        return Measurement(value=None, held="", unmet_text=describe_cache(cache))
    moved = [entry.name for entry in cache.entries if not entry.in_place]
    return Measurement(value=float(held), held=f"{describe_cache(cache)}{f': {name_some(moved)}' if moved else ''}")


def _measure_speed(report: Report) -> Measurement:
    """Tokens per second of decode or the only phase."""
    phase = repeated_phase(report.phases)
    if phase.tokens_per_second is None:
        why = "a dry run has no times" if report.dry_run is not None else f"the report has none for {phase.name}"
        return Measurement(value=None, held="", unmet_text=f"cannot be confirmed: {why}")
    few = f", {plural(phase.steps, 'step')}: {TOO_FEW}" if too_few_steps(phase) else ""
    return Measurement(phase.tokens_per_second, f"{decimals(phase.tokens_per_second)} tokens/s in {phase.name}{few}")


def repeated_phase(phases: Sequence[Phase]) -> Phase:
    """Decode, or the only phase."""
    return next((phase for phase in phases if phase.name == "decode"), phases[-1])


MEASURES: dict[str, Callable[[Report], Measurement]] = {
    "cpu_nodes": _count_cpu_nodes,
    "memcpy_nodes": _count_memcpy_nodes,
    "copy_bytes": _count_copy_bytes,
    "unavailable": _count_unavailable,
    "unexplained": _count_unexplained,
    "cache_in_place": is_cache_in_place,
    "decode_tokens_per_second": _measure_speed,
}
