"""The one boundary to ONNX Runtime: sessions, bindings, buffers, its exceptions and its evidence.

The only module that imports onnxruntime. Knows how a session is opened so that no provider outside the chain takes a
node silently, and so that everything ONNX Runtime says about placement is kept. Knows nothing of tokens or packages.
"""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita.errors import ProviderError
from partita.partition_reports.facts import AssignedNode
from partita.providers.resolve import Resolution
from partita.runtime.evidence import parse_plan
from partita.runtime.native_log import Captured, captured_stderr, complaints
from partita.runtime.ort_errors import STRICT, buffer_error, open_error, run_error

CPU = "CPUExecutionProvider"
HOST_MEMORY = "Cpu"
INFO, WARNING, FATAL = 1, 2, 4
ALIGNMENT_BYTES = 64
ELEMENT_TYPES: dict[str, tuple[int, str]] = {
    "float32": (1, "float32"),
    "int8": (3, "int8"),
    "int32": (6, "int32"),
    "int64": (7, "int64"),
    "bool": (9, "bool"),
    "float16": (10, "float16"),
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


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """The installed ONNX Runtime."""

    version: str
    build: str


def build_info() -> BuildInfo:
    """Version and build of the installed ONNX Runtime."""
    return BuildInfo(version=str(ort.__version__), build=str(ort.get_build_info()).removeprefix("ORT Build Info: "))


def available_providers() -> tuple[str, ...]:
    """ONNX Runtime's names of the providers compiled into it, which says nothing of whether they can start."""
    return tuple(ort.get_available_providers())


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
        self.path, self.resolutions, self.log, self.load_seconds = path, resolutions, log, load_seconds
        self.registered: tuple[str, ...] = tuple(native.get_providers())
        self.profiling = observe
        self._native, self._folder, self._observe = native, folder, observe
        self._input_infos = by_name(native.get_inputs(), native.get_input_memory_infos())
        self._output_infos = by_name(native.get_outputs(), native.get_output_memory_infos())
        self.plan = read_plan(plan_path(folder))
        if not observe:
            folder.cleanup()

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
        """Nodes by provider, as of partitioning; None when the session was not observed or this build cannot tell."""
        if not self._observe or not hasattr(self._native, "get_provider_graph_assignment_info"):
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

    def run(self) -> None:
        """Run the session on the bound buffers. Raises GenerationError, ProviderError or ResourceError."""
        try:
            self._native.run_with_iobinding(self._io, self._options)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error

    def output_addresses(self) -> dict[str, int]:
        """Where the last run left each output."""
        return {name: int(value.data_ptr()) for name, value in zip(self._outputs, self._io.get_outputs(), strict=True)}


def open_session(path: Path, resolutions: tuple[Resolution, ...], *, threads: int | None, observe: bool) -> Session:
    """Open `path` on the active providers of the chain, and on no other.

    `threads`: intra-op threads, None for ONNX Runtime's choice. `observe` turns on profiling, the assignment list and
    the log at INFO. Raises ProviderError when no provider of the chain starts or some node fits none of them;
    PackageError when the file is damaged; ResourceError when memory runs out.
    """
    chain = [resolution.provider.ort_name for resolution in resolutions if resolution.status == "active"]
    if not chain:
        raise ProviderError(nothing_left(resolutions))
    folder = tempfile.TemporaryDirectory(prefix="partita-")
    captured, began = Captured(), time.perf_counter()
    try:
        options = session_options(folder, strict=CPU not in chain, threads=threads, observe=observe)
        with captured_stderr() as captured:
            try:
                ort.set_default_logger_severity(INFO if observe else WARNING)
                native = ort.InferenceSession(path, options, providers=chain, enable_fallback=0)
            except NATIVE_ERRORS as error:
                # The frames hold the half-open session. It logs when it goes, which must be while that is captured.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                ort.set_default_logger_severity(WARNING)
        native.disable_fallback()
        settled = settle(resolutions, tuple(native.get_providers()), captured.lines)
        return Session(native, path, settled, captured.lines, folder, observe, time.perf_counter() - began)
    except NATIVE_ERRORS as error:
        folder.cleanup()
        raise open_error(path, chain, error, captured.lines) from error
    except BaseException:
        folder.cleanup()
        raise


def session_options(
    folder: tempfile.TemporaryDirectory[str], *, strict: bool, threads: int | None, observe: bool
) -> Any:
    """Options of one session. `strict`: fail rather than let the CPU provider take a node."""
    options = ort.SessionOptions()
    options.log_severity_level = INFO if observe else WARNING
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.node_partition_config_file", str(plan_path(folder)))
    if strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if observe:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder.name) / "profile")
    return options


def plan_path(folder: tempfile.TemporaryDirectory[str]) -> Path:
    """Where ONNX Runtime writes its plan. It must not exist: ONNX Runtime would obey it instead."""
    return Path(folder.name) / "plan.json"


def read_plan(path: Path) -> tuple[tuple[str, ...], ...] | None:
    """Node names per stream; None when ONNX Runtime wrote no plan."""
    return parse_plan(path.read_text(encoding="utf-8")) if path.is_file() else None


def settle(
    resolutions: tuple[Resolution, ...], registered: tuple[str, ...], log: tuple[str, ...]
) -> tuple[Resolution, ...]:
    """The chain after the session was opened: a provider that ONNX Runtime left out is unavailable, with its reason.

    Raises ProviderError when none is left, or ONNX Runtime registered one that is not in the chain. The CPU provider is
    always registered; outside the chain it holds no node, or opening would have failed.
    """
    settled = tuple(
        resolution if resolution.status != "active" or resolution.provider.ort_name in registered
        else failed_to_start(resolution, log)
        for resolution in resolutions
    )  # fmt: skip
    active = {resolution.provider.ort_name for resolution in settled if resolution.status == "active"}
    if not active:
        raise ProviderError(nothing_left(settled))
    strangers = [name for name in registered if name not in active and name != CPU]
    if strangers:
        raise ProviderError(f"ONNX Runtime registered {', '.join(strangers)}, which the provider chain does not name")
    return settled


def failed_to_start(resolution: Resolution, log: tuple[str, ...]) -> Resolution:
    """Why a provider that is compiled in was not registered, from what ONNX Runtime logged."""
    said = tuple(text for text in complaints(log) if STRICT not in text)
    missing = any("Failed to load library" in text or "cannot open shared object" in text for text in said)
    return replace(
        resolution,
        status="unavailable",
        reason="library_missing" if missing else "initialisation_failed",
        evidence=said[0] if said else "ONNX Runtime did not register it and logged nothing",
        remedy="install the libraries that it names" if missing else "see the evidence",
    )


def nothing_left(resolutions: tuple[Resolution, ...]) -> str:
    """One line on why no provider of the chain can run."""
    return "; ".join(f"{r.provider.name}: {r.reason}: {r.evidence}; {r.remedy}" for r in resolutions)
