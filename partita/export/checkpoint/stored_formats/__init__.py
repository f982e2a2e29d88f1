"""Quantised storage formats, one module each: `read` makes the weights from the tensors.

`read(sources)` returns every quantised weight. It raises CheckpointError, which names the tensor, and
UnsupportedModelError.

A format makes one `StoredWeight` from the tensors of a layer, under the name of the unquantised weight. An
`AffineWeight` has integers with a scale and an integer zero point per block, which a package can store unchanged.
"""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.quantisation_method import DetectedMethod
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, OpenFiles
from partita.export.weights import Quantised, unpack
from partita.export.weights.origins import Origin, Reader, Region, TensorInfo

INTEGER = r"[IU](8|16|32|64)|torch\.u?int(8|16|32|64)"
INT32, BYTE, SIGNED_BYTE = r"I32|torch\.int32", r"U8|torch\.uint8", r"I8|torch\.int8"
FLOAT8 = r"F8_E4M3|F8_E5M2|torch\.float8_(e4m3fn|e5m2)"
FLOAT = r"float(16|32|64)|bfloat16"
ANY = ".*"
"""Regular expressions on dtypes: names in the file, or ONNX names of floats."""
WORD = 32
"""Bits of a word of packed integers."""
Span = tuple[int, int]
"""Start and stop along one axis."""


@dataclass(frozen=True)
class StoredWeight(Origin):
    """One weight of a quantised checkpoint, which computes its values in float32."""

    name: str
    """The name of the unquantised weight."""
    shape: tuple[int, ...]
    stored_tensors: tuple[TensorInfo, ...]
    """The first is the largest."""
    dtype: str
    """The dtype after dequantisation by the format's own library: usually that of the scales."""

    def tensors(self) -> Iterator[TensorInfo]:
        """Its stored tensors."""
        yield from self.stored_tensors

    @property
    def info(self) -> TensorInfo:
        """The weight as a tensor of the checkpoint."""
        size = sum(each.size_bytes for each in self.stored_tensors)
        return TensorInfo(self.name, self.stored_tensors[0].file, self.shape, self.dtype, size, self)


@dataclass(frozen=True)
class StoredFloats(StoredWeight):
    """Unquantised floats in a file format other than safetensors."""


@dataclass(frozen=True)
class AffineWeight(StoredWeight):
    """Integers q >= 0 with a scale s and an integer zero point z >= 0 per block: s * (q - z)."""

    bits: int
    """Maximum bits of the integers and zero points."""
    axis: int
    """The axis of the blocks."""
    block: int
    """Elements per block, before reordering."""

    @abstractmethod
    def parts(self, region: Region, files: Reader) -> Quantised:
        """The stored parts of the elements in `region`. Raises CheckpointError."""

    def _read(self, region: Region, files: Reader) -> torch.Tensor:  # exact for 16-bit scales
        integers, scales, zeros = self.parts(region, files)
        return (integers.float() - zeros.float()) * scales

    def blocks_along(self, files: Reader) -> torch.Tensor:
        """For each index along `axis`, the number of its block, int64."""
        return torch.arange(self.shape[self.axis]) // self.block

    def zero_points(self, files: Reader) -> torch.Tensor:
        """The zero points of all blocks, uint8 of any shape: the middle of the range. Raises CheckpointError."""
        return torch.tensor(1 << (self.bits - 1), dtype=torch.uint8)


@dataclass(slots=True)
class StoredTensors:
    """The tensors of a quantised checkpoint, with its quantisation settings."""

    folder: Path
    method: str
    """The name of the format."""
    settings: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    weight_tensors: set[str] = field(default_factory=set)
    """Tensors that belong to weights."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, in sentences."""
    symmetric: dict[str, str] = field(default_factory=dict)
    """Weight name -> the setting that declares its zero points to be the middle of the range."""

    def stems(self, end: str, kind: str = ANY) -> list[str]:
        """Names, without the suffix `end`, of the tensors with that suffix and dtype, in file order."""
        found = (info for name, info in self.tensors.items() if name.endswith(end))
        return [info.name.removesuffix(end) for info in found if re.fullmatch(kind, info.dtype)]

    def take(self, name: str, kind: str = ANY) -> TensorInfo:
        """The tensor of that name. Raises CheckpointError without one, and for one of another type."""
        info = self.optional(name, kind)
        if info is None:
            lacks = f"{self.method}, but lacks {name[:SHOWN_CHARACTERS]}"
            raise CheckpointError(f"{self.folder}: the checkpoint is quantised: {lacks}; download it again")
        return info

    def optional(self, name: str, kind: str = ANY) -> TensorInfo | None:
        """`take` for an optional tensor: None without one."""
        info = self.tensors.get(name)
        if info is None:
            return None
        if not re.fullmatch(kind, info.dtype):
            raise self.tensor_error(name, f"is {info.dtype}, a type that {self.method} does not use for it")
        self.weight_tensors.add(name)
        return info

    def tensor_error(self, name: str, what: str) -> CheckpointError:
        """The error for one tensor."""
        return CheckpointError(f"{self.folder}: quantised tensor {name[:SHOWN_CHARACTERS]} {what}")

    def check_shape(self, info: TensorInfo, *allowed: tuple[int, ...], by: TensorInfo, detail: str = "") -> None:
        """Raise CheckpointError unless `info` has an allowed shape. `by`: the tensor that determines it."""
        if info.shape not in allowed:
            what = f"is {list(info.shape)}, but {by.name} {list(by.shape)} {detail}".rstrip()
            raise self.tensor_error(info.name, f"{what} requires {' or '.join(str(list(each)) for each in allowed)}")

    def unsupported_error(self, what: str, advice: str) -> UnsupportedModelError:
        """The error for an unsupported setting or tensor."""
        return UnsupportedModelError(f"{self.folder}: the checkpoint is quantised: {self.method} {what}; {advice}")

    def number(self, *keys: str, least: int = 1) -> int | None:
        """The first of some settings that exists, or None. Raises CheckpointError for no integer from `least`."""
        key = next((key for key in keys if self.settings.get(key) is not None), None)
        value = None if key is None else self.settings[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise CheckpointError(
                f"{self.folder}: {key} of the quantisation settings is {str(value)[:40]!r}, which is invalid"
            )
        return value


@dataclass(frozen=True)
class Integers:
    """Integers of a stored matrix [N, K]: packed in int32 words, or one per element."""

    info: TensorInfo
    bits: int
    transposed: bool = False
    """Stored as [K, N]."""
    across: bool = False
    """A word has integers of one column; False: of one row."""
    offset: int = 0
    """The zero point of the stored integers, which is added."""
    order: tuple[int, ...] = ()
    """The place in a word of each of its integers, where they are not in order."""

    def read(self, rows: Span, columns: Span, files: Reader) -> torch.Tensor:
        """The integers in a region, uint8 [rows, columns]; an axis of size 1 stays so. Raises CheckpointError."""
        packed = is_packed(self.info)
        if not packed:
            found = read_matrix(self.info, rows, columns, files, transposed=self.transposed)
        else:
            found = self._unpacked(columns, rows, files).T if self.across else self._unpacked(rows, columns, files)
        if not self.offset:
            return found
        moved = found.to(torch.int16) + self.offset
        if (packed or self.bits < 8) and bool(((moved < 0) | (moved >= 1 << self.bits)).any()):
            raise CheckpointError(
                f"quantised tensor {self.info.name} has integers that exceed {self.bits} bits, e.g. zero points stored "
                "as all ones, which kernels read differently; correct the settings, or quantise the model again"
            )
        return moved.to(torch.uint8)

    def _unpacked(self, others: Span, packed: Span, files: Reader) -> torch.Tensor:
        """Integers [others, packed] of words."""
        first = packed[0] // WORD  # 32 integers start at a word boundary for any number of bits
        places = first * self.bits, -(-packed[1] * self.bits // WORD)
        in_rows = self.across == self.transposed
        found = files.read(self.info, (others, places) if in_rows else (places, others))
        begin, end = packed[0] - first * WORD, packed[1] - first * WORD
        if not self.order:
            return words(found if in_rows else found.T, self.bits, begin, end)
        per_word = len(self.order)
        in_words = words(found, self.bits, 0, found.shape[1] * per_word).reshape(len(found), -1, per_word)
        return in_words[..., [self.order.index(place) for place in range(per_word)]].flatten(1)[:, begin:end]


def is_packed(info: TensorInfo) -> bool:
    """Whether a tensor has int32 words of packed integers."""
    return bool(re.fullmatch(INT32, info.dtype))


def read_matrix(
    info: TensorInfo, rows: Span, columns: Span, files: Reader, *, transposed: bool = False
) -> torch.Tensor:
    """A region of a stored matrix, [K, N] if `transposed`. Axes of size 1, and missing last ones, have size 1 in it."""
    spans = (columns, rows) if transposed else (rows, columns)
    found = files.read(
        info, tuple((0, 1) if size == 1 else span for size, span in zip(info.shape, spans, strict=False))
    )
    found = found.reshape((*found.shape, *[1] * (2 - found.ndim)))
    return found.T if transposed else found


def words(packed: torch.Tensor, bits: int, start: int, stop: int) -> torch.Tensor:
    """Integers `start` .. `stop` of rows of int32 words [R, W], lowest bits first; 3 bits may span two words."""
    if bits in (4, 8):
        return unpack(packed.contiguous().view(torch.uint8), bits, stop)[:, start:]
    wide = packed.to(torch.int64) & 0xFFFFFFFF
    first = torch.arange(start, stop) * bits
    word, shift = first // WORD, first % WORD
    found = wide[:, word] >> shift
    over = shift + bits > WORD
    if over.any():
        found[:, over] |= wide[:, word[over] + 1] << (WORD - shift[over])
    return (found & ((1 << bits) - 1)).to(torch.uint8)


@dataclass(frozen=True)
class GroupedWeight(AffineWeight):
    """A weight [N, K] with a scale and a zero point per row and group of columns."""

    integers: Integers
    scales: TensorInfo
    """[N, G], or [G, N] if the integers are transposed; axes of size 1 are shared."""
    zeros: Integers | None
    """None: the middle of the range."""
    g_idx: TensorInfo | None = None
    """The group of each column [K]; None: in order."""

    def parts(self, region: Region, files: Reader) -> Quantised:
        """Integers, and the scales and zero points of their groups."""
        rows, (begin, end) = region
        groups = self._groups((begin, end), files)
        span = (int(groups.min()), int(groups.max()) + 1) if len(groups) else (0, 0)
        scales = read_matrix(self.scales, rows, span, files, transposed=self.integers.transposed).float()
        scales, zeros = (
            each if each.shape[1] == 1 else each[:, groups - span[0]]
            for each in (scales, self._zero_points(rows, span, files))
        )
        return Quantised(self.integers.read(rows, (begin, end), files), scales, zeros)

    def zero_points(self, files: Reader) -> torch.Tensor:
        """All zero points, [N, G]; one axis or both may have size 1."""
        return self._zero_points((0, self.shape[0]), (0, -(-self.shape[1] // self.block)), files)

    def _zero_points(self, rows: Span, groups: Span, files: Reader) -> torch.Tensor:
        if self.zeros is None:
            return super().zero_points(files).reshape(1, 1)
        return self.zeros.read(rows, groups, files)

    def blocks_along(self, files: Reader) -> torch.Tensor:
        """The group of each column, int64 [K]."""
        return self._groups((0, self.shape[1]), files)

    def _groups(self, columns: Span, files: Reader) -> torch.Tensor:
        """The groups of some columns."""
        in_order = torch.arange(*columns) // self.block
        if self.g_idx is None or not len(in_order):
            return in_order
        found = files.read(self.g_idx, (columns,)).to(torch.int64)
        if bool((found == -1).any()):  # compressed-tensors writes -1 for groups in order
            return in_order
        count = -(-self.shape[1] // self.block)
        if not 0 <= int(found.min()) <= int(found.max()) < count:
            raise CheckpointError(
                f"quantised tensor {self.g_idx.name} names a group that does not exist; {self.scales.name} has {count}"
            )
        return found


@dataclass(frozen=True, slots=True)
class QuantisedTensors:
    """The quantised weights of a checkpoint."""

    method: str
    """The name for users, e.g. GPTQ."""
    tensors: Mapping[str, TensorInfo]
    """All tensors of the checkpoint; quantised weights as floats that are computed on reading."""
    weights: Mapping[str, StoredWeight]
    """Name -> quantised weight."""
    notes: tuple[str, ...] = ()


def container(weight: AffineWeight) -> int:
    """Bits of the package's integers that can hold those of `weight`."""
    return 4 if weight.bits <= 4 else 8


def affine(info: TensorInfo) -> AffineWeight | None:
    """The stored integers of a tensor; None where it has none."""
    return info.decoder if isinstance(info.decoder, AffineWeight) else None


def read(folder: Path, found: DetectedMethod, tensors: Mapping[str, TensorInfo]) -> QuantisedTensors:
    """The tensors of a quantised checkpoint as floats. Raises UnsupportedModelError, CheckpointError."""
    if not found.method.reader:
        raise UnsupportedModelError(
            f"{folder}: the checkpoint is quantised: {found.method.name} ({found.evidence}); this format is not "
            "supported: export the unquantised checkpoint, or one in a supported format (docs/quantised_checkpoints.md)"
        )
    sources = StoredTensors(folder, found.method.name, found.settings, tensors)
    reader = importlib.import_module(f"{__name__}.{found.method.reader}")
    weights: dict[str, StoredWeight] = {weight.name: weight for weight in reader.read(sources)}
    if not weights:
        raise CheckpointError(
            f"{folder}: the checkpoint is quantised: {found.method.name} ({found.evidence}), but none of its tensors "
            "is in this format; correct config.json, or download the weights again"
        )
    _check_symmetric(sources, weights)
    others = {name: info for name, info in tensors.items() if name not in sources.weight_tensors}
    for info in others.values():
        if len(info.shape) > 1 and re.fullmatch(INTEGER, info.dtype):
            raise CheckpointError(
                f"{folder}: tensor {info.name[:SHOWN_CHARACTERS]} is {info.dtype}, but belongs to no "
                f"weight quantised with {found.method.name}; download the weights again"
            )
    if both := sorted(weights.keys() & others.keys()):
        raise sources.tensor_error(both[0], "exists as floats, too; remove one of them")
    all_tensors = {**others, **{name: weight.info for name, weight in weights.items()}}
    return QuantisedTensors(found.method.name, all_tensors, weights, tuple(sources.notes))


def _check_symmetric(sources: StoredTensors, weights: Mapping[str, StoredWeight]) -> None:
    """Raise CheckpointError where zero points are not the middle of the range, which the settings declare."""
    with OpenFiles() as files:
        for name, setting in sources.symmetric.items():
            weight = weights.get(name)
            if not isinstance(weight, AffineWeight) or bool(
                (weight.zero_points(files) == 1 << (weight.bits - 1)).all()
            ):
                continue
            zeros = next((info.name for info in weight.stored_tensors if "zero" in info.name), name)
            raise sources.tensor_error(
                zeros,
                f"contradicts the setting {setting}: not all of its zero points are 2^(bits-1); correct the settings, "
                "or quantise the model again",
            )
