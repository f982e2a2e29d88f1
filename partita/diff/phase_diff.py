"""One phase in two reports: which node, reason and copy of one is which of the other, and what is different. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from partita.diagnosis.records import Fallback, Skipped
from partita.diagnosis.why import passed_over
from partita.diff.node_matching import (
    CopyPairs,
    Pairs,
    Unit,
    operator_of,
    pair_copies,
    pair_units,
    units,
)
from partita.diff.records import CopyChange, Figure, NodeChange, ReasonChange, Refusion
from partita.observations.records import PhaseName
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.groups import provider_of
from partita.partition_reports.node_keys import stands_for
from partita.partition_reports.records import Copy, Phase, Report

IN_A_BODY = " in a body"
"""What tells a node in a body from one of the plan that has its name."""


@dataclass(frozen=True)
class BothPhases:
    """One phase in both reports."""

    before: Phase
    after: Phase
    report_before: Report
    report_after: Report

    @property
    def name(self) -> PhaseName:
        """prefill, decode or run."""
        return self.after.name

    @cached_property
    def units_before(self) -> tuple[Unit, ...]:
        """Nodes as the file has them."""
        return units(self.before)

    @cached_property
    def units_after(self) -> tuple[Unit, ...]:
        """Nodes as the file has them."""
        return units(self.after)

    @cached_property
    def pairs(self) -> Pairs:
        """Nodes of both reports that are the same one, by their keys."""
        return pair_units(self.units_before, self.units_after)

    @cached_property
    def copy_pairs(self) -> CopyPairs:
        """Copies of both reports that are the same one, by tensor and direction."""
        return pair_copies(self.before, self.after)

    @cached_property
    def reasons_before(self) -> dict[str, Fallback]:
        """Node of the file -> why it was not on the providers preferred to its own."""
        return _reasons_by_node(self.report_before, self.before)

    @cached_property
    def reasons_after(self) -> dict[str, Fallback]:
        """Node of the file -> why it is not on the providers preferred to its own."""
        return _reasons_by_node(self.report_after, self.after)

    @property
    def alike(self) -> float:
        """Part of the larger side's nodes that both have by name."""
        return self.pairs.by_name / max(len(self.units_before), len(self.units_after), 1)

    @property
    def as_many_inside(self) -> bool:
        """As many copies were counted in control-flow subgraphs."""
        ours, theirs = (each.bodies.copies if each.bodies is not None else 0 for each in (self.before, self.after))
        return ours == theirs

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """New tokens per run, where known."""
        ours, theirs = self.before.cost, self.after.cost
        return (ours.tokens_per_run if ours else None, theirs.tokens_per_run if theirs else None)

    @property
    def tokens_differ(self) -> bool:
        """Sizes of a run cannot be compared: it has another number of tokens."""
        was, now = self.tokens
        return was is not None and now is not None and was != now

    def moved(self) -> list[NodeChange]:
        """Nodes that are on another provider."""
        return [self.moved_to(*pair) for pair in self.pairs.both if pair[0].node.provider != pair[1].node.provider]

    def moved_to(self, was: Unit, now: Unit) -> NodeChange:
        """One node in both."""
        why = self.why(now, was.node.provider)
        return NodeChange(
            phase=self.name,
            node=now.name,
            name_before=was.name if was.name != now.name and not now.added else None,
            op_type=operator_of(now, was),
            module=now.node.module,
            before=was.node.provider,
            after=now.node.provider,
            runs_in=now.node.name if now.node.name != now.name else None,
            reason=why.reason if why else None,
            evidence=why.evidence if why else "",
            remedy=why.remedy if why else "",
        )

    def why(self, unit: Unit, left: str | None = None) -> Skipped | None:
        """Why a node is not on the provider that it `left`; where that is no preferred one, on the first that could
        have taken it. None when it is on the first provider of the chain.
        """
        entry = self.reasons_after.get(unit.key)
        active = [each.provider for each in self.report_after.chain if each.status == "active"]
        return None if entry is None else entry.about(left) or entry.decisive(active)

    def placed(self, unit: Unit, change: str) -> NodeChange:
        """A node that only one report has."""
        why = self.why(unit) if change == "came" else None
        return NodeChange(
            phase=self.name,
            node=unit.name,
            op_type=operator_of(unit),
            module=unit.node.module,
            before=unit.node.provider if change == "gone" else None,
            after=unit.node.provider if change == "came" else None,
            runs_in=unit.node.name if unit.node.name != unit.name else None,
            reason=why.reason if why else None,
            evidence=why.evidence if why else "",
            remedy=why.remedy if why else "",
        )

    def fused_otherwise(self) -> Iterator[Refusion]:
        """Nodes that stayed on their provider as part of another node."""
        for was, now in self.pairs.both:
            if was.node.provider == now.node.provider and self.company(was) != self.company(now):
                yield Refusion(
                    phase=self.name,
                    node=now.name,
                    before=was.node.op_type or "unknown",
                    after=now.node.op_type or "unknown",
                )

    @cached_property
    def new_names(self) -> dict[str, str]:
        """Name before -> name now, of nodes that were matched under a different number."""
        return {was.name: now.name for was, now in self.pairs.renamed}

    @cached_property
    def name_of(self) -> dict[str, str]:
        """Key of a unit -> its name."""
        return {unit.key: unit.name for unit in (*self.units_before, *self.units_after)}

    def company(self, unit: Unit) -> frozenset[str]:
        """The nodes of the file that are run together with one; renamed ones count as one and the same."""
        return (
            frozenset(self.new_names.get(name, name) for name in stands_for(unit.node))
            if not unit.added
            else frozenset()
        )

    def reasons(self) -> Iterator[ReasonChange]:
        """Reasons that are new, gone or others, for each provider that was preferred and skipped."""
        later_key = {was.key: now.key for was, now in self.pairs.both}
        before = {later_key.get(key, key): entry for key, entry in self.reasons_before.items()}
        moved = {now.key for was, now in self.pairs.both if was.node.provider != now.node.provider}
        for key in dict.fromkeys((*before, *self.reasons_after)):
            was, now = before.get(key), self.reasons_after.get(key)
            ours, theirs = _skipped_by(self.report_before, was), _skipped_by(self.report_after, now)
            for first, second in self.compared:
                if first not in ours and second not in theirs:
                    continue
                reasons = (ours.get(first), theirs.get(second))
                change = "new" if first not in ours else "gone" if second not in theirs else "changed"
                if change != "changed" or _differ(*reasons):
                    shown = now or was
                    assert shown is not None
                    yield self.reason_change(key, shown, change, second, reasons, moved=key in moved)

    @cached_property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """Providers of the two chains of which reasons are compared: each that is in both with itself, and the two that
        are wanted most when neither is in the other chain. What one chain alone has is a change of the chain.
        """
        ours, theirs = ([entry.provider for entry in each.chain] for each in (self.report_before, self.report_after))
        both = [(name, name) for name in theirs if name in ours]
        apart = ours[:1] and theirs[:1] and ours[0] not in theirs and theirs[0] not in ours
        return ((ours[0], theirs[0]), *both) if apart else tuple(both)

    def reason_change(
        self,
        key: str,
        shown: Fallback,
        change: str,
        provider: str,
        reasons: tuple[Skipped | None, Skipped | None],
        *,
        moved: bool,
    ) -> ReasonChange:
        """One reason: why `shown` is, or was, not on `provider`."""
        was, now = reasons
        told = now or was
        return ReasonChange.model_validate(
            {
                "phase": self.name,
                "node": self.name_of.get(key, shown.node),
                "change": change,
                "before": was.reason if was else None,
                "after": now.reason if now else None,
                "provider": shown.provider,
                "moved": moved,
                "skipped": "" if provider == shown.wanted else provider,
                "evidence_kind": told.evidence_kind if told else "none",
                "evidence": told.evidence if told else "",
                "remedy": now.remedy if now else "",
            }
        )

    def copies(self) -> Iterator[CopyChange]:
        """Copies that are new, gone, or of another size."""
        for copy in self.copy_pairs.gone:
            yield self.copy_change(copy, None)
        for copy in self.copy_pairs.came:
            yield self.copy_change(None, copy)
        for was, now in self.copy_pairs.both:
            if was.bytes_per_run != now.bytes_per_run and not self.tokens_differ:
                yield self.copy_change(was, now)

    def copy_change(self, was: Copy | None, now: Copy | None) -> CopyChange:
        """What became of one copy; None when nothing did."""
        shown = now or was
        assert shown is not None
        return CopyChange(
            phase=self.name,
            change="new" if was is None else "gone" if now is None else "changed",
            kind=shown.kind,
            direction=shown.direction,
            what=shown.tensor or shown.name,
            bytes_before=was.bytes_per_run if was else None,
            bytes_after=now.bytes_per_run if now else None,
            caused_by=shown.caused_by,
        )

    def figures(self) -> Iterator[Figure]:
        """Counts, sizes and times."""
        ours, theirs = _counted(self.before), _counted(self.after)
        for name, value in ours.items():
            if name == "copy_bytes_per_run" and self.tokens_differ:
                continue
            yield self.figure(name, value, theirs[name], "counted")
        ours, theirs = _timed(self.before), _timed(self.after)
        for name, value in ours.items():
            if value is not None or theirs[name] is not None:
                yield self.figure(name, value, theirs[name], self.spread(name))

    def figure(self, name: str, was: float | None, now: float | None, spread: str) -> Figure:
        """A figure of both reports with its change."""
        ratio = now / was if was and now is not None else None
        return Figure.model_validate(
            {"phase": self.name, "name": name, "before": was, "after": now, "ratio": ratio, "spread": spread}
        )

    def spread(self, name: str) -> str:
        """Whether each run's median lies within the other run's slower steps. Only steps have a known spread."""
        ours, theirs = self.before, self.after
        if name == "host_wait_us_per_token" or min(ours.steps, theirs.steps) < 2:
            return "unknown"
        if ours.step_p50_ms is None or theirs.step_p50_ms is None or not ours.step_p95_ms or not theirs.step_p95_ms:
            return "unknown"
        within = theirs.step_p50_ms <= ours.step_p95_ms and ours.step_p50_ms <= theirs.step_p95_ms
        return "within" if within else "beyond"


def _skipped_by(report: Report, entry: Fallback | None) -> dict[str, Skipped | None]:
    """Providers of the chain that were preferred to the one a node is on -> why it is not there; None in a report that
    was written when only the first was explained.
    """
    if entry is None:
        return {}
    passed = (each.provider for each in passed_over(report.chain, entry.provider))
    return {name: entry.about(name) for name in (entry.wanted, *passed)}


def _differ(was: Skipped | None, now: Skipped | None) -> bool:
    """Whether two reasons are known and are not the same."""
    return was is not None and now is not None and was.reason != now.reason


def _reasons_by_node(report: Report, phase: Phase) -> dict[str, Fallback]:
    """Key of a unit -> why it is off the preferred provider; a node that is in no plan is known by its name, and one in
    a body that has the name of a node of the plan by both.

    A Memcpy node on the second provider of three has a reason, too, but no name that lasts: it is a copy.
    """
    memcpy = {node.name for node in phase.nodes if is_memcpy(node)}
    keys: dict[tuple[str, str], list[str]] = {}
    for unit in units(phase):
        keys.setdefault((unit.node.name, provider_of(unit.node)), []).append(unit.key)
    planned = {name for name, _ in keys}
    entries = [entry for entry in report.fallbacks if entry.phase == phase.name and entry.node not in memcpy]

    def own(entry: Fallback) -> str:
        return f"{entry.node}{IN_A_BODY}" if entry.node in planned else entry.node

    return {key: entry for entry in entries for key in keys.get((entry.node, entry.provider), [own(entry)])}


def _counted(phase: Phase) -> dict[str, float | None]:
    """Figures that are counted, not measured. Bytes are those of the main graph, which alone are known."""
    cost = phase.cost
    inside = phase.bodies.copies if phase.bodies is not None else 0
    return {
        "nodes": len(phase.nodes),
        "partitions": len(phase.partitions),
        "copies": None if inside is None else len(phase.copies) + inside,
        "copy_bytes_per_run": cost.copy_bytes_per_run if cost else None,
        "copy_bytes_per_token": cost.copy_bytes_per_token if cost else None,
    }


def _timed(phase: Phase) -> dict[str, float | None]:
    """Figures that are measured, and noisy."""
    return {
        "host_wait_us_per_token": phase.cost.host_wait_us_per_token if phase.cost else None,
        "tokens_per_second": phase.tokens_per_second,
        "step_p50_ms": phase.step_p50_ms,
    }
