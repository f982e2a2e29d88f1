"""GGUF files as checkpoints. Here: the header of a file (ggml, docs/gguf.md), and its block types.

    magic "GGUF", version u32, number of tensors u64, number of settings u64
    settings: name, type u32, value;  tensors: name, axes u32, sizes u64 each (the fastest first), type u32, offset u64
    padding up to a multiple of general.alignment, then the data

Block types in `AFFINE` are d * (q - 128) or d * (q - 8) with integers q (ggml-quants.h and gguf-py's quants.py), which
a package can store unchanged. Other types, e.g. with block minima (Q4_K, Q5_K), are read as floats.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, is_name, refuse_pointer
from partita.export.weights.origins import TensorInfo

Bytes = npt.NDArray[np.uint8]
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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


@functools.cache
def block_type(number: int) -> BlockType | None:
    """The type of that number; None where the package gguf does not have it or cannot dequantise it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        dequantised(np.zeros((1, size), np.uint8), number)
    except (ValueError, NotImplementedError):
        return None
    return BlockType(number, kind.name, block, size)


def dequantised(rows: Bytes, number: int) -> npt.NDArray[np.float32]:
    """Dequantise rows of bytes [R, bytes] with the package gguf, float32 [R, K]."""
    from gguf import GGMLQuantizationType, dequantize

    found: Any = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType(number))
    return np.asarray(found, np.float32)


MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of settings -> format characters of struct."""
TOKENS = "tokenizer.ggml.tokens"
PER_TOKEN_ARRAYS = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
"""Arrays with one value per token."""
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    )
)
"""End-of-generation tokens of llama.cpp (llama-vocab.cpp, special_eog_ids)."""
HARMONY = frozenset({"<|return|>", "<|call|>", "<|end|>"})
"""In a vocabulary with all of them, <|end|> ends a message, not the generation."""
MOST_ENTRIES, MOST_BYTES = 1 << 21, 1 << 28
"""Limits of a header: tensors, settings and values of arrays together, and its size. Real files have fewer than 1.5
million, and 32 MiB."""
MOST_AXES, MOST_ALIGNMENT = 4, 1 << 20


@dataclass(frozen=True, slots=True)
class GgufTensor(TensorInfo):
    """A tensor of a GGUF file. The last axis of its shape is the fastest."""

    type: BlockType = field(kw_only=True)
    start: int = field(kw_only=True)
    """Offset of its first byte in the file."""


@dataclass(frozen=True)
class Header:
    """The contents of the header of a GGUF file."""

    path: Path
    settings: Mapping[str, Any]
    """Name -> a number, a string, or a tuple of them."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp."""
        return str(self.settings["general.architecture"])

    def ends(self) -> tuple[int, ...]:
        """Ids of the end-of-generation tokens of llama.cpp."""
        tokens = self.settings.get(TOKENS, ())
        ends = ENDS - {"<|end|>"} if set(tokens) >= HARMONY else ENDS
        return tuple(place for place, token in enumerate(tokens) if token in ends)


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises CheckpointError when damaged, UnsupportedModelError for other formats."""
    refuse_pointer(path)
    size = path.stat().st_size
    if not size:
        raise CheckpointError(f"{path}: not a GGUF file: empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), min(size, MOST_BYTES), access=mmap.ACCESS_READ) as data:
        return _HeaderReader(path, data, size).header()


class _HeaderReader:
    """A parser of the bytes of a header. Reading past their end is an error."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at, self.entries = path, data, size, 0, 0

    def header(self) -> Header:
        """Parse the whole header."""
        if self.take(4) != MAGIC:
            raise CheckpointError(f"{self.path}: damaged: it does not begin with the bytes GGUF")
        version = self.number("I")
        if version not in VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise UnsupportedModelError(
                f"{self.path}: {what} is not supported, only little-endian of version 2 or 3; convert the model again "
                "with a current llama.cpp"
            )
        tensors, settings = self.number("Q"), self.number("Q")
        self.count(tensors + settings)
        found: dict[str, Any] = {}
        for _ in range(settings):
            name = self.text()
            if name in found:  # readers differ in which of two they use
                raise self.damage_error(f"it has two settings named {name[:SHOWN_CHARACTERS]}")
            found[name] = self.value(self.number("I"), name)
        self.check_settings(found)
        infos = [(self.text(), self.shape(), self.number("I"), self.number("Q")) for _ in range(tensors)]
        return Header(self.path, found, self.placed(infos, found.get("general.alignment", 32)))

    def damage_error(self, what: str) -> CheckpointError:
        """The error of a damaged file."""
        return CheckpointError(f"{self.path}: damaged or truncated: {what}; download it again")

    def count(self, entries: int) -> None:
        """Add entries to those before. Raises UnsupportedModelError above the limit."""
        self.entries += entries
        if self.entries > MOST_ENTRIES:
            raise UnsupportedModelError(
                f"{self.path}: its header declares {self.entries:,} tensors, settings and array values, but at most "
                f"{MOST_ENTRIES:,} are supported"
            )

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > len(self.data) - self.at:
            raise self.damage_error(
                f"its header needs {count:,} bytes at {self.at:,}, but {len(self.data):,} can be read"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        """The next number. `kind`: a format character of struct."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        """The next string."""
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damage_error(f"a string in its header before {self.at:,} is not UTF-8") from error

    def value(self, kind: int, name: str) -> Any:
        """The value of a setting."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        inner, count = (self.number("I"), self.number("Q")) if kind == ARRAY else (None, 0)
        self.count(count)
        if inner == STRING:
            return tuple(self.text() for _ in range(count))
        if inner not in SCALARS:
            raise self.damage_error(
                f"setting {name[:SHOWN_CHARACTERS]!r} has the unknown type {kind if inner is None else inner}"
            )
        form = f"<{count}{SCALARS[inner]}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def shape(self) -> tuple[int, ...]:
        """The shape of the next tensor, the fastest axis last."""
        axes = self.number("I")
        if not 1 <= axes <= MOST_AXES:
            raise self.damage_error(f"a tensor has {axes:,} axes")
        return tuple(reversed([self.number("Q") for _ in range(axes)]))

    def check_settings(self, found: Mapping[str, Any]) -> None:
        """Raise for a file without an architecture, for a part of a file, and for a damaged vocabulary."""
        if not isinstance(found.get("general.architecture"), str):
            raise self.damage_error("general.architecture is missing")
        split, alignment = found.get("split.count"), found.get("general.alignment", 32)
        if isinstance(split, int) and split > 1:
            raise UnsupportedModelError(
                f"{self.path}: one of {split:,} parts of a split file; join them with llama-gguf-split"
            )
        if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
            raise self.damage_error(f"its general.alignment is {str(alignment)[:40]}, which is invalid")
        tokens = found.get(TOKENS, ())
        if not isinstance(tokens, tuple) or not all(isinstance(token, str) for token in tokens):
            raise self.damage_error(f"{TOKENS} is not an array of strings")
        for name in PER_TOKEN_ARRAYS:
            if name in found and (not isinstance(found[name], tuple) or len(found[name]) != len(tokens)):
                raise self.damage_error(f"it has {len(tokens):,} tokens, but another number of {name}")
        seen: dict[str, int] = {}
        for place, token in enumerate(tokens):
            if seen.setdefault(token, place) != place and token:
                shown = f"{token[:SHOWN_CHARACTERS]!r} twice, as {seen[token]:,} and as {place:,}"
                raise self.damage_error(f"its vocabulary contains {shown}")

    def placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        """The tensors by name, which follow each other inside the file."""
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, number, offset in infos:
            if not is_name(name):
                raise self.damage_error(f"it has a tensor with the invalid name {name[:SHOWN_CHARACTERS]!r}")
            if name in tensors:
                raise self.damage_error(f"it has two tensors named {name}")
            kind = block_type(number)
            if kind is None:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has the type {number}, which the installed package gguf "
                    "does not know or cannot read; install a newer version"
                )
            size, stored = math.prod(shape) // kind.block * kind.size_bytes, kind.floats or kind.name
            tensors[name] = GgufTensor(name, self.path, shape, stored, size, type=kind, start=start + offset)
            where = f"tensor {name} {list(shape)} of {kind.name}, at byte {offset:,} of the data,"
            if shape[-1] % kind.block:
                raise self.damage_error(f"{where} has rows that are not a multiple of {kind.block}")
            if start + offset + size > self.size:
                raise self.damage_error(f"{where} ends after the file, which has {self.size:,} bytes")
            if offset != end:  # ggml refuses files with gaps between tensors
                raise self.damage_error(f"{where} does not follow the tensors before it, which end at {end:,}")
            end += -(-size // alignment) * alignment
        return tensors


@dataclass(frozen=True, slots=True)
class Affine:
    """A type of integers with a scale."""

    bits: int
    """4: zero point 8; 8: zero point 128."""
    group: int
    """Elements per scale."""
    scales: Callable[[Bytes], npt.NDArray[np.float32]]
    """Bytes of blocks [B, bytes] -> their scales [B, block / group]."""


def _halves(blocks: Bytes, at: int = 0) -> npt.NDArray[np.float32]:
    """The float16 at byte `at` of each block, [B, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _q6_k(blocks: Bytes) -> npt.NDArray[np.float32]:
    return _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)


def _mxfp4(blocks: Bytes) -> npt.NDArray[np.float32]:
    exponent = blocks[:, :1].astype(np.uint32)  # the scale is half of the stored one, because integers are doubled
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << 23).astype(np.uint32)
    return bits.view(np.float32)


AFFINE = {
    "Q4_0": Affine(4, 32, _halves),
    "Q8_0": Affine(8, 32, _halves),
    "Q6_K": Affine(8, 16, _q6_k),
    "MXFP4": Affine(8, 32, _mxfp4),
}
"""By llama.cpp's name."""
