"""The observation window as a trace in the Trace Event Format, for Perfetto or chrome://tracing.

Each ONNX file is a process, because files have separate clocks. Its tracks are session runs, each provider, and copies;
overlapping nodes use additional tracks. Times are host times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from partita.diagnosis.records import Fallback
from partita.errors import ReportError
from partita.observations.text_format import short_provider
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.groups import provider_of
from partita.partition_reports.outcome import fallbacks_of
from partita.partition_reports.records import Copy, NodePlacement, Report, TimelineRun
from partita.partition_reports.render.view import View
from partita.partition_reports.sections.shared import runtime_name
from partita.partition_reports.verdict import give_verdict

RUNS, COPIES, UNKNOWN = "session runs", "copies", "unknown provider"
Event = dict[str, Any]


def to_text(report: Report) -> str:
    """The trace as ASCII JSON, one event per line. Raises ReportError if the report has no timeline."""
    trace = _make_trace(report)
    # One event per line: searchable, and ten times shorter than indented JSON.
    events = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
    head = json.dumps(trace)[:-1]
    return f'{head}, "traceEvents": [\n{events}\n]}}\n'


def _make_trace(report: Report) -> dict[str, Any]:
    """The trace as JSON object."""
    if not report.timeline:
        raise ReportError(f"the report has no timeline for a trace: {_why_none(report)}")
    files = list(dict.fromkeys(run.file for run in report.timeline))
    events = [event for number, file in enumerate(files, 1) for event in _file_events(report, file, number)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "verdict": give_verdict(report),
            "created": report.created,
            "partita": report.partita_version,
            "onnxruntime": runtime_name(report.environment),
            "clock": "host time around each kernel, which is not device time; every file has a separate clock",
        },
        "traceEvents": events,
    }


def _why_none(report: Report) -> str:
    """Why there is no timeline."""
    if report.dry_run is not None:
        return "a dry run has no times"
    return "an older Partita wrote it, or no run was profiled; write it again with `report`"


@dataclass
class Lanes:
    """Tracks of one name; a slice goes to the first free track."""

    name: str
    rank: int
    ends: list[int] = field(default_factory=list)

    def take(self, start: int, end: int) -> int:
        """The lane for a slice, 0-based."""
        for number, busy_until in enumerate(self.ends):
            if busy_until <= start:
                self.ends[number] = end
                return number
        self.ends.append(end)
        return len(self.ends) - 1


def _file_events(report: Report, file: str, pid: int) -> Iterator[Event]:
    """Metadata, then the slices of all runs of one file in start order."""
    tracks = {name: Lanes(name, rank) for rank, name in enumerate(_track_names(report))}
    slices = []
    for run in report.timeline:
        if run.file == file:
            slices += [_run_slice(run), *_node_slices(report, run)]
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    for event in slices:
        name = event.pop("track")
        lanes = tracks.setdefault(name, Lanes(name, len(tracks)))
        event["pid"], event["tid"] = pid, _track_id(lanes.rank, lanes.take(event["ts"], event["ts"] + event["dur"]))
    yield _metadata("process_name", pid, 0, name=file)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for lanes in tracks.values():
        for lane in range(len(lanes.ends)):
            tid = _track_id(lanes.rank, lane)
            yield _metadata("thread_name", pid, tid, name=lanes.name if not lane else f"{lanes.name} ({lane + 1})")
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
    yield from slices


def _track_names(report: Report) -> list[str]:
    """Tracks in display order: runs, providers of the chain, copies."""
    return [RUNS, *dict.fromkeys(short_provider(entry.provider) for entry in report.chain), COPIES]


def _track_id(rank: int, lane: int) -> int:
    """Thread id of a lane; 0 is reserved for the process."""
    return 1000 * rank + lane + 1


def _metadata(kind: str, pid: int, tid: int, **args: object) -> Event:
    """A metadata event: name or sort index of a process or track."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _run_slice(run: TimelineRun) -> Event:
    """One session run. The caller removes `track`."""
    tokens = f", {run.tokens} new token{'s' if run.tokens != 1 else ''} per row" if run.tokens else ""
    return {
        "name": f"{run.phase} run {run.run}{tokens}",
        "cat": "run",
        "ph": "X",
        "ts": run.start_us,
        "dur": max(run.host_us, 0),
        "args": {"phase": run.phase, "run": run.run, "new_tokens_per_row": run.tokens, "nodes": len(run.events)},
        "track": RUNS,
    }


def _node_slices(report: Report, run: TimelineRun) -> Iterator[Event]:
    """The nodes of one run."""
    phase = next((phase for phase in report.phases if phase.name == run.phase), None)
    nodes = {node.position: node for node in phase.nodes} if phase is not None else {}
    reasons = {(entry.node, entry.provider): entry for entry in fallbacks_of(report) if entry.phase == run.phase}
    copies = {copy.name: copy for copy in phase.copies if copy.kind == "memcpy_node"} if phase is not None else {}
    for position, start_us, host_us in run.events:
        node = nodes.get(position)
        yield {
            "name": (node.op_type or node.name) if node is not None else f"node {position}",
            "cat": _category(node),
            "ph": "X",
            "ts": run.start_us + start_us,
            "dur": max(host_us, 0),
            "args": {"position": position, "phase": run.phase, "run": run.run, **_about(node, reasons, copies)},
            "track": _track_of(node),
        }


def _category(node: NodePlacement | None) -> str:
    """Category of a slice, for filters."""
    return "copy" if node is not None and is_memcpy(node) else "node"


def _track_of(node: NodePlacement | None) -> str:
    """Track of a node: copies, or its provider."""
    if node is None or node.provider is None:
        return UNKNOWN
    return COPIES if is_memcpy(node) else short_provider(node.provider)


def _about(
    node: NodePlacement | None, reasons: dict[tuple[str, str], Fallback], copies: dict[str, Copy]
) -> dict[str, object]:
    """Known details of a selected slice."""
    if node is None:
        return {}
    facts: dict[str, object] = {
        "node": node.name,
        "op": node.op_type,
        "provider": node.provider,
        "module": node.module,
        "layer": node.layer,
        "output_bytes_in_the_last_run": node.output_bytes,
        "stands_for": list(node.replaces) or None,
    }
    why, copy = reasons.get((node.name, provider_of(node))), copies.get(node.name)
    if why is not None:
        facts |= {"wanted": why.wanted, "reason": why.reason, "evidence": why.evidence}
        facts["not_on_either"] = {
            each.provider: {"reason": each.reason, "evidence": each.evidence} for each in why.skipped
        } or None
    if copy is not None:
        facts |= {"tensor": copy.tensor, "direction": copy.direction, "bytes": copy.bytes_per_run}
        facts |= {"for": list(copy.caused_by) or None}
    return {name: value for name, value in facts.items() if value is not None}


VIEW = View(
    "trace",
    ".json",
    "the observation window for Perfetto or chrome://tracing",
    to_text,
    hint="open it in ui.perfetto.dev or chrome://tracing",
)
