"""Operators of ONNX that are written as such in a trace, because torch's own come out as something worse.

A MatMul or Reshape of torch may fix a symbolic size when it looks at strides; an index of int32 becomes a GatherND,
which takes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Form = Literal["contrib", "standard"]
"""Operators of ONNX Runtime's own where they serve, or standard ones only."""
DOMAINS: dict[Form, tuple[tuple[str, int], ...]] = {"contrib": (("com.microsoft", 1),), "standard": ()}
"""Domains of the operators of a form, besides ONNX's own, and their versions."""
CONTRIB = frozenset({"MoE", "LinearAttention"})
"""The operators of the form `contrib`."""


def padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor with zeros behind its last axis, up to `width`: products with them add nothing."""
    import torch

    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `table`. torch's own becomes a GatherND, which takes no int32 index."""
    import torch.onnx.ops as onnx_ops

    shape = (*index.shape, *table.shape[1:])
    return onnx_ops.symbolic("onnx::Gather", (table, index), {"axis": 0}, dtype=table.dtype, shape=shape, version=13)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """MatMul of [..., M, K] and [..., K, N]. torch's own may fix a symbolic size when it looks at strides."""
    import torch.onnx.ops as onnx_ops

    outer = left.shape[:-2] if left.dim() >= right.dim() else right.shape[:-2]
    shape = (*outer, left.shape[-2], right.shape[-1])
    return onnx_ops.symbolic("onnx::MatMul", (left, right), dtype=left.dtype, shape=shape, version=13)


def reshaped(tensor: torch.Tensor, sizes: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape to `sizes`, of which one may be -1; `shape` says what comes out."""
    import torch
    import torch.onnx.ops as onnx_ops

    wanted = torch.tensor(sizes, dtype=torch.int64)
    return onnx_ops.symbolic("onnx::Reshape", (tensor, wanted), dtype=tensor.dtype, shape=shape, version=14)
