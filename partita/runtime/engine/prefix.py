"""The beginning of a text as a row has taken it in: tokens, and the states after them, on the host.

It is given out by one row and taken in by another, of the same batch or of a later run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.observations.text_format import plural
from partita.runtime.engine.cache.base import RowStates

if TYPE_CHECKING:  # as there
    from partita.runtime.engine.cache.cache import Cache

Tokens = npt.NDArray[np.int64]
"""[T]."""
BY_LENGTH = "the rotary frequencies of this package depend on the length of the text, or it has no cache"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens, and the states of a row that has taken them in. Equal to itself alone: arrays have no one truth."""

    tokens: Tokens
    states: RowStates
    adapter: str | None = None
    """Name of that which the row had: states of another are not those of the same tokens."""

    @property
    def size_bytes(self) -> int:
        """Of the states."""
        return sum(values.nbytes for values in self.states.values())


def common_tokens(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts begin with alike."""
    count = min(len(one), len(other))
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count


def most_shared(common: Sequence[int]) -> int:
    """Of how many tokens others have in common with a text, the number that spares them most: each copies that many or
    none. 0 without any.
    """
    return max(common, key=lambda count: count * sum(other >= count for other in common), default=0)


def cut(prefix: Prefix, tokens: int, cache: Cache) -> Prefix:
    """The prefix of the first tokens of one; only where `cache.saves` them after all of it, or it has no more."""
    if tokens == len(prefix.tokens):
        return prefix
    shapes = cache.row_shapes(tokens)
    states = {name: values[tuple(map(slice, shapes[name][0]))] for name, values in prefix.states.items()}
    return Prefix(prefix.tokens[:tokens], states, prefix.adapter)


def saved_prefix(cache: Cache, row: int, tokens: Tokens, *, usable: bool) -> Prefix:
    """What a row has taken in, which are these tokens. `usable`: a longer text has the same keys for them.

    Raises GenerationError where that cannot be given out.
    """
    if not usable:
        raise GenerationError(f"{plural(len(tokens), 'token')} cannot be kept as a prefix: {BY_LENGTH}")
    if not cache.saves(len(tokens), cache.filled[row]):
        raise GenerationError("a state in bfloat16 cannot be read back from this device, so it cannot be kept")
    return Prefix(tokens.copy(), cache.save_row(row, len(tokens)))


def check_loads(cache: Cache, tokens: int, *, usable: bool) -> None:
    """Raise GenerationError where no row can begin a prompt of so many tokens with a prefix. `usable`: as there."""
    if not usable:
        raise GenerationError(f"a prompt of {plural(tokens, 'token')} cannot begin with a prefix: {BY_LENGTH}")
    if not cache.loads_rows:
        raise GenerationError(
            "a prefix cannot be copied into this cache, because it is in bfloat16 on a device; export with another "
            "`precision`"
        )


def load_prefix(cache: Cache, row: int, prefix: Prefix, prompt: Sequence[int], *, usable: bool) -> None:
    """Have a row that has just joined begin with a prefix of its prompt.

    `usable`: the prompt has the same keys for its tokens. The last token of a prompt is always read. Raises
    GenerationError for a prompt that begins otherwise, and where a row cannot take it in.
    """
    count, known = len(prefix.tokens), np.asarray(prompt, np.int64)
    check_loads(cache, len(known), usable=usable)
    common = min(common_tokens(prefix.tokens, known), len(known) - 1)
    if common < count and not cache.saves(common, count):
        raise GenerationError(
            f"the prompt has {plural(common, 'token')} in common with a prefix of {count}, and a state that sums up or "
            "drops tokens cannot go back to them; end the prefix where a token ends, at a line end as a rule, and give "
            "more text after it"
        )
    kept = cut(prefix, common, cache)
    cache.load_row(row, common, kept.states)
