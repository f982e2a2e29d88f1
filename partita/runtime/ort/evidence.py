"""Parses ONNX Runtime's plan file and profile of a session. Pure functions of text.

The formats are undocumented (checked with version 1.31.1). Missing data becomes None or empty.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from partita import dtypes
from partita.observations.facts import NodeEvent, RunWindow

NODE_SUFFIX = "_kernel_time"


def parse_plan(text: str) -> tuple[tuple[tuple[str, ...], ...] | None, tuple[str, ...] | None]:
    """Node names and the device type number (0: CPU) of each stream of a plan file; None if invalid or missing.

    For a graph without nodes, ONNX Runtime writes only the plan type, without streams: an empty plan.
    """
    try:
        plan = json.loads(text)
        streams = plan["streams"] if "streams" in plan or "devices" in plan or "type" not in plan else ()
        devices = tuple(map(str, plan["devices"])) if "devices" in plan else None
        return tuple(tuple(str(name) for name in stream) for stream in streams), devices
    except (json.JSONDecodeError, KeyError, TypeError):
        return None, None


def parse_profile(text: str, runs: Sequence[tuple[str, int]]) -> tuple[tuple[NodeEvent, ...], tuple[RunWindow, ...]]:
    """Node executions and run windows of a profile; both empty if it cannot be read.

    `runs`: phase and new tokens per row of each session run, in the order of the `model_run` events. A run that is not
    in `runs` because it failed is omitted with its nodes.
    """
    entries = _profile_entries(text)
    timed = sorted((e for e in entries if e.get("name") == "model_run"), key=lambda e: int(e["ts"]))
    windows = tuple(
        RunWindow(run=index, phase=phase, tokens=tokens, start_us=int(entry["ts"]), host_us=int(entry["dur"]))
        for index, (entry, (phase, tokens)) in enumerate(zip(timed, runs, strict=False))
    )
    nodes = [e for e in entries if e.get("cat") == "Node" and str(e.get("name", "")).endswith(NODE_SUFFIX)]
    events = _node_events(sorted(nodes, key=lambda e: int(e["ts"])), windows)
    return _with_programs(events, [str(e.get("name")) for e in entries if e.get("cat") == "Api"]), windows


def _with_programs(events: tuple[NodeEvent, ...], entries: Sequence[str]) -> tuple[NodeEvent, ...]:
    """The events with their device programs, which WebGPU lists as NODE&OPERATOR&PROGRAM in execution order.

    Unchanged if the lists do not match, e.g. after a failed run.
    """
    found: dict[int, list[str]] = {}
    at = 0
    for name, _, program in (entry.rsplit("&", 2) for entry in entries if entry.count("&") > 1):
        while at < len(events) and events[at].name != name:
            at += 1
        if at == len(events):
            return events
        found.setdefault(at, []).append(program)
    return tuple(replace(event, programs=tuple(found.get(place, ()))) for place, event in enumerate(events))


def _profile_entries(text: str) -> list[dict[str, Any]]:
    """Events of a profile; empty if invalid. ONNX Runtime up to 1.27 does not escape quotes in node names."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def unread_profile(steps: int, windows: Sequence[RunWindow]) -> tuple[str, ...]:
    """A note if the profile of successful runs contains no runs."""
    if not steps or windows:
        return ()
    return ("the profile that ONNX Runtime wrote cannot be read, so times and copies between nodes are unknown",)


def _node_events(nodes: Sequence[dict[str, Any]], windows: Sequence[RunWindow]) -> tuple[NodeEvent, ...]:
    """Events in order of time, each with the run in which it began."""
    starts = [window.start_us for window in windows]
    orders = [count() for _ in windows]
    events = []
    for entry in nodes:
        run = bisect_right(starts, int(entry["ts"])) - 1
        if run >= 0 and int(entry["ts"]) <= windows[run].start_us + windows[run].host_us:
            events.append(_node_event(entry, run, next(orders[run])))
    return tuple(events)


def _node_event(entry: Mapping[str, Any], run: int, order: int) -> NodeEvent:
    """One profile entry as a fact."""
    arguments = entry["args"]
    # `{"float": [1, 12]}` as float32[1,12]
    shapes = [
        ", ".join(f"{dtypes.usual(dtype)}[{','.join(map(str, sizes))}]" for dtype, sizes in tensor.items())
        for tensor in arguments.get("output_type_shape", ())
    ]
    return NodeEvent(
        run=run,
        order=order,
        name=str(entry["name"]).removesuffix(NODE_SUFFIX),
        op_type=str(arguments.get("op_name", "")),
        provider=str(arguments.get("provider", "")),
        start_us=int(entry["ts"]),
        host_us=int(entry["dur"]),
        output_bytes=int(arguments.get("output_size", 0)),
        output_shapes=tuple(shapes),
    )
