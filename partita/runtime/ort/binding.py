"""Inputs and outputs of one session, bound to buffers; the runs of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnxruntime as ort

from partita import dtypes
from partita.runtime.ort import loop_notes
from partita.runtime.ort.buffers import HOST_MEMORY, NATIVE_ERRORS, Buffer, Part, made_buffer
from partita.runtime.ort.errors import run_error

FATAL = 4


@dataclass(frozen=True, slots=True)
class FreshMemory:
    """Where ONNX Runtime is to allocate an output."""

    memory: str
    """Memory info name, e.g. Cuda."""
    device: str = "cpu"
    """ONNX Runtime's name of the device."""
    device_id: int = 0


ON_HOST = FreshMemory(HOST_MEMORY)


DEFAULT_GRAPH, NOT_RECORDED = "0", "-1"
"""What `gpu_graph_id` is by default, and the one that neither records nor replays."""


def _run_options(graph: str) -> Any:
    """Options of a run that belongs to a recorded graph, where the session records any.

    The default is said, because ONNX Runtime 1.31's wrapper asks for it in every run, and takes 25 microseconds to be
    told by an exception that it is not there.
    """
    options = ort.RunOptions()
    # A failed run raises; ONNX Runtime need not also write it to stderr.
    options.log_severity_level = FATAL
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


def _place(buffer: Buffer, part: Part) -> tuple[str, int, int, tuple[int, ...], int]:
    """Device, its number, element type, shape and address of a part of a buffer."""
    return part.device, buffer.device_id, dtypes.named(buffer.dtype).number, part.shape, part.address


class Binding:
    """Inputs and outputs of one session, bound to buffers once and run many times."""

    def __init__(self, native: Any, file: str, *, records: bool = False, notes_loops: bool = False) -> None:
        """`records`: the session may record runs and replay them; those of this binding are not, until `record`.
        `notes_loops`: it is or was profiled, see `loop_notes`.
        """
        # Attributes go in the order they came: were this the session's last holder, the binding must go before it.
        self._io = native.io_binding()
        self._native, self._file, self._notes_loops = native, file, notes_loops
        self._options = _run_options(NOT_RECORDED if records else DEFAULT_GRAPH)
        self._recorded: int | None = None
        self._replaying: Any = None
        self._outputs: list[str] = []
        self._fresh: dict[str, str] = {}
        """Outputs that ONNX Runtime allocates, and the memory in which it does."""
        self.buffers: dict[str, Buffer] = {}

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Names of the inputs that the session has."""
        return frozenset(str(port.name) for port in self._native.get_inputs())

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read input `name` from `buffer` in every run."""
        try:
            if buffer.part is None:
                self._io.bind_ortvalue_input(name, buffer.value)
            else:
                self._io.bind_input(name, *_place(buffer, buffer.part))
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self.buffers[name] = buffer

    def bind_output(self, name: str, buffer: Buffer) -> None:
        """Write output `name` into `buffer` in every run."""
        try:
            if buffer.part is None:
                self._io.bind_ortvalue_output(name, buffer.value)
            else:
                self._io.bind_output(name, *_place(buffer, buffer.part))
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        if name not in self._outputs:
            self._outputs.append(name)
        self.buffers[name] = buffer

    def bind_fresh_output(self, name: str, where: FreshMemory = ON_HOST) -> None:
        """Let ONNX Runtime allocate output `name` in a run: in every run, or in the next if its size changes."""
        try:
            self._io.bind_output(name, where.device, where.device_id)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        if name not in self._outputs:
            self._outputs.append(name)
        self._fresh[name] = where.memory

    def made(self) -> dict[str, Buffer]:
        """What ONNX Runtime allocated in the last run, by output; it is there for as long as somebody has it."""
        values = dict(zip(self._outputs, self._io.get_outputs(), strict=True))
        for name in self._fresh:
            _keep(values[name])
        made = {name: made_buffer(values[name], memory) for name, memory in self._fresh.items()}
        self.buffers.update(made)
        return made

    def output_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Shape of each output after the last run; None for what is no tensor."""
        values = zip(self._outputs, self._io.get_outputs(), strict=True)
        return {name: tuple(value.shape()) if value.is_tensor() else None for name, value in values}

    def run(self) -> None:
        """Run the session on the bound buffers. Raises GenerationError, ProviderError or ResourceError."""
        self._run(self._options)

    def _run(self, options: Any) -> None:
        try:
            self._native.run_with_iobinding(self._io, options)
        except NATIVE_ERRORS as error:
            if self._notes_loops:
                loop_notes.failed()
            raise run_error(self._file, error) from error
        if self._notes_loops:
            loop_notes.ran()

    def replay(self, number: int) -> None:
        """The first time record a run as the session's graph `number`, which the provider may do in several runs; then
        replay it. Raises as `run` does.
        """
        if self._recorded is None:
            self._replaying, self._recorded = _run_options(str(number)), number
        self._run(self._replaying)

    def stop(self) -> None:
        """From another thread: let a run end after the node at which it is, and no other begin.

        The run raises GenerationError then. Within a kernel nothing looks whether it is to stop.
        """
        self._options.terminate = True

    def release(self) -> None:
        """Let go of the native binding and of every buffer; what is known of the buffers stays."""
        if self._recorded is not None and hasattr(self._native, "release_captured_graph"):  # since 1.31
            self._native.release_captured_graph(self._recorded)
        self._io = None
        self._native = None
        self.buffers = {name: buffer.released() for name, buffer in self.buffers.items()}

    def output_addresses(self) -> dict[str, int]:
        """Where the last run left each output."""
        return {name: int(value.data_ptr()) for name, value in zip(self._outputs, self._io.get_outputs(), strict=True)}


def _keep(value: Any) -> None:
    """Have a value that a run made stay what it is: before ONNX Runtime 1.31 what `get_outputs` gives is the binding's
    own, into which the next run puts another one (seen with 1.24 and 1.27).
    """
    from onnxruntime.capi import _pybind_state as native

    own = native.OrtValueVector()
    own.push_back(value._ortvalue)
    value._ortvalue = own[0]
