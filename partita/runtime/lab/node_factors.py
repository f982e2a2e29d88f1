"""Variants of a node with other element types (of inputs, outputs and attributes), and with other attribute values.

Some operators have one attribute per type: keys_strings, keys_int64s and keys_floats are variants of one attribute, as
are int64_vocabulary and string_vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.observations.facts import Substitution
from partita.runtime.lab.change import Change, Variation, cast, operator_of, optional_outputs, variations
from partita.runtime.lab.forms import plainest_forms
from partita.runtime.lab.schema import TYPE_ATTRIBUTES, Operator
from partita.runtime.lab.variant import ExperimentInput, Variant
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
Attributes = dict[str, "onnx.AttributeProto | None"]
"""Replacement attributes by name; None: omitted."""


def other_types(variant: Variant) -> Iterator[Variation]:
    """Each element type of the inputs replaced by another, if the operator allows it."""
    operator = operator_of(variant)
    for old in dict.fromkeys(element_of(feed.kind) for feed in variant.feeds):
        if old is not None:
            found = (
                variation
                for new in _candidates(old)
                if (elements := _in_new_type(variant, operator, variant.feeds, old, new))
                for change in _with_attributes(variant, operator, Change(elements=elements), old, new)
                for variation in variations(variant, "type", change, substitution=_types(old, new))
            )
            yield from islice(found, MOST_TYPES)
    yield from _other_output_types(variant)
    yield from _other_attribute_types(variant, operator)
    yield from _one_variable(variant, operator)
    yield from _both_types(variant, operator)


def _with_attributes(
    variant: Variant, operator: Operator | None, change: Change, old: int, new: int
) -> Iterator[Change]:
    """A change of the inputs' type with all attributes of that type, then with each alone."""
    moved = [
        changed
        for attribute in variant.node.attribute
        for _, own, other, changed in _in_other_types(attribute, operator)
        if (own, other) == (old, new)
    ]
    everything: Attributes = {name: entry for changed in moved for name, entry in changed.items()}
    yield change | Change(attributes=everything)
    if len(moved) > 1:
        yield from (change | Change(attributes=changed) for changed in moved)


def _other_attribute_types(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """Each attribute with one name per type, in another type, which may set an output's type."""
    for attribute in variant.node.attribute:
        for name, old, new, changed in _in_other_types(attribute, operator):
            substitution = _types(old, new, f"as {name.removesuffix('[]')}")
            yield from variations(variant, "type", Change(attributes=changed), substitution=substitution)


def _both_types(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """Input type and attribute type changed together, e.g. a Cast between two other types."""
    chosen = next((entry for entry in variant.node.attribute if entry.name in TYPE_ATTRIBUTES and entry.i), None)
    old = next((number for feed in variant.feeds if (number := element_of(feed.kind)) is not None), None)
    if chosen is None or old is None:
        return
    for new, made in PAIRS:
        elements = _in_new_type(variant, operator, variant.feeds, old, new) if new != old else {}
        if elements and made != chosen.i:
            substitution = Substitution(
                f"{_type_name(new)} to {_type_name(made)}", f"{_type_name(old)} to {_type_name(chosen.i)}"
            )
            change = Change(elements=elements, attributes={chosen.name: _attribute_in(chosen, made)})
            yield from variations(variant, "type", change, substitution=substitution)


def _one_variable(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """One type variable changed, if several have the same type."""
    if operator is None:
        return
    groups: dict[str, list[ExperimentInput]] = {}
    for position, name in enumerate(variant.node.input):
        slot, feed = operator.input(position), variant.feed(name)
        if slot is not None and feed is not None and len(slot.types) > 1:
            groups.setdefault(slot.variable, []).append(feed)
    if len(groups) < 2:
        return
    for feeds in groups.values():
        old = element_of(feeds[0].kind)
        shared = sum(element_of(others[0].kind) == old for others in groups.values())
        if old is None or shared < 2:
            continue
        names = {feed.name for feed in feeds}
        slots = [operator.input(position) for position, name in enumerate(variant.node.input) if name in names]
        where = f"in {' and '.join(dict.fromkeys(slot.name for slot in slots if slot is not None))}"
        for new in _candidates(old)[:MOST_TYPES]:
            elements = _in_new_type(variant, operator, feeds, old, new)
            if elements:
                yield from variations(
                    variant, "type", Change(elements=elements), substitution=_types(old, new, where, partly=True)
                )


def _other_output_types(variant: Variant) -> Iterator[Variation]:
    """Another element type in an attribute that sets an output's type."""
    for attribute in variant.node.attribute:
        if attribute.name in TYPE_ATTRIBUTES and attribute.i:
            old = attribute.i
        elif attribute.name in VALUE_ATTRIBUTES and attribute.HasField("t") and not attribute.t.external_data:
            old = attribute.t.data_type
        else:
            continue
        for new in _candidates(old)[:MOST_TYPES]:
            change = Change(attributes={attribute.name: _attribute_in(attribute, new)})
            yield from variations(variant, "type", change, substitution=_types(old, new, f"as {attribute.name}"))


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


def _in_new_type(
    variant: Variant, operator: Operator | None, feeds: Iterable[ExperimentInput], old: int, new: int
) -> dict[str, int]:
    """The inputs in `feeds` of the old type, with the new type, if the operator allows it."""
    return {
        feed.name: new for feed in feeds if element_of(feed.kind) == old and _allows(variant, operator, feed.name, new)
    }


def _allows(variant: Variant, operator: Operator | None, name: str, new: int) -> bool:
    """Whether the operator allows the type at every position of `name`; True for unknown operators."""
    places = [position for position, other in enumerate(variant.node.input) if other == name]
    if operator is None:
        return True
    slots = [operator.input(position) for position in places]
    return bool(places) and all(slot is not None and new in slot.elements for slot in slots)


def _types(old: int, new: int, where: str = "", *, partly: bool = False) -> Substitution:
    """`float32 in place of int64`."""
    return Substitution(_type_name(new), _type_name(old), where, partly)


def _type_name(element: int) -> str:
    """The name of an element type, e.g. float32."""
    return dtypes.dtype_numbered(element).name


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
MOST_VALUES = 8
"""Maximum number of other values per node."""


def other_attributes(variant: Variant) -> Iterator[Variation]:
    """Every attribute change."""
    yield from _without_each(variant)
    yield from _other_values(variant)


def _without_each(variant: Variant) -> Iterator[Variation]:
    """Each optional attribute omitted; also without the optional outputs that it may have required."""
    operator = operator_of(variant)
    for attribute in variant.node.attribute:
        if may_omit(attribute, operator):
            words, change = attribute_text(attribute), Change(attributes={attribute.name: None})
            yield from variations(variant, "attribute", change, words, removes=True)
            fewer = optional_outputs(variant, operator)
            if fewer:
                both = change | Change(omitted_outputs=frozenset(fewer))
                yield from variations(variant, "attribute", both, f"{words} and its optional outputs", removes=True)


def _other_values(variant: Variant) -> Iterator[Variation]:
    """Attributes with other values: those of the operator's examples, the default, 1 for 0, 0 for 1."""
    import onnx

    operator = operator_of(variant)
    if operator is None:
        return
    given = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in variant.node.attribute
        if (known := operator.attributes.get(attribute.name)) is not None
        and known.kind in SIMPLE
        and attribute.type
        and not attribute.ref_attr_name
    }
    left = MOST_VALUES
    for name, entry in operator.attributes.items():
        if name in TYPE_ATTRIBUTES or entry.kind not in SIMPLE:
            continue
        default = _default(entry.default)
        now = _hashable(given.get(name, default))
        values = [_hashable(form.attributes[name]) for form in plainest_forms(operator) if name in form.attributes]
        # An attribute is a switch if 0 is known to be legal for it.
        switch = entry.kind == "int" and now in (0, 1) and 0 in (now, default, *values)
        others = [default, *values, *([1 - now] if switch else [])]
        for value in dict.fromkeys(_hashable(other) for other in others):
            # The default is covered by omitting the attribute.
            if value is None or value == now or (value == _hashable(default) and name in given):
                continue
            if name == "axis" and not _is_axis(variant, value):
                continue
            if not left:
                return
            left -= 1
            kind = getattr(onnx.AttributeProto, entry.kind.upper())  # a list may be empty
            made = onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value, attr_type=kind)
            before = f"{name}={_plain_text(now)}" if now is not None else f"{name} omitted"
            yield from variations(
                variant,
                "attribute",
                Change(attributes={name: made}),
                substitution=Substitution(f"{name}={_plain_text(value)}", before),
            )


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
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _plain_text(value: Any) -> str:
    """An attribute value as text."""
    return f"[{','.join(map(_plain_text, value))}]" if isinstance(value, tuple) else str(value)


def may_omit(attribute: onnx.AttributeProto, operator: Operator | None) -> bool:
    """Whether an attribute is optional and differs from its default."""
    if (
        operator is None
        or (entry := operator.attributes.get(attribute.name)) is None
        or entry.required
        or attribute.name in TYPE_ATTRIBUTES
    ):
        return False
    return bool(entry.default != attribute.SerializeToString())


def attribute_text(attribute: onnx.AttributeProto) -> str:
    """An attribute with its value, as text."""
    import onnx

    value = _hashable(onnx.helper.get_attribute_value(attribute))
    if isinstance(value, float):
        text = f"{value:g}"
    elif isinstance(value, int | str):
        text = str(value)
    else:
        try:
            text = f"[{','.join(map(str, map(_hashable, value)))}]" if len(value) <= 8 else f"{len(value)} values"
        except TypeError:
            text = "(a tensor or graph)"
    return f"{attribute.name}={text}"
