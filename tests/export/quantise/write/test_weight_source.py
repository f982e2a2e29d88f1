"""A packed weight: its bytes are what ONNX Runtime's operators read, and it never is in memory as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from partita.errors import CheckpointError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.quantise.quantisers import Grid
from partita.export.quantise.write import weight_source as packed_module
from partita.export.quantise.write.weight_source import Packing, QuantisedSource
from partita.export.weights import pack, unpack
from partita.export.weights.sources import FloatSource, StoredPart, checkpoint_weight
from tests.conftest import TinyCheckpoint

NAME = "model.layers.0.mlp.down_proj.weight"  # [64, 96]


def plain(folder: Path, name: str = NAME) -> FloatSource:
    """A weight of a checkpoint, as it would be in fp32."""
    source = checkpoint_weight(open_checkpoint(str(folder)), name, ir.DataType.FLOAT).source
    assert isinstance(source, FloatSource)
    return source


def arrays(weight: QuantisedSource) -> list[np.ndarray]:
    """The parts in memory."""
    return [StoredPart(weight, index).numpy() for index in range(len(weight.parts))]


def test_pieces_do_not_depend_on_their_size(tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = QuantisedSource.of(plain(tiny_checkpoint("llama")), Packing(Grid(4, symmetric=False), 32, "refit"))
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
    weight = QuantisedSource.of(plain(folder), Packing(Grid(4, symmetric=False), 32, "nearest"))
    with pytest.raises(CheckpointError, match=rf"tensor {NAME} contains (NaN|infinite numbers)"):
        list(weight.pieces())


@pytest.mark.parametrize("count", [4, 5])
def test_unpack_undoes_pack(count: int) -> None:
    integers = torch.arange(3 * count, dtype=torch.uint8).reshape(3, count) % 16
    assert torch.equal(unpack(pack(integers, 4), 4, count), integers)
    assert pack(torch.tensor([[1, 2]], dtype=torch.uint8), 4).tolist() == [[0x21]]
