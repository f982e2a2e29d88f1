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
from partita.observations.facts import StateFact
from partita.observations.text_format import plural
from partita.package.contract import State
from partita.runtime.generate.cache.fixed_states import Place, RowStates, Span, States
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session


def moves(state: State) -> bool:
    """Whether each step writes a state to another buffer than it reads."""
    return state.grows is not None or not state.in_place


class GrowingStates(States):
    """One buffer per state, replaced after every step.

    Growing states have one length for all rows of the batch, so all rows hold the same sequence.
    """

    moves = True

    def __init__(self, states: Sequence[State], session: Session, batch: int) -> None:
        super().__init__(states, session)
        self._batch = batch
        self._copied = [0] * len(self.states)

    def _first_buffer(self, state: State) -> Buffer:
        """A state before the first token: length zero if it grows, else zeros."""
        if state.grows is None:
            return super()._first_buffer(state)
        shape = tuple(0 if axis == state.grows else size for axis, size in enumerate(state.shape))
        return host_buffer(shape, state.dtype)

    @property
    def separate(self) -> bool:
        """Whether the batch has a single row."""
        return self._batch == 1

    @property
    def has_parts(self) -> bool:
        """False."""
        return False

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Do nothing: each step binds its own buffers."""

    def before_run(self, binding: Binding, new_tokens: int) -> None:
        """Bind the past, unless the graph reads none, and let ONNX Runtime allocate the present."""
        for state, buffer in zip(self.states, self.buffers, strict=True):
            if state.past in binding.inputs:
                binding.bind_input(state.past, buffer)
            binding.bind_fresh_output(state.present, self._session.fresh_memory(state.past))

    def after_run(self, binding: Binding, take: Sequence[int]) -> None:
        """Make the present of the step the past of the next."""
        made = binding.allocated()
        for index, state in enumerate(self.states):
            _check_growth(state, self.buffers[index], made[state.present], max(take))
            self._copied[index] = self.buffers[index].size_bytes
            self.buffers[index] = made[state.present]

    def clear(self) -> None:
        """Make every state empty, or zero."""
        self.buffers = [self._first_buffer(state) for state in self.states]

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare for a first token."""
        self.clear()

    def wipes(self, rows: Sequence[int]) -> bool:
        """True: new rows begin with empty states."""
        return True

    def wipe(self, rows: Sequence[int]) -> None:
        """Do nothing."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether every state has a token axis, a numpy dtype, and memory that can be read back."""
        if tokens == 0:
            return True
        fresh = (self._session.fresh_memory(state.past).memory for state in self.states)
        known = all(memory in (HOST_MEMORY, CUDA_MEMORY) for memory in fresh)
        plain = all(s.grows is not None and not dtypes.dtype_named(s.dtype).upper_half for s in self.states)
        return known and plain

    def rewind(self, row: int, tokens: int) -> None:
        """Remove the last tokens of every state, through host memory."""
        if tokens:
            self.buffers = [_shortened(buffer, s, tokens) for buffer, s in zip(self.buffers, self.states, strict=True)]

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """Index of the part of a row's state for its first tokens."""
        return () if state.grows is None else (*[slice(None)] * (state.grows - 1), slice(tokens))

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether states can be saved: after any token if every state has a token axis, else after the last.

        False if a state's first axis is not the batch.
        """
        if any(state.shape[0] != self._batch for state in self.states):
            return False
        least = 0 if all(state.grows is not None for state in self.states) else filled
        return least <= tokens <= filled and all(buffer.readable for buffer in self.buffers)

    def can_load(self) -> bool:
        """Whether every state of fixed shape can be written."""
        fixed = [buffer for state, buffer in zip(self.states, self.buffers, strict=True) if state.grows is None]
        return all(buffer.readable for buffer in fixed)

    def load_row(self, row: Place, states: RowStates) -> None:
        """Load the states of all rows; growing states stay in host memory until the next step has read them."""
        for index, state in enumerate(self.states):
            values = states[state.past]
            if state.grows is None:
                self.buffers[index] = self._first_buffer(state)
            else:
                self.buffers[index] = host_buffer((self._batch, *values.shape), state.dtype)

            def write(whole: npt.NDArray[Any], values: npt.NDArray[Any] = values) -> None:
                whole[...] = values

            self.buffers[index].change(write)

    def facts(self) -> tuple[StateFact, ...]:
        """The observed facts of every state."""
        rows = zip(self.states, self.buffers, self._residences, self._copied, strict=True)
        return tuple(residence.fact(state, buffer, copied) for state, buffer, residence, copied in rows)


def _check_growth(state: State, past: Buffer, present: Buffer, tokens: int) -> None:
    """Raise GenerationError if the shape of present is not past plus the step's tokens."""
    before, after = list(past.value.shape()), list(present.value.shape())
    wanted = [size + tokens if axis == state.grows else size for axis, size in enumerate(before)]
    if after != wanted:
        raise GenerationError(
            f"a step of {plural(tokens, 'token')} returned {state.present} {after} for {state.past} {before}, not "
            f"{wanted}: the graph's cache does not match its contract"
        )


def _shortened(buffer: Buffer, state: State, tokens: int) -> Buffer:
    """A state without its last tokens, in host memory."""
    assert state.grows is not None
    whole = buffer.value.numpy()
    kept = whole.shape[state.grows] - tokens
    shape = tuple(kept if axis == state.grows else size for axis, size in enumerate(whole.shape))
    shorter = host_buffer(shape, state.dtype)
    if math.prod(shape):
        shorter.host[...] = np.take(whole, range(kept), axis=state.grows)
    return shorter
