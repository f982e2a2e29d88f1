"""GGUF files as checkpoints. Here: block lengths, and integers with scales (ggml-quants.h and gguf-py's quants.py).

Types in `AFFINE` are d * (q - 128) or d * (q - 8) with integers q, which a package can store unchanged. Other types
have block minima too (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) or a non-uniform grid, and are read as floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Split = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]
"""Integers and scales of B blocks: [B, block], [B, block / group]."""

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type, by llama.cpp's name."""

    number: int
    name: str
    block: int
    """Elements per block."""
    size_bytes: int
    """Bytes per block."""

    @property
    def floats(self) -> str | None:
        """The name of a float type; None for a quantised one."""
        return FLOATS.get(self.name)


@dataclass(frozen=True, slots=True)
class Affine:
    """A type of integers with a scale."""

    bits: int
    """4: zero point 8; 8: zero point 128."""
    group: int
    """Elements per scale."""
    split: Callable[[Bytes], Split]
    """Bytes of blocks [B, bytes] -> integers and scales."""


def block_type(number: int) -> BlockType | None:
    """The type of that number; None where the package gguf does not have it or cannot dequantise it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return None
    block, size = GGML_QUANT_SIZES[kind]
    return BlockType(number, kind.name, block, size) if _is_read(number) else None


@functools.cache
def _is_read(number: int) -> bool:
    """Whether the package gguf can dequantise the type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(number)
    if kind.name.startswith("I") and kind.name[1:].isdigit():
        return False  # plain integers are not weights
    try:
        dequantised(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), number)
    except NotImplementedError:
        return False
    return True


def dequantised(rows: Bytes, number: int) -> npt.NDArray[np.float32]:
    """Dequantise rows of bytes [R, bytes] with the package gguf, float32 [R, K]."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(number)
    if kind.name == "F64":
        return rows.view(np.float64).astype(np.float32)
    if kind.name in ("F32", "F16"):
        rows = rows.view(np.float32 if kind.name == "F32" else np.float16)
    found: Any = dequantize(np.ascontiguousarray(rows), kind)
    return np.asarray(found, np.float32)


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float32]:
    """The float16 at byte `at` of each block, [B, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[B, 16] -> [B, 32]: the low nibbles, then the high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _shifted(packed: Bytes, width: int, shifts: tuple[int, ...]) -> Bytes:
    """[B, n] -> [B, n / width * len(shifts) * width]: each run of `width` bytes, shifted right by every shift."""
    wide = packed.reshape(len(packed), -1, 1, width) >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return wide.reshape(len(packed), -1)


def _moved(integers: npt.NDArray[Any], offset: int) -> Bytes:
    """Integers plus the zero point; results are below 256."""
    return (integers + offset).astype(np.uint8)


def _q4_0(blocks: Bytes) -> Split:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0)


def _q8_0(blocks: Bytes) -> Split:
    return blocks[:, 2:] ^ np.uint8(128), _halves(blocks, 0)  # q + 128 of a two's complement byte


def _q5_0(blocks: Bytes) -> Split:
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return _moved(_nibbles(blocks[:, 6:]) | high << 4, 128 - 16), _halves(blocks, 0)


def _q3_k(blocks: Bytes) -> Split:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = (_shifted(packed[:, :8], 8, (0, 4)) & 15) | (_shifted(packed[:, 8:], 4, (0, 2, 4, 6)) & 3) << 4
    integers = (_shifted(low, 32, (0, 2, 4, 6)) & 3) + ((_shifted(high, 32, tuple(range(8))) & 1) << 2)
    return _moved(integers, 8 - 4), _halves(blocks, 108) * (scales.astype(np.int8) - 32).astype(np.float32)


def _q6_k(blocks: Bytes) -> Split:
    low, high = _shifted(blocks[:, :128], 64, (0, 4)) & 15, _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6)) & 3
    scales: npt.NDArray[np.float32] = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _moved(low | high << 4, 128 - 32), _halves(blocks, 208) * scales


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the 16 codes. Those of MXFP4 are doubled, because its scale here is half of the stored one."""


def _coded(codes: tuple[int, ...], packed: Bytes) -> Bytes:
    return (np.array(codes, np.int16) + 128).astype(np.uint8)[_nibbles(packed)]


def _iq4_nl(blocks: Bytes) -> Split:
    return _coded(IQ4_NL, blocks[:, 2:]), _halves(blocks, 0)


def _mxfp4(blocks: Bytes) -> Split:
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << 23).astype(np.uint32)
    return _coded(MXFP4, blocks[:, 1:]), bits.view(np.float32)


AFFINE = {
    "Q4_0": Affine(4, 32, _q4_0),
    "Q8_0": Affine(8, 32, _q8_0),
    "Q5_0": Affine(8, 32, _q5_0),
    "Q3_K": Affine(4, 16, _q3_k),
    "Q6_K": Affine(8, 16, _q6_k),
    "IQ4_NL": Affine(8, 32, _iq4_nl),
    "MXFP4": Affine(8, 32, _mxfp4),
}
"""By llama.cpp's name."""
