"""Recurrent and convolution states: each takes in every token that its row is fed, and there is no way back."""

from __future__ import annotations

from collections.abc import Sequence

from partita.runtime.engine.cache.buffers import InPlace


class RecurrentStates(InPlace):
    """A state per row that is zero before the row's first token."""

    @property
    def padding_is_safe(self) -> bool:
        """Only when there is none."""
        return not self.states

    @property
    def separate(self) -> bool:
        """Whether the buffers can be zeroed in part."""
        return all(buffer.readable for buffer in self.buffers)

    def begin(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        self.wipe(rows)

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Not by a single token: what it took in cannot be taken out."""
        return tokens == 0 or not self.states

    def saves(self, tokens: int, filled: int) -> bool:
        """Only after the last token that it took in."""
        return not self.states or (tokens == filled and all(buffer.readable for buffer in self.buffers))
