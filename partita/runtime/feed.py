"""One graph bound for a fixed number of new tokens: write tokens and cursors, run, read logits.

Feeds strictly by role: what a port means comes from the manifest, its name is only handed on. Every buffer is allocated
and bound once; a step writes into the buffers and runs. Knows nothing of prompts, sampling or when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from partita.errors import PackageError, PartitaError
from partita.package import GraphFile, Port
from partita.runtime.kv_cache import KvCache
from partita.runtime.observe import Window
from partita.runtime.ort_buffers import Buffer, host_buffer
from partita.runtime.session import Binding, Session

Starts = npt.NDArray[np.int64]
"""[B]: cache rows each batch row has filled, which is where its next token goes."""
Cursor = Callable[[Starts, npt.NDArray[Any]], object]
"""Writes one cursor input, given the starts."""


def cursor_writer(role: str, new_tokens: int) -> Cursor | None:
    """How an input of `role` follows from the starts when S = `new_tokens`; None for inputs that are no cursor."""
    steps, last = np.arange(new_tokens), new_tokens - 1
    writers: dict[str, Cursor] = {
        "positions": lambda starts, out: np.add(starts[:, None], steps, out=out, casting="unsafe"),
        "last_index": lambda starts, out: np.add(starts, last, out=out, casting="unsafe"),
        "total_length": lambda starts, out: out.fill(starts.max() + new_tokens),
        "write_start": lambda starts, out: np.copyto(out, starts, casting="unsafe"),
        "valid_length": lambda starts, out: np.add(starts, new_tokens, out=out, casting="unsafe"),
    }
    return writers.get(role)


class Feed:
    """Bound buffers of one graph for S new tokens per row and K rows of logits.

    `tokens` [B, S] is there to be written before each run. `phase` is what the run counts as.
    """

    def __init__(
        self, session: Session, graph: GraphFile, cache: KvCache, window: Window, *,
        phase: Literal["prefill", "decode"], batch: int, new_tokens: int, rows: int, vocab_size: int,
    ) -> None:  # fmt: skip
        self.phase, self.file, self.new_tokens, self.rows = phase, graph.file, new_tokens, rows
        self._cache, self._window = cache, window
        self.binding = session.binding()
        cache.bind(self.binding)
        if not any(port.role == "logits_rows" for port in graph.inputs):
            self.rows = rows = new_tokens
        shapes = port_shapes(batch, new_tokens, rows, vocab_size)
        inputs = bound(graph.inputs, shapes, self.binding.bind_input)
        outputs = bound(graph.outputs, shapes, self.binding.bind_output)
        self.tokens = required(inputs, "tokens", graph.file).host
        self._logits = required(outputs, "logits", graph.file)
        self._wide = np.empty((batch, vocab_size), np.float32)
        self._chosen = inputs["logits_rows"].host if "logits_rows" in inputs else None
        self._columns = {position: position for position in range(rows)}
        self._cursors = [
            (writer, buffer.host) for role, buffer in inputs.items() if (writer := cursor_writer(role, new_tokens))
        ]
        self._rope = inputs["rope_length"].host if "rope_length" in inputs else None
        self._moving = moving(self.binding, session.wanted_memory, [port.name for port in graph.inputs], cache)
        self.choose(range(rows) if rows <= new_tokens else (0,))

    def place(self, starts: Starts, rope_length: int) -> None:
        """Write every cursor input. `starts` [B]; `rope_length`: the length of text to take rotary frequencies for."""
        for write, array in self._cursors:
            write(starts, array)
        if self._rope is not None:
            self._rope.fill(rope_length)

    def choose(self, positions: Sequence[int]) -> None:
        """Ask for the logits at these positions of 0 .. S-1, at most K of them; what is left over repeats the last."""
        if self._chosen is None:
            return
        self._columns = {position: column for column, position in enumerate(positions)}
        self._chosen[: len(positions)] = positions
        self._chosen[len(positions) :] = positions[-1]

    def run(self) -> tuple[float, bool]:
        """Run once. Returns the wall time of the session run in seconds, and whether it was profiled."""
        window = self._window
        began = time.perf_counter()
        try:
            for name, buffer in self._moving:
                self.binding.bind_input(name, buffer)
            self.binding.run()
        except PartitaError:
            window.close()  # the profile would count a run that nobody can describe
            raise
        seconds = time.perf_counter() - began
        if not window.open:
            return seconds, False
        self._cache.look(self.binding.output_addresses())
        window.after_run(self.phase, self.new_tokens)
        return seconds, True

    def logits(self, row: int, position: int) -> npt.NDArray[np.float32]:
        """Logits [vocab] of one batch row at a position that was chosen; valid until the next run."""
        return self._widened(row, self._logits.host[row, self._columns[position]])

    def _widened(self, row: int, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The values as float32; no copy when they are."""
        if self._logits.dtype == "float32":
            return values
        wide: npt.NDArray[np.float32] = self._wide[row]
        if self._logits.dtype == "bfloat16":  # the upper half of a float32
            np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(wide, values)
        return wide


def moving(binding: Binding, wanted: dict[str, str], ports: Sequence[str], cache: KvCache) -> list[tuple[str, Buffer]]:
    """Inputs to bind anew before each run: binding copies what is not in the memory the session wants, there and then.

    What is written into the buffer later would not be seen (shown with WebGPU, ONNX Runtime 1.27).
    """
    names = [*ports, *(state.past for state in cache.states)]
    return [(name, binding.buffers[name]) for name in names if binding.buffers[name].memory != wanted[name]]


def bound(
    ports: Sequence[Port], shapes: dict[str, tuple[int, ...]], bind: Callable[[str, Buffer], None]
) -> dict[str, Buffer]:
    """Allocate and bind a buffer for each port; by role."""
    buffers: dict[str, Buffer] = {port.role: host_buffer(shapes[port.role], port.dtype) for port in ports}
    for port in ports:
        bind(port.name, buffers[port.role])
    return buffers


def port_shapes(batch: int, new_tokens: int, rows: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of a buffer by role, for B = `batch`, S = `new_tokens`, K = `rows`."""
    return {
        "tokens": (batch, new_tokens),
        "positions": (batch, new_tokens),
        "last_index": (batch,),
        "total_length": (),
        "write_start": (batch,),
        "valid_length": (batch,),
        "logits_rows": (rows,),
        "rope_length": (),
        "logits": (batch, rows, vocab_size),
    }


def required(buffers: dict[str, Buffer], role: str, file: str) -> Buffer:
    """The buffer of a role that no graph can do without."""
    if role not in buffers:
        raise PackageError(f"{file}: the manifest lists no port with the role {role!r}; export the checkpoint again")
    return buffers[role]
