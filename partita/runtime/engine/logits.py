"""The logits of a graph's runs: on the host once somebody asks for them, or of each row what is chosen alone.

Where a provider makes them on its device they stay there: a draw from all of them needs all, the greedy token does not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.runtime.engine.choices import Choice
from partita.runtime.engine.choosing import FAILURES, Choosing, Found, Taker
from partita.runtime.engine.feeds import Feed
from partita.runtime.ort.buffers import Buffer

MOST_IN_VAIN = 4
"""A choice that has left it to the host so often in a row is made there from then on."""


class Logits:
    """[B, K, vocab] of the last run."""

    def __init__(self, feed: Feed, made: Buffer | None, choosing: Mapping[Choice, Choosing]) -> None:
        """`feed`: their place on the host. `made`: where runs write them; None where that is this place. `choosing`:
        who makes a choice there.
        """
        self.on_device = made is not None
        self._feed, self._made = feed, made
        self._choosing = dict(choosing) if made is not None else {}
        self._values = feed.array
        self._wide = np.empty((len(feed.array), feed.array.shape[-1]), np.float32)
        self._here = True
        self._takers: dict[Choice, Taker] = {}
        self._taken: list[Choice] = []
        self._asked: Choice | None = None
        self._in_vain: dict[Choice, int] = {}
        self.copied_bytes = feed.buffer.size_bytes
        """Bytes that came to the host after the last run, or would have."""

    def ran(self) -> None:
        """A run has made others."""
        if self._made is not None:
            self._here, self._taken, self._asked, self.copied_bytes = False, [], None, 0

    def row(self, row: int, column: int) -> npt.NDArray[np.float32]:
        """Those of one row [vocab], after the K-th of its tokens that was chosen; valid until the next run."""
        if not self._here:
            self._fetch()
        values: npt.NDArray[Any] = self._values[row, column]
        dtype = self._feed.buffer.dtype
        if dtype == "float32":
            return values  # no copy when they are float32
        wide: npt.NDArray[np.float32] = self._wide[row]
        if dtypes.named(dtype).upper_half:
            np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(wide, values)
        return wide

    def written(self, row: int) -> npt.NDArray[np.float32] | None:
        """The last of one row [vocab] where runs write float32 to the host; None where they do not."""
        if self.on_device or self._feed.buffer.dtype != "float32":
            return None
        values: npt.NDArray[np.float32] = self._values[row, -1]
        return values

    def chosen(self, choice: Choice, row: int, column: int, count: int = 1) -> Found | None:
        """Of one row the `count` largest, finite ones, and all that equal the last, of which a choice makes as many;
        None where that has to be seen from all of them.
        """
        if self._here:
            return None
        try:
            taker = self._ready(choice)
            if taker is None:
                self._asked = choice
                return None
            if choice not in self._taken:
                taker.take()
        except FAILURES as error:  # the logits are there all the same; where the device is lost, their copy says so
            self._choosing[choice].lost(error)
            self._leave(choice)
            return None
        if choice not in self._taken:
            self._taken.append(choice)
            self.copied_bytes += taker.size_bytes
        found = taker.found(row, column, count)
        self._in_vain[choice] = 0 if found is not None else self._in_vain.get(choice, 0) + 1
        if self._in_vain[choice] == MOST_IN_VAIN:
            self._leave(choice)
        return found

    def _leave(self, choice: Choice) -> None:
        """Make it on the host from now on."""
        del self._choosing[choice]
        if (taker := self._takers.pop(choice, None)) is not None:
            taker.release()

    def release(self) -> None:
        """Free what it has of a device."""
        for taker in self._takers.values():
            taker.release()
        self._made, self._choosing, self._takers = None, {}, {}

    def _ready(self, choice: Choice) -> Taker | None:
        """Who takes a choice out of these."""
        chooser = self._choosing[choice].chooser if choice in self._choosing else None
        if chooser is None:
            return None
        taker = self._takers.get(choice)
        if taker is None:
            assert self._made is not None
            taker = self._takers[choice] = chooser.taker(self._made, self._feed.array.shape[:-1])
        return taker

    def _fetch(self) -> None:
        """Bring all of them to the host."""
        assert self._made is not None
        began = time.perf_counter()
        self._values = self._made.copy(self._feed.buffer).reshape(self._feed.array.shape)
        self._here, self.copied_bytes = True, self.copied_bytes + self._made.size_bytes
        if self._asked in self._choosing:
            self._choosing[self._asked].copied(time.perf_counter() - began)
