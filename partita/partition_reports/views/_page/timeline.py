"""The observed runs as pictures: a track per provider, with hatched Memcpy nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.observations.text_format import decimals, plural
from partita.partition_reports.outcome import main_phase
from partita.partition_reports.records import NodePlacement, Phase, Report, TimelineRun
from partita.partition_reports.sections.anchors import node_anchors, node_groups
from partita.partition_reports.sections.model import Table
from partita.partition_reports.sections.observed_run import Event, ObservedRun, host_time, longest, tell
from partita.partition_reports.sections.shared import is_copy
from partita.partition_reports.views._page.marks import Mark, find_marks

MOST_RUNS = 12
"""Maximum drawn runs."""
TICKS = 5
TRACK_HEIGHT = 30
AXIS_HEIGHT = 20


@dataclass(frozen=True, slots=True)
class CopyBox:
    """A Memcpy node, in percent of the run."""

    left: str
    width: str


@dataclass(frozen=True, slots=True)
class Track:
    """The nodes of one provider in a run."""

    mark: Mark
    top: int
    path: str
    """SVG path with a box per node: start and width in microseconds."""
    positions: str
    """Positions of the path's nodes, in its order: `0-14,17`."""
    copies: tuple[CopyBox, ...]
    copy_path: str
    copy_positions: str


@dataclass(frozen=True, slots=True)
class RunPicture:
    """Picture of a session run."""

    anchor: str
    title: str
    told: str
    """Summary in a sentence."""
    span_us: int
    height: int
    group: str
    """Prefix of the anchors of this phase's node rows."""
    tracks: tuple[Track, ...]
    ticks: tuple[tuple[str, str], ...]
    """Position in percent, and text."""
    table: Table
    slowest: Table
    open: bool
    """Whether it is expanded: one run of decode or the only phase."""


def draw_runs(report: Report) -> tuple[RunPicture, ...]:
    """The runs of the timeline, in order, up to MOST_RUNS."""
    phases = {(phase.name, phase.file): phase for phase in report.phases}
    drawn = [run for run in report.timeline[:MOST_RUNS] if (run.phase, run.file) in phases and run.events]
    main = main_phase(report)
    shown = next((run for run in reversed(drawn) if main is None or run.phase == main.name), None)
    counts: dict[str, int] = {}
    pictures: list[RunPicture] = []
    for run in drawn:
        counts[run.phase] = counts.get(run.phase, 0) + 1
        artist = Artist(report, phases[run.phase, run.file])
        pictures.append(artist.draw(run, counts[run.phase], len(pictures), is_open=run is shown))
    return tuple(pictures)


def why_none(report: Report) -> str:
    """Why there is no timeline."""
    if report.dry_run is not None:
        return f"A dry run has no times, because no {report.dry_run.device_name} was used."
    if not any(phase.observed_runs for phase in report.phases):
        return "No run was profiled, so node times are unknown."
    return "This report has no timeline."


class Artist:
    """Draws the runs of one phase."""

    def __init__(self, report: Report, phase: Phase) -> None:
        self.report, self.marks = report, find_marks(report)
        self.anchors = node_anchors(report)
        self.phase = phase
        self.nodes: dict[int, NodePlacement] = {node.position: node for node in phase.nodes}

    def draw(self, run: TimelineRun, number: int, index: int, *, is_open: bool) -> RunPicture:
        """One run. `number`: within the phase; `index`: of all runs."""
        observed = ObservedRun(self.phase, run, {name: mark.label for name, mark in self.marks.items()})
        span = observed.span_us
        tracks = tuple(
            self.track(self.marks[name], events, row, span)
            for row, (name, events) in enumerate(observed.by_provider().items())
        )
        return RunPicture(
            anchor=f"run{index}",
            title=f"{self.phase.name}, run {number}" + (f", {plural(run.tokens, 'token')}" if run.tokens else ""),
            told=tell(observed),
            span_us=span,
            height=len(tracks) * TRACK_HEIGHT + AXIS_HEIGHT,
            group=node_groups(self.report)[self.phase.name],
            tracks=tracks,
            ticks=tuple(
                (_percents(part, TICKS - 1), f"{decimals(span * part / (TICKS - 1), 1e-3)} ms") for part in range(TICKS)
            ),
            table=host_time(observed),
            slowest=longest(observed, self.anchors),
            open=is_open,
        )

    def track(self, mark: Mark, events: Sequence[Event], row: int, span: int) -> Track:
        """One provider in one run."""
        copies = [event for event in events if is_copy(self.nodes[event[0]])]
        others = [event for event in events if not is_copy(self.nodes[event[0]])]
        return Track(
            mark=mark,
            top=row * TRACK_HEIGHT,
            path=_boxes(others),
            positions=ranges(position for position, _, _ in others),
            copies=tuple(CopyBox(_percents(start, span), _percents(host, span)) for _, start, host in copies),
            copy_path=_boxes(copies),
            copy_positions=ranges(position for position, _, _ in copies),
        )


def _boxes(events: Iterable[Event]) -> str:
    """SVG path with one box per event, 10 high; the page's script parses start and width."""
    return "".join(f"M{start} 0h{host}v10h-{host}z" for _, start, host in events)


def _percents(part: float, whole: float) -> str:
    """A ratio as `12.5%`."""
    return f"{100 * part / whole:.3f}".rstrip("0").rstrip(".") + "%"


def ranges(numbers: Iterable[int]) -> str:
    """`0-14,17,16`: consecutive numbers as ranges, in the given order."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
