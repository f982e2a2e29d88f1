"""Attributes that go with an element type: which have another name for every type, and which hold a tensor of one.

An operator that has an attribute for each type says so in their names alone: keys_strings, keys_int64s and keys_floats
are one attribute, as int64_vocabulary and string_vocabulary are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.runtime.probes.schemas import Schema
from partita.runtime.tensor_types import is_small

if TYPE_CHECKING:
    import onnx

FLOAT, INT64, STRING = dtypes.numbers("float32", "int64", "string")
WORDS: Mapping[str, int] = {"float": FLOAT, "int": INT64, "int64": INT64, "string": STRING}
"""Words for a type in the name of an attribute, and the element type that they stand for; with an s for a list."""
Attributes = dict[str, "onnx.AttributeProto | None"]
"""What a node has instead, by name; None: left out."""


def retyped(
    attributes: Mapping[str, onnx.AttributeProto], schema: Schema | None, old: int, new: int
) -> Iterator[tuple[str, Attributes]]:
    """Each attribute that is of the old type, in the new one: its name without a type, and the change.

    None for an attribute that the operator has not for the new type.
    """
    for name, attribute in attributes.items():
        if attribute.HasField("t"):
            if attribute.t.data_type == old and (made := _tensor_in(attribute, new)) is not None:
                yield name, {name: made}
            continue
        found = _typed(name)
        if found is None or found[1] != old or schema is None:
            continue
        for other in schema.attributes:
            typed = _typed(other)
            if typed is not None and typed[0] == found[0] and typed[1] == new:
                yield found[0], {name: None, other: _list_in(attribute, other, new)}
                break


def types_of(
    attributes: Mapping[str, onnx.AttributeProto], schema: Schema | None
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Attributes that the operator has in several types, without the type in their names: the type that each has, and
    the others.
    """
    found = {}
    known = [typed for name in (schema.attributes if schema is not None else ()) if (typed := _typed(name)) is not None]
    for name in attributes:
        own = _typed(name)
        others = tuple(element for stem, element in known if own is not None and stem == own[0] and element != own[1])
        if own is not None and others:
            found[own[0]] = (own[1], others)
    return found


def _typed(name: str) -> tuple[str, int] | None:
    """The name without its type, a list told from a single value, and the type; None where the name has no type."""
    words = name.split("_")
    places = [place for place, word in enumerate(words) if word.removesuffix("s") in WORDS]
    if len(places) != 1 or len(words) == 1:
        return None
    word = words.pop(places[0])
    return "_".join(words) + ("[]" if word.endswith("s") else ""), WORDS[word.removesuffix("s")]


def _list_in(attribute: onnx.AttributeProto, name: str, new: int) -> onnx.AttributeProto:
    """An attribute of a value or a list of them under another name, in another type."""
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    several = isinstance(value, list | tuple) or not isinstance(value, str | bytes | int | float)
    made = _values_in(list(value) if several else [value], new)
    return onnx.helper.make_attribute(name, made if several else made[0])


def _tensor_in(attribute: onnx.AttributeProto, new: int) -> onnx.AttributeProto | None:
    """An attribute that holds a small tensor, in another type; None where it is large, or cannot be in that type."""
    import onnx

    if not is_small(attribute.t):
        return None
    try:
        values = _values_in(onnx.numpy_helper.to_array(attribute.t).reshape(-1).tolist(), new)
        tensor = onnx.helper.make_tensor(attribute.t.name, new, list(attribute.t.dims), values)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    return onnx.helper.make_attribute(attribute.name, tensor)


def _values_in(values: list[Any], new: int) -> list[Any]:
    """The values in another type: keys that were different stay so, and texts that are no numbers are counted."""
    if new == STRING:
        return [each.decode("utf-8", errors="replace") if isinstance(each, bytes) else str(each) for each in values]
    convert = float if dtypes.numbered(new).kind == "float" else int
    try:
        made = [convert(each) for each in values]
    except (TypeError, ValueError):
        made = []
    return made if len(set(made)) == len(set(values)) else [convert(place) for place in range(len(values))]
