"""`partita support`: tables of every provider; the CPU table against ONNX Runtime's kernel registry."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from partita.support.build import short
from tests.contract.cases import cases, targets
from tests.contract.commands import honoured

SAMPLE = (
    *("Add", "ArgMax", "BatchNormalization", "Cast", "Clip", "ConstantOfShape", "Conv", "DequantizeLinear", "Gather"),
    *("HardSwish", "Identity", "LayerNormalization", "MatMul", "Mish", "Pad", "PRelu", "QuantizeLinear", "ReduceSum"),
    *("Relu", "Reshape", "Resize", "SequenceInsert", "Softmax", "Squeeze", "TopK", "Upsample", "Where"),
    *("MatMulNBits", "GroupQueryAttention", "RotaryEmbedding"),
)
# Segmentation fault where CUDA's libraries are missing, so in a process of its own, and only in an environment without.
REGISTRY = """
import json
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def
print(json.dumps([[k.domain, k.op_name, list(k.version_range), dict(k.type_constraints)]
                  for k in get_all_opkernel_def() if k.provider == "CPUExecutionProvider"]))
"""
OPEN_END = 2**31 - 1


@cases("target", targets)
def test_support_table_of_model_lists_its_operators_as_supported(environment, target, partita, model, tmp_path):
    """MatMul and Relu of float32; test_place.py places the same model."""
    path = tmp_path / "table.json"
    graph = model("matmul_relu")
    honoured(partita("support", graph, "--provider", target.provider, "--seconds", "240", "--out", path))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["schema"] == "partita.support/1"
    assert {need["operator"]: need["outcome"] for need in found["model_operators"]} == {
        "MatMul": "supported",
        "Relu": "supported",
    }
    assert found["provider"]["ort_name"] == target.ort_name
    assert "supports 2 of 2 nodes" in honoured(partita("report", "show", path, "--full")).out


@pytest.mark.environment("qnn")  # ONNX Runtime as it is released for CPUs
@pytest.mark.parametrize("what", [SAMPLE, pytest.param(("--all",), marks=pytest.mark.heavy)], ids=["sample", "all"])
def test_cpu_table_is_the_registry_of_kernels(what, partita, tmp_path):
    path = tmp_path / "table.json"
    honoured(partita("support", *what, "--provider", "cpu", "--seconds", "900", "--out", path))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["complete"] and found["crashes"] == 0
    done = subprocess.run([sys.executable, "-c", REGISTRY], capture_output=True, text=True, check=True)
    kernels, compared = json.loads(done.stdout), 0
    for entry, version, row, outcome in rows(found):
        types = {name: kind for name, kind in zip(version["types"]["variables"], row, strict=True) if kind}
        listed = any(fits(kernel, entry, version["since"], types) for kernel in kernels)
        compared += 1
        # An operator without a kernel can run all the same: as the nodes of its function, or as a constant.
        replaced = row in version["types"]["replaced"]
        if listed != (outcome == "supported" and not replaced):
            assert listed is False or outcome == "supported", (entry["name"], version["since"], types, outcome)
            assert listed or replaced, (entry["name"], version["since"], types)
    assert compared > 500


def rows(found: Any) -> Iterator[tuple[Any, Any, Any, str]]:
    """Every assignment of types that was tried."""
    for entry in found["operators"]:
        for version in entry["versions"]:
            for outcome in ("supported", "rejected", "failed", "crashed"):
                for row in version["types"][outcome]:
                    yield entry, version, row, outcome


def fits(kernel: Any, entry: Any, since: int, types: dict[str, str]) -> bool:
    """Whether a kernel is for this version of an operator in these types, by ONNX Runtime's own rule of versions.

    Constraints go by type variables, or by names of inputs, which are left out here.
    """
    domain, name, (first, last), constraints = kernel
    if (domain.replace("ai.onnx", "") if domain == "ai.onnx" else domain, name) != (entry["domain"], entry["name"]):
        return False
    if first != since and (last == OPEN_END or not first <= since <= last):
        return False
    return all(types[key] in map(short, allowed) for key, allowed in constraints.items() if types.get(key))


@cases("target", targets, heavy=("webgpu", "openvino", "plugins"))
def test_exhausted_time_budget_marks_table_incomplete(environment, target, partita):
    done = honoured(partita("support", "--all", "--provider", target.provider, "--seconds", "1", "--json"))
    assert done.json["complete"] is False
    assert done.json["variants"]["untested"] > 0 or not done.json["operators"]
