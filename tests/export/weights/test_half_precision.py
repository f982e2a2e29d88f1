"""16-bit weights with float32 arithmetic: stored types, rounding loss and automatic selection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors import safe_open

from partita import cli
from partita.dtypes import EXACT, PRECISIONS
from partita.export.options import ExportOptions
from partita.export.target import Target
from partita.export.work import with_activations
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint
from tests.quantised_checkpoints import gptq, save_quantised


def types_of(folder: Path) -> dict[str, int]:
    """Element type of every weight that lies in the data file."""
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    return {each.name: each.data_type for each in proto.graph.initializer if each.external_data}


def test_bf16_weights_of_bf16_checkpoint_are_exact(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """About half the size, float32 tolerance, and the package itself is verified."""
    checkpoint = tiny_checkpoint("llama", dtype="bfloat16", tied=True, num_hidden_layers=1)
    narrow = exported(checkpoint, precision="bf16", activations="fp32")
    manifest = read_manifest(narrow)
    assert (
        manifest.half_precision is not None
        and manifest.half_precision.rounded == 0
        and manifest.half_precision.weights >= 6
    )
    assert manifest.tolerance == EXACT.tolerance == manifest.verification.tolerance
    assert manifest.verification.status == "verified" and manifest.verification.converted_copy is None
    assert manifest.graph.weight_bytes < 0.6 * 4 * manifest.source.parameters
    assert {state.dtype for state in manifest.graph.states} == {"float32"}


def test_stored_bf16_weights_equal_checkpoint_bits(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    checkpoint = tiny_checkpoint("llama", dtype="bfloat16", tied=True, num_hidden_layers=1)
    folder = exported(checkpoint, precision="bf16", activations="fp32")
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    (down,) = (each for each in proto.graph.initializer if "down_proj" in each.name)
    place = {entry.key: entry.value for entry in down.external_data}
    data = np.memmap(folder / place["location"], np.uint16, "r", int(place["offset"]), tuple(down.dims))
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert down.data_type == TensorProto.BFLOAT16
    assert np.array_equal(np.asarray(data).T, weight.view(torch.uint16).numpy())


def test_embedding_is_cast_after_gather(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """Vectors remain float32."""
    folder = exported(
        tiny_checkpoint("llama", dtype="bfloat16", tied=True, num_hidden_layers=1), precision="bf16", activations="fp32"
    )
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    kinds = types_of(folder)
    (look_up,) = (node for node in proto.graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    assert kinds[look_up.input[0]] == TensorProto.BFLOAT16
    assert any(node.op_type == "Cast" and node.input[0] == look_up.output[0] for node in proto.graph.node)
    vectors = {each.name for each in proto.graph.initializer if len(each.dims) < 2}
    assert not any(kind == TensorProto.BFLOAT16 for name, kind in kinds.items() if name in vectors)


def test_float32_weights_rounded_to_fp16_are_recorded(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    folder = exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16", activations="fp32")
    manifest = read_manifest(folder)
    assert manifest.half_precision is not None and manifest.half_precision.rounded == manifest.half_precision.weights
    assert manifest.verification.status == "verified" and "rounded weights" in str(manifest.verification.reference)
    assert manifest.quality is not None and manifest.quality.kl_mean > 0


def test_dequantised_gptq_weights_are_rounded_to_fp16(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """The dequantised values need more bits than their scales."""
    source = tiny_checkpoint("llama", dtype="float16", num_hidden_layers=1)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    checkpoint = save_quantised(source, tmp_path / "gptq", settings, gptq())
    manifest = read_manifest(exported(checkpoint, precision="fp16", activations="fp32"))
    assert manifest.half_precision is not None and 0 < manifest.half_precision.rounded < manifest.half_precision.weights
    assert manifest.verification.status == "verified" and manifest.tolerance == EXACT.tolerance


@pytest.mark.parametrize(
    ("precision", "why"),
    [
        pytest.param("bf16", "cpu has no MatMul kernel for bfloat16", marks=pytest.mark.heavy),
        ("fp16", "cpu has no MatMul kernel for float16"),
    ],
)
def test_float32_activations_are_selected_without_16_bit_matmul(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, why: str
) -> None:
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    checkpoint = tiny_checkpoint("llama", dtype=dtype, num_hidden_layers=1)
    words = ["export", str(checkpoint), str(tmp_path / "out"), "--max-length", "64", "--precision", precision]
    assert cli.run([*words, "--target", "cpu", "--explain"]) == 0
    out, err = capsys.readouterr()
    assert why in err and f"--activations {precision}" in err
    assert "narrow_weights" in out
    assert [entry.status for entry in read_manifest(tmp_path / "out").smoke] == ["ran"]


@pytest.mark.parametrize(
    ("asked", "provider", "machine", "wide"),
    [
        (None, Target("cpu", "", "gqa", ""), "x86_64", True),
        (None, Target("cpu", "", "gqa", ""), "AMD64", True),
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
    options = with_activations(
        ExportOptions("a", Path("b"), precision="fp16", activations=asked),  # type: ignore[arg-type]
        provider,
        told.append,
    )
    assert (options.activations == "fp32", len(told)) == (wide, int(wide))


@pytest.mark.parametrize(("precision", "activations"), [("fp32", "fp16"), ("fp16", "bf16"), ("bf16", "int8")])
def test_incompatible_precision_and_activations_are_rejected(
    tmp_path: Path, precision: str, activations: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "nowhere", str(tmp_path / "out"), "--precision", precision, "--activations", activations]
    assert cli.run(words) == 2
    assert f"--activations {activations}: with --precision {precision} choose fp32" in capsys.readouterr().err


def test_package_compared_with_unrounded_model_has_fp16_tolerance(
    tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    """As in older packages, and where the model cannot use the rounded weights."""
    folder = exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16", activations="fp32")
    manifest = read_manifest(folder)
    assert manifest.half_precision is not None and manifest.half_precision.compared == "rounded"
    assert manifest.tolerance == EXACT.tolerance == manifest.verification.tolerance
    before = manifest.half_precision.model_copy(update={"compared": "model"})
    assert manifest.model_copy(update={"half_precision": before}).tolerance == PRECISIONS["fp16"].tolerance
