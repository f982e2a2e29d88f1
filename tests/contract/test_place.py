"""`partita place MODEL`: the placement of any ONNX model, and limits that it must meet."""

from __future__ import annotations

import json
import re

import pytest

from tests.contract.cases import cases, each_environment, targets
from tests.contract.commands import honoured, nodes_on, refused

CPU = "CPUExecutionProvider"


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
    done = honoured(
        partita("place", model("island"), "--full", "--provider", f"{target.provider},cpu", "--report", report)
    )
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0
    fallen = {fallback["node"]: (fallback["op_type"], fallback["provider"]) for fallback in content["fallbacks"]}
    assert fallen["island/Scaler"] == ("Scaler", CPU)
    # A compiling provider may also leave the MatMul behind the island, which is a subgraph of one node.
    assert nodes_on(content, CPU) == len(fallen) == 1 or (target.kind == "compiling" and len(fallen) == 2), fallen
    copies = [copy for phase in content["phases"] for copy in phase["copies"] if copy["kind"] == "memcpy_node"]
    assert len(copies) == (2 if target.kind == "device" else 0), copies
    assert "cost per run: 2 tensors between partitions" in done.out or target.kind == "compiling", done
    assert "    cost: " in done.out, done
    copied = re.search(r"^  h  +to host .*island/Scaler$", done.out, re.MULTILINE)
    assert (copied is not None) is (target.kind == "device"), done


LIMITS = [("--max-cpu-nodes", 0, 2), ("--max-copies", 1, 64), ("--max-copy-bytes-per-token", 8, 1_000_000)]


def limits(environment):
    """Rows of target, option, a limit that is exceeded, and one that is kept; copies are counted on devices."""
    return [(t, *row) for t in environment.targets for row in (LIMITS if t.kind == "device" else LIMITS[:1])]


@cases("target, option, exceeded, kept", limits, sample=True)
@pytest.mark.usefixtures("device")
def test_a_limit(environment, target, option, exceeded, kept, partita, model):
    command = ("place", model("island"), "--provider", f"{target.provider},cpu", option)
    done = partita(*command, exceeded)
    assert done.code == 3 and option in done.err, done
    honoured(partita(*command, kept))


@each_environment(sample=True)
def test_a_file_that_is_no_model(environment, partita, tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    refused(partita("place", broken, "--provider", "cpu"), "broken.onnx", code=1)
    refused(partita("place", tmp_path / "absent.onnx", "--provider", "cpu"), "absent.onnx", code=1)
