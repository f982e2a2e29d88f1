"""ONNX translations of torch operators that its exporter lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from onnxscript import opset18 as op

NEWTON_STEPS = 4


def _erf_inv(x: Any) -> Any:
    """The inverse of the error function in float32.

    Winitzki's approximation ("A handy approximation for the error function and its inverse", 2008), then Newton's
    method.
    """
    two, four, half, one = (op.Constant(value_float=value) for value in (4.33074, 6.802721, 0.5, 1.0))
    log = op.Log(op.Sub(one, op.Mul(x, x)))
    first = op.Add(two, op.Mul(half, log))
    root = op.Sub(op.Sqrt(op.Sub(op.Mul(first, first), op.Mul(log, four))), first)
    y = op.Mul(op.Sign(x), op.Sqrt(root))
    slope = op.Constant(value_float=0.8862269)  # sqrt(pi) / 2
    for _ in range(NEWTON_STEPS):
        error = op.Sub(op.Erf(y), x)
        y = op.Sub(y, op.Mul(op.Mul(error, slope), op.Exp(op.Mul(y, y))))
    return y


TABLE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.prims.erf_inv.default: _erf_inv,
    torch.ops.aten.erfinv.default: _erf_inv,
}
"""The custom translation table of torch.onnx.export."""
