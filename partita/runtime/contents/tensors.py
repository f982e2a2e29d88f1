"""Stored tensors of an ONNX file: what they are, where they lie, and which of them several graphs share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """One tensor that a file has stored; its values are not read."""

    name: str
    dtype: str
    """In ONNX's spelling; unknown for a number that ONNX does not have."""
    shape: tuple[int, ...]
    size_bytes: int
    """0 for strings."""
    file: str
    """The ONNX file, or the one beside it that holds the values."""
    place: tuple[object, ...]
    """The same for tensors that are the same bytes of the same file."""

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def stored(tensor: onnx.TensorProto, file: str) -> Stored:
    """A tensor of the ONNX file `file`."""
    shape = tuple(max(size, 0) for size in tensor.dims)
    try:
        dtype = dtypes.numbered(tensor.data_type).name
        size = dtypes.size_bytes(dtype, shape)
    except ValueError:
        dtype, size = (dtypes.numbered(tensor.data_type).name if _is_known(tensor.data_type) else UNKNOWN), 0
    outside = {entry.key: entry.value for entry in tensor.external_data}
    if "location" not in outside:
        return Stored(tensor.name, dtype, shape, size, file, (file, tensor.name))
    data = beside(file, outside["location"])
    return Stored(tensor.name, dtype, shape, size, data, (data, outside.get("offset", "0"), size))


def beside(file: str, location: str) -> str:
    """A file that the ONNX file `file` names, relative to the folder that `file` is relative to."""
    return str(PurePosixPath(file).parent / location)


def _is_known(number: int) -> bool:
    try:
        dtypes.numbered(number)
    except ValueError:
        return False
    return True


def initializers(graph: onnx.GraphProto, file: str, scope: str = "") -> Iterator[tuple[str, Stored]]:
    """Stored tensors of a graph and the bodies in it, by name."""
    for tensor in graph.initializer:
        yield tensor.name, _scoped(stored(tensor, file), scope)
    for sparse in graph.sparse_initializer:
        yield sparse.values.name, _scoped(stored(sparse.values, file), scope)
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield node.output[0], _scoped(stored(attribute.t, file), f"{scope}{node.output[0]}")
        for number, body in enumerate(bodies(node)):
            yield from initializers(body, file, f"{scope}{node.name}[{number}]/")


def _scoped(tensor: Stored, scope: str) -> Stored:
    """The same tensor, told from those of its name in other graphs of the file, where it lies in it."""
    if not scope or tensor.place != (tensor.file, tensor.name):
        return tensor
    return Stored(
        tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes, tensor.file, (tensor.file, scope, tensor.name)
    )
