"""Errors of tensors, relative to the reference's usual magnitudes, and their tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx

from partita.dtypes import EXACT, PRECISIONS
from partita.runtime.contents.modules import QUANTISED
from partita.runtime.verify.comparison import OUTLIERS, RULED_OUT, difference

ROUNDED_TO_INT8 = 4
"""`accuracy_level` of a MatMulNBits that rounds its input to 8 bits."""
ROUNDED_IF_FUSED = {"DequantizeLinear", "MatMul"}
"""ONNX Runtime may run both as a MatMulNBits that rounds its input to 8 bits."""
ROUNDING_STEPS = 16
"""Error that rounded weights may cause, in steps of their numbers. Layers of random weights in int4 have 4 to 8."""
USUAL_RANGE = 99.0
"""Percentile of magnitudes. A few activations of many models are a hundred times larger than all others."""


def deviation(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Largest error relative to the reference's usual magnitudes, or to an element's own if that is larger.

    Infinite for another shape, and for NaN or infinity on one side only. Integers count as equal or 1.0; 8-bit integers
    may differ by one step.
    """
    if ours.shape != theirs.shape:
        return math.inf
    if theirs.dtype.kind != "f":
        steps = np.abs(ours.astype(np.int64) - theirs.astype(np.int64)).max(initial=0) if ours.dtype.kind in "iu" else 2
        equal = np.array_equal(ours, theirs) or (ours.dtype.itemsize == 1 and ours.dtype.kind in "iu" and steps <= 1)
        return 0.0 if equal else 1.0
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    unlike = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if not unlike.any():
        return 0.0
    masked = b < RULED_OUT
    if not np.isfinite(a[unlike & ~masked]).all() or not np.isfinite(b[unlike & ~masked]).all():
        return math.inf
    numbers = np.isfinite(b)
    there = np.abs(b[numbers & (b >= RULED_OUT)])
    usual = float(np.percentile(there, USUAL_RANGE)) if there.size else 0.0
    most = float(there.max(initial=0.0))
    scale = min(OUTLIERS * usual, most) or most or 1.0
    return difference(a[numbers].astype(np.float32), b[numbers].astype(np.float32), scale) / scale


def tolerance_of(nodes: Sequence[onnx.NodeProto], *, half: bool, weight_bits: int | None) -> float:
    """The tolerance of the least precise node: quantised weights, 16-bit floats (`half`), or 32-bit floats.

    `weight_bits`: bits of weights that are not rounded on the reference, for nodes without an attribute `bits`; errors
    then include their rounding.
    """
    least = PRECISIONS["fp16"].tolerance if half else EXACT.tolerance
    if weight_bits is None:
        rounds = {node.op_type for node in nodes} >= ROUNDED_IF_FUSED or any(map(_rounds_input, nodes))
        return max(least, PRECISIONS["int4"].tolerance) if rounds else least
    bits = [_attribute(node, "bits") or weight_bits for node in nodes if node.op_type in QUANTISED]
    return max(least, PRECISIONS["int4"].tolerance, ROUNDING_STEPS * 0.5 ** min(bits)) if bits else least


def _rounds_input(node: onnx.NodeProto) -> bool:
    """Whether an operator rounds its input to 8 bits."""
    if node.op_type == "MatMulNBits":
        return _attribute(node, "accuracy_level") == ROUNDED_TO_INT8
    return node.op_type in QUANTISED and node.op_type not in ("DequantizeLinear", "GatherBlockQuantized")


def _attribute(node: onnx.NodeProto, name: str) -> int:
    """An integer attribute; 0 without it."""
    return next((entry.i for entry in node.attribute if entry.name == name), 0)


def finite(error: float | None) -> float | None:
    """The error for a record; None if it is infinite or not measured."""
    return error if error is not None and math.isfinite(error) else None


def largest(arrays: Iterable[npt.NDArray[Any]]) -> float | None:
    """Largest finite magnitude of the float arrays; None without one. Masks are left out."""
    found = [
        float(np.abs(kept).max())
        for array in arrays
        if array.dtype.kind == "f"
        if (kept := (wide := array.astype(np.float64))[np.isfinite(wide) & (wide > RULED_OUT)]).size
    ]
    return max(found, default=None)


def bad_numbers(
    ours: npt.NDArray[Any], theirs: npt.NDArray[Any], inputs: Iterable[npt.NDArray[Any]]
) -> tuple[Literal["NaN", "infinity"], tuple[float, float] | None] | None:
    """NaN or infinity where the reference has a number, with the range of the finite inputs; None without any."""
    if ours.dtype.kind != "f" or ours.shape != theirs.shape:
        return None
    wrong = ~np.isfinite(ours) & np.isfinite(theirs)
    if not wrong.any():
        return None
    numbers = [array[np.isfinite(array)] for array in inputs if array.dtype.kind == "f"]
    ends = [float(end) for array in numbers if array.size for end in (array.min(), array.max())]
    return "NaN" if np.isnan(ours[wrong]).any() else "infinity", (min(ends), max(ends)) if ends else None
