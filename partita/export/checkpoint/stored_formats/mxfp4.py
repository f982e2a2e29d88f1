"""MXFP4, as in gpt_oss experts: 4-bit floats (E2M1) with one power of 2 per 32 elements.

    X_blocks [E, N, K / 32, 16] uint8    two codes per byte, the first in the low bits
    X_scales [E, N, K / 32] uint8        exponents plus 127

    W[e, k, n] = VALUES[x] * 2^(scale - 127)        transposed for the model's experts

(transformers, integrations/mxfp4.py, convert_moe_packed_tensors; OCP Microscaling Formats 1.0, section 5.) E2M1 values
times 2 are integers from -12 to 12, so that the weight is also 8-bit integers in blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.export.checkpoint.stored_formats import BYTE, AffineWeight, StoredTensors, StoredWeight
from partita.export.weights import Quantised, unpack
from partita.export.weights.origins import Reader, Region, TensorInfo

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1 values times 2."""
BLOCK, BYTES = 32, 16
BIAS, MIDDLE = 127, 128
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class _Weight(AffineWeight):
    """An MXFP4 weight [E, K, N]."""

    data: TensorInfo
    scales: TensorInfo

    def parts(self, region: Region, files: Reader) -> Quantised:
        experts, (begin, end), rows = region
        low, high = begin // BLOCK, -(-end // BLOCK)
        data = files.read(self.data, (experts, rows, (low, high), (0, BYTES)))
        places = unpack(data.reshape(-1, BYTES), 4, BLOCK).reshape(*data.shape[:2], -1)
        integers = (torch.tensor(TWICE, dtype=torch.int16) + MIDDLE).to(torch.uint8)[places.long()]
        exponents = files.read(self.scales, (experts, rows, (low, high))).to(torch.int32) - BIAS - 1
        scales = torch.ldexp(torch.ones(exponents.shape), exponents).repeat_interleave(BLOCK, -1)
        inside = slice(begin - low * BLOCK, end - low * BLOCK)
        integers, scales = integers[..., inside].transpose(1, 2), scales[..., inside].transpose(1, 2)
        return Quantised(integers, scales, self.zero_points(files))


def read(sources: StoredTensors) -> list[StoredWeight]:
    """The weights of an MXFP4 checkpoint."""
    return [_weight(sources, stem) for stem in sources.stems(BLOCKS, BYTE)]


def _weight(sources: StoredTensors, stem: str) -> _Weight:
    data, scales = sources.take(stem + BLOCKS, BYTE), sources.take(stem + SCALES, BYTE)
    if len(data.shape) != 4 or data.shape[-1] != BYTES:
        raise sources.tensor_error(data.name, f"is {list(data.shape)}, not [experts, rows, blocks, {BYTES}]")
    sources.check_shape(scales, data.shape[:-1], by=data)
    experts, rows, count, _ = data.shape
    return _Weight(stem, (experts, count * BLOCK, rows), (data, scales), "bfloat16", 8, 1, BLOCK, data, scales)
