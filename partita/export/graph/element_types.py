"""Element types as torch and onnx_ir have them; the table of names, numbers and sizes is `partita.dtypes`."""

from __future__ import annotations

import onnx_ir as ir
import torch

from partita import dtypes

COMPUTING = ("float32", "float16", "bfloat16")
"""What a package computes in."""
CHECKPOINT = ("float64", *COMPUTING)
"""What weights of a checkpoint may be, to be cast on the way."""


def to_torch(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`; the names are those of `partita.dtypes`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def of_torch(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def to_ir(name: str) -> ir.DataType:
    """`float32` -> `ir.DataType.FLOAT`."""
    return ir.DataType(dtypes.named(name).number)


def of_ir(dtype: ir.DataType) -> str:
    """`ir.DataType.FLOAT` -> `float32`."""
    return dtypes.numbered(int(dtype)).name
