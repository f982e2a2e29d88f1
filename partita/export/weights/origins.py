"""The origin of a weight: checkpoint tensors, joined, sliced and transposed lazily.

An origin has a shape and reads any region of itself, with only the data that the region needs, e.g. one expert of a
stack. Equal origins have equal values. The leaves are tensors of the checkpoint (`TensorInfo`); a reader may put other
values in their place (`LeafReader`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

Region = tuple[tuple[int, int], ...]
"""Start and stop of every axis."""


class Reader(ABC):
    """Gives the values of checkpoint tensors."""

    def __init__(self) -> None:
        self.computed: dict[Any, torch.Tensor] = {}
        """Results of origins that are computed once."""

    @abstractmethod
    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The elements of a tensor in `region`. Raises CheckpointError."""


class Origin(ABC):
    """Values of a fixed shape that can be read by region."""

    shape: tuple[int, ...]

    @abstractmethod
    def tensors(self) -> Iterator[TensorInfo]:
        """The checkpoint tensors that it reads."""

    def read(self, region: Region, files: Reader) -> torch.Tensor:
        """The values in `region`, in the dtype of the checkpoint or float32. Raises CheckpointError."""
        return self._read(region, files)

    def read_all(self, files: Reader) -> torch.Tensor:
        """All values."""
        return self._read(_whole_region(self.shape), files)

    def permuted(self, order: tuple[int, ...]) -> Origin:
        """The same values with axis `order[i]` as axis i."""
        return self if order == tuple(range(len(self.shape))) else self._permuted(order)

    @abstractmethod
    def _read(self, region: Region, files: Reader) -> torch.Tensor: ...

    def _permuted(self, order: tuple[int, ...]) -> Origin:
        return PermutedOrigin(self, order)


def _whole_region(shape: tuple[int, ...]) -> Region:
    return tuple((0, size) for size in shape)


def blocks(shape: tuple[int, ...], elements: int) -> Iterator[Region]:
    """Regions that cover `shape` in memory order, of about `elements` elements, or one row of the last axis."""
    if not shape:
        yield ()
        return
    axis = next((i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= elements), len(shape) - 1)
    step = max(1, elements // max(1, math.prod(shape[axis + 1 :])))
    if 0 in shape:
        return
    for outer in product(*(range(size) for size in shape[:axis])):
        for start in range(0, shape[axis], step):
            middle = (start, min(start + step, shape[axis]))
            yield (*((i, i + 1) for i in outer), middle, *_whole_region(shape[axis + 1 :]))


@dataclass(frozen=True, slots=True)
class TensorInfo(Origin):
    """A tensor of the checkpoint. `dtype`: ONNX name of a float dtype, otherwise the name in the file.

    A quantised one has the name of the unquantised weight and the dtype of its scales. An adapted weight is float32.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int = 0
    decoder: Origin | None = field(default=None, compare=False, repr=False)
    """Computes the values; None where the file stores them."""

    def tensors(self) -> Iterator[TensorInfo]:
        """Itself: `decoder` may read others."""
        yield self

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        return files.read(self, region)


@dataclass(frozen=True)
class DerivedOrigin(Origin):
    """A view of another origin."""

    source: Origin
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._shape())

    def tensors(self) -> Iterator[TensorInfo]:
        """Those of its source."""
        return self.source.tensors()

    def _shape(self) -> tuple[int, ...]:
        return self.source.shape


@dataclass(frozen=True)
class PermutedOrigin(DerivedOrigin):
    """Axis `order[i]` of `source` is axis i."""

    order: tuple[int, ...]

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape[axis] for axis in self.order)

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        below = tuple(region[self.order.index(axis)] for axis in range(len(self.order)))
        return self.source.read(below, files).permute(self.order)

    def _permuted(self, order: tuple[int, ...]) -> Origin:
        return self.source.permuted(tuple(self.order[axis] for axis in order))


@dataclass(frozen=True)
class SlicedOrigin(DerivedOrigin):
    """`start` .. `stop` along `axis`."""

    axis: int
    start: int
    stop: int

    def _shape(self) -> tuple[int, ...]:
        whole = self.source.shape
        return (*whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :])

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        start, stop = region[self.axis]
        moved = (start + self.start, stop + self.start)
        return self.source.read((*region[: self.axis], moved, *region[self.axis + 1 :]), files)


@dataclass(frozen=True)
class ExpandedOrigin(DerivedOrigin):
    """With a new axis of size 1 before `axis`."""

    axis: int

    def _shape(self) -> tuple[int, ...]:
        return (*self.source.shape[: self.axis], 1, *self.source.shape[self.axis :])

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        return self.source.read((*region[: self.axis], *region[self.axis + 1 :]), files).unsqueeze(self.axis)


@dataclass(frozen=True)
class ReorderedOrigin(DerivedOrigin):
    """The value at `order[i]` of `axis` is at i."""

    axis: int
    order: tuple[int, ...]

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        start, stop = region[self.axis]
        index = torch.tensor(self.order[start:stop], dtype=torch.int64)
        first, last = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
        span = (*region[: self.axis], (first, last), *region[self.axis + 1 :])
        return self.source.read(span, files).index_select(self.axis, index - first)

    def _permuted(self, order: tuple[int, ...]) -> Origin:
        return ReorderedOrigin(self.source.permuted(order), order.index(self.axis), self.order)


@dataclass(frozen=True)
class FlattenedOrigin(DerivedOrigin):
    """A stack [E, N, K] as one matrix [E * N, K]."""

    def _shape(self) -> tuple[int, ...]:
        count, rows, width = self.source.shape
        return count * rows, width

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        (start, stop), columns = region
        height = self.source.shape[1]
        pieces = []
        for index in range(start // max(1, height), max(1, -(-stop // max(1, height)))):
            rows = max(0, start - index * height), min(height, stop - index * height)
            pieces.append(self.source.read(((index, index + 1), rows, columns), files)[0])
        return torch.cat(pieces)


@dataclass(frozen=True)
class RescaledOrigin(DerivedOrigin):
    """Every value times `factor` plus `offset`, in float32."""

    factor: float
    offset: float

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        return self.source.read(region, files).to(torch.float32) * self.factor + self.offset

    def _permuted(self, order: tuple[int, ...]) -> Origin:
        return RescaledOrigin(self.source.permuted(order), self.factor, self.offset)


@dataclass(frozen=True)
class JoinedOrigin(Origin):
    """Several origins concatenated along `axis`."""

    parts: tuple[Origin, ...]
    axis: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[Origin, ...], axis: int) -> JoinedOrigin:
        """Concatenate. Raises ValueError when the parts differ in another axis."""
        others = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
        if len(others) != 1 or len({len(part.shape) for part in parts}) != 1:
            shapes = sorted({str(list(part.shape)) for part in parts})
            raise ValueError(f"tensors of the shapes {' and '.join(shapes[:3])} do not fit together")
        first = parts[0].shape
        total = sum(part.shape[axis] for part in parts)
        return cls(parts, axis, (*first[:axis], total, *first[axis + 1 :]))

    def tensors(self) -> Iterator[TensorInfo]:
        """Those of all parts."""
        for part in self.parts:
            yield from part.tensors()

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        start, stop = region[self.axis]
        pieces: list[torch.Tensor] = []
        offset = 0
        for part in self.parts:
            size = part.shape[self.axis]
            begin, end = max(start - offset, 0), min(stop - offset, size)
            if begin < end or (start == stop and not pieces):
                inside = (min(begin, size), max(min(begin, size), end))
                pieces.append(part.read((*region[: self.axis], inside, *region[self.axis + 1 :]), files))
            offset += size
        return torch.cat(pieces, self.axis) if len(pieces) > 1 else pieces[0]


@dataclass(frozen=True)
class ComputedOrigin(Origin):
    """The result of a torch operator on other origins; computed whole, once while the files are open."""

    operator: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Positional arguments; origins stand for tensors, tuples for lists."""
    output: int | None
    """The index of the result; None for a single result."""
    shape: tuple[int, ...]

    def tensors(self) -> Iterator[TensorInfo]:
        """Those of all arguments."""
        origins: list[Origin] = []
        map_leaves(self.arguments, Origin, origins.append)
        for origin in origins:
            yield from origin.tensors()

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        if self not in files.computed:
            result = self.operator(*map_leaves(self.arguments, Origin, lambda origin: origin.read_all(files)))
            files.computed[self] = result if self.output is None else result[self.output]
        value: torch.Tensor = files.computed[self]
        return value[tuple(slice(start, stop) for start, stop in region)]


def map_leaves(arguments: Any, leaf: type, change: Callable[[Any], Any], container: type = list) -> Any:
    """The arguments of an operator with `change` applied to each `leaf`; lists and tuples as `container`."""
    if isinstance(arguments, leaf):
        return change(arguments)
    if isinstance(arguments, list | tuple):
        return container(map_leaves(each, leaf, change, container) for each in arguments)
    return arguments


class LeafReader(Reader):
    """Reads something else for the checkpoint tensors of an origin: a function of tensor and region."""

    def __init__(self, value: Callable[[TensorInfo, Region], torch.Tensor]) -> None:
        super().__init__()
        self.value = value

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The result of the function."""
        return self.value(info, region)


class IndexReader(Reader):
    """A reader that returns indices instead of values: read through an origin, they show the source of each value.

    `along`: tensor -> an axis, and the numbers that replace the indices of this axis.
    """

    def __init__(
        self, infos: Iterable[TensorInfo], along: Mapping[TensorInfo, tuple[int, torch.Tensor]] | None = None
    ) -> None:
        super().__init__()
        self.along = along or {}
        self.first: dict[TensorInfo, int] = {}
        total = 0
        for info in dict.fromkeys(infos):
            self.first[info] = total
            total += math.prod(info.shape)

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The indices of the values of a tensor in `region`."""
        replaced, numbers = self.along.get(info, (None, None))
        places = torch.full((), self.first[info], dtype=torch.int64)
        stride = 1
        for axis in reversed(range(len(region))):
            begin, end = region[axis]
            index = torch.arange(begin, end) if numbers is None or axis != replaced else numbers[begin:end]
            places = places + (index * stride).reshape(-1, *[1] * (len(region) - 1 - axis))
            stride *= info.shape[axis]
        return places


def whole_rows(origin: Origin, name: str, *, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a weight [N, K] that are whole rows of a tensor, or its columns if `transposed`; their indices in it.

    Both are empty where there are none. One row is checked, because an origin treats all rows of a tensor alike.
    """
    (count, width), places = origin.shape, IndexReader(origin.tensors())
    info, first = next((info, first) for info, first in places.first.items() if info.name == name)
    row, column = (1, info.shape[1]) if transposed else (width, 1)
    local = origin.read(((0, count), (0, 1)), places)[:, 0] - first
    rows = ((local >= 0) & (local < math.prod(info.shape))).nonzero()[:, 0]
    if len(rows) and width == info.shape[0 if transposed else 1]:
        one = int(rows[0])
        along = origin.read(((one, one + 1), (0, width)), places)[0] - first
        if torch.equal(along, local[one] // row * row + torch.arange(width) * column):
            return rows, local[rows] // row
    return rows[:0], rows[:0]
