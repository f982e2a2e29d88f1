"""Tensors at a fixed address, in host memory shared with numpy or in device memory."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita import dtypes
from partita.errors import PackageError
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.runtime.ort.errors import buffer_error, run_error

HOST_MEMORY, CUDA_MEMORY = "Cpu", "Cuda"
POINTED = {HOST_MEMORY: "cpu", CUDA_MEMORY: "cuda"}
"""Memory with pointer addresses, and ONNX Runtime's name of the device; WebGPU's addresses are handles."""
ALIGNMENT_BYTES = 64
HEAD = '<ir_version: 8, opset_import: ["" : 14]>'
"""Head of models in ONNX's text format."""
NATIVE = ort.capi.onnxruntime_pybind11_state
NATIVE_ERRORS: tuple[type[Exception], ...] = (
    *(entry for entry in vars(NATIVE).values() if isinstance(entry, type) and issubclass(entry, Exception)),
    RuntimeError,
    ValueError,
)
"""Every exception that ONNX Runtime raises; its 15 status classes have no common base."""


@dataclass(frozen=True, slots=True)
class BufferRows:
    """The address of rows of a buffer, for binding."""

    device: str
    """ONNX Runtime's name of the device."""
    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor at a fixed address."""

    value: Any
    """The OrtValue."""
    array: npt.NDArray[Any] | None
    """The memory as a numpy array; None on a device. bfloat16 is uint16."""
    dtype: str
    memory: str
    size_bytes: int
    owner: Any = field(default=None, repr=False)
    """An object that owns the memory."""
    device_id: int = 0
    part: BufferRows | None = None
    """Set for rows of another buffer, which are bound by address; `value` is None."""

    @property
    def host(self) -> npt.NDArray[Any]:
        """The memory as a numpy array; host buffers only."""
        if self.array is None:
            raise ValueError(f"the buffer is in {self.memory} memory, which numpy cannot access")
        return self.array

    def __len__(self) -> int:
        """Size of the first axis."""
        return int(self.value.shape()[0])

    def released(self) -> Buffer:
        """A description of the buffer without its memory."""
        return replace(self, value=None, array=None, owner=None, part=None)

    def address(self) -> int:
        """Address of the first element."""
        return int(self.value.data_ptr()) if self.part is None else self.part.address

    @property
    def has_spans(self) -> bool:
        """Whether rows of the first axis can be bound, because addresses are pointers."""
        return self.memory in POINTED

    def rows(self, first: int, end: int) -> Buffer:
        """Rows `first` to `end` (exclusive) of the first axis, in the same memory. Requires `has_spans`."""
        shape = tuple(self.value.shape())
        row_bytes = self.size_bytes // shape[0]
        return Buffer(
            None,
            None if self.array is None else self.array[first:end],
            self.dtype,
            self.memory,
            row_bytes * (end - first),
            owner=self,
            device_id=self.device_id,
            part=BufferRows(POINTED[self.memory], self.address() + first * row_bytes, (end - first, *shape[1:])),
        )

    def clear(self) -> None:
        """Zero the buffer."""
        if self.array is not None:
            self.array.fill(0)
            return
        self.write(host_buffer(tuple(self.value.shape()), self.dtype))

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero these rows of the first axis. Requires `readable`. Device memory is copied through the host."""
        if self.array is None and set(rows) == set(range(self.value.shape()[0])):
            self.clear()
        else:
            self.change(lambda whole: whole.__setitem__(list(rows), 0))

    @property
    def readable(self) -> bool:
        """Whether the values can be copied to the host.

        ONNX Runtime copies CUDA memory and its own host allocations through numpy, which has no bfloat16.
        """
        by_numpy = self.memory in (HOST_MEMORY, CUDA_MEMORY)
        return self.array is not None or not by_numpy or not dtypes.dtype_named(self.dtype).upper_half

    def values(self) -> npt.NDArray[Any]:
        """Its values. Requires `readable`. The memory itself if on the host, else a copy."""
        return self.host_copy().host if self.array is None else self.array

    def change(self, how: Callable[[npt.NDArray[Any]], object]) -> None:
        """Let `how` modify the values. Requires `readable`. Device memory is copied to the host and back."""
        if self.array is not None:
            how(self.array)
            return
        held = self.host_copy()
        how(held.host)
        self.write(held)

    def host_copy(self) -> Buffer:
        """A copy in host memory. Requires `readable`. Raises the errors of a run."""
        target = host_buffer(tuple(self.value.shape()), self.dtype)
        if (values := self.copy(target)) is not target.host:
            target.host[...] = values
        return target

    def copy(self, target: Buffer) -> npt.NDArray[Any]:
        """A copy of the values on the host, in `target` (same shape and dtype) if possible. Requires `readable`.

        Raises the errors of a run, e.g. for a lost device.
        """
        try:
            if self.memory in (HOST_MEMORY, CUDA_MEMORY):
                values: npt.NDArray[Any] = self.value.numpy()
                return values
            ort.copy_tensors([self.value], [target.value])
        except NATIVE_ERRORS as error:
            raise run_error(f"a copy out of {self.memory} memory", error) from error
        return target.host

    def write(self, source: Buffer) -> None:
        """Fill device memory from a host buffer of the same shape and dtype. Raises the errors of a run."""
        try:
            if self.memory == CUDA_MEMORY:  # copy_tensors does not support the CUDA provider (ONNX Runtime 1.31.1)
                self.value.update_inplace(source.value)
            else:
                ort.copy_tensors([source.value], [self.value])
        except NATIVE_ERRORS as error:
            raise run_error(f"copy to {self.memory} memory", error) from error


def host_buffer(shape: Sequence[int], dtype: str) -> Buffer:
    """A zeroed tensor in host memory shared by numpy and ONNX Runtime. Pages are allocated at the first write.

    Raises ResourceError when the address space is exhausted.
    """
    element, kind, size = (
        dtypes.dtype_named(dtype).number,
        np.dtype(dtypes.storage(dtype)),
        dtypes.size_bytes(dtype, shape),
    )
    try:
        raw = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than addresses
        raise buffer_error(size, HOST_MEMORY) from error
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    array = raw[skip : skip + size].view(kind).reshape(shape)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
    return Buffer(value, array, dtype, HOST_MEMORY, size)


def reshaped(buffer: Buffer, shape: Sequence[int]) -> Buffer:
    """The first elements of a buffer in host memory as a tensor of another shape."""
    size = dtypes.size_bytes(buffer.dtype, shape)
    array = buffer.host.reshape(-1)[: math.prod(shape)].reshape(shape)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtypes.dtype_named(buffer.dtype).number)
    return Buffer(value, array, buffer.dtype, buffer.memory, size, owner=buffer)


def made_buffer(value: Any, memory: str) -> Buffer:
    """A tensor that ONNX Runtime allocated in `memory`, not shared with numpy."""
    dtype = dtypes.usual(str(value.data_type()).removeprefix("tensor(").removesuffix(")"))
    return Buffer(value, None, dtype, memory, dtypes.size_bytes(dtype, value.shape()))


def device_buffer(shape: Sequence[int], dtype: str, memory: str, device_id: int, keeper: Callable[[], Any]) -> Buffer:
    """A zeroed tensor in `memory` (e.g. Cuda) of device number `device_id`.

    `keeper` opens a session of `keeper_model` on that memory's provider: except for CUDA, the Python package allocates
    device memory only in a run. Raises ResourceError when device memory runs out.
    """
    element, size = dtypes.dtype_named(dtype).number, dtypes.size_bytes(dtype, shape)
    try:
        if memory == CUDA_MEMORY:
            value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, "cuda", device_id)
            buffer = Buffer(value, None, dtype, memory, size, device_id=device_id)
            buffer.clear()
            return buffer
        session, zeros = keeper(), host_buffer(shape, dtype)
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", zeros.value)
        binding.bind_output("y", "gpu", device_id)
        session.run_with_iobinding(binding)
        return Buffer(binding.get_outputs()[0], None, dtype, memory, size, owner=session, device_id=device_id)
    except NATIVE_ERRORS as error:
        # The frames reference the keeper session, which must be released before its device.
        traceback.clear_frames(error.__traceback__)
        raise buffer_error(size, memory, error) from error.with_traceback(None)


def keeper_model(dtype: str, rank: int) -> bytes:
    """A model of one node, x + x, which leaves a zero tensor on the device."""
    from onnx import TensorProto, parser

    tensor = TensorProto.DataType.Name(dtypes.dtype_named(dtype).number).lower()
    tensor += f"[{','.join(f'd{axis}' for axis in range(rank))}]" if rank else ""
    model = parser.parse_model(f"{HEAD} g ({tensor} x) => ({tensor} y) {{ y = Add(x, x) }}")
    return bytes(model.SerializeToString())


# --- adapter files: values by name, bound like other inputs -----------------------------------------------------------
# RunOptions.add_active_adapter has no effect on runs with bound inputs (onnxruntime_pybind_iobinding.cc, 1.31).

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
        found = {}
        for name, value in adapter.get_parameters().items():
            buffer = host_buffer(value.shape(), TYPES[value.data_type()])
            buffer.host[...] = value.numpy()  # a copy, because the value's memory belongs to its file
            found[name] = buffer, tuple(value.shape())
        return found
    except FAILURES as error:
        raise PackageError(f"{path}: damaged ({str(error).splitlines()[0][:200]})", remedy=remedy) from error
