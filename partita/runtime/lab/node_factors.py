"""Variants of a node with other element types (of inputs, outputs and attributes), and with other attribute values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.observations.facts import Substitution
from partita.runtime.lab.change import (
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
from partita.runtime.place.tensor_types import element_of

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


def other_types(variant: Variant) -> Iterator[Variation]:
    """All inputs of one element type in another, if the operator allows it; then attributes that set a type."""
    for old in dict.fromkeys(element_of(feed.kind) for feed in variant.feeds):
        changes = ((new, _in_new_type(variant, old, new)) for new in _candidates(old)) if old is not None else ()
        for new, elements in islice((each for each in changes if each[1]), MOST_TYPES):
            yield described(_types(old or 0, new), with_elements(variant, elements, {}))
    for attribute in variant.node.attribute:
        if old := _type_of(attribute):
            for new in _candidates(old)[:MOST_TYPES]:
                changed = with_elements(variant, {}, {attribute.name: _attribute_in(attribute, new)})
                yield described(_types(old, new, f"as {attribute.name}"), changed)


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
            kind = getattr(onnx.AttributeProto, entry.kind.upper())  # a list may be empty
            made = onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value, attr_type=kind)
            before = f"{name}={value_text(now)}" if now is not None else f"{name} omitted"
            changed = with_attributes(variant, {name: made})
            yield described(Substitution(f"{name}={value_text(value)}", before), changed)


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
