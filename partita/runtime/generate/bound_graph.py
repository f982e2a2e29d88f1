"""The bound buffers of one graph: a step writes tokens and cursors into them, runs, and reads the logits.

Ports are identified by their role in the contract. Every buffer is allocated and bound once, except buffers whose
length changes with each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import GenerationError, PartitaError
from partita.observations.text_format import listing
from partita.package.contract import Contract, GraphFile, PhaseName
from partita.runtime.generate.cache import Cache, Span
from partita.runtime.generate.choice.device_choice import FAILURES, DeviceChoice, LargestLogits, Selection
from partita.runtime.generate.feeds import (
    BoundInput,
    Starts,
    bound,
    cursor_writer,
    logits_port,
    port_by_role,
    port_shapes,
)
from partita.runtime.generate.graph_capture import Recording
from partita.runtime.generate.record import Window
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer, host_buffer, reshaped
from partita.runtime.ort.session import Session
from partita.runtime.place.model_file import ModelFile

SMALL_STEP_TOKENS = 16
"""Steps of at most S tokens keep their buffers, and keep their logits on the device."""


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """An opened ONNX file of the package."""

    graph: GraphFile
    model: ModelFile
    session: Session
    window: Window
    phases: tuple[PhaseName, ...]


class BoundGraph:
    """Buffers of one graph for S new tokens per row and K rows of logits, for all rows of the batch or a span of rows.

    Write `tokens` [sequences, S] before each run; a run reads the tokens of its span. If the cache holds one sequence,
    it is fed to every row. `phase`: the phase that runs are counted under.
    """

    def __init__(
        self,
        loaded: LoadedGraph,
        cache: Cache,
        contract: Contract,
        *,
        phase: PhaseName,
        new_tokens: int,
        rows: int,
        adapter_values: Mapping[str, Buffer],
        span: Span = None,
        choice: DeviceChoice | None = None,
    ) -> None:
        graph, session = loaded.graph, loaded.session
        self.phase, self.file, self.new_tokens, self.rows, self.span = phase, graph.file, new_tokens, rows, span
        self._first, self._end = span or (0, contract.batch_size)
        self._batch = batch = self._end - self._first
        self._cache, self._window = cache, loaded.window
        self.binding = session.binding()
        self.is_bound = True
        """False after `release`."""
        self.observed = False
        """Whether the last run was profiled."""
        for store in cache.bound_once:
            store.bind(self.binding, span)
        self._recording: Recording | None = None
        if session.captures and span is None and phase == "decode" and new_tokens == 1:
            self._recording = Recording(session, self.binding, cache)
        binds = self._recording or self.binding
        bind_given = self.binding.bind_input if self._recording is None else self._recording.bind_constant
        for port in graph.adapter_inputs:
            if port.name in adapter_values:
                bind_given(port.name, adapter_values[port.name])
        shapes = port_shapes(batch, new_tokens, rows, contract.vocab_size, contract.max_length)
        mask = port_by_role(graph, "mask")
        self._mask: tuple[str, Buffer] | None = None
        """Name of a mask [B, T] whose T changes with each step, and a buffer [B, N]."""
        if mask is not None and len(mask.shape) == 2 and not isinstance(mask.shape[1], int):
            self._mask = mask.name, host_buffer((batch, contract.max_length), mask.dtype)
        ports = [port for port in graph.inputs if self._mask is None or port is not mask]
        inputs = bound(ports, shapes, binds.bind_input)
        on_device: dict[str, Buffer] = {}
        outputs = bound(graph.outputs, shapes, lambda name, buffer: self._bind_output(session, name, buffer, on_device))
        self.fed = inputs["tokens"].array
        """[rows of the span, S]: input of a run."""
        sequences = len(cache.lengths)
        feeds_all = span is None and sequences == batch
        self.tokens = self.fed if feeds_all else np.empty((sequences, new_tokens), self.fed.dtype)
        self._logits_name = logits_port(graph).name
        self._chosen = inputs["logits_rows"].array if "logits_rows" in inputs else None
        if "logits_count" in inputs:
            inputs["logits_count"].array.fill(rows)
        first = new_tokens - rows if self._chosen is None else 0
        columns = {first + column: column for column in range(rows)}
        device = on_device.get(self._logits_name)
        self.logits = Logits(outputs["logits"], device, choice, graph.file, self._first, columns)
        fixed = self._recording.fix(inputs, contract.max_length) if self._recording is not None else frozenset()
        writers = {role: cursor_writer(role, new_tokens) for role in inputs if role not in fixed}
        self._writers = [(writer, inputs[role].array) for role, writer in writers.items() if writer is not None]
        self.cursors = {role: inputs[role].array for role, writer in writers.items() if writer is not None}
        """Inputs computed from the rows' cache positions, by role."""
        self._rope = inputs["rope_length"].array if "rope_length" in inputs else None
        rebound = (*(port.name for port in ports), *(store.state.past for store in cache.bound_once))
        buffers, required = self.binding.buffers, session.required_memory
        self._moving = [(name, buffers[name]) for name in rebound if buffers[name].memory != required[name]]
        """Inputs to bind before each run, because binding copies the values of buffers outside the session's memory.
        Values written to the buffer after binding are not seen (WebGPU, ONNX Runtime 1.27)."""

    def _bind_output(self, session: Session, name: str, buffer: Buffer, on_device: dict[str, Buffer]) -> None:
        """Bind the output `name` to `buffer`, or to device memory if a step computes it there."""
        if self.rows <= SMALL_STEP_TOKENS and session.on_device(name):
            device = session.state_buffer(name, buffer.host.shape, buffer.dtype)
            if device.readable:
                on_device[name] = device
                (self._recording or self.binding).bind_output(name, device)
                return
        self.binding.bind_output(name, buffer)

    def place(self, starts: Starts, rope_length: int) -> None:
        """Write every cursor input. `starts`: [sequences]; `rope_length`: text length for the rotary frequencies."""
        starts = np.broadcast_to(starts[self._first : self._end], self._batch)
        for write, array in self._writers:
            write(starts, array)
        if self._rope is not None:
            self._rope.fill(rope_length)
        if self._mask is not None:
            valid = starts + self.new_tokens
            self.masked(np.arange(valid.max()) < valid[:, None])

    def masked(self, values: npt.ArrayLike) -> None:
        """Replace the mask by the values [T] or [B, T], and 0 beyond them."""
        values = np.atleast_2d(values)
        if self._mask is not None:
            name, room = self._mask
            mask = reshaped(room, (self._batch, values.shape[1]))
            mask.host[...] = values
            self.binding.bind_input(name, mask)
        elif "mask" in self.cursors:
            self.cursors["mask"].fill(0)
            self.cursors["mask"][:, : values.shape[1]] = values

    def choose(self, positions: Sequence[int]) -> None:
        """Request logits at at most K positions of 0 .. S-1; unused places repeat the last position."""
        if self._chosen is None:
            return
        self.logits.columns = {position: column for column, position in enumerate(positions)}
        self._chosen[: len(positions)] = positions
        self._chosen[len(positions) :] = positions[-1]

    def run(self) -> float:
        """Run the session with the bound buffers; return the seconds."""
        window, rows = self._window, None if self.span is None else self._batch
        self.observed = window.open
        if self.tokens is not self.fed:
            np.copyto(self.fed, self.tokens[self._first : self._end])
        began = time.perf_counter()
        try:
            for store in self._cache.moving:
                store.before_run(self.binding)
            with window.listening(self.phase):
                self.repeat()
                seconds = time.perf_counter() - began
            if not window.open:
                return seconds
            addresses = self._as_of_all(self.binding.output_addresses())
            for state in self._cache.stores:
                state.record_addresses(addresses)
            window.after_run(self.phase, self.new_tokens, rows)
        except PartitaError:
            window.close()  # the profile would contain a run without a record
            raise
        except BaseException:
            window.after_run(self.phase, self.new_tokens, rows, cut_short=True)
            raise
        return seconds

    def repeat(self) -> None:
        """Run again with the same buffers. Requires `repeats`."""
        for name, buffer in self._moving:
            self.binding.bind_input(name, buffer)
        if self._recording is None:
            self.binding.run()
        else:
            self._recording.run(observed=self._window.open)
        self.logits.ran()

    @property
    def repeats(self) -> bool:
        """Whether `repeat` is a step: no profiled run, and no growing buffer or mask."""
        fixed = self._mask is None and self._rope is None and not self._cache.moving
        return fixed and not self._window.open and len(self._cache.lengths) >= self._batch

    @property
    def plain_binding(self) -> Binding | None:
        """The binding if its run is all that `repeat` does, else None."""
        plain = not self._moving and self._recording is None and not self.logits.on_device
        return self.binding if plain else None

    @property
    def replays(self) -> int | None:
        """Number of runs that replayed a captured run; None without graph capture."""
        return None if self._recording is None else self._recording.replays

    def _as_of_all(self, outputs: dict[str, int]) -> dict[str, int]:
        """Addresses of the outputs, with those of states shifted to the beginning of all rows."""
        buffers = self.binding.buffers
        parts = {name: buffers[name] for name in outputs if name in buffers and buffers[name].part is not None}
        moved = {name: outputs[name] - part.address() + part.owner.address() for name, part in parts.items()}
        return {**outputs, **moved}

    def release(self) -> None:
        """Free its device memory before its session closes; facts stay available."""
        self.is_bound = False
        self.binding.release()
        self.logits.release()

    @property
    def crossing(self) -> dict[str, int]:
        """Bytes of inputs and outputs that were copied between host and device outside the last run."""
        fed = {} if self._recording is None else self._recording.fed_bytes
        return {**fed, self._logits_name: self.logits.copied_bytes} if self.logits.on_device else fed


class Logits:
    """The logits [B, K, vocab] of the last run, by row of the batch and position of the step."""

    def __init__(
        self,
        feed: BoundInput,
        device: Buffer | None,
        choice: DeviceChoice | None,
        file: str,
        first_row: int,
        columns: Mapping[int, int],
    ) -> None:
        """`feed`: the host buffer. `device`: the buffer that runs write; None if they write `feed`. `choice`: selects
        the largest logits on the device. `first_row`: of the batch."""
        self.on_device = device is not None
        self._feed, self._device_buffer, self._file, self._first_row = feed, device, file, first_row
        self.columns = columns
        """Index of the logits of each position."""
        self._choice = choice if device is not None else None
        self._values = feed.array
        self._wide = np.empty((len(feed.array), feed.array.shape[-1]), np.float32)
        self._on_host, self._selected = True, False
        self._selection: Selection | None = None
        self.copied_bytes = feed.buffer.size_bytes
        """Bytes copied to the host after the last run; without an execution, bytes that would be copied."""

    def ran(self) -> None:
        """Invalidate the copy on the host after a run."""
        if self._device_buffer is not None:
            self._on_host, self._selected, self.copied_bytes = False, False, 0

    def _index(self, row: int, position: int) -> tuple[int, int]:
        """Index of a row and a position of the step.

        Raises GenerationError if the graph does not compute them: some foreign graphs give only the last token's
        logits, and a row may end before.
        """
        if position not in self.columns:
            raise GenerationError(
                f"{self._file} computes logits at {listing(map(str, self.columns))} of the tokens of a step, but a row "
                f"ends at {position}; use prompts of equal length, or export with logits of all tokens"
            )
        return row - self._first_row, self.columns[position]

    def __call__(self, row: int, position: int) -> npt.NDArray[np.float32]:
        """Logits [vocab] of one row at a chosen position; valid until the next run."""
        index = self._index(row, position)
        if not self._on_host:
            assert self._device_buffer is not None
            self._values = self._device_buffer.copy(self._feed.buffer).reshape(self._feed.array.shape)
            self._on_host, self.copied_bytes = True, self.copied_bytes + self._device_buffer.size_bytes
        values: npt.NDArray[Any] = self._values[index]
        dtype = self._feed.buffer.dtype
        if dtype == "float32":
            return values  # no copy if float32
        wide: npt.NDArray[np.float32] = self._wide[index[0]]
        if dtypes.dtype_named(dtype).upper_half:
            np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(wide, values)
        return wide

    def in_place(self, row: int) -> npt.NDArray[np.float32] | None:
        """Logits [vocab] after the only token of a row, in the memory that runs write; None on a device or if not
        float32."""
        return None if self.on_device or self._feed.buffer.dtype != "float32" else self(row, 0)

    def largest(self, row: int, position: int, count: int) -> LargestLogits | None:
        """The `count` largest logits of a row and all equal to the last of them, selected on the device.

        None if the host has to select among all logits, which may not all be finite.
        """
        index = self._index(row, position)
        if self._on_host or self._choice is None or not self._choice.is_used:
            return None
        try:
            if self._selection is None:
                assert self._device_buffer is not None
                self._selection = self._choice.selection(self._device_buffer, self._feed.array.shape[1])
            if not self._selected:
                self._selection.run()
                self._selected = True
                self.copied_bytes += self._selection.size_bytes
        except FAILURES as error:  # if the device is lost, the copy of the logits raises
            self._choice.fail(error)
            self._drop_selection()
            return None
        return self._selection.largest(*index, count)

    def _drop_selection(self) -> None:
        if self._selection is not None:
            self._selection.release()
        self._selection = None

    def release(self) -> None:
        """Free its device memory."""
        self._drop_selection()
        self._device_buffer, self._choice = None, None
