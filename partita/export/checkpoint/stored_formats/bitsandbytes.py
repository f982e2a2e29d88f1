"""bitsandbytes: 4-bit codes of a table (nf4, fp4), and 8-bit integers with a scale per row (LLM.int8).

    4 bits   X.weight [N * K / 2, 1] uint8         two codes per byte, the first in the high bits
             X.weight.absmax [blocks]              of blocks over the flattened weight; float32, or uint8:
             X.weight.nested_absmax, .nested_quant_map      absmax = map[absmax] * nested_absmax + offset
             X.weight.quant_map [16] float32       the table
             X.weight.quant_state.bitsandbytes__nf4 uint8   JSON: shape, block sizes, offset, dtype

             W = map[x] * absmax

    8 bits   X.weight [N, K] int8, X.SCB [N] float32
             X.weight_format uint8                 0: row-major; older files have tiles of GPU kernels

             W = (x * SCB) * (1 / 127)

(bitsandbytes, functional.py, dequantize_4bit, dequantize_blockwise and int8_vectorwise_dequant.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.export.checkpoint.stored_formats import (
    BYTE,
    FLOAT,
    SIGNED_BYTE,
    GroupedWeight,
    Integers,
    Parts,
    StoredTensors,
    StoredWeight,
)
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.weights.origins import Reader, Region, TensorInfo

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
LARGEST = 1 / 127
"""The final factor of LLM.int8."""


@dataclass(frozen=True)
class _Table(StoredWeight):
    """4-bit codes of a table."""

    block: int
    nested_blocks: int
    """Blocks per nested scale; 0: scales are stored as floats."""
    offset: float
    rounded: torch.dtype
    """The dtype of the library's output."""
    table: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether the tensors have the number of elements that the shape requires."""
        data, absmax, table, *others = self.stored_tensors
        elements = math.prod(self.shape)
        held, scales = -(-elements // 2), -(-elements // self.block)
        outer = [(-(-scales // self.nested_blocks),), (256,)] if self.nested_blocks else []
        return (
            data.shape in ((held, 1), (1, held), (held,))
            and absmax.shape == (scales,)
            and table.shape == (16,)
            and [each.shape for each in others] == outer
            and bool(re.fullmatch(BYTE if self.nested_blocks else FLOAT, absmax.dtype))
        )

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        numbers = torch.tensor(self.table)[self._codes(region, files).long()]
        return (numbers * self._scales(region, files)).to(self.rounded).float()

    def _codes(self, region: Region, files: Reader) -> torch.Tensor:
        """Indices into the table."""
        width, data = self.shape[-1], self.stored_tensors[0]
        (first, last), (begin, end) = region
        start, stop = first * width, last * width
        low, high = start // 2, -(-stop // 2)
        flat: Region = ((low, high), (0, 1)) if len(data.shape) > 1 else ((low, high),)
        if data.shape[0] == 1 and len(data.shape) > 1:
            flat = ((0, 1), (low, high))
        found = files.read(data, flat).reshape(-1)
        places = torch.stack([found >> 4, found & 15], -1).reshape(-1)[start - 2 * low : stop - 2 * low]
        return places.reshape(last - first, width)[:, begin:end]

    def _scales(self, region: Region, files: Reader) -> torch.Tensor:
        """The scale of every element."""
        width = self.shape[-1]
        _, absmax, _, *others = self.stored_tensors
        (first, last), (begin, end) = region
        low, high = first * width // self.block, -(-last * width // self.block)
        scales = files.read(absmax, ((low, high),))
        if self.nested_blocks:
            outer, table = (files.read(each, ((0, each.shape[0]),)).float() for each in others[:2])
            scales = table[scales.long()] * outer[torch.arange(low, high) // self.nested_blocks] + self.offset
        places = torch.arange(first, last)[:, None] * width + torch.arange(begin, end)
        return scales.float()[places // self.block - low]


@dataclass(frozen=True)
class _Rows(GroupedWeight):
    """8-bit integers [N, K] with the largest magnitude of each row."""

    def parts(self, region: Region, files: Reader) -> Parts:
        found = super().parts(region, files)
        return found._replace(scales=found.scales * LARGEST)

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        # the library's order of multiplications, which rounds differently from integer times scale
        integers, largest, zeros = super().parts(region, files)
        return (integers.float() - zeros.float()) * largest * LARGEST


def read(sources: StoredTensors) -> list[StoredWeight | None]:
    """The weights of a bitsandbytes checkpoint."""
    weights = [_table(sources, f"{stem}.weight") for stem in sources.stems(".weight.absmax")]
    weights += [_rows(sources, stem) for stem in sources.stems(".SCB")]
    for stem in sources.stems(".weight_format"):
        _check_layout(sources, f"{stem}.weight_format")
    return weights


def _check_layout(sources: StoredTensors, name: str) -> None:
    """Raise UnsupportedModelError for integers that are not row-major."""
    info = sources.take(name)
    assert info is not None
    with OpenFiles() as files:
        found = files.read(info, tuple((0, size) for size in info.shape))
    if bool(found.any()):
        raise sources.unsupported_error(
            f"with integers in the tile layout of its kernels ({name} is {int(found.max())}; 1 is col32, "
            "2 col_turing, 3 col_ampere)",
            "only row-major integers are supported, export the unquantised checkpoint",
        )


def _rows(sources: StoredTensors, stem: str) -> StoredWeight | None:
    data, largest = sources.take(f"{stem}.weight", SIGNED_BYTE), sources.take(f"{stem}.SCB", FLOAT)
    if data is None or largest is None:
        return None
    if len(data.shape) != 2 or largest.shape != data.shape[:1]:
        raise sources.tensor_error(largest.name, f"is {list(largest.shape)}, but {data.name} is {list(data.shape)}")
    stored = Integers(data, 8, offset=128)
    return _Rows(data.name, data.shape, (data, largest), "float16", 8, 1, data.shape[1], stored, largest, None)


def _table(sources: StoredTensors, name: str) -> StoredWeight | None:
    stored = sources.tensors.get(name)
    if stored is not None and re.fullmatch(FLOAT, stored.dtype):
        raise sources.unsupported_error(
            f"in words of {stored.dtype} (bnb_4bit_quant_storage; {name})",
            "only uint8 is supported: quantise with uint8, or export the unquantised checkpoint",
        )
    data, absmax = sources.take(name, BYTE), sources.take(f"{name}.absmax")
    table = sources.take(f"{name}.quant_map", FLOAT)
    state = next((f"{name}{STATE}{kind}" for kind in KINDS if f"{name}{STATE}{kind}" in sources.tensors), None)
    state_tensor = sources.take(state or f"{name}{STATE}nf4", BYTE)
    if data is None or absmax is None or table is None or state_tensor is None:
        return None
    settings = _state(sources, state_tensor)
    nested = _number(settings, "nested_blocksize")
    others = [sources.take(f"{name}.{each}", FLOAT) for each in ("nested_absmax", "nested_quant_map") if nested]
    if any(each is None for each in others):
        return None
    shape, block, offset = settings.get("shape"), _number(settings, "blocksize"), settings.get("nested_offset") or 0.0
    rounded = getattr(torch, str(settings.get("dtype")), None)
    is_shape = isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)
    if not is_shape or not block or not isinstance(rounded, torch.dtype) or not isinstance(offset, int | float):
        raise sources.tensor_error(state_tensor.name, f"has shape {str(shape)[:40]} and blocks of {str(block)[:20]}")
    assert isinstance(shape, list)
    tensors = (data, absmax, table, *(each for each in others if each is not None))
    with OpenFiles() as files:  # the table, as far as it is stored as a vector
        stored_table = (
            files.read(table, ((0, 16),)) if len(table.shape) == 1 <= table.shape[0] // 16 else torch.empty(0)
        )
    numbers = tuple(stored_table.float().tolist())
    dtype = str(settings["dtype"])
    found = _Table(name, (shape[0], shape[1]), tensors, dtype, block, nested, float(offset), rounded, numbers)
    if not found.fits:
        shapes = ", ".join(str(list(each.shape)) for each in tensors)
        raise sources.tensor_error(
            name, f"is stored as {shapes}, but {state_tensor.name} has {shape} in blocks of {block}"
        )
    return found


def _number(settings: Mapping[str, Any], key: str) -> int:
    """A positive integer setting; 0 where it is missing or invalid."""
    value = settings.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _state(sources: StoredTensors, info: TensorInfo) -> dict[str, Any]:
    """The JSON in a tensor. Raises CheckpointError where it is invalid."""
    with OpenFiles() as files:
        data = files.read(info, tuple((0, size) for size in info.shape))
    try:
        found = json.loads(bytes(data.reshape(-1).tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise sources.tensor_error(info.name, "is not valid bitsandbytes JSON") from error
    if not isinstance(found, dict):
        raise sources.tensor_error(info.name, "is not valid bitsandbytes JSON")
    return found
