"""Table of nodes that would not run on the requested provider: rows from facts without a run, and text."""

from __future__ import annotations

from dataclasses import replace

from partita.commands.results import MOST_ROWS, render_refusal
from partita.diagnosis.explanation import refused_nodes
from partita.observations.facts import AssignedNode
from partita.observations.records import ChainEntry
from partita.runtime.chain.advice import rows_of
from tests.partition_reports.samples import (
    CPU,
    GPU,
    MISSING_FIRST_CHAIN,
    NO_KERNEL,
    PATTERNS,
    TENSORRT,
    exported,
    mixed_session,
    session_facts,
)

GPU_ALONE = (ChainEntry(provider=GPU, status="active"),)


def opened(**changes):
    """The mixed session as it is before any run."""
    return mixed_session(**{"events": (), "runs": (), "registered": (GPU, CPU), **changes})


def test_cpu_nodes_are_listed_in_order_with_reason_and_evidence():
    rows = refused_nodes(opened(), GPU_ALONE)
    assert [(row.node, row.op_type, row.provider, row.reason) for row in rows] == [
        ("model.rotary_emb/Gather", "Gather", CPU, "no_kernel_op"),
        ("model.rotary_emb/Concat", "Concat", CPU, "cpu_preferred"),
        ("model.layers.0.self_attn/Det", "Det", CPU, "unexplained"),
        ("Transpose_token_4", "Transpose", CPU, "runtime_inserted"),
    ]
    assert rows[0].evidence == NO_KERNEL and rows[0].source_line == "modeling_llama.py:88"
    assert {row.preferred_provider for row in rows} == {GPU}


def test_provider_without_assignment_list_is_judged_by_log():
    rows = refused_nodes(opened(assigned=()), GPU_ALONE)
    assert [row.node for row in rows] == ["model.rotary_emb/Gather", "model.rotary_emb/Concat"]
    assert {row.provider for row in rows} == {CPU}


def test_nodes_unnamed_in_every_source_are_listed_individually():
    nameless = tuple(AssignedNode("", op, "", CPU, number) for number, op in enumerate(("Det", "Det", "NonZero")))
    rows = refused_nodes(session_facts(assigned=nameless, plan=(("Det0",),)), GPU_ALONE)
    assert [row.op_type for row in rows] == ["Det", "Det", "NonZero"]
    assert "(no name)" in render_refusal(rows_of(rows, (GPU,)))


def test_table_names_every_node_and_quotes_evidence():
    text = render_refusal(rows_of(refused_nodes(opened(), GPU_ALONE), (GPU,)))
    assert text.startswith(f"4 nodes would not run on {GPU}:\n")
    for word in ("model.rotary_emb/Gather", "Det", "no_kernel_op", "webgpu kernel not found in registries"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120
    assert render_refusal(()) == ""


def test_missing_first_provider_does_not_hide_reasons_of_second():
    chain = MISSING_FIRST_CHAIN[:2]
    rows = rows_of(refused_nodes(opened(), chain), (GPU,))
    refused = [[(entry.provider, entry.reason, entry.available) for entry in row.refusals] for row in rows]
    assert {first for first, *_ in refused} == {(TENSORRT, "library_missing", False)}
    told = [other for _, *others in refused for other in others]
    assert told[:2] == [(GPU, "no_kernel_op", True), (GPU, "cpu_preferred", True)] and len(told) == len(rows) == 4
    text = render_refusal(rows)
    assert text.startswith(f"4 nodes would not run on {GPU}:\n")
    assert text.count("Tensorrt is not available: library_missing: install TensorRT") == 1
    assert "WebGpu: no_kernel_op: " in text and NO_KERNEL[-40:] in " ".join(text.split())


def many(count, kinds):
    ops = [f"Op{number % kinds}" for number in range(count)]
    names = [f"m.{number}/{op}" for number, op in enumerate(ops)]
    log = tuple(
        f"[I:onnxruntime:, x.cc:1 G] webgpu kernel not found in registries for Op type: {op} node name: {name}"
        for op, name in zip(ops, names, strict=True)
    )
    return session_facts(
        graph=tuple(exported(name, (), ()) for name in names),
        patterns=PATTERNS,
        log=log,
        plan=(tuple(names),),
        assigned=tuple(AssignedNode(n, o, "", CPU, i) for i, (n, o) in enumerate(zip(names, ops, strict=True))),
    )


def test_many_nodes_are_grouped_by_operator_and_truncated_with_counts():
    text = render_refusal(rows_of(refused_nodes(many(90, 3), GPU_ALONE), (GPU,)))
    assert "90 nodes would not run" in text and "Op1" in text and " 30 " in text and "and 88 similar lines" in text
    assert len(text.splitlines()) < 20
    text = render_refusal(rows_of(refused_nodes(many(100, 100), GPU_ALONE), (GPU,)))
    assert f"and {100 - MOST_ROWS} more rows; the JSON has all" in text


def test_control_characters_in_names_are_escaped():
    row = replace(rows_of(refused_nodes(opened(), GPU_ALONE), (GPU,))[0], node="a\x1b[31m\nb")
    assert "\x1b" not in render_refusal([row]) and "a?[31m?b" in render_refusal([row])
