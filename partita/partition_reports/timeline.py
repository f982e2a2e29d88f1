"""Timeline of the observed runs on the host's clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from partita.diagnosis.session_index import SessionIndex
from partita.partition_reports.records import TimelineRun


def find_timeline(indexes: Sequence[SessionIndex]) -> tuple[TimelineRun, ...]:
    """Every observed run with its nodes; nodes in control-flow subgraphs are part of their control-flow node."""
    return tuple(run for index in indexes for run in _session_runs(index))


def _session_runs(index: SessionIndex) -> list[TimelineRun]:
    positions = {name: position for position, name in enumerate(index.order)}
    events: dict[int, list[tuple[int, int, int]]] = {}
    starts = {window.run: window.start_us for window in index.facts.runs}
    for event in index.events:
        if event.name in positions and event.run in starts:
            entry = (positions[event.name], event.start_us - starts[event.run], event.host_us)
            events.setdefault(event.run, []).append(entry)
    return [
        TimelineRun.taken_from(window, file=index.facts.file, events=tuple(events.get(window.run, ())))
        for window in sorted(index.facts.runs, key=lambda window: window.run)
    ]
