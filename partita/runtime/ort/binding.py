"""Bound inputs and outputs of one session, and its runs.

A session that was profiled once leaks memory in every later run: ONNX Runtime's thread pool keeps a note of every
parallel loop (8 bytes each, 1.9 KB per request) and removes these notes only after a profiled node
(`ThreadPoolProfiler` in onnxruntime/core/common/threadpool.cc). Notes belong to the thread, so a profiled run of any
session in the same thread removes them; `remove_notes` makes one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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
    POINTED,
    Buffer,
    host_buffer,
    keeper_model,
    made_buffer,
)
from partita.runtime.ort.errors import run_error
from partita.runtime.ort.native_log import FATAL, RunLog

NOTED_RUNS = 1024
"""Runs of a thread between two removals of notes (2 MiB at several hundred loops per run). A removal takes 1 ms."""


class _Notes(threading.local):
    """The state of this thread's notes on parallel loops."""

    runs = 0
    """Runs of once-profiled sessions since the notes were last removed."""
    failed = False
    """A run has failed; then removing notes of an unfinished loop crashes ONNX Runtime."""

    def ran(self) -> None:
        self.runs += 1
        if self.runs >= NOTED_RUNS:
            self.runs = 0
            if not self.failed:
                remove_notes()


_notes = _Notes()


def remove_notes() -> None:
    """Remove the notes of this thread by a profiled run. An error only costs memory."""
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
class PortMemory:
    """The memory of an input or output, independent of its session."""

    memory: str
    """Memory info name, e.g. Cuda."""
    device_id: int = 0

    @property
    def device(self) -> str:
        """ONNX Runtime's name of the device."""
        return POINTED.get(self.memory, "gpu")


ON_HOST = PortMemory(HOST_MEMORY)


DEFAULT_GRAPH, NOT_RECORDED = "0", "-1"
"""Default value of `gpu_graph_id`, and the value without capture and replay."""


def _run_options(graph: str) -> Any:
    """Options of a run that belongs to a captured graph.

    The default is set explicitly: otherwise ONNX Runtime 1.31's wrapper raises and catches an exception in every run
    (25 us).
    """
    options = ort.RunOptions()
    # A failed run raises, so it need not be logged to stderr as well.
    options.log_severity_level = FATAL
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


class Binding:
    """Inputs and outputs of one session, bound to buffers once and run many times."""

    def __init__(
        self,
        native: Any,
        file: str,
        *,
        records: bool = False,
        notes_loops: bool = False,
        watchers: Sequence[Callable[[Binding], object]] = (),
        run_log: RunLog | None = None,
    ) -> None:
        """`records`: the session supports graph capture, which this binding uses only after `replay`. `notes_loops`:
        the session is or was profiled. `watchers`: called with this binding before each run. `run_log`: its log."""
        # Attributes are destroyed in this order: the binding must be destroyed before the session.
        self._io = native.io_binding()
        self._native, self._file, self._notes_loops, self._watchers = native, file, notes_loops, watchers
        self._options = _run_options(NOT_RECORDED if records else DEFAULT_GRAPH)
        self._run_log = run_log or RunLog()
        self._recorded: int | None = None
        self._replaying: Any = None
        self._outputs: dict[str, None] = {}
        """Names of bound outputs, in their order."""
        self._fresh: dict[str, str] = {}
        """Outputs that ONNX Runtime allocates, and their memory."""
        self.buffers: dict[str, Buffer] = {}

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Names of the session's inputs."""
        return frozenset(str(port.name) for port in self._native.get_inputs())

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read input `name` from `buffer` in every run."""
        self._bind(self._io.bind_ortvalue_input, self._io.bind_input, name, buffer)

    def bind_output(self, name: str, buffer: Buffer) -> None:
        """Write output `name` into `buffer` in every run."""
        self._bind(self._io.bind_ortvalue_output, self._io.bind_output, name, buffer)
        self._outputs[name] = None

    def _bind(self, whole: Any, part: Any, name: str, buffer: Buffer) -> None:
        """Bind a buffer with `whole`, or a part of another buffer with `part`."""
        try:
            if buffer.part is None:
                whole(name, buffer.value)
            else:
                rows, element = buffer.part, dtypes.dtype_named(buffer.dtype).number
                part(name, rows.device, buffer.device_id, element, rows.shape, rows.address)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self.buffers[name] = buffer

    def bind_fresh_output(self, name: str, where: PortMemory = ON_HOST) -> None:
        """Let ONNX Runtime allocate output `name` in every run, or in the next if its size changes."""
        try:
            self._io.bind_output(name, where.device, where.device_id)
        except NATIVE_ERRORS as error:
            raise run_error(self._file, error) from error
        self._outputs[name] = None
        self._fresh[name] = where.memory

    def allocated(self) -> dict[str, Buffer]:
        """Buffers that ONNX Runtime allocated in the last run, by output; they keep their memory alive."""
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

    def run(self, options: Any = None) -> None:
        """Run the session on the bound buffers. `options`: None for those of the binding.

        Raises GenerationError, ProviderError or ResourceError.
        """
        for watch in self._watchers:
            watch(self)
        options = options or self._options
        if options.log_severity_level != self._run_log.severity:
            options.log_severity_level = self._run_log.severity
        try:
            self._native.run_with_iobinding(self._io, options)
        except NATIVE_ERRORS as error:
            if self._notes_loops:
                _notes.failed = True
            raise run_error(self._file, error) from error
        if self._notes_loops:
            _notes.ran()

    def replay(self, number: int) -> None:
        """Replay the captured graph `number`; at the first call, capture it, which may take several runs.

        Raises the errors of `run`.
        """
        if self._recorded is None:
            self._replaying, self._recorded = _run_options(str(number)), number
        self.run(self._replaying)

    def stop(self) -> None:
        """From another thread: end a run after its current node, and prevent further runs.

        The run then raises GenerationError. A running kernel is not interrupted.
        """
        self._options.terminate = True

    def release(self) -> None:
        """Release the native binding and every buffer; buffer descriptions remain."""
        if self._recorded is not None and hasattr(self._native, "release_captured_graph"):  # since 1.31
            self._native.release_captured_graph(self._recorded)
        self._io = None
        self._native = None
        self.buffers = {name: buffer.released() for name, buffer in self.buffers.items()}

    def output_addresses(self) -> dict[str, int]:
        """Address of each output after the last run."""
        return {name: int(value.data_ptr()) for name, value in zip(self._outputs, self._io.get_outputs(), strict=True)}


def _keep(value: Any) -> None:
    """Keep an output value valid over the next run.

    Before ONNX Runtime 1.31, `get_outputs` returns the binding's own values, which the next run replaces.
    """
    from onnxruntime.capi import _pybind_state as native

    own = native.OrtValueVector()
    own.push_back(value._ortvalue)
    value._ortvalue = own[0]
