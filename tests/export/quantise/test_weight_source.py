"""Quantised weights are written in slices, in the layout of ONNX Runtime's operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint.description import open_checkpoint
from partita.export.quantise import weight_source as packed_module
from partita.export.quantise.quantisers import Grid, Packing
from partita.export.quantise.weight_source import QuantisedSource
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


def test_quantised_bytes_are_independent_of_slice_size(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = QuantisedSource.of(plain(tiny_checkpoint("llama")), Packing(Grid(4, symmetric=False), 32, "refit"))
    whole = arrays(weight)
    monkeypatch.setattr(packed_module, "SLICE_BYTES", 96 * 4 * 7)  # seven rows are read at a time
    monkeypatch.setattr(packed_module, "WORKING_ELEMENTS", 96 * 3)  # and three of them quantised
    pieces = list(weight.pieces())
    assert [index for index, _ in pieces] == sorted(index for index, _ in pieces)
    assert max(piece.numel() for index, piece in pieces if index == 0) == 3 * 96 // 2
    assert all(np.array_equal(one, other) for one, other in zip(whole, arrays(weight), strict=True))
