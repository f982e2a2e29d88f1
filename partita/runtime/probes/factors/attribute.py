"""Attributes at their defaults and at other values, and an Einsum of fewer operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from partita.observations.facts import Swap
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.other_forms import forms_of, operator_of
from partita.runtime.probes.schemas import Schema
from partita.runtime.probes.variants import TYPE_ATTRIBUTES, Change, copy_attribute, optional_outputs, schema_of

if TYPE_CHECKING:
    import onnx

NAME = "attribute"
SIMPLE = frozenset({"int", "string", "ints"})
"""Kinds of attributes of which other values are tried."""
MOST_VALUES = 8
"""Of one node."""


def _other_attributes(case: Case) -> Iterator[Idea]:
    """Each attribute that can be left out, left out; and without the optional outputs, which it may have called for."""
    schema = schema_of(case)
    for attribute in case.node.attribute:
        if can_go(attribute, schema):
            words, change = told(attribute), Change(attributes={attribute.name: None})
            yield Idea(NAME, change, words, removes=True)
            fewer = optional_outputs(case, schema)
            if fewer:
                both = change | Change(outputs_left_out=frozenset(fewer))
                yield Idea(NAME, both, f"{words} and its optional outputs", removes=True)


def _other_values(case: Case) -> Iterator[Idea]:
    """Attributes with other values: those that examples of the operator have, the default, and of 0 and 1 the other.

    Also where the node leaves the attribute out: a provider may have a kernel for another value alone, as CUDA has for
    linear_before_reset of GRU.
    """
    import onnx

    operator = operator_of(case)
    if operator is None:
        return
    given = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in case.node.attribute
        if (known := operator.attributes.get(attribute.name)) is not None
        and known.kind in SIMPLE
        and attribute.type
        and not attribute.ref_attr_name
    }
    schema, left = schema_of(case), MOST_VALUES
    for name, entry in operator.attributes.items():
        if name in TYPE_ATTRIBUTES or entry.kind not in SIMPLE:
            continue
        default = _default(schema, name)
        now = _plain(given.get(name, default))
        values = [_plain(form.attributes[name]) for form in forms_of(operator) if name in form.attributes]
        # A switch is one of which 0 is known to be legal: of a number of groups it is not.
        switch = entry.kind == "int" and now in (0, 1) and 0 in (now, default, *values)
        others = [default, *values, *([1 - now] if switch else [])]
        for value in dict.fromkeys(_plain(other) for other in others):
            # The default itself is tried by leaving the attribute out.
            if value is None or value == now or (value == _plain(default) and name in given):
                continue
            if name == "axis" and not _is_axis(case, value):
                continue
            if left == 0:
                return
            left -= 1
            kind = getattr(onnx.AttributeProto, entry.kind.upper())  # a list may be empty
            made = onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value, attr_type=kind)
            before = f"{name}={_text(now)}" if now is not None else f"{name} left out"
            yield Idea(NAME, Change(attributes={name: made}), swap=Swap(f"{name}={_text(value)}", before))


def _is_axis(case: Case, value: Any) -> bool:
    """Whether the first input has such an axis, where its rank is known."""
    feed = case.feed(case.node.input[0]) if case.node.input else None
    known = feed is not None and feed.kind.tensor_type.HasField("shape")
    rank = len(feed.kind.tensor_type.shape.dim) if feed is not None and known else None
    return rank is None or (isinstance(value, int) and -rank <= value < rank)


def _default(schema: Schema | None, name: str) -> Any:
    """The default value of an attribute; None when it has none."""
    import onnx

    raw = schema.defaults.get(name) if schema is not None else None
    return onnx.helper.get_attribute_value(onnx.AttributeProto.FromString(raw)) if raw else None


def _plain(value: Any) -> Any:
    """The value of an attribute as one that can be compared and looked up."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    """The same for people."""
    return f"[{','.join(map(_text, value))}]" if isinstance(value, tuple) else str(value)


def _fewer_operands(case: Case) -> Iterator[Idea]:
    """An Einsum of its first two operands only: the equation has no default, and many providers know such products."""
    equation = next((entry for entry in case.node.attribute if entry.name == "equation"), None)
    if equation is None or case.node.op_type != "Einsum" or case.node.domain or b"." in equation.s:
        return
    terms = equation.s.decode().partition("->")[0].replace(" ", "").split(",")
    if len(terms) < 3:
        return
    first, second = terms[:2]
    kept = "".join(letter for letter in first + second if (first + second).count(letter) == 1)
    product = copy_attribute(equation)
    product.s = f"{first},{second}->{kept}".encode()
    change = Change(attributes={"equation": product}, inputs_left_out=frozenset(range(2, len(case.node.input))))
    yield Idea(NAME, change, swap=Swap("2 operands", str(len(terms))))


def _with_defaults(case: Case) -> Iterator[Idea]:
    """Without any attribute that can be left out, where these are several."""
    schema = schema_of(case)
    going = {attribute.name: None for attribute in case.node.attribute if can_go(attribute, schema)}
    if len(going) > 1:
        yield Idea(NAME, Change(attributes=going), "attributes at their defaults", parts=(NAME, NAME))


def can_go(attribute: onnx.AttributeProto, schema: Schema | None) -> bool:
    """Whether an attribute may be left out, and has another value than it would have then."""
    if schema is None or schema.attributes.get(attribute.name, True) or attribute.name in TYPE_ATTRIBUTES:
        return False
    default = schema.defaults.get(attribute.name)
    return default is None or default != attribute.SerializeToString()


def told(attribute: onnx.AttributeProto) -> str:
    """An attribute with its value, for people."""
    return f"{attribute.name}={_shown(attribute)}"


def _shown(attribute: onnx.AttributeProto) -> str:
    """The value of an attribute, for people."""
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return str(value)
    try:
        texts = [entry.decode("utf-8", errors="replace") if isinstance(entry, bytes) else str(entry) for entry in value]
        return "[" + ",".join(texts) + "]" if len(value) <= 8 else f"{len(value)} values"
    except TypeError:
        return "(a tensor or graph)"


def _vary(case: Case) -> Iterator[Idea]:
    yield from _other_attributes(case)
    yield from _other_values(case)
    yield from _fewer_operands(case)


FACTOR = Factor(NAME, kind="other attributes", rank=4, vary=_vary, part=Part(1, _with_defaults))
