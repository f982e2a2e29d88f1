"""Forms of an operator: its examples, adapted to each of its versions, with other constants and ranks.

An older version may have an attribute where a newer one has an input (axes of Squeeze), and fewer of either.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import onnx

from partita import dtypes
from partita.runtime.lab.placement import NODE
from partita.runtime.lab.schema import OUTPUT_TYPES, Operator, Port, Slot, element_in, examples, history, parse_type
from partita.runtime.lab.variant import ExperimentInput, Variant, zeros

MOST_RANK = 6
PLAINEST = 8
"""Maximum number of forms that probes test."""
OLDER_FORMS = 8
"""Maximum number of forms of a version without an example."""
SIDE_RANK = 1
"""Later inputs up to this rank are constants, as exporters write them: shapes, axes, scales."""


Types = tuple[tuple[str, str], ...]
"""(type variable, type), inputs first."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A node of one version of an operator, with a type for each type variable."""

    operator: Operator
    inputs: tuple[Port | None, ...]
    outputs: tuple[bool, ...]
    attributes: Mapping[str, Any]
    node: str
    """A serialised node in place of `attributes`, in base64: its subgraphs are written for its types."""
    types: Types = ()
    constant: frozenset[int] = frozenset()
    """Positions of constant inputs."""
    kind: str = "form"
    """form, constants, rank or types: the property that it tests."""
    note: str = ""
    """Description of the change, e.g. `rank 5`, `axes not constant`."""

    @property
    def factors(self) -> frozenset[str]:
        """Properties that may decide whether it is supported, e.g. `mode=cubic`, `X of rank 4`, `without B`."""
        return frozenset(_factors_of(self))

    @property
    def present(self) -> list[tuple[int, Slot, Port]]:
        """The present inputs, with their positions."""
        slots = ((index, self.operator.input(index), port) for index, port in enumerate(self.inputs))
        return [(index, slot, port) for index, slot, port in slots if slot is not None and port is not None]

    @property
    def choice(self) -> tuple[str, str]:
        """The type variable of the first output and the attribute that sets it, if no input has it; else empty.

        The attribute has a known name or is the only tensor.
        """
        known, slot = self.operator.attributes, self.operator.output(0)
        tensors = [name for name, entry in known.items() if entry.kind == "tensor"]
        named = [name for name in OUTPUT_TYPES if name in known] or (tensors if len(tensors) == 1 else [])
        if slot is None or len(slot.types) < 2 or any(other.variable == slot.variable for _, other, _ in self.present):
            return "", ""
        return (slot.variable, named[0]) if named else ("", "")

    def name_of(self, index: int) -> str:
        """The name of an input; inputs of a variadic operator are numbered."""
        slot = self.operator.input(index)
        if slot is None:
            return str(index)
        return f"{slot.name}{index}" if slot.variadic else slot.name

    def build(self) -> Variant:
        """The node with its inputs as a variant."""
        operator, types = self.operator, dict(self.types)
        node = onnx.NodeProto(name=NODE, op_type=operator.name, domain=operator.domain)
        node.input.extend("" if port is None else f"i{index}" for index, port in enumerate(self.inputs))
        node.output.extend(f"o{index}" if there else "" for index, there in enumerate(self.outputs))
        feeds = []
        for index, slot, port in self.present:
            kind, name = types.get(slot.variable, port.kind), f"i{index}"
            element = element_in(kind) if index in self.constant else None
            value = _tensor(name, element, port.shape, port.values) if element is not None else None
            feeds.append(ExperimentInput(name, parse_type(kind, port.shape), value))
        if self.node:
            whole = onnx.NodeProto.FromString(base64.b64decode(self.node))
            node.attribute.extend(entry for entry in whole.attribute if entry.name in operator.attributes)
        else:
            node.attribute.extend(_attributes(self, types))
        element = element_in(types.get(self.choice[0], "")) if "o0" in node.output else None
        declared = {} if element is None else {"o0": onnx.helper.make_tensor_type_proto(element.number, None)}
        opsets = {"": operator.opset} if operator.domain == "" else {"": ONNX_OPSET, operator.domain: operator.since}
        return Variant(node, tuple(feeds), opsets, ir_version(opsets[""]), declared=declared)


def forms(operator: Operator) -> tuple[Form, ...]:
    """Every form of a version, the plainest first; empty if the operator has no example.

    Examples of other versions, newest first, are used if the version has none.
    """
    listed = examples().get((operator.domain, operator.name), ())
    adapted = [(each["since"], form) for each in listed if (form := _adapt_example(operator, each)) is not None]
    chosen = [form for since, form in adapted if since == operator.since] or [form for _, form in adapted[:OLDER_FORMS]]
    return (chosen[0], *constants(chosen[0]), *chosen[1:]) if chosen else ()


def distinct(found: Iterable[Form]) -> list[Form]:
    """Forms of one version; forms that differ only in sizes count once."""

    def key(form: Form) -> str:
        ports = [None if port is None else (len(port.shape), port.values) for port in form.inputs]
        return str((ports, form.outputs, sorted(form.attributes.items()), form.node, form.constant, form.types))

    return list({key(form): form for form in found}.values())


def ranks(base: Form) -> Iterator[Form]:
    """The form with inputs of every other rank, if all non-constant inputs have the same shape."""
    moving = {index for index, port in enumerate(base.inputs) if port is not None and index not in base.constant}
    shapes = {port.shape for index in moving if (port := base.inputs[index]) is not None}
    if len(shapes) != 1 or base.node:
        return
    (shape,) = shapes
    for rank in range(MOST_RANK + 1):
        if rank != len(shape):
            inputs = tuple(
                replace(port, shape=(2,) * rank, values=None) if port is not None and index in moving else port
                for index, port in enumerate(base.inputs)
            )
            yield replace(base, inputs=inputs, kind="rank", note=f"rank {rank}")


def constants(base: Form) -> Iterator[Form]:
    """The form with other inputs as constants: none, and all after the first."""
    after = frozenset(index for index, port in enumerate(base.inputs) if index and port is not None and port.is_tensor)
    for constant, changed, state in (
        (frozenset[int](), base.constant, "not constant"),
        (after, after - base.constant, "constant"),
    ):
        if changed:
            names = ", ".join(map(base.name_of, sorted(changed)))
            yield replace(base, constant=constant, kind="constants", note=f"{names} {state}")


def _adapt_example(operator: Operator, example: Mapping[str, Any]) -> Form | None:
    """The example in this version; None if it cannot be adapted."""
    inputs = [
        port and Port(port["type"], tuple(port["shape"]), tuple(port["values"]) if "values" in port else None)
        for port in example["inputs"]
    ]
    attributes, node = dict(example.get("attributes", {})), example.get("node", "")
    versions = history(operator.domain, operator.name)
    version = next((entry for entry in versions if entry.since == example["since"]), operator)
    if version is not operator:
        inputs = _by_name(operator, version, inputs)
        attributes = {name: value for name, value in attributes.items() if name in operator.attributes}
        if any(operator.attributes[name].kind != version.attributes[name].kind for name in attributes):
            return None
    while inputs and inputs[-1] is None:
        inputs.pop()
    needed = [not (slot.optional or slot.variadic) for slot in operator.inputs]
    absent = any(port is None and required for port, required in zip(inputs, needed, strict=False))
    missing = any(entry.required and name not in attributes for name, entry in operator.attributes.items())
    if absent or len(inputs) < sum(needed) or (missing and not node):
        return None
    most = None if operator.outputs and operator.outputs[-1].variadic else len(operator.outputs)
    form = Form(operator, tuple(inputs), tuple(map(bool, example["outputs"][:most])), attributes, node)
    return replace(form, types=_example_types(form), constant=frozenset(_side_inputs(form)))


def _side_inputs(form: Form) -> Iterator[int]:
    """Inputs that exporters write as constants: small parameters after the first input."""
    first = form.operator.input(0)
    for index, slot, port in form.present:
        data = first is not None and slot.variable == first.variable and not slot.optional
        if index and port.values is not None and port.is_tensor and len(port.shape) <= SIDE_RANK and not data:
            yield index


def _by_name(operator: Operator, version: Operator, given: Sequence[Port | None]) -> list[Port | None]:
    """The inputs of another version in the order of this version, matched by name, else by position."""
    if operator.inputs and operator.inputs[-1].variadic:
        return list(given)
    there = {slot.name: index for index, slot in enumerate(version.inputs)}
    ours = {slot.name for slot in operator.inputs}
    found: list[Port | None] = []
    for index, slot in enumerate(operator.inputs):
        at_place = version.inputs[index].name if index < len(version.inputs) else ""
        place = there.get(slot.name, index if at_place not in ours else None)
        found.append(given[place] if place is not None and place < len(given) else None)
    return found


def _factors_of(form: Form) -> Iterator[str]:
    """Attributes with values, and the presence, constness and rank of inputs."""
    for name in form.operator.attributes:
        if name in OUTPUT_TYPES:
            continue
        value = form.attributes.get(name)
        if value is not None and not isinstance(value, dict):
            yield f"{name}={value_text(value)}"
        elif value is None and not form.node:
            yield f"{name} by default"
    for index, slot in enumerate(form.operator.inputs):
        port = form.inputs[index] if index < len(form.inputs) else None
        if port is None:
            yield f"without {slot.name}"
            continue
        if slot.optional:
            yield f"with {slot.name}"
        if not slot.variadic:
            yield f"{slot.name} of rank {len(port.shape)}"
            if index:
                yield f"{slot.name} {'constant' if index in form.constant else 'not constant'}"


def value_text(value: Any) -> str:
    """The value of an attribute as short text."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(value_text, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- types -----------------------------------------------------------------------------------------------------------

MOST_PAIRS, MOST_TRIPLES = 640, 128
"""Maximum number of type assignments for a complete test: with one or two type variables, and with more."""
ONNX_OPSET, IR_VERSION = 17, 8
"""IR version of a model with an operator of another domain; existing files are that old."""


def ir_version(opset: int) -> int:
    """The lowest IR version that an opset needs."""
    return IR_VERSION if opset < 19 else 9 if opset < 21 else 10 if opset < 23 else 11 if opset < 25 else 12


@cache
def plainest_forms(operator: Operator) -> tuple[Form, ...]:
    """The first forms of a version."""
    return forms(operator)[:PLAINEST]


def _example_types(form: Form) -> Types:
    """The example's type for each type variable."""
    found: dict[str, str] = {}
    for _, slot, port in form.present:
        found.setdefault(slot.variable, port.kind if port.kind in slot.types else _first_of(slot.types, port.kind))
    variable, attribute = form.choice
    if variable and form.operator.attributes[attribute].kind == "string":
        # Types of strings cannot be inferred, so they are declared.
        found[variable] = "tensor(float)"
    return tuple(found.items())


def _first_of(allowed: Sequence[str], default: str) -> str:
    """A type that an older version allows: float32 if allowed, else the first; `default` if it allows none."""
    return "tensor(float)" if "tensor(float)" in allowed else allowed[0] if allowed else default


def assignments(form: Form) -> tuple[list[Types], int]:
    """Type assignments for the variables of present inputs and of a first output set by an attribute; number omitted.

    All assignments unless there are too many: then one changed variable of the example each, and all variables changed
    to the same type.
    """
    base = _example_types(form)
    if form.node:  # subgraphs are written for their types
        return [base], 0
    allowed = {slot.variable: slot.types for _, slot, _ in form.present}
    if variable := form.choice[0]:
        allowed[variable] = form.operator.outputs[0].types
    total = math.prod(map(len, allowed.values()))
    if total > (MOST_PAIRS if len(allowed) < 3 else MOST_TRIPLES):
        few = _near({name: _first_of(types, "") for name, types in allowed.items()} | dict(base), allowed)
        return few, total - len(few)
    listed = itertools.product(*map(_ordered, allowed.values()))
    return [tuple(zip(allowed, types, strict=True)) for types in listed], 0


def _near(base: Mapping[str, str], allowed: Mapping[str, Sequence[str]]) -> list[Types]:
    """The example's types with one variable changed, and with all possible variables changed alike."""
    found = {tuple(base.items()): None}
    for name, types in allowed.items():
        found |= dict.fromkeys(tuple({**base, name: kind}.items()) for kind in _ordered(types))
    for kind in _ordered({kind for types in allowed.values() for kind in types}):
        found[tuple({name: kind if kind in types else base[name] for name, types in allowed.items()}.items())] = None
    return list(found)


def _ordered(types: Iterable[str]) -> list[str]:
    """Types in the order of ONNX's enum; sequences and other types last."""

    def place(text: str) -> tuple[int, str]:
        found = element_in(text)
        return (found.number if found is not None else 1000, text)

    return sorted(types, key=place)


def _attributes(form: Form, types: Mapping[str, str]) -> Iterator[onnx.AttributeProto]:
    """The attributes of a form, adapted to the types."""
    variable, chooser = form.choice
    for name, value in form.attributes.items():
        if name != chooser or variable not in types:
            yield make_attribute(name, value, form.operator.attributes[name].kind)
    if variable in types:
        chosen = types[variable].rpartition("tensor(")[2].rstrip(")")  # also of seq(tensor(float))
        element, kind = dtypes.dtype_named(chosen), form.operator.attributes[chooser].kind
        if kind == "tensor":
            value = form.attributes.get(chooser)
            shape = value["shape"] if isinstance(value, dict) else [1]
            yield onnx.helper.make_attribute(chooser, _tensor("", element, shape, None))
        else:
            yield onnx.helper.make_attribute(chooser, element.onnx_name if kind == "string" else element.number)


def make_attribute(name: str, value: Any, kind: str) -> onnx.AttributeProto:
    """An attribute of the schema's kind; also for an empty list."""
    if isinstance(value, dict):
        element = dtypes.dtype_named(value["type"])
        return onnx.helper.make_attribute(name, _tensor("", element, value["shape"], value["values"]))
    number = getattr(onnx.AttributeProto, kind.upper())
    if kind in ("float", "floats"):
        value = [float(entry) for entry in value] if isinstance(value, list) else float(value)
    return onnx.helper.make_attribute(name, value, attr_type=number)


def _tensor(
    name: str, element: dtypes.ElementType, shape: Sequence[int], values: Sequence[Any] | None
) -> onnx.TensorProto:
    """A tensor of any type; values that the type cannot hold become zeros."""
    if values is not None and element.kind != "complex":
        with suppress(ValueError, TypeError, OverflowError):
            made: onnx.TensorProto = onnx.helper.make_tensor(name, element.number, list(shape), list(values))
            return made
    return zeros(name, element.number, shape)
