"""States of a fixed shape: one buffer each, bound as past and as present, so nothing grows and nothing is copied.

Keys and values have an entry per token, of all tokens or of a window; recurrent and convolution states take in every
token that their row is fed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.observations.facts import StateFact
from partita.package.contract import State
from partita.runtime.generate.cache.base import Place, RowShapes, RowStates, Span
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer
from partita.runtime.ort.session import Session


@dataclass(slots=True)
class Residence:
    """Where one state was seen to be, over the runs that were looked at."""

    address: int
    same: bool = True
    changes: int = 0
    steps: int = 0

    def look(self, past: int, present: int) -> None:
        """Compare the addresses of one run with each other and with the run before."""
        self.steps += 1
        self.same = self.same and past == present
        self.changes += present != self.address
        self.address = present

    def fact(self, state: State, buffer: Buffer, copied_bytes: int = 0) -> StateFact:
        """What was seen of `state`, which is in `buffer` now. `copied_bytes`: of it, by the last step."""
        return StateFact(
            past=state.past,
            present=state.present,
            layer=state.layer,
            kind=state.kind,
            memory=buffer.memory,
            size_bytes=buffer.size_bytes,
            same_address=self.same,
            address_changes=self.changes,
            checked_steps=self.steps,
            copied_bytes=copied_bytes,
        )


KINDS = frozenset({"key", "value"})
"""Of states that have an entry per token."""
TOKENS_AXIS = 2
"""Of keys and values."""


class InPlace:
    """One buffer per state, which a step reads as past and writes as present.

    The cursors of the rows say what of it is valid, so nothing has to be done as they move.
    """

    moves = False
    """Whether the buffers of a step are others than those of the step before: `before_run` is called if so."""
    padding_is_safe = False
    """Whether tokens fed beyond a row's cursor leave nothing behind that is read."""

    def __init__(self, states: Sequence[State], session: Session) -> None:
        self.states = tuple(states)
        self.buffers: tuple[Buffer, ...] = tuple(session.state_buffer(s.past, s.shape, s.dtype) for s in self.states)
        self._seen = tuple(Residence(buffer.address()) for buffer in self.buffers)

    def named(self) -> Iterable[tuple[str, Buffer]]:
        """The buffer of each state, by the name that graphs read it as."""
        return ((state.past, buffer) for state, buffer in zip(self.states, self.buffers, strict=True))

    @property
    def separate(self) -> bool:
        """Whether a row of the batch can begin, and go on, while the others are where they are."""
        return True

    @property
    def has_parts(self) -> bool:
        """Whether every buffer is in memory of which some rows can be bound alone."""
        return all(buffer.has_parts for buffer in self.buffers)

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind every buffer as past and as present, or its part of the rows in `span`."""
        for state, buffer in zip(self.states, self.buffers, strict=True):
            bound = buffer if span is None else buffer.rows(*span)
            binding.bind_input(state.past, bound)
            binding.bind_output(state.present, bound)

    def before_run(self, binding: Binding, new_tokens: int) -> None:
        """Nothing: the buffers stay bound."""

    def after_run(self, binding: Binding, take: Sequence[int]) -> None:
        """Nothing: present is past."""

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare these rows of the batch for a first token: nothing has to be done."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether a row that has `filled` tokens can be taken back by so many tokens."""
        return tokens == 0

    def rewind(self, row: int, tokens: int) -> None:
        """Take a row back, as `rewinds` has allowed: what is beyond the cursor is not read."""

    def release_row(self, row: int) -> None:
        """Nothing: the next request begins at the beginning."""

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """What of a row's part of a state sums up its first tokens: all of it."""
        return ()

    def row_shapes(self, tokens: int) -> RowShapes:
        """What the states of a row are that has so many tokens, given out."""
        found = {}
        for state in self.states:
            cut = self.entries(state, tokens)
            sizes = [len(range(size)[part]) for size, part in zip(state.shape[1:], cut, strict=False)]
            found[state.past] = ((*sizes, *state.shape[1 + len(cut) :]), state.dtype)
        return found

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the states after a row's first `tokens` can be given out once it has `filled`."""
        return tokens == filled and self._readable

    @property
    def _readable(self) -> bool:
        return all(buffer.readable for buffer in self.buffers)

    def save_row(self, row: int, tokens: int) -> RowStates:
        """The states of a row after its first tokens, as copies; what `saves` has allowed."""
        return {
            state.past: np.array(buffer.seen()[row][self.entries(state, tokens)])
            for state, buffer in zip(self.states, self.buffers, strict=True)
        }

    def loads(self) -> bool:
        """Where a buffer can be changed in part."""
        return self._readable

    def load_row(self, row: Place, states: RowStates) -> None:
        """Write the states of a row, from its beginning on."""
        for state, buffer in zip(self.states, self.buffers, strict=True):
            values = states[state.past]
            place = (row, *(slice(size) for size in values.shape))

            def write(whole: npt.NDArray[Any], place: Any = place, values: npt.NDArray[Any] = values) -> None:
                whole[place] = values

            buffer.change(write)

    def clear(self) -> None:
        """Make every buffer zero, as before the first token."""
        for buffer in self.buffers:
            buffer.clear()

    def wipes(self, rows: Sequence[int]) -> bool:
        """Whether the buffers can be zeroed in part, where these are not all rows."""
        return all(buffer.readable or len(rows) == len(buffer) for buffer in self.buffers)

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        for buffer in self.buffers:
            buffer.clear_rows(rows)

    def look(self, outputs: Mapping[str, int]) -> None:
        """Take note of where a run left the states."""
        for state, buffer, residence in zip(self.states, self.buffers, self._seen, strict=True):
            residence.look(buffer.address(), outputs[state.present])

    def facts(self) -> tuple[StateFact, ...]:
        """What was seen of every state."""
        rows = zip(self.states, self.buffers, self._seen, strict=True)
        return tuple(residence.fact(state, buffer) for state, buffer, residence in rows)

    def release(self) -> None:
        """Let go of the buffers."""
        self.buffers = tuple(buffer.released() for buffer in self.buffers)


class FixedStates(InPlace):
    """Keys and values of all tokens. What is beyond a row's cursor is overwritten by its next tokens."""

    padding_is_safe = True

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Any number: the cursor says what is valid."""
        return 0 <= tokens <= filled

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, N, D]."""
        return slice(None), slice(tokens)

    def saves(self, tokens: int, filled: int) -> bool:
        """After any of its tokens: each has an entry of its own."""
        return tokens <= filled and self._readable


class RollingStates(InPlace):
    """Keys and values of a window: the graph drops the oldest rows and moves the others up.

    As long as a row's tokens fit the window they are where fixed ones would be; from then on there is no way back.
    Padding is never fed, because it would push out what the window holds. Source: ONNX Runtime's ContribOperators.md,
    GroupQueryAttention, `sliding_window_cache`: after T tokens the last L are in rows 0 .. L - 1, with min(T, window)
    <= L <= min(T, capacity). The capacity of our own packages is the window.
    """

    @property
    def room(self) -> int:
        """Tokens of which none is dropped yet, in any of the states."""
        return min(map(_room, self.states))

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Any number, as long as nothing was dropped."""
        return tokens == 0 or filled <= self.room

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, rows, D]; all rows once some of them may be dropped."""
        return slice(None), slice(tokens if tokens <= _room(state) else None)

    def saves(self, tokens: int, filled: int) -> bool:
        """After its last token; after others as long as nothing was dropped."""
        return (tokens == filled or tokens <= filled <= self.room) and self._readable


def _room(state: State) -> int:
    """Tokens that a state of a window has in any case, if there are so many."""
    return min(state.window or 0, state.shape[TOKENS_AXIS])


class RecurrentStates(InPlace):
    """Recurrent and convolution states, which are zero before a row's first token. There is no way back."""

    @property
    def separate(self) -> bool:
        """Whether the buffers can be zeroed in part."""
        return self._readable

    def begin(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        self.wipe(rows)
