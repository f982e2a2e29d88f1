"""Mutations of a valid file: of its bytes, and of the values of its JSON text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@fields": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@digits": "1" + "0" * 400,
    "@many digits": "9" * 5000,
    "@huge": "1e999",
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@half": '"\\ud800"',
}
"""JSON text that json.dumps does not write, by the text that stands for it."""
NASTY: tuple[Any, ...] = (
    *RAW,
    *(None, True, 0, -1, 2**31, 2**40, 2**63, -(2**63), 0.5, 1e300),
    *("", "x", "complex128", "\x00", "\x1b]0;title\x07", "../../etc/passwd", "/dev/zero", "a" * 100_000),
    *([], {}, [[]], [0], [-1, 2**62], {"": {}}),
)
LENGTHS = st.sampled_from((0, 1, 255, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within one."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _paths(inner, (*path, key))


@st.composite
def json_texts(draw: DrawFn, value: Any, most: int = 3) -> bytes:
    """The JSON text of `value` with up to `most` of its values changed, removed, added or repeated."""
    changed = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for path in _paths(changed):  # every field is drawn as often, however many records have it
            kinds.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)
        if not kinds:
            break
        *way, last = draw(st.sampled_from(kinds[draw(st.sampled_from(list(kinds)))]))
        place = changed
        for key in way:
            place = place[key]
        how = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "repeat")))
        if how == "replace":
            place[last] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif how == "remove":
            del place[last]
        elif how == "repeat" and isinstance(place, list):
            place += [copy.deepcopy(place[last])] * draw(st.sampled_from((1, 1000)))
        elif isinstance(place, dict):
            place["unknown"] = copy.deepcopy(draw(st.sampled_from(NASTY)))
    text = json.dumps(changed)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


@st.composite
def byte_texts(draw: DrawFn, data: bytes, most: int = 4, head: int | None = None) -> bytes:
    """`data` with up to `most` changes, within its first `head` bytes: bytes set, inserted, removed or repeated, the
    end cut off, or eight bytes set to a number, as lengths and counts are.
    """
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, min(len(changed), head or len(changed))))
        how = draw(st.sampled_from(("set", "insert", "remove", "repeat", "cut", "number")))
        if how == "set":
            changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif how == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif how == "remove":
            del changed[at : at + draw(st.sampled_from((1, 8, 100)))]
        elif how == "repeat":
            part = changed[at : at + draw(st.sampled_from((1, 8, 100)))]
            changed[at:at] = part * draw(st.sampled_from((1, 100)))
        elif how == "cut":
            del changed[at:]
        else:
            changed[at : at + 8] = draw(LENGTHS).to_bytes(8, "little")
    return bytes(changed)
