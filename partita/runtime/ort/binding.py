"""Inputs and outputs of one session, bound to buffers, and its runs.

A session that was profiled once leaks memory in every run. ONNX Runtime's thread pool notes the block size of every
parallel loop for the profile and removes the notes after a node that is profiled (`ThreadPoolProfiler` in
onnxruntime/core/common/threadpool.cc), and goes on noting when the profile is written: 8 bytes per loop, 1.9 KB per
request. The notes belong to the thread, whatever session the loops are of, so a profiled run of another session in the
same thread removes them.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnxruntime as ort

from partita import dtypes
from partita.files import temporary_directory
from partita.observations.names import CPU
from partita.runtime.ort.buffers import (
    HOST_MEMORY,
    NATIVE_ERRORS,
    Buffer,
    Part,
    host_buffer,
    keeper_model,
    made_buffer,
)
from partita.runtime.ort.errors import run_error

FATAL = 4
NOTED_RUNS = 1024
"""Runs of a thread between two removals of its notes: some hundreds of loops a run are 2 MiB. One takes about 1 ms."""


class _Notes(threading.local):
    """The notes on parallel loops of this thread."""

    runs = 0
    """Runs of sessions that were profiled once, since the notes were last removed."""
    failed = False
    """A run has failed: ONNX Runtime ends the process when notes on a loop without an end are removed."""

    def ran(self) -> None:
        self.runs += 1
        if self.runs >= NOTED_RUNS:
            self.runs = 0
            if not self.failed:
                remove_notes()


_notes = _Notes()


def remove_notes() -> None:
    """Remove the notes of this thread, by a profiled run in a thread pool. An error costs memory and nothing else."""
    with suppress(OSError, *NATIVE_ERRORS), temporary_directory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = FATAL
        options.intra_op_num_threads = 2
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "loops")
        native: Any = ort.InferenceSession(keeper_model("float32", 1), options, providers=[CPU])
        binding, buffer = native.io_binding(), host_buffer((1,), "float32")
        binding.bind_ortvalue_input("x", buffer.value)
        binding.bind_ortvalue_output("y", buffer.value)
        native.run_with_iobinding(binding)
        native.end_profiling()


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

    The default is set, too: without it ONNX Runtime 1.31's wrapper raises and catches an exception in every run, 25 us.
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
        `notes_loops`: it is or was profiled.
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
        self._bind(self._io.bind_ortvalue_input, self._io.bind_input, name, buffer)

    def bind_output(self, name: str, buffer: Buffer) -> None:
        """Write output `name` into `buffer` in every run."""
        self._bind(self._io.bind_ortvalue_output, self._io.bind_output, name, buffer)
        self._add_output(name)

    def _bind(self, whole: Any, part: Any, name: str, buffer: Buffer) -> None:
        """Bind a buffer by the one function when it is whole, and by the other when it is part of another buffer."""
        try:
            if buffer.part is None:
                whole(name, buffer.value)
            else:
                part(name, *_place(buffer, buffer.part))
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self.buffers[name] = buffer

    def _add_output(self, name: str) -> None:
        if name not in self._outputs:
            self._outputs.append(name)

    def bind_fresh_output(self, name: str, where: FreshMemory = ON_HOST) -> None:
        """Let ONNX Runtime allocate output `name` in a run: in every run, or in the next if its size changes."""
        try:
            self._io.bind_output(name, where.device, where.device_id)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self._add_output(name)
        self._fresh[name] = where.memory

    def made(self) -> dict[str, Buffer]:
        """Buffers that ONNX Runtime allocated in the last run, by output; their memory lives as long as they do."""
        values = dict(zip(self._outputs, self._io.get_outputs(), strict=True))
        for name in self._fresh:
            _keep(values[name])
        made = {name: made_buffer(values[name], memory) for name, memory in self._fresh.items()}
        self.buffers.update(made)
        return made

    def output_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Shape of each output after the last run; None for a sequence or a map."""
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
                _notes.failed = True
            raise run_error(self._file, error) from error
        if self._notes_loops:
            _notes.ran()

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
        """Release the native binding and every buffer; the buffers' descriptions stay."""
        if self._recorded is not None and hasattr(self._native, "release_captured_graph"):  # since 1.31
            self._native.release_captured_graph(self._recorded)
        self._io = None
        self._native = None
        self.buffers = {name: buffer.released() for name, buffer in self.buffers.items()}

    def output_addresses(self) -> dict[str, int]:
        """Where the last run left each output."""
        return {name: int(value.data_ptr()) for name, value in zip(self._outputs, self._io.get_outputs(), strict=True)}


def _keep(value: Any) -> None:
    """Keep a value of a run over the next one: before ONNX Runtime 1.31 `get_outputs` returns the binding's own values,
    which the next run replaces (seen with 1.24 and 1.27).
    """
    from onnxruntime.capi import _pybind_state as native

    own = native.OrtValueVector()
    own.push_back(value._ortvalue)
    value._ortvalue = own[0]
