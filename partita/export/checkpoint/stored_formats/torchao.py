"""torchao in safetensors files: 8-bit integers or floats with a scale per row or group, and plain int4.

    X._weight_qdata [N, K] int8 or float8, X._weight_scale [N, G], X._weight_zero_point [N, G] int8 or absent

    W = scale * (data - zero point)

    X._weight_qdata [N, K / 2] int8     two signed integers per byte, the first in the low bits
    X._weight_scale, X._weight_zero_point [G, N]    floats

    W = data * scale + zero point, each step rounded to the dtype of the scales

(torchao, prototype/safetensors/safetensors_support.py; Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, Int4Tensor;
quantization/quant_primitives.py, _dequantize_affine_tinygemm.) The file header has the number of bits where it is less
than 8. Other 4-bit packings are not supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from partita.errors import CheckpointError
from partita.export.checkpoint.stored_formats import (
    BYTE,
    FLOAT,
    FLOAT8,
    SIGNED_BYTE,
    StoredTensors,
    StoredWeight,
)
from partita.export.checkpoint.stored_formats.compressed_tensors import of_integers
from partita.export.checkpoint.stored_formats.fp8 import scaled_weight
from partita.export.checkpoint.weight_files import first_line
from partita.export.weights import to_torch
from partita.export.weights.origins import Reader, Region, TensorInfo

DATA = "._weight_qdata"
BEFORE = "._weight_act_pre_scale"
"""A scale of the inputs of the weight."""
PLAIN = "Int4Tensor"
ADVICE = "export the unquantised checkpoint"
SIGNED = tuple(float(number) for number in (*range(8), *range(-8, 0)))
"""Values of the 4-bit codes."""


@dataclass(frozen=True)
class _PlainInt4(StoredWeight):
    """An int4 weight [N, K]. Its second tensor has the scales, the third the zero points, which are added."""

    group: int
    """Elements per scale along the last axis."""
    computed: torch.dtype
    """The dtype to which every step is rounded."""

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        rows, (begin, end) = region
        data, scales, zeros = self.stored_tensors
        first = begin // 2
        packed = files.read(data, (rows, (first, -(-end // 2)))).contiguous().view(torch.uint8)
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[
            :, begin - 2 * first : end - 2 * first
        ]
        numbers = torch.tensor(SIGNED)[codes.long()].to(self.computed)
        return (numbers * self._of_groups(scales, region, files) + self._of_groups(zeros, region, files)).float()

    def _of_groups(self, info: TensorInfo, region: Region, files: Reader) -> torch.Tensor:
        """The number of every element's group."""
        rows, (begin, end) = region
        low = begin // self.group
        found = files.read(info, ((low, -(-end // self.group)), rows)).T.to(self.computed)
        return found[:, torch.arange(begin, end) // self.group - low]


def read(sources: StoredTensors) -> list[StoredWeight | None]:
    """The weights of a torchao checkpoint."""
    weights: list[StoredWeight | None] = []
    declared = _declared(sources)
    fitting = set(sources.stems(DATA, f"{SIGNED_BYTE}|{FLOAT8}"))
    for stem in sources.stems(DATA):
        name, info = f"{stem}.weight", sources.tensors[stem + DATA]
        kind = declared.get(name, {})
        if stem + BEFORE in sources.tensors:
            raise sources.unsupported_error(f"with an activation scale ({stem}{BEFORE})", ADVICE)
        if _is_plain(sources, stem, kind):
            weights.append(_plain_int4(sources, stem, name))
            continue
        if stem not in fitting:
            raise sources.unsupported_error(
                f"in the packed layout of its kernels ({info.name} is {info.dtype})",
                f"only plain int4, 8-bit integers and 8-bit floats are supported; {ADVICE}",
            )
        data, scales = sources.take(stem + DATA), sources.take(f"{stem}._weight_scale", FLOAT)
        zeros = sources.optional(f"{stem}._weight_zero_point", SIGNED_BYTE)
        if data is None or scales is None:
            continue
        if data.dtype in ("I8", "torch.int8"):
            target = _section(_section(kind, "_data"), "target_dtype").get("_data")  # else 8 bits
            bits = re.fullmatch(r"int([1-8])", str(target))
            weights.append(of_integers(sources, name, data.shape, int(bits[1]) if bits else 8, data, scales, zeros))
        else:
            weights.append(scaled_weight(sources, data, scales, (1, data.shape[-1]), name))
    return weights


def _section(settings: Any, key: str) -> Mapping[str, Any]:
    found = settings.get(key) if isinstance(settings, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_plain(sources: StoredTensors, stem: str, kind: Mapping[str, Any]) -> bool:
    """Whether the packing is plain int4: by the header, or by float zero points where it names no type."""
    zeros = sources.tensors.get(f"{stem}._weight_zero_point")
    return kind.get("_type", PLAIN) == PLAIN and zeros is not None and bool(re.fullmatch(FLOAT, zeros.dtype))


def _plain_int4(sources: StoredTensors, stem: str, name: str) -> StoredWeight | None:
    """A weight of plain int4. Raises CheckpointError when the tensors do not match each other."""
    data, scale = sources.take(stem + DATA, f"{BYTE}|{SIGNED_BYTE}"), sources.take(f"{stem}._weight_scale", FLOAT)
    zero = sources.take(f"{stem}._weight_zero_point", FLOAT)
    if data is None or scale is None or zero is None:
        return None
    if len(data.shape) != 2:
        raise sources.tensor_error(data.name, f"is {list(data.shape)}, not a matrix")
    rows, width = data.shape[0], 2 * data.shape[1]
    groups = scale.shape[0] if scale.shape else 0
    if scale.shape != (groups, rows) or not groups or width % groups:
        raise sources.tensor_error(
            scale.name, f"is {list(scale.shape)}, which does not match {data.name} {list(data.shape)}"
        )
    if zero.shape != scale.shape:
        raise sources.tensor_error(zero.name, f"is {list(zero.shape)}, but {scale.name} is {list(scale.shape)}")
    kind = to_torch(scale.dtype)
    return _PlainInt4(name, (rows, width), (data, scale, zero), scale.dtype, width // groups, kind)


def _declared(sources: StoredTensors) -> dict[str, Mapping[str, Any]]:
    """Weight name -> the description in the file headers; empty without a readable one."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted({info.file for info in sources.tensors.values() if info.file.suffix == ".safetensors"}):
        try:
            with safe_open(str(path), framework="pt") as handle:
                metadata = handle.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({first_line(error)})") from error
        for name, text in metadata.items():
            try:
                kind = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(kind, Mapping):
                found[name] = kind
    return found
