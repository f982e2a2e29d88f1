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

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError

from partita.export.checkpoint.stored_formats import (
    BYTE,
    FLOAT,
    SIGNED_BYTE,
    GroupedWeight,
    Integers,
    StoredTensors,
    StoredWeight,
)
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.weights import Quantised, to_torch
from partita.export.weights.origins import Reader, Region

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
LARGEST = 1 / 127
"""The final factor of LLM.int8."""


class _State(BaseModel, strict=True, frozen=True):
    """The JSON in a file that describes a 4-bit weight."""

    shape: tuple[PositiveInt, PositiveInt]
    blocksize: PositiveInt
    dtype: Literal["float16", "bfloat16", "float32"]
    """The dtype of the library's output."""
    nested_blocksize: NonNegativeInt = 0
    """Blocks per nested scale; 0: scales are stored as floats."""
    nested_offset: FiniteFloat = 0.0


@dataclass(frozen=True)
class _Table(StoredWeight):
    """4-bit codes of a table."""

    state: _State
    table: tuple[float, ...]

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        numbers = torch.tensor(self.table)[self._codes(region, files).long()]
        return (numbers * self._scales(region, files)).to(to_torch(self.dtype)).float()

    def _codes(self, region: Region, files: Reader) -> torch.Tensor:
        """Indices into the table."""
        width, data = self.shape[-1], self.stored_tensors[0]
        (first, last), (begin, end) = region
        start, stop = first * width, last * width
        low, high = start // 2, -(-stop // 2)
        found = files.read(data, tuple((0, 1) if size == 1 else (low, high) for size in data.shape)).reshape(-1)
        places = torch.stack([found >> 4, found & 15], -1).reshape(-1)[start - 2 * low : stop - 2 * low]
        return places.reshape(last - first, width)[:, begin:end]

    def _scales(self, region: Region, files: Reader) -> torch.Tensor:
        """The scale of every element."""
        width, block = self.shape[-1], self.state.blocksize
        _, absmax, _, *nested = self.stored_tensors
        (first, last), (begin, end) = region
        low, high = first * width // block, -(-last * width // block)
        scales = files.read(absmax, ((low, high),))
        if nested:
            outer, table = (each.read_all(files).float() for each in nested)
            places = torch.arange(low, high) // self.state.nested_blocksize
            scales = table[scales.long()] * outer[places] + self.state.nested_offset
        places = torch.arange(first, last)[:, None] * width + torch.arange(begin, end)
        return scales.float()[places // block - low]


@dataclass(frozen=True)
class _Rows(GroupedWeight):
    """8-bit integers [N, K] with the largest magnitude of each row."""

    def parts(self, region: Region, files: Reader) -> Quantised:
        found = super().parts(region, files)
        return found._replace(scales=found.scales * LARGEST)

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        # the library's order of multiplications, which rounds differently from integer times scale
        integers, largest, zeros = super().parts(region, files)
        return (integers.float() - zeros.float()) * largest * LARGEST


def read(sources: StoredTensors) -> list[StoredWeight]:
    """The weights of a bitsandbytes checkpoint."""
    weights = [_table(sources, f"{stem}.weight") for stem in sources.stems(".weight.absmax")]
    weights += [_rows(sources, stem) for stem in sources.stems(".SCB")]
    for info in [sources.take(f"{stem}.weight_format") for stem in sources.stems(".weight_format")]:
        with OpenFiles() as files:
            found = info.read_all(files)
        if bool(found.any()):
            raise sources.unsupported_error(
                f"with integers in the tile layout of its kernels ({info.name} is {int(found.max())})",
                "only row-major integers are supported, export the unquantised checkpoint",
            )
    return weights


def _rows(sources: StoredTensors, stem: str) -> StoredWeight:
    data, largest = sources.take(f"{stem}.weight", SIGNED_BYTE), sources.take(f"{stem}.SCB", FLOAT)
    sources.check_shape(largest, data.shape[:1] if len(data.shape) == 2 else (), by=data)
    stored = Integers(data, 8, offset=128)
    return _Rows(data.name, data.shape, (data, largest), "float16", 8, 1, data.shape[1], stored, largest, None)


def _table(sources: StoredTensors, name: str) -> StoredWeight:
    stored_state = sources.take(
        next((name + end for end in STATES if name + end in sources.tensors), name + STATES[0]), BYTE
    )
    try:
        with OpenFiles() as files:
            state = _State.model_validate_json(bytes(stored_state.read_all(files).reshape(-1).tolist()))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the text"
        raise sources.tensor_error(stored_state.name, f"is not valid bitsandbytes JSON ({where})") from error
    elements = state.shape[0] * state.shape[1]
    held, blocks = -(-elements // 2), -(-elements // state.blocksize)
    parts: list[tuple[str, str, tuple[tuple[int, ...], ...]]] = [(name, BYTE, ((held, 1), (1, held), (held,)))]
    parts += [(f"{name}.absmax", BYTE if state.nested_blocksize else FLOAT, ((blocks,),))]
    parts += [(f"{name}.quant_map", FLOAT, ((16,),))]
    if state.nested_blocksize:
        parts += [(f"{name}.nested_absmax", FLOAT, ((-(-blocks // state.nested_blocksize),),))]
        parts += [(f"{name}.nested_quant_map", FLOAT, ((256,),))]
    tensors = []
    for part, kind, shapes in parts:
        tensors.append(sources.take(part, kind))
        sources.check_shape(tensors[-1], *shapes, by=stored_state, detail=f"of {list(state.shape)}")
    with OpenFiles() as files:
        table = tuple(tensors[2].read_all(files).float().tolist())
    return _Table(name, state.shape, tuple(tensors), state.dtype, state, table)
