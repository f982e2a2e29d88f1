"""Why nodes are elsewhere: by reason, then by evidence, with the experiments, the remedy and the cost of each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.partition_reports.records import Fallback, FallbackCost, Phase, PhaseName, Report, Trial
from partita.partition_reports.views._page.marks import node_anchors
from partita.partition_reports.views._page.overview import group_reasons, reason_title
from partita.partition_reports.views._page.tables import Cell, Link, Row, Table, table
from partita.partition_reports.views._placement import say_fallback_cost
from partita.partition_reports.wording import NOT_KNOWN, decimals, human_bytes, listing, plural, short_provider

NODE = "(this node)"
"""Stands for the node's own name, so that evidence that differs in nothing else is shown once."""
NUMBERS = 3
"""How many cells of a cost are numbers: time, copies, bytes."""
HARMLESS: dict[bool | None, str] = {True: "yes", False: "no", None: "not known"}


@dataclass(frozen=True, slots=True)
class Experiments:
    """What was tried on one node; alike nodes share it."""

    title: str
    table: Table


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece of evidence, and the nodes that it holds for."""

    kind: str
    evidence: str
    remedy: str
    nodes: Table
    experiments: tuple[Experiments, ...]
    unprobed: str


@dataclass(frozen=True, slots=True)
class ReasonGroup:
    """All nodes that one reason sent to one provider."""

    anchor: str
    title: str
    counts: str
    cost: str
    findings: tuple[Finding, ...]


def explain_fallbacks(report: Report) -> tuple[ReasonGroup, ...]:
    """The groups, largest first."""
    writer = Writer(report)
    return tuple(
        writer.group(number, reason, provider, entries)
        for number, ((reason, provider), entries) in enumerate(group_reasons(report.fallbacks))
    )


def stray_anchor(report: Report) -> dict[tuple[str, str], str]:
    """Phase and node -> id of its row in this section, and so whether it has one."""
    names = dict.fromkeys(entry.node for entry in report.fallbacks)
    numbers = {name: number for number, name in enumerate(names)}
    return {(entry.phase, entry.node): f"w{numbers[entry.node]}" for entry in report.fallbacks}


class Writer:
    """Writes the groups of one report."""

    def __init__(self, report: Report) -> None:
        self.phases: dict[PhaseName, Phase] = {phase.name: phase for phase in report.phases}
        positions = node_anchors(report)
        self.rows = {
            (phase.name, node.name): positions[phase.name, node.position]
            for phase in report.phases
            for node in phase.nodes
        }
        self.anchors = stray_anchor(report)
        self.used: set[str] = set()

    def group(self, number: int, reason: str, provider: str, entries: Sequence[Fallback]) -> ReasonGroup:
        """One reason."""
        by_evidence: dict[tuple[str, str, str, str], list[Fallback]] = {}
        for entry in entries:
            key = (entry.evidence_kind, without_name(entry), entry.remedy, entry.unprobed)
            by_evidence.setdefault(key, []).append(entry)
        nodes = len({entry.node for entry in entries})
        phases = listing(dict.fromkeys(entry.phase for entry in entries))
        return ReasonGroup(
            anchor=f"r{number}",
            title=reason_title(reason),
            counts=f"{plural(nodes, 'node')} in {phases}, on {short_provider(provider)}",
            cost=self.cost(entries),
            findings=tuple(self.finding(*key, members) for key, members in by_evidence.items()),
        )

    def cost(self, entries: Sequence[Fallback]) -> str:
        """What the group costs in the last phase it is in."""
        name = entries[-1].phase
        costs = [entry.cost for entry in entries if entry.cost is not None and entry.phase == name]
        if not costs or name not in self.phases:
            return "not known: these nodes are in no figure of a phase"
        return f"per run of {name}: {say_fallback_cost(costs, self.phases[name])}"

    def finding(self, kind: str, evidence: str, remedy: str, unprobed: str, members: Sequence[Fallback]) -> Finding:
        """One piece of evidence."""
        by_node: dict[str, list[Fallback]] = {}
        for entry in members:
            by_node.setdefault(entry.node, []).append(entry)
        shown = members[0].evidence if len(by_node) == 1 else evidence
        heads = ("node", "operator", "in", "source line", "#host ms", "#copies", "#copied", "harmless", "why")
        return Finding(
            kind=kind,
            evidence=shown,
            remedy=remedy,
            nodes=table("Nodes that this holds for", heads, [self.row(entries) for entries in by_node.values()]),
            experiments=tuple(list_experiments(members)),
            unprobed=unprobed,
        )

    def row(self, entries: Sequence[Fallback]) -> Row:
        """One node, with what it costs in each of its phases."""
        last = entries[-1]
        target = self.rows.get((last.phase, last.node))
        name: Cell = Link(last.node, target) if target else last.node
        anchor = self.anchors[last.phase, last.node]
        first_use = anchor not in self.used
        self.used.add(anchor)
        return Row(
            (
                name,
                last.op_type or "unknown",
                listing(dict.fromkeys(entry.phase for entry in entries)),
                last.source_line or NOT_KNOWN,
                *per_phase([(entry.phase, cost_cells(entry.cost)) for entry in entries]),
            ),
            anchor if first_use else "",
        )


def without_name(entry: Fallback) -> str:
    """The evidence with the node's own name taken out."""
    return entry.evidence.replace(entry.node, NODE) if len(entry.node) > 3 else entry.evidence


def per_phase(columns: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Cells of several phases in one: a value that they share stands alone, sentences name their phase."""
    cells = []
    for number, values in enumerate(zip(*(values for _, values in columns), strict=True)):
        told = [f"{phase}: {value}" for (phase, _), value in zip(columns, values, strict=True)]
        apart = " / ".join(values) if number < NUMBERS else "; ".join(told)
        cells.append(values[0] if len(set(values)) == 1 else apart)
    return cells


def cost_cells(cost: FallbackCost | None) -> tuple[str, str, str, str, str]:
    """Time, copies, bytes, and whether it is harmless."""
    if cost is None:
        return (NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, "not in the figures of a phase")
    size = human_bytes(cost.copy_bytes_per_run) if cost.copies else NOT_KNOWN
    return (decimals(cost.host_us_per_run, 1e-3), str(len(cost.copies)), size, HARMLESS[cost.harmless], cost.why)


def list_experiments(members: Sequence[Fallback]) -> list[Experiments]:
    """The experiments of each node; those with the same outcome are shown once."""
    alike: dict[tuple[Trial, ...], list[Fallback]] = {}
    for entry in members:
        if entry.trials:
            alike.setdefault(entry.trials, []).append(entry)
    firsts = [entries[0].node for entries in alike.values()]
    found = []
    for trials, entries in alike.items():
        nodes = list(dict.fromkeys(entry.node for entry in entries))
        more = f" and {plural(len(nodes) - 1, 'node')} like it" if len(nodes) > 1 else ""
        if firsts.count(nodes[0]) > 1:
            more += f" in {listing(dict.fromkeys(entry.phase for entry in entries))}"
        rows = [
            (
                trial.change or "as it is",
                trial.factor.replace("_", " "),
                trial.outcome.replace("_", " "),
                trial.said or NOT_KNOWN,
                "yes" if trial.cached else "no",
            )
            for trial in trials
        ]
        heads = ("changed", "kind of change", "outcome", "what was said", "known from before")
        title = f"{plural(len(trials), 'experiment')} on {nodes[0]}{more}"
        found.append(Experiments(title, table(title, heads, rows)))
    return found
