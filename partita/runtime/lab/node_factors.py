"""Variants of a node with other element types (of inputs, outputs and attributes), and with other attribute values.

Some operators have one attribute per type: keys_strings, keys_int64s and keys_floats are variants of one attribute, as
are int64_vocabulary and string_vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.observations.facts import Substitution
from partita.runtime.lab.change import (
    Attributes,
    Variation,
    cast,
    described,
    with_attributes,
    with_elements,
    without,
)
from partita.runtime.lab.forms import plainest_forms, value_text
from partita.runtime.lab.schema import TYPE_ATTRIBUTES, Operator
from partita.runtime.lab.variant import Variant
from partita.runtime.place.tensor_types import element_of, rank_of

if TYPE_CHECKING:
    import onnx

FLOAT, UINT8, INT8, INT32, INT64 = dtypes.numbers("float32", "uint8", "int8", "int32", "int64")
FLOAT16, DOUBLE, UINT32, BFLOAT16, STRING = dtypes.numbers("float16", "float64", "uint32", "bfloat16", "string")
FLOATS = (FLOAT, FLOAT16, BFLOAT16, DOUBLE)
INTEGERS = (INT32, INT64, UINT32, UINT8, INT8)
OTHERS = (FLOAT, FLOAT16, INT32, INT8, UINT8, INT64)
"""Element types to test, most likely supported first, for floats, integers, and others."""
VALUE_ATTRIBUTES = frozenset({"value"})
"""Attributes with a tensor whose type is that of an output."""
MOST_TYPES = 5
PAIRS = ((FLOAT, INT32), (FLOAT, FLOAT16), (INT32, FLOAT), (FLOAT16, FLOAT), (FLOAT, UINT8), (INT64, FLOAT))
"""Input and output types, most likely supported first."""
WORDS: Mapping[str, int] = {"float": FLOAT, "int": INT64, "int64": INT64, "string": STRING}
"""Type words in attribute names and their element types; an s marks a list."""


def other_types(variant: Variant) -> Iterator[Variation]:
    """Each element type of the inputs replaced by another, if the operator allows it; then attributes that set an
    output's type, and both.
    """
    typed = [each for attribute in variant.node.attribute for each in _in_other_types(attribute, variant.operator)]
    for old in dict.fromkeys(element_of(feed.kind) for feed in variant.feeds):
        if old is not None:
            yield from islice(_other_input_types(variant, old, typed), MOST_TYPES)
    chosen = [attribute for attribute in variant.node.attribute if _type_of(attribute)]
    for attribute in chosen:
        old = _type_of(attribute)
        for new in _candidates(old)[:MOST_TYPES]:
            changed = {attribute.name: _attribute_in(attribute, new)}
            yield described(_types(old, new, f"as {attribute.name}"), with_elements(variant, {}, changed))
    for name, old, new, attributes in typed:
        yield described(_types(old, new, f"as {name.removesuffix('[]')}"), with_attributes(variant, attributes))
    for attribute in chosen:
        if attribute.name in TYPE_ATTRIBUTES:
            yield from _both_types(variant, attribute)


def _other_input_types(
    variant: Variant, old: int, typed: Sequence[tuple[str, int, int, Attributes]]
) -> Iterator[Variation]:
    """All inputs of one type, and the attributes of that type, in another type."""
    for new in _candidates(old):
        elements = _in_new_type(variant, old, new)
        if elements:
            moved = [changed for _, *pair, changed in typed if pair == [old, new]]
            attributes = {name: entry for changed in moved for name, entry in changed.items()}
            yield described(_types(old, new), with_elements(variant, elements, attributes))


def _both_types(variant: Variant, chosen: onnx.AttributeProto) -> Iterator[Variation]:
    """Input type and attribute type changed together, e.g. a Cast between two other types."""
    old = next((number for feed in variant.feeds if (number := element_of(feed.kind)) is not None), 0)
    for new, made in PAIRS if old else ():
        elements = _in_new_type(variant, old, new) if new != old else {}
        if elements and made != chosen.i:
            now, before = (
                " to ".join(dtypes.dtype_numbered(number).name for number in pair)
                for pair in ((new, made), (old, chosen.i))
            )
            changed = with_elements(variant, elements, {chosen.name: _attribute_in(chosen, made)})
            yield described(Substitution(now, before), changed)


def _type_of(attribute: onnx.AttributeProto) -> int:
    """The element type that an attribute sets for an output; 0 for other attributes."""
    if attribute.name in TYPE_ATTRIBUTES:
        return int(attribute.i)
    is_value = attribute.name in VALUE_ATTRIBUTES and attribute.HasField("t") and not attribute.t.external_data
    return int(attribute.t.data_type) if is_value else 0


def _attribute_in(attribute: onnx.AttributeProto, new: int) -> onnx.AttributeProto:
    """An attribute with another element type or tensor type."""
    changed = deepcopy(attribute)
    if attribute.name in TYPE_ATTRIBUTES:
        changed.i = new
    else:
        changed.t.CopyFrom(cast(attribute.t, new))
    return changed


def _candidates(old: int) -> tuple[int, ...]:
    """Element types to test instead of `old`, most likely supported first."""
    order: tuple[int, ...] = (
        (*FLOATS, INT32, INT8, UINT8) if old in FLOATS else (INT32, INT64, FLOAT, FLOAT16, INT8, UINT8, UINT32)
    )
    if old not in FLOATS and old not in INTEGERS:
        order = OTHERS
    return tuple(entry for entry in order if entry != old)


def _in_new_type(variant: Variant, old: int, new: int) -> dict[str, int]:
    """The inputs of the old type, with the new type, if the operator allows it."""
    return {
        feed.name: new for feed in variant.feeds if element_of(feed.kind) == old and _allows(variant, feed.name, new)
    }


def _allows(variant: Variant, name: str, new: int) -> bool:
    """Whether the operator allows the type at every position of `name`; True for unknown operators."""
    if (operator := variant.operator) is None:
        return True
    slots = [operator.input(position) for position, other in enumerate(variant.node.input) if other == name]
    return bool(slots) and all(slot is not None and new in slot.elements for slot in slots)


def _types(old: int, new: int, where: str = "") -> Substitution:
    """`float32 in place of int64`."""
    return Substitution(dtypes.dtype_numbered(new).name, dtypes.dtype_numbered(old).name, where)


# --- attributes with one name per type ------------------------------------------------------------


def _in_other_types(
    attribute: onnx.AttributeProto, operator: Operator | None
) -> Iterator[tuple[str, int, int, Attributes]]:
    """An attribute with one name per type: the name without a type, its type, another type, and the change."""
    own = _typed(attribute.name)
    for other in operator.attributes if operator is not None and own is not None else ():
        typed = _typed(other)
        if own is not None and typed is not None and typed[0] == own[0] and typed[1] != own[1]:
            yield *own, typed[1], {attribute.name: None, other: _list_in(attribute, other, typed[1])}


def _typed(name: str) -> tuple[str, int] | None:
    """The name without its type, marked if a list, and the type; None for a name without a type."""
    words = name.split("_")
    places = [place for place, word in enumerate(words) if word.removesuffix("s") in WORDS]
    if len(places) != 1 or len(words) == 1:
        return None
    word = words.pop(places[0])
    return "_".join(words) + ("[]" if word.endswith("s") else ""), WORDS[word.removesuffix("s")]


def _list_in(attribute: onnx.AttributeProto, name: str, new: int) -> onnx.AttributeProto:
    """An attribute of one value or a list, under another name and in another type."""
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    several = isinstance(value, list | tuple) or not isinstance(value, str | bytes | int | float)
    made = _values_in(list(value) if several else [value], new)
    return onnx.helper.make_attribute(name, made if several else made[0])


def _values_in(values: list[Any], new: int) -> list[Any]:
    """The values in another type: distinct keys stay distinct, and non-numeric strings become positions."""
    if new == STRING:
        return [each.decode("utf-8", errors="replace") if isinstance(each, bytes) else str(each) for each in values]
    convert = float if dtypes.dtype_numbered(new).kind == "float" else int
    try:
        made = [convert(each) for each in values]
    except (TypeError, ValueError):
        made = []
    return made if len(set(made)) == len(set(values)) else [convert(place) for place in range(len(values))]


# --- attribute values ------------------------------------------------------------------------------------------------

SIMPLE = frozenset({"int", "string", "ints"})
"""Attribute kinds whose values are varied."""
MOST_SHOWN = 8
"""Maximum number of values of one attribute in a text."""
MOST_VALUES = 8
"""Maximum number of other values per node."""


def other_attributes(variant: Variant) -> Iterator[Variation]:
    """Each optional attribute omitted, also without optional outputs that it may have required; then other values."""
    operator = variant.operator
    fewer = operator.optional_outputs(variant.node) if operator is not None else {}
    for attribute in variant.node.attribute:
        if _may_omit(attribute, operator):
            text, changed = _attribute_text(attribute), with_attributes(variant, {attribute.name: None})
            yield described(text, changed, removes=True)
            if fewer:
                yield described(f"{text} and its optional outputs", without(changed, outputs=fewer), removes=True)
    if operator is not None:
        yield from islice(_other_values(variant, operator), MOST_VALUES)


def _other_values(variant: Variant, operator: Operator) -> Iterator[Variation]:
    """Attributes with other values: those of the operator's examples, the default, 1 for 0, 0 for 1."""
    import onnx

    given = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in variant.node.attribute
        if attribute.name in operator.attributes
        and operator.attributes[attribute.name].kind in SIMPLE
        and attribute.type
        and not attribute.ref_attr_name
    }
    for name, entry in operator.attributes.items():
        if name in TYPE_ATTRIBUTES or entry.kind not in SIMPLE:
            continue
        default = _hashable(_default(entry.default))
        now = _hashable(given[name]) if name in given else default
        values = [_hashable(form.attributes[name]) for form in plainest_forms(operator) if name in form.attributes]
        # An attribute is a switch if 0 is known to be legal for it.
        switch = entry.kind == "int" and now in (0, 1) and 0 in (now, default, *values)
        for value in dict.fromkeys((default, *values, *((1 - now,) if switch else ()))):
            # The default is covered by omitting the attribute.
            if value is None or value == now or (value == default and name in given):
                continue
            if name == "axis" and not _is_axis(variant, value):
                continue
            kind = getattr(onnx.AttributeProto, entry.kind.upper())  # a list may be empty
            made = onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value, attr_type=kind)
            before = f"{name}={value_text(now)}" if now is not None else f"{name} omitted"
            changed = with_attributes(variant, {name: made})
            yield described(Substitution(f"{name}={value_text(value)}", before), changed)


def _is_axis(variant: Variant, value: Any) -> bool:
    """Whether the first input has this axis; True if its rank is unknown."""
    feed = variant.feed(variant.node.input[0]) if variant.node.input else None
    rank = rank_of(feed.kind) if feed is not None else None
    return rank is None or (isinstance(value, int) and -rank <= value < rank)


def _default(raw: bytes) -> Any:
    """The value of a serialised attribute; None for an empty one."""
    import onnx

    return onnx.helper.get_attribute_value(onnx.AttributeProto.FromString(raw)) if raw else None


def _hashable(value: Any) -> Any:
    """An attribute value as a hashable Python value."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(map(_hashable, value)) if several else value


def _may_omit(attribute: onnx.AttributeProto, operator: Operator | None) -> bool:
    """Whether an attribute is optional and differs from its default."""
    if (
        operator is None
        or (entry := operator.attributes.get(attribute.name)) is None
        or entry.required
        or attribute.name in TYPE_ATTRIBUTES
    ):
        return False
    return bool(entry.default != attribute.SerializeToString())


def _attribute_text(attribute: onnx.AttributeProto) -> str:
    """An attribute with its value, as text."""
    import onnx

    value = _hashable(onnx.helper.get_attribute_value(attribute))
    if not isinstance(value, int | float | str | tuple):
        return f"{attribute.name}=(a tensor or graph)"
    if isinstance(value, tuple) and len(value) > MOST_SHOWN:
        return f"{attribute.name}={len(value)} values"
    return f"{attribute.name}={value_text(value)}"
