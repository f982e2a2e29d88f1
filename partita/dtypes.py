"""Element types of tensors: one table with their names, numbers and sizes, for every room. Imports nothing of ours.

Names are numpy's (float32), as manifests, reports and messages have them; numbers and the names in capitals are those
of ONNX (onnx.TensorProto.DataType), and `tests/test_dtypes.py` compares the table with the installed onnx.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["float", "integer", "complex", "other"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """One row of the table: an element type under the names that ONNX, numpy, torch and files give it."""

    name: str
    """numpy's, and that of ml_dtypes where numpy has no such type: float32, bfloat16."""
    number: int
    """ONNX's."""
    onnx_name: str
    """ONNX's: FLOAT. In small letters it is what ONNX Runtime says."""
    bits: int | None
    """Of one element; None for strings."""
    kind: Kind
    safetensors: str | None = None
    """Its name in the header of a safetensors file; None where such files have no such type."""
    storage: str | None = None
    """numpy type of the same size that stores it; None where numpy has none. bfloat16 is stored as uint16."""

    @property
    def upper_half(self) -> bool:
        """It is stored as the upper half of a float32, whose bits go into an integer: numpy cannot convert it."""
        return self.kind == "float" and self.storage == _UPPER_HALF


_UPPER_HALF = "uint16"
_NUMPY_HAS_NONE = {"bfloat16": _UPPER_HALF}


def _table(rows: Iterable[tuple[str, int, str, int | None, Kind, str | None]]) -> tuple[ElementType, ...]:
    whole = (8, 16, 32, 64)
    return tuple(
        ElementType(*row, storage=_NUMPY_HAS_NONE.get(row[0], row[0] if row[3] in whole and row[1] < 17 else None))
        for row in rows
    )


ALL = _table(
    (
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
)
"""Every element type that ONNX has, by its number."""

_BY_NUMBER = {entry.number: entry for entry in ALL}
_BY_NAME = {
    **{entry.onnx_name.lower(): entry for entry in ALL},  # float and double, as ONNX Runtime says
    **{entry.name: entry for entry in ALL},
}


def find(name: str) -> ElementType | None:
    """The type of that name, numpy's or ONNX Runtime's (float, double); None when there is none."""
    return _BY_NAME.get(name)


def named(name: str) -> ElementType:
    """The type of that name. Raises ValueError when there is none."""
    found = find(name)
    if found is None:
        raise ValueError(f"{name!r} is no element type")
    return found


def usual(name: str) -> str:
    """numpy's name for what ONNX Runtime may call otherwise (float, double); a name that is none stays as it is."""
    found = find(name)
    return name if found is None else found.name


def is_float(name: str) -> bool:
    """Whether it is the name of a floating-point type."""
    found = find(name)
    return found is not None and found.kind == "float"


def bits_of(name: str) -> int | None:
    """Bits of one element; None for strings, and for a name that is none."""
    found = find(name)
    return None if found is None else found.bits


def numbered(number: int) -> ElementType:
    """The type with ONNX's number. Raises ValueError when there is none."""
    found = _BY_NUMBER.get(number)
    if found is None:
        raise ValueError(f"{number} is no element type of ONNX")
    return found


def name_of(number: int) -> str:
    """The name of the type with ONNX's number; empty for a number that no type has."""
    found = _BY_NUMBER.get(number)
    return "" if found is None else found.name


def numbers(*names: str) -> tuple[int, ...]:
    """ONNX's numbers of some types. Raises ValueError for a name that is none."""
    return tuple(named(name).number for name in names)


def storage(name: str) -> str:
    """The numpy type that stores the type called `name`. Raises ValueError where numpy has none of that size."""
    found = named(name).storage
    if found is None:
        raise ValueError(f"numpy has no type that stores {name}")
    return found


def size_bytes(name: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor; small elements are packed. Raises ValueError for no type's name, and for strings."""
    bits = named(name).bits
    if bits is None:
        raise ValueError(f"elements of type {name} have no fixed size")
    return -(-math.prod(shape) * bits // 8)


@dataclass(frozen=True, slots=True)
class Precision:
    """What a package computes in."""

    name: str
    """As --precision takes it."""
    dtype: str
    tolerance: float
    """Largest max_rel_error against the original model in float32 that passes."""
    twin: str | None = None
    """The type that a twin of the package computes in where the CPU provider is to run it: it has no kernels for
    `dtype`. None when it runs the package itself.
    """
    stored: str | None = None
    """The type that matrices lie in the file in, where it is not `dtype`: they are cast as a graph is opened."""
    bits: int | None = None
    """Of the integers that weights are packed into; the arithmetic between them stays in `dtype`. None: weights are in
    `dtype`, too.
    """

    @property
    def on_cpu(self) -> str:
        """The type that the CPU provider computes in: that of the twin, if there has to be one."""
        return self.twin or self.dtype


PRECISIONS = {
    entry.name: entry
    for entry in (
        Precision("fp32", "float32", 1e-4),
        Precision("fp16", "float16", 2e-2),
        Precision("bf16", "bfloat16", 5e-2, twin="float32"),
        # The reference has the very weights that were packed. What differs are activations, which the fast kernels
        # round to 8 bits; without that rounding the graph has to agree within the tolerance of `dtype`.
        Precision("int8", "float32", 1e-1, bits=8),
        Precision("int4", "float32", 1e-1, bits=4),
    )
}
"""By their names."""
EXACT = PRECISIONS["fp32"]
"""What the original model is run in."""


def precision(name: str) -> Precision:
    """What a package or a folder computes in, by its name; other exporters pack weights of other widths, int2 for one.

    Raises KeyError for a name that is none.
    """
    bits = name.removeprefix("int")
    if name not in PRECISIONS and name.startswith("int") and bits.isdecimal():
        return replace(PRECISIONS["int4"], name=name, bits=int(bits))
    return PRECISIONS[name]


ACTIVATIONS = {"fp32": "float32", "fp16": "float16", "int8": "float32"}
"""What packed weights may be multiplied with, and the type of everything else in such a graph."""

CACHE_PRECISIONS = ("int8",)
"""Integers that keys and values may be cached in, as --cache-precision has them."""


def multiplied_with(precision: Precision) -> tuple[str, ...]:
    """What weights of a precision may be multiplied with, as --activations has it."""
    if precision.bits is not None:
        return tuple(ACTIVATIONS)
    return (EXACT.name,) if precision is EXACT else (EXACT.name, precision.name)
