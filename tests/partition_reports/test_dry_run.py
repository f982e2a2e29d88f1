"""Dry-run reports contain no times and no data-dependent sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from partita.observations.facts import GraphNode, PortFact
from tests.partition_reports.samples import (
    GPU,
    GPU_CHAIN,
    PLAYED,
    event,
    mixed_facts,
    phase_of,
    report_of,
    run_facts,
    session_facts,
    windows,
)

TIME = re.compile(r"_seconds$|^seconds$|_ms$|_us(_|$)|^time_share$|^tokens_per_second$|^timing$")


def times_in(value, path=""):
    """Every field that holds a time and is not null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if TIME.search(key) and inner is not None:
                yield f"{path}.{key}"
            yield from times_in(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from times_in(inner, f"{path}[{number}]")


def node(name, op, inputs, outputs):
    return GraphNode(name, op, "", tuple(inputs), tuple(outputs))


def sized(*graph, constants=(), fixed=(), **changes):
    """A dry run of a graph, every node once on the GPU, 100 bytes each."""
    events = tuple(
        event(0, order, entry.name, entry.op_type, GPU, output_bytes=100) for order, entry in enumerate(graph)
    )
    session = session_facts(
        graph=tuple(graph),
        plan=(tuple(entry.name for entry in graph),),
        events=events,
        runs=windows("run"),
        phases=("run",),
        constants=frozenset(constants),
        fixed_shapes=frozenset(fixed),
        **changes,
    )
    facts = replace(run_facts(session), steps=(), finish_reason=None)
    report = report_of(facts, GPU_CHAIN, device=PLAYED)
    return {entry.name: entry.output_bytes for entry in phase_of(report, "run").nodes}, report


def test_dry_run_report_contains_no_times():
    real = report_of(mixed_facts(), GPU_CHAIN)
    assert len(list(times_in(real.model_dump(mode="json")))) > 50, "the search finds times where there are any"
    report = report_of(replace(mixed_facts(), finish_reason=None), GPU_CHAIN, device=PLAYED)
    assert list(times_in(report.model_dump(mode="json"))) == []
    assert {phase.steps for phase in report.phases} == {0}
    assert "no times" in report.phases[0].timing_note
    assert report.memory.peak_rss_bytes is None
    clock = {source.source: source.available for source in report.sources}
    assert (clock["clock"], clock["process"], clock["profile"]) == (False, False, True)


def test_data_dependent_sizes_are_unknown_until_shape_is_fixed():
    sizes, _ = sized(
        node("nz", "NonZero", ["x"], ["i"]),
        node("t", "Transpose", ["i"], ["it"]),
        node("s", "ReduceSum", ["it", "axes"], ["total"]),
        node("m", "Mul", ["total", "x"], ["y"]),
        constants=["axes"],
        fixed=["total"],
    )
    assert sizes == {"nz": None, "t": None, "s": 100, "m": 100}


def test_size_given_by_non_constant_input_is_unknown():
    sizes, _ = sized(node("r", "Reshape", ["x", "wanted"], ["y"]), node("k", "TopK", ["y", "k"], ["v", "i"]))
    assert sizes == {"r": None, "k": None}
    sizes, _ = sized(node("r", "Reshape", ["x", "wanted"], ["y"]), constants=["wanted"])
    assert sizes == {"r": 100}
    sizes, _ = sized(node("r", "Resize", ["x", "", "scales"], ["y"]), constants=["scales"])
    assert sizes == {"r": 100}, "an input that is left out decides on nothing"


@pytest.mark.parametrize(("tensor", "size"), [("i", None), ("minus", 64), ("made_up", None)])
def test_copy_size_is_known_only_if_tensor_size_is(tensor, size):
    log = (f"[I:onnxruntime:, transformer_memcpy.cc:420 AddCopyNode] Add MemcpyToHost before {tensor} for {GPU}",)
    session = session_facts(
        graph=(node("nz", "NonZero", ["x"], ["i"]), node("n", "Neg", ["x"], ["minus"])),
        phases=("run",),
        log=log,
        plan=(("nz", "n", "Memcpy"),),
        runs=windows("run"),
        events=(
            event(0, 0, "nz", "NonZero", GPU),
            event(0, 1, "n", "Neg", GPU),
            event(0, 2, "Memcpy", "MemcpyToHost", GPU, output_bytes=64),
        ),
    )
    report = report_of(replace(run_facts(session), finish_reason=None), GPU_CHAIN, device=PLAYED)
    (copy,) = phase_of(report, "run").copies
    assert (copy.tensor, copy.bytes_per_run) == (tensor, size)


def test_copied_data_dependent_output_has_unknown_size():
    ports = (
        PortFact("x", "input", "input", "Cuda", "Cpu", 64),
        PortFact("i", "output", "output", "Cuda", "Cpu", 16),
        PortFact("m", "output", "output", "Cuda", "Cpu", 64),
    )
    _, report = sized(node("nz", "NonZero", ["x"], ["i"]), node("n", "Neg", ["x"], ["m"]), ports=ports)
    copies = {copy.name: copy.bytes_per_run for copy in phase_of(report, "run").copies}
    assert copies == {"x": 64, "i": None, "m": 64}
