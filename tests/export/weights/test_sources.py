"""A weight may be several tensors in the file: nothing but its source knows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file

from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.passes import run_all
from partita.export.passes.base import drop_unused_initializers
from partita.export.progress import Silent, stage
from partita.export.target import skeleton
from partita.export.weights.external_data import file_bytes, parameter_count, planned_bytes, write_data
from partita.export.weights.origins import StoredTensor
from partita.export.weights.sources import Part, WeightSource, checkpoint_weight, initializers, weight_part
from partita.package.folder import WEIGHTS
from tests.conftest import TinyCheckpoint
from tests.export.test_passes import NOTHING_KNOWN, graph, value

NAME = "model.layers.0.mlp.up_proj.weight"  # [96, 64]
ROWS, COLUMNS = 96, 64


@dataclass(frozen=True)
class ByRow(WeightSource):
    """Rows of int8 with a float32 scale each: what a quantiser would make, written for this test alone."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ByRow:
        return cls(checkpoint, StoredTensor(checkpoint.tensors[NAME]), ir.DataType.FLOAT, NAME)

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part((ROWS, COLUMNS), ir.DataType.INT8), Part((ROWS,), ir.DataType.FLOAT, "scales")

    @property
    def key(self) -> Hashable:
        return "int8 by row", self.name

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        scales = []
        with OpenFiles(self.checkpoint.folder) as files:
            for start in range(0, ROWS, 40):
                region = ((start, min(start + 40, ROWS)), (0, COLUMNS))
                rows = files.read(self.checkpoint.tensors[self.name], region).float()
                scales.append(rows.abs().amax(dim=1) / 127)
                yield 0, torch.round(rows / scales[-1][:, None]).to(torch.int8)
        yield 1, torch.cat(scales)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint("llama", dtype="float32")))


def model(source: WeightSource) -> ir.Model:
    """x times the weight turned: DequantizeLinear, Transpose, MatMul."""
    x, (data, scales) = value("x", [1, "s", COLUMNS]), initializers(source, NAME)
    whole = ir.node("DequantizeLinear", [data, scales], {"axis": 0})
    turn = ir.node("Transpose", whole.outputs, {"perm": [1, 0]})
    return graph([x], [whole, turn, ir.node("MatMul", [x, turn.outputs[0]])], [data, scales])


def write(models: list[ir.Model], folder: Path) -> int:
    with stage(Silent(), "write", {}) as current:
        expected = file_bytes(models)
        size = write_data(models, folder, current).size_bytes
    assert size == expected, "what a size budget goes by"
    for number, each in enumerate(models):
        ir.save(each, folder / f"{number}.onnx")
    return size


def test_a_weight_of_two_tensors_goes_all_the_way_to_a_session(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = ByRow.of(checkpoint)
    made = model(source)

    assert parameter_count([made]) == ROWS * COLUMNS, "scales are no weights of the model"
    assert planned_bytes([made]) == ROWS * COLUMNS + 4 * ROWS
    made, _ = run_all(made, NOTHING_KNOWN, None)
    assert [node.op_type for node in made.graph] == ["DequantizeLinear", "Transpose", "MatMul"], "its axes stay"
    assert len(skeleton(made)) < ROWS * COLUMNS, "a provider is asked without its values"
    write([made], tmp_path)

    x = np.random.default_rng(0).standard_normal((1, 3, COLUMNS)).astype(np.float32)
    session = ort.InferenceSession(str(tmp_path / "0.onnx"), providers=["CPUExecutionProvider"])
    original = load_file(checkpoint.folder / "model.safetensors")[NAME].float().numpy()
    got = np.asarray(session.run(None, {"x": x})[0])
    np.testing.assert_allclose(got, x @ original.T, atol=0.02 * np.abs(x @ original.T).max())


def test_two_graphs_share_all_parts_of_a_weight(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = write([model(ByRow.of(checkpoint))], tmp_path / "one")
    two = write([model(ByRow.of(checkpoint)), model(ByRow.of(checkpoint))], tmp_path / "two")
    assert one == two == (tmp_path / "two" / WEIGHTS).stat().st_size


def test_a_graph_may_read_one_part_only(checkpoint: Checkpoint, tmp_path: Path) -> None:
    data, scales = initializers(ByRow.of(checkpoint), NAME)
    made = graph([], [ir.node("Abs", [scales])], [data, scales])
    drop_unused_initializers(made.graph)
    write([made], tmp_path)
    session = ort.InferenceSession(str(tmp_path / "0.onnx"), providers=["CPUExecutionProvider"])
    original = load_file(checkpoint.folder / "model.safetensors")[NAME].float()
    np.testing.assert_allclose(
        np.asarray(session.run(None, {})[0]), original.abs().amax(dim=1).numpy() / 127, rtol=1e-6
    )


def test_a_source_that_gives_less_than_it_says_is_no_package(checkpoint: Checkpoint, tmp_path: Path) -> None:
    class Short(ByRow):
        def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
            yield from list(super().pieces())[:-1]

    with pytest.raises(ValueError, match=f"{NAME}: part 1 has {4 * ROWS}"):
        write([model(Short.of(checkpoint))], tmp_path)


def test_a_weight_of_several_parts_is_not_turned_in_part(checkpoint: Checkpoint) -> None:
    """Its scales would stay as they were."""
    for part in initializers(ByRow.of(checkpoint), NAME):
        weight = weight_part(part)
        assert weight is not None
        assert weight.permuted((1, 0)) is None and weight.interleaved(0) is None
    whole = checkpoint_weight(checkpoint, NAME, ir.DataType.FLOAT).permuted((1, 0))
    assert whole is not None and tuple(whole.shape.numpy()) == (COLUMNS, ROWS)
