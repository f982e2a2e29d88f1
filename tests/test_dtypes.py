"""The table of element types matches the installed onnx, safetensors and numpy."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

from partita import dtypes


def test_table_has_every_onnx_type_by_name_and_number() -> None:
    theirs = {name: number for name, number in onnx.TensorProto.DataType.items() if number}
    mine = {entry.onnx_name: entry.number for entry in dtypes.ALL}

    assert {name: mine.get(name) for name in theirs} == theirs
    assert len({entry.name for entry in dtypes.ALL}) == len(dtypes.ALL)


@pytest.mark.parametrize("entry", [e for e in dtypes.ALL if e.bits is not None], ids=lambda e: e.name)
def test_sizes_match_onnx_raw_data(entry: dtypes.ElementType) -> None:
    try:
        kind = onnx.helper.tensor_dtype_to_np_dtype(entry.number)
    except KeyError:
        pytest.skip("this onnx does not have the type")
    shape = (3, 5)
    written = onnx.numpy_helper.from_array(np.zeros(shape, kind)).raw_data

    assert dtypes.size_bytes(entry.name, shape) == len(written)
    if entry.storage is not None:
        assert np.dtype(dtypes.storage(entry.name)).itemsize * math.prod(shape) == len(written)
