"""The prefix cache: common beginnings of prompts are prefilled once, and their states are copied into other rows.

A row copies from a running row, or from saved states of earlier rows. If another row is currently reading the common
tokens, it waits for them:

    row 0   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒     system prompt of 15 tokens and a question of 6
    row 1   ...............▒▒▒▒       the same 15, copied when row 0 has read them, and a question of 4

Copies are cheap on the host. Device memory is read and written as a whole, so a row only copies if that is faster than
prefill, by measured times.

Keys and values can be saved after any token. A recurrent state exists only after the row's last token, so a row pauses
there for one step if others need the state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from partita.runtime.generate.cache.cache import Cache
from partita.runtime.generate.planner import Capacity, RowView
from partita.runtime.generate.request import Prefix, Row, Tokens, check_loads, common_tokens, cut, most_shared

LEAST_TOKENS = 16
"""Shorter prefixes are prefilled faster than looked up."""
SEEN_PROMPTS = 16
"""Number of past prompts that are compared for common prefixes."""
MOST_SAVED = 8
"""Maximum number of saved states; the least recently used is dropped."""
DEVICE_PASSES = 3
"""Passes over a device's cache: one to save a row, two to load one."""
DEVICE_BYTES_PER_SECOND = 4e9
"""Assumed bytes per second of a pass before a measurement: an older PCIe bus."""


@dataclass(slots=True)
class _Plan:
    """How a prefilling row shares states with others."""

    row: Row
    save_at: int | None = None
    """Tokens after which its states are saved for others."""
    waits_for: tuple[int, Row, int] | None = None
    """The row, and the number of its tokens, that this row will copy."""


class Prefixes:
    """Common prefixes of the rows of one batch, and saved states of earlier rows.

    `usable(length)`: whether the keys of a prompt of this length are valid in other prompts.
    """

    def __init__(self, cache: Cache, capacity: Capacity, usable: Callable[[int], bool]) -> None:
        self._cache, self._capacity, self._usable = cache, capacity, usable
        self._most_bytes = cache.full_bytes
        """Maximum bytes of saved states on the host."""
        self._permanent: list[Prefix] = []
        """Prefixes loaded from files; never dropped."""
        self._saved: list[Prefix] = []
        self._past_prompts: deque[tuple[str | None, Tokens]] = deque(maxlen=SEEN_PROMPTS)
        self._plans: dict[int, _Plan] = {}
        self.copied_tokens = 0
        """Number of tokens that were copied instead of prefilled."""
        self.copies = 0
        """Number of rows that began with copied tokens."""
        self._unreported: dict[int, int] = {}
        """Copied tokens by row that were not reported yet."""
        self._copy_seconds = DEVICE_PASSES * cache.full_bytes / DEVICE_BYTES_PER_SECOND
        """Seconds of the last copy, or the assumed seconds."""
        self._read_seconds: float | None = None
        """Seconds per prompt token in the last prefill step; None before the first."""

    @property
    def saved(self) -> tuple[Prefix, ...]:
        """The saved prefixes, most recently used last."""
        return tuple(self._saved)

    def add(self, prefix: Prefix) -> None:
        """Add a prefix from a file permanently. Raises GenerationError if no row could load it."""
        check_loads(self._cache, len(prefix.tokens), usable=self._usable(len(prefix.tokens)))
        self._permanent.append(prefix)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add_row(self, index: int, rows: Sequence[Row | None]) -> None:
        """Copy available states into a new row, and plan later copies."""
        row = rows[index]
        assert row is not None
        plan = self._plans[index] = _Plan(row)
        prompt, adapter = row.history[: row.known].copy(), row.request.adapter
        common = [common_tokens(prompt, other) for with_adapter, other in self._past_prompts if with_adapter == adapter]
        seen = max(common, default=0) if self._cache.keeps_every_token else most_shared(common)
        self._past_prompts.append((adapter, prompt))
        if row.request.listener is not None or self._cache.dirty or not self._cache.loads_rows:
            return
        if not self._pays(rows, index):
            return
        kept, length = self._longest_saved(prompt, adapter)
        plan.waits_for = self._source(index, rows, prompt, length + LEAST_TOKENS)
        if plan.waits_for is not None:
            self._request_save(plan.waits_for)
            self._copy_from_row(index, plan, rows)
        elif kept is not None:
            if kept not in self._permanent:
                self._saved.remove(kept)
                self._saved.append(kept)
            self._load(index, cut(kept, length, self._cache))
        wanted = self._copyable_tokens(max(seen, row.request.shares), prompt)
        if plan.waits_for is None and wanted >= self._cache.lengths[index] + LEAST_TOKENS:
            plan.save_at = wanted

    def release_row(self, index: int) -> None:
        """Mark a row as free."""
        self._plans.pop(index, None)
        self._unreported.pop(index, None)

    def before_step(self, rows: Sequence[Row | None]) -> None:
        """Copy states that have become available into waiting rows."""
        for index, plan in self._plans.items():
            if plan.waits_for is not None:
                self._copy_from_row(index, plan, rows)

    def views(self, rows: Sequence[Row | None], views: Sequence[RowView]) -> list[RowView]:
        """The planner's rows: waiting rows have no tokens, and rows whose states others need pause there."""
        return [self._view(index, rows[index], view) for index, view in enumerate(views)]

    def after_step(self, read_tokens: int, seconds: float) -> None:
        """Save the states of rows that have reached the tokens that others need.

        `read_tokens`: prompt tokens of the step, which took `seconds`; 0 for a decode step.
        """
        if read_tokens:
            self._read_seconds = seconds / read_tokens
        if self._cache.dirty:
            self._saved.clear()  # it is unknown since when values are not finite
            return
        for index, plan in self._plans.items():
            count, filled = plan.save_at, self._cache.lengths[index]
            if count is not None and filled >= count:
                intact = index not in self._cache.invalid and plan.row.error is None  # otherwise the row was zeroed
                if intact and self._usable(plan.row.known) and self._cache.saves(count, filled):
                    states = self._cache.save_row(index, count)
                    self._save(Prefix(plan.row.history[:count].copy(), states, plan.row.request.adapter))
                plan.save_at = None

    def pop_copied(self, rows: int) -> tuple[int, ...]:
        """Tokens that each row [B] has copied since the last call; empty if none."""
        if not self._unreported:
            return ()
        untold, self._unreported = self._unreported, {}
        return tuple(untold.get(index, 0) for index in range(rows))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pays(self, rows: Sequence[Row | None], index: int) -> bool:
        """Whether a row that begins in the middle is faster.

        Where graphs run chunks only while every row is at its beginning, its first token ends that for all rows.
        """
        others = [(row, self._cache.lengths[place]) for place, row in enumerate(rows) if place != index]
        return self._capacity.appends(1) or any(row is not None and not row.finish and at for row, at in others)

    def _copyable_tokens(self, common: int, prompt: Tokens, *, is_from_file: bool = False) -> int:
        """Number of common tokens to copy. The last prompt token is always run. `is_from_file`: of a prefix file."""
        limited = min(common, len(prompt) - 1)
        if limited < (1 if is_from_file else LEAST_TOKENS) or not self._usable(len(prompt)):
            return 0
        return limited if self._is_worth(limited, is_from_file=is_from_file) else 0

    def _is_worth(self, tokens: int, *, is_from_file: bool) -> bool:
        """Whether prefilling this many tokens takes longer than copying them."""
        if self._cache.on_host:
            return True
        if self._read_seconds is None:
            return is_from_file
        return tokens * self._read_seconds > self._copy_seconds

    def _longest_saved(self, prompt: Tokens, adapter: str | None) -> tuple[Prefix | None, int]:
        """The saved prefix of this adapter with the most tokens of a prompt, and their number."""
        found: tuple[Prefix | None, int] = None, 0
        for prefix in (*self._permanent, *self._saved):
            if prefix.adapter != adapter:
                continue
            common = self._copyable_tokens(
                common_tokens(prompt, prefix.tokens), prompt, is_from_file=prefix in self._permanent
            )
            whole = len(prefix.tokens)
            if common > found[1] and (common == whole or self._cache.saves(common, whole)):
                found = prefix, common
        return found

    def _source(
        self, index: int, rows: Sequence[Row | None], prompt: Tokens, least: int
    ) -> tuple[int, Row, int] | None:
        """The row that has, or will have, the most tokens of a prompt, at least `least`."""
        best: tuple[int, Row, int] | None = None
        for place, row in enumerate(rows):
            if row is None or row.error is not None or place == index or self._is_waiting(place):
                continue
            if row.request.adapter != self._plans[index].row.request.adapter:
                continue
            common = self._copyable_tokens(common_tokens(prompt, row.history[: row.known]), prompt)
            filled = self._cache.lengths[place]
            there = self._cache.saves(common, filled) and place not in self._cache.invalid
            comes = filled < common <= row.read_until and row.finish is None
            if (there or comes) and common >= (least if best is None else best[2] + 1):
                best = place, row, common
        return best

    def _is_waiting(self, index: int) -> bool:
        plan = self._plans.get(index)
        return plan is not None and plan.waits_for is not None

    def _request_save(self, source: tuple[int, Row, int]) -> None:
        """Let a row save the states that others wait for."""
        place, row, count = source
        plan = self._plans.get(place)
        if plan is not None and plan.row is row and self._cache.lengths[place] < count:
            plan.save_at = count if plan.save_at is None else min(plan.save_at, count)

    def _copy_from_row(self, index: int, plan: _Plan, rows: Sequence[Row | None]) -> None:
        """Copy a row's awaited states when available; if they will not be, the row prefills its prompt itself."""
        assert plan.waits_for is not None
        place, row, count = plan.waits_for
        wanted, filled = plan.row.history[:count], self._cache.lengths[place]
        adapter = plan.row.request.adapter
        there = (entry for entry in self._saved if entry.adapter == adapter and np.array_equal(entry.tokens, wanted))
        kept = next(there, None)
        same = rows[place] is row and np.array_equal(row.history[:count], wanted)
        if kept is None and same and filled < count and row.finish is None:
            return
        if kept is None and same and self._cache.saves(count, filled) and place not in self._cache.invalid:
            kept = Prefix(wanted.copy(), self._cache.save_row(place, count), adapter)
            self._save(kept)
        plan.waits_for = None
        if kept is not None:
            self._load(index, kept)

    def _view(self, index: int, row: Row | None, view: RowView) -> RowView:
        plan = self._plans.get(index)
        if plan is None or plan.row is not row:
            return view
        if plan.waits_for is not None:
            return RowView(view.cache_length, 0, needs_cache=False)
        if plan.save_at is None or view.cache_length >= plan.save_at or self._cache.keeps_every_token:
            return view
        until = plan.save_at - view.cache_length
        return view._replace(token_limit=until if view.token_limit is None else min(view.token_limit, until))

    def _load(self, index: int, prefix: Prefix) -> None:
        began = time.perf_counter()
        self._cache.load_row(index, len(prefix.tokens), prefix.states)
        self._copy_seconds = time.perf_counter() - began
        self.copied_tokens += len(prefix.tokens)
        self._unreported[index] = self._unreported.get(index, 0) + len(prefix.tokens)
        self.copies += 1

    def _save(self, prefix: Prefix) -> None:
        """Save a prefix, replace prefixes that it covers, and drop the least recently used."""
        self._saved = [other for other in self._saved if not _covers(prefix, other, self._cache)]
        self._saved.append(prefix)
        while len(self._saved) > MOST_SAVED or sum(entry.size_bytes for entry in self._saved) > self._most_bytes:
            self._saved.pop(0)


def _covers(prefix: Prefix, other: Prefix, cache: Cache) -> bool:
    """Whether every state that can be copied from `other` can be copied from `prefix`."""
    if prefix.adapter != other.adapter:
        return False
    common = common_tokens(prefix.tokens, other.tokens)
    return common == len(other.tokens) and (common == len(prefix.tokens) or cache.keeps_every_token)
