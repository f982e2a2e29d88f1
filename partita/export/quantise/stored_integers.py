"""Keep the stored integers, scales and zero points of a quantised checkpoint.

A graph weight may join and transpose several checkpoint tensors; its origin maps values to stored blocks. Where a
supported block size fits the stored blocks along the rows, the same integers are packed. Columns that all rows group
out of order (act-order) are sorted by group, as are the inputs of the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from partita.errors import CheckpointError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.stored_formats import AffineWeight, StoredFloats, affine, container
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.quantise import Grid, Packing
from partita.export.weights import Quantised
from partita.export.weights.origins import (
    IndexReader,
    LeafReader,
    Origin,
    Reader,
    Region,
    ReorderedOrigin,
    TensorInfo,
    blocks,
)

QUANTISER = "as stored"
"""The recorded quantiser name."""
SIZES = (256, 128, 64, 32, 16)
"""Block sizes, in order of preference; smaller blocks repeat the scale of their stored block."""
ROWS_ELEMENTS = 1 << 22
"""Elements per read."""
SAMPLED_ROWS = 64
"""Rows sampled to find the block layout. All rows are checked while writing."""


class NotAsStoredError(Exception):
    """A weight cannot be packed as stored; the message has the reason."""


def is_stored(origin: Origin) -> bool:
    """Whether any value of a weight is quantised in the checkpoint."""
    return any(info.decoder is not None and not isinstance(info.decoder, StoredFloats) for info in origin.tensors())


@dataclass(slots=True)
class AsStored:
    """The stored integers of one checkpoint."""

    checkpoint: Checkpoint
    sizes: tuple[int, ...] = SIZES
    """Block sizes that the target supports."""
    symmetric: dict[tuple[str, int], bool] = field(default_factory=dict)
    """(weight, bits) -> whether every zero point is the middle of the range; a cache."""

    def packings(self) -> list[Packing]:
        """One packing per number of bits, and with zero points or not, in the smallest stored blocks."""
        found: dict[tuple[int, bool], int] = {}
        with OpenFiles() as files:
            for weight in self._weights():
                bits = container(weight)
                key = bits, self._is_symmetric(weight, bits, files)
                size = next((size for size in SIZES if weight.block % size == 0), SIZES[-1])
                found[key] = min(size, found.get(key, size))
        return [Packing(Grid(bits, symmetric), size, QUANTISER) for (bits, symmetric), size in sorted(found.items())]

    def blocks(self) -> tuple[int, ...]:
        """Block sizes that divide a stored block, the largest first."""
        return tuple(size for size in SIZES if any(weight.block % size == 0 for weight in self._weights()))

    def take(self, origins: Sequence[Origin]) -> tuple[Packing, tuple[Origin, ...]]:
        """The packing of weights [N, K] that one operator reads, and their origins with columns sorted by group.

        Raises NotAsStoredError.
        """
        stored = [_affine(origin) for origin in origins]
        with OpenFiles() as files:
            sorted_origins = tuple(self._in_order(origin, files) for origin in origins)
            fitting = [self._fitting(origin, files) for origin in sorted_origins]
            bits = max(container(weight) for weights in stored for weight in weights)
            symmetric = all(self._is_symmetric(weight, bits, files) for weights in stored for weight in weights)
        sizes = [size for size in fitting[0] if all(size in others for others in fitting[1:])]
        if not sizes:
            raise NotAsStoredError(
                f"its stored blocks have an unsupported size; supported are {', '.join(map(str, self.sizes))}"
            )
        return Packing(Grid(bits, symmetric), sizes[0], QUANTISER), sorted_origins

    def _weights(self) -> list[AffineWeight]:
        quantised = self.checkpoint.quantised
        found = () if quantised is None else quantised.weights.values()
        return [weight for weight in found if isinstance(weight, AffineWeight)]

    def _is_symmetric(self, weight: AffineWeight, bits: int, files: Reader) -> bool:
        key = weight.name, bits
        if key not in self.symmetric:
            middle = Grid(bits, symmetric=True).middle
            self.symmetric[key] = bool((weight.zero_points(files) == middle).all())
        return self.symmetric[key]

    def _in_order(self, origin: Origin, files: Reader) -> Origin:
        """The weight with its columns sorted by group, where they are not in order."""
        first = _rows_of_blocks(origin, [0], files)[0]
        changes = int((first[1:] != first[:-1]).sum())
        if changes == len(set(first.tolist())) - 1:
            return origin
        known = {block: place for place, block in enumerate(dict.fromkeys(first.tolist()))}
        groups = torch.tensor([known[block] for block in first.tolist()])
        return ReorderedOrigin(origin, 1, tuple(groups.argsort(stable=True).tolist()))

    def _fitting(self, origin: Origin, files: Reader) -> list[int]:
        """Block sizes whose blocks lie within one stored block, the best first."""
        rows, width = origin.shape
        step = max(1, rows // SAMPLED_ROWS)
        found = _rows_of_blocks(origin, sorted({*range(0, rows, step), rows - 1}), files)
        sizes = [size for size in self.sizes if width % size == 0]
        fitting = [size for size in sizes if bool((found.reshape(-1, size) == found.reshape(-1, size)[:, :1]).all())]
        if not fitting and isinstance(origin, ReorderedOrigin):
            raise NotAsStoredError("its rows group columns in different orders (act-order)")
        return fitting


def _affine(origin: Origin) -> list[AffineWeight]:
    """The stored weights of an origin. Raises NotAsStoredError when a tensor has no integers."""
    found = []
    for info in dict.fromkeys(origin.tensors()):
        weight = affine(info)
        if weight is None:
            what = "floats" if info.decoder is None else "values other than integers with a scale"
            raise NotAsStoredError(f"{info.name} is stored as {what}")
        found.append(weight)
    return found


def _rows_of_blocks(origin: Origin, rows: Iterable[int], files: Reader) -> torch.Tensor:
    """The block number of every value in some rows, int64 [R, K]."""
    weights = {info: affine(info) for info in origin.tensors()}
    along = {info: (each.axis, each.blocks_along(files)) for info, each in weights.items() if each is not None}
    reader = IndexReader(weights, along)
    width = origin.shape[1]
    return torch.cat([origin.read(((row, row + 1), (0, width)), reader) for row in rows])


def rows(checkpoint: Checkpoint, origin: Origin, packing: Packing) -> Iterator[tuple[int, Quantised]]:
    """First row and rows of a weight [N, K] as stored, in order. Raises CheckpointError for mixed blocks."""
    size, grid, width = packing.block_size, packing.grid, origin.shape[1]
    with OpenFiles() as files:

        @cache
        def parts(info: TensorInfo, region: Region) -> Quantised:
            weight, sizes = affine(info), [end - begin for begin, end in region]
            assert weight is not None
            return Quantised(*(part.expand(sizes) for part in weight.parts(region, files)))

        def reader(name: str) -> LeafReader:
            return LeafReader(lambda info, region: getattr(parts(info, region), name))

        for region in blocks(origin.shape, ROWS_ELEMENTS):
            integers, scales, zeros = (
                origin.read(region, reader(name)).reshape(-1, width // size, size) for name in Quantised._fields
            )
            parts.cache_clear()
            first, zero = scales[..., :1], zeros[..., :1]
            alike = bool((scales == first).all()) and bool((zeros == zero).all())
            finite = bool(torch.isfinite(scales).all())
            if not finite or not alike or (grid.symmetric and bool((zero != grid.middle).any())):
                name = min(info.name for info in origin.tensors())
                what = "a block has several scales" if finite else "a stored scale is NaN or infinite"
                raise CheckpointError(f"{checkpoint.location}: {name}: {what}")
            yield region[0][0], Quantised(integers, first.squeeze(-1).contiguous(), zero.squeeze(-1).contiguous())
