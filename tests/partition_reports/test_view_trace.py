"""The trace: what Perfetto and chrome://tracing need to show the observation window, and nothing that they refuse."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from partita.errors import ReportError
from partita.partition_reports.records import TimelineRun
from partita.partition_reports.views import html
from partita.partition_reports.views import trace as view
from tests.partition_reports.changed import HARMFUL, HOSTILE, left_by_cuda_too, mixed, renamed
from tests.partition_reports.samples import recorded_facts, report_of

PHASES_OF_EVENTS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def trace_of(report):
    return json.loads(view.to_text(report))


def slices(trace, category=None):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and category in (None, event["cat"])]


def tracks(trace):
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


def assert_valid(trace):
    """The Trace Event Format: JSON object form, metadata and complete events, integer microseconds."""
    named = tracks(trace)
    ends: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        assert set(event) == PHASES_OF_EVENTS[event["ph"]], event
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert list(event["args"]) == [METADATA[event["name"]]]
            continue
        track = (event["pid"], event["tid"])
        assert track in named, "every slice is on a track with a name"
        assert type(event["ts"]) is int and type(event["dur"]) is int and event["ts"] >= 0 and event["dur"] >= 0
        assert event["ts"] >= last.get(track, 0), "slices of a track are in order"
        last[track] = event["ts"]
        # Perfetto drops a slice that begins in another one of its track and ends after it.
        assert event["ts"] >= ends.get(track, 0)
        ends[track] = event["ts"] + event["dur"]


@pytest.mark.parametrize("report", [report_of(recorded_facts()), mixed()], ids=["cpu", "gpu"])
def test_it_is_what_the_format_asks_for(report):
    trace = trace_of(report)
    assert_valid(trace)
    assert len(slices(trace, "run")) == len(report.timeline)
    assert len(slices(trace)) == len(report.timeline) + sum(len(run.events) for run in report.timeline)


def test_runs_enclose_their_nodes_and_tell_phase_and_tokens():
    trace = trace_of(mixed())
    runs = {event["args"]["run"]: event for event in slices(trace, "run")}
    assert [runs[n]["name"] for n in range(2)] == [
        "prefill run 0, 5 new tokens per row",
        "decode run 1, 1 new token per row",
    ]
    for event in [*slices(trace, "node"), *slices(trace, "copy")]:
        run = runs[event["args"]["run"]]
        assert run["ts"] <= event["ts"] and event["ts"] + event["dur"] <= run["ts"] + run["dur"]
        assert event["args"]["phase"] == run["args"]["phase"]


def test_every_provider_and_the_copies_have_a_track():
    trace = trace_of(mixed())
    named = tracks(trace)
    on: dict[str, set[str | None]] = defaultdict(set)
    for event in slices(trace):
        # The sample's slow run has nodes that overlap, so there are tracks such as `WebGpu (2)`.
        on[named[event["pid"], event["tid"]].partition(" (")[0]].add(event["args"].get("node"))
    assert list(dict.fromkeys(name.partition(" (")[0] for name in named.values())) == [
        "session runs",
        "WebGpu",
        "CPU",
        "copies",
    ]
    assert on["copies"] == {"Memcpy", "Memcpy_token_0", "Memcpy_token_1"}
    assert "model.layers.0.self_attn/Det" in on["CPU"] and "lm_head/MatMul" in on["WebGpu"]


def test_a_slice_tells_node_module_and_why_it_is_not_on_the_wanted_provider():
    trace = trace_of(mixed())
    gather = next(e for e in slices(trace, "node") if e["args"]["node"] == "model.rotary_emb/Gather")
    assert gather["name"] == "Gather"
    assert gather["args"]["module"] == "model.rotary_emb" and gather["args"]["reason"] == "no_kernel_op"
    assert not any("reason" in e["args"] for e in slices(trace, "node") if e["args"]["node"] == "lm_head/MatMul")
    copy = next(e for e in slices(trace, "copy") if e["args"]["node"] == "Memcpy")
    assert (copy["args"]["tensor"], copy["args"]["bytes"]) == ("query", 512)


def test_nodes_that_overlap_get_a_second_track():
    report = mixed()
    first = report.timeline[0]
    overlapping = first.model_copy(update={"events": ((0, 0, 50), (1, 10, 50), (5, 60, 5))})
    trace = trace_of(report.model_copy(update={"timeline": (overlapping,)}))
    assert_valid(trace)
    assert "WebGpu (2)" in tracks(trace).values()


def test_slices_are_in_order_whatever_order_the_report_has():
    report = mixed()
    backwards = report.timeline[0].model_copy(update={"events": tuple(reversed(report.timeline[0].events))})
    trace = trace_of(report.model_copy(update={"timeline": (*report.timeline[1:], backwards)}))
    assert_valid(trace)
    assert tracks(trace) == tracks(trace_of(report)), "no track for what only came late"


def test_two_files_are_two_processes():
    report = mixed()
    first, second = report.timeline[:2]
    files = (first.model_copy(update={"file": "prefill.onnx"}), second.model_copy(update={"file": "decode.onnx"}))
    trace = trace_of(report.model_copy(update={"timeline": files}))
    assert_valid(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "prefill.onnx", 2: "decode.onnx"}
    assert {e["pid"] for e in slices(trace, "run")} == {1, 2}


def test_a_position_that_the_phase_does_not_have_is_still_shown():
    odd = TimelineRun(phase="decode", file="m", run=0, tokens=0, start_us=5, host_us=9, events=((999, 0, 1),))
    trace = trace_of(mixed().model_copy(update={"timeline": (odd,)}))
    assert_valid(trace)
    assert slices(trace, "node")[0]["name"] == "node 999"
    assert slices(trace, "run")[0]["name"] == "decode run 0"


def test_hostile_names_are_escaped_and_whole():
    report = renamed(mixed(), {"lm_head/MatMul": HOSTILE})
    text = view.to_text(report)
    assert text.isascii() and not HARMFUL & set(text) and text.endswith("\n")
    assert HOSTILE in {event["args"].get("node") for event in slices(json.loads(text))}


def test_without_a_timeline_there_is_no_trace():
    with pytest.raises(ReportError, match="no timeline"):
        view.to_text(mixed().model_copy(update={"timeline": ()}))


def test_a_node_that_two_providers_left_has_both_reasons_in_the_trace_and_in_the_list_of_nodes():
    report = left_by_cuda_too(mixed())
    left = [event["args"] for event in slices(trace_of(report)) if "reason" in event["args"]]
    assert left and all(
        args["not_on_either"]
        == {"CUDAExecutionProvider": {"reason": "no_kernel_op", "evidence": "CUDA kernel not found"}}
        for args in left
    )
    (first, *_) = report.fallbacks
    text = html.to_text(report)
    assert f"WebGpu: {first.reason}; CUDA: no_kernel_op</a>" in text
    assert all("not_on_either" not in event["args"] for event in slices(trace_of(mixed())))
