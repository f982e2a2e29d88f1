"""Names the kernel that ran each node, from the rows of its provider and the facts of the session. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.records import KernelPath
from partita.diagnosis.session_index import SessionIndex
from partita.diagnosis.sources import PREFIX
from partita.diagnosis.steps import Situation
from partita.observations.codes import EvidenceKind
from partita.observations.facts import NodeEvent, NodeProbe, ProviderFacts
from partita.observations.grouping import grouped
from partita.observations.names import UNKNOWN
from partita.observations.patterns import ABSENT, KernelRow
from partita.observations.records import PackageFacts
from partita.observations.text_format import decimals

IN_COMPILED = "the provider compiles nodes and does not report their kernels"
NO_EVIDENCE = "neither the log and the profile nor a rule of the provider names the kernel"
NO_ROW = KernelRow((), UNKNOWN, "")
"""Stands for an unknown path."""
FASTER = 1.25
"""Ratio of times from which a change makes a node faster."""


def find_paths(
    index: SessionIndex, phase: str, package: PackageFacts | None = None
) -> Iterator[tuple[KernelPath, KernelRow]]:
    """The path of each executed node whose provider has rows for its operator, without times, and its row.

    `package`: the package that ran, for the remedies.
    """
    blanks = {**Situation(package, None, ()).blanks("", ""), "out": f"{package.name}-fast" if package else "OUT"}
    runs = {window.run for window in index.facts.runs if window.phase == phase}
    events = grouped((event for event in index.events if event.run in runs), lambda event: event.name)
    for name in index.order:
        provider, operator = index.provider(name), index.op_type(name)
        known = index.facts.of(provider) if provider is not None else ProviderFacts()
        rows = [row for row in known.kernels if operator in row.operators]
        if provider is None or not (rows or operator == COMPILED):
            continue
        facts = _facts_of(index, name, events.get(name, ()))
        programs = dict.fromkeys(each for event in events.get(name, ()) for each in event.programs)
        row, kind, evidence = _find(name, rows, facts, [*programs], index.facts.run_log.get(phase))
        if row is NO_ROW and operator != COMPILED and all(row.unknown for row in rows):
            continue
        if kind == "derived" and name in known.probes:
            kind, evidence = _with_times(evidence, known.probes[name])
        path = KernelPath.copy_of(
            row,
            phase=phase,
            node=name,
            op_type=operator,
            provider=provider,
            is_slow=bool(row.cause),
            evidence_kind=kind,
            evidence=IN_COMPILED if operator == COMPILED else evidence,
            remedy=str(row.remedy.filled(**blanks)) if row.remedy is not None else "",
            unknown=row.unknown.format(**facts),
            module=index.module(name),
            host_us_per_run=None,
            time_share=None,
        )
        yield path, row


def _find(
    name: str,
    rows: Sequence[KernelRow],
    facts: Mapping[str, str],
    programs: Sequence[str],
    lines: Sequence[str] | None,
) -> tuple[KernelRow, EvidenceKind, str]:
    """The first row that fits a node, and its evidence. `lines`: log of a run; None if it was not captured."""
    for row in rows:
        if not row.fits(facts):
            continue
        if row.program and any(re.search(row.program, each) for each in programs):
            return row, "logged", f"programs in the profile: {', '.join(programs)}"
        line = next((line for line in lines or () if row.log and _is_about(row, line, name)), None)
        if line is not None:
            return row, "logged", PREFIX.sub("", line).strip()
        if not row.names_node and not (row.log and lines is not None):
            read = ", ".join(f"{fact}={facts.get(fact, ABSENT) or 'none'}" for fact in row.when)
            return row, "derived", f"{read or 'always'} ({row.source})"
    return NO_ROW, "none", NO_EVIDENCE


def _with_times(evidence: str, probe: NodeProbe) -> tuple[EvidenceKind, str]:
    """Derived evidence with the times of one-node sessions, which replace it if the change of its row is faster."""
    known = [run.seconds for run in probe.variants if run.seconds]
    if len(known) < 2:
        return "derived", evidence
    text = ", ".join(f"{decimals(run.seconds, 1e3)} ms {run.change or 'unchanged'}" for run in probe.variants)
    if known[0] < FASTER * known[1]:
        return "derived", f"{evidence}; in one-node sessions the change is not faster: {text}"
    return "probed", f"time of one-node sessions: {text}"


def _is_about(row: KernelRow, line: str, name: str) -> bool:
    """Whether a log line matches a row, and names the node if the row requires it."""
    found = re.search(row.log, line)
    return found is not None and found.groupdict().get("node", name) == name


def _facts_of(index: SessionIndex, name: str, events: Sequence[NodeEvent]) -> dict[str, str]:
    """The facts of one executed node, in the words of `KernelRow`."""
    optimised = index.optimised.nodes.get(name) if index.optimised is not None else None
    node, settings = optimised or index.file_nodes.get(name), index.facts.cpu
    facts = dict(node.form) if node is not None else {}
    if node is not None and node.domain:
        facts["domain"] = node.domain
    made = [shape.partition("[")[0] for event in events[-1:] for shape in event.output_shapes]
    facts |= {f"output{place}": dtype for place, dtype in enumerate(made)}
    facts["prefix"] = name.partition("_")[0]
    if index.is_added(name):
        facts["added"] = "yes"
    if settings is not None and settings.attention is not None:
        facts["attention"] = settings.attention.path
    if settings is not None and settings.integer_unit:
        facts["integer_unit"] = settings.integer_unit
    return facts
