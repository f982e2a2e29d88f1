"""Weight sources: a weight as one or more tensors, read in pieces while it is written.

A plain weight has one part; a quantised one has several (packed data, scales, zero points), each a separate
initializer. Passes and the writer use sources through this protocol.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch

from partita import dtypes
from partita.errors import CheckpointError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.weights import of_ir, to_torch
from partita.export.weights.origins import JoinedOrigin, Origin, Reader, ReorderedOrigin, blocks

SLICE_BYTES = 32 << 20
"""Weights are read, cast and written in pieces of about this size, in bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a weight, as written."""

    shape: tuple[int, ...]
    dtype: ir.DataType
    label: str = ""
    """Its role in the weight: scales, zero points; empty for the only part."""

    def named(self, weight: str) -> str:
        """The name of this part of a weight."""
        return f"{weight}.{self.label}" if self.label else weight

    @property
    def size_bytes(self) -> int:
        """Size in the file; elements below 8 bits are packed."""
        return dtypes.size_bytes(of_ir(self.dtype), self.shape)


@dataclass(frozen=True)
class WeightSource(ABC):
    """A weight that is not written yet: an origin, and how the package stores it."""

    checkpoint: Checkpoint
    origin: Origin
    dtype: ir.DataType
    """The dtype of the values, or of the scales of a quantised weight."""
    name: str
    """The name for users."""
    parameters: tuple[str, ...] = field(default=(), compare=False)
    """Names in the model, which may differ from the checkpoint's; several for joined weights."""

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the checkpoint tensors that are read."""
        return frozenset(info.name for info in self.origin.tensors())

    @property
    def elements(self) -> int:
        """Number of model parameters in it."""
        return math.prod(self.origin.shape)

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Sources with equal keys have equal bytes, part by part."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Its tensors, in the order in which they are written."""

    @abstractmethod
    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts in order: index and consecutive pieces of about `SLICE_BYTES`. Raises CheckpointError."""

    def rows_restored(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The index of the first row, and some rows float32 from there; all rows in order."""
        with OpenFiles() as files:
            for region in blocks(self.origin.shape, SLICE_BYTES // 4):
                yield region[0][0], self.origin.read(region, files).to(torch.float32)


@dataclass(frozen=True)
class FloatSource(WeightSource):
    """The values of an origin, cast to the dtype of the package."""

    @property
    def key(self) -> Hashable:
        """The origin and the dtype."""
        return self.origin, int(self.dtype)

    @property
    def parts(self) -> tuple[Part, ...]:
        """One part: the values."""
        return (Part(self.origin.shape, self.dtype),)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The values in consecutive pieces. Raises CheckpointError for a value outside the range of the dtype."""
        target = to_torch(of_ir(self.dtype))
        with OpenFiles() as files:
            for region in blocks(self.origin.shape, SLICE_BYTES // target.itemsize):
                piece = self.origin.read(region, files)
                cast = piece.to(target)
                # 10 times faster than isfinite over all values
                if not cast.numel() or torch.isfinite(torch.stack(cast.aminmax())).all():
                    yield 0, cast.contiguous()
                    continue
                if not torch.isfinite(piece).all():
                    found = non_finite_message(self.origin, self.name, files)
                    raise CheckpointError(f"{self.checkpoint.location}: {found}; the checkpoint is damaged")
                if target is torch.float16:
                    raise CheckpointError(
                        f"tensor {self.name}: a value of {float(piece.abs().max()):.3g} does not fit "
                        "float16; choose `precision=bf16` or fp32, or with quantised weights "
                        "`activations=fp32`"
                    )
                yield 0, cast.contiguous()


_workers: ContextVar[tuple[int, ThreadPoolExecutor] | None] = ContextVar("workers", default=None)
"""Those of the outermost block of `workers`."""


@contextmanager
def workers() -> Iterator[tuple[int, ThreadPoolExecutor]]:
    """Threads that compute some rows each, as many as torch's own, which would synchronise too often."""
    if (found := _workers.get()) is not None:
        yield found
        return
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            found = count, pool
            _workers.set(found)
            yield found
    finally:
        _workers.set(None)
        torch.set_num_threads(count)


def non_finite_message(origin: Origin, name: str, files: Reader) -> str:
    """A message on the tensor of the weight `name` that holds NaN or infinity."""
    for info in dict.fromkeys(origin.tensors()):
        for region in blocks(info.shape, SLICE_BYTES // 4):
            piece = files.read(info, region)
            if torch.isnan(piece).any():
                return f"tensor {info.name} contains NaN"
            if torch.isinf(piece).any():
                return f"tensor {info.name} contains infinite numbers"
    return f"the numbers of {name} are not all finite"


class StoredPart(ir.LazyTensor):
    """A part of a weight as an initializer of a graph, without its values."""

    def __init__(self, source: WeightSource, index: int = 0, *, shape: tuple[int, ...] | None = None) -> None:
        self.part = source.parts[index]
        sizes, name = ir.Shape(self.part.shape if shape is None else shape), self.part.named(source.name)
        super().__init__(self._whole, self.part.dtype, sizes, name=name)
        self.source, self.index = source, index

    @property
    def key(self) -> tuple[Hashable, int]:
        """Equal keys have equal bytes."""
        return self.source.key, self.index

    def changed(self, change: Callable[[Origin], Origin], dtype: ir.DataType | None = None) -> StoredPart | None:
        """The weight with a changed origin, as `dtype`; None if quantised. Raises ValueError if reshaped."""
        if self.is_reshaped:
            raise ValueError(f"{self.name}: the axes of {list(self.part.shape)} are gone in {list(self.shape)}")
        if not isinstance(self.source, FloatSource):
            return None
        return StoredPart(replace(self.source, origin=change(self.source.origin), dtype=dtype or self.source.dtype))

    def permuted(self, order: tuple[int, ...]) -> StoredPart | None:
        """The same weight with axis `order[i]` as axis i; None where it is quantised."""
        return self.changed(lambda origin: origin.permuted(order))

    def interleaved(self, axis: int) -> StoredPart | None:
        """The same weight with its halves along `axis`, [g; u], as g0, u0, g1, u1, ...; None where it is quantised."""
        order = torch.arange(self.part.shape[axis]).reshape(2, -1).T.reshape(-1).tolist()
        return self.changed(lambda origin: ReorderedOrigin(origin, axis, tuple(order)))

    def joined(self, others: Sequence[StoredPart], axis: int, name: str) -> StoredPart | None:
        """This weight and the others concatenated along `axis`, named `name`; None where they cannot be joined."""
        everyone, own = [each.source for each in (self, *others)], self.source
        kind = FloatSource, own.dtype, own.checkpoint
        if any(each.is_reshaped for each in (self, *others)):
            return None
        if not all((type(each), each.dtype, each.checkpoint) == kind for each in everyone):
            return None
        origin = JoinedOrigin.of(tuple(each.origin for each in everyone), axis)
        parameters = tuple(parameter for each in everyone for parameter in each.parameters)
        return StoredPart(replace(own, origin=origin, name=name, parameters=parameters))

    def reshaped(self, shape: tuple[int, ...]) -> StoredPart:
        """The same bytes as a tensor of another shape. To be applied last: axes are those of the part."""
        if math.prod(shape) != self.size:
            raise ValueError(f"{self.name}: {list(self.shape)} cannot be viewed as {list(shape)}")
        return StoredPart(self.source, self.index, shape=shape)

    @property
    def is_reshaped(self) -> bool:
        """Whether its shape differs from that of the part."""
        return tuple(self.shape.numpy()) != self.part.shape

    def _whole(self) -> ir.TensorProtocol:
        """The whole part in memory, for tests and tools."""
        pieces = [piece.reshape(-1) for index, piece in self.source.pieces() if index == self.index]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=to_torch(of_ir(self.part.dtype)))
        return ir.tensor(flat.reshape(tuple(self.shape.numpy())), dtype=self.part.dtype)


def weight_part(value: ir.Value | None) -> StoredPart | None:
    """The weight part of `value`; None where it is no checkpoint weight."""
    tensor = None if value is None else value.const_value
    return tensor if isinstance(tensor, StoredPart) else None
