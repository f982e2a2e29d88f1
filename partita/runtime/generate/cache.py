"""The cache: a cursor per row, and the stores of a package's states.

States of fixed shape have one buffer each, bound as past and present, so that nothing grows or is copied. Keys and
values have an entry per token, for all tokens or a sliding window. Recurrent and convolution states take in every token
that is fed, padding included.

Other graphs write the present to new memory in every step. Foreign graphs append keys and values: past [B, KV, T, D]
becomes present [B, KV, T + S, D]. Others return a state of fixed shape in another buffer. ONNX Runtime allocates the
present in its arena, in the memory where the session reads the past, and the next step reads it there. The graph itself
copies the past into the longer tensor, and the report counts these bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.observations.facts import StateFact
from partita.observations.text_format import plural
from partita.package.contract import State
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session

Span = tuple[int, int] | None
"""Rows of the batch, first and end (exclusive); None: all."""
RowStates = Mapping[str, npt.NDArray[Any]]
"""The states of one row on the host, by the graph's input name, without the batch axis. Keys and values have one entry
per token: [KV, T, D]. bfloat16 is stored as uint16."""
RowShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each state."""
KINDS = frozenset({"key", "value"})
"""Types of states with an entry per token."""
TOKENS_AXIS = 2
"""Axis of the tokens in keys and values."""
UNBOUNDED_TOKENS = 1 << 40
"""More tokens than any row can have."""


def moves(state: State) -> bool:
    """Whether each step writes a state to another buffer than it reads."""
    return state.growing_axis is not None or not state.in_place


class StoredState:
    """A state in one buffer, which a step reads as past and writes as present.

    Keys and values: entries beyond a row's cursor are never read and are overwritten by its next tokens. In a sliding
    window, the graph drops the oldest entries and moves the others up. While a row's tokens fit the window, entries are
    placed as without one; after that, it cannot be rewound. Padding would displace entries. Source: ONNX Runtime's
    ContribOperators.md, GroupQueryAttention, `sliding_window_cache`: after T tokens, the last L are in entries 0 .. L -
    1, with min(T, window) <= L <= min(T, capacity). The capacity of Partita's packages is the window.

    Recurrent and convolution states are zero before a row's first token, and cannot be rewound.
    """

    def __init__(self, state: State, session: Session, batch: int) -> None:
        self.state, self._session, self._batch = state, session, batch
        has_entries = state.kind in KINDS and not moves(state)
        self.padding_is_safe = has_entries and not state.rolling
        """Whether entries beyond a row's cursor are never read."""
        self.begins_zero = not has_entries
        """Whether the state must be zero before a row's first token."""
        self._axis = TOKENS_AXIS if has_entries else state.growing_axis
        """Axis of the tokens; None without entries."""
        self._rewindable = UNBOUNDED_TOKENS if has_entries else 0
        """Maximum tokens of a row that can be rewound: no entry was dropped."""
        if has_entries and state.rolling:
            self._rewindable = min(state.window or 0, state.shape[TOKENS_AXIS])
        self.buffer = self._first_buffer()
        self._address, self._shares_address = self.buffer.address(), True
        """Address after the last observed run, and whether past and present had one address in each of them."""
        self._address_changes = self._observed_runs = 0
        self._copied_bytes = 0
        """Bytes of the state that the last step copied."""

    def _first_buffer(self) -> Buffer:
        return self._session.state_buffer(self.state.past, self.state.shape, self.state.dtype)

    @property
    def separate(self) -> bool:
        """Whether a row can begin and continue independently of the others."""
        return not self.begins_zero or self.buffer.readable

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind the buffer, or its part of the rows in `span`, as past and present."""
        bound = self.buffer if span is None else self.buffer.rows(*span)
        binding.bind_input(self.state.past, bound)
        binding.bind_output(self.state.present, bound)

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether a row with `filled` tokens can be rewound by `tokens`: by moving its cursor."""
        return tokens == 0 or 0 < tokens <= filled <= self._rewindable

    def entries(self, tokens: int) -> tuple[slice, ...]:
        """Index of the part of a row's state for its first tokens: all of it without entries, or if some may be
        dropped."""
        if self._axis is None:
            return ()
        whole = self.state.rolling and tokens > self._rewindable
        return (*[slice(None)] * (self._axis - 1), slice(None if whole else tokens))

    def row_shape(self, tokens: int) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the saved state of a row with this number of tokens."""
        shape, cut = self.state.shape, self.entries(tokens)
        sizes = [len(range(size)[part]) for size, part in zip(shape[1:], cut, strict=False)]
        return (*sizes, *shape[1 + len(cut) :]), self.state.dtype

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the state after a row's first `tokens` can be saved when it has `filled` tokens."""
        return self.rewinds(filled - tokens, filled) and self.buffer.readable

    def save_row(self, row: int, tokens: int) -> npt.NDArray[Any]:
        """A copy of the state of a row after its first tokens. Requires `saves`."""
        return np.array(self.buffer.values()[row][self.entries(tokens)])

    def can_load(self) -> bool:
        """Whether the buffer can be partly written."""
        return self.buffer.readable

    def load_row(self, row: int | slice, values: npt.NDArray[Any]) -> None:
        """Write the state of a row, or of all rows, from position 0."""
        place = (row, *(slice(size) for size in values.shape))
        self.buffer.change(lambda whole: whole.__setitem__(place, values))

    def wipes(self, rows: Sequence[int]) -> bool:
        """Whether the buffer of these rows can be zeroed."""
        return self.buffer.readable or len(rows) == len(self.buffer)

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        self.buffer.clear_rows(rows)

    def record_addresses(self, outputs: Mapping[str, int]) -> None:
        """Compare the addresses of a run with each other and with the previous run."""
        present = outputs[self.state.present]
        self._observed_runs += 1
        self._shares_address = self._shares_address and self.buffer.address() == present
        self._address_changes += present != self._address
        self._address = present

    def fact(self) -> StateFact:
        """The observed facts."""
        return StateFact(
            past=self.state.past,
            present=self.state.present,
            layer=self.state.layer,
            kind=self.state.kind,
            memory=self.buffer.memory,
            size_bytes=self.buffer.size_bytes,
            same_address=self._shares_address,
            address_changes=self._address_changes,
            checked_steps=self._observed_runs,
            copied_bytes=self._copied_bytes,
        )


class MovingState(StoredState):
    """A state whose buffer is replaced after every step. It cannot be rewound.

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
        """Make the present of the step the past of the next. Raises GenerationError if it did not grow by `tokens`."""
        state, before, after = self.state, list(self.buffer.value.shape()), list(present.value.shape())
        wanted = [size + tokens if axis == state.growing_axis else size for axis, size in enumerate(before)]
        if after != wanted:
            raise GenerationError(
                f"a step of {plural(tokens, 'token')} returned {state.present} {after} for {state.past} {before}, not "
                f"{wanted}: the graph's cache does not match its contract"
            )
        self._copied_bytes = self.buffer.size_bytes
        self.buffer = present

    def wipes(self, rows: Sequence[int]) -> bool:
        """True: the buffer is replaced."""
        return True

    def wipe(self, rows: Sequence[int]) -> None:
        """Make the state of all rows empty, or zero."""
        self.buffer = self._first_buffer()

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the state can be saved: after any token if it has a token axis, else after the last.

        False if its first axis is not the batch.
        """
        least = filled if self._axis is None else 0
        return self.state.shape[0] == self._batch and least <= tokens <= filled and self.buffer.readable

    def can_load(self) -> bool:
        """Whether a state of fixed shape can be written."""
        return self._axis is not None or self.buffer.readable

    def load_row(self, row: int | slice, values: npt.NDArray[Any]) -> None:
        """Load the state of all rows; a growing state stays in host memory until the next step has read it."""
        grows = self._axis is not None
        self.buffer = host_buffer((self._batch, *values.shape), self.state.dtype) if grows else self._first_buffer()
        self.buffer.change(lambda whole: whole.__setitem__(..., values))


class Cache:
    """States of all layers, and the number of cached tokens of each row."""

    def __init__(self, states: Sequence[State], session: Session, batch: int) -> None:
        self.states = tuple(states)
        self.stores = tuple((MovingState if moves(each) else StoredState)(each, session, batch) for each in states)
        """One per state, in the order of the package."""
        self._batch = batch
        self.moving = tuple(store for store in self.stores if isinstance(store, MovingState))
        """Stores that bind their buffers in each step."""
        self.bound_once = tuple(store for store in self.stores if store not in self.moving)
        """Stores whose buffers are bound only once."""
        self.padding_is_safe = all(store.padding_is_safe for store in self.stores)
        """Whether padding may be fed to a row: its states are never read."""
        self.lengths = [0] * batch
        """[rows]: cached tokens of each row, the cache position of its next token. One row: all rows of the batch hold
        its sequence."""
        self.invalid: set[int] = set()
        """Rows whose recurrent states took in padding; they must be read again."""
        self.dirty = False
        """A failed run may have left values that are not finite; the cache must be zeroed before its next use."""

    def _places(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows of the batch that hold the sequences of `rows`."""
        return range(self._batch) if len(self.lengths) == 1 else rows

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """One per state, in the order of the package."""
        return tuple(store.buffer for store in self.stores)

    @property
    def on_host(self) -> bool:
        """Whether every state is in host memory."""
        return all(buffer.memory == HOST_MEMORY for buffer in self.buffers)

    def prepare(self) -> None:
        """Prepare for a first request: zero the cache if it is `dirty`, and free every row."""
        for store in self.stores if self.dirty else ():
            store.wipe(range(self._batch))
        self.dirty = False
        self.lengths[:] = [0] * len(self.lengths)
        self.invalid.clear()

    def clear(self) -> None:
        """Zero every state, and free every row."""
        self.dirty = True
        self.prepare()

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare these rows for their first token."""
        for store in self.stores:
            if store.begins_zero:
                store.wipe(self._places(rows))

    def advance(self, binding: Binding, starts: Sequence[int], counts: Sequence[int], span: Span = None) -> None:
        """Move the cursors after a run that fed `counts` [B] tokens of each row at `starts` [B].

        `span`: the rows of the run. Rows that took no tokens hold padding there.
        """
        made = binding.allocated() if self.moving else {}
        for store in self.moving:
            store.after_run(made[store.state.present], max(counts))
        first, end = span or (0, len(counts))
        if not self.padding_is_safe:
            self.invalid.update(row for row in range(first, end) if self.lengths[row] and not counts[row])
        for row in range(first, end):
            self.lengths[row] = self.lengths[row] + counts[row] if counts[row] else min(self.lengths[row], starts[row])

    def can_rewind(self, tokens: int, filled: int = UNBOUNDED_TOKENS) -> bool:
        """Whether a row with `filled` tokens can be rewound by this number of them; default: any row."""
        return 0 <= tokens <= filled and all(store.rewinds(tokens, filled) for store in self.stores)

    def rewind(self, row: int, tokens: int) -> bool:
        """Rewind a row by a number of tokens. False, without a change, if a state cannot be rewound."""
        can = self.can_rewind(tokens, self.lengths[row])
        self.lengths[row] -= tokens if can else 0
        return can

    def row_shapes(self, tokens: int) -> RowShapes:
        """Shapes and dtypes of the saved states of a row with this number of tokens."""
        return {store.state.past: store.row_shape(tokens) for store in self.stores}

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the states after a row's first `tokens` can be saved when it has `filled` tokens."""
        return all(store.saves(tokens, filled) for store in self.stores)

    def save_row(self, row: int, tokens: int) -> RowStates:
        """Copies of the states of a row after its first tokens. Requires `saves`."""
        return {store.state.past: store.save_row(row, tokens) for store in self.stores}

    @property
    def loads_rows(self) -> bool:
        """Whether saved states can be loaded into a single row."""
        return all(store.can_load() for store in self.stores)

    def load_row(self, row: int, tokens: int, states: RowStates) -> None:
        """Load the states of the first `tokens` into a row. Requires `loads_rows`."""
        for store in self.stores:
            store.load_row(slice(None) if len(self.lengths) == 1 else row, states[store.state.past])
        self.lengths[row] = tokens

    def release_row(self, row: int) -> None:
        """Free a row: its next request begins at position 0."""
        self.lengths[row] = 0
        self.invalid.discard(row)

    def wipe(self, row: int) -> bool:
        """Zero a row whose values may not be finite, because they would affect its next request.

        If a single row cannot be zeroed, the cache is `dirty`, and the result False.
        """
        places = self._places((row,))
        can = all(store.wipes(places) for store in self.stores)
        for store in self.stores if can else ():
            store.wipe(places)
        self.dirty = self.dirty or not can
        return can

    def release(self) -> None:
        """Free the buffers; facts stay available."""
        for store in self.stores:
            store.buffer = store.buffer.released()
