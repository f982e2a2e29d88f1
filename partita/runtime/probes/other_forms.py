"""Other nodes of a node's operator, in the version that the node is of: whether the provider has the operator at all.

Changes to the node itself show what about it is in the way. Where none helps, only these tell an operator that the
provider does not have from one of which it does not take this node. Their forms are those of the support tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from partita import dtypes
from partita.runtime.probes.cases import COMPANY, NODE, Case, add_detached, case_model, fingerprint
from partita.runtime.support.forms import TYPE_ATTRIBUTES, Form, all_versions, forms
from partita.runtime.support.operators import Operator, plain
from partita.runtime.support.variants import COMPANY as BESIDE
from partita.runtime.support.variants import Types, Variant, as_example, assignments, batch_model, fragment
from partita.runtime.support.wanted import spelled
from partita.runtime.tensor_types import tensor_types

if TYPE_CHECKING:
    import onnx

MOST_FORMS, MOST_TYPES = 8, 10
"""In the node's own types and in those of the examples; and other types of the plainest form."""
MOST_COMPILED = 6
"""Of all, on a provider that compiles each."""
MOST_NAMED = 3
USUAL = frozenset({"tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)", "tensor(uint8)"})
"""Types that are tried in place of the node's."""


@dataclass(frozen=True, slots=True)
class OtherForm:
    """Another node of the operator."""

    words: str
    """Types, and what the form has that the plainest has not."""
    model: onnx.ModelProto
    same_types: bool
    """Its types are those of the node, as far as they are known."""


def other_forms(case: Case, *, compiles: bool) -> tuple[OtherForm, ...]:
    """Other nodes of a case's operator, those in its own types first; none where no example of it is known."""
    operator = operator_of(case)
    if operator is None:
        return ()
    own, bound = _types_of(case, operator), _variables_of(case, operator)
    known = {fingerprint(case_model(case, company=company)) for company in (False, True)}
    found: list[OtherForm] = []
    for variant in _variants(operator, own):
        model = _model_of(variant, company=compiles)
        key = fingerprint(model)
        if key not in known:
            known.add(key)
            types = _all_types(variant)
            # A body is written for types that no variable tells, and a type that is not known is not the same.
            same = not variant.form.node and all(own.get(name) == kind for name, kind in types.items() if name in bound)
            found.append(OtherForm(_said(variant.form, types), model, same))
    if compiles:
        found = sorted(found[:MOST_COMPILED], key=lambda form: not form.same_types)
    return tuple(found)


def operator_of(case: Case) -> Operator | None:
    """The version of the operator that the case has."""
    domain = plain(case.node.domain)
    opset = next((version for name, version in case.opsets.items() if plain(name) == domain), 1)
    versions = all_versions().get((domain, case.node.op_type), ())
    return next((entry for entry in reversed(versions) if entry.since <= opset), None)


def _variants(operator: Operator, own: dict[str, str]) -> Iterator[Variant]:
    """Forms in the node's types, then as their examples have them, then the plainest form in other types."""
    listed = forms_of(operator)
    yield from (_in_types(form, own) for form in listed)
    yield from map(as_example, listed)
    for form in listed[:1]:
        usual = (types for types in assignments(form)[0] if all(kind in USUAL for _, kind in types))
        yield from (Variant(form, types, "types") for types in islice(usual, MOST_TYPES))


@cache
def forms_of(operator: Operator) -> tuple[Form, ...]:
    """The plainest forms of a version."""
    return forms(operator)[:MOST_FORMS]


def _in_types(form: Form, own: dict[str, str]) -> Variant:
    """A form in the types of the node, where its operator allows them."""
    if form.node:  # its bodies are written for their types
        return as_example(form)
    some = dict(next(iter(assignments(form)[0]), ())) | dict(as_example(form).types)
    types: Types = tuple((name, own.get(name, kind)) for name, kind in some.items())
    return Variant(form, types, "types")


def _types_of(case: Case, operator: Operator) -> dict[str, str]:
    """The types of the case by type variable, as far as its inputs tell them and those of its outputs follow."""
    found: dict[str, str] = {}
    for index, name in enumerate(case.node.input):
        slot, feed = operator.input(index), case.feed(name)
        if slot is not None and feed is not None and (kind := spelled(feed.kind)) in slot.types:
            found.setdefault(slot.variable, kind)
    made = tensor_types(case_model(case))
    for index, name in enumerate(case.node.output):
        slot = operator.output(index)
        if slot is not None and name in made and (kind := spelled(made[name])) in slot.types:
            found.setdefault(slot.variable, kind)
    return found


def _variables_of(case: Case, operator: Operator) -> set[str]:
    """The type variables of the inputs and outputs that the node has."""
    slots = [operator.input(index) for index, name in enumerate(case.node.input) if name]
    slots += [operator.output(index) for index, name in enumerate(case.node.output) if name]
    return {slot.variable for slot in slots if slot is not None and len(slot.types) > 1}


def _model_of(variant: Variant, *, company: bool) -> onnx.ModelProto:
    """The node as an experiment has it, under the names that experiments go by."""
    import onnx

    model: onnx.ModelProto = onnx.ModelProto.FromString(
        batch_model([fragment(NODE, variant, company=company)], variant.form.operator)
    )
    for node in model.graph.node:
        if node.name == f"{NODE}_{BESIDE}":
            node.name = COMPANY
    if company and len(model.graph.node) == 1:
        add_detached(model.graph)
    return model


def _all_types(variant: Variant) -> dict[str, str]:
    """The types of a variant, with that of an output which only an attribute of its example tells."""
    types, form = dict(variant.types), variant.form
    output = form.operator.output(0)
    if output is not None and output.variable not in types and len(output.types) > 1:
        chosen = [form.attributes[name] for name in TYPE_ATTRIBUTES if isinstance(form.attributes.get(name), int)]
        if chosen and chosen[0]:
            types[output.variable] = _kind_of(chosen[0])
    return types


def _kind_of(number: int) -> str:
    """An element type as schemas spell it."""
    return f"tensor({dtypes.numbered(number).onnx_name.lower()})"


def _said(form: Form, types: dict[str, str]) -> str:
    """`T1 float32, T2 int64; mode=cubic`: what it has that the plainest form has not comes after the types."""
    kinds = ", ".join(f"{name} {_short(kind)}" for name, kind in types.items() if "(" not in name)
    plainest = forms_of(form.operator)[0]
    own = form.note or ", ".join(sorted(form.factors - plainest.factors)[:MOST_NAMED])
    return "; ".join(part for part in (kinds, own) if part)


def _short(kind: str) -> str:
    """float32 for tensor(float)."""
    element = dtypes.find(kind.removeprefix("tensor(").removesuffix(")")) if kind.startswith("tensor(") else None
    return element.name if element is not None else kind
