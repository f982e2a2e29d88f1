"""Reads an ONNX file without the values of its weights, in time and memory independent of their size.

Protobuf's parser copies every byte. This one walks the wire format (https://protobuf.dev/programming-guides/encoding)
over a memory map and drops the values of large tensors before it parses. Field numbers are those of onnx.proto3.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from partita.runtime.place.model_file import bytes_for_text
from partita.untrusted_files import MOST_BYTES, check_size

if TYPE_CHECKING:
    import onnx

LARGE_BYTES = 4096
"""Messages up to this size in bytes keep their values."""
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST_VARINT = 10
DEEPEST = 64
"""Maximum nesting of messages, far above that of real graphs."""
INSIDE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Fields whose messages contain tensors, by message type."""
VALUES = frozenset({4, 5, 6, 7, 9, 10, 11})
"""Fields of a tensor's values: float_data, int32_data, string_data, int64_data, raw_data, double_data, uint64_data."""


def read_light(path: Path) -> onnx.ModelProto:
    """Read a model without the values of large tensors.

    Raises ValueError if the file is truncated or no ONNX file, OSError if it cannot be read.
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
    if bad := bytes_for_text(proto):
        raise ValueError(f"its {bad} is not UTF-8")
    return proto


def _reduced(data: mmap.mmap, start: int, end: int, kind: str, depth: int) -> Iterator[bytes]:
    """The bytes of the message at `start`, without values of large tensors. Raises ValueError if it is damaged."""
    if depth > DEEPEST:
        raise ValueError("its messages are nested too deeply")
    inside = INSIDE[kind]
    position = start
    while position < end:
        begin = position
        key, position = _varint(data, position, end)
        number, wire = key >> 3, key & 7
        if not number or wire not in (VARINT, FIXED64, LENGTH, FIXED32):
            raise ValueError("it is not a protobuf message")
        size = {FIXED64: 8, FIXED32: 4}.get(wire, 0)
        if wire in (VARINT, LENGTH):
            value, position = _varint(data, position, end)
            size = value if wire == LENGTH else 0
        if size > end - position:
            raise ValueError("it is truncated")
        if wire == LENGTH and number in inside and size > LARGE_BYTES:
            body = b"".join(_reduced(data, position, position + size, inside[number], depth + 1))
            yield _varint_bytes(key) + _varint_bytes(len(body)) + body
        elif kind != "tensor" or number not in VALUES:
            yield data[begin : position + size]
        position += size


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    """A variable-length integer, and its end position."""
    value = shift = 0
    for place in range(position, min(position + LONGEST_VARINT, end)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise ValueError("it is truncated, or not a protobuf message")


def _varint_bytes(value: int) -> bytes:
    """An integer as variable-length bytes."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
