"""Keys and values of a window alone: the graph drops the oldest rows and moves the others up."""

from __future__ import annotations

from collections.abc import Sequence

from partita.contract import State
from partita.runtime.engine.cache.buffers import InPlace

TOKENS_AXIS = 2


class RollingStates(InPlace):
    """As long as a row's tokens fit the window they are where fixed ones would be; from then on there is no way back.

    Padding is never fed, because it would push out what the window holds. Source: ONNX Runtime's ContribOperators.md,
    GroupQueryAttention, `sliding_window_cache`: after T tokens the last L are in rows 0 .. L - 1, with min(T, window)
    <= L <= min(T, capacity). The capacity of our own packages is the window.
    """

    separate = True

    @property
    def room(self) -> int:
        """Tokens of which none is dropped yet, in any of the states."""
        return min((_room(state) for state in self.states), default=0)

    @property
    def padding_is_safe(self) -> bool:
        """Only when there is none."""
        return not self.states

    def begin(self, rows: Sequence[int]) -> None:
        """Nothing has to be done."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Any number, as long as nothing was dropped."""
        return tokens == 0 or not self.states or filled <= self.room

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, rows, D]; all rows once some of them may be dropped."""
        return slice(None), slice(tokens if tokens <= _room(state) else None)

    def saves(self, tokens: int, filled: int) -> bool:
        """After its last token; after others as long as nothing was dropped."""
        if not self.states:
            return True
        known = tokens == filled or (tokens <= filled and filled <= self.room)
        return known and all(buffer.readable for buffer in self.buffers)


def _room(state: State) -> int:
    """Tokens that a state has in any case, if there are so many."""
    return min(state.window or 0, state.shape[TOKENS_AXIS])
