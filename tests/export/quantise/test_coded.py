"""Codes that are no integers are kept as the checkpoint has them, and the graph computes the numbers of the library."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import partita
from partita.cli import run
from partita.errors import UsageError
from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.checkpoint.stored_precision import settled
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.options import ExportOptions
from partita.export.progress import Silent, stage
from partita.export.weights.coded_weights import codable, store_coded
from partita.export.weights.external_data import file_bytes, parameter_count, write_data
from partita.export.weights.origins import (
    Cut,
    Flattened,
    Interleaved,
    Joined,
    Origin,
    Permuted,
    Rescaled,
    Stored,
    last_axis,
)
from partita.export.weights.sources import checkpoint_weight
from partita.package.folder import read_manifest
from tests import quantised_checkpoints as formats
from tests.conftest import Exported, TinyCheckpoint
from tests.export.checkpoint.stored_formats.test_libraries import stored
from tests.export.test_passes import NOTHING_KNOWN, graph, value

CODED = (
    "bnb_nf4",
    "bnb_nf4_nested",
    "bnb_fp4",
    "fp8_block",
    "fp8_block_float32",
    "fp8_tensor",
    "compressed_fp8",
    "compressed_fp8_block",
    "compressed_fp8_tensor",
    "torchao_float8",
    "torchao_int4_plain",
)
SHAPES = {
    "as it is": lambda x: x,
    "turned": lambda x: Permuted(x, (1, 0)),
    "three joined": lambda x: Joined.of((x, Cut(x, 0, 3, 9), x), 0),
    "joined and turned": lambda x: Permuted(Joined.of((x, x), 0), (1, 0)),
    "halves interleaved": lambda x: Interleaved(x, 0),
}
DOWN = "model.layers.0.mlp.down_proj"
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def checkpoint_of(name: str, folder: Path) -> tuple[Checkpoint, torch.Tensor]:
    """A checkpoint of one weight that a library stored, and the numbers that it stands for, float32."""
    quantised, expected = stored(name, folder)
    made = Checkpoint(folder, name, None, "", quantised.tensors, (), quantised)  # type: ignore[arg-type]
    return made, expected.float()


def product(checkpoint: Checkpoint, origin: Origin) -> ir.Model:
    """A graph that multiplies by a weight, so that a unit matrix gives its numbers."""
    tensor = checkpoint_weight(checkpoint, origin, ir.DataType.FLOAT)
    weight = ir.Value(name="w", shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    x = value("x", ["R", origin.shape[0]])
    return graph([x], [ir.node("MatMul", [x, weight])], [weight])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CODED)
def test_the_graph_has_the_numbers_of_the_library(name: str, shape: str, tmp_path: Path) -> None:
    checkpoint, expected = checkpoint_of(name, tmp_path)
    assert codable(checkpoint.quantised)
    origin = SHAPES[shape](Stored(checkpoint.tensors["X.weight"]))
    if name.startswith("fp8") or "float8" in name or "compressed" in name:  # computed in float32, and not rounded
        assert checkpoint.quantised is not None
        expected = _values(checkpoint)
    model = product(checkpoint, origin)
    counted = parameter_count([model])
    assert store_coded(model, NOTHING_KNOWN) == {"coded_weights": 1}
    assert parameter_count([model]) == counted
    planned = file_bytes([model])
    with stage(Silent(), "write", {}) as told:
        written = write_data([model], tmp_path, told)
    assert written.size_bytes == planned < counted * 2
    onnx.save(ir.to_proto(model), tmp_path / "graph.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "opened.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = ort.InferenceSession(str(tmp_path / "graph.onnx"), options, providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {"x": np.eye(origin.shape[0], dtype=np.float32)})
    whole = SHAPES[shape](_Known(expected)).read_all(None)
    assert np.array_equal(made, whole.numpy())
    assert [node.op_type for node in onnx.load(tmp_path / "opened.onnx").graph.node] == ["MatMul"]


class _Known(Origin):
    """Numbers at hand, in place of a tensor of a checkpoint."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def _tensors(self):
        return iter(())

    def _read(self, region, files):
        return self.numbers[tuple(slice(begin, end) for begin, end in region)]


def _values(checkpoint: Checkpoint) -> torch.Tensor:
    """What the reader makes of it, which is compared with the library elsewhere."""
    info = checkpoint.tensors["X.weight"]
    with OpenFiles(checkpoint.folder) as files:
        return files.read(info, tuple((0, size) for size in info.shape))


def test_where_blocks_end_up() -> None:
    matrix, stack = Stored(TensorInfo("a", "f", (4, 6), "float32")), Stored(TensorInfo("b", "f", (2, 4, 6), "float32"))
    assert last_axis(Permuted(stack, (2, 0, 1))) == 0 and last_axis(Flattened(stack)) == 1
    for mixed in (Cut(matrix, 1, 0, 3), Interleaved(matrix, 1), Joined.of((matrix, matrix), 1), Rescaled(matrix, 2, 0)):
        assert last_axis(mixed) is None
    assert last_axis(Joined.of((matrix, Permuted(Stored(TensorInfo("c", "f", (6, 9), "float32")), (1, 0))), 0)) is None


def test_what_has_other_blocks_stays_floats(tmp_path: Path) -> None:
    """Blocks that end in the middle of rows, and an operator set without places of 4 bits."""
    checkpoint, _ = checkpoint_of("bnb_nf4", tmp_path)
    assert checkpoint.quantised is not None
    (weight,) = checkpoint.quantised.weights.values()
    odd: Any = replace(weight, block=48)  # type: ignore[call-arg]
    assert odd.coding is None
    assert not codable(replace(checkpoint.quantised, weights={"X.weight": odd}))
    model = product(checkpoint, Stored(checkpoint.tensors["X.weight"]))
    model.graph.opset_imports[""] = 17
    assert store_coded(model, NOTHING_KNOWN) == {}


def test_without_a_precision_they_are_kept(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """Also where some have blocks of 64 in rows of 96, which are floats then."""
    folder = formats.save_quantised(tiny_checkpoint("llama"), tmp_path / "nf4", NF4, formats.nf4)
    checkpoint = open_checkpoint(str(folder))
    assert settled(ExportOptions(str(folder), folder), checkpoint).precision == "fp32"
    with pytest.raises(UsageError, match="taken as they are stored"):
        settled(ExportOptions(str(folder), folder, quantiser="nearest"), checkpoint)


@pytest.mark.parametrize(
    ("settings", "packer", "bits"),
    [
        (NF4, lambda weight: formats.nf4(weight, 32), 5),
        pytest.param(FP8, formats.float8(), 9, marks=pytest.mark.heavy),
    ],
    ids=["nf4", "fp8"],
)
def test_a_package_has_the_size_of_the_checkpoint(
    settings: dict[str, Any],
    packer: Any,
    bits: int,
    tiny_checkpoint: TinyCheckpoint,
    exported: Exported,
    tmp_path: Path,
    capsys,
) -> None:
    """`bits`: of a number, with what its block of 32 has in float32."""
    folder = formats.save_quantised(tiny_checkpoint("llama"), tmp_path / "base", settings, packer)
    package, floats = exported(folder, precision="auto"), exported(tiny_checkpoint("llama"))
    manifest = read_manifest(package)
    assert manifest.source.quantised is not None and manifest.source.quantised.taken == "as stored"
    assert manifest.verification.status == "verified" and manifest.tolerance == 1e-4
    assert manifest.graph.precision == "fp32" and manifest.graph.opsets[""] >= 21
    quantised = open_checkpoint(str(folder)).quantised
    assert quantised is not None
    saved = sum(math.prod(weight.shape) for weight in quantised.weights.values()) * (32 - bits) // 8
    pages = 4096 * len(quantised.weights)  # each begins on one
    assert manifest.graph.weight_bytes <= read_manifest(floats).graph.weight_bytes - saved + pages
    assert manifest.source.parameters == read_manifest(floats).source.parameters
    proto = onnx.load(package / "model.onnx", load_external_data=False)
    kinds = {each.name: each.data_type for each in proto.graph.initializer}
    codes = [kind for name, kind in kinds.items() if DOWN in name and name.endswith("codes")]
    assert codes == [onnx.TensorProto.FLOAT8E4M3FN if settings is FP8 else onnx.TensorProto.UINT4]
    assert run(["verify", str(package), "--provider", "cpu"]) == 0, capsys.readouterr().err
    with partita.load(package, providers="cpu") as model:
        assert len(model.generate([[1, 5, 9]], max_new_tokens=4).run().tokens) == 1
