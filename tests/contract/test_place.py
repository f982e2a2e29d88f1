"""`partita place MODEL`: placement of ONNX models and packages, and its limits."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import require_dry_run
from tests.contract.cases import cases, each_environment, only_in, targets
from tests.contract.commands import execute, honoured, nodes_on, refused, source, sources_agree

CPU = "CPUExecutionProvider"


@cases("target", targets)
def test_supported_model_runs_entirely_on_provider(environment, target, partita, model, tmp_path):
    report = tmp_path / "report.json"
    honoured(partita("place", model("matmul_relu"), "--provider", target.provider, "--report", report))
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0 and nodes_on(content, CPU) == 0
    assert content["fallbacks"] == [] and sources_agree(content)
    if target.kind == "compiling":
        (node,) = content["phases"][0]["nodes"]
        assert (node["op_type"], set(node["replaces"])) == ("CompiledSubgraph", {"layer/MatMul", "layer/Relu"})
        (share,) = content["phases"][0]["providers"]
        assert (share["nodes"], share["op_types"]) == (2, {"MatMul": 1, "Relu": 1})
        optimised = source(content, "optimised_model")
        assert not optimised["available"] and "compiles" in optimised["covers"]


TWICE = """
import sys, partita
for _ in range(2):
    partita.place(sys.argv[1], providers=sys.argv[2], process="this", probe_seconds=0)
"""


@cases("target", targets)
def test_provider_starts_again_in_the_same_process(environment, target, model, tmp_path):
    """ONNX Runtime 1.32 lists a registered plugin beside the providers of the build."""
    done = execute("-c", TWICE, model("matmul_relu"), target.provider, folder=tmp_path)
    assert done.code == 0, done.err


@cases("target", targets)
def test_unsupported_node_between_supported_has_reason_and_copies(environment, target, partita, model, tmp_path):
    report = tmp_path / "report.json"
    words = ("place", model("island"), "--full", "--provider", f"{target.provider},cpu", "--report", report)
    done = honoured(partita(*words, *(word for option, _, kept in limits(target) for word in (option, kept))))
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0 and sources_agree(content)
    fallen = {fallback["node"]: (fallback["op_type"], fallback["provider"]) for fallback in content["fallbacks"]}
    assert fallen["island/Scaler"] == ("Scaler", CPU)
    # A compiling provider may also leave the MatMul behind the island, which is a subgraph of one node.
    assert nodes_on(content, CPU) == len(fallen) == 1 or (target.kind == "compiling" and len(fallen) == 2), fallen
    copies = [copy for phase in content["phases"] for copy in phase["copies"] if copy["kind"] == "memcpy_node"]
    assert len(copies) == (2 if target.kind == "device" else 0), copies
    assert "    cost: " in done.out, done
    copied = re.search(r"^  h  +to host .*island/Scaler$", done.out, re.MULTILINE)
    assert (copied is not None) is (target.kind == "device"), done
    (phase,) = content["phases"]
    if target.kind == "device":
        island_of_a_device(content, phase)
    if target.kind == "compiling":
        compiled = {tuple(node["replaces"]) for node in phase["nodes"] if node["op_type"] == "CompiledSubgraph"}
        assert ("last/MatMul",) in compiled
        harmless = [entry["cost"]["harmless"] for entry in content["fallbacks"]]
        assert True not in harmless, "what it copies is not visible"


def island_of_a_device(report, phase):
    """Every copy around the island has its cause, its tensor and its bytes."""
    copies = {copy["direction"]: copy for copy in phase["copies"] if copy["kind"] == "memcpy_node"}
    assert {way: (copy["tensor"], copy["bytes_per_run"], copy["caused_by"]) for way, copy in copies.items()} == {
        "device_to_host": ("h", 256, ["island/Scaler"]),
        "host_to_device": ("s", 256, ["island/Scaler"]),
    }
    (fallback,) = report["fallbacks"]
    assert set(fallback["cost"]["copies"]) == {copy["name"] for copy in copies.values()}
    assert fallback["cost"]["copy_bytes_per_run"] == 512 and fallback["cost"]["harmless"] is False
    assert phase["cost"]["copy_bytes_per_run"] == sum(copy["bytes_per_run"] for copy in phase["copies"])
    assert source(report, "optimised_model")["available"]


LIMITS = [("--max-cpu-nodes", 0, 2), ("--max-copies", 1, 64), ("--max-copy-bytes-per-token", 8, 1_000_000)]


def limits(target):
    """Option, a limit that the island exceeds, and one that it keeps; copies are counted on devices."""
    return LIMITS if target.kind == "device" else LIMITS[:1]


@cases("target", targets)
def test_exceeded_limits_exit_3_and_name_options(environment, target, partita, model):
    words = [word for option, exceeded, _ in limits(target) for word in (option, exceeded)]
    done = partita("place", model("island"), "--provider", f"{target.provider},cpu", *words)
    assert done.code == 3 and all(option in done.err for option, _, _ in limits(target)), done


# Nodes in the bodies of If, Loop and Scan: ONNX Runtime's ban on the CPU provider does not see them in 1.27


BODIES = ("then/Scaler", "else/Scaler")


@cases("target", lambda environment: [(t,) for t in environment.targets if t.provider == "webgpu"])
def test_subgraph_nodes_on_cpu_fail_without_cpu_in_chain(environment, target, partita, model, plain):
    file = model("branches")
    script = (
        "options = ort.SessionOptions()\n"
        "options.add_session_config_entry('session.disable_cpu_ep_fallback', '1')\n"
        "ort.InferenceSession(sys.argv[1], options, providers=['WebGpuExecutionProvider'])\n"
        "print('opened')"
    )
    assert "opened" in plain(script, file).out, "ONNX Runtime sees bodies now; the check of ours is one more then"
    refused(partita("place", file, "--provider", target.provider), *BODIES)


@cases("_", only_in("main"))
def test_subgraph_nodes_count_for_dry_run_limits(environment, _, partita, model, tmp_path):
    require_dry_run()
    file, report = model("branches"), tmp_path / "report.json"
    command = ("place", file, "--provider", "cuda,cpu", "--dry-run")
    honoured(partita(*command, "--report", report, "--max-cpu-nodes", 2))
    (phase,) = json.loads(report.read_text())["phases"]
    assert {node["name"] for node in phase["subgraphs"]["on_cpu"]} == set(BODIES)
    assert phase["subgraphs"]["copies"] > 0
    limits = {"--max-cpu-nodes": 1, "--max-copies": 0, "--max-copy-bytes-per-token": 1_000_000}
    done = partita(*command, *(word for limit in limits.items() for word in limit))
    assert done.code == 3 and all(name in done.err for name in limits), done


# Sources joined by node, for whole packages


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
def test_every_copy_in_package_has_a_cause(environment, target, placed, packages):
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
def test_every_package_node_is_in_report(environment, target, package, placed, packages):
    import onnx

    report = placed(packages / package, f"{target.provider},cpu")
    file = onnx.load(packages / package / "model.onnx", load_external_data=False)
    phase = report["phases"][-1]
    found = {name for node in phase["nodes"] for name in (node["name"], *node["replaces"])}
    left = {node.name for node in file.graph.node if node.name not in found and node.op_type != "Constant"}
    assert left == set()
    assert sum(share["nodes"] for share in phase["providers"]) == len(found & {n.name for n in file.graph.node})


@each_environment()
def test_cpu_report_reads_optimised_graph(environment, cpu_report):
    report = cpu_report("llama-gqa-fp32")
    assert source(report, "optimised_model")["available"], source(report, "optimised_model")
    fused = {node["op_type"]: node["replaces"] for node in report["phases"][-1]["nodes"] if node["replaces"]}
    assert [name.rpartition("/")[2] for name in fused["QuickGelu"]] == ["Sigmoid", "Mul"]
    assert report["cache"]["checked_steps"] > 0
    assert sources_agree(report)
