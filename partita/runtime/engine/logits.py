"""The logits of a graph's runs: on the host once they are asked for, or only the largest of each row.

Where a provider makes them on its device they stay there until a sampler needs all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.runtime.engine.device_choice import FAILURES, DeviceChoice, Found, Selection
from partita.runtime.engine.feeds import Feed
from partita.runtime.ort.buffers import Buffer


class Logits:
    """[B, K, vocab] of the last run."""

    def __init__(self, feed: Feed, made: Buffer | None, choice: DeviceChoice | None = None) -> None:
        """`feed`: their place on the host. `made`: where runs write them; None where that is this place. `choice`:
        selects among them there.
        """
        self.on_device = made is not None
        self._feed, self._made = feed, made
        self._choice = choice if made is not None else None
        self._values = feed.array
        self._wide = np.empty((len(feed.array), feed.array.shape[-1]), np.float32)
        self._here, self._selected = True, False
        self._selection: Selection | None = None
        self.copied_bytes = feed.buffer.size_bytes
        """Bytes that came to the host after the last run, or would have."""

    def ran(self) -> None:
        """A run has made others."""
        if self._made is not None:
            self._here, self._selected, self.copied_bytes = False, False, 0

    def row(self, row: int, column: int) -> npt.NDArray[np.float32]:
        """Those of one row [vocab], after the K-th of its tokens that was chosen; valid until the next run."""
        if not self._here:
            assert self._made is not None
            self._values = self._made.copy(self._feed.buffer).reshape(self._feed.array.shape)
            self._here, self.copied_bytes = True, self.copied_bytes + self._made.size_bytes
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

    def largest(self, row: int, column: int, count: int) -> Found | None:
        """The `count` largest of a row, all of it finite, and those that equal the last of them, as the device selects
        them; None where the host has to look at all logits.
        """
        if self._here or self._choice is None or not self._choice.is_used:
            return None
        try:
            if self._selection is None:
                assert self._made is not None
                self._selection = self._choice.selection(self._made, self._feed.array.shape[1])
            if not self._selected:
                self._selection.run()
                self._selected = True
                self.copied_bytes += self._selection.size_bytes
        except FAILURES as error:  # where the device is lost, the copy of the logits raises
            self._choice.fail(error)
            self._let_go()
            return None
        return self._selection.found(row, column, count)

    def _let_go(self) -> None:
        if self._selection is not None:
            self._selection.release()
        self._selection = None

    def release(self) -> None:
        """Free what it has of a device."""
        self._let_go()
        self._made, self._choice = None, None
