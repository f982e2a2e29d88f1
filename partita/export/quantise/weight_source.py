"""A quantised weight source: packed integers, scales and zero points, computed a few rows at a time.

A layout defines the tensors of a weight, writes them in pieces, and reads rows back. A weight is [N, K]; a row has M
blocks of B weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from partita.errors import CheckpointError
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.quantise import Grid, Packing, stored_integers, without_text
from partita.export.quantise.rounding import QUANTISERS, Round
from partita.export.weights import Quantised, of_ir, pack, to_torch, unpack
from partita.export.weights.origins import Origin, blocks
from partita.export.weights.sources import (
    SLICE_BYTES,
    FloatSource,
    Part,
    WeightSource,
    non_finite_message,
    workers,
)

WORKING_ELEMENTS = 1 << 19
"""Weights per step of a thread. With a few of them, calling each operation takes as long as its computation."""
SCALES, ZEROS = "scales", "zero_points"
"""Labels of the parts other than integers."""
Parts = Sequence[npt.NDArray[Any]]
"""The written parts of a weight."""
Whole = tuple[Origin, Grid, int]
"""The origin of a weight, its grid and block size."""


@dataclass(frozen=True, slots=True)
class InRows:
    """Row-major, for MatMulNBits and GatherBlockQuantized (ONNX Runtime, docs/ContribOperators.md).

    Integers [N, M, B * bits / 8], the first of two in the low four bits; scales [N, M]; zero points, packed like the
    integers, [N, packed M]. The last block of a row may be padded.
    """

    def parts(self, packing: Packing, dtype: ir.DataType, rows: int, width: int) -> tuple[Part, ...]:
        """Integers, scales of `dtype`, and zero points unless they are the middle of the range."""
        count, bits, byte = packing.blocks_in(width), packing.grid.bits, ir.DataType.UINT8
        parts = (
            Part((rows, count, packing.block_size * bits // 8), byte),
            Part((rows, count), dtype, SCALES),
        )
        return parts if packing.grid.symmetric else (*parts, Part((rows, -(-count * bits // 8)), byte, ZEROS))

    def pieces(self, weight: QuantisedSource) -> Iterator[tuple[int, torch.Tensor]]:
        """Integers in order, then scales and zero points."""
        grid, scales, zeros = weight.packing.grid, [], []
        for _, rows in weight.rows_quantised():
            yield 0, pack(rows.integers.flatten(1), grid.bits)
            scales.append(weight.fitting(rows.scales))
            zeros.append(pack(rows.zeros, grid.bits))
        yield 1, torch.cat(scales)
        if not grid.symmetric:
            yield 2, torch.cat(zeros)

    def read(self, weight: QuantisedSource, written: Parts, start: int, stop: int) -> Quantised:
        """Rows `start` to `stop` of a written weight: integers [R, M, B], scales and zero points [R, M]."""
        grid, count = weight.packing.grid, weight.blocks_per_row
        data, scales, *zeros = (np.array(part.reshape(weight.rows, -1)[start:stop]) for part in written)
        integers = unpack(torch.from_numpy(data), grid.bits, count * weight.packing.block_size)
        points = torch.full(scales.shape, grid.middle, dtype=torch.uint8)
        if zeros:
            points = unpack(torch.from_numpy(zeros[0]), grid.bits, count)
        return Quantised(integers.reshape(stop - start, count, -1), _floats(scales), points)


@dataclass(frozen=True, slots=True)
class InColumns:
    """Transposed, for MatMul: integers [K, N] and scales [M, N], in ONNX's types of 4 and 8 bits.

    With zero points [M, N] the integers are unsigned; without, they are signed with zero point 0. Blocks must divide a
    row. 4-bit integers are packed over the whole tensor, the first of two in the low four bits (ONNX IR, TensorProto).
    """

    one_scale: bool = False
    """A row has one block, and its scales are [N]."""

    def parts(self, packing: Packing, dtype: ir.DataType, rows: int, width: int) -> tuple[Part, ...]:
        """Integers, scales of `dtype`, and zero points unless they are the middle of the range."""
        grid, shape = packing.grid, (packing.blocks_in(width), rows)
        kind = ir.DataType[f"{'' if grid.symmetric else 'U'}INT{grid.bits}"]
        parts = (
            Part((width, rows), kind),
            Part(shape[1:] if self.one_scale else shape, dtype, SCALES),
        )
        return parts if grid.symmetric else (*parts, Part(shape, kind, ZEROS))

    def pieces(self, weight: QuantisedSource) -> Iterator[tuple[int, torch.Tensor]]:
        """Integers, scales and zero points, transposed in memory."""
        grid = weight.packing.grid
        quantised = zip(*(rows for _, rows in weight.rows_quantised()), strict=True)
        integers, scales, zeros = (torch.cat(parts) for parts in quantised)
        step = max(2, SLICE_BYTES // weight.rows) & ~1  # two rows of 4 bits always end at a byte boundary
        for columns in torch.split(integers.reshape(weight.rows, weight.width), step, dim=1):
            signed = columns ^ grid.middle if grid.symmetric else columns
            yield 0, pack(signed.T.reshape(1, -1), grid.bits)
        yield 1, weight.fitting(scales).T.contiguous()
        if not grid.symmetric:
            yield 2, pack(zeros.T.reshape(1, -1), grid.bits)

    def read(self, weight: QuantisedSource, written: Parts, start: int, stop: int) -> Quantised:
        """Rows `start` to `stop` of a written weight, which are columns of the parts."""
        grid = weight.packing.grid
        data, scales, *zeros = (part.reshape(-1, weight.rows)[:, start:stop].T for part in written)
        integers = (data.astype(np.int16) + (grid.middle if grid.symmetric else 0)).astype(np.uint8)
        points = zeros[0].astype(np.uint8) if zeros else np.full(scales.shape, grid.middle, np.uint8)
        in_blocks = torch.from_numpy(integers).reshape(*scales.shape, -1)
        return Quantised(in_blocks, _floats(scales), torch.from_numpy(points))


@dataclass(frozen=True, slots=True)
class InBlocks(InRows):
    """The bytes of `InRows` as blocks for Gather, Cast and Mul: uint8 [N, M, B], scales [N, M, 1]; no zero points."""

    def parts(self, packing: Packing, dtype: ir.DataType, rows: int, width: int) -> tuple[Part, ...]:
        """Integers, and scales of `dtype`."""
        shape = rows, packing.blocks_in(width)
        return Part((*shape, packing.block_size), ir.DataType.UINT8), Part((*shape, 1), dtype, SCALES)


Layout: TypeAlias = InRows | InColumns
"""A way to store a weight: its parts, how they are written in pieces, and how rows are read back."""


def _floats(scales: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(scales.astype(np.float32))


class CalibratedWeights:
    """Rows of weights that were quantised on a text, in files until they are packed; empty without calibration."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._arrays: dict[Whole, list[npt.NDArray[np.generic]]] = {}
        """Integers, scales and zero points of all rows, memory-mapped."""
        self._missing: dict[Whole, int] = {}
        """Number of rows that were not added yet."""

    def begin(self, folder: Path) -> None:
        """Use `folder` from now on, and forget earlier results."""
        self._folder = folder
        self._arrays.clear()
        self._missing.clear()

    def add(self, weight: QuantisedSource, rows: torch.Tensor, found: Quantised) -> None:
        """Store `found` as the `rows` of a weight."""
        assert self._folder is not None
        key = weight.whole
        if key not in self._arrays:
            self._missing[key] = weight.rows
            self._arrays[key] = []
            for part in found:
                file, shape = self._folder / f"{len(self._missing)}.{len(self._arrays[key])}.npy", part.shape[1:]
                self._arrays[key].append(
                    np.lib.format.open_memmap(file, "w+", part.numpy().dtype, (weight.rows, *shape))
                )
        for array, part in zip(self._arrays[key], found, strict=True):
            array[rows.numpy()] = part.numpy()
        self._missing[key] -= len(rows)

    def has(self, weight: QuantisedSource) -> bool:
        """Whether all rows of a weight are stored."""
        return self._missing.get(weight.whole) == 0

    def rows(self, weight: QuantisedSource) -> Iterator[tuple[int, Quantised]]:
        """The index of the first row, and some rows from there; all rows of a weight in order."""
        step = max(1, SLICE_BYTES // 4 // weight.width)
        for start in range(0, weight.rows, step):
            parts = (np.array(array[start : start + step]) for array in self._arrays[weight.whole])
            yield start, Quantised(*map(torch.from_numpy, parts))


@dataclass(frozen=True)
class QuantisedSource(WeightSource):
    """A weight [N, K] in blocks along K."""

    packing: Packing = field(kw_only=True)
    layout: Layout = field(default=InRows(), kw_only=True)
    rounded: CalibratedWeights = field(default_factory=CalibratedWeights, compare=False, kw_only=True)
    """The calibration results, read when the weight is written."""

    @classmethod
    def of(cls, plain: FloatSource, packing: Packing, layout: Layout = InRows(), **more: Any) -> QuantisedSource:
        """The quantised `plain`, a weight [N, K]. `more`: its calibration results."""
        return cls(**vars(plain), packing=packing, layout=layout, **more)

    @property
    def floats(self) -> FloatSource:
        """The same weight unquantised."""
        return FloatSource(self.checkpoint, self.origin, self.dtype, self.name, self.parameters)

    @property
    def rows(self) -> int:
        """N."""
        return self.origin.shape[0]

    @property
    def width(self) -> int:
        """K."""
        return self.origin.shape[1]

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a row; the last one may be padded with zeros."""
        return self.packing.blocks_in(self.width)

    @property
    def key(self) -> Hashable:
        """The origin, dtype, packing and layout."""
        return self.origin, int(self.dtype), self.packing, self.layout

    @property
    def parts(self) -> tuple[Part, ...]:
        """Integers, scales, and zero points where there are any, in the layout's order."""
        return self.layout.parts(self.packing, self.dtype, self.rows, self.width)

    @property
    def quantiser(self) -> str:
        """The quantiser that chooses its integers: a data-free quantiser without calibration results."""
        name = self.packing.quantiser
        return name if self.rounded.has(self) else without_text(name)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts as the layout writes them. Raises CheckpointError for NaN, infinity or a scale out of range."""
        return self.layout.pieces(self)

    def rows_quantised(self) -> Iterator[tuple[int, Quantised]]:
        """The index of the first row, and some rows from there; all rows in order."""
        if self.packing.quantiser == stored_integers.QUANTISER:
            yield from stored_integers.rows(self.checkpoint, self.origin, self.packing)
            return
        if self.rounded.has(self):
            yield from self.rounded.rows(self)
            return
        with OpenFiles() as files, workers() as (_, pool):
            for region in blocks(self.origin.shape, SLICE_BYTES // 4):
                start, _ = region[0]
                parts = torch.split(self.origin.read(region, files), max(1, WORKING_ELEMENTS // self.width))
                for part, quantised in zip(parts, pool.map(self._quantised, parts), strict=True):
                    if quantised is None:
                        which = non_finite_message(self.origin, self.name, files)
                        raise CheckpointError(f"{self.checkpoint.location}: {which}; the checkpoint is damaged")
                    yield start, quantised
                    start += len(part)

    def rows_restored(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Dequantised rows [R, K]."""
        for start, found in self.rows_quantised():
            yield start, restored(found)[:, : self.width]

    @property
    def whole(self) -> Whole:
        """The key of its calibration results, which do not depend on the layout."""
        return self.origin, self.packing.grid, self.packing.block_size

    def _quantised(self, rows: torch.Tensor) -> Quantised | None:
        """Rows [R, K] in blocks, the last padded with zeros, without a text; None if a weight is NaN or infinite."""
        size, count, rows = self.packing.block_size, self.blocks_per_row, rows.to(torch.float32)
        if not torch.isfinite(rows).all():
            return None
        if rows.shape[1] < count * size:
            rows = torch.nn.functional.pad(rows, (0, count * size - rows.shape[1]))
        return QUANTISERS[self.packing.quantiser](rows.reshape(-1, count, size), self.packing.grid)

    def fitting(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales in the dtype of the graph. Raises CheckpointError for one outside its range."""
        cast = scales.to(to_torch(of_ir(self.dtype)))
        if not torch.isfinite(cast).all():
            raise CheckpointError(f"tensor {self.name}: a block scale does not fit {of_ir(self.dtype)}")
        if self.packing.quantiser == stored_integers.QUANTISER and not torch.equal(cast.float(), scales.float()):
            raise CheckpointError(
                f"tensor {self.name}: its stored scales are not exactly {of_ir(self.dtype)}; export with "
                "`activations=fp32`"
            )
        return cast


def in_parts(rows: Round, weights: torch.Tensor) -> Quantised:
    """All rows quantised, a part of them in each thread."""
    with workers() as (count, pool):
        found = list(pool.map(rows, weights.chunk(count)))
    return Quantised(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def restored(found: Quantised) -> torch.Tensor:
    """The dequantised values, float32 [R, M * B]."""
    return found.integers.float().sub_(found.zeros.unsqueeze(-1)).mul_(found.scales.unsqueeze(-1)).flatten(1)
