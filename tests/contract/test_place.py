"""`partita place MODEL`: the placement of any ONNX model, and limits that it must meet."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, each_environment, targets
from tests.contract.commands import honoured, nodes_on, refused

CPU = "CPUExecutionProvider"


@each_environment()
def test_on_the_cpu(environment, partita, model, tmp_path):
    report = tmp_path / "report.json"
    done = honoured(partita("place", model("matmul_relu"), "--provider", "cpu", "--report", report))
    assert CPU in done.out
    assert nodes_on(json.loads(report.read_text()), CPU) > 0


@cases("target", targets)
@pytest.mark.usefixtures("device")
def test_a_model_that_it_takes_whole(environment, target, partita, model, tmp_path):
    report = tmp_path / "report.json"
    honoured(partita("place", model("matmul_relu"), "--provider", target.provider, "--report", report))
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0 and nodes_on(content, CPU) == 0
    assert content["fallbacks"] == []


@cases("target", targets)
@pytest.mark.usefixtures("device")
def test_an_island_on_the_cpu_has_a_reason_and_copies(environment, target, partita, model, tmp_path):
    report = tmp_path / "report.json"
    honoured(partita("place", model("island"), "--provider", f"{target.provider},cpu", "--report", report))
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0
    fallen = {fallback["node"]: (fallback["op_type"], fallback["provider"]) for fallback in content["fallbacks"]}
    assert fallen["island/Scaler"] == ("Scaler", CPU)
    # A compiling provider may also leave the MatMul behind the island, which is a subgraph of one node.
    assert nodes_on(content, CPU) == len(fallen) == 1 or (target.kind == "compiling" and len(fallen) == 2), fallen
    copies = [copy for phase in content["phases"] for copy in phase["copies"] if copy["kind"] == "memcpy_node"]
    assert len(copies) == (2 if target.kind == "device" else 0), copies


@cases("target", targets)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("limit", "code"), [("0", 3), ("2", 0)])
def test_a_limit_on_nodes_on_the_cpu(environment, target, limit, code, partita, model):
    chain = f"{target.provider},cpu"
    done = partita("place", model("island"), "--provider", chain, "--max-cpu-nodes", limit)
    assert done.code == code, done
    assert code == 0 or "max-cpu-nodes" in done.err, done


@cases("target", lambda environment: [(t,) for t in environment.targets if t.kind == "device"])
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("option", "limit", "code"),
    [
        ("--max-copies", "1", 3),
        ("--max-copies", "64", 0),
        ("--max-copy-bytes-per-token", "8", 3),
        ("--max-copy-bytes-per-token", "1000000", 0),
    ],
)
def test_a_limit_on_copies(environment, target, option, limit, code, partita, model):
    done = partita("place", model("island"), "--provider", f"{target.provider},cpu", option, limit)
    assert done.code == code, done


@each_environment()
def test_a_file_that_is_no_model(environment, partita, tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    refused(partita("place", broken, "--provider", "cpu"), "broken.onnx", code=1)
    refused(partita("place", tmp_path / "absent.onnx", "--provider", "cpu"), "absent.onnx", code=1)
