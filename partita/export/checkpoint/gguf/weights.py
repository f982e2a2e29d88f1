"""Weights in a GGUF file: permuted rows of one or several tensors, or a whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from partita.export.checkpoint.gguf.header import GgufTensor
from partita.export.checkpoint.gguf.types import AFFINE, Bytes, dequantised
from partita.export.checkpoint.stored_formats.base import AffineWeight, Parts, StoredFloats, StoredWeight
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.weights.origins import Region


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows along the last axis, each a row of a tensor of the file."""

    path: Path
    tensors: tuple[GgufTensor, ...]
    """Tensors of one row length; `read` needs one type, too."""
    index: npt.NDArray[np.int64]
    """For each row, its index in the concatenated rows of the tensors."""

    def read(self, region: Region, shape: tuple[int, ...]) -> tuple[Bytes, int]:
        """The bytes of the blocks that `region` of a tensor of `shape` touches, [R, bytes], and their first column."""
        places = self.index.reshape(shape[:-1])[tuple(slice(start, stop) for start, stop in region[:-1])].reshape(-1)
        begin, end = region[-1]
        block = self.tensors[0].type
        first, last = begin // block.block, -(-end // block.block)
        ends = np.cumsum([math.prod(tensor.shape[:-1]) for tensor in self.tensors])
        found = np.empty((len(places), (last - first) * block.size_bytes), np.uint8)
        for number, tensor in enumerate(self.tensors):
            low = int(ends[number - 1]) if number else 0
            here = (places >= low) & (places < ends[number])
            found[here] = _mapped(self.path, tensor)[
                places[here] - low, first * block.size_bytes : last * block.size_bytes
            ]
        return found, first * block.block

    def of_each(self, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[npt.NDArray[np.bool_], Rows]]:
        """For each tensor with rows in `region`: a mask of these rows [R], and the rows."""
        places = self.index.reshape(shape[:-1])[tuple(slice(start, stop) for start, stop in region[:-1])].reshape(-1)
        low = 0
        for tensor in self.tensors:
            lines = math.prod(tensor.shape[:-1])
            here = (places >= low) & (places < low + lines)
            if here.any():
                yield here, Rows(self.path, (tensor,), places[here] - low)
            low += lines


def _mapped(path: Path, tensor: GgufTensor) -> Bytes:
    """The memory-mapped bytes of a tensor [rows, bytes]."""
    shape = math.prod(tensor.shape[:-1]), tensor.row_bytes
    return np.memmap(path, np.uint8, "r", offset=tensor.start, shape=shape)


def _as_region(values: npt.NDArray[Any], region: Region, first: int) -> torch.Tensor:
    """Rows [R, columns from `first`] reshaped to `region`."""
    begin, end = region[-1]
    cut = np.ascontiguousarray(values[:, begin - first : end - first])
    return torch.from_numpy(cut).reshape([stop - start for start, stop in region])


@dataclass(frozen=True, eq=False)
class RowWeight(StoredWeight):
    """A weight whose rows the package gguf dequantises."""

    rows: Rows

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, float32."""
        raw, first = self.rows.read(region, self.shape)
        if not raw.size:
            return torch.empty([stop - start for start, stop in region])
        return _as_region(dequantised(raw, self.rows.tensors[0].type.number), region, first)


@dataclass(frozen=True, eq=False)
class FloatRows(StoredFloats, RowWeight):
    """`RowWeight` of a float type."""


@dataclass(frozen=True, eq=False)
class MixedRows(StoredWeight):
    """Rows of tensors with different types, e.g. the halves of an expert, each dequantised by its type."""

    rows: Rows

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, float32."""
        begin, end = region[-1]
        found = torch.empty(math.prod(stop - start for start, stop in region[:-1]), end - begin)
        for here, rows in self.rows.of_each(region, self.shape) if found.numel() else ():
            lines = len(rows.index)
            part: Region = ((0, lines), region[-1])
            raw, first = rows.read(part, (lines, self.shape[-1]))
            found[torch.from_numpy(here)] = _as_region(dequantised(raw, rows.tensors[0].type.number), part, first)
        return found.reshape([stop - start for start, stop in region])


@dataclass(frozen=True, eq=False)
class MixedFloatRows(StoredFloats, MixedRows):
    """`MixedRows` of float types."""


@dataclass(frozen=True, eq=False)
class AffineRows(AffineWeight):
    """Integers with one scale per block."""

    rows: Rows

    def parts(self, region: Region, files: OpenFiles) -> Parts:
        """Integers, scales and the zero point in `region`."""
        raw, first = self.rows.read(region, self.shape)
        zero = torch.tensor(1 << (self.bits - 1), dtype=torch.uint8)
        if not raw.size:
            nothing = torch.empty([stop - start for start, stop in region])
            return Parts(nothing.to(torch.uint8), nothing, zero)
        kind = AFFINE[self.rows.tensors[0].type.name]
        blocks = raw.reshape(-1, self.rows.tensors[0].type.size_bytes)
        integers, scales = kind.split(blocks)
        wide = np.repeat(scales, kind.group, axis=1).reshape(len(raw), -1)
        return Parts(_as_region(integers.reshape(len(raw), -1), region, first), _as_region(wide, region, first), zero)

    def zero_points(self, files: OpenFiles) -> torch.Tensor:
        """The zero point of all blocks, [1] uint8."""
        return torch.tensor([1 << (self.bits - 1)], dtype=torch.uint8)


Process = Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class WholeWeight(StoredFloats):
    """A weight computed from a whole tensor, e.g. a norm stored with 1 added, or a transposed table."""

    path: Path
    tensor: GgufTensor
    process: Process

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, float32; computed once while the files are open."""
        if self not in files.computed:
            raw = dequantised(_mapped(self.path, self.tensor), self.tensor.type.number)
            made = self.process(raw.reshape(self.tensor.shape))
            files.computed[self] = torch.from_numpy(np.ascontiguousarray(made, np.float32)).reshape(self.shape)
        return files.computed[self][tuple(slice(start, stop) for start, stop in region)]


def row_weight(name: str, shape: tuple[int, ...], rows: Rows, infos: tuple[TensorInfo, ...]) -> StoredWeight:
    """The weight of some rows, with integers where the type has them."""
    kinds = {tensor.type.name: tensor.type for tensor in rows.tensors}
    if len(kinds) > 1:
        mixed = MixedRows if any(kind.floats is None for kind in kinds.values()) else MixedFloatRows
        return mixed(name, shape, infos, "float32", rows)
    kind = rows.tensors[0].type
    if kind.floats is not None:
        return FloatRows(name, shape, infos, kind.floats, rows)
    affine = AFFINE.get(kind.name)
    if affine is None:
        return RowWeight(name, shape, infos, "float32", rows)
    return AffineRows(name, shape, infos, "float32", affine.bits, len(shape) - 1, affine.group, rows)
