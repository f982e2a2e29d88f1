"""Integers, scales and zero points of a quantised checkpoint, taken as they are stored instead of rounded anew.

A weight of a graph may be several tensors of the checkpoint, joined and turned. Which numbers share a block is read
through its origin, as everything is; where blocks of a size that the target takes lie along the rows, the weight is
packed with the very integers. Where the columns of all rows are grouped out of order (act-order), they are sorted by
group, and so is what they are multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from partita.errors import CheckpointError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.stored_formats import AffineWeight, Parts, affine, container
from partita.export.checkpoint.stored_formats.base import StoredFloats
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.quantise.packing import Packing
from partita.export.quantise.rounders import Grid, Quantised
from partita.export.weights.origins import Origin, Region, Reordered, blocks

QUANTISER = "as stored"
"""What stands for the name of a quantiser."""
SIZES = (256, 128, 64, 32, 16)
"""Blocks that integers may be packed in, the best first: one of a stored block's size, or smaller ones that repeat its
scale.
"""
ROWS_ELEMENTS = 1 << 22
"""Numbers that are read at a time."""
SAMPLED_ROWS = 64
"""Of a weight, to see how its blocks lie. All are looked at when they are written."""


class NotAsStoredError(Exception):
    """A weight cannot be packed as it is stored; the message says why."""


@dataclass(frozen=True, slots=True)
class Taken:
    """How some weights are packed as they are stored: in one way, because one operator may read all of them."""

    packing: Packing
    origins: tuple[Origin, ...]
    """Of the weights, with their columns sorted by group where they were not."""


def is_stored(origin: Origin) -> bool:
    """Whether any number of a weight is quantised in the checkpoint."""
    return any(info.decoder is not None and not isinstance(info.decoder, StoredFloats) for info in origin.tensors())


@dataclass(slots=True)
class AsStored:
    """The stored integers of one checkpoint."""

    checkpoint: Checkpoint
    sizes: tuple[int, ...] = SIZES
    """Sizes of blocks that the target takes."""
    symmetric: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Whether every zero point of a weight is the middle of so many bits; filled as it is asked for."""

    def packings(self) -> list[Packing]:
        """One for every width and for weights with and without zero points, in the smallest blocks that are stored.

        Reads the zero points.
        """
        found: dict[tuple[int, bool], int] = {}
        with OpenFiles(self.checkpoint.folder) as files:
            for weight in self._weights():
                bits = container(weight)
                key = bits, self._is_symmetric(weight, bits, files)
                size = next((size for size in SIZES if weight.block % size == 0), SIZES[-1])
                found[key] = min(size, found.get(key, size))
        return [Packing(Grid(bits, symmetric), size, QUANTISER) for (bits, symmetric), size in sorted(found.items())]

    def blocks(self) -> tuple[int, ...]:
        """Sizes of packed blocks that may serve some stored weight, the largest first."""
        widths = {weight.block for weight in self._weights()}
        return tuple(size for size in SIZES if any(width % size == 0 for width in widths))

    def take(self, origins: Sequence[Origin], *, whole_rows: bool = False) -> Taken:
        """How weights [N, K] are packed. `whole_rows`: a row has one scale. Raises NotAsStoredError."""
        stored = [_affine(origin) for origin in origins]
        with OpenFiles(self.checkpoint.folder) as files:
            sorted_origins = tuple(self._in_order(origin, files) for origin in origins)
            fitting = [self._fitting(origin, files, whole_rows=whole_rows) for origin in sorted_origins]
            bits = max(container(weight) for weights in stored for weight in weights)
            symmetric = all(self._is_symmetric(weight, bits, files) for weights in stored for weight in weights)
        sizes = [size for size in fitting[0] if all(size in others for others in fitting[1:])]
        if not sizes:
            raise NotAsStoredError(
                f"its stored blocks are none of those that can be packed, {', '.join(map(str, self.sizes))}"
            )
        return Taken(Packing(Grid(bits, symmetric), sizes[0], QUANTISER), sorted_origins)

    def _weights(self) -> Iterator[AffineWeight]:
        quantised = self.checkpoint.quantised
        for weight in () if quantised is None else quantised.weights.values():
            if isinstance(weight, AffineWeight):
                yield weight

    def _is_symmetric(self, weight: AffineWeight, bits: int, files: OpenFiles) -> bool:
        key = weight.name, bits
        if key not in self.symmetric:
            middle = Grid(bits, symmetric=True).middle
            self.symmetric[key] = bool((weight.zero_points(files) == middle).all())
        return self.symmetric[key]

    def _in_order(self, origin: Origin, files: OpenFiles) -> Origin:
        """The weight with its columns sorted by group, where they are not in order."""
        first = _rows_of_blocks(origin, [0], files)[0]
        changes = int((first[1:] != first[:-1]).sum())
        if changes == len(set(first.tolist())) - 1:
            return origin
        known = {block: place for place, block in enumerate(dict.fromkeys(first.tolist()))}
        groups = torch.tensor([known[block] for block in first.tolist()])
        return Reordered(origin, 1, tuple(groups.argsort(stable=True).tolist()))

    def _fitting(self, origin: Origin, files: OpenFiles, *, whole_rows: bool) -> list[int]:
        """Sizes of blocks in which no two numbers of a block are of two stored blocks, the best first."""
        rows, width = origin.shape
        step = max(1, rows // SAMPLED_ROWS)
        found = _rows_of_blocks(origin, sorted({*range(0, rows, step), rows - 1}), files)
        sizes = [width] if whole_rows else [size for size in self.sizes if width % size == 0]
        fitting = [size for size in sizes if bool((found.reshape(-1, size) == found.reshape(-1, size)[:, :1]).all())]
        if not fitting and isinstance(origin, Reordered):
            raise NotAsStoredError("its columns are grouped out of order, and not for all rows alike (act-order)")
        return fitting


def _affine(origin: Origin) -> list[AffineWeight]:
    """The stored weights of an origin. Raises NotAsStoredError when one of its tensors has no integers."""
    found = []
    for info in dict.fromkeys(origin.tensors()):
        weight = affine(info)
        if weight is None:
            what = "floats" if info.decoder is None else "numbers that are no integers with a scale"
            raise NotAsStoredError(f"{info.name} is stored as {what}")
        found.append(weight)
    return found


def _rows_of_blocks(origin: Origin, rows: Iterable[int], files: OpenFiles) -> torch.Tensor:
    """The block of every number in some rows, int64 [R, K]."""
    infos = list(dict.fromkeys(origin.tensors()))
    reader = _Blocks(infos, files)
    width = origin.shape[1]
    return torch.cat([origin.read(((row, row + 1), (0, width)), reader) for row in rows])


class _Blocks(OpenFiles):
    """Files in which every number of a stored weight is the number of its block."""

    def __init__(self, infos: Sequence[TensorInfo], files: OpenFiles) -> None:
        self.along: dict[str, tuple[int, torch.Tensor]] = {}
        for info in infos:
            weight = affine(info)
            assert weight is not None
            self.along[info.name] = weight.axis, weight.blocks_along(files)
        self.first: dict[str, int] = {}
        total = 0
        for info in infos:
            self.first[info.name] = total
            total += math.prod(info.shape)

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """Numbers of blocks in `region`; those of different places of the other axes differ."""
        axis, along = self.along[info.name]
        found = torch.full((), self.first[info.name], dtype=torch.int64)
        stride = 1
        for place in reversed(range(len(region))):
            begin, end = region[place]
            index = along[begin:end] if place == axis else torch.arange(begin, end)
            found = found + (index * stride).reshape(-1, *[1] * (len(region) - 1 - place))
            stride *= info.shape[place]
        return found


class _Part(OpenFiles):
    """Files that hold, for every number of a stored weight, its integer, its scale or its zero point."""

    def __init__(self, files: OpenFiles, name: str, known: dict[tuple[str, Region], Parts]) -> None:
        self.files, self.name, self.known = files, name, known

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The part of the numbers in `region`."""
        weight = affine(info)
        assert weight is not None
        if (info.name, region) not in self.known:  # the other two of a number are asked for at once
            self.known[info.name, region] = weight.parts(region, self.files)
        part: torch.Tensor = getattr(self.known[info.name, region], self.name)
        return part.expand([end - begin for begin, end in region])


def rows(checkpoint: Checkpoint, origin: Origin, packing: Packing) -> Iterator[tuple[int, Quantised]]:
    """The number of the first row and some rows from there on, of a weight [N, K] as it is stored, all rows in order.

    Raises CheckpointError when the numbers of a block turn out to be of several stored ones.
    """
    size, grid, width = packing.block_size, packing.grid, origin.shape[1]
    with OpenFiles(checkpoint.folder) as files:
        for region in blocks(origin.shape, ROWS_ELEMENTS):
            known: dict[tuple[str, Region], Parts] = {}
            integers, scales, zeros = (
                origin.read(region, _Part(files, name, known)).reshape(-1, width // size, size)
                for name in Quantised._fields
            )
            first, zero = scales[..., :1], zeros[..., :1]
            if not bool(torch.isfinite(scales).all()):
                name = min(info.name for info in origin.tensors())
                raise CheckpointError(f"{checkpoint.where}: {name}: a stored scale is NaN or infinite")
            alike = bool((scales == first).all()) and bool((zeros == zero).all())
            if not alike or (grid.symmetric and bool((zero != grid.middle).any())):
                name = min(info.name for info in origin.tensors())
                raise CheckpointError(f"{checkpoint.where}: {name}: the numbers of a block have several scales")
            yield region[0][0], Quantised(integers, first.squeeze(-1).contiguous(), zero.squeeze(-1).contiguous())
