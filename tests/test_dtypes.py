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


def test_bfloat16_is_stored_as_upper_half_of_float32() -> None:
    assert [entry.name for entry in dtypes.ALL if entry.upper_half] == ["bfloat16"]
    bits = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
    theirs = onnx.helper.tensor_dtype_to_np_dtype(dtypes.dtype_named("bfloat16").number)
    assert bits.astype(dtypes.storage("bfloat16")).view(theirs).astype(np.float32).tolist() == [1.5, -2.0]


def test_invalid_type_raises_value_error() -> None:
    assert dtypes.find("float31") is None
    for wrong in (
        lambda: dtypes.dtype_named("float31"),
        lambda: dtypes.dtype_numbered(0),
        lambda: dtypes.size_bytes("string", ()),
    ):
        with pytest.raises(ValueError, match="float31|0 is no|string"):
            wrong()
    with pytest.raises(ValueError, match="complex128"):
        dtypes.storage("complex128")


def test_precision_accepts_integers_of_any_width() -> None:
    assert dtypes.precision("int4") is dtypes.PRECISIONS["int4"]
    assert (dtypes.precision("int2").name, dtypes.precision("int2").bits) == ("int2", 2)
    for wrong in ("int", "int64x", "fp8"):
        with pytest.raises(KeyError, match=wrong):
            dtypes.precision(wrong)
