"""Planted single-node faults are located, and a correct graph has no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Exported, TinyCheckpoint, require
from tests.drift.faults import export_package, faults_of
from tests.drift.planted import CHAINS, compare, judge, main

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
def test_planted_faults_are_located_in_every_environment(environment: str) -> None:
    python = REPOSITORY / ".venvs" / environment
    require(f"the environment {environment} (make env-{environment})", environment == "main" or python.is_dir())
    assert main([environment]) == 0


@pytest.mark.heavy
def test_planted_faults_are_located_against_the_source_model() -> None:
    assert main(["--source", "--graph", "llama-fp32"]) == 0
