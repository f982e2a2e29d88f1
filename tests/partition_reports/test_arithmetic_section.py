"""Report section of 16-bit packages: nodes that compute in 16 bits or only read 16-bit weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.observations.facts import GraphNode, RunWindow, SessionFacts
from partita.partition_reports.records import Report
from partita.partition_reports.sections.arithmetic import floats_section
from partita.partition_reports.sections.model import Line, Table
from tests.partition_reports.samples import (
    CPU,
    GPU,
    PACKAGE,
    event,
    exported,
    report_of,
    run_facts,
    session_facts,
)

GATHER, ROWS, FOLDED, PRODUCT, SUM = (
    "model.embed/Gather",
    "model.embed/Cast",
    "model.l/Cast",
    "model.l/MatMul",
    "model.l/Add",
)


def reading(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], matrix: str = "") -> GraphNode:
    """A node of the file, and the type of the weight that it reads itself."""
    return replace(exported(name, inputs, outputs), matrix=matrix)


STORED = (
    reading(GATHER, ("table", "ids"), ("rows",), "bfloat16"),
    reading(ROWS, ("rows",), ("hidden",)),
    reading(FOLDED, ("weight",), ("wide",), "bfloat16"),
    reading(PRODUCT, ("hidden", "wide"), ("product",)),
    reading(SUM, ("hidden", "product"), ("sum",)),
)
"""Weights in bfloat16, each behind a Cast to float32: of rows as they are looked up, of the matrix as it is opened."""
COMPUTED = (
    reading(GATHER, ("table", "ids"), ("rows",), "float16"),
    reading(PRODUCT, ("rows", "weight"), ("product",), "float16"),
    reading(SUM, ("rows", "product"), ("sum",)),
)


def session(graph: tuple[GraphNode, ...], types: dict[str, str], provider: str = CPU) -> SessionFacts:
    """A session that ran nodes, each of which made a tensor of a type, once in each phase."""
    events = tuple(
        event(run, order, name, name.partition("/")[2], provider, output_shapes=(f"{dtype}[1,8]",) if dtype else ())
        for run in range(2)
        for order, (name, dtype) in enumerate(types.items())
    )
    windows = tuple(RunWindow(run, phase, 1, run * 100_000, 9_000) for run, phase in enumerate(("prefill", "decode")))
    return session_facts(graph=graph, plan=(tuple(types),), events=events, runs=windows, registered=(provider,))


def report(precision: str, *sessions: SessionFacts) -> Report:
    return report_of(run_facts(*sessions), package=PACKAGE.model_copy(update={"precision": precision}))


def rows_of(found: Report) -> dict[str, tuple[object, ...]]:
    """The rows of the section's table by operator and type."""
    section = floats_section(found)
    assert section is not None and section.title == "16-bit arithmetic"
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    return {f"{row.cells[0]} {row.cells[1]}": tuple(row.cells[2:]) for row in table.rows}


def test_bf16_weights_with_float32_arithmetic_are_reported() -> None:
    """The Cast of the matrix was folded; the MatMul computes in float32."""
    ran = {GATHER: "bfloat16", ROWS: "float32", PRODUCT: "float32", SUM: "float32"}
    assert rows_of(report("bf16", session(STORED, ran))) == {
        "Gather bfloat16": ("bfloat16", "CPU", "1", "1"),
        "MatMul float32": ("bfloat16", "CPU", "1", "1"),
        "Cast float32": ("-", "CPU", "1", "1"),
        "Add float32": ("-", "CPU", "1", "1"),
    }


def test_fp16_products_and_float32_sum_are_reported() -> None:
    """ONNX Runtime inserted a Cast before an operator that the provider supports only in float32."""
    ran = {GATHER: "float16", PRODUCT: "float16", "InsertedPrecisionFreeCast_product/Cast": "float32", SUM: "float32"}
    rows = rows_of(report("fp16", session(COMPUTED, ran, GPU)))
    assert rows["MatMul float16"] == ("float16", "WebGpu", "1", "1") and rows["Add float32"][0] == "-"


def test_executed_type_overrides_type_in_file() -> None:
    """The same fp16 graph on a provider that computes all of it in float32."""
    rows = rows_of(report("fp16", session(COMPUTED, {GATHER: "float16", PRODUCT: "float32", SUM: "float32"})))
    assert rows["MatMul float32"][0] == "float16" and "MatMul float16" not in rows


def test_compiled_nodes_report_no_arithmetic_type() -> None:
    built = report("fp16", session(COMPUTED, {GATHER: "float16", PRODUCT: "float16", SUM: "float16"}))
    phases = tuple(
        phase.model_copy(
            update={
                "nodes": tuple(
                    node.model_copy(update={"op_type": "CompiledSubgraph", "element_type": None})
                    for node in phase.nodes[:1]
                )
            }
        )
        for phase in built.phases
    )
    found = floats_section(built.model_copy(update={"phases": phases}))
    assert found is not None and [str(block.text) for block in found.blocks if isinstance(block, Line)] == [
        "CPU compiled nodes and does not report the type of their arithmetic."
    ]


@pytest.mark.parametrize("precision", ["fp32", "int4", "q4f16"])
def test_section_is_absent_for_other_precisions(precision: str) -> None:
    ran = session(COMPUTED, {GATHER: "float16", PRODUCT: "float16", SUM: "float16"})
    assert floats_section(report(precision, ran)) is None
