"""Sources joined by node: compiled subgraphs, what a copy is there for, and what a fallback costs."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import generated, honoured

CPU = "CPUExecutionProvider"


def of_kind(*kinds):
    """Rows of the targets of these kinds."""
    return lambda environment: [(target,) for target in environment.targets if target.kind in kinds]


@pytest.fixture
def placed(partita, tmp_path):
    """`partita place` a model on a chain; the report, whose checks have all passed and whose sources agree."""

    def command(model, chain, *options):
        path = tmp_path / "report.json"
        honoured(partita("place", model, "--provider", chain, "--report", path, *options))
        report = json.loads(path.read_text())
        assert [check for check in report["checks"] if not check["passed"]] == []
        assert report["disagreements"] == []
        return report

    return command


def source(report, name):
    return next(entry for entry in report["sources"] if entry["source"] == name)


@cases("target", of_kind("device"))
@pytest.mark.usefixtures("device")
def test_every_copy_of_an_island_has_its_cause_its_tensor_and_its_bytes(environment, target, placed, model):
    report = placed(model("island"), f"{target.provider},cpu")
    (phase,) = report["phases"]
    copies = {copy["direction"]: copy for copy in phase["copies"] if copy["kind"] == "memcpy_node"}
    assert {way: (copy["tensor"], copy["bytes_per_run"], copy["caused_by"]) for way, copy in copies.items()} == {
        "device_to_host": ("h", 256, ["island/Scaler"]),
        "host_to_device": ("s", 256, ["island/Scaler"]),
    }
    (fallback,) = report["fallbacks"]
    assert set(fallback["cost"]["copies"]) == {copy["name"] for copy in copies.values()}
    assert fallback["cost"]["copy_bytes_per_run"] == 512 and fallback["cost"]["harmless"] is False
    assert phase["cost"]["copy_bytes_per_run"] == sum(copy["bytes_per_run"] for copy in phase["copies"])
    assert phase["cost"]["crossing_bytes_per_run"] == 512
    assert source(report, "optimised_model")["available"]


@cases("target", of_kind("device"))
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


@cases("target", of_kind("compiling"))
@pytest.mark.usefixtures("device")
def test_a_compiled_subgraph_stands_for_its_nodes(environment, target, placed, model):
    report = placed(model("matmul_relu"), target.provider)
    (node,) = report["phases"][0]["nodes"]
    assert (node["op_type"], set(node["replaces"])) == ("CompiledSubgraph", {"layer/MatMul", "layer/Relu"})
    (share,) = report["phases"][0]["providers"]
    assert (share["nodes"], share["op_types"]) == (2, {"MatMul": 1, "Relu": 1})
    optimised = source(report, "optimised_model")
    assert not optimised["available"] and "compiles" in optimised["covers"]


@cases("target", of_kind("compiling"))
@pytest.mark.usefixtures("device")
def test_a_subgraph_of_one_node_is_known_and_its_border_too(environment, target, placed, model):
    report = placed(model("island"), f"{target.provider},cpu")
    (phase,) = report["phases"]
    compiled = {tuple(node["replaces"]) for node in phase["nodes"] if node["op_type"] == "CompiledSubgraph"}
    assert ("last/MatMul",) in compiled
    borders = {each["name"] for part in phase["partitions"] for each in part["boundary"]}
    assert {"x", "s", "y"} <= borders
    assert all(entry["cost"]["harmless"] is not True for entry in report["fallbacks"]), "what it copies is not visible"


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
def test_a_generation_has_the_optimised_graph_on_the_cpu(environment, partita, packages, tmp_path):
    path = tmp_path / "report.json"
    honoured(generated(partita, packages / "llama-primitives-fp32", "cpu", "--report", path))
    report = json.loads(path.read_text())
    assert source(report, "optimised_model")["available"], source(report, "optimised_model")
    fused = {node["op_type"]: node["replaces"] for node in report["phases"][-1]["nodes"] if node["replaces"]}
    assert [name.rpartition("/")[2] for name in fused["QuickGelu"]] == ["Sigmoid", "Mul"]
    assert report["cache"]["checked_steps"] > 0
    assert all(entry["passed"] for entry in report["checks"]) and report["disagreements"] == []
