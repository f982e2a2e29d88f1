"""Operators of whole graphs, and nodes per llama layer as ONNX Runtime runs them; passes must not lose them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest

from benchmarks.passes import optimised
from partita import cli
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint
from tests.export.breadth import recipes
from tests.export.quantise.test_forms import wide_integers

MOST = 11
OPERATORS = {
    ("llama", "gqa"): "6 Add, 2 Gather, 2 GroupQueryAttention, 11 MatMul, 2 Mul, 2 QuickGelu, "
    "1 SimplifiedLayerNormalization, 4 SkipSimplifiedLayerNormalization",
    ("qwen3", "gqa"): "2 Add, 4 BranchwiseRMSNorm, 2 Gather, 2 GroupQueryAttention, 11 MatMul, 2 Mul, 2 QuickGelu, "
    "1 SimplifiedLayerNormalization, 4 SkipSimplifiedLayerNormalization, 2 Split",
    ("gpt2", "gqa"): "3 Gather, 2 Gelu, 9 Gemm, 2 GroupQueryAttention, 18 Reshape, 5 SkipLayerNormalization",
    ("llama", "onnx24"): "18 Add, 2 Attention, 4 Gather, 15 MatMul, 4 Mul, 5 RMSNormalization, 8 Reshape, "
    "4 RotaryEmbedding, 2 Sigmoid, 4 TensorScatter, 8 Transpose",
}
"""Type and lowering -> operators of the graph, in two layers with every bias."""


@pytest.mark.parametrize(("model_type", "attention"), OPERATORS)
def test_passes_fuse_whole_graphs(exported: Exported, tmp_path: Path, model_type: str, attention: str) -> None:
    """Norms, sums, head norms, activations, rotary embeddings, projections and views; the package is verified."""
    checkpoint = recipes.save(tmp_path / "checkpoint", model_type)
    model = onnx.load(exported(checkpoint, attention=attention) / "model.onnx", load_external_data=False)
    counts = Counter(node.op_type for node in model.graph.node)
    assert ", ".join(f"{counts[each]} {each}" for each in sorted(counts)) == OPERATORS[model_type, attention]


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


def heavy(kind: str, **options: Any) -> Any:
    return pytest.param(kind, options, marks=pytest.mark.heavy)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"precision": "int4", "attention": "gqa"}),
        ("llama", {"batch_size": 3}),
        ("qwen2", {"precision": "int8", "activations": "int8"}),
        heavy("llama", precision="fp16", activations="fp32", attention="gqa"),
        heavy("llama", batch_size=3, attention="onnx24"),
        heavy("qwen3", precision="int4"),
        heavy("llama", precision="int8", activations="int8", static_shapes=True),
    ],
)
def test_exported_graph_computes_no_wide_integers(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, options: dict[str, Any]
) -> None:
    """Only tokens and the indices of logits have 64 bits."""
    package = exported(tiny_checkpoint(kind), **options)
    for file in read_manifest(package).graph.files:
        assert wide_integers(package / file.file) == {}
