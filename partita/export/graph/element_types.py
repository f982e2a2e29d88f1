"""Conversions of element types between torch and onnx_ir, by the names of `partita.dtypes`."""

from __future__ import annotations

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
    return ir.DataType(dtypes.named(name).number)


def of_ir(dtype: ir.DataType) -> str:
    """`ir.DataType.FLOAT` -> `float32`."""
    return dtypes.numbered(int(dtype)).name
