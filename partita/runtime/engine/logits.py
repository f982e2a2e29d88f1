"""The logits of a graph's runs: on the host once somebody asks for them, or of each row the likeliest token alone.

Where a provider makes them on its device they stay there: a draw needs all of them, the greedy token of a row does not.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.runtime.engine.feeds import Feed
from partita.runtime.engine.likeliest import Choosing, Taker
from partita.runtime.ort.buffers import Buffer


class Logits:
    """[B, K, vocab] of the last run."""

    def __init__(self, feed: Feed, made: Buffer | None, choosing: Choosing | None) -> None:
        """`feed`: their place on the host. `made`: where runs write them; None where that is this place. `choosing`:
        finds who chooses tokens there.
        """
        self.on_device = made is not None
        self._feed, self._made, self._choosing = feed, made, choosing if made is not None else None
        self._values = feed.array
        self._wide = np.empty((len(feed.array), feed.array.shape[-1]), np.float32)
        self._here = True
        self._taker: Taker | None = None
        self._taken = self._asked = False
        self.copied_bytes = feed.buffer.size_bytes
        """Bytes that came to the host after the last run, or would have."""

    def ran(self) -> None:
        """A run has made others."""
        if self._made is not None:
            self._here, self._taken, self._asked, self.copied_bytes = False, False, False, 0

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

    def likeliest(self, row: int, column: int) -> int | None:
        """The first of a row's largest, which is finite; None where that has to be seen from all of them."""
        if self._here or (taker := self._ready()) is None:
            self._asked = True
            return None
        if not self._taken:
            taker.take()
            self._taken, self.copied_bytes = True, self.copied_bytes + taker.size_bytes
        token = taker.token(row, column)
        if token is None:
            # Logits that are not finite end the row; where they only look so, this is not worth another step.
            self._taker, self._choosing = None, None
        return token

    def release(self) -> None:
        """Free what it has of a device."""
        if self._taker is not None:
            self._taker.release()
        self._taker, self._made, self._choosing = None, None, None

    def _ready(self) -> Taker | None:
        """Who takes tokens out of these."""
        if self._taker is None and self._choosing is not None and self._choosing.chooser is not None:
            assert self._made is not None
            self._taker = self._choosing.chooser.taker(self._made, self._feed.array.shape[:-1])
        return self._taker

    def _fetch(self) -> None:
        """Bring all of them to the host."""
        assert self._made is not None
        began = time.perf_counter()
        self._values = self._made.copy(self._feed.buffer).reshape(self._feed.array.shape)
        self._here, self.copied_bytes = True, self.copied_bytes + self._made.size_bytes
        if self._asked and self._choosing is not None:
            self._choosing.copied(time.perf_counter() - began)
