"""Partition report edge cases: early ends, missing sources, control flow and random facts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from partita.observations.facts import AssignedNode
from partita.observations.names import UNKNOWN
from partita.partition_reports.groups import is_memcpy
from partita.partition_reports.phase_records import Phase
from partita.partition_reports.records import Report
from tests.partition_reports.samples import (
    CPU,
    CPU_CHAIN,
    GPU,
    GPU_CHAIN,
    event,
    exported,
    failed,
    phase_of,
    recorded_facts,
    report_of,
    run_facts,
    session_facts,
    shown,
    step,
    windows,
)


def test_run_interrupted_in_prefill_passes_checks():
    facts = recorded_facts()
    session = facts.sessions[0]
    facts = replace(
        facts,
        sessions=(replace(session, runs=session.runs[:1], events=tuple(e for e in session.events if e.run == 0)),),
        steps=(step("prefill", 2, observed=True),),
        new_tokens=0,
        first_token_seconds=None,
        finish_reason="interrupted",
    )
    report = report_of(facts)
    assert failed(report) == []
    decode = phase_of(report, "decode")
    assert len(decode.nodes) == 113, "the plan holds for decode even if decode was never reached"
    assert decode.observed_runs == 0
    assert {node.provider for node in decode.nodes} == {CPU}
    assert {node.host_us_per_run for node in decode.nodes} == {None}
    assert decode.providers[0].time_share is None
    assert "the run ended early: interrupted" in shown(report)


def test_multiple_streams_use_order_of_last_profiled_run():
    events = tuple(event(0, order, name, "Add", CPU) for order, name in enumerate(("b", "a", "c")))
    session = session_facts(plan=(("a", "c"), ("b", "idle")), events=events, runs=windows("decode"), phases=("decode",))
    report = report_of(run_facts(session))
    assert [node.name for node in phase_of(report, "decode").nodes] == ["b", "a", "c", "idle"]
    assert "2 streams; nodes are in the order of the last profiled run" in report.notes[0]


def test_repeated_executions_of_a_node_are_summed():
    events = (
        event(0, 0, "a", "Add", CPU, host_us=5, output_bytes=4),
        event(0, 1, "a", "Add", CPU, host_us=7, output_bytes=4),
    )
    session = session_facts(plan=(("a",),), events=events, runs=windows("decode"), phases=("decode",))
    (node,) = phase_of(report_of(run_facts(session)), "decode").nodes
    assert (node.host_us_per_run, node.output_bytes) == (12.0, 8)


def random_facts(seed: int):
    """A session with random names, providers, operators and gaps in every source."""
    dice = random.Random(seed)
    names = [
        dice.choice(["", "model.layers.%d.mlp/Mul", "Memcpy_token_%d", "x/%d/", "/Add_%d", "[b]%d[/b]"])
        for _ in range(12)
    ]
    names = [name % dice.randrange(4) if "%" in name else name for name in names]
    ops = ["Mul", "If", "MemcpyToHost", "Loop", "Transpose"]
    events = tuple(
        event(
            dice.randrange(4),
            dice.randrange(12),
            name,
            dice.choice(ops),
            dice.choice([CPU, GPU]),
            host_us=dice.choice([0, 0, 1, 500]),
            output_shapes=dice.choice([(), ("float32[2,3]",), ("float4[2]", "int64[]"), ("nonsense",)]),
        )
        for name in dice.choices(names, k=dice.randrange(30))
    )
    session = session_facts(
        graph=tuple(
            exported(name, tuple(dice.choices(names, k=2)), (dice.choice(names),)) for name in dice.choices(names, k=8)
        ),
        plan=dice.choice([None, (), ((),), (tuple(dice.choices(names, k=9)),), (tuple(names[:5]), tuple(names[5:]))]),
        assigned=dice.choice([None, (), tuple(AssignedNode(name, "Mul", "", CPU, 0) for name in names[:6])]),
        events=events,
        runs=dice.choice([(), windows("prefill", "decode", "decode")]),
        log=tuple(f"Force fallback to CPU execution for node: {name}" for name in names[:3]),
    )
    return run_facts(
        session, steps=tuple(step(dice.choice(["prefill", "decode"]), dice.randrange(3)) for _ in range(5))
    )


def assert_sums(phase: Phase) -> None:
    """Groups, time shares, partitions and costs of a phase add up."""
    for groups in (phase.providers, phase.by_op_type, phase.by_layer, phase.by_module):
        counted = sum(entry.nodes + entry.added_nodes for entry in groups)
        assert counted == len(phase.placed) + phase.added_count
        shares = [entry.time_share for entry in groups if entry.time_share is not None]
        assert not shares or math.isclose(math.fsum(shares), 1.0, abs_tol=1e-6)
    at = 0
    for part in phase.partitions:
        members = phase.nodes[part.first_position : part.first_position + part.nodes]
        assert part.first_position == at and {node.provider or UNKNOWN for node in members} == {part.provider}
        at += part.nodes
    assert at == len(phase.nodes)
    memcpy = {copy.name for copy in phase.copies if copy.kind == "memcpy_node"}
    assert memcpy == {node.name for node in phase.nodes if is_memcpy(node)}
    assert phase.cost is not None
    assert (phase.cost.partitions, phase.cost.copies) == (len(phase.partitions), len(phase.copies))
    assert phase.cost.copy_bytes_at_least == sum(copy.bytes_per_run or 0 for copy in phase.copies)


@pytest.mark.parametrize("chain", [(), CPU_CHAIN, GPU_CHAIN], ids=["no chain", "cpu", "gpu,cpu"])
def test_random_facts_give_consistent_reports(chain):
    for seed in range(100):
        report = report_of(random_facts(seed), chain)
        for phase in report.phases:
            assert len({node.name for node in phase.nodes}) == len(phase.nodes), seed
            assert_sums(phase)
        assert Report.model_validate(json.loads(report.model_dump_json(by_alias=True))) == report
        if seed < 15:
            assert shown(report)
