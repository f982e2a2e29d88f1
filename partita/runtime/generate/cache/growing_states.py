"""States that every step writes to new memory, longer if they grow.

Foreign graphs append keys and values: past [B, KV, T, D] becomes present [B, KV, T + S, D]. Others return a state of
fixed shape in another buffer. ONNX Runtime allocates the present in its arena, in the memory where the session reads
the past, and the next step reads it there. The graph itself copies the past into the longer tensor, and the report
counts these bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import GenerationError
from partita.observations.facts import StateFact
from partita.observations.text_format import plural
from partita.package.contract import State
from partita.runtime.generate.cache.base import Place, RowShapes, RowStates, Span
from partita.runtime.generate.cache.fixed_states import Residence
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session


def moves(state: State) -> bool:
    """Whether each step writes a state to another buffer than it reads."""
    return state.grows is not None or not state.in_place


class GrowingStates:
    """One buffer per state, replaced after every step.

    Growing states have one length for all rows of the batch, so all rows hold the same sequence.
    """

    moves = True
    padding_is_safe = has_spans = False

    def __init__(self, states: Sequence[State], session: Session, batch: int) -> None:
        self.states, self._session, self._batch = tuple(states), session, batch
        self._now: list[Buffer] = [self._empty(state) for state in self.states]
        self._residences = tuple(Residence(buffer.address()) for buffer in self._now)
        self._copied = [0] * len(self.states)

    def _empty(self, state: State) -> Buffer:
        """A state before the first token: length zero if it grows, else zeros."""
        if state.grows is None:
            return self._session.state_buffer(state.past, state.shape, state.dtype)
        shape = tuple(0 if axis == state.grows else size for axis, size in enumerate(state.shape))
        return host_buffer(shape, state.dtype)

    def named(self) -> Iterable[tuple[str, Buffer]]:
        """The buffer of each state, by the graph's input name."""
        return ((state.past, buffer) for state, buffer in zip(self.states, self._now, strict=True))

    @property
    def separate(self) -> bool:
        """Whether the batch has a single row."""
        return self._batch == 1

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Do nothing: each step binds its own buffers."""

    def before_run(self, binding: Binding, new_tokens: int) -> None:
        """Bind the past, unless the graph reads none, and let ONNX Runtime allocate the present."""
        for state, buffer in zip(self.states, self._now, strict=True):
            if state.past in binding.inputs:
                binding.bind_input(state.past, buffer)
            binding.bind_fresh_output(state.present, self._session.fresh_memory(state.past))

    def after_run(self, binding: Binding, take: Sequence[int]) -> None:
        """Make the present of the step the past of the next."""
        made = binding.allocated()
        for index, state in enumerate(self.states):
            _check_growth(state, self._now[index], made[state.present], max(take))
            self._copied[index] = self._now[index].size_bytes
            self._now[index] = made[state.present]

    def clear(self) -> None:
        """Make every state empty, or zero."""
        self._now = [self._empty(state) for state in self.states]

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
        places = [
            self._session.fresh_memory(state.past).memory for state in self.states
        ]  # memory of the tensors that a step allocates
        known = all(memory in (HOST_MEMORY, CUDA_MEMORY) for memory in places)
        plain = all(s.grows is not None and not dtypes.dtype_named(s.dtype).upper_half for s in self.states)
        return known and plain

    def rewind(self, row: int, tokens: int) -> None:
        """Remove the last tokens of every state, through host memory."""
        if tokens:
            self._now = [_shortened(buffer, s, tokens) for buffer, s in zip(self._now, self.states, strict=True)]

    def release_row(self, row: int) -> None:
        """Do nothing: `begin` empties the states."""

    def row_shapes(self, tokens: int) -> RowShapes:
        """Shapes and dtypes of the saved states of a row with this number of tokens."""
        return {
            state.past: (
                tuple(tokens if axis == state.grows else size for axis, size in enumerate(state.shape) if axis),
                state.dtype,
            )
            for state in self.states
        }

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether states can be saved: after any token if every state has a token axis, else after the last.

        False if a state's first axis is not the batch.
        """
        if any(state.shape[0] != self._batch for state in self.states):
            return False
        least = 0 if all(state.grows is not None for state in self.states) else filled
        return least <= tokens <= filled and all(buffer.readable for buffer in self._now)

    def save_row(self, row: int, tokens: int) -> RowStates:
        """Copies of the states of a row after its first tokens."""
        found = {}
        for state, buffer in zip(self.states, self._now, strict=True):
            part = buffer.values()[row]
            found[state.past] = np.array(part if state.grows is None else _first(part, state.grows - 1, tokens))
        return found

    def can_load(self) -> bool:
        """Whether every state of fixed shape can be written."""
        fixed = [buffer for state, buffer in zip(self.states, self._now, strict=True) if state.grows is None]
        return all(buffer.readable for buffer in fixed)

    def load_row(self, row: Place, states: RowStates) -> None:
        """Load the states of all rows; growing states stay in host memory until the next step has read them."""
        for index, state in enumerate(self.states):
            values = states[state.past]
            if state.grows is None:
                self._now[index] = self._empty(state)
            else:
                self._now[index] = host_buffer((self._batch, *values.shape), state.dtype)

            def write(whole: npt.NDArray[Any], values: npt.NDArray[Any] = values) -> None:
                whole[...] = values

            self._now[index].change(write)

    def record_addresses(self, outputs: Mapping[str, int]) -> None:
        """Record the addresses of the states after a run."""
        for state, buffer, residence in zip(self.states, self._now, self._residences, strict=True):
            residence.record_addresses(buffer.address(), outputs[state.present])

    def facts(self) -> tuple[StateFact, ...]:
        """The observed facts of every state."""
        rows = zip(self.states, self._now, self._residences, self._copied, strict=True)
        return tuple(residence.fact(state, buffer, copied) for state, buffer, residence, copied in rows)

    def release(self) -> None:
        """Free the buffers."""
        self._now = [buffer.released() for buffer in self._now]


def _check_growth(state: State, past: Buffer, present: Buffer, tokens: int) -> None:
    """Raise GenerationError if the shape of present is not past plus the step's tokens."""
    before, after = list(past.value.shape()), list(present.value.shape())
    wanted = [size + tokens if axis == state.grows else size for axis, size in enumerate(before)]
    if after != wanted:
        raise GenerationError(
            f"a step of {plural(tokens, 'token')} returned {state.present} {after} for {state.past} {before}, not "
            f"{wanted}: the graph's cache does not match its contract"
        )


def _first(part: npt.NDArray[Any], axis: int, count: int) -> npt.NDArray[Any]:
    """The first entries along an axis."""
    return part[(*[slice(None)] * axis, slice(count))]


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
