"""Variants with other attributes: omitted, with other values, and an Einsum of fewer operands."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from partita.observations.facts import Swap
from partita.runtime.lab.change import Change, Idea, operator_of, optional_outputs
from partita.runtime.lab.forms import plainest_forms
from partita.runtime.lab.schema import TYPE_ATTRIBUTES, Operator
from partita.runtime.lab.variant import Variant
from partita.runtime.place.tensor_types import rank_of

if TYPE_CHECKING:
    import onnx

SIMPLE = frozenset({"int", "string", "ints"})
"""Attribute kinds whose values are varied."""
MOST_VALUES = 8
"""Maximum number of other values per node."""


def other_attributes(variant: Variant) -> Iterator[Idea]:
    """Every attribute change."""
    yield from _without_each(variant)
    yield from _other_values(variant)
    yield from _fewer_operands(variant)


def _without_each(variant: Variant) -> Iterator[Idea]:
    """Each optional attribute omitted; also without the optional outputs that it may have required."""
    operator = operator_of(variant)
    for attribute in variant.node.attribute:
        if may_omit(attribute, operator):
            words, change = attribute_text(attribute), Change(attributes={attribute.name: None})
            yield Idea("attribute", change, words, removes=True)
            fewer = optional_outputs(variant, operator)
            if fewer:
                both = change | Change(omitted_outputs=frozenset(fewer))
                yield Idea("attribute", both, f"{words} and its optional outputs", removes=True)


def _other_values(variant: Variant) -> Iterator[Idea]:
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
        now = _plain(given.get(name, default))
        values = [_plain(form.attributes[name]) for form in plainest_forms(operator) if name in form.attributes]
        # An attribute is a switch if 0 is known to be legal for it.
        switch = entry.kind == "int" and now in (0, 1) and 0 in (now, default, *values)
        others = [default, *values, *([1 - now] if switch else [])]
        for value in dict.fromkeys(_plain(other) for other in others):
            # The default is covered by omitting the attribute.
            if value is None or value == now or (value == _plain(default) and name in given):
                continue
            if name == "axis" and not _is_axis(variant, value):
                continue
            if not left:
                return
            left -= 1
            kind = getattr(onnx.AttributeProto, entry.kind.upper())  # a list may be empty
            made = onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value, attr_type=kind)
            before = f"{name}={_plain_text(now)}" if now is not None else f"{name} omitted"
            yield Idea("attribute", Change(attributes={name: made}), swap=Swap(f"{name}={_plain_text(value)}", before))


def _is_axis(variant: Variant, value: Any) -> bool:
    """Whether the first input has this axis; True if its rank is unknown."""
    feed = variant.feed(variant.node.input[0]) if variant.node.input else None
    rank = rank_of(feed.kind) if feed is not None else None
    return rank is None or (isinstance(value, int) and -rank <= value < rank)


def _default(raw: bytes) -> Any:
    """The value of a serialised attribute; None for an empty one."""
    import onnx

    return onnx.helper.get_attribute_value(onnx.AttributeProto.FromString(raw)) if raw else None


def _plain(value: Any) -> Any:
    """An attribute value as a hashable Python value."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _plain_text(value: Any) -> str:
    """An attribute value as text."""
    return f"[{','.join(map(_plain_text, value))}]" if isinstance(value, tuple) else str(value)


def _fewer_operands(variant: Variant) -> Iterator[Idea]:
    """An Einsum of its first two operands, because many providers support only such products."""
    equation = next((entry for entry in variant.node.attribute if entry.name == "equation"), None)
    if equation is None or variant.node.op_type != "Einsum" or variant.node.domain or b"." in equation.s:
        return
    terms = equation.s.decode().partition("->")[0].replace(" ", "").split(",")
    if len(terms) < 3:
        return
    first, second = terms[:2]
    kept = "".join(letter for letter in first + second if (first + second).count(letter) == 1)
    product = deepcopy(equation)
    product.s = f"{first},{second}->{kept}".encode()
    change = Change(attributes={"equation": product}, omitted_inputs=frozenset(range(2, len(variant.node.input))))
    yield Idea("attribute", change, swap=Swap("2 operands", str(len(terms))))


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

    value = _plain(onnx.helper.get_attribute_value(attribute))
    if isinstance(value, float):
        text = f"{value:g}"
    elif isinstance(value, int | str):
        text = str(value)
    else:
        try:
            text = f"[{','.join(map(str, map(_plain, value)))}]" if len(value) <= 8 else f"{len(value)} values"
        except TypeError:
            text = "(a tensor or graph)"
    return f"{attribute.name}={text}"
