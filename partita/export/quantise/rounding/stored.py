"""Weights that were rounded before they are written, on disk: what a calibration found for tensors of the checkpoint.

A tensor's integers, scales and zero points are kept in its own layout, so that a weight of the package, which may be
several tensors joined and turned, reads them through its origin as it reads the numbers of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.quantise.rounders import Grid, Quantised
from partita.export.weights.origins import Origin, Region, blocks

ROWS_ELEMENTS = 1 << 22
"""Numbers that are read at a time."""

Key = tuple[str, Grid, int]
"""Name of a tensor, grid and block size."""
Whole = tuple[Origin, Grid, int]
"""A weight of several tensors, grid and block size."""
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(slots=True)
class Rounded:
    """What was found so far. It is in `folder`, and empty until a calibration has one."""

    folder: Path | None = None
    _turned: dict[Key, bool] = field(default_factory=dict)
    """Tensors that are there; True: the blocks lie along the first axis of the tensor."""
    _stacks: dict[Whole, list[int]] = field(default_factory=dict)
    """Weights of which some rows are there, by the numbers of the first."""
    _complete: dict[Whole, int] = field(default_factory=dict)
    """Those that are there with all of their rows, and what number they have among the files."""

    def begin(self, folder: Path) -> None:
        """Keep what is found from now on in `folder`, and forget what was found before."""
        self.folder = folder
        self._turned.clear()
        self._stacks.clear()
        self._complete.clear()

    def add(self, tensor: str, grid: Grid, size: int, found: Quantised, *, turned: bool) -> None:
        """Keep what was found for a tensor [N, K], or [K, N] where it is `turned`."""
        key = tensor, grid, size
        for name, part in zip(found._fields, found, strict=True):
            np.save(self._file(key, name), part.flatten(1).contiguous().numpy())
        self._turned[key] = turned

    def add_rows(self, origin: Origin, grid: Grid, size: int, start: int, found: Quantised) -> None:
        """Keep what was found for some rows, in order, of a weight [N, K] that is rounded as it is, and not by tensor:
        a stack of experts. It is there when it is `complete`.
        """
        starts = self._stacks.setdefault((origin, grid, size), [])
        number = list(self._stacks).index((origin, grid, size))
        starts.append(start)
        for name, part in zip(found._fields, found, strict=True):
            np.save(self._file_of_rows(number, start, name), part.contiguous().numpy())

    def complete(self, origin: Origin, grid: Grid, size: int) -> None:
        """All rows of a weight are there."""
        self._complete[origin, grid, size] = list(self._stacks).index((origin, grid, size))

    def has(self, origin: Origin, grid: Grid, size: int) -> bool:
        """Whether all tensors of `origin` are there, or all of its rows."""
        whole = (origin, grid, size) in self._complete
        return whole or all((info.name, grid, size) in self._turned for info in origin.tensors())

    def rows(self, origin: Origin, grid: Grid, size: int) -> Iterator[tuple[int, Quantised]]:
        """The number of the first row and some rows from there on, of a weight [N, K], all rows in order."""
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
                origin.read(region, _Part(files, self._turned, (grid, size), name)) for name in Quantised._fields
            )
            integers = torch.nn.functional.pad(integers, (0, count * size - width), value=0)
            last = integers.shape[1] - width
            found = Quantised(
                integers.reshape(-1, count, size), scales[:, ::size].contiguous(), zeros[:, ::size].contiguous()
            )
            if last:  # what fills up the last block stands for 0
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


class _Part(OpenFiles):
    """Files that hold, for every number of the checkpoint, its integer, its block's scale or its block's zero point."""

    def __init__(self, files: dict[str, Arrays], turned: dict[Key, bool], packing: tuple[Grid, int], name: str) -> None:
        self.files, self.turned, self.packing, self.name = files, turned, packing, name

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The part of the numbers of a tensor in `region`."""
        grid, size = self.packing
        turned = self.turned[info.name, grid, size]
        (row, last), (begin, end) = reversed(region) if turned else region
        array = self.files[info.name][self.name]
        if self.name == "integers":
            found = torch.from_numpy(np.array(array[row:last, begin:end]))
        else:
            some = torch.from_numpy(np.array(array[row:last, begin // size : -(-end // size)]))
            first = begin // size * size
            found = some.repeat_interleave(size, 1)[:, begin - first : end - first]
        return found.T if turned else found
