"""Stored tensors of an ONNX file: type, size, and the bytes that several graphs may share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from partita import dtypes
from partita.runtime.model_file import bodies

if TYPE_CHECKING:
    import onnx

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored tensor, without its values."""

    name: str
    dtype: str
    """Element type; unknown for a number that ONNX does not have."""
    shape: tuple[int, ...]
    size_bytes: int
    """0 for strings."""
    file: str
    """The ONNX file, or the external data file that holds the values."""
    place: tuple[object, ...]
    """Equal for tensors that are the same bytes of the same file."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def stored(tensor: onnx.TensorProto, file: str) -> Stored:
    """A tensor of the ONNX file `file`."""
    shape = tuple(max(size, 0) for size in tensor.dims)
    dtype = dtypes.name_of(tensor.data_type) or UNKNOWN
    size = dtypes.size_bytes(dtype, shape) if dtypes.bits_of(dtype) is not None else 0
    outside = {entry.key: entry.value for entry in tensor.external_data}
    if "location" not in outside:
        return Stored(tensor.name, dtype, shape, size, file, (file, tensor.name))
    data = beside(file, outside["location"])
    return Stored(tensor.name, dtype, shape, size, data, (data, outside.get("offset", "0"), size))


def beside(file: str, location: str) -> str:
    """An external data file of the ONNX file `file`, relative to the same folder as `file`."""
    return str(PurePosixPath(file).parent / location)


def initializers(graph: onnx.GraphProto, file: str, scope: str = "") -> Iterator[tuple[str, Stored]]:
    """Stored tensors of a graph and its subgraphs, by name."""
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield tensor.name, _scoped(stored(tensor, file), scope)
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield node.output[0], _scoped(stored(attribute.t, file), f"{scope}{node.output[0]}")
        for number, body in enumerate(bodies(node)):
            yield from initializers(body, file, f"{scope}{node.name}[{number}]/")


def _scoped(tensor: Stored, scope: str) -> Stored:
    """The tensor with a place of its own, where another graph of the file may have one of the same name."""
    if not scope or tensor.place != (tensor.file, tensor.name):
        return tensor
    return replace(tensor, place=(tensor.file, scope, tensor.name))
