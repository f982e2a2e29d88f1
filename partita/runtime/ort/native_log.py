"""Captures ONNX Runtime's log lines from the file descriptors; parses them, its plan file and its profile.

ONNX Runtime writes from native code, so only the descriptors can be redirected, not sys.stderr. While it captures,
lines of other threads are captured, too. `set_default_logger_callback` of ONNX Runtime 1.32 does not replace this: it
receives neither messages of ONNX Runtime's own threads nor what provider libraries print (QNN's start, CUDA's
SdpaKernel lines), cannot restore a callback of the user's program, and does not exist in earlier versions.

The formats of plan and profile are undocumented (checked with version 1.31.1). Missing data becomes None or empty.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TextIO

from partita import dtypes, process

if TYPE_CHECKING:
    from partita.observations.facts import NodeEvent, RunWindow
    from partita.providers.base import Provider

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (?=\[[VIWEF]:onnxruntime:)")
HEAD = re.compile(r"^\[(?P<severity>[VIWEF]):onnxruntime:[^\]]*\] (?P<text>.*)", re.DOTALL)

VERBOSE, INFO, WARNING, FATAL = 0, 1, 2, 4
"""Severities of ONNX Runtime."""
_CAPTURING = threading.RLock()
"""Two concurrent redirections would restore each other's files."""


class CapturedLog:
    """Captured lines in order, complete when the capture has ended."""

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()


@contextmanager
def captured_output(descriptors: tuple[int, ...] = (1, 2)) -> Iterator[CapturedLog]:
    """Redirect file descriptors 1 and 2 to a temporary file, and return its lines at the end.

    Some providers write to descriptor 1, which is for results. The descriptors are always restored. Lines have no time
    stamps and colours. In a program that imports Partita (`process.own_process` is False), nothing is redirected.
    """
    if not process.own_process:
        yield CapturedLog()
        return
    with _CAPTURING:
        yield from _capture(descriptors)


def _capture(descriptors: tuple[int, ...]) -> Iterator[CapturedLog]:
    captured = CapturedLog()
    for descriptor in (process.STDOUT, process.STDERR):  # otherwise the file below would get this number
        process.fill(descriptor, os.O_WRONLY)
    with tempfile.TemporaryFile() as sink:
        python = _flush_streams(sys.stdout, sys.stderr)
        saved = {descriptor: os.dup(descriptor) for descriptor in descriptors}
        try:
            for descriptor in saved:
                os.dup2(sink.fileno(), descriptor)
            yield captured
        finally:
            _flush_streams(*python)
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            sink.seek(0)
            captured.lines = clean_lines(sink.read().decode("utf-8", errors="replace"))


def _flush_streams(*python: TextIO | None) -> tuple[TextIO, ...]:
    """Python streams without pending output, which must not be written to the other side of a redirection.

    A stream that cannot be flushed reports its error at its next write, or at exit.
    """
    flushed = []
    for stream in filter(None, python):
        with suppress(OSError, ValueError):  # ValueError: closed by other code
            stream.flush()
            flushed.append(stream)
    return tuple(flushed)


class RunLog:
    """The log at INFO of the first captured run of each phase of a session.

    Captured in Partita's own processes and their main thread only: in another thread the redirection could outlast a
    run that does not end.
    """

    def __init__(self) -> None:
        self.lines: dict[str, tuple[str, ...]] = {}
        self.severity = FATAL
        """Minimum severity that a run logs."""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Capture a run of a phase, and keep its lines if it is the first."""
        if not process.own_process or threading.current_thread() is not threading.main_thread():
            yield
            return
        with captured_output() as captured:
            self.severity = INFO
            try:
                yield
            finally:
                self.severity = FATAL
        self.lines.setdefault(phase, captured.lines)


def clean_lines(text: str) -> tuple[str, ...]:
    """Lines of `text` without colours, time stamps and blank lines."""
    lines = (STAMP.sub("", COLOUR.sub("", line)).rstrip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def complaints(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Error messages in these lines, without their prefixes; warnings if there is no error."""
    parsed = [match for line in lines if (match := HEAD.match(line))]
    for severity in ("F", "E", "W"):
        texts = tuple(match["text"].strip() for match in parsed if match["severity"] == severity)
        if texts:
            return texts
    return ()


def headless(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Lines without an ONNX Runtime log prefix, printed by other libraries."""
    return tuple(line.strip() for line in lines if not HEAD.match(line))


# --- plan and profile -------------------------------------------------------------------------------------------------

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
    from partita.observations.facts import RunWindow  # the command line imports this module before it needs pydantic

    try:
        entries = [entry for entry in json.loads(text) if isinstance(entry, dict)]
    except (json.JSONDecodeError, TypeError):  # ONNX Runtime up to 1.27 does not escape quotes in node names
        return (), ()
    programs = [str(entry.get("name")) for entry in entries if entry.get("cat") == "Api"]  # in order of execution
    entries.sort(key=lambda entry: int(entry.get("ts", 0)))
    timed = (entry for entry in entries if entry.get("name") == "model_run")
    windows = tuple(
        RunWindow(run=index, phase=phase, tokens=tokens, start_us=int(entry["ts"]), host_us=int(entry["dur"]))
        for index, (entry, (phase, tokens)) in enumerate(zip(timed, runs, strict=False))
    )
    nodes = (e for e in entries if e.get("cat") == "Node" and str(e.get("name", "")).endswith(NODE_SUFFIX))
    return _with_programs(tuple(_node_events(nodes, windows)), programs), windows


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


def unread_profile(steps: int, windows: Sequence[RunWindow]) -> tuple[str, ...]:
    """A note if the profile of successful runs contains no runs."""
    if not steps or windows:
        return ()
    return ("the profile that ONNX Runtime wrote cannot be read, so times and copies between nodes are unknown",)


def _node_events(nodes: Iterable[Mapping[str, Any]], windows: Sequence[RunWindow]) -> Iterator[NodeEvent]:
    """Events in order of time, each with the run in which it began."""
    from partita.observations.facts import NodeEvent

    starts, orders = [window.start_us for window in windows], [count() for _ in windows]
    for entry in nodes:
        arguments, start = entry["args"], int(entry["ts"])
        run = bisect_right(starts, start) - 1
        if run < 0 or start > windows[run].start_us + windows[run].host_us:
            continue
        # `{"float": [1, 12]}` as float32[1,12]
        shapes = [
            ", ".join(f"{dtypes.usual(dtype)}[{','.join(map(str, sizes))}]" for dtype, sizes in tensor.items())
            for tensor in arguments.get("output_type_shape", ())
        ]
        yield NodeEvent(
            run=run,
            order=next(orders[run]),
            name=str(entry["name"]).removesuffix(NODE_SUFFIX),
            op_type=str(arguments.get("op_name", "")),
            provider=str(arguments.get("provider", "")),
            start_us=start,
            host_us=int(entry["dur"]),
            output_bytes=int(arguments.get("output_size", 0)),
            output_shapes=tuple(shapes),
        )


@contextmanager
def printed_kernels(chain: Sequence[Provider]) -> Iterator[None]:
    """Let providers print the kernels of each run to stdout, which `Session.listening` captures.

    In Partita's own processes and their main thread only, where lines of other runs are discarded.
    """
    names = dict.fromkeys(name for provider in chain for name in provider.debug_variables if name not in os.environ)
    if not names or not process.own_process or threading.current_thread() is not threading.main_thread():
        yield
        return
    with captured_output((process.STDOUT,)):
        os.environ.update(dict.fromkeys(names, "1"))
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
