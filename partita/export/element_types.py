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
    """torch's type of that name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def of_torch(dtype: torch.dtype) -> str:
    """The name of torch's type."""
    return str(dtype).removeprefix("torch.")


def to_ir(name: str) -> ir.DataType:
    """onnx_ir's type of that name."""
    return ir.DataType(dtypes.named(name).number)


def of_ir(dtype: ir.DataType) -> str:
    """The name of onnx_ir's type."""
    return dtypes.numbered(int(dtype)).name
