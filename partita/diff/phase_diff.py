"""Comparison of one phase in two reports: nodes, reasons and copies. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from partita.diagnosis.explanation import preferred_entries
from partita.diagnosis.records import Fallback, SkippedProvider
from partita.diff.node_matching import (
    CopyPairs,
    Pairs,
    Unit,
    pair_copies,
    pair_units,
    units,
)
from partita.diff.records import CopyChange, Figure, NodeChange, ReasonChange, Refusion
from partita.observations.names import UNKNOWN
from partita.observations.records import PhaseName
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.file_nodes import added_nodes, file_counts, ran_by
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import Copy, Phase, Report

INNER_SUFFIX = " (control flow)"
"""Key suffix of a node in a control-flow subgraph that has the name of a plan node."""


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
        """File nodes of the first report."""
        return units(self.before)

    @cached_property
    def units_after(self) -> tuple[Unit, ...]:
        """File nodes of the second report."""
        return units(self.after)

    @cached_property
    def pairs(self) -> Pairs:
        """Matched nodes."""
        return pair_units(self.units_before, self.units_after)

    @cached_property
    def copy_pairs(self) -> CopyPairs:
        """Matched copies."""
        return pair_copies(self.before, self.after)

    @cached_property
    def reasons_before(self) -> dict[str, Fallback]:
        """Unit key -> its fallback in the first report."""
        return _reasons_by_node(self.report_before, self.before)

    @cached_property
    def reasons_after(self) -> dict[str, Fallback]:
        """Unit key -> its fallback in the second report."""
        return _reasons_by_node(self.report_after, self.after)

    @property
    def common_share(self) -> float:
        """Share of common node names, relative to the larger side."""
        return self.pairs.by_name / max(len(self.units_before), len(self.units_after), 1)

    @property
    def same_subgraph_copies(self) -> bool:
        """Whether both have equally many copies in control-flow subgraphs."""
        ours, theirs = (
            each.subgraphs.copies if each.subgraphs is not None else 0 for each in (self.before, self.after)
        )
        return ours == theirs

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """New tokens per run; None if unknown."""
        ours, theirs = self.before.cost, self.after.cost
        return (ours.tokens_per_run if ours else None, theirs.tokens_per_run if theirs else None)

    @property
    def tokens_differ(self) -> bool:
        """Whether the numbers of tokens per run differ, so that sizes per run are not comparable."""
        was, now = self.tokens
        return was is not None and now is not None and was != now

    def moved(self) -> list[NodeChange]:
        """Nodes that changed their provider."""
        return [self.moved_to(*pair) for pair in self.pairs.both if pair[0].node.provider != pair[1].node.provider]

    def moved_to(self, was: Unit, now: Unit) -> NodeChange:
        """Change of one matched node."""
        why = self.why(now, was.node.provider)
        return NodeChange(
            phase=self.name,
            node=now.name,
            name_before=was.name if was.name != now.name and not now.added else None,
            op_type=now.node.op_type or was.node.op_type,
            module=now.node.module,
            before=was.node.provider,
            after=now.node.provider,
            runs_in=now.runs_in,
            reason=why.reason if why else None,
            evidence=why.evidence if why else "",
            remedy=why.remedy if why else "",
        )

    def why(self, unit: Unit, left: str | None = None) -> SkippedProvider | None:
        """Why a node is not on the provider that it `left`, or else on the first active preferred provider. None if it
        is on the first provider of the chain.
        """
        entry = self.reasons_after.get(unit.key)
        active = [each.provider for each in self.report_after.chain if each.status == "active"]
        return None if entry is None else entry.about(left) or entry.decisive(active)

    def placed(self, unit: Unit, change: str) -> NodeChange:
        """Change of a node of one report only."""
        why = self.why(unit) if change == "came" else None
        return NodeChange(
            phase=self.name,
            node=unit.name,
            op_type=unit.node.op_type,
            module=unit.node.module,
            before=unit.node.provider if change == "gone" else None,
            after=unit.node.provider if change == "came" else None,
            runs_in=unit.runs_in,
            reason=why.reason if why else None,
            evidence=why.evidence if why else "",
            remedy=why.remedy if why else "",
        )

    def fused_otherwise(self) -> Iterator[Refusion]:
        """Nodes on the same provider as part of another fused node."""
        for was, now in self.pairs.both:
            if was.node.provider == now.node.provider and self.fused_with(was) != self.fused_with(now):
                yield Refusion(
                    phase=self.name,
                    node=now.name,
                    before=_operator(self.before, was),
                    after=_operator(self.after, now),
                )

    @cached_property
    def groups(self) -> dict[int, frozenset[str]]:
        """id of a file node -> file nodes of the same executed nodes, with old names replaced by new names."""
        found: dict[int, frozenset[str]] = {}
        for side, phase in ((self.units_before, self.before), (self.units_after, self.after)):
            rows = ran_by(phase)
            for unit in side:
                names = (row.name for name in unit.ran_as for row in rows.get(name, ()))
                found[id(unit.node)] = frozenset(self.new_names.get(name, name) for name in names)
        return found

    def fused_with(self, unit: Unit) -> frozenset[str]:
        """File nodes that the same executed nodes run."""
        return frozenset() if unit.added else self.groups[id(unit.node)]

    @cached_property
    def new_names(self) -> dict[str, str]:
        """Old name -> new name of nodes matched without their number."""
        return {was.name: now.name for was, now in self.pairs.renamed}

    @cached_property
    def name_of(self) -> dict[str, str]:
        """Unit key -> name."""
        return {unit.key: unit.name for unit in (*self.units_before, *self.units_after)}

    def reasons(self) -> Iterator[ReasonChange]:
        """New, removed and changed reasons for each skipped preferred provider."""
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
        """Pairs of providers whose reasons are compared: providers in both chains, and the two preferred providers if
        neither is in the other chain.
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
        reasons: tuple[SkippedProvider | None, SkippedProvider | None],
        *,
        moved: bool,
    ) -> ReasonChange:
        """Change of one reason of `shown` for `provider`."""
        was, now = reasons
        reason = now or was
        return ReasonChange.model_validate(
            {
                "phase": self.name,
                "node": self.name_of.get(key, shown.node),
                "change": change,
                "before": was.reason if was else None,
                "after": now.reason if now else None,
                "provider": shown.provider,
                "moved": moved,
                "skipped": "" if provider == shown.preferred_provider else provider,
                "evidence_kind": reason.evidence_kind if reason else "none",
                "evidence": reason.evidence if reason else "",
                "remedy": now.remedy if now else "",
            }
        )

    def copies(self) -> Iterator[CopyChange]:
        """New, removed and resized copies."""
        for copy in self.copy_pairs.gone:
            yield self.copy_change(copy, None)
        for copy in self.copy_pairs.came:
            yield self.copy_change(None, copy)
        for was, now in self.copy_pairs.both:
            if was.bytes_per_run != now.bytes_per_run and not self.tokens_differ:
                yield self.copy_change(was, now)

    def copy_change(self, was: Copy | None, now: Copy | None) -> CopyChange:
        """Change of one copy."""
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
        """A figure of both reports."""
        ratio = now / was if was and now is not None else None
        return Figure.model_validate(
            {"phase": self.name, "name": name, "before": was, "after": now, "ratio": ratio, "spread": spread}
        )

    def spread(self, name: str) -> str:
        """Whether each run's median step time is at most the other run's p95; unknown for other figures."""
        ours, theirs = self.before, self.after
        if name == "host_wait_us_per_token" or min(ours.steps, theirs.steps) < 2:
            return "unknown"
        if ours.step_p50_ms is None or theirs.step_p50_ms is None or not ours.step_p95_ms or not theirs.step_p95_ms:
            return "unknown"
        is_within = theirs.step_p50_ms <= ours.step_p95_ms and ours.step_p50_ms <= theirs.step_p95_ms
        return "within" if is_within else "beyond"


def _operator(phase: Phase, unit: Unit) -> str:
    """Operators of the executed nodes of a unit."""
    found = dict.fromkeys(node.op_type or UNKNOWN for node in phase.nodes if node.name in unit.ran_as)
    return ", ".join(found) or UNKNOWN


def _skipped_by(report: Report, entry: Fallback | None) -> dict[str, SkippedProvider | None]:
    """Skipped preferred provider -> reason; None in older reports, which explain the first provider only."""
    if entry is None:
        return {}
    passed = (each.provider for each in preferred_entries(report.chain, entry.provider))
    return {name: entry.about(name) for name in (entry.preferred_provider, *passed)}


def _differ(was: SkippedProvider | None, now: SkippedProvider | None) -> bool:
    """Whether two known reasons differ."""
    return was is not None and now is not None and was.reason != now.reason


def _reasons_by_node(report: Report, phase: Phase) -> dict[str, Fallback]:
    """Unit key -> fallback. The key of a node outside the plan is its name; in a control-flow subgraph with the name of
    a plan node, its name with a suffix. Memcpy nodes are excluded.
    """
    memcpy = {node.name for node in phase.nodes if is_memcpy(node)}
    providers = {node.name: provider_of(node) for node in phase.nodes}
    keys: dict[tuple[str, str], list[str]] = {}
    for unit in units(phase):
        for name in unit.ran_as:
            keys.setdefault((name, providers.get(name, provider_of(unit.node))), []).append(unit.key)
    planned = {name for name, _ in keys}
    entries = [entry for entry in report.fallbacks if entry.phase == phase.name and entry.node not in memcpy]

    def own(entry: Fallback) -> str:
        return f"{entry.node}{INNER_SUFFIX}" if entry.node in planned else entry.node

    return {key: entry for entry in entries for key in keys.get((entry.node, entry.provider), [own(entry)])}


def _counted(phase: Phase) -> dict[str, float | None]:
    """Counted figures. Bytes cover the main graph only."""
    cost = phase.cost
    inside = phase.subgraphs.copies if phase.subgraphs is not None else 0
    return {
        "nodes": file_counts(phase).total(),
        "added": added_nodes(phase),
        "partitions": len(phase.partitions),
        "copies": None if inside is None else len(phase.copies) + inside,
        "copy_bytes_per_run": cost.copy_bytes_per_run if cost else None,
        "copy_bytes_per_token": cost.copy_bytes_per_token if cost else None,
    }


def _timed(phase: Phase) -> dict[str, float | None]:
    """Measured times."""
    return {
        "host_wait_us_per_token": phase.cost.host_wait_us_per_token if phase.cost else None,
        "tokens_per_second": phase.tokens_per_second,
        "step_p50_ms": phase.step_p50_ms,
    }
