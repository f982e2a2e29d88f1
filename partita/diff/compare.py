"""Comparison of two reports: nodes, reasons, copies, versions and cost. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diff.context_diff import changes_around
from partita.diff.headline import headline
from partita.diff.phase_diff import BothPhases
from partita.diff.records import ReportDiff, Side
from partita.observations.text_format import listing, plural
from partita.partition_reports.outcome import TOO_FEW, failure_of, is_known, too_few_steps
from partita.partition_reports.records import Report

RELATED = 0.5
"""Minimum share of common node names, relative to the larger report, for reports of one model."""


def compare(before: Report, after: Report, *, names: tuple[str, str] = ("A", "B")) -> ReportDiff:
    """Differences of `after` from `before`. `names`: names of the two reports."""
    phases = list(_common_phases(before, after))
    moved = tuple(change for both in phases for change in both.moved())
    came = tuple(both.placed(unit, "came") for both in phases for unit in both.pairs.came)
    gone = tuple(both.placed(unit, "gone") for both in phases for unit in both.pairs.gone)
    reasons = tuple(change for both in phases for change in both.reasons())
    copies = tuple(change for both in phases for change in both.copies())
    diff = ReportDiff(
        headline="",
        before=_side(before, names[0]),
        after=_side(after, names[1]),
        unrelated=_unrelated_reason(before, after, phases, names),
        same=not (moved or came or gone or reasons or copies)
        and all(both.same_subgraph_copies for both in phases)
        and _same_phases(before, after)
        and (failure_of(before) is None) is (failure_of(after) is None),
        changes=changes_around(before, after),
        moved=moved,
        came=came,
        gone=gone,
        renamed=tuple(both.moved_to(*pair) for both in phases for pair in both.pairs.renamed),
        fused_otherwise=tuple(change for both in phases for change in both.fused_otherwise()),
        reasons=reasons,
        copies=copies,
        figures=tuple(figure for both in phases for figure in both.figures()),
        notes=tuple(_notes(before, after, phases)),
    )
    return diff.model_copy(update={"headline": headline(diff)})


def _side(report: Report, name: str) -> Side:
    """Summary of one report."""
    package, model = report.package, report.model
    what = package.name if package is not None else model.file if model is not None else "unknown"
    dry = " (dry run)" if report.dry_run is not None else ""
    return Side(
        name=name,
        created=report.created,
        what=f"{what}, {report.request.verb}{dry}",
        onnxruntime=report.environment.onnxruntime_version,
        chain=tuple(entry.provider for entry in report.chain),
        failed=failure_of(report),
    )


def _same_phases(before: Report, after: Report) -> bool:
    """Whether both have the same phases."""
    return [phase.name for phase in before.phases] == [phase.name for phase in after.phases]


def _unrelated_reason(before: Report, after: Report, phases: list[BothPhases], names: tuple[str, str]) -> str:
    """Why the reports are not comparable; empty if they are."""
    for name, report in zip(names, (before, after), strict=True):
        if not any(map(is_known, report.phases)):
            return f"{name} has no node in any phase"
    if not phases:
        ours, theirs = (listing(phase.name for phase in report.phases) for report in (before, after))
        return f"they have no phase in common: {ours} in {names[0]}, {theirs} in {names[1]}"
    best = max(phases, key=lambda both: both.common_share)
    largest = max(len(best.units_before), len(best.units_after))
    if best.common_share >= RELATED or not largest or _same_file(before, after):
        return ""
    share = f"{best.pairs.by_name} of {plural(largest, 'node')} in {best.name}"
    return f"only {share} have the same name in both reports, so they are of different models"


def _same_file(before: Report, after: Report) -> bool:
    """Whether both ran the same package or ONNX file."""
    if before.package is not None and after.package is not None:
        return before.package.manifest_sha256 == after.package.manifest_sha256
    return before.model is not None and after.model is not None and before.model.sha256 == after.model.sha256


def _common_phases(before: Report, after: Report) -> Iterator[BothPhases]:
    later = {phase.name: phase for phase in after.phases}
    for phase in before.phases:
        if phase.name in later:
            yield BothPhases(phase, later[phase.name], before, after)


def _notes(before: Report, after: Report, phases: list[BothPhases]) -> Iterator[str]:
    """Caveats about the figures."""
    for letter, report in (("A", before), ("B", after)):
        if (why := failure_of(report)) is not None:
            yield f"the run of {letter} failed, so it does not show that its nodes run: {why}"
    for both in phases:
        if too_few_steps(both.before) or too_few_steps(both.after):
            yield f"{both.name}: {plural(both.before.steps, 'step')} in A and {both.after.steps:,} in B: {TOO_FEW}"
        if both.tokens_differ:
            was, now = both.tokens
            yield (f"{both.name}: a run has {was} new tokens in A and {now} in B, so sizes per run are not compared")
    if before.dry_run is not None or after.dry_run is not None:
        yield "times are not compared, because a dry run has none"
        return
    if before.environment.cpu != after.environment.cpu:
        yield "times are not comparable, because the runs were on different processors"
    yield (
        "times are from one run each and vary by some percent, more on a busy machine; repeat both runs before you "
        "rely on a ratio"
    )
