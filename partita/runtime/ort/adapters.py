"""ONNX Runtime's adapter files: values by name for graph inputs with defaults.

They are bound like other inputs, because RunOptions.add_active_adapter has no effect on runs with bound inputs
(onnxruntime_pybind_iobinding.cc, ONNX Runtime 1.31).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita.errors import PackageError
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.runtime.ort.buffers import NATIVE_ERRORS, Buffer, host_buffer

VERSION = 1
FAILURES: tuple[type[Exception], ...] = (*NATIVE_ERRORS, KeyError)
"""A value of another type raises KeyError."""
TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


def write_adapter(path: Path, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write `values` by input name, float32 or float16."""
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(VERSION)
    adapter.set_model_version(VERSION)
    arrays = {name: np.ascontiguousarray(value) for name, value in values.items()}
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    adapter.export_adapter(str(path))


def read_adapter(path: Path, remedy: Remedy = FROM_CHECKPOINT) -> dict[str, tuple[Buffer, tuple[int, ...]]]:
    """The values of an adapter file with their shapes, in host memory. Raises PackageError if it is damaged."""
    try:
        adapter = ort.AdapterFormat.read_adapter(str(path))
        return {name: _buffer(value) for name, value in adapter.get_parameters().items()}
    except FAILURES as error:
        raise PackageError(f"{path}: damaged ({str(error).splitlines()[0][:200]})", remedy=remedy) from error


def _buffer(value: Any) -> tuple[Buffer, tuple[int, ...]]:
    """A numpy copy of a value, because the value's memory belongs to its file."""
    dtype, shape = TYPES[value.data_type()], tuple(value.shape())
    buffer = host_buffer(shape, dtype)
    buffer.host[...] = value.numpy()
    return buffer, shape
