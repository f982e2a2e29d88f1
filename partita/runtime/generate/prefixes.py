"""The prefix cache: a prompt is prefilled from the first token that the cache does not have.

A released row keeps its tokens; padding in the steps of other rows may overwrite the last of them. A new request gets
the free row with the most tokens of its prompt, rewound to these. If a running row has more of them, they are copied;
the request waits for a row that is reading them:

    row 0   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒     system prompt of 15 tokens and a question of 6
    row 1   ...............▒▒▒▒       the same 15, copied when row 0 has read them, and a question of 4

Rows are copied in host memory only: device memory is read and written as a whole, which takes longer than prefill.
Prefix files are loaded into any memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.observations.text_format import plural
from partita.runtime.generate.cache import UNBOUNDED_TOKENS, Cache
from partita.runtime.generate.planner import Capacity
from partita.runtime.generate.request import BY_LENGTH, Prefix, Row, Tokens

LEAST_TOKENS = 16
"""Shorter beginnings are prefilled again, except the whole text of a row and prefix files."""


class _Source(NamedTuple):
    """A running row, and the number of its tokens that another row will copy."""

    place: int
    row: Row
    tokens: int


class Prefixes:
    """The rows of one batch as sources of prefixes, and a prefix from a file.

    `usable(length)`: whether the keys of a prompt of this length are valid in other prompts; None: nothing is shared.
    """

    def __init__(self, cache: Cache, capacity: Capacity, usable: Callable[[int], bool] | None) -> None:
        self._cache, self._capacity, self._usable = cache, capacity, usable
        self._file: Prefix | None = None
        self._released: dict[int, Row] = {}
        """The last request of each free row, first released first."""
        self._awaited: dict[int, _Source] = {}
        """The source of each row that waits for one."""
        self.reused_tokens = 0
        """Number of prompt tokens that were not prefilled."""
        self._unreported: dict[int, int] = {}
        """Reused tokens by row that were not reported yet."""

    def add(self, prefix: Prefix) -> None:
        """Add a prefix from a file. Raises GenerationError if no row could load it."""
        count = len(prefix.tokens)
        if self._usable is None or not self._usable(count):
            raise GenerationError(f"a prompt of {plural(count, 'token')} cannot begin with a prefix: {BY_LENGTH}")
        if not self._cache.loads_rows:
            raise GenerationError(
                "a prefix cannot be loaded into this cache, because it is in bfloat16 on a device; export with another "
                "`precision`"
            )
        self._file = prefix

    def free_row(self, rows: Sequence[Row | None], prompt: Tokens, adapter: str | None) -> int:
        """The free row with the most tokens of a prompt; of equal ones an unused row, else the first released."""
        unused = [index for index, row in enumerate(rows) if row is None and index not in self._released]
        return max((*unused, *self._released), key=lambda index: self._own_tokens(index, prompt, adapter))

    def add_row(self, index: int, rows: Sequence[Row | None]) -> None:
        """Keep the tokens of a free row that its new request begins with, or load more from a prefix file or row."""
        row, cache = rows[index], self._cache
        assert row is not None
        prompt, adapter = row.history[: row.known], row.request.adapter
        own = 0 if row.request.listener is not None else self._own_tokens(index, prompt, adapter)
        self._released.pop(index, None)
        if not (own and cache.rewind(index, cache.lengths[index] - own)):
            own = 0
            cache.release_row(index)
        self._report(index, own)
        if row.request.listener is None and cache.loads_rows and self._begins_anywhere(index, rows):
            loaded, prefix = self._file_tokens(prompt, adapter), self._file
            source = self._longest_row(index, rows, prompt, max(own, loaded))
            if source is not None:
                self._awaited[index] = source
                self._copy(index, rows)
            elif prefix is not None and loaded > own:
                cache.load_row(index, loaded, prefix.cut(loaded, cache).states)
                self._report(index, loaded - own)

    def release_row(self, index: int, row: Row | None) -> None:
        """Keep the tokens of a row that is now free, if they are valid."""
        self._awaited.pop(index, None)
        self._unreported.pop(index, None)
        if self._usable is None or row is None or row.error is not None or index in self._cache.invalid:
            self._cache.release_row(index)
        else:
            self._released[index] = row

    def before_step(self, rows: Sequence[Row | None]) -> Collection[int]:
        """Copy tokens that have become available into waiting rows; the rows that still wait."""
        for index in tuple(self._awaited):
            self._copy(index, rows)
        return self._awaited

    def pop_reused(self, rows: int) -> tuple[int, ...]:
        """Prompt tokens that each row [B] has reused since the last call; empty if none."""
        if not self._unreported:
            return ()
        found, self._unreported = self._unreported, {}
        return tuple(found.get(index, 0) for index in range(rows))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begins_anywhere(self, index: int, rows: Sequence[Row | None]) -> bool:
        """Whether a row that begins in the middle is faster.

        Where graphs run chunks only while every row is at its beginning, its first token ends that for all rows.
        """
        others = [(row, self._cache.lengths[place]) for place, row in enumerate(rows) if place != index]
        return self._capacity.appends(1) or any(row is not None and not row.finish and at for row, at in others)

    def _common(self, prompt: Tokens, other: Tokens) -> int:
        """Number of tokens of `other` that a prompt begins with. Its last token is always run, for its logits."""
        count = min(len(prompt) - 1, len(other))
        if self._usable is None or self._cache.dirty or count < 1 or not self._usable(len(prompt)):
            return 0
        return common_tokens(prompt[:count], other[:count])

    def _own_tokens(self, index: int, prompt: Tokens, adapter: str | None) -> int:
        """Number of prompt tokens that a free row has."""
        row, filled = self._released.get(index), self._cache.lengths[index]
        if row is None or index in self._cache.invalid or row.request.adapter != adapter:
            return 0
        if not self._capacity.appends(1):
            return 0
        common = self._common(prompt, row.history[:filled])
        enough = common == filled or (common >= LEAST_TOKENS and self._cache.can_rewind(filled - common, filled))
        return common if enough else 0

    def _file_tokens(self, prompt: Tokens, adapter: str | None) -> int:
        """Number of prompt tokens that the prefix file has."""
        if self._file is None or self._file.adapter != adapter:
            return 0
        common, whole = self._common(prompt, self._file.tokens), len(self._file.tokens)
        return common if common == whole or self._cache.saves(common, whole) else 0

    def _longest_row(self, index: int, rows: Sequence[Row | None], prompt: Tokens, least: int) -> _Source | None:
        """The running row that has, or will have, the most tokens of a prompt: at least 16 more than `least`."""
        best: _Source | None = None
        own = rows[index]
        assert own is not None
        for place, row in enumerate(rows if self._cache.on_host else ()):
            if row is None or row is own or place in self._awaited or row.request.adapter != own.request.adapter:
                continue
            common, filled = self._common(prompt, row.history[: row.known]), self._cache.lengths[place]
            keeps_all = self._cache.saves(1, UNBOUNDED_TOKENS)
            comes = filled < common <= row.read_until and row.finish is None and keeps_all
            if (comes or self._is_there(place, row, common)) and common >= least + LEAST_TOKENS:
                best, least = _Source(place, row, common), common + 1 - LEAST_TOKENS
        return best

    def _is_there(self, index: int, row: Row, tokens: int) -> bool:
        """Whether the first tokens of a row can be copied now."""
        cache = self._cache
        return row.error is None and index not in cache.invalid and cache.saves(tokens, cache.lengths[index])

    def _copy(self, index: int, rows: Sequence[Row | None]) -> None:
        """Copy the tokens that a row waits for, if its source has them; without its source, it prefills its prompt."""
        place, row, count = self._awaited[index]
        is_running = rows[place] is row and row.finish is None
        if is_running and self._cache.lengths[place] < count:
            return
        del self._awaited[index]
        if (rows[place] is row or self._released.get(place) is row) and self._is_there(place, row, count):
            self._report(index, count - self._cache.lengths[index])
            self._cache.load_row(index, count, self._cache.save_row(place, count))

    def _report(self, index: int, tokens: int) -> None:
        if tokens:
            self.reused_tokens += tokens
            self._unreported[index] = self._unreported.get(index, 0) + tokens


def common_tokens(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """Length of the common beginning of two texts of equal length, in tokens."""
    different = np.flatnonzero(one != other)
    return int(different[0]) if len(different) else len(one)
