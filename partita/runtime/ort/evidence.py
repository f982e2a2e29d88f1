"""Reads what ONNX Runtime leaves behind about a session: the plan file and the profile. Pure functions of text.

The formats are ONNX Runtime's own and undocumented; both were found by experiment (version 1.31.1). What is missing
becomes None or empty, never a guess.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from partita import dtypes
from partita.observations.facts import NodeEvent, RunWindow

NODE_SUFFIX = "_kernel_time"
EVENT_NAME = re.compile(r'("name"\s*:\s*")(.*?)("\s*,\s*"args"\s*:\s*\{)', re.DOTALL)
"""The name in an event of the profile, up to what follows it."""
CONTROL = re.compile(r"[\x00-\x1f]")


def parse_plan(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Node names per stream of a plan file; None when it is not one.

    Of a graph in which no node is left ONNX Runtime writes the kind of plan alone, without streams: an empty plan.
    """
    try:
        plan = json.loads(text)
        streams = plan["streams"] if "streams" in plan or "devices" in plan or "type" not in plan else ()
        return tuple(tuple(str(name) for name in stream) for stream in streams)
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def parse_plan_devices(text: str) -> tuple[str, ...] | None:
    """Kind of device per stream of a plan file, as ONNX Runtime numbers them: 0 is the CPU; None when it has none."""
    try:
        return tuple(str(device) for device in json.loads(text)["devices"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def parse_profile(text: str, runs: Sequence[tuple[str, int]]) -> tuple[tuple[NodeEvent, ...], tuple[RunWindow, ...]]:
    """Node executions and run windows of a profile.

    Both empty when it cannot be read. `runs` says phase and new tokens per row of each session run, in the order of the
    `model_run` events. A run that the profile has and `runs` has not (one that failed) is left out, with its nodes.
    """
    entries = _profile_entries(text)
    timed = sorted((e for e in entries if e.get("name") == "model_run"), key=lambda e: int(e["ts"]))
    windows = tuple(
        RunWindow(run=index, phase=phase, tokens=tokens, start_us=int(entry["ts"]), host_us=int(entry["dur"]))
        for index, (entry, (phase, tokens)) in enumerate(zip(timed, runs, strict=False))
    )
    nodes = [e for e in entries if e.get("cat") == "Node" and str(e.get("name", "")).endswith(NODE_SUFFIX)]
    return _node_events(sorted(nodes, key=lambda e: int(e["ts"])), windows), windows


def _profile_entries(text: str) -> list[dict[str, Any]]:
    """Events of a profile; none when it is not one.

    ONNX Runtime 1.27 and older writes names as they are, with their quotes, backslashes and newlines. A backslash can
    look like an escape then, but a node that is opened has no control character in its name.
    """
    entries = _json_list(text)
    if entries is None or any(CONTROL.search(str(entry.get("name"))) for entry in entries):
        entries = _json_list(EVENT_NAME.sub(_escaped, text)) or entries
    return entries or []


def _json_list(text: str) -> list[dict[str, Any]] | None:
    """The objects in a JSON list; None when the text is none."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError:
        return None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else None


def _escaped(event: re.Match[str]) -> str:
    """The name of an event as JSON writes it."""
    return f"{event[1]}{json.dumps(event[2])[1:-1]}{event[3]}"


def unread_profile(steps: int, windows: Sequence[RunWindow]) -> tuple[str, ...]:
    """A sentence when the profile of runs that worked told nothing of them."""
    if not steps or windows:
        return ()
    return ("the profile that ONNX Runtime wrote cannot be read, so times and copies between nodes are unknown",)


def _node_events(nodes: Sequence[dict[str, Any]], windows: Sequence[RunWindow]) -> tuple[NodeEvent, ...]:
    """Events in order of time, each in the run during which it began."""
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
    return NodeEvent(
        run=run,
        order=order,
        name=str(entry["name"]).removesuffix(NODE_SUFFIX),
        op_type=str(arguments.get("op_name", "")),
        provider=str(arguments.get("provider", "")),
        start_us=int(entry["ts"]),
        host_us=int(entry["dur"]),
        output_bytes=int(arguments.get("output_size", 0)),
        output_shapes=tuple(_shape_text(tensor) for tensor in arguments.get("output_type_shape", ())),
    )


def _shape_text(tensor: Mapping[str, Sequence[int]]) -> str:
    """`{"float": [1, 12]}` as float32[1,12]."""
    parts = ((dtypes.usual(dtype), ",".join(str(size) for size in shape)) for dtype, shape in tensor.items())
    return ", ".join(f"{dtype}[{shape}]" for dtype, shape in parts)
