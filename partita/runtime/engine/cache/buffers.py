"""States of a fixed shape: one buffer each, bound as past and as present, so nothing grows and nothing is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.contract import State
from partita.observations.facts import StateFact
from partita.runtime.engine.cache.base import Place, RowShapes, RowStates, Span
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


class InPlace:
    """One buffer per state, which a step reads as past and writes as present.

    The cursors of the rows say what of it is valid, so nothing has to be done as they move.
    """

    moves = False

    def __init__(self, states: Sequence[State], session: Session) -> None:
        self.states = tuple(states)
        self.buffers: tuple[Buffer, ...] = tuple(session.state_buffer(s.past, s.shape, s.dtype) for s in self.states)
        self._seen = tuple(Residence(buffer.address()) for buffer in self.buffers)

    def named(self) -> Iterable[tuple[str, Buffer]]:
        """The buffer of each state, by the name that graphs read it as."""
        return ((state.past, buffer) for state, buffer in zip(self.states, self.buffers, strict=True))

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

    def rewind(self, row: int, tokens: int) -> None:
        """Nothing: what is beyond the cursor is not read."""

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

    def save_row(self, row: int, tokens: int) -> RowStates:
        """The states of a row after its first tokens, as copies."""
        return {
            state.past: np.array(buffer.seen()[row][self.entries(state, tokens)])
            for state, buffer in zip(self.states, self.buffers, strict=True)
        }

    def loads(self) -> bool:
        """Where a buffer can be changed in part."""
        return all(buffer.readable for buffer in self.buffers)

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
