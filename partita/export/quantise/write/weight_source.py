"""A quantised weight source: packed integers, scales and zero points, computed a few rows at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from partita.errors import CheckpointError
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.quantise.calibrate.calibrated_weights import CalibratedWeights
from partita.export.quantise.quantisers import Grid, Packing, Quantised, Round, quantiser, without_text
from partita.export.quantise.write import stored_integers
from partita.export.quantise.write.layouts import InRows, Layout
from partita.export.weights.element_types import of_ir, to_torch
from partita.export.weights.origins import blocks
from partita.export.weights.sources import SLICE_BYTES, FloatSource, Part, WeightSource, non_finite_message

__all__ = ["QuantisedSource", "Packing"]
WORKING_ELEMENTS = 1 << 18
"""Weights per step of a thread. With a quarter of them, calling each operation takes as long as its computation."""


@dataclass(frozen=True)
class QuantisedSource(WeightSource):
    """A weight [N, K] in blocks along K."""

    packing: Packing = field(kw_only=True)
    layout: Layout = field(default=InRows(), kw_only=True)
    rounded: CalibratedWeights | None = field(default=None, compare=False, kw_only=True)
    """The calibration results, read when the weight is written."""

    @classmethod
    def of(
        cls,
        plain: FloatSource,
        packing: Packing,
        layout: Layout = InRows(),  # noqa: B008 - immutable
        rounded: CalibratedWeights | None = None,
    ) -> QuantisedSource:
        """The quantised `plain`, a weight [N, K]."""
        own = plain.checkpoint, plain.origin, plain.dtype, plain.name, plain.parameters
        return cls(*own, packing=packing, layout=layout, rounded=rounded)

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
        return -(-self.width // self.packing.block_size)

    @property
    def key(self) -> Hashable:
        """The origin, dtype, packing and layout."""
        return self.origin, int(self.dtype), self.packing, self.layout

    @property
    def parts(self) -> tuple[Part, ...]:
        """Integers, scales, and zero points where there are any, in the layout's order."""
        return self.layout.parts(self)

    @property
    def quantiser(self) -> str:
        """The quantiser that chooses its integers: a data-free quantiser without calibration results."""
        name = self.packing.quantiser
        if name == stored_integers.QUANTISER or (
            self.rounded is not None and self.rounded.has(self.origin, *self._form)
        ):
            return name
        return without_text(name)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts as the layout writes them.

        Raises CheckpointError when a weight is NaN or infinite, or a scale is outside the range of the dtype.
        """
        return self.layout.pieces(self)

    def rows_quantised(self) -> Iterator[tuple[int, Quantised]]:
        """The index of the first row, and some rows from there; all rows in order."""
        if self.packing.quantiser == stored_integers.QUANTISER:
            yield from stored_integers.rows(self.checkpoint, self.origin, self.packing)
            return
        if self.rounded is not None and self.rounded.has(self.origin, *self._form):
            yield from self.rounded.rows(self.origin, *self._form)
            return
        with OpenFiles(self.checkpoint.folder) as files, workers() as (_, pool):
            for region in blocks(self.origin.shape, SLICE_BYTES // 4):
                start, _ = region[0]
                parts = torch.split(self.origin.read(region, files), max(1, WORKING_ELEMENTS // self.width))
                for part, quantised in zip(parts, pool.map(self._quantised_if_finite, parts), strict=True):
                    if quantised is None:
                        which = non_finite_message(self.origin, self.name, files)
                        raise CheckpointError(f"{self.checkpoint.where}: {which}; the checkpoint is damaged")
                    yield start, quantised
                    start += len(part)

    @property
    def _form(self) -> tuple[Grid, int]:
        return self.packing.grid, self.packing.block_size

    def _quantised_if_finite(self, rows: torch.Tensor) -> Quantised | None:
        """Rows [R, K] of any dtype, quantised; None if a weight is NaN or infinite."""
        rows = rows.to(torch.float32)
        return self.quantised(rows) if torch.isfinite(rows).all() else None

    def quantised(self, rows: torch.Tensor) -> Quantised:
        """Rows [R, K] quantised in blocks, without a text; the last block is padded with zeros."""
        size, count = self.packing.block_size, self.blocks_per_row
        if rows.shape[1] < count * size:
            rows = torch.nn.functional.pad(rows, (0, count * size - rows.shape[1]))
        return quantiser(self.packing.quantiser).quantise(rows.reshape(-1, count, size), self.packing.grid)

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


@contextmanager
def workers() -> Iterator[tuple[int, ThreadPoolExecutor]]:
    """Threads that quantise some rows each, and their number: that of torch's own threads.

    torch's threads would synchronise after every operation on a few rows, which takes longer than the computation on a
    busy machine.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield count, pool
    finally:
        torch.set_num_threads(count)


def in_parts(rows: Round, weights: torch.Tensor) -> Quantised:
    """All rows quantised, a part of them in each thread."""
    with workers() as (count, pool):
        found = list(pool.map(rows, weights.chunk(count)))
    return Quantised(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def restored(found: Quantised) -> torch.Tensor:
    """The dequantised values, float32 [R, M * B]."""
    return ((found.integers.float() - found.zeros.float().unsqueeze(-1)) * found.scales.unsqueeze(-1)).flatten(1)
