"""The cache as the loop uses it: a cursor per row, and what the stores of the states can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita import dtypes
from partita.observations.facts import StateFact
from partita.package.contract import State
from partita.runtime.generate.cache.base import RowShapes, RowStates, Span
from partita.runtime.generate.cache.growing import GrowingStates, moves
from partita.runtime.generate.cache.in_place import KINDS, FixedStates, InPlace, RecurrentStates, RollingStates
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer
from partita.runtime.ort.session import Session

Store = InPlace | GrowingStates
"""The states of one kind, over all layers."""
MANY = 1 << 40
"""Tokens: more than any row has."""


def _stores(states: Sequence[State], session: Session, batch: int) -> tuple[Store, ...]:
    """A store for each kind of state: those that stay in one buffer, and those that every step makes anew."""
    listed: dict[type[InPlace], list[State]] = {FixedStates: [], RecurrentStates: [], RollingStates: []}
    for state in states:
        if not moves(state):
            kind = RollingStates if state.rolls else FixedStates if state.kind in KINDS else RecurrentStates
            listed[kind].append(state)
    moving = [state for state in states if moves(state)]
    kept: tuple[Store, ...] = tuple(kind(some, session) for kind, some in listed.items() if some)
    return (*kept, GrowingStates(moving, session, batch)) if moving else kept


class Cache:
    """States of all layers, and how many tokens of each row of the batch are in them."""

    def __init__(self, states: Sequence[State], session: Session, batch: int) -> None:
        self.states = tuple(states)
        self.stores = _stores(self.states, session, batch)
        self._batch = batch
        self._moving = tuple(store for store in self.stores if store.moves)
        self.filled = [0] * batch
        """[rows]: tokens of each row in the cache, which is where its next token goes."""
        self.unjudged: set[int] = set()
        """Rows that have taken in tokens of which nobody has looked at logits yet: what they have may not be finite."""
        self.spoiled: set[int] = set()
        """Rows that waited in steps of others and were fed padding, which a state took in: they cannot go on."""
        self._sums_up = not self.padding_is_safe
        self.dirty = False
        """What a failed run left in it may not be finite, so that it has to be zeroed before it is used again."""

    @property
    def padding_is_safe(self) -> bool:
        """Whether a step may feed a row more tokens than it has: what they leave behind is never read."""
        return all(store.padding_is_safe for store in self.stores)

    @property
    def separate(self) -> bool:
        """Whether a row of the batch can begin, and go on, while the others are where they are."""
        return all(store.separate for store in self.stores)

    def hold_one(self) -> None:
        """From now on all rows of the batch hold the same sequence, which is row 0."""
        self.filled = [0]

    @property
    def _holds_one(self) -> bool:
        return len(self.filled) == 1

    def _places(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows of the batch that hold what these rows do."""
        return range(self._batch) if self._holds_one else rows

    @property
    def has_moving(self) -> bool:
        """Whether a store has to bind its buffers anew in each step."""
        return bool(self._moving)

    @property
    def staying(self) -> frozenset[str]:
        """States, by the names that graphs read them as, that are bound once and for all."""
        return frozenset(past for store in self.stores if not store.moves for past, _ in store.named())

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """One per state, in the order of the package."""
        named = {past: buffer for store in self.stores for past, buffer in store.named()}
        return tuple(named[state.past] for state in self.states)

    @property
    def size_bytes(self) -> int:
        """All buffers together."""
        return sum(buffer.size_bytes for buffer in self.buffers)

    @property
    def on_host(self) -> bool:
        """Whether every state is in host memory."""
        return all(buffer.memory == HOST_MEMORY for buffer in self.buffers)

    @property
    def full_bytes(self) -> int:
        """All buffers together when every row is full."""
        return sum(dtypes.size_bytes(state.dtype, state.shape) for state in self.states)

    @property
    def has_parts(self) -> bool:
        """Whether some rows of the batch can be bound alone."""
        return all(store.has_parts for store in self.stores)

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind every buffer as past and as present of `binding`, or its part of the rows in `span`."""
        for store in self.stores:
            store.bind(binding, span)

    def prepare(self) -> None:
        """Before a first request: zero it where that is needed, and free every row."""
        if self.dirty or self.unjudged:
            self.clear()
        self.filled[:] = [0] * len(self.filled)
        self.spoiled.clear()

    def clear(self) -> None:
        """Zero every state, and free every row."""
        for store in self.stores:
            store.clear()
        self.filled[:] = [0] * len(self.filled)
        self.spoiled.clear()
        self.unjudged.clear()
        self.dirty = False

    def begin(self, rows: Sequence[int]) -> None:
        """Make these rows ready for their first token."""
        for store in self.stores:
            store.begin(self._places(rows))

    def before_run(self, binding: Binding, new_tokens: int) -> None:
        """Let the stores whose buffers move bind those of this step."""
        for store in self._moving:
            store.before_run(binding, new_tokens)

    def advance(self, binding: Binding, starts: Sequence[int], take: Sequence[int], span: Span = None) -> None:
        """`take` [B] tokens of each row were fed, in a run of `binding` that was of the rows in `span` and wrote from
        `starts` [B] on: where a row took none, padding is there now.
        """
        for store in self._moving:
            store.after_run(binding, take)
        first, end = span or (0, len(take))
        if self._sums_up:
            self.spoiled.update(row for row in range(first, end) if self.filled[row] and not take[row])
        for row in range(first, end):
            self.filled[row] = self.filled[row] + take[row] if take[row] else min(self.filled[row], starts[row])

    def can_rewind(self, tokens: int) -> bool:
        """Whether a row can be taken back by so many tokens that it has, however many these are."""
        return all(store.rewinds(tokens, MANY) for store in self.stores)

    def rewind(self, row: int, tokens: int) -> bool:
        """Take a row back by so many tokens. False, and nothing done, where a state cannot go back."""
        filled = self.filled[row]
        if not 0 <= tokens <= filled or not all(store.rewinds(tokens, filled) for store in self.stores):
            return False
        for store in self.stores:
            store.rewind(row, tokens)
        self.filled[row] -= tokens
        return True

    def row_shapes(self, tokens: int) -> RowShapes:
        """What the states of a row are that has so many tokens, given out."""
        return {past: entry for store in self.stores for past, entry in store.row_shapes(tokens).items()}

    @property
    def keeps_every_token(self) -> bool:
        """Whether the states of a row's first tokens can be given out, however many it has taken in since."""
        return self.saves(1, MANY)

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the states after a row's first `tokens` can be given out once it has `filled`."""
        return all(store.saves(tokens, filled) for store in self.stores)

    def save_row(self, row: int, tokens: int) -> RowStates:
        """The states of a row after its first tokens, as copies; only where `saves`."""
        return {past: values for store in self.stores for past, values in store.save_row(row, tokens).items()}

    @property
    def loads_rows(self) -> bool:
        """Whether a row can take in such states beside others."""
        return all(store.loads() for store in self.stores)

    def load_row(self, row: int, tokens: int, states: RowStates) -> None:
        """Have a row go on after `tokens` that it never took in itself; only where `loads_rows`."""
        for store in self.stores:
            store.load_row(slice(None) if self._holds_one else row, states)
        self.filled[row] = tokens

    def release_row(self, row: int) -> None:
        """Free a row: the next request in it begins at its beginning."""
        if row in self.unjudged and not self.wipe(row):
            self.dirty = True
        self.unjudged.discard(row)
        for store in self.stores:
            store.release_row(row)
        self.filled[row] = 0
        self.spoiled.discard(row)

    def wipe(self, row: int) -> bool:
        """Zero what a row has, because it may not be finite, and what is not would be felt by whoever follows in the
        row. False, and nothing done, where one row's part cannot be zeroed.
        """
        places = self._places((row,))
        if not all(store.wipes(places) for store in self.stores):
            return False
        for store in self.stores:
            store.wipe(places)
        return True

    def look(self, outputs: Mapping[str, int]) -> None:
        """Take note of where a run left the states; `outputs` are the addresses of its outputs by name."""
        for store in self.stores:
            store.look(outputs)

    def facts(self) -> tuple[StateFact, ...]:
        """What was seen of every state, in the order of the package."""
        seen = {fact.past: fact for store in self.stores for fact in store.facts()}
        return tuple(seen[state.past] for state in self.states)

    def release(self) -> None:
        """Let go of the buffers; facts can still be asked for."""
        for store in self.stores:
            store.release()
