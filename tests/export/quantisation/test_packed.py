"""A packed weight: its bytes are what ONNX Runtime's operators read, and it never is in memory as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from safetensors.torch import load_file, save_file

from partita.errors import CheckpointError
from partita.export.checkpoint import open_checkpoint
from partita.export.quantisation import packed as packed_module
from partita.export.quantisation.kernels import Kernels
from partita.export.quantisation.operators import GATHER, MATMUL, gather_attributes, matmul_attributes
from partita.export.quantisation.bits import pack, unpack
from partita.export.quantisation.packed import Packed, Packing
from partita.export.quantisers import Grid
from partita.export.weight_sources import Plain, StoredPart, checkpoint_weight
from tests.conftest import TinyCheckpoint

NAME = "model.layers.0.mlp.down_proj.weight"  # [64, 96]


def plain(folder: Path, name: str = NAME) -> Plain:
    """A weight of a checkpoint, as it would be in fp32."""
    source = checkpoint_weight(open_checkpoint(str(folder)), name, ir.DataType.FLOAT).source
    assert isinstance(source, Plain)
    return source


def arrays(weight: Packed) -> list[np.ndarray]:
    """The parts in memory."""
    return [StoredPart(weight, index).numpy() for index in range(len(weight.parts))]


def meant(weight: Packed, parts: list[np.ndarray]) -> np.ndarray:
    """The weight [N, K] that the parts stand for, as the operators' documentation has it, in numpy."""
    bits, count = weight.packing.grid.bits, weight.blocks_per_row
    data, scales, *rest = parts

    def integers(packed: np.ndarray, wanted: int) -> np.ndarray:
        flat = packed.reshape(len(packed), -1)
        wide = flat if bits == 8 else np.stack([flat & 15, flat >> 4], -1).reshape(len(flat), -1)
        return wide[:, :wanted].astype(np.float32)

    zeros = integers(rest[0], count) if rest else np.full((weight.rows, count), weight.packing.grid.middle, np.float32)
    blocks = integers(data, count * weight.packing.block_size).reshape(weight.rows, count, -1)
    return ((blocks - zeros[..., None]) * scales[..., None]).reshape(weight.rows, -1)[:, : weight.width]


def run(operator: str, feed: np.ndarray, weight: Packed, parts: list[np.ndarray], level: int = 0) -> np.ndarray:
    """One node on the CPU provider."""
    kernels = Kernels(accuracy_level=level)
    if operator == GATHER:
        parts = [parts[0].reshape(weight.rows, -1), *parts[1:]]
        attributes, names = gather_attributes(weight.packing), ["data", "x", "scales", "zeros"]
    else:
        attributes = matmul_attributes(weight.rows, weight.width, weight.packing, kernels)
        names = ["x", "data", "scales", "zeros"]
    names = names[: 1 + len(parts)]
    constants = [
        onnx.numpy_helper.from_array(part, name)
        for part, name in zip(parts, [n for n in names if n != "x"], strict=True)
    ]
    kind = helper.np_dtype_to_tensor_dtype(feed.dtype)
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], domain="com.microsoft", **attributes)],
        "one",
        [helper.make_tensor_value_info("x", kind, feed.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return np.asarray(ort.InferenceSession(model.SerializeToString()).run(None, {"x": feed})[0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [32, 64])  # 96 is 3 blocks of 32, an odd number, and not a multiple of 64
def test_operators_read_what_is_packed(tiny_checkpoint: TinyCheckpoint, bits: int, symmetric: bool, size: int) -> None:
    weight = Packed.of(plain(tiny_checkpoint("llama")), Packing(Grid(bits, symmetric), size, "refit"))
    parts = arrays(weight)
    assert [part.shape for part in parts] == [part.shape for part in weight.parts]
    assert len(parts) == (2 if symmetric else 3)
    values = meant(weight, parts)
    original = load_file(tiny_checkpoint("llama") / "model.safetensors")[NAME].numpy()
    error = np.linalg.norm(values - original) / np.linalg.norm(original)
    assert error < (0.1 if bits == 4 else 0.01)
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    assert np.allclose(run(MATMUL, x, weight, parts), x @ values.T, atol=1e-5)
    assert np.allclose(run(MATMUL, x, weight, parts, level=4), x @ values.T, atol=0.02 * np.abs(x @ values.T).max())
    if weight.width % size == 0:
        ids = np.array([[3, 0, 63]], np.int64)
        assert np.array_equal(run(GATHER, ids, weight, parts)[0], values[[3, 0, 63]])


def test_pieces_do_not_depend_on_their_size(tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Packed.of(plain(tiny_checkpoint("llama")), Packing(Grid(4, symmetric=False), 32, "refit"))
    whole = arrays(weight)
    monkeypatch.setattr(packed_module, "SLICE_BYTES", 96 * 4 * 7)  # seven rows are read at a time
    monkeypatch.setattr(packed_module, "WORKING_ELEMENTS", 96 * 3)  # and three of them quantised
    pieces = list(weight.pieces())
    assert [index for index, _ in pieces] == sorted(index for index, _ in pieces)
    assert max(piece.numel() for index, piece in pieces if index == 0) == 3 * 96 // 2
    assert all(np.array_equal(one, other) for one, other in zip(whole, arrays(weight), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, own_copy: object, bad: float
) -> None:
    folder = own_copy(tiny_checkpoint("llama"))  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME][5, 7] = bad
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weight = Packed.of(plain(folder), Packing(Grid(4, symmetric=False), 32, "nearest"))
    with pytest.raises(CheckpointError, match=rf"tensor {NAME} holds NaN or infinite values"):
        list(weight.pieces())


@pytest.mark.parametrize("count", [4, 5])
def test_unpack_undoes_pack(count: int) -> None:
    integers = torch.arange(3 * count, dtype=torch.uint8).reshape(3, count) % 16
    assert torch.equal(unpack(pack(integers, 4), 4, count), integers)
    assert pack(torch.tensor([[1, 2]], dtype=torch.uint8), 4).tolist() == [[0x21]]
