"""The cache: one buffer per state, bound as past and as present, so that nothing grows and nothing is copied per token.

Knows the state table of the package, not what is in a state nor where a row's cursor stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.package import State
from partita.partition_reports.facts import StateFact
from partita.runtime.ort_buffers import Buffer
from partita.runtime.session import Binding, Session

OVERWRITTEN = frozenset({"key", "value"})
"""Kinds of state in which what is written beyond the cursor is never read, and is overwritten by the next tokens."""


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


class KvCache:
    """The state buffers of one package."""

    def __init__(self, states: Sequence[State], session: Session) -> None:
        self.states = tuple(states)
        self.buffers: tuple[Buffer, ...] = tuple(session.state_buffer(s.past, s.shape, s.dtype) for s in self.states)
        self._seen = tuple(Residence(buffer.address()) for buffer in self.buffers)
        self._sums = tuple(index for index, state in enumerate(self.states) if state.kind not in OVERWRITTEN)
        self.padding_is_safe = not self._sums
        """True when a step may feed a row more tokens than it has: what they leave behind is never read."""

    def bind(self, binding: Binding) -> None:
        """Bind every buffer as past and as present of `binding`."""
        for state, buffer in zip(self.states, self.buffers, strict=True):
            binding.bind_input(state.past, buffer)
            binding.bind_output(state.present, buffer)

    def clear(self) -> None:
        """Set every state to zero."""
        for buffer in self.buffers:
            buffer.clear()

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero what these rows of the batch have summed up; keys and values are overwritten anyway."""
        for index in self._sums:
            self.buffers[index].clear_rows(rows)

    @property
    def clears_rows(self) -> bool:
        """Whether `clear_rows` can clear some rows and leave others."""
        return all(self.buffers[index].clears_rows for index in self._sums)

    def release(self) -> None:
        """Let go of the buffers; facts can still be asked for."""
        self.buffers = tuple(buffer.released() for buffer in self.buffers)

    def look(self, outputs: Mapping[str, int]) -> None:
        """Take note of where a run left the states; `outputs` are the addresses of its outputs by name."""
        for state, buffer, residence in zip(self.states, self.buffers, self._seen, strict=True):
            residence.look(buffer.address(), outputs[state.present])

    def facts(self) -> tuple[StateFact, ...]:
        """What was seen of every state."""
        return tuple(
            StateFact(
                past=state.past,
                present=state.present,
                layer=state.layer,
                kind=state.kind,
                memory=buffer.memory,
                size_bytes=buffer.size_bytes,
                same_address=residence.same,
                address_changes=residence.changes,
                checked_steps=residence.steps,
            )
            for state, buffer, residence in zip(self.states, self.buffers, self._seen, strict=True)
        )
