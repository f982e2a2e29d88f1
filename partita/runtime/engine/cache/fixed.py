"""Keys and values of a fixed length: written at the cursor, and never read beyond it."""

from __future__ import annotations

from collections.abc import Sequence

from partita.contract import State
from partita.runtime.engine.cache.buffers import InPlace

KINDS = frozenset({"key", "value"})


class FixedStates(InPlace):
    """What is beyond a row's cursor is overwritten by its next tokens, so a row begins anew or goes back for free."""

    padding_is_safe = separate = True

    def begin(self, rows: Sequence[int]) -> None:
        """Nothing has to be done."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Any number: the cursor says what is valid, and no buffer rolls over what it would go back to."""
        return 0 <= tokens <= filled

    def entries(self, state: State, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, N, D]."""
        return slice(None), slice(tokens)

    def saves(self, tokens: int, filled: int) -> bool:
        """After any of its tokens: each has an entry of its own."""
        return tokens <= filled and all(buffer.readable for buffer in self.buffers)
