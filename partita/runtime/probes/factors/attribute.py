"""Attributes at their defaults, and an Einsum of fewer operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partita.observations.facts import Swap
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.schemas import Schema
from partita.runtime.probes.variants import TYPE_ATTRIBUTES, Change, copy_attribute, optional_outputs, schema_of

if TYPE_CHECKING:
    import onnx

NAME = "attribute"


def _other_attributes(case: Case) -> Iterator[Idea]:
    """Each attribute that can be left out, left out; and without the optional outputs, which it may have called for."""
    schema = schema_of(case)
    for attribute in case.node.attribute:
        if _can_go(attribute, schema):
            words, change = f"{attribute.name}={_shown(attribute)}", Change(attributes={attribute.name: None})
            yield Idea(NAME, change, words, removes=True)
            fewer = optional_outputs(case, schema)
            if fewer:
                both = change | Change(outputs_left_out=frozenset(fewer))
                yield Idea(NAME, both, f"{words} and its optional outputs", removes=True)


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
    going = {attribute.name: None for attribute in case.node.attribute if _can_go(attribute, schema)}
    if len(going) > 1:
        yield Idea(NAME, Change(attributes=going), "attributes at their defaults", parts=(NAME, NAME))


def _can_go(attribute: onnx.AttributeProto, schema: Schema | None) -> bool:
    """Whether an attribute may be left out, and has another value than it would have then."""
    if schema is None or schema.attributes.get(attribute.name, True) or attribute.name in TYPE_ATTRIBUTES:
        return False
    default = schema.defaults.get(attribute.name)
    return default is None or default != attribute.SerializeToString()


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
    """Both kinds."""
    yield from _other_attributes(case)
    yield from _fewer_operands(case)


FACTOR = Factor(NAME, kind="attributes left out", rank=4, vary=_vary, part=Part(1, _with_defaults))
