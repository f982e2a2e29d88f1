"""Tracing of modelling code to an ONNX graph. Here: ONNX operators where torch's translation is unsuitable.

A MatMul or Reshape of torch may specialise a symbolic size when it checks strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Form = Literal["contrib", "standard"]
"""Operators of ONNX Runtime where they exist, or standard ones only."""
DOMAINS: dict[Form, tuple[tuple[str, int], ...]] = {"contrib": (("com.microsoft", 1),), "standard": ()}
"""Form -> contrib domains of its operators, with versions."""
CONTRIB = frozenset({"MoE", "LinearAttention"})
"""The operators of the form `contrib`."""
DOMAIN = "partita"
"""The domain of placeholders. A graph in which passes leave some is traced again without these operators."""
RMS_NORM = "RMSNorm"
"""Placeholder for x / sqrt(mean(x * x) + epsilon) * (weight + offset), over the last axis; without a weight: * 1."""
ROTATION = "Rotation"
"""Placeholder for the rotary embedding of x [B, H, S, D] by cosines and sines [B, S, R], in several
equal pairs for tokens with several positions. `first` and `second` are the columns of the numbers of each pair."""
PLACEHOLDERS = frozenset({RMS_NORM, ROTATION})


def pad_last_axis(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor with its last axis padded with zeros to `width`."""
    import torch

    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """MatMul of [..., M, K] and [..., K, N] that does not specialise symbolic sizes."""
    import torch.onnx.ops as onnx_ops

    outer = left.shape[:-2] if left.dim() >= right.dim() else right.shape[:-2]
    shape = (*outer, left.shape[-2], right.shape[-1])
    return onnx_ops.symbolic("onnx::MatMul", (left, right), dtype=left.dtype, shape=shape, version=13)


def reshape(tensor: torch.Tensor, sizes: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape to `sizes`, of which one may be -1; `shape`: the resulting shape."""
    import torch
    import torch.onnx.ops as onnx_ops

    wanted = torch.tensor(sizes, dtype=torch.int64)
    return onnx_ops.symbolic("onnx::Reshape", (tensor, wanted), dtype=tensor.dtype, shape=shape, version=14)
