"""16-bit weights with float32 arithmetic: stored types, rounding loss and automatic selection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file

from partita import cli
from partita.dtypes import EXACT, PRECISIONS
from partita.export.options import ExportOptions
from partita.export.target import Target
from partita.export.work import with_activations
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama", dtype="bfloat16", tied=True, num_hidden_layers=1)


@pytest.fixture
def narrow(checkpoint: Path, exported: Exported) -> Path:
    """Its package with bfloat16 weights and float32 arithmetic."""
    return exported(checkpoint, precision="bf16", activations="fp32")


def test_bf16_weights_of_bf16_checkpoint_are_exact(narrow: Path, checkpoint: Path) -> None:
    """About half the size, float32 tolerance, and the package itself is verified."""
    manifest = read_manifest(narrow)
    kept = manifest.half_precision
    assert kept is not None and kept.rounded == 0 and kept.weights >= 6
    assert manifest.tolerance == EXACT.tolerance == manifest.verification.tolerance
    assert manifest.verification.status == "verified" and manifest.verification.converted_copy is None
    assert manifest.graph.weight_bytes < 0.6 * 4 * manifest.source.parameters
    assert {state.dtype for state in manifest.graph.states} == {"float32"}
    proto = onnx.load(narrow / "model.onnx", load_external_data=False)
    (down,) = (each for each in proto.graph.initializer if "down_proj" in each.name)
    place = {entry.key: entry.value for entry in down.external_data}
    data = np.memmap(narrow / place["location"], np.uint16, "r", int(place["offset"]), tuple(down.dims))
    weight = load_file(checkpoint / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert down.data_type == TensorProto.BFLOAT16
    assert np.array_equal(np.asarray(data).T, weight.view(torch.uint16).numpy())


def test_embedding_is_cast_after_gather(narrow: Path) -> None:
    """Vectors remain float32."""
    graph = onnx.load(narrow / "model.onnx", load_external_data=False).graph
    kinds = {each.name: each.data_type for each in graph.initializer if each.external_data}
    (look_up,) = (node for node in graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    assert kinds[look_up.input[0]] == TensorProto.BFLOAT16
    assert any(node.op_type == "Cast" and node.input[0] == look_up.output[0] for node in graph.node)
    vectors = {each.name for each in graph.initializer if len(each.dims) < 2}
    assert not any(kind == TensorProto.BFLOAT16 for name, kind in kinds.items() if name in vectors)


def test_float32_weights_rounded_to_fp16_are_recorded(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    folder = exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16", activations="fp32")
    manifest = read_manifest(folder)
    assert manifest.half_precision is not None and manifest.half_precision.rounded == manifest.half_precision.weights
    assert manifest.verification.status == "verified" and "rounded weights" in str(manifest.verification.reference)
    assert manifest.quality is not None and manifest.quality.kl_mean > 0
    assert manifest.half_precision.compared == "rounded" and manifest.tolerance == EXACT.tolerance
    # compared with the model without rounding: older packages, and models that cannot use the rounded weights
    before = manifest.half_precision.model_copy(update={"compared": "model"})
    assert manifest.model_copy(update={"half_precision": before}).tolerance == PRECISIONS["fp16"].tolerance


def test_float32_activations_are_selected_without_16_bit_matmul(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint("llama", dtype="float16", num_hidden_layers=1)
    words = ["export", str(checkpoint), str(tmp_path / "out"), "--max-length", "64", "--precision", "fp16"]
    assert cli.run([*words, "--target", "cpu", "--explain"]) == 0
    out, err = capsys.readouterr()
    assert "cpu has no MatMul kernel for float16" in err and "--activations fp16" in err
    assert "narrow_weights" in out
    assert [entry.status for entry in read_manifest(tmp_path / "out").smoke] == ["ran"]


@pytest.mark.parametrize(
    ("asked", "provider", "machine", "wide"),
    [
        (None, Target("cpu", "", "gqa", ""), "x86_64", True),
        (None, Target("cpu", "", "gqa", ""), "aarch64", False),
        (None, Target("cpu", "", "gqa", "", by_default=True), "x86_64", False),
        (None, Target("webgpu", "", "gqa", ""), "x86_64", False),
        (None, None, "x86_64", False),
        ("fp16", Target("cpu", "", "gqa", ""), "x86_64", False),
    ],
)
def test_fp16_uses_float32_activations_on_requested_x86_cpu(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, provider: Target | None, machine: str, wide: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    told: list[str] = []
    given = ExportOptions("a", Path("b"), precision="fp16", activations=asked)  # type: ignore[arg-type]
    options = with_activations(given, provider, told.append)
    assert (options.activations == "fp32", len(told)) == (wide, int(wide))
