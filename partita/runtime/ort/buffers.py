"""Tensors at a fixed address: in host memory that numpy shares, or in a device's memory."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita import dtypes
from partita.runtime.ort.errors import buffer_error, run_error

HOST_MEMORY, CUDA_MEMORY = "Cpu", "Cuda"
POINTED = {HOST_MEMORY: "cpu", CUDA_MEMORY: "cuda"}
"""Memory whose addresses are pointers, with ONNX Runtime's name of the device; those of WebGPU's are handles."""
ALIGNMENT_BYTES = 64
NATIVE = ort.capi.onnxruntime_pybind11_state
NATIVE_ERRORS: tuple[type[Exception], ...] = (
    *(entry for entry in vars(NATIVE).values() if isinstance(entry, type) and issubclass(entry, Exception)),
    RuntimeError,
    ValueError,
)
"""Everything ONNX Runtime raises: its 15 status classes have no common base of their own."""


@dataclass(frozen=True, slots=True)
class Part:
    """The address of rows of a buffer, as ONNX Runtime binds them."""

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
    """The same memory as numpy sees it; None on a device. bfloat16 shows as uint16."""
    dtype: str
    memory: str
    size_bytes: int
    keeps: Any = field(default=None, repr=False)
    """An object that has to live as long as the memory."""
    device_id: int = 0
    part: Part | None = None
    """Set for rows of another buffer: they are bound by address, and `value` is None."""

    @property
    def host(self) -> npt.NDArray[Any]:
        """The memory as numpy sees it; only for buffers on the host."""
        if self.array is None:
            raise ValueError(f"the buffer is in {self.memory} memory, which numpy cannot see")
        return self.array

    def __len__(self) -> int:
        """Size of the first axis."""
        return int(self.value.shape()[0])

    def released(self) -> Buffer:
        """The buffer's description without its memory."""
        return replace(self, value=None, array=None, keeps=None, part=None)

    def address(self) -> int:
        """Address of the first element."""
        return int(self.value.data_ptr()) if self.part is None else self.part.address

    @property
    def has_parts(self) -> bool:
        """Some rows of the first axis can be bound by themselves: its memory has addresses that can be counted on."""
        return self.memory in POINTED

    def rows(self, first: int, end: int) -> Buffer:
        """Rows `first` to before `end` of the first axis, in the same memory; only where `has_parts`."""
        shape = tuple(self.value.shape())
        row_bytes = self.size_bytes // shape[0]
        return Buffer(
            None,
            None if self.array is None else self.array[first:end],
            self.dtype,
            self.memory,
            row_bytes * (end - first),
            keeps=self,
            device_id=self.device_id,
            part=Part(POINTED[self.memory], self.address() + first * row_bytes, (end - first, *shape[1:])),
        )

    def clear(self) -> None:
        """Set every byte to zero."""
        if self.array is not None:
            self.array.fill(0)
            return
        self.write(host_buffer(tuple(self.value.shape()), self.dtype))

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Set these rows of the first axis to zero; only where `readable`. Device memory goes by way of the host."""
        if self.array is None and set(rows) == set(range(self.value.shape()[0])):
            self.clear()
        else:
            self.change(lambda whole: whole.__setitem__(list(rows), 0))

    @property
    def readable(self) -> bool:
        """Its values can be copied to the host. ONNX Runtime copies by way of numpy from CUDA's memory and from what
        it allocated on the host; numpy has no bfloat16.
        """
        by_numpy = self.memory in (HOST_MEMORY, CUDA_MEMORY)
        return self.array is not None or not by_numpy or not dtypes.named(self.dtype).upper_half

    def seen(self) -> npt.NDArray[Any]:
        """Its values; only where `readable`. The memory itself where numpy sees it, else a copy on the host."""
        return self._held().host if self.array is None else self.array

    def change(self, how: Callable[[npt.NDArray[Any]], object]) -> None:
        """Let `how` write into its values; only where `readable`. Device memory is copied to the host and back."""
        if self.array is not None:
            how(self.array)
            return
        held = self._held()
        how(held.host)
        self.write(held)

    def _held(self) -> Buffer:
        """A copy in host memory."""
        held = host_buffer(tuple(self.value.shape()), self.dtype)
        self.read(held)
        return held

    def read(self, held: Buffer) -> None:
        """Copy it into a host buffer of the same shape and dtype; only where `readable`. Raises as a run does."""
        try:
            if self.memory in (HOST_MEMORY, CUDA_MEMORY):
                held.host[...] = self.value.numpy()
            else:
                ort.copy_tensors([self.value], [held.value])
        except NATIVE_ERRORS as error:
            raise run_error(f"a copy out of {self.memory} memory", error) from error

    def copy(self, held: Buffer) -> npt.NDArray[Any]:
        """Its values on the host; only where `readable`. In `held`, a host buffer of the same shape and dtype, or where
        ONNX Runtime puts them. Raises as a run does: a lost device may show here first.
        """
        if self.memory != CUDA_MEMORY:
            self.read(held)
            return held.host
        try:
            values: npt.NDArray[Any] = self.value.numpy()
        except NATIVE_ERRORS as error:
            raise run_error(f"a copy out of {self.memory} memory", error) from error
        return values

    def write(self, held: Buffer) -> None:
        """Fill device memory from a host buffer of the same shape and dtype, in place. Raises as a run does."""
        try:
            if self.memory == CUDA_MEMORY:  # copy_tensors knows no way to the CUDA provider inside ONNX Runtime 1.31.1
                self.value.update_inplace(held.value)
            else:
                ort.copy_tensors([held.value], [self.value])
        except NATIVE_ERRORS as error:
            raise run_error(f"a copy into {self.memory} memory", error) from error


def host_buffer(shape: Sequence[int], dtype: str) -> Buffer:
    """A zeroed tensor in host memory that numpy and ONNX Runtime share. Pages are taken as they are first written.

    Raises ResourceError when the address space has no room for it.
    """
    element, kind, size = dtypes.named(dtype).number, np.dtype(dtypes.storage(dtype)), dtypes.size_bytes(dtype, shape)
    try:
        raw = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than there are addresses
        raise buffer_error(size, HOST_MEMORY) from error
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    array = raw[skip : skip + size].view(kind).reshape(shape)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
    return Buffer(value, array, dtype, HOST_MEMORY, size)


def reshaped(buffer: Buffer, shape: Sequence[int]) -> Buffer:
    """The first elements of a buffer in host memory as a tensor of another shape."""
    size = dtypes.size_bytes(buffer.dtype, shape)
    array = buffer.host.reshape(-1)[: math.prod(shape)].reshape(shape)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtypes.named(buffer.dtype).number)
    return Buffer(value, array, buffer.dtype, buffer.memory, size, keeps=buffer)


def made_buffer(value: Any, memory: str) -> Buffer:
    """A tensor that ONNX Runtime allocated, in `memory`; numpy does not share it."""
    dtype = dtypes.usual(str(value.data_type()).removeprefix("tensor(").removesuffix(")"))
    return Buffer(value, None, dtype, memory, dtypes.size_bytes(dtype, value.shape()))


def text_buffer(texts: npt.NDArray[Any]) -> Buffer:
    """A tensor of strings in host memory, allocated by ONNX Runtime: its binding takes no other.

    Raises ResourceError when there is no room for it.
    """
    import onnx

    element = onnx.TensorProto.STRING
    values = [str(text).encode() for text in texts.ravel()]
    stored = onnx.TensorProto(name="x", data_type=element, dims=texts.shape, string_data=values)
    port = onnx.helper.make_tensor_value_info("y", element, list(texts.shape))
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(_model(node, [], [port], [stored]), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        binding.bind_output("y", "cpu")
        session.run_with_iobinding(binding)
    except NATIVE_ERRORS as error:
        raise buffer_error(sum(map(len, values)), HOST_MEMORY, error) from error
    return Buffer(binding.get_outputs()[0], None, "string", HOST_MEMORY, 0)


def device_buffer(shape: Sequence[int], dtype: str, memory: str, device_id: int, keeper: Callable[[], Any]) -> Buffer:
    """A zeroed tensor in the memory called `memory`, e.g. Cuda, of device number `device_id`.

    `keeper` opens a session of `keeper_model` on the provider of that memory: the Python package allocates memory of
    other providers than CUDA in a run alone. Raises ResourceError when the device has no room for it.
    """
    element, size = dtypes.named(dtype).number, dtypes.size_bytes(dtype, shape)
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
        return Buffer(binding.get_outputs()[0], None, dtype, memory, size, keeps=session, device_id=device_id)
    except NATIVE_ERRORS as error:
        # The frames hold what is left of the keeper; it has to go before its device does.
        traceback.clear_frames(error.__traceback__)
        raise buffer_error(size, memory, error) from error.with_traceback(None)


def keeper_model(dtype: str, rank: int) -> bytes:
    """A model whose one node, x + x, leaves a tensor on the device: zeros for zeros."""
    import onnx

    element = dtypes.named(dtype).number
    sizes = [f"d{axis}" for axis in range(rank)]
    ports = [onnx.helper.make_tensor_value_info(name, element, sizes) for name in ("x", "y")]
    return _model(onnx.helper.make_node("Add", ["x", "x"], ["y"]), ports[:1], ports[1:], [])


def _model(node: Any, inputs: list[Any], outputs: list[Any], initializers: list[Any]) -> bytes:
    """A model of one node."""
    import onnx

    graph = onnx.helper.make_graph([node], "g", inputs, outputs, initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)
    return bytes(model.SerializeToString())
