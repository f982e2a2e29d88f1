"""Small integers in groups, each with a scale and a zero that may be no integer: what HQQ, quanto and torchao store.

    W = (q - zero) * scale    or    q * scale - zero, each step rounded to the type that the format computes in

A group is numbers that follow one another, row after row, or, where it is a column of the table of groups, numbers that
are as far apart as there are groups.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch

from partita.export.element_types import of_torch
from partita.export.origins import Region
from partita.export.stored_formats.base import CodedWeight, Coding, Zeros
from partita.export.weight_files import OpenFiles, TensorInfo

WIDE = torch.float32


@dataclass(frozen=True)
class GroupedWeight(CodedWeight):
    """[N, K]. The second of its tensors has the scales, the third the zeros: one for each group, of any shape."""

    group: int
    bits: int
    computed: torch.dtype
    """What every step is rounded to."""
    form: Zeros
    in_rows: bool
    """A group is numbers that follow one another."""

    @property
    def table(self) -> tuple[float, ...]:
        """What the integers stand for, where it is not themselves."""
        return ()

    @abstractmethod
    def integers(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """What is stored of the numbers in `region`, none of it below 0, uint8. Raises CheckpointError."""

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """Every step in the type that the format computes in."""
        integers = self.integers(region, files)
        numbers = (torch.tensor(self.table)[integers.long()] if self.table else integers).to(self.computed)
        scales, zeros = (each.to(self.computed) for each in (self.scales(region, files), self.zeros(region, files)))
        return ((numbers - zeros) * scales if self.form == "before" else numbers * scales - zeros).float()

    @property
    def coding(self) -> Coding | None:
        """Integers of 4 bits, or of 8. A group may have several rows, and no row parts of several groups."""
        width = self.shape[-1]
        block = self.group if width % self.group == 0 else width if self.group % width == 0 else 0
        if not block or not self.in_rows:
            return None
        rounded = "" if self.computed == WIDE else of_torch(self.computed)
        return Coding("uint4" if self.bits <= 4 else "uint8", block, self.table, rounded, self.form)

    def codes(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The integers."""
        return self.integers(region, files)

    def scales(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """Those of every number."""
        return self._of_groups(self.tensors[1], region, files)

    def zeros(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """Those of every number."""
        return self._of_groups(self.tensors[2], region, files)

    def _of_groups(self, info: TensorInfo, region: Region, files: OpenFiles) -> torch.Tensor:
        """What `info` has for the group of every number in `region`, rounded as it is computed with, float32."""
        width = self.shape[1]
        (first, last), (begin, end) = region
        places = torch.arange(first, last)[:, None] * width + torch.arange(begin, end)
        count = math.prod(self.shape) // self.group
        low, high = (first * width // self.group, -(-last * width // self.group)) if self.in_rows else (0, count)
        along = max(range(len(info.shape)), key=lambda axis: info.shape[axis])
        here = tuple((low, high) if axis == along else (0, size) for axis, size in enumerate(info.shape))
        found = files.read(info, here).reshape(-1).to(self.computed).float()
        return found[places // self.group - low if self.in_rows else places % count]
