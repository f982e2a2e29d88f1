"""States of fixed shape: one buffer each, bound as past and present, so that nothing grows or is copied.

Keys and values have an entry per token, for all tokens or a sliding window. Recurrent and convolution states take in
every token that is fed, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.observations.facts import StateFact
from partita.package.contract import State
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer
from partita.runtime.ort.session import Session

Span = tuple[int, int] | None
"""Rows of the batch, first and end (exclusive); None: all."""
Place = int | slice
"""A row of the batch, or a slice of all rows if they hold the same sequence."""
RowStates = Mapping[str, npt.NDArray[Any]]
"""The states of one row on the host, by the graph's input name, without the batch axis. Keys and values have one entry
per token: [KV, T, D]. bfloat16 is stored as uint16."""
RowShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each state."""


@dataclass(slots=True)
class Residence:
    """The observed addresses of one state over several runs."""

    address: int
    shares_address: bool = True
    changes: int = 0
    steps: int = 0

    def record_addresses(self, past: int, present: int) -> None:
        """Compare the addresses of one run with each other and with the previous run."""
        self.steps += 1
        self.shares_address = self.shares_address and past == present
        self.changes += present != self.address
        self.address = present

    def fact(self, state: State, buffer: Buffer, copied_bytes: int = 0) -> StateFact:
        """The facts of `state`, now in `buffer`. `copied_bytes`: bytes of it that the last step copied."""
        return StateFact(
            past=state.past,
            present=state.present,
            layer=state.layer,
            kind=state.kind,
            memory=buffer.memory,
            size_bytes=buffer.size_bytes,
            same_address=self.shares_address,
            address_changes=self.changes,
            checked_steps=self.steps,
            copied_bytes=copied_bytes,
        )


KINDS = frozenset({"key", "value"})
"""Types of states with an entry per token."""
TOKENS_AXIS = 2
"""Types of keys and values."""


class States:
    """One buffer per state, which a step reads as past and writes as present, unless a subclass differs.

    The rows' cursors determine which entries are valid.
    """

    moves = False
    """Whether buffers change with each step, so that `before_run` is needed."""
    padding_is_safe = False
    """Whether entries beyond a row's cursor are never read."""

    def __init__(self, states: Sequence[State], session: Session) -> None:
        self.states, self._session = tuple(states), session
        self.buffers = [self._first_buffer(state) for state in self.states]
        self._residences = tuple(Residence(buffer.address()) for buffer in self.buffers)

    def _first_buffer(self, state: State) -> Buffer:
        return self._session.state_buffer(state.past, state.shape, state.dtype)

    def named(self) -> Iterable[tuple[str, Buffer]]:
        """The buffer of each state, by the graph's input name."""
        return ((state.past, buffer) for state, buffer in zip(self.states, self.buffers, strict=True))

    @property
    def separate(self) -> bool:
        """Whether a row can begin and continue independently of the others."""
        return True

    @property
    def has_spans(self) -> bool:
        """Whether a span of rows of every buffer can be bound."""
        return all(buffer.has_spans for buffer in self.buffers)

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind every buffer, or its part of the rows in `span`, as past and present."""
        for state, buffer in zip(self.states, self.buffers, strict=True):
            bound = buffer if span is None else buffer.rows(*span)
            binding.bind_input(state.past, bound)
            binding.bind_output(state.present, bound)

    def before_run(self, binding: Binding, new_tokens: int) -> None:
        """Do nothing: the buffers stay bound."""

    def after_run(self, binding: Binding, take: Sequence[int]) -> None:
        """Do nothing: present is past."""

    def begin(self, rows: Sequence[int]) -> None:
        """Do nothing: rows need no preparation for a first token."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether a row with `filled` tokens can be rewound by `tokens`."""
        return tokens == 0

    def rewind(self, row: int, tokens: int) -> None:
        """Do nothing: entries beyond the cursor are not read."""

    def release_row(self, row: int) -> None:
        """Do nothing: the next request begins at position 0."""

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """Index of the part of a row's state for its first tokens: all of it."""
        return ()

    def row_shapes(self, tokens: int) -> RowShapes:
        """Shapes and dtypes of the saved states of a row with this number of tokens."""
        found = {}
        for state in self.states:
            cut = self.entries(state, tokens)
            sizes = [len(range(size)[part]) for size, part in zip(state.shape[1:], cut, strict=False)]
            found[state.past] = ((*sizes, *state.shape[1 + len(cut) :]), state.dtype)
        return found

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the states after a row's first `tokens` can be saved when it has `filled` tokens."""
        return tokens == filled and self._readable

    @property
    def _readable(self) -> bool:
        return all(buffer.readable for buffer in self.buffers)

    def save_row(self, row: int, tokens: int) -> RowStates:
        """Copies of the states of a row after its first tokens. Requires `saves`."""
        return {
            state.past: np.array(buffer.values()[row][self.entries(state, tokens)])
            for state, buffer in zip(self.states, self.buffers, strict=True)
        }

    def can_load(self) -> bool:
        """Whether a buffer can be partly written."""
        return self._readable

    def load_row(self, row: Place, states: RowStates) -> None:
        """Write the states of a row from position 0."""
        for state, buffer in zip(self.states, self.buffers, strict=True):
            values = states[state.past]
            place = (row, *(slice(size) for size in values.shape))

            def write(whole: npt.NDArray[Any], place: Any = place, values: npt.NDArray[Any] = values) -> None:
                whole[place] = values

            buffer.change(write)

    def clear(self) -> None:
        """Zero every buffer."""
        for buffer in self.buffers:
            buffer.clear()

    def wipes(self, rows: Sequence[int]) -> bool:
        """Whether the buffers of these rows can be zeroed."""
        return all(buffer.readable or len(rows) == len(buffer) for buffer in self.buffers)

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        for buffer in self.buffers:
            buffer.clear_rows(rows)

    def record_addresses(self, outputs: Mapping[str, int]) -> None:
        """Record the addresses of the states after a run."""
        for state, buffer, residence in zip(self.states, self.buffers, self._residences, strict=True):
            residence.record_addresses(buffer.address(), outputs[state.present])

    def facts(self) -> tuple[StateFact, ...]:
        """The observed facts of every state."""
        rows = zip(self.states, self.buffers, self._residences, strict=True)
        return tuple(residence.fact(state, buffer) for state, buffer, residence in rows)

    def release(self) -> None:
        """Free the buffers."""
        self.buffers = [buffer.released() for buffer in self.buffers]


class FixedStates(States):
    """Keys and values of all tokens. Entries beyond a row's cursor are overwritten by its next tokens."""

    padding_is_safe = True

    def rewinds(self, tokens: int, filled: int) -> bool:
        """True: the cursor determines which entries are valid."""
        return 0 <= tokens <= filled

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, N, D]."""
        return slice(None), slice(tokens)

    def saves(self, tokens: int, filled: int) -> bool:
        """True: each token has its own entry."""
        return tokens <= filled and self._readable


class RollingStates(States):
    """Keys and values of a sliding window: the graph drops the oldest entries and moves the others up.

    While a row's tokens fit the window, entries are placed as in `FixedStates`; after that, it cannot be rewound.
    Padding is never fed, because it would displace entries. Source: ONNX Runtime's ContribOperators.md,
    GroupQueryAttention, `sliding_window_cache`: after T tokens, the last L are in entries 0 .. L - 1, with min(T,
    window) <= L <= min(T, capacity). The capacity of Partita's packages is the window.
    """

    @property
    def capacity(self) -> int:
        """Tokens that all states hold before any is dropped."""
        return min(map(_window_tokens, self.states))

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether no token was dropped."""
        return tokens == 0 or filled <= self.capacity

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, rows, D]; all entries once some may be dropped."""
        return slice(None), slice(tokens if tokens <= _window_tokens(state) else None)

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether no token was dropped, or `tokens` are all of the row's."""
        return (tokens == filled or tokens <= filled <= self.capacity) and self._readable


def _window_tokens(state: State) -> int:
    """Tokens that a state with a sliding window holds at least."""
    return min(state.window or 0, state.shape[TOKENS_AXIS])


class RecurrentStates(States):
    """Recurrent and convolution states, zero before a row's first token. They cannot be rewound."""

    @property
    def separate(self) -> bool:
        """Whether single rows of the buffers can be zeroed."""
        return self._readable

    def begin(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        self.wipe(rows)
