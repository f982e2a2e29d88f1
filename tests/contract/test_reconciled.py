"""Sources joined by node, for whole packages; `test_place.py` has single models."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import honoured, source, sources_agree


@pytest.fixture
def placed(partita, tmp_path):
    """`partita place` a model on a chain; the report, whose checks have all passed and whose sources agree."""

    def command(model, chain, *options):
        path = tmp_path / "report.json"
        honoured(partita("place", model, "--provider", chain, "--report", path, *options))
        report = json.loads(path.read_text())
        assert sources_agree(report), (report["checks"], report["conflicts"])
        return report

    return command


@cases("target", lambda environment: [(target,) for target in environment.targets if target.kind == "device"])
@pytest.mark.usefixtures("device")
def test_every_copy_of_a_package_has_a_cause(environment, target, placed, packages):
    report = placed(packages / target.refused_alone[0], f"{target.provider},cpu")
    for phase in report["phases"]:
        copies = [copy for copy in phase["copies"] if copy["kind"] == "memcpy_node"]
        assert copies and all(copy["caused_by"] and copy["tensor"] for copy in copies)
        fallen = {entry["node"] for entry in report["fallbacks"] if entry["phase"] == phase["name"]}
        assert {name for copy in copies for name in copy["caused_by"]} <= fallen
        assert phase["cost"]["tokens_per_run"] > 0
    assert report["cache"]["checked_steps"] > 0


@cases(
    "target, package",
    lambda environment: [
        (target, target.with_cpu[0]) for target in environment.targets if target.kind == "compiling" and target.with_cpu
    ],
)
@pytest.mark.usefixtures("device")
def test_every_node_of_a_package_is_found_again(environment, target, package, placed, packages):
    import onnx

    report = placed(packages / package, f"{target.provider},cpu")
    file = onnx.load(packages / package / "model.onnx", load_external_data=False)
    phase = report["phases"][-1]
    found = {name for node in phase["nodes"] for name in (node["name"], *node["replaces"])}
    left = {node.name for node in file.graph.node if node.name not in found and node.op_type != "Constant"}
    assert left == set()
    assert sum(share["nodes"] for share in phase["providers"]) == len(found & {n.name for n in file.graph.node})


@each_environment()
def test_a_generation_has_the_optimised_graph_on_the_cpu(environment, cpu_report):
    report = cpu_report("llama-gqa-fp32")
    assert source(report, "optimised_model")["available"], source(report, "optimised_model")
    fused = {node["op_type"]: node["replaces"] for node in report["phases"][-1]["nodes"] if node["replaces"]}
    assert [name.rpartition("/")[2] for name in fused["QuickGelu"]] == ["Sigmoid", "Mul"]
    assert report["cache"]["checked_steps"] > 0
    assert sources_agree(report)
