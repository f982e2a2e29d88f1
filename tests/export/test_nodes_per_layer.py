"""Number of nodes per llama layer as ONNX Runtime runs it; optimisation passes must not lose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.passes import optimised
from partita import cli
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint
from tests.export.quantise.test_forms import wide_integers

MOST = 11


@pytest.mark.parametrize(
    ("precision", "activations"),
    [
        ("fp32", None),
        ("int4", None),
        *(pytest.param(name, "fp32", marks=pytest.mark.heavy) for name in ("fp16", "bf16")),
    ],
)
def test_llama_layer_node_count_on_cpu_is_within_limit(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, precision: str, activations: str | None
) -> None:
    """float16 activations are excluded because the CPU provider casts them; see test_narrow_weights."""
    package = exported(tiny_checkpoint("llama"), precision=precision, activations=activations, attention="gqa")
    assert 5 <= optimised(package)[1] <= MOST


def test_llama_layer_node_count_on_cuda_is_within_limit(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dry run: the decode nodes that a second layer adds, all of them on CUDA."""
    nodes = []
    for layers in (1, 2):
        checkpoint = tiny_checkpoint("llama", num_hidden_layers=layers)
        package = exported(checkpoint, precision="fp16", attention="gqa")
        report = tmp_path / f"{layers}.json"
        words = ["place", str(package), "--provider", "cuda,cpu", "--dry-run", "--max-cpu-nodes", "0"]
        assert cli.run([*words, "--report", str(report)]) == 0, capsys.readouterr().err
        phases = json.loads(report.read_text())["phases"]
        nodes.append(next(len(phase["nodes"]) for phase in phases if phase["name"] == "decode"))
    assert 5 <= nodes[1] - nodes[0] <= MOST


# No integers of 64 bits are computed in a step: what is fed is, tokens and which logits are wanted, and no more


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"precision": "int4", "attention": "gqa"}),
        ("llama", {"batch_size": 3}),
        pytest.param("llama", {"attention": "gqa"}, marks=pytest.mark.heavy),
        pytest.param(
            "llama", {"precision": "fp16", "activations": "fp32", "attention": "gqa"}, marks=pytest.mark.heavy
        ),
        pytest.param("llama", {"batch_size": 3, "attention": "onnx24"}, marks=pytest.mark.heavy),
        ("qwen2", {"precision": "int8", "activations": "int8"}),
        pytest.param("llama", {"precision": "fp16"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"precision": "bf16", "attention": "gqa"}, marks=pytest.mark.heavy),
        pytest.param("qwen3", {"precision": "int4"}, marks=pytest.mark.heavy),
        pytest.param(
            "llama", {"precision": "int8", "activations": "int8", "static_shapes": True}, marks=pytest.mark.heavy
        ),
    ],
)
def test_exported_graph_computes_no_wide_integers(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, options: dict[str, Any]
) -> None:
    package = exported(tiny_checkpoint(kind), **options)
    for file in read_manifest(package).graph.files:
        assert wide_integers(package / file.file) == {}
