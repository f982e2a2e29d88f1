"""States that every step writes to new memory, longer if they grow.

Foreign graphs append keys and values: past [B, KV, T, D] becomes present [B, KV, T + S, D]. Others return a state of
fixed shape in another buffer. ONNX Runtime allocates the present in its arena, in the memory where the session reads
the past, and the next step reads it there. The graph itself copies the past into the longer tensor, and the report
counts these bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import GenerationError
from partita.observations.text_format import plural
from partita.package.contract import State
from partita.runtime.generate.cache.fixed_states import Place, StoredState
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY, Buffer, host_buffer


def moves(state: State) -> bool:
    """Whether each step writes a state to another buffer than it reads."""
    return state.growing_axis is not None or not state.in_place


class GrowingState(StoredState):
    """A state whose buffer is replaced after every step.

    A growing state has one length for all rows of the batch, so all rows hold the same sequence.
    """

    def _first_buffer(self) -> Buffer:
        """The state before the first token: length zero if it grows, else zeros."""
        state = self.state
        if state.growing_axis is None:
            return super()._first_buffer()
        shape = tuple(0 if axis == state.growing_axis else size for axis, size in enumerate(state.shape))
        return host_buffer(shape, state.dtype)

    @property
    def separate(self) -> bool:
        """Whether the batch has a single row."""
        return self._batch == 1

    def before_run(self, binding: Binding) -> None:
        """Bind the past, unless the graph reads none, and let ONNX Runtime allocate the present."""
        if self.state.past in binding.inputs:
            binding.bind_input(self.state.past, self.buffer)
        binding.bind_fresh_output(self.state.present, self._session.fresh_memory(self.state.past))

    def after_run(self, present: Buffer, tokens: int) -> None:
        """Make the present of the step the past of the next."""
        _check_growth(self.state, self.buffer, present, tokens)
        self._copied_bytes = self.buffer.size_bytes
        self.buffer = present

    def clear(self) -> None:
        """Make the state empty, or zero."""
        self.buffer = self._first_buffer()

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare for a first token."""
        self.clear()

    def wipes(self, rows: Sequence[int]) -> bool:
        """True: new rows begin with an empty state."""
        return True

    def wipe(self, rows: Sequence[int]) -> None:
        """Do nothing."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether the state has a token axis, a numpy dtype, and memory that can be read back."""
        if tokens == 0:
            return True
        known = self._session.fresh_memory(self.state.past).memory in (HOST_MEMORY, CUDA_MEMORY)
        return known and self.state.growing_axis is not None and not dtypes.dtype_named(self.state.dtype).upper_half

    def rewind(self, tokens: int) -> None:
        """Remove the last tokens, through host memory."""
        if tokens:
            self.buffer = _shortened(self.buffer, self.state, tokens)

    def entries(self, tokens: int) -> tuple[slice, ...]:
        """Index of the part of a row's state for its first tokens."""
        return (
            () if self.state.growing_axis is None else (*[slice(None)] * (self.state.growing_axis - 1), slice(tokens))
        )

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the state can be saved: after any token if it has a token axis, else after the last.

        False if its first axis is not the batch.
        """
        least = filled if self.state.growing_axis is None else 0
        return self.state.shape[0] == self._batch and least <= tokens <= filled and self.buffer.readable

    def can_load(self) -> bool:
        """Whether a state of fixed shape can be written."""
        return self.state.growing_axis is not None or self.buffer.readable

    def load_row(self, row: Place, values: npt.NDArray[Any]) -> None:
        """Load the state of all rows; a growing state stays in host memory until the next step has read it."""
        grows = self.state.growing_axis is not None
        self.buffer = host_buffer((self._batch, *values.shape), self.state.dtype) if grows else self._first_buffer()
        self.buffer.change(lambda whole: whole.__setitem__(..., values))


def _check_growth(state: State, past: Buffer, present: Buffer, tokens: int) -> None:
    """Raise GenerationError if the shape of present is not past plus the step's tokens."""
    before, after = list(past.value.shape()), list(present.value.shape())
    wanted = [size + tokens if axis == state.growing_axis else size for axis, size in enumerate(before)]
    if after != wanted:
        raise GenerationError(
            f"a step of {plural(tokens, 'token')} returned {state.present} {after} for {state.past} {before}, not "
            f"{wanted}: the graph's cache does not match its contract"
        )


def _shortened(buffer: Buffer, state: State, tokens: int) -> Buffer:
    """A state without its last tokens, in host memory."""
    assert state.growing_axis is not None
    whole = buffer.value.numpy()
    kept = whole.shape[state.growing_axis] - tokens
    shape = tuple(kept if axis == state.growing_axis else size for axis, size in enumerate(whole.shape))
    shorter = host_buffer(shape, state.dtype)
    if math.prod(shape):
        shorter.host[...] = np.take(whole, range(kept), axis=state.growing_axis)
    return shorter
