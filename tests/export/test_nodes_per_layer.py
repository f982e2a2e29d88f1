"""How many nodes a layer of a llama is when ONNX Runtime runs it: what the passes are for, and easily lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.passes import optimised
from partita import cli
from tests.conftest import Exported, TinyCheckpoint

MOST = 11


@pytest.mark.parametrize(
    ("precision", "activations"),
    [
        ("fp32", None),
        ("int4", None),
        *(pytest.param(name, "fp32", marks=pytest.mark.heavy) for name in ("fp16", "bf16")),
    ],
)
def test_a_layer_has_few_nodes_on_the_cpu(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, precision: str, activations: str | None
) -> None:
    """Arithmetic in float16 is not among them, which the CPU provider casts: test_narrow_weights has what it gets."""
    package = exported(tiny_checkpoint("llama"), precision=precision, activations=activations, attention="gqa")
    assert 5 <= optimised(package)[1] <= MOST


def test_a_layer_has_few_nodes_on_cuda(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the dry run: what one more layer adds, all of it on the provider."""
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
