"""Another element type, of the inputs or of what an attribute makes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from partita import dtypes
from partita.observations.facts import Swap
from partita.runtime.probes.cases import Case, Feed
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.schemas import Schema
from partita.runtime.probes.typed_attributes import Attributes, retyped, types_of
from partita.runtime.probes.variants import TYPE_ATTRIBUTES, Change, cast, copy_attribute, schema_of
from partita.runtime.tensor_types import element_of

if TYPE_CHECKING:
    import onnx

NAME = "type"
FLOAT, UINT8, INT8, INT32, INT64 = dtypes.numbers("float32", "uint8", "int8", "int32", "int64")
FLOAT16, DOUBLE, UINT32, BFLOAT16 = dtypes.numbers("float16", "float64", "uint32", "bfloat16")
FLOATS = (FLOAT, FLOAT16, BFLOAT16, DOUBLE)
INTEGERS = (INT32, INT64, UINT32, UINT8, INT8)
OTHERS = (FLOAT, FLOAT16, INT32, INT8, UINT8, INT64)
"""Element types to try, likeliest first, for floats, for integers, and for the rest."""
VALUE_ATTRIBUTES = frozenset({"value"})
"""Attributes that hold a tensor, whose type is that of an output."""
MOST_TYPES = 5
PAIRS = ((FLOAT, INT32), (FLOAT, FLOAT16), (INT32, FLOAT), (FLOAT16, FLOAT), (FLOAT, UINT8), (INT64, FLOAT))
"""Types of inputs and of what is made of them, likeliest first."""


def _other_types(case: Case) -> Iterator[Idea]:
    """Each element type of the inputs in place by another, wherever the operator allows it."""
    schema = schema_of(case)
    for old in dict.fromkeys(element_of(feed.kind) for feed in case.feeds):
        if old is not None:
            ideas = (
                Idea(NAME, change, swap=_types(old, new))
                for new in _candidates(old)
                if (elements := _in_new_type(case, schema, case.feeds, old, new))
                for change in _with_attributes(case, schema, Change(elements=elements), old, new)
            )
            yield from islice(ideas, MOST_TYPES)
    yield from _other_output_types(case)
    yield from _other_attribute_types(case, schema)
    yield from _one_variable(case, schema)
    yield from _both_types(case, schema)


def _with_attributes(case: Case, schema: Schema | None, change: Change, old: int, new: int) -> Iterator[Change]:
    """A change of the inputs' type with the attributes that are of the old type in the new one: all of them, then each
    alone, for some may be of what the node makes.
    """
    given = {entry.name: entry for entry in case.node.attribute if entry.name not in VALUE_ATTRIBUTES}
    moved = list(retyped(given, schema, old, new))
    everything: Attributes = {name: entry for _, changed in moved for name, entry in changed.items()}
    yield change | Change(attributes=everything)
    if len(moved) > 1:
        yield from (change | Change(attributes=changed) for _, changed in moved)


def _other_attribute_types(case: Case, schema: Schema | None) -> Iterator[Idea]:
    """Each attribute that has another name in every type, in another type: it may be that of what the node makes."""
    given = {entry.name: entry for entry in case.node.attribute}
    for stem, (old, others) in types_of(given, schema).items():
        for new in others:
            for found, changed in retyped(given, schema, old, new):
                if found == stem:
                    yield Idea(NAME, Change(attributes=changed), swap=_types(old, new, f"as {stem.removesuffix('[]')}"))


def _both_types(case: Case, schema: Schema | None) -> Iterator[Idea]:
    """The type of the inputs and the one that an attribute chooses, both at once: a Cast between two other types."""
    chosen = next((entry for entry in case.node.attribute if entry.name in TYPE_ATTRIBUTES and entry.i), None)
    old = next((number for feed in case.feeds if (number := element_of(feed.kind)) is not None), None)
    if chosen is None or old is None:
        return
    for new, made in PAIRS:
        elements = _in_new_type(case, schema, case.feeds, old, new) if new != old else {}
        if elements and made != chosen.i:
            swap = Swap(f"{_type_name(new)} to {_type_name(made)}", f"{_type_name(old)} to {_type_name(chosen.i)}")
            change = Change(elements=elements, attributes={chosen.name: _attribute_in(chosen, made)})
            yield Idea(NAME, change, swap=swap)


def _one_variable(case: Case, schema: Schema | None) -> Iterator[Idea]:
    """The type of one type variable alone, where several have the same type."""
    if schema is None:
        return
    groups: dict[str, list[Feed]] = {}
    for position, name in enumerate(case.node.input):
        slot, feed = schema.slot(position), case.feed(name)
        if slot is not None and feed is not None and len(slot.types) > 1:
            groups.setdefault(slot.variable, []).append(feed)
    if len(groups) < 2:
        return
    for feeds in groups.values():
        old = element_of(feeds[0].kind)
        shared = sum(element_of(others[0].kind) == old for others in groups.values())
        if old is None or shared < 2:
            continue
        where = f"in {_listed_inputs(case, schema, {feed.name for feed in feeds})}"
        for new in _candidates(old)[:MOST_TYPES]:
            elements = _in_new_type(case, schema, feeds, old, new)
            if elements:
                yield Idea(NAME, Change(elements=elements), swap=_types(old, new, where, partly=True))


def _listed_inputs(case: Case, schema: Schema, names: Collection[str]) -> str:
    """Inputs as the operator calls them."""
    slots = [schema.slot(position) for position, name in enumerate(case.node.input) if name in names]
    return " and ".join(dict.fromkeys(slot.name for slot in slots if slot is not None))


def _other_output_types(case: Case) -> Iterator[Idea]:
    """Another element type in an attribute that decides the type of an output."""
    for attribute in case.node.attribute:
        if attribute.name in TYPE_ATTRIBUTES and attribute.i:
            old = attribute.i
        elif attribute.name in VALUE_ATTRIBUTES and attribute.HasField("t") and not attribute.t.external_data:
            old = attribute.t.data_type
        else:
            continue
        for new in _candidates(old)[:MOST_TYPES]:
            change = Change(attributes={attribute.name: _attribute_in(attribute, new)})
            yield Idea(NAME, change, swap=_types(old, new, f"as {attribute.name}"))


def _attribute_in(attribute: onnx.AttributeProto, new: int) -> onnx.AttributeProto:
    """An attribute that holds an element type, or a tensor, with another one."""
    copy = copy_attribute(attribute)
    if attribute.name in TYPE_ATTRIBUTES:
        copy.i = new
    else:
        copy.t.CopyFrom(cast(attribute.t, new))
    return copy


def _candidates(old: int) -> tuple[int, ...]:
    """Element types to try in place of one, likeliest first. How many is limited once it is known which of them fit."""
    order: tuple[int, ...] = (
        (*FLOATS, INT32, INT8, UINT8) if old in FLOATS else (INT32, INT64, FLOAT, FLOAT16, INT8, UINT8, UINT32)
    )
    if old not in FLOATS and old not in INTEGERS:
        order = OTHERS
    return tuple(entry for entry in order if entry != old)


def _in_new_type(case: Case, schema: Schema | None, feeds: Iterable[Feed], old: int, new: int) -> dict[str, int]:
    """The inputs among `feeds` that have the old type, in the new one, where the operator allows it."""
    return {feed.name: new for feed in feeds if element_of(feed.kind) == old and _allows(case, schema, feed.name, new)}


def _allows(case: Case, schema: Schema | None, name: str, new: int) -> bool:
    """Whether the operator takes the type at every place where the node reads `name`; unknown operators may."""
    places = [position for position, other in enumerate(case.node.input) if other == name]
    if schema is None:
        return True
    slots = [schema.slot(position) for position in places]
    return bool(places) and all(slot is not None and new in slot.types for slot in slots)


def _types(old: int, new: int, where: str = "", *, partly: bool = False) -> Swap:
    """`float32 in place of int64`."""
    return Swap(_type_name(new), _type_name(old), where, partly)


def _type_name(element: int) -> str:
    """float32 for FLOAT."""
    return dtypes.numbered(element).name


FACTOR = Factor(NAME, kind="other types", rank=2, vary=_other_types, part=Part(3, _other_types))
