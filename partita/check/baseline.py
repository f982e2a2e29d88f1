"""Measures of a report relative to a baseline: regressions. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from partita.check.measures import NOT_ALL_SEEN, Measurement, is_cache_in_place, repeated_phase
from partita.diff.compare import compare
from partita.diff.counting import count_nodes
from partita.diff.records import CopyChange, NodeChange, ReportDiff
from partita.errors import ReportError
from partita.observations.text_format import decimals, human_bytes, listing, name_some, named_provider, plural
from partita.partition_reports.cache_state import status_of
from partita.partition_reports.outcome import preferred_of
from partita.partition_reports.records import Phase, PhaseCost, Report
from partita.partition_reports.speculation import rows_of

SAME_ROWS = 1.1
"""Maximum ratio of active rows for comparing times per token: rows share the weights that a step reads."""


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """A report, its baseline and their difference."""

    report: Report
    baseline: Report
    diff: ReportDiff

    @classmethod
    def of(cls, report: Report, baseline: Report, names: tuple[str, str]) -> BaselineComparison:
        """Compare. `names`: of the baseline and of the report. Raises ReportError for reports of different models."""
        diff = compare(baseline, report, names=names)
        if diff.unrelated:
            raise ReportError(
                f"{names[0]} cannot be a baseline for {names[1]}: {diff.unrelated}; give a report of the same model"
            )
        return cls(report, baseline, diff)

    @property
    def same_preferred(self) -> bool:
        """Whether both have the same preferred provider."""
        return preferred_of(self.report) == preferred_of(self.baseline)

    def is_lower(self, before: str | None, after: str | None) -> bool:
        """Whether provider `after` is less preferred than `before`: by a chain with both, else by their positions in
        their own chains. An unknown provider (None) is less preferred than any other.
        """
        if before is None or after is None:
            return before is not None
        now, was = ([entry.provider for entry in report.chain] for report in (self.report, self.baseline))
        for chain in (now, was):
            if before in chain and after in chain:
                return chain.index(after) > chain.index(before)
        return _rank(now, after) > _rank(was, before)


def _rank(chain: Sequence[str], provider: str) -> int:
    """Position of a provider in a chain; the end of the chain if it is missing."""
    return chain.index(provider) if provider in chain else len(chain)


def _preferred_differs(both: BaselineComparison) -> Measurement:
    """1 if the preferred provider differs."""
    if both.same_preferred:
        return Measurement(0, f"{preferred_of(both.report)} is preferred in both")
    here = preferred_of(both.report)
    return Measurement(1, f"{here} is preferred here, {preferred_of(both.baseline)} in the baseline")


def _count_lost_phases(both: BaselineComparison) -> Measurement:
    """Phases of the baseline that were not run."""
    known = {phase.name for phase in both.report.phases}
    lost = [phase.name for phase in both.baseline.phases if phase.name not in known]
    return Measurement(len(lost), "same phases" if not lost else f"{listing(lost)} missing here")


def _count_moved_nodes(both: BaselineComparison) -> Measurement:
    """Nodes that moved to a less preferred provider."""
    left: dict[str | None, list[NodeChange]] = {}
    for change in both.diff.moved:
        if both.is_lower(change.before, change.after):
            left.setdefault(change.before, []).append(change)
    if not left:
        return Measurement(0, "none moved to a less preferred provider")
    texts = []
    for name, changes in left.items():
        named = _per_node(
            (
                change.phase,
                change.node,
                f"to {named_provider(change.after)}{f': {change.reason}' if change.reason else ''}",
            )
            for change in changes
        )
        texts.append(f"{plural(count_nodes(changes), 'node')} moved off {name}: {name_some(named)}")
    return Measurement(count_nodes(change for changes in left.values() for change in changes), "; ".join(texts))


def _count_new_reasons(both: BaselineComparison) -> Measurement:
    """New fallbacks: nodes off a provider that they, or more preferred ones, ran on before, and new nodes. Changed
    reasons do not count.
    """
    added = [change for change in both.diff.reasons if change.change == "new"]
    if not added:
        return Measurement(0, "no new reasons")
    named = _per_node(
        (
            change.phase,
            change.node,
            f"{f'not on {named_provider(change.skipped)}: ' if change.skipped else ''}{change.after}",
        )
        for change in added
    )
    nodes = count_nodes(added)
    return Measurement(nodes, f"{plural(nodes, 'node')} with a new reason: {name_some(named)}")


def _per_node(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """Phase, node and text -> one text per node and text, `node (prefill and decode: text)`."""
    alike: dict[tuple[str, str], list[str]] = {}
    for phase, node, text in found:
        alike.setdefault((node, text), []).append(phase)
    return [f"{node} ({listing(phases)}: {text})" for (node, text), phases in alike.items()]


def _count_more_copies(both: BaselineComparison) -> Measurement:
    """Additional copies, in the phase with the largest increase."""
    more: dict[tuple[str, str], list[str]] = {}
    same, grown = [], 0.0
    phases = _common_phases(both)
    inside = {now.name: _subgraph_copies(now) - _subgraph_copies(was) for was, now in phases}
    unsure = [now.name for was, now in phases if _is_unsure(was, now)]
    for figure in both.diff.figures:
        was, now = figure.before, figure.after
        if figure.name != "copies" or was is None or now is None:
            continue
        if now <= was:
            same.append(f"{now:,.0f} in {figure.phase}")
            continue
        changes = [entry for entry in both.diff.copies if entry.phase == figure.phase and entry.change == "new"]
        named = [*map(_render_copy, changes)]
        named += [f"{inside[figure.phase]:,} in control-flow subgraphs"] if inside[figure.phase] > 0 else []
        text = f"{was:,.0f} in the baseline: {name_some(named)}"
        more.setdefault((f"{now:,.0f}", text), []).append(figure.phase)
        grown = max(grown, now - was)
    texts = [f"{now} in {listing(phases)}, {rest}" for (now, rest), phases in more.items()]
    return Measurement(
        value=grown,
        held="; ".join(texts or same),
        most=math.inf if unsure else None,
        unsure=f"cannot be confirmed in {listing(unsure)}: {NOT_ALL_SEEN}",
    )


def _common_phases(both: BaselineComparison) -> list[tuple[Phase, Phase]]:
    """Phases in both, of the baseline and of the report."""
    later = {phase.name: phase for phase in both.report.phases}
    return [(was, later[was.name]) for was in both.baseline.phases if was.name in later]


def _subgraph_copies(phase: Phase) -> int:
    """Counted copies in control-flow subgraphs."""
    return phase.subgraphs.copies or 0 if phase.subgraphs is not None else 0


def _is_unsure(was: Phase, now: Phase) -> bool:
    """Whether there may be additional copies in control-flow subgraphs that no source reports.

    Copies without a source count only if the baseline had none, so that a report passes against itself.
    """
    if any(phase.subgraphs is not None and phase.subgraphs.copies is None for phase in (was, now)):
        return True
    had_none = was.subgraphs is None or was.subgraphs.unseen is False
    return had_none and now.subgraphs is not None and now.subgraphs.unseen is True


def _render_copy(change: CopyChange) -> str:
    return f"{change.what} ({change.direction.replace('_', ' ')})"


def _count_more_copy_bytes(both: BaselineComparison) -> Measurement:
    """Additional copied bytes per run, in the phase with the largest increase.

    Runs with different token counts are compared per token, for no increase only.
    """
    larger, grown, known = [], 0.0, True
    phases = _common_phases(both)
    compared = {figure.phase for figure in both.diff.figures if figure.name == "copy_bytes_per_run"}
    for first, second in phases:
        if second.name not in compared and not _moves_no_more(first.cost, second.cost):
            known = False
            larger.append(
                f"cannot be confirmed in {second.name}: the number of tokens per run differs from the baseline"
            )
    more = [now.name for was, now in phases if _subgraph_copies(now) > _subgraph_copies(was) or _is_unsure(was, now)]
    for figure in both.diff.figures:
        was, now = figure.before, figure.after
        if figure.name != "copy_bytes_per_run":
            continue
        if was is None:  # some copies have an unknown size
            lost, by = _known_growth(both, figure.phase)
            known = known and not lost
            if lost:
                larger.append(f"cannot be confirmed in {figure.phase}: the size of {lost} is unknown")
            if by:
                larger.append(f"{human_bytes(by)} more in copies of known size, per run of {figure.phase}")
            grown = max(grown, by)
            continue
        if now is None or figure.phase in more:
            known = False
            larger.append(f"cannot be confirmed in {figure.phase}: the size of a copy is unknown")
        elif now > was:
            grown = max(grown, now - was)
            sizes = f"{human_bytes(round(now))}, {human_bytes(round(was))} in the baseline"
            larger.append(f"{sizes}, per run of {figure.phase}")
    return Measurement(grown if known else None, "; ".join(larger) or "no increase in known sizes")


def _moves_no_more(was: PhaseCost | None, now: PhaseCost | None) -> bool:
    """Whether runs of different token counts copy no more: no copies, or no more bytes per token."""
    if now is not None and now.copies == 0:
        return True
    before, after = (None if cost is None else cost.copy_bytes_per_token for cost in (was, now))
    return before is not None and after is not None and after <= before


def _known_growth(both: BaselineComparison, phase: str) -> tuple[str, int]:
    """New or changed copies of unknown size, and additional bytes per run of the others."""
    changes = [entry for entry in both.diff.copies if entry.phase == phase]
    lost = [entry.what for entry in changes if entry.change != "gone" and entry.bytes_after is None]
    grown = sum(
        (entry.bytes_after or 0) - (entry.bytes_before or 0)
        for entry in changes
        if entry.change == "new" or None not in (entry.bytes_before, entry.bytes_after)
    )
    return listing(dict.fromkeys(lost)), max(grown, 0)


def _lost_cache(both: BaselineComparison) -> Measurement:
    """1 if the cache stayed in place in the baseline and does not now."""
    was, now = is_cache_in_place(both.baseline), is_cache_in_place(both.report)
    if was.value == 0 or status_of(both.baseline.cache) == "no_cache":
        return Measurement(0, "not in place in the baseline either")
    if was.value is None:
        return Measurement(None, "", f"{was.unmet_text or was.held} in the baseline")
    return Measurement(None if now.value is None else 1 - now.value, now.held, now.unmet_text)


def _rows_at_work(report: Report, phase: Phase) -> float | None:
    """Mean number of active rows in timed decode steps, without accepted draft tokens; None without timed steps."""
    if phase.name != "decode":
        return None
    drafts = report.speculation
    tokens, steps = (phase.tokens, phase.steps) if drafts is None else (rows_of(drafts), drafts.steps)
    return tokens / steps if tokens and steps else None


def _measure_slowdown(both: BaselineComparison) -> Measurement:
    """Relative increase of the time per token: 0.1 is 10 % more."""
    first, second = (repeated_phase(entry.phases) for entry in (both.baseline, both.report))
    if both.baseline.environment.cpu != both.report.environment.cpu:
        return Measurement(None, "", "cannot be confirmed: the runs were on different processors")
    if first.name != second.name:
        return Measurement(None, "", f"cannot be confirmed: {second.name} here, {first.name} in the baseline")
    if None not in (first.profiled, second.profiled) and first.profiled is not second.profiled:
        which = "here" if second.profiled else "in the baseline"
        why = f"every step of {second.name} was profiled {which}, which slows it down; generate more tokens there"
        return Measurement(None, "", f"cannot be confirmed: {why}")
    before, here = _rows_at_work(both.baseline, first), _rows_at_work(both.report, second)
    if before is not None and here is not None and max(before, here) > SAME_ROWS * min(before, here):
        why = f"{decimals(here)} active rows per step here, {decimals(before)} in the baseline"
        return Measurement(None, "", f"cannot be confirmed: {why}")
    was, now = first.tokens_per_second, second.tokens_per_second
    if not was or not now:
        return Measurement(None, "", "cannot be confirmed: one of the reports has no speed")
    ratio = was / now
    text = f"{decimals(now)} tokens/s, {decimals(was)} in the baseline: {decimals(ratio)} times the time per token"
    return Measurement(round(ratio - 1, 12), text)


COMPARED: dict[str, Callable[[BaselineComparison], Measurement]] = {
    "wanted_other": _preferred_differs,
    "lost_phases": _count_lost_phases,
    "nodes_left": _count_moved_nodes,
    "new_reasons": _count_new_reasons,
    "more_copies": _count_more_copies,
    "more_copy_bytes": _count_more_copy_bytes,
    "lost_cache": _lost_cache,
    "slowdown": _measure_slowdown,
}


def is_of_use(field: str, both: BaselineComparison) -> bool:
    """Whether a baseline implies a check of `field`: not for nodes and reasons if its preferred provider differs, nor
    for a property that the baseline lacks.
    """
    if field in ("wanted_other", "nodes_left"):
        return both.same_preferred == (field == "nodes_left")
    return field != "lost_cache" or is_cache_in_place(both.baseline).value == 1
