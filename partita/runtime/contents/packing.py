"""Operators that read weights which are stored in fewer bits than they are computed with, as data.

Inputs and attributes are those of ONNX's and ONNX Runtime's operator documents (onnx/docs/Operators.md,
onnxruntime/docs/ContribOperators.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita.dtypes import bits_of


@dataclass(frozen=True, slots=True)
class Packed:
    """One weight of an operator: which input holds its integers, and which belong to it."""

    weight: int
    scales: int
    zero_points: int | None = None


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How an operator reads packed weights."""

    weights: tuple[Packed, ...]
    bits: str = ""
    """Attribute that says how many bits a weight has; empty where the element type does."""
    default_bits: int | None = None
    """Without that attribute; None: the element type says it."""
    block: str = ""
    """Attribute with the number of weights that share a scale; empty where a row, column or tensor does."""
    default_block: int = 0
    kinds: tuple[str, ...] = ()
    """Names of what is stored by the attribute `quant_type`, where it is no integer."""


def _simple(weight: int, scales: int, zero_points: int | None) -> Unpacking:
    return Unpacking((Packed(weight, scales, zero_points),))


UNPACKING: Mapping[str, Unpacking] = {
    "MatMulNBits": Unpacking((Packed(1, 2, 3),), "bits", 4, "block_size"),
    "MatMulBnb4": Unpacking((Packed(1, 2),), "", 4, "block_size", kinds=("fp4", "nf4")),
    "GatherBlockQuantized": Unpacking((Packed(0, 2, 3),), "bits", 4, "block_size", 128),
    "QMoE": Unpacking((Packed(2, 3, 11), Packed(5, 6, 12), Packed(8, 9, 13)), "expert_weight_bits", 4, "block_size"),
    "DequantizeLinear": Unpacking((Packed(0, 1, 2),), block="block_size"),
    "MatMulIntegerToFloat": _simple(1, 3, 5),
    "DynamicQuantizeMatMul": _simple(1, 2, 3),
    "MatMulInteger": _simple(1, -1, 3),
    "ConvInteger": _simple(1, -1, 3),
    "QLinearMatMul": _simple(3, 4, 5),
    "QLinearConv": _simple(3, 4, 5),
    "QGemm": _simple(3, 4, 5),
    "QAttention": _simple(1, 4, 7),
}
"""By operator; -1: the scale is no input of it."""


def precision_of(unpacking: Unpacking, attributes: Mapping[str, int], dtype: str) -> str:
    """The name of what is stored: int4, nf4 …; `dtype` is that of the tensor that holds it."""
    if unpacking.kinds:
        kind = attributes.get("quant_type", 0)
        return unpacking.kinds[kind] if 0 <= kind < len(unpacking.kinds) else f"bnb type {kind}"
    own = bits_of(dtype)
    if not dtype.removeprefix("u").startswith("int"):
        return dtype  # eight or four bits of float
    bits = attributes.get(unpacking.bits, unpacking.default_bits) if unpacking.bits else None
    return f"int{own if bits is None or (own or 8) < 8 else bits}"
