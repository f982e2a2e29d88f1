"""Planted single-node faults are located, and a correct graph has no finding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Exported, TinyCheckpoint, require
from tests.contract.expectations import ENVIRONMENTS
from tests.drift.faults import GRAPHS, export_package, faults_of
from tests.drift.planted import are_right, compare, counts_of, judge, rows

CHAINS = {"main": "cpu", "plugins": "cpu", "webgpu": "webgpu,cpu", "openvino": "openvino,cpu", "qnn": "qnn,cpu"}
"""Environment -> the tested chain. The providers of the plugins have no device on processors of AMD."""
ONLY = {
    "openvino": ("llama-fp32", "llama-int4", "llama-primitives-fp32", "genai-int4-cpu", "optimum"),
    "webgpu": ("llama-onnx24-fp32", "llama-primitives-fp32", "llama-primitives-int4", "gemma3_text-primitives-fp32"),
    "qnn": ("llama-primitives-static-fp16", "demo-primitives-static-fp16", "genai-int4-cpu"),
}
"""Graphs of an environment, if not all. Over SwiftShader, GroupQueryAttention is wrong and float16 is missing. QNN
takes no nodes of other packages.
"""
SAMPLE = {
    "llama-fp32": ("embedding-scale", "rotary-halves", "rotary-interleaved", "projection", "window"),
    "llama-fp16": ("overflow-down", "activation", "norm-weight"),
    "llama-int4": ("zero-points", "block-scales-sign", "head-scales"),
    "gemma3_text-primitives-fp32": ("lost-window-constant", "rotary-swapped-halves", "softmax-axis", "residual-sign"),
    "genai-int4-cpu": ("block-scales", "product"),
}
"""Graph -> kinds that `make test` plants; `make test-heavy` plants all, in every environment."""


@pytest.mark.parametrize("graph", SAMPLE)
def test_planted_faults_are_located_and_control_has_no_finding(
    graph: str, exported: Exported, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = export_package(graph, exported, tiny_checkpoint)
    control = compare(folder, folder)
    assert control.is_within and not control.nodes
    assert control.layers and all(layer.own_error is not None for layer in control.layers)
    planted = [fault for fault in faults_of(graph, folder) if fault.kind in SAMPLE[graph]]
    assert len(planted) == len(SAMPLE[graph])
    for fault in planted:
        layer, node, found = judge(folder, fault, tmp_path / "faulty")
        assert layer and node, (fault, found.first_layer, found.first_node, found.basis)
        assert (found.not_finite is None) is fault.finite
        assert fault.finite or found.not_finite is not None and found.not_finite.node == fault.node


@pytest.mark.heavy
@pytest.mark.parametrize("environment", CHAINS)
def test_planted_faults_are_located_in_every_environment(
    environment: str, exported: Exported, tiny_checkpoint: TinyCheckpoint
) -> None:
    home = REPOSITORY / ".venvs" / environment
    require(f"the environment {environment} (make env-{environment})", environment == "main" or home.is_dir())
    python = sys.executable if environment == "main" else str(home / "bin" / "python")
    graphs = ONLY.get(environment, GRAPHS)
    folders = [f"{graph}={export_package(graph, exported, tiny_checkpoint)}" for graph in graphs]
    variables = {**ENVIRONMENTS[environment].variables, **os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [python, "-m", "tests.drift.planted", CHAINS[environment], *folders]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.heavy
def test_planted_faults_are_located_against_the_source_model(
    exported: Exported, tiny_checkpoint: TinyCheckpoint
) -> None:
    folder = export_package("llama-fp32", exported, tiny_checkpoint)
    found = [*rows("cpu", "llama-fp32", folder, [], tiny_checkpoint("llama"))]
    assert are_right(counts_of(found)), found
