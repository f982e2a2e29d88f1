"""Quantisation with a calibration text. Here: calibrated weights on disk, until they are packed.

Integers, scales and zero points of a checkpoint tensor keep its layout. A weight of several tensors reads them through
its origin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from partita.export.quantise.quantisers import Grid, Quantised
from partita.export.weights.origins import LeafReader, Origin, Region, TensorInfo, blocks

ROWS_ELEMENTS = 1 << 22
"""Elements per read."""

Key = tuple[str, Grid, int]
"""Name of a tensor, grid and block size."""
Whole = tuple[Origin, Grid, int]
"""A weight of several tensors, grid and block size."""
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(slots=True)
class CalibratedWeights:
    """The calibrated weights in `folder`; empty without calibration."""

    folder: Path | None = None
    _transposed: dict[Key, bool] = field(default_factory=dict)
    """Stored tensors; True: the blocks lie along the first axis of the tensor."""
    _stacks: dict[Whole, list[int]] = field(default_factory=dict)
    """Weights with some stored rows -> the indices of the first rows."""
    _complete: dict[Whole, int] = field(default_factory=dict)
    """Weights with all rows stored -> their number in the file names."""

    def begin(self, folder: Path) -> None:
        """Use `folder` from now on, and forget earlier results."""
        self.folder = folder
        self._transposed.clear()
        self._stacks.clear()
        self._complete.clear()

    def add(self, tensor: str, grid: Grid, size: int, found: Quantised, *, transposed: bool) -> None:
        """Store the result for a tensor [N, K], or [K, N] if `transposed`."""
        key = tensor, grid, size
        for name, part in zip(found._fields, found, strict=True):
            np.save(self._file(key, name), part.flatten(1).contiguous().numpy())
        self._transposed[key] = transposed

    def add_rows(self, origin: Origin, grid: Grid, size: int, start: int, found: Quantised) -> None:
        """Store consecutive rows of a weight [N, K] that is quantised whole; available after `complete`."""
        starts = self._stacks.setdefault((origin, grid, size), [])
        number = list(self._stacks).index((origin, grid, size))
        starts.append(start)
        for name, part in zip(found._fields, found, strict=True):
            np.save(self._file_of_rows(number, start, name), part.contiguous().numpy())

    def complete(self, origin: Origin, grid: Grid, size: int) -> None:
        """Mark a weight as stored with all rows."""
        self._complete[origin, grid, size] = list(self._stacks).index((origin, grid, size))

    def has(self, origin: Origin, grid: Grid, size: int) -> bool:
        """Whether all tensors of `origin`, or all of its rows, are stored."""
        whole = (origin, grid, size) in self._complete
        return whole or all((info.name, grid, size) in self._transposed for info in origin.tensors())

    def rows(self, origin: Origin, grid: Grid, size: int) -> Iterator[tuple[int, Quantised]]:
        """The index of the first row, and some rows from there; all rows of a weight [N, K] in order."""
        number = self._complete.get((origin, grid, size))
        if number is not None:
            for start in self._stacks[origin, grid, size]:
                parts = (np.load(self._file_of_rows(number, start, name)) for name in Quantised._fields)
                yield start, Quantised(*map(torch.from_numpy, parts))
            return
        files = {info.name: self._open((info.name, grid, size)) for info in origin.tensors()}
        width = origin.shape[1]
        count = -(-width // size)
        for region in blocks(origin.shape, ROWS_ELEMENTS):
            integers, scales, zeros = (
                origin.read(region, LeafReader(partial(self._part, files, (grid, size), name)))
                for name in Quantised._fields
            )
            integers = torch.nn.functional.pad(integers, (0, count * size - width), value=0)
            last = integers.shape[1] - width
            found = Quantised(
                integers.reshape(-1, count, size), scales[:, ::size].contiguous(), zeros[:, ::size].contiguous()
            )
            if last:  # padding of the last block is 0
                found.integers[:, -1, size - last :] = found.zeros[:, -1:]
            yield region[0][0], found

    def _file(self, key: Key, name: str) -> Path:
        assert self.folder is not None
        tensor, grid, size = key
        return self.folder / f"{tensor}.{grid.bits}.{int(grid.symmetric)}.{size}.{name}.npy"

    def _file_of_rows(self, number: int, start: int, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"stack.{number}.{start}.{name}.npy"

    def _open(self, key: Key) -> Arrays:
        return {name: np.load(self._file(key, name), mmap_mode="r") for name in Quantised._fields}

    def _part(
        self, files: dict[str, Arrays], packing: tuple[Grid, int], name: str, info: TensorInfo, region: Region
    ) -> torch.Tensor:
        """For every value of a tensor in `region` its integer, its block's scale or its block's zero point."""
        grid, size = packing
        transposed = self._transposed[info.name, grid, size]
        (row, last), (begin, end) = reversed(region) if transposed else region
        array = files[info.name][name]
        if name == "integers":
            found = torch.from_numpy(np.array(array[row:last, begin:end]))
        else:
            some = torch.from_numpy(np.array(array[row:last, begin // size : -(-end // size)]))
            first = begin // size * size
            found = some.repeat_interleave(size, 1)[:, begin - first : end - first]
        return found.T if transposed else found
