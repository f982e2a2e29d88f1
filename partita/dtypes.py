"""Element types of tensors: names, numbers and sizes. Imports no other module of Partita.

Names are numpy's (float32); numbers and names in capitals are those of onnx.TensorProto.DataType.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["float", "integer", "complex", "other"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type with its names in ONNX, numpy and safetensors."""

    name: str
    """Name in numpy, or in ml_dtypes for types that numpy lacks: float32, bfloat16."""
    number: int
    """Value in onnx.TensorProto.DataType."""
    onnx_name: str
    """Name in onnx.TensorProto.DataType: FLOAT. ONNX Runtime prints it in lower case."""
    bits: int | None
    """Bits of one element; None for strings."""
    kind: Kind
    safetensors: str | None = None
    """Name in the header of a safetensors file; None if the format lacks the type."""

    @property
    def upper_half(self) -> bool:
        """Whether it is stored as the upper 16 bits of a float32 in an integer, which numpy cannot convert."""
        return self.name == "bfloat16"

    @property
    def storage(self) -> str | None:
        """numpy type of the same size that stores it; None if there is none."""
        return "uint16" if self.upper_half else self.name if self.bits in (8, 16, 32, 64) and self.number < 17 else None


_ROWS: tuple[tuple[str, int, str, int | None, Kind, str | None], ...] = (
    ("float32", 1, "FLOAT", 32, "float", "F32"),
    ("uint8", 2, "UINT8", 8, "integer", "U8"),
    ("int8", 3, "INT8", 8, "integer", "I8"),
    ("uint16", 4, "UINT16", 16, "integer", "U16"),
    ("int16", 5, "INT16", 16, "integer", "I16"),
    ("int32", 6, "INT32", 32, "integer", "I32"),
    ("int64", 7, "INT64", 64, "integer", "I64"),
    ("string", 8, "STRING", None, "other", None),
    ("bool", 9, "BOOL", 8, "other", "BOOL"),
    ("float16", 10, "FLOAT16", 16, "float", "F16"),
    ("float64", 11, "DOUBLE", 64, "float", "F64"),
    ("uint32", 12, "UINT32", 32, "integer", "U32"),
    ("uint64", 13, "UINT64", 64, "integer", "U64"),
    ("complex64", 14, "COMPLEX64", 64, "complex", "C64"),
    ("complex128", 15, "COMPLEX128", 128, "complex", None),
    ("bfloat16", 16, "BFLOAT16", 16, "float", "BF16"),
    ("float8e4m3fn", 17, "FLOAT8E4M3FN", 8, "float", "F8_E4M3"),
    ("float8e4m3fnuz", 18, "FLOAT8E4M3FNUZ", 8, "float", None),
    ("float8e5m2", 19, "FLOAT8E5M2", 8, "float", "F8_E5M2"),
    ("float8e5m2fnuz", 20, "FLOAT8E5M2FNUZ", 8, "float", None),
    ("uint4", 21, "UINT4", 4, "integer", None),
    ("int4", 22, "INT4", 4, "integer", None),
    ("float4e2m1", 23, "FLOAT4E2M1", 4, "float", "F4"),
    ("float8e8m0", 24, "FLOAT8E8M0", 8, "float", "F8_E8M0"),
    ("uint2", 25, "UINT2", 2, "integer", None),
    ("int2", 26, "INT2", 2, "integer", None),
    ("float6e2m3", 27, "FLOAT6E2M3", 6, "float", None),
    ("float6e3m2", 28, "FLOAT6E3M2", 6, "float", None),
)
ALL = tuple(ElementType(*row) for row in _ROWS)
"""Every element type of ONNX, in the order of its number."""

_BY_NUMBER = {entry.number: entry for entry in ALL}
_BY_NAME = {
    **{entry.onnx_name.lower(): entry for entry in ALL},  # float and double, ONNX Runtime's names
    **{entry.name: entry for entry in ALL},
}


def find(name: str) -> ElementType | None:
    """The type with a name of numpy or ONNX Runtime (float, double); None if there is none."""
    return _BY_NAME.get(name)


def dtype_named(name: str) -> ElementType:
    """As `find`; raises ValueError if there is none."""
    found = find(name)
    if found is None:
        raise ValueError(f"{name!r} is not an element type")
    return found


def usual(name: str) -> str:
    """numpy's name of a type that ONNX Runtime names differently (float, double); an unknown name is unchanged."""
    found = find(name)
    return name if found is None else found.name


def is_float(name: str) -> bool:
    """Whether `name` is a floating-point type."""
    found = find(name)
    return found is not None and found.kind == "float"


def bits_of(name: str) -> int | None:
    """Bits of one element; None for strings and unknown names."""
    found = find(name)
    return None if found is None else found.bits


def dtype_numbered(number: int) -> ElementType:
    """The type with a number of onnx.TensorProto.DataType. Raises ValueError if there is none."""
    found = _BY_NUMBER.get(number)
    if found is None:
        raise ValueError(f"{number} is not an element type of ONNX")
    return found


def name_of(number: int) -> str:
    """The name of the type with a number of onnx.TensorProto.DataType; empty if there is none."""
    found = _BY_NUMBER.get(number)
    return "" if found is None else found.name


def numbers(*names: str) -> tuple[int, ...]:
    """Values of onnx.TensorProto.DataType. Raises ValueError for an unknown name."""
    return tuple(dtype_named(name).number for name in names)


def storage(name: str) -> str:
    """The numpy type that stores the type called `name`. Raises ValueError if numpy has none of that size."""
    found = dtype_named(name).storage
    if found is None:
        raise ValueError(f"numpy has no type that stores {name}")
    return found


def size_bytes(name: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor; elements below 8 bits are packed. Raises ValueError for strings and unknown names."""
    bits = dtype_named(name).bits
    if bits is None:
        raise ValueError(f"elements of type {name} have no fixed size")
    return -(-math.prod(shape) * bits // 8)


@dataclass(frozen=True, slots=True)
class Precision:
    """Arithmetic and weight storage of a package."""

    name: str
    """Value of --precision."""
    dtype: str
    tolerance: float
    """Maximum max_rel_error against the source model in float32."""
    cpu_dtype: str | None = None
    """Type of the converted package for the CPU provider, if that has no kernels for `dtype`; else None."""
    stored: str | None = None
    """Type of matrices in the file, if it is not `dtype`; they are cast when a graph is opened."""
    bits: int | None = None
    """Bits of quantised weights; arithmetic stays in `dtype`. None: weights are in `dtype`."""

    @property
    def on_cpu(self) -> str:
        """The type that the CPU provider computes in."""
        return self.cpu_dtype or self.dtype


PRECISIONS = {
    entry.name: entry
    for entry in (
        Precision("fp32", "float32", 1e-4),
        Precision("fp16", "float16", 2e-2),
        Precision("bf16", "bfloat16", 5e-2, cpu_dtype="float32"),
        # The reference has the quantised weights, so the tolerance covers only activations, which fast kernels round
        # to 8 bits.
        Precision("int8", "float32", 1e-1, bits=8),
        Precision("int4", "float32", 1e-1, bits=4),
    )
}
"""Precisions by name."""
EXACT = PRECISIONS["fp32"]
"""The precision of the source model in comparisons."""


def precision(name: str) -> Precision:
    """The precision of a name, including bit widths that only other exporters write (int2). Raises KeyError."""
    bits = name.removeprefix("int")
    if name not in PRECISIONS and name.startswith("int") and bits.isdecimal():
        return replace(PRECISIONS["int4"], name=name, bits=int(bits))
    return PRECISIONS[name]


ACTIVATIONS = {"fp32": "float32", "fp16": "float16", "int8": "float32"}
"""Types of activations that quantised weights may be multiplied with -> the type of the rest of the graph."""


def multiplied_with(precision: Precision) -> tuple[str, ...]:
    """Values of --activations that a precision allows."""
    if precision.bits is not None:
        return tuple(ACTIVATIONS)
    return (EXACT.name,) if precision is EXACT else (EXACT.name, precision.name)
