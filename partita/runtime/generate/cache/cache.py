"""The cache as the loop uses it: a cursor per row, and the operations that all states support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.observations.facts import StateFact
from partita.package.contract import State
from partita.runtime.generate.cache.states import (
    KINDS,
    FixedState,
    GrowingState,
    RecurrentState,
    RollingState,
    RowShapes,
    RowStates,
    Span,
    StoredState,
    moves,
)
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer
from partita.runtime.ort.session import Session

UNBOUNDED_TOKENS = 1 << 40
"""More tokens than any row can have."""


def _store(state: State, session: Session, batch: int) -> StoredState:
    """The store of a state: one buffer, or a new one for every step."""
    fixed = RollingState if state.rolling else FixedState if state.kind in KINDS else RecurrentState
    return (GrowingState if moves(state) else fixed)(state, session, batch)


class Cache:
    """States of all layers, and the number of cached tokens of each row."""

    def __init__(self, states: Sequence[State], session: Session, batch: int) -> None:
        self.states = tuple(states)
        self.stores = tuple(_store(state, session, batch) for state in states)
        """One per state, in the order of the package."""
        self._batch = batch
        self._moving = tuple(store for store in self.stores if isinstance(store, GrowingState))
        self._in_place = tuple(store for store in self.stores if store not in self._moving)
        self.has_moving = bool(self._moving)
        """Whether a store has to bind its buffers in each step."""
        self.bound_once = frozenset(store.state.past for store in self._in_place)
        """Input names of the states that are bound only once."""
        self.padding_is_safe = all(store.padding_is_safe for store in self.stores)
        """Whether padding may be fed to a row: its states are never read."""
        self.separate = all(store.separate for store in self.stores)
        """Whether a row can begin and continue independently of the others."""
        self.has_spans = all(buffer.has_spans for buffer in self.buffers)
        """Whether a span of rows can be bound."""
        self.lengths = [0] * batch
        """[rows]: cached tokens of each row, the cache position of its next token."""
        self.invalid: set[int] = set()
        """Rows whose recurrent states took in padding; they must be read again."""
        self.dirty = False
        """A failed run may have left values that are not finite; the cache must be zeroed before its next use."""

    def hold_one(self) -> None:
        """Let all rows of the batch hold the sequence of row 0 from now on."""
        self.lengths = [0]

    @property
    def _holds_one(self) -> bool:
        return len(self.lengths) == 1

    def _places(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows of the batch that hold the sequences of `rows`."""
        return range(self._batch) if self._holds_one else rows

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """One per state, in the order of the package."""
        return tuple(store.buffer for store in self.stores)

    @property
    def size_bytes(self) -> int:
        """Total size of the buffers."""
        return sum(buffer.size_bytes for buffer in self.buffers)

    @property
    def on_host(self) -> bool:
        """Whether every state is in host memory."""
        return all(buffer.memory == HOST_MEMORY for buffer in self.buffers)

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind every fixed buffer, or its part of the rows in `span`, as past and present of `binding`."""
        for store in self._in_place:
            store.bind(binding, span)

    def prepare(self) -> None:
        """Prepare for a first request: zero the cache if necessary, and free every row."""
        if self.dirty:
            self.clear()
        self.lengths[:] = [0] * len(self.lengths)
        self.invalid.clear()

    def clear(self) -> None:
        """Zero every state, and free every row."""
        for store in self.stores:
            store.clear()
        self.lengths[:] = [0] * len(self.lengths)
        self.invalid.clear()
        self.dirty = False

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare these rows for their first token."""
        for store in self.stores:
            store.begin(self._places(rows))

    def before_run(self, binding: Binding) -> None:
        """Bind the buffers that change with each step."""
        for store in self._moving:
            store.before_run(binding)

    def advance(self, binding: Binding, starts: Sequence[int], counts: Sequence[int], span: Span = None) -> None:
        """Move the cursors after a run that fed `counts` [B] tokens of each row at `starts` [B].

        `span`: the rows of the run. Rows that took no tokens hold padding there.
        """
        made = binding.allocated() if self._moving else {}
        for store in self._moving:
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
        if not self.can_rewind(tokens, self.lengths[row]):
            return False
        for store in self.stores:
            store.rewind(tokens)
        self.lengths[row] -= tokens
        return True

    def row_shapes(self, tokens: int) -> RowShapes:
        """Shapes and dtypes of the saved states of a row with this number of tokens."""
        return {store.state.past: store.row_shape(tokens) for store in self.stores}

    @property
    def keeps_every_token(self) -> bool:
        """Whether the states of a row's first tokens can be saved at any later time."""
        return self.saves(1, UNBOUNDED_TOKENS)

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
            store.load_row(slice(None) if self._holds_one else row, states[store.state.past])
        self.lengths[row] = tokens

    def release_row(self, row: int) -> None:
        """Free a row: its next request begins at position 0."""
        self.lengths[row] = 0
        self.invalid.discard(row)

    def discard_row(self, row: int) -> None:
        """Free a row whose values may not be finite."""
        self.dirty = not self.wipe(row) or self.dirty
        self.release_row(row)

    def wipe(self, row: int) -> bool:
        """Zero a row whose values may not be finite, because they would affect its next request.

        False, without a change, if a single row cannot be zeroed.
        """
        places = self._places((row,))
        if not all(store.wipes(places) for store in self.stores):
            return False
        for store in self.stores:
            store.wipe(places)
        return True

    def record_addresses(self, outputs: Mapping[str, int]) -> None:
        """Record the addresses of the states after a run. `outputs`: addresses of its outputs by name."""
        for store in self.stores:
            store.record_addresses(outputs)

    def facts(self) -> tuple[StateFact, ...]:
        """The observed facts of every state, in the order of the package."""
        return tuple(store.fact() for store in self.stores)

    def release(self) -> None:
        """Free the buffers; facts stay available."""
        for store in self.stores:
            store.release()
