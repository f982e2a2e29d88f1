"""Quantised weights section: which nodes compute with int8 or int4 weights."""

from __future__ import annotations

from partita.observations.records import PackageQuality
from partita.partition_reports.records import Report
from partita.partition_reports.sections.arithmetic import quantised_section
from partita.partition_reports.sections.model import Line, Table
from tests.partition_reports.samples import recorded_facts, report_of, shown


def of_precision(precision: str, operators: dict[str, str]) -> Report:
    """The recorded run of a llama on the CPU, with other operators and another precision."""
    report = report_of(recorded_facts())
    assert report.package is not None
    phases = tuple(
        phase.model_copy(
            update={
                name: tuple(
                    node.model_copy(update={"op_type": operators.get(node.op_type or "", node.op_type)})
                    for node in nodes
                )
                for name, nodes in (("nodes", phase.nodes), ("file_nodes", phase.file_nodes))
            }
        )
        for phase in report.phases
    )
    package = report.package.model_copy(update={"precision": precision})
    return report.model_copy(update={"phases": phases, "package": package})


def test_fp32_package_has_no_quantised_weights_section() -> None:
    assert quantised_section(of_precision("fp32", {})) is None


def test_quantised_nodes_are_counted_by_operator_and_provider() -> None:
    report = of_precision("int4", {"MatMul": "MatMulNBits", "Gather": "GatherBlockQuantized"})
    found = quantised_section(report)
    assert found is not None and found.title == "Quantised weights"
    (table,) = [block for block in found.blocks if isinstance(block, Table)]
    decode = next(phase for phase in report.phases if phase.name == "decode")
    products = sum(node.op_type == "MatMulNBits" for node in decode.nodes)
    rows = {row.cells[0]: row.cells for row in table.rows}
    assert rows["MatMulNBits"][1:3] == ("quantised", "CPU") and rows["MatMulNBits"][-1] == str(products)
    assert rows["GatherBlockQuantized"][1:] == ("quantised", "CPU", "1", "1")


def test_phases_with_different_quantised_operators_are_listed_apart() -> None:
    report = of_precision("int4", {"MatMul": "MatMulNBits"})
    phases = tuple(
        phase.model_copy(
            update={
                "nodes": tuple(
                    node.model_copy(update={"op_type": "MatMulIntegerToFloat"})
                    if phase.name == "prefill" and node.op_type == "MatMulNBits"
                    else node
                    for node in phase.nodes
                )
            }
        )
        for phase in report.phases
    )
    found = quantised_section(report.model_copy(update={"phases": phases}))
    assert found is not None
    (table,) = [block for block in found.blocks if isinstance(block, Table)]
    count = sum(
        node.op_type == "MatMulNBits" for phase in report.phases if phase.name == "decode" for node in phase.nodes
    )
    rows = {row.cells[0]: row.cells[1:] for row in table.rows}
    assert rows["MatMulIntegerToFloat"] == ("quantised, int8 activations", "CPU", str(count), "0")
    assert rows["MatMulNBits"] == ("quantised", "CPU", "0", str(count))


def test_no_node_using_quantised_weights_is_reported() -> None:
    report = of_precision("int8", {"MatMul": "Mul", "Gemm": "Mul", "FusedMatMul": "Mul"})
    found = quantised_section(report)
    assert found is not None and [block.text for block in found.blocks if isinstance(block, Line)] == [
        "No node computes with quantised weights."
    ]


def test_compiled_quantised_nodes_are_reported_as_compiled() -> None:
    report = of_precision("int8", {})
    phases = []
    for phase in report.phases:
        whole = phase.nodes[0].model_copy(update={"op_type": None})
        operators = ("DequantizeLinear", "MatMul", "DequantizeLinear", "Add")
        row = phase.file_nodes[0].model_copy(update={"ran_as": (whole.name,)})
        rows = tuple(row.model_copy(update={"op_type": operator}) for operator in operators)
        phases.append(phase.model_copy(update={"nodes": (whole,), "file_nodes": rows}))
    found = quantised_section(report.model_copy(update={"phases": tuple(phases)}))
    assert found is not None
    lines = [str(block.text) for block in found.blocks if isinstance(block, Line)]
    assert lines == ["CPU compiled the quantised weights and does not report their use."]
    (table,) = [block for block in found.blocks if isinstance(block, Table)]
    assert [row.cells[:2] for row in table.rows] == [("DequantizeLinear", "compiled"), ("MatMul", "compiled")]


def test_dequantised_weights_are_reported() -> None:
    found = quantised_section(of_precision("int4", {"MatMul": "DequantizeLinear"}))
    assert found is not None
    (table,) = [block for block in found.blocks if isinstance(block, Table)]
    assert table.rows[0].cells[:2] == ("DequantizeLinear", "dequantised first")


def test_every_view_shows_package_quality() -> None:
    report = of_precision("int4", {"MatMul": "MatMulNBits"})
    assert report.package is not None
    quality = PackageQuality(
        text="heldout.txt",
        tokens=8176,
        provider="CPUExecutionProvider",
        perplexity_ratio=1.01554,
        top1_agreement=0.907,
        kl_mean=0.0139,
        kl_p99=0.059,
    )
    package = report.package.model_copy(update={"quality": quality})
    report = report.model_copy(update={"package": package})
    for view in ("text", "markdown", "html"):
        text = " ".join(shown(report, view).split())
        for told in ("perplexity 1.0155 times that of the source model", "90.7%", "8,176 tokens of heldout.txt"):
            assert told in text, view
    again = Report.model_validate_json(report.model_dump_json(by_alias=True))
    assert again.package is not None and again.package.quality == quality
