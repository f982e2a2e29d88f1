"""Lazy weights, from checkpoint files to external data. Here: element types, and quantised numbers."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
import torch

from partita import dtypes

COMPUTING = ("float32", "float16", "bfloat16")
"""Activation dtypes of a package."""
CHECKPOINT = ("float64", *COMPUTING)
"""Supported float dtypes of checkpoint weights."""


def to_torch(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`; names of `partita.dtypes`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def of_torch(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def to_ir(name: str) -> ir.DataType:
    """`float32` -> `ir.DataType.FLOAT`."""
    return ir.DataType(dtypes.dtype_named(name).number)


def of_ir(dtype: ir.DataType) -> str:
    """`ir.DataType.FLOAT` -> `float32`."""
    return dtypes.dtype_numbered(int(dtype)).name


class Quantised(NamedTuple):
    """Numbers s * (q - z): of R rows of M blocks of B each, or of the elements of a region."""

    integers: torch.Tensor
    """q: [R, M, B], or of the shape of the region; uint8."""
    scales: torch.Tensor
    """s: [R, M], or of a shape that broadcasts to that of the region; float32, may be negative."""
    zeros: torch.Tensor
    """z: likewise; uint8."""


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [R, C] uint8 -> bytes [R, ceil(C * bits / 8)]; the first of two has the low bits."""
    if bits == 8:
        return integers.contiguous()
    if integers.shape[1] % 2:
        integers = torch.nn.functional.pad(integers, (0, 1))
    return integers[:, 0::2] | (integers[:, 1::2] << 4)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Bytes [R, C] uint8 -> the first `count` integers of each row."""
    if bits == 8:
        return packed[:, :count]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :count]
