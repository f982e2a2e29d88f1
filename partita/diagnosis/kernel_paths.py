"""Names the kernel that ran each node, from the rows of its provider and the facts of the session. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.session_index import SessionIndex
from partita.diagnosis.sources import PREFIX
from partita.observations.codes import EvidenceKind
from partita.observations.facts import NodeEvent, NodeProbe, ProviderFacts
from partita.observations.names import UNKNOWN
from partita.observations.patterns import ABSENT, KernelRow
from partita.observations.text_format import decimals

IN_COMPILED = "the provider compiles nodes and does not report their kernels"
NO_EVIDENCE = "neither the log and the profile nor a rule of the provider names the kernel"
FASTER = 1.25
"""Ratio of times from which a change makes a node faster."""


@dataclass(frozen=True, slots=True)
class FoundPath:
    """The kernel path of one executed node."""

    node: str
    provider: str
    row: KernelRow | None
    """None: unknown."""
    evidence_kind: EvidenceKind
    evidence: str
    unknown: str = ""
    """A property of the kernel that no source reports."""

    @property
    def path(self) -> str:
        """Name of the path, or `unknown`."""
        return self.row.path if self.row is not None else UNKNOWN


def find_paths(index: SessionIndex, phase: str) -> Iterator[FoundPath]:
    """The path of each executed node whose provider has rows for its operator."""
    runs = {window.run for window in index.facts.runs if window.phase == phase}
    events: dict[str, list[NodeEvent]] = {}
    for event in index.events:
        if event.run in runs:
            events.setdefault(event.name, []).append(event)
    lines = index.facts.run_log.get(phase)
    for name in index.order:
        provider, operator = index.provider(name), index.op_type(name)
        known = index.facts.of(provider) if provider is not None else ProviderFacts()
        rows = [row for row in known.kernels if operator in row.operators]
        if provider is None or not (rows or operator == COMPILED):
            continue
        facts = _facts_of(index, name, events.get(name, ()))
        programs = dict.fromkeys(each for event in events.get(name, ()) for each in event.programs)
        found = _find(name, provider, rows, facts, [*programs], lines)
        if operator == COMPILED:
            yield replace(found, evidence=IN_COMPILED)
        elif found.row is not None:
            yield replace(_with_probe(found, known.probes.get(name)), unknown=found.row.unknown.format(**facts))
        elif not all(row.unknown for row in rows):
            yield found


def _find(
    name: str,
    provider: str,
    rows: Sequence[KernelRow],
    facts: Mapping[str, str],
    programs: Sequence[str],
    lines: Sequence[str] | None,
) -> FoundPath:
    """The first row that fits a node. `lines`: log of a run; None if it was not captured."""
    for row in rows:
        if not row.fits(facts):
            continue
        if row.program and any(re.search(row.program, each) for each in programs):
            return FoundPath(name, provider, row, "logged", f"programs in the profile: {', '.join(programs)}")
        line = next((line for line in lines or () if row.log and _is_about(row, line, name)), None)
        if line is not None:
            return FoundPath(name, provider, row, "logged", PREFIX.sub("", line).strip())
        if not row.names_node and not (row.log and lines is not None):
            read = ", ".join(f"{fact}={facts.get(fact, ABSENT) or 'none'}" for fact in row.when)
            return FoundPath(name, provider, row, "derived", f"{read or 'always'} ({row.source})")
    return FoundPath(name, provider, None, "none", NO_EVIDENCE)


def _with_probe(found: FoundPath, probe: NodeProbe | None) -> FoundPath:
    """A derived path with the times of one-node sessions, as evidence if the change of its row is faster."""
    times = [(run.change or "unchanged", run.seconds) for run in (probe.variants if probe is not None else ())]
    known = [seconds for _, seconds in times if seconds]
    if found.evidence_kind != "derived" or len(known) < 2:
        return found
    text = ", ".join(f"{decimals(seconds, 1e3)} ms {change}" for change, seconds in times)
    if known[0] < FASTER * known[1]:
        return replace(found, evidence=f"{found.evidence}; in one-node sessions the change is not faster: {text}")
    return replace(found, evidence_kind="probed", evidence=f"time of one-node sessions: {text}")


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
