"""File layouts of the integers, scales and zero points of a weight.

A layout defines the tensors of a weight, writes them in pieces, and reads rows back. A weight is [N, K]; a row has M
blocks of B weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from partita.export.publish import unnamed_file
from partita.export.quantise.quantisers import Packing, Quantised
from partita.export.weights.element_types import of_ir, pack, to_torch, unpack
from partita.export.weights.sources import SLICE_BYTES, Part

if TYPE_CHECKING:
    from partita.export.quantise.write.weight_source import QuantisedSource

SCALES, ZEROS = "scales", "zero_points"
"""Labels of the parts other than integers."""
Bytes = npt.NDArray[np.uint8]
"""The written bytes of one part, memory-mapped."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a layout needs, of a weight without values."""

    packing: Packing
    dtype: ir.DataType
    """The dtype of the scales."""
    rows: int
    width: int

    @property
    def blocks_per_row(self) -> int:
        """M."""
        return -(-self.width // self.packing.block_size)


class Layout(ABC):
    """A way to store a weight."""

    @abstractmethod
    def parts(self, weight: Sizes | QuantisedSource) -> tuple[Part, ...]:
        """Integers, scales, and zero points unless they are the middle of the range."""

    @abstractmethod
    def pieces(self, weight: QuantisedSource) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts in pieces, as `WeightSource.pieces`. Raises CheckpointError."""

    @abstractmethod
    def read(self, weight: QuantisedSource, written: Sequence[Bytes], start: int, stop: int) -> Quantised:
        """Rows `start` to `stop` of a written weight: integers [R, M, B], scales and zero points [R, M]."""


@dataclass(frozen=True, slots=True)
class InRows(Layout):
    """Row-major, for MatMulNBits and GatherBlockQuantized (ONNX Runtime, docs/ContribOperators.md).

    Integers [N, M, B * bits / 8], the first of two in the low four bits; scales [N, M]; zero points, packed like the
    integers, [N, packed M]. The last block of a row may be padded.
    """

    def parts(self, weight: Sizes | QuantisedSource) -> tuple[Part, ...]:
        """Integers, scales, and zero points unless they are the middle of the range."""
        rows, count, packing, byte = weight.rows, weight.blocks_per_row, weight.packing, ir.DataType.UINT8
        bits = packing.grid.bits
        parts = (
            Part((rows, count, packing.block_size * bits // 8), byte),
            Part((rows, count), weight.dtype, SCALES),
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

    def read(self, weight: QuantisedSource, written: Sequence[Bytes], start: int, stop: int) -> Quantised:
        """Rows of all parts."""
        parts, grid, count = self.parts(weight), weight.packing.grid, weight.blocks_per_row
        data = torch.from_numpy(np.array(written[0].reshape(weight.rows, -1)[start:stop]))
        integers = unpack(data, grid.bits, count * weight.packing.block_size).reshape(stop - start, count, -1)
        scales = _scales(written[1], parts[1]).reshape(weight.rows, count)[start:stop]
        zeros = torch.full((stop - start, count), grid.middle, dtype=torch.uint8)
        if not grid.symmetric:
            zeros = unpack(
                torch.from_numpy(np.array(written[2].reshape(weight.rows, -1)[start:stop])), grid.bits, count
            )
        return Quantised(integers, scales, zeros)


@dataclass(frozen=True, slots=True)
class InColumns(Layout):
    """Transposed, for MatMul: integers [K, N] and scales [M, N], in ONNX's types of 4 and 8 bits.

    With zero points [M, N] the integers are unsigned; without, they are signed with zero point 0. Blocks must divide a
    row. 4-bit integers are packed over the whole tensor, the first of two in the low four bits (ONNX IR, TensorProto).
    """

    one_scale: bool = False
    """A row has one block, and its scales are [N]."""

    def parts(self, weight: Sizes | QuantisedSource) -> tuple[Part, ...]:
        """Integers, scales, and zero points unless they are the middle of the range."""
        grid, shape = weight.packing.grid, (weight.blocks_per_row, weight.rows)
        kind = integer_type(grid.bits, signed=grid.symmetric)
        parts = (
            Part((weight.width, weight.rows), kind),
            Part(shape[1:] if self.one_scale else shape, weight.dtype, SCALES),
        )
        return parts if grid.symmetric else (*parts, Part(shape, kind, ZEROS))

    def pieces(self, weight: QuantisedSource) -> Iterator[tuple[int, torch.Tensor]]:
        """All integers are computed before the first is written, because they come in rows and are written in columns.

        A temporary file holds them, one byte each.
        """
        grid, scales, zeros = weight.packing.grid, [], []
        with unnamed_file() as file:
            for _, rows in weight.rows_quantised():
                file.write(rows.integers.contiguous().numpy().data)
                scales.append(weight.fitting(rows.scales))
                zeros.append(rows.zeros)
            file.flush()
            room = np.memmap(file, np.uint8, "r", shape=(weight.rows, weight.width))
            step = max(2, SLICE_BYTES // weight.rows) & ~1  # two rows of 4 bits always end at a byte boundary
            for first in range(0, weight.width, step):
                turned = torch.from_numpy(np.ascontiguousarray(room[:, first : first + step].T))
                yield 0, pack(_signed(turned, weight).reshape(1, -1), grid.bits)
            del room
        yield 1, torch.cat(scales).T.contiguous()
        if not grid.symmetric:
            yield 2, pack(torch.cat(zeros).T.reshape(1, -1), grid.bits)

    def read(self, weight: QuantisedSource, written: Sequence[Bytes], start: int, stop: int) -> Quantised:
        """Columns of all parts."""
        parts, grid, count = self.parts(weight), weight.packing.grid, weight.blocks_per_row
        data = self._columns(written[0], weight.width, weight, start, stop)
        integers = _signed(data, weight).reshape(stop - start, count, -1)
        scales = _scales(written[1], parts[1]).reshape(count, weight.rows)[:, start:stop].T
        zeros = torch.full((stop - start, count), grid.middle, dtype=torch.uint8)
        if not grid.symmetric:
            zeros = self._columns(written[2], count, weight, start, stop)
        return Quantised(integers, scales, zeros)

    def _columns(self, written: Bytes, height: int, weight: QuantisedSource, start: int, stop: int) -> torch.Tensor:
        """Columns of a part [height, N], as rows [R, height]."""
        rows, bits = weight.rows, weight.packing.grid.bits
        if bits == 8:
            return torch.from_numpy(np.array(written.reshape(height, rows)[:, start:stop].T))
        if rows % 2:  # every other row of the part begins inside a byte
            flat = unpack(torch.from_numpy(np.array(written.reshape(1, -1))), bits, height * rows)
            return flat.reshape(height, rows)[:, start:stop].T.contiguous()
        some = np.array(written.reshape(height, rows // 2)[:, start // 2 : -(-stop // 2)])
        wide = unpack(torch.from_numpy(some), bits, 2 * some.shape[1])
        return wide[:, start % 2 : start % 2 + stop - start].T.contiguous()


@dataclass(frozen=True, slots=True)
class InBlocks(InRows):
    """The bytes of `InRows` as blocks for Gather, Cast and Mul: uint8 [N, M, B], scales [N, M, 1]; no zero points."""

    def parts(self, weight: Sizes | QuantisedSource) -> tuple[Part, ...]:
        """Integers and scales."""
        shape = weight.rows, weight.blocks_per_row
        return (
            Part((*shape, weight.packing.block_size), ir.DataType.UINT8),
            Part((*shape, 1), weight.dtype, SCALES),
        )


def integer_type(bits: int, *, signed: bool) -> ir.DataType:
    """ONNX's integer type of this size."""
    return {
        (4, True): ir.DataType.INT4,
        (4, False): ir.DataType.UINT4,
        (8, True): ir.DataType.INT8,
        (8, False): ir.DataType.UINT8,
    }[bits, signed]


def _signed(integers: torch.Tensor, weight: QuantisedSource) -> torch.Tensor:
    """Convert unsigned integers to signed ones (zero point 0) where the grid is symmetric, and back."""
    grid = weight.packing.grid
    return integers ^ grid.middle if grid.symmetric else integers


def _scales(written: Bytes, part: Part) -> torch.Tensor:
    """Scales as float32, in the shape of their part."""
    return torch.from_numpy(np.array(written)).view(to_torch(of_ir(part.dtype))).float().reshape(part.shape)
