"""torchao in safetensors files: 8-bit integers or floats with a scale per row or group, and plain int4.

    X._weight_qdata [N, K] int8 or float8, X._weight_scale [N, G], X._weight_zero_point [N, G] int8 or absent

    W = scale * (data - zero point)

    X._weight_qdata [N, K / 2] int8     two signed integers per byte, the first in the low bits
    X._weight_scale, X._weight_zero_point [G, N]    floats

    W = data * scale + zero point, each step rounded to the dtype of the scales

(torchao, prototype/safetensors/safetensors_support.py; Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, Int4Tensor;
quantization/quant_primitives.py, _dequantize_affine_tinygemm.) Other 4-bit packings are not supported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from partita.export.checkpoint.stored_formats import BYTE, FLOAT, FLOAT8, SIGNED_BYTE, StoredTensors, StoredWeight
from partita.export.checkpoint.stored_formats.compressed_tensors import of_integers
from partita.export.checkpoint.stored_formats.fp8 import scaled_weight
from partita.export.weights import to_torch
from partita.export.weights.origins import Reader, Region, TensorInfo

DATA = "._weight_qdata"
BEFORE = "._weight_act_pre_scale"
"""A scale of the inputs of the weight."""
ADVICE = "only plain int4, 8-bit integers and 8-bit floats are supported; export the unquantised checkpoint"
SIGNED = tuple(float(number) for number in (*range(8), *range(-8, 0)))
"""Values of the 4-bit codes."""


@dataclass(frozen=True)
class _PlainInt4(StoredWeight):
    """An int4 weight [N, K]. Its second tensor has the scales, the third the zero points, which are added."""

    group: int
    """Elements per scale along the last axis."""

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        rows, (begin, end) = region
        data, scales, zeros = self.stored_tensors
        first = begin // 2
        packed = files.read(data, (rows, (first, -(-end // 2)))).contiguous().view(torch.uint8)
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        numbers = torch.tensor(SIGNED)[codes[:, begin - 2 * first : end - 2 * first].long()].to(to_torch(self.dtype))
        return (numbers * self._of_groups(scales, region, files) + self._of_groups(zeros, region, files)).float()

    def _of_groups(self, info: TensorInfo, region: Region, files: Reader) -> torch.Tensor:
        """The number of every element's group."""
        rows, (begin, end) = region
        low = begin // self.group
        found = files.read(info, ((low, -(-end // self.group)), rows)).T.to(to_torch(self.dtype))
        return found[:, torch.arange(begin, end) // self.group - low]


def read(sources: StoredTensors) -> list[StoredWeight]:
    """The weights of a torchao checkpoint."""
    weights: list[StoredWeight] = []
    for stem in sources.stems(DATA):
        name, info = f"{stem}.weight", sources.tensors[stem + DATA]
        if stem + BEFORE in sources.tensors:
            raise sources.unsupported_error(f"with an activation scale ({stem}{BEFORE})", ADVICE)
        zeros = sources.tensors.get(f"{stem}._weight_zero_point")
        if zeros is not None and re.fullmatch(FLOAT, zeros.dtype):
            weights.append(_plain_int4(sources, stem, name))
            continue
        if not re.fullmatch(f"{SIGNED_BYTE}|{FLOAT8}", info.dtype):
            raise sources.unsupported_error(
                f"in the packed layout of its kernels ({info.name} is {info.dtype})", ADVICE
            )
        data, scales = sources.take(stem + DATA), sources.take(f"{stem}._weight_scale", FLOAT)
        zeros = sources.optional(f"{stem}._weight_zero_point", SIGNED_BYTE)
        if re.fullmatch(SIGNED_BYTE, data.dtype):
            weights.append(of_integers(sources, name, data.shape, 8, data, scales, zeros))
        else:
            weights.append(scaled_weight(sources, data, scales, (1, data.shape[-1]), name))
    return weights


def _plain_int4(sources: StoredTensors, stem: str, name: str) -> StoredWeight:
    """A weight of plain int4. Raises CheckpointError when the tensors do not match each other."""
    data, scale = sources.take(stem + DATA, f"{BYTE}|{SIGNED_BYTE}"), sources.take(f"{stem}._weight_scale", FLOAT)
    zero = sources.take(f"{stem}._weight_zero_point", FLOAT)
    if len(data.shape) != 2:
        raise sources.tensor_error(data.name, f"is {list(data.shape)}, not a matrix")
    rows, width = data.shape[0], 2 * data.shape[1]
    groups = max(1, *scale.shape[:1])
    groups = groups if width % groups == 0 else 1
    sources.check_shape(scale, (groups, rows), by=data)
    sources.check_shape(zero, scale.shape, by=scale)
    return _PlainInt4(name, (rows, width), (data, scale, zero), scale.dtype, width // groups)
