"""An ONNX file without the values of its weights: a file of two gigabytes is read as fast as one of a few kilobytes.

Protobuf's own parser copies every byte. Here the wire format (https://protobuf.dev/programming-guides/encoding) is
walked over a memory map, and of tensors whose message is large the fields that hold values are left out; what remains
is parsed as usual. Field numbers are those of onnx.proto3, which never change.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from partita.capped import MOST_BYTES, check_size

if TYPE_CHECKING:
    import onnx

LARGE_BYTES = 4096
"""Messages up to this are kept as they are, values included."""
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST_VARINT = 10
DEEPEST = 64
"""Messages in each other; graphs in graphs do not come near it, and Python's stack is safe."""
INSIDE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Fields that hold messages with tensors in them, by kind of message."""
VALUES = frozenset({4, 5, 6, 7, 9, 10, 11})
"""Fields of a tensor that hold its values: float_data, int32_data, string_data, int64_data, raw_data, double_data,
uint64_data.
"""


def read_light(path: Path) -> onnx.ModelProto:
    """The model in the file, without the values of large tensors.

    Raises ValueError when it is cut off or no ONNX file, OSError when it cannot be read.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    check_size(path, MOST_BYTES)
    with path.open("rb") as stream:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reduced = b"".join(_reduced(data, 0, len(data), "model", 0))
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(reduced)
    except DecodeError as error:
        raise ValueError("it cannot be parsed") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise ValueError("it has no graph or no operator set")
    return proto


def _reduced(data: mmap.mmap, start: int, end: int, kind: str, depth: int) -> Iterator[bytes]:
    """The bytes of the message at `start`, without values of large tensors. Raises ValueError where it is damaged."""
    if depth > DEEPEST:
        raise ValueError("its messages are nested too deep")
    inside = INSIDE[kind]
    position = start
    while position < end:
        begin = position
        key, position = _varint(data, position, end)
        number, wire = key >> 3, key & 7
        if not number:  # as in a file that was made longer with zeros, of which each pair would be a field
            raise ValueError("it is no protobuf message")
        if wire != LENGTH:
            position = _after(data, position, end, wire)
            if kind != "tensor" or number not in VALUES:
                yield data[begin:position]
            continue
        size, position = _varint(data, position, end)
        if size > end - position:
            raise ValueError("it is cut off")
        if number in inside and size > LARGE_BYTES:
            body = b"".join(_reduced(data, position, position + size, inside[number], depth + 1))
            yield _written(key) + _written(len(body)) + body
        elif kind != "tensor" or number not in VALUES:
            yield data[begin : position + size]
        position += size


def _after(data: mmap.mmap, position: int, end: int, wire: int) -> int:
    """Where a field that is no message ends."""
    if wire == VARINT:
        return _varint(data, position, end)[1]
    size = {FIXED64: 8, FIXED32: 4}.get(wire)
    if size is None:
        raise ValueError("it is no protobuf message")
    if size > end - position:
        raise ValueError("it is cut off")
    return position + size


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = shift = 0
    for place in range(position, min(position + LONGEST_VARINT, end)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise ValueError("it is cut off, or no protobuf message")


def _written(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
