"""The boundary to ONNX Runtime's sessions: opening one, bindings, buffers, its exceptions and its evidence.

With ort_registry.py the only module that imports onnxruntime. Opens a session on exactly the providers it is given and
keeps everything that ONNX Runtime says about placement; what to do when that fails is up to `chain`. Knows nothing of
tokens or packages.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita.partition_reports.facts import AssignedNode
from partita.providers.cuda_dry_run.standins import BUILD_VARIABLE
from partita.providers.resolve import Resolution
from partita.runtime.evidence import parse_plan
from partita.runtime.native_log import Captured, captured_stderr
from partita.runtime.ort_errors import buffer_error, run_error
from partita.runtime.ort_registry import CPU, STRICT_KEY, preload_libraries, provider_options

HOST_MEMORY = "Cpu"
INFO, WARNING, FATAL = 1, 2, 4
ALIGNMENT_BYTES = 64
ELEMENT_TYPES: dict[str, tuple[int, str]] = {
    "float32": (1, "float32"),
    "uint8": (2, "uint8"),
    "int8": (3, "int8"),
    "uint16": (4, "uint16"),
    "int16": (5, "int16"),
    "int32": (6, "int32"),
    "int64": (7, "int64"),
    "bool": (9, "bool"),
    "float16": (10, "float16"),
    "float64": (11, "float64"),
    "uint32": (12, "uint32"),
    "uint64": (13, "uint64"),
    "bfloat16": (16, "uint16"),
}
"""dtype of a port -> ONNX element type, and the numpy type of the same size that stores it (numpy has no bfloat16)."""
NATIVE = ort.capi.onnxruntime_pybind11_state
NATIVE_ERRORS: tuple[type[Exception], ...] = (
    *(entry for entry in vars(NATIVE).values() if isinstance(entry, type) and issubclass(entry, Exception)),
    RuntimeError,
    ValueError,
)
"""Everything ONNX Runtime raises: its 15 status classes have no common base of their own."""


class NativeFailureError(Exception):
    """A session that could not be opened: ONNX Runtime's exception is the cause."""

    def __init__(self, error: Exception, log: tuple[str, ...]) -> None:
        super().__init__(str(error))
        self.error, self.log = error, log


@dataclass(frozen=True, slots=True)
class Opening:
    """How a session is to be opened, beyond the providers."""

    threads: int | None = None
    """Intra-op threads; None for ONNX Runtime's choice."""
    observe: bool = False
    """Profile the first runs and keep the log at INFO."""
    list_nodes: bool = False
    """Also where that needs a session configuration of the provider's own: tell which provider takes which node."""
    strict: bool = False
    """Fail rather than let the CPU provider take a node."""
    model: bytes | None = None
    """The model to open in place of the file; its weights are still those beside the file."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Further entries of the session configuration."""


@dataclass(frozen=True, slots=True)
class PortInfo:
    """An input or output as the session declares it."""

    name: str
    type: str
    """In ONNX Runtime's words: tensor(float), seq(tensor(int64)), …"""
    shape: tuple[int | str | None, ...]
    """Numbers, names of symbolic sizes, and None where even the name is unknown; empty for what is no tensor."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that stays where it is for the life of a runner."""

    value: Any
    """The OrtValue."""
    array: npt.NDArray[Any] | None
    """The same memory as numpy sees it; None on a device. bfloat16 shows as uint16."""
    dtype: str
    memory: str
    size_bytes: int

    @property
    def host(self) -> npt.NDArray[Any]:
        """The memory as numpy sees it; only for buffers on the host."""
        if self.array is None:
            raise ValueError(f"the buffer is in {self.memory} memory, which numpy cannot see")
        return self.array

    def address(self) -> int:
        """Address of the first element."""
        return int(self.value.data_ptr())

    def clear(self) -> None:
        """Set every byte to zero."""
        if self.array is not None:
            self.array.fill(0)
        else:
            self.value.update_inplace(host_buffer(tuple(self.value.shape()), self.dtype).value)


def host_buffer(shape: Sequence[int], dtype: str) -> Buffer:
    """A zeroed tensor in host memory that numpy and ONNX Runtime share. Pages are taken as they are first written.

    Raises ResourceError when the address space has no room for it.
    """
    element, storage = ELEMENT_TYPES[dtype]
    kind = np.dtype(storage)
    size = math.prod(shape) * kind.itemsize
    try:
        raw = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
    except MemoryError as error:
        raise buffer_error(size, HOST_MEMORY) from error
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    array = raw[skip : skip + size].view(kind).reshape(shape)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
    return Buffer(value, array, dtype, HOST_MEMORY, size)


def device_buffer(shape: Sequence[int], dtype: str, memory: str, device_id: int) -> Buffer:
    """A zeroed tensor in the memory called `memory`, e.g. Cuda, of device number `device_id`.

    Raises ResourceError when the device has no room for it.
    """
    element, storage = ELEMENT_TYPES[dtype]
    # Memory infos are called Cuda or WebGPU_Buf where devices are called cuda and webgpu.
    device = memory.partition("_")[0].lower()
    size = math.prod(shape) * np.dtype(storage).itemsize
    try:
        value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, device, device_id)
    except NATIVE_ERRORS as error:
        raise buffer_error(size, memory, error) from error
    buffer = Buffer(value, None, dtype, memory, size)
    buffer.clear()
    return buffer


class Session:
    """An open ONNX Runtime session and what was seen while it was opened. Close it; it owns a temporary folder."""

    def __init__(
        self, native: Any, path: Path, resolutions: tuple[Resolution, ...], log: tuple[str, ...],
        folder: tempfile.TemporaryDirectory[str], observe: bool, load_seconds: float,
    ) -> None:  # fmt: skip
        self.path, self.log, self.load_seconds = path, log, load_seconds
        self.resolutions = resolutions
        """What became of each provider of the chain; `chain` completes it."""
        self.registered: tuple[str, ...] = tuple(native.get_providers())
        self.profiling = observe
        self._native, self._folder = native, folder
        self._input_infos = by_name(native.get_inputs(), native.get_input_memory_infos())
        self._output_infos = by_name(native.get_outputs(), native.get_output_memory_infos())
        self.plan = read_plan(plan_path(folder))
        if not observe:
            folder.cleanup()

    @property
    def inputs(self) -> tuple[PortInfo, ...]:
        """Inputs that a run has to be given, in the order of the file."""
        return tuple(port_info(port) for port in self._native.get_inputs())

    @property
    def outputs(self) -> tuple[PortInfo, ...]:
        """Outputs, in the order of the file."""
        return tuple(port_info(port) for port in self._native.get_outputs())

    @property
    def wanted_memory(self) -> dict[str, str]:
        """Where the session wants each input and output: memory info name by port name."""
        return {name: str(info.name) for name, info in (*self._input_infos.items(), *self._output_infos.items())}

    def state_buffer(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """A zeroed buffer for the input `name`, in the memory the session wants it in."""
        info = self._input_infos[name]
        if info.name == HOST_MEMORY:
            return host_buffer(shape, dtype)
        return device_buffer(shape, dtype, str(info.name), int(info.device_id))

    def assigned(self) -> tuple[AssignedNode, ...] | None:
        """Nodes by provider, as of partitioning; None when this build cannot tell."""
        if not hasattr(self._native, "get_provider_graph_assignment_info"):
            return None
        return tuple(
            AssignedNode(node.name, node.op_type, node.domain, part.ep_name, index)
            for index, part in enumerate(self._native.get_provider_graph_assignment_info())
            for node in part.get_nodes()
        )

    def binding(self) -> Binding:
        """A new, empty binding of inputs and outputs to buffers."""
        return Binding(self._native, self.path.name)

    def end_profiling(self) -> str | None:
        """Stop profiling for good and return the profile's JSON text; None when it was not on. Its file is deleted."""
        if not self.profiling:
            return None
        self.profiling = False
        with captured_stderr():  # ONNX Runtime announces the file it writes
            written = Path(self._native.end_profiling())
        text = written.read_text(encoding="utf-8") if written.is_file() else None
        self._folder.cleanup()
        return text

    def close(self) -> None:
        """End profiling and delete the temporary folder. May be called twice."""
        self.end_profiling()
        self._folder.cleanup()


def port_info(port: Any) -> PortInfo:
    """One input or output as plain data."""
    return PortInfo(str(port.name), str(port.type), tuple(port.shape or ()))


def by_name(ports: Sequence[Any], infos: Sequence[Any]) -> dict[str, Any]:
    """Memory info of each port."""
    return {port.name: info for port, info in zip(ports, infos, strict=True)}


class Binding:
    """Inputs and outputs of one session, bound to buffers once and run many times."""

    def __init__(self, native: Any, file: str) -> None:
        self._native, self._file = native, file
        self._io = native.io_binding()
        self._options = ort.RunOptions()
        # A failed run raises; ONNX Runtime need not also write it to stderr.
        self._options.log_severity_level = FATAL
        self._outputs: list[str] = []
        self.buffers: dict[str, Buffer] = {}

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read input `name` from `buffer` in every run."""
        try:
            self._io.bind_ortvalue_input(name, buffer.value)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self.buffers[name] = buffer

    def bind_output(self, name: str, buffer: Buffer) -> None:
        """Write output `name` into `buffer` in every run."""
        try:
            self._io.bind_ortvalue_output(name, buffer.value)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self._outputs.append(name)
        self.buffers[name] = buffer

    def bind_fresh_output(self, name: str) -> None:
        """Let ONNX Runtime allocate output `name` in host memory in every run."""
        try:
            self._io.bind_output(name, "cpu")
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self._outputs.append(name)

    def output_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Shape of each output after the last run; None for what is no tensor."""
        values = zip(self._outputs, self._io.get_outputs(), strict=True)
        return {name: tuple(value.shape()) if value.is_tensor() else None for name, value in values}

    def run(self) -> None:
        """Run the session on the bound buffers. Raises GenerationError, ProviderError or ResourceError."""
        try:
            self._native.run_with_iobinding(self._io, self._options)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error

    def output_addresses(self) -> dict[str, int]:
        """Where the last run left each output."""
        return {name: int(value.data_ptr()) for name, value in zip(self._outputs, self._io.get_outputs(), strict=True)}


def open_native(path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """Open `path` on the providers of `active`, in their order. Raises NativeFailureError when ONNX Runtime does.

    The CPU provider is always registered by ONNX Runtime, last; `Opening.strict` keeps it from taking a node. The
    retries on the CPU provider that the Python package makes by itself are off.
    """
    folder = tempfile.TemporaryDirectory(prefix="partita-")
    captured, began = Captured(), time.perf_counter()
    try:
        if any(resolution.provider.preload for resolution in active) and not os.environ.get(BUILD_VARIABLE):
            preload_libraries()  # in a dry run it would bring real CUDA libraries in place of the stand-ins
        options = session_options(folder, active, opening, path.parent)
        with captured_stderr() as captured:
            try:
                ort.set_default_logger_severity(INFO if opening.observe else WARNING)
                native = ort.InferenceSession(
                    opening.model or path, options, providers=chosen_providers(options, active), enable_fallback=0
                )
            except NATIVE_ERRORS as error:
                # The frames hold the half-open session. It logs when it goes, which must be while that is captured.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                ort.set_default_logger_severity(WARNING)
        native.disable_fallback()
        return Session(
            native, path, tuple(active), captured.lines, folder, opening.observe, time.perf_counter() - began
        )
    except NATIVE_ERRORS as error:
        folder.cleanup()
        raise NativeFailureError(error, captured.lines) from error
    except BaseException:
        folder.cleanup()
        raise


def chosen_providers(options: Any, active: Sequence[Resolution]) -> list[Any] | None:
    """Providers and their options as ONNX Runtime takes them. With a plugin among them all go into `options`."""
    plugins = any(resolution.library is not None for resolution in active)
    listed: list[Any] = []
    for resolution in active:
        provider, plugin = resolution.provider, resolution.library is not None
        prefix = "" if plugin else provider.option_prefix
        entries = provider_options(options, provider.ort_name, resolution.options, prefix, plugin)
        if not plugins:
            listed += entries
        elif not plugin and provider.ort_name != CPU:
            options.add_provider(provider.ort_name, dict(resolution.options))
    return None if plugins else listed


def session_options(
    folder: tempfile.TemporaryDirectory[str], active: Sequence[Resolution], opening: Opening, weights: Path
) -> Any:
    """Options of one session; `weights` is where the model's external data lies."""
    options = ort.SessionOptions()
    options.log_severity_level = INFO if opening.observe else WARNING
    options.intra_op_num_threads = opening.threads or 0
    config = {
        "session.node_partition_config_file": str(plan_path(folder)),
        "session.record_ep_graph_assignment_info": "1",
        **opening.config,
    }
    if opening.strict:
        config[STRICT_KEY] = "1"
    if opening.model is not None:
        config["session.model_external_initializers_file_folder_path"] = str(weights)
    if opening.observe or opening.list_nodes:
        config.update(entry for resolution in active for entry in resolution.provider.listing_config)
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    if opening.observe:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder.name) / "profile")
    return options


def plan_path(folder: tempfile.TemporaryDirectory[str]) -> Path:
    """Where ONNX Runtime writes its plan. It must not exist: ONNX Runtime would obey it instead."""
    return Path(folder.name) / "plan.json"


def read_plan(path: Path) -> tuple[tuple[str, ...], ...] | None:
    """Node names per stream; None when ONNX Runtime wrote no plan."""
    return parse_plan(path.read_text(encoding="utf-8")) if path.is_file() else None
