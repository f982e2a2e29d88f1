"""Other nodes of an operator than the node under test: they show whether the provider has the operator at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from partita.observations.facts import OTHER_FORM, ProbeRun
from partita.runtime.lab.forms import Form, assignments, plainest_forms
from partita.runtime.lab.schema import Operator, element_in, types_of
from partita.runtime.lab.variant import NODE, Variant, add_detached, fingerprint, variant_model
from partita.runtime.place.model_file import subgraphs_of
from partita.runtime.place.tensor_types import tensor_types

if TYPE_CHECKING:
    import onnx

MOST_TYPES = 10
"""Maximum number of other types for the plainest form of an operator."""
MOST_COMPILED = 6
"""Maximum number of other nodes of the operator on a compiling provider."""
MOST_NAMED = 3
TENSORS = frozenset({"tensor_type"})
USUAL = frozenset({"tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)", "tensor(uint8)"})


def other_nodes(variant: Variant, *, failed: bool, compiles: bool) -> Iterator[tuple[onnx.ModelProto, ProbeRun]]:
    """Models with other nodes of the operator, in the node's version, and their trials without an outcome.

    Nodes in the types of this node come first. `failed`: the provider fails on this node. `compiles`: see `Lab`.
    """
    if failed and any(True for _ in subgraphs_of(variant.node)):
        return  # the provider fails on the subgraphs, which other nodes of the operator do not have
    operator = variant.operator
    if operator is None:
        return
    node, plain = variant.node, variant_model(variant)
    kinds = {**tensor_types(plain), **{feed.name: feed.kind for feed in variant.feeds}}
    own = types_of(node, operator, kinds)
    slots = [operator.input(index) for index, name in enumerate(node.input) if name]
    slots += [operator.output(index) for index, name in enumerate(node.output) if name]
    bound = {slot.variable for slot in slots if slot is not None and len(slot.types) > 1}
    known = {fingerprint(model) for model in (plain, variant_model(variant, auxiliary=True))}
    values = _value_kinds(plain, node.name)
    found: list[tuple[onnx.ModelProto, ProbeRun]] = []
    for form in _typed_forms(operator, own):
        model = variant_model(form.build(), auxiliary=compiles)
        if compiles and len(model.graph.node) == 1:
            add_detached(model.graph)
        if (key := fingerprint(model)) not in known:
            known.add(key)
            other = next(each for each in model.graph.node if each.name == NODE)
            types = dict(form.types) | types_of(other, operator, tensor_types(model))
            # A subgraph is written for types that no type variable shows: only kinds other than tensors can be equal.
            if form.node:
                same = values > TENSORS and _value_kinds(model, NODE) == values
            else:  # an unknown type is not equal
                same = all(own.get(name) == kind for name, kind in types.items() if name in bound)
            change, factors = _form_text(form, types, node), () if same else ("type",)
            neg_added = len(model.graph.node) > 1
            trial = ProbeRun(OTHER_FORM, change, "invalid", "", factors=factors, neg_added=neg_added)
            found.append((model, trial))
    if compiles:
        found = sorted(found[:MOST_COMPILED], key=lambda each: bool(each[1].factors))
    # After a failure only the node's own types are conclusive.
    yield from ((model, trial) for model, trial in found if not trial.factors or not (failed and compiles))


def _value_kinds(model: onnx.ModelProto, name: str) -> frozenset[str]:
    """Kinds of the values that a node reads and writes, as ONNX names them: `tensor_type`, `sequence_type`."""
    types = tensor_types(model)
    node = next(node for node in model.graph.node if node.name == name)
    found = (types[each].WhichOneof("value") for each in (*node.input, *node.output) if each in types)
    return frozenset(filter(None, found))


def _typed_forms(operator: Operator, own: dict[str, str]) -> Iterator[Form]:
    """Forms in the node's types, then in their examples' types, then the plainest form in other types."""
    listed = plainest_forms(operator)
    for form in listed:
        some = {} if form.node else dict(next(iter(assignments(form)[0]), ())) | dict(form.types)
        yield replace(form, types=tuple((name, own.get(name, kind)) for name, kind in some.items())) if some else form
    yield from listed
    for form in listed[:1]:
        usual = (types for types in assignments(form)[0] if all(kind in USUAL for _, kind in types))
        yield from (replace(form, types=types) for types in islice(usual, MOST_TYPES))


def _form_text(form: Form, types: dict[str, str], node: onnx.NodeProto) -> str:
    """`T1 float32, T2 int64; with bias; mode=cubic`: types, optional inputs that only one of the form and the node has,
    then differences from the plainest form.
    """
    named = {name: element.name if (element := element_in(kind)) is not None else kind for name, kind in types.items()}
    kinds = ", ".join(f"{name} {kind}" for name, kind in named.items() if "(" not in name)
    own = form.note or ", ".join(sorted(form.factors - plainest_forms(form.operator)[0].factors)[:MOST_NAMED])
    here = {position for position, name in enumerate(node.input) if name}
    there = {position for position, port in enumerate(form.inputs) if port is not None}
    both = [
        f"{word} {', '.join(form.name_of(position) for position in sorted(positions))}"
        for word, positions in (("with", there - here), ("without", here - there))
        if positions and not form.operator.inputs[-1].variadic
    ]
    return "; ".join(part for part in (kinds, *both, own) if part)
