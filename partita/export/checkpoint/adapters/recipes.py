"""Weights changed by an adapter, computed region by region in float32 when they are read.

LoRA (arXiv 2106.09685)   W + s B A                          A [r, K], B [N, r], W [N, K]
DoRA (arXiv 2402.09353)   m / |W + s B A| (W + s B A)        m [N]; |.| of each row
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.weights.origins import Region


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter, read whole and cached while the files are open."""

    folder: Path
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        return self.info.shape

    def read(self, files: OpenFiles) -> torch.Tensor:
        """The whole tensor, float32."""
        if self not in files.computed:
            region = tuple((0, size) for size in self.info.shape)
            with OpenFiles(self.folder) as own:
                files.computed[self] = own.read(self.info, region).to(torch.float32)
        return files.computed[self]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A weight plus the product of two low-rank matrices, with rows scaled by magnitudes for DoRA."""

    base: TensorInfo
    """[N, K], or [K, N] if `turned`."""
    down: AdapterTensor
    """A [r, K]."""
    up: AdapterTensor
    """B [N, r]."""
    scale: float
    turned: bool = False
    """The weight is stored as [K, N]: an embedding [V, H], or a Conv1D of GPT-2."""
    magnitude: AdapterTensor | None = None
    """m [N] of DoRA."""

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, float32."""
        if self.magnitude is None:
            return self._sum(region, files)
        if self not in files.computed:
            files.computed[self] = self._factors(files)
        (start, stop) = region[1 if self.turned else 0]
        factors = files.computed[self][start:stop]
        return self._sum(region, files) * (factors if self.turned else factors.unsqueeze(-1))

    def _sum(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """W + s B A in `region`."""
        (first, last), (begin, end) = reversed(region) if self.turned else region
        added = self.up.read(files)[first:last] @ self.down.read(files)[:, begin:end] * self.scale
        return files.read(self.base, region).to(torch.float32) + (added.T if self.turned else added)

    def _factors(self, files: OpenFiles) -> torch.Tensor:
        """m / |W + s B A| [N], computed a few rows at a time."""
        assert self.magnitude is not None
        squares = torch.zeros(self.up.shape[0])
        step = max(1, (1 << 22) // self.base.shape[1])
        for start in range(0, self.base.shape[0], step):
            rows = (start, min(start + step, self.base.shape[0]))
            part = self._sum((rows, (0, self.base.shape[1])), files).square()
            if self.turned:
                squares += part.sum(0)
            else:
                squares[rows[0] : rows[1]] = part.sum(1)
        return self.magnitude.read(files).reshape(-1) / squares.sqrt()


@dataclass(frozen=True, slots=True)
class Shifted:
    """A bias plus that of an adapter (lora_bias)."""

    base: TensorInfo
    bias: AdapterTensor
    scale: float

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, float32."""
        ((start, stop),) = region
        return files.read(self.base, region).to(torch.float32) + self.bias.read(files)[start:stop] * self.scale


@dataclass(frozen=True, slots=True)
class Replaced:
    """A parameter that the adapter replaces (modules_to_save)."""

    base: TensorInfo
    value: AdapterTensor

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, float32."""
        return self.value.read(files)[tuple(slice(start, stop) for start, stop in region)]


@dataclass(frozen=True, slots=True)
class Same:
    """A tensor under another name, for a tied weight of which the adapter changes only one use."""

    base: TensorInfo

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """The values in `region`, in the dtype of the checkpoint."""
        return files.read(self.base, region)
