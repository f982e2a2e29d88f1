"""Forms of an operator: its examples, adapted to each of its versions, with other constants and ranks.

An older version may have an attribute where a newer one has an input (axes of Squeeze), and fewer of either.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.runtime.lab.schema import OUTPUT_TYPES, Operator, Port, element_in, examples, history, parse_type
from partita.runtime.lab.variant import NODE, ExperimentInput, Variant

if TYPE_CHECKING:
    import onnx

MOST_RANK = 6
PLAINEST = 8
"""Maximum number of forms that probes test."""
OLDER_FORMS = 8
"""Maximum number of forms of a version without an example."""
SIDE_RANK = 1
"""Later inputs up to this rank are constants, as exporters write them: shapes, axes, scales."""


@dataclass(frozen=True, slots=True)
class Form:
    """A node of one version of an operator, without types."""

    operator: Operator
    inputs: tuple[Port | None, ...]
    outputs: tuple[bool, ...]
    attributes: Mapping[str, Any]
    node: str
    constant: frozenset[int]
    """Names of constant inputs."""
    kind: str = "form"
    """form, constants or rank: the property that it tests."""
    note: str = ""
    """Description of the change, e.g. `rank 5`, `axes not constant`."""

    @property
    def factors(self) -> frozenset[str]:
        """Properties that may decide whether it is supported, e.g. `mode=cubic`, `X of rank 4`, `without B`."""
        return frozenset(_factors_of(self))

    def name_of(self, index: int) -> str:
        """The name of an input; inputs of a variadic operator are numbered."""
        slot = self.operator.input(index)
        if slot is None:
            return str(index)
        return f"{slot.name}{index}" if slot.variadic else slot.name


def forms(operator: Operator) -> tuple[Form, ...]:
    """Every form of a version, the plainest first; empty if the operator has no example.

    Examples of other versions, newest first, are used if the version has none.
    """
    listed = examples().get((operator.domain, operator.name), ())
    own = [example for example in listed if example["since"] == operator.since]
    chosen = [form for example in own for form in _adapt_example(operator, example)]
    if not chosen:
        chosen = [form for example in listed for form in _adapt_example(operator, example)][:OLDER_FORMS]
    return (chosen[0], *constants(chosen[0]), *chosen[1:]) if chosen else ()


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
    if base.constant:
        names = ", ".join(base.name_of(index) for index in sorted(base.constant))
        yield replace(base, constant=frozenset(), kind="constants", note=f"{names} not constant")
    if after - base.constant:
        names = ", ".join(base.name_of(index) for index in sorted(after - base.constant))
        yield replace(base, constant=after, kind="constants", note=f"{names} constant")


def _adapt_example(operator: Operator, example: Mapping[str, Any]) -> Iterator[Form]:
    """The example in this version; empty if it cannot be adapted."""
    inputs = [
        port and Port(port["type"], tuple(port["shape"]), tuple(port["values"]) if "values" in port else None)
        for port in example["inputs"]
    ]
    attributes, node = dict(example.get("attributes", {})), example.get("node", "")
    outputs = tuple(map(bool, example["outputs"]))
    versions = history(operator.domain, operator.name)
    version = next((entry for entry in versions if entry.since == example["since"]), operator)
    if version is not operator:
        inputs = _by_name(operator, version, inputs)
        attributes = {name: value for name, value in attributes.items() if name in operator.attributes}
        if any(operator.attributes[name].kind != version.attributes[name].kind for name in attributes):
            return
    while inputs and inputs[-1] is None:
        inputs.pop()
    needed = [not (slot.optional or slot.variadic) for slot in operator.inputs]
    if len(inputs) < sum(needed) or any(
        port is None and required for port, required in zip(inputs, needed, strict=False)
    ):
        return
    missing = [name for name, entry in operator.attributes.items() if entry.required and name not in attributes]
    if missing and not node:
        return
    if not (operator.outputs and operator.outputs[-1].variadic):
        outputs = outputs[: len(operator.outputs)]
    form = Form(operator, tuple(inputs), outputs, attributes, node, frozenset())
    yield replace(form, constant=frozenset(_side_inputs(form)))


def _side_inputs(form: Form) -> Iterator[int]:
    """Inputs that exporters write as constants: small parameters after the first input."""
    first = form.operator.input(0)
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if index and port is not None and slot is not None and port.values is not None and port.is_tensor:
            data = first is not None and slot.variable == first.variable and not slot.optional
            if len(port.shape) <= SIDE_RANK and not data:
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
            yield f"{name}={_value_text(value)}"
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


def _value_text(value: Any) -> str:
    """The value of an attribute as short text."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_value_text, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- types -----------------------------------------------------------------------------------------------------------

Types = tuple[tuple[str, str], ...]
"""(type variable, type), inputs first."""
MOST_PAIRS, MOST_TRIPLES = 640, 128
"""Maximum number of type assignments for a complete test: with one or two type variables, and with more."""
ONNX_OPSET, IR_VERSION = 17, 8
"""IR version of a model with an operator of another domain; existing files are that old."""


@dataclass(frozen=True, slots=True)
class TypedForm:
    """A form with a type for each type variable. `kind`: types, form, constants or rank."""

    form: Form
    types: Types
    kind: str

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for typed forms with the same outcome."""
        form, operator = self.form, self.form.operator
        ports = tuple(None if port is None else (len(port.shape), port.values) for port in form.inputs)
        attributes = str(sorted(form.attributes.items(), key=str))
        return (operator, attributes, ports, form.constant, form.outputs, form.node, self.types, self.kind)

    def build(self) -> Variant:
        """The node with its inputs as a variant."""
        import onnx

        form, operator, types = self.form, self.form.operator, dict(self.types)
        node = onnx.NodeProto(name=NODE, op_type=operator.name, domain=operator.domain)
        feeds = []
        for index, port in enumerate(form.inputs):
            slot, name = operator.input(index), f"i{index}"
            if port is None or slot is None:
                node.input.append("")
                continue
            kind = types.get(slot.variable, port.kind)
            element = element_in(kind) if index in form.constant else None
            value = _tensor(name, element, port.shape, port.values) if element is not None else None
            node.input.append(name)
            feeds.append(ExperimentInput(name, parse_type(kind, port.shape), value))
        node.output.extend(f"o{index}" if there else "" for index, there in enumerate(form.outputs))
        if form.node:
            whole = onnx.NodeProto.FromString(base64.b64decode(form.node))
            node.attribute.extend(entry for entry in whole.attribute if entry.name in operator.attributes)
        else:
            node.attribute.extend(_attributes(form, types))
        chosen = _chosen_output(form, types)
        element = element_in(chosen) if chosen is not None and "o0" in node.output else None
        declared = {} if element is None else {"o0": onnx.helper.make_tensor_type_proto(element.number, None)}
        opsets = {"": operator.opset} if operator.domain == "" else {"": ONNX_OPSET, operator.domain: operator.since}
        version = ir_version(opsets[""])
        return Variant(node, tuple(feeds), {}, {}, opsets, version, declared=declared)


def ir_version(opset: int) -> int:
    """The lowest IR version that an opset needs."""
    return IR_VERSION if opset < 19 else 9 if opset < 21 else 10 if opset < 23 else 11 if opset < 25 else 12


def as_example(form: Form) -> TypedForm:
    """The form with its example's types."""
    return TypedForm(form, _example_types(form), form.kind)


@cache
def plainest_forms(operator: Operator) -> tuple[Form, ...]:
    """The first forms of a version."""
    return forms(operator)[:PLAINEST]


def _example_types(form: Form) -> Types:
    """The example's type for each type variable."""
    found: dict[str, str] = {}
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if port is not None and slot is not None and slot.variable not in found:
            found[slot.variable] = port.kind if port.kind in slot.types else _first_of(slot.types, port.kind)
    chooser = _type_attribute(form)
    if chooser is not None and form.operator.attributes[chooser].kind == "string":
        # Types of strings cannot be inferred, so they are declared.
        chosen = _output_variable(form, found)
        return tuple((found | ({chosen: "tensor(float)"} if chosen is not None else {})).items())
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
    allowed: dict[str, tuple[str, ...]] = {}
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if port is not None and slot is not None:
            allowed.setdefault(slot.variable, slot.types)
    chosen = _output_variable(form, allowed)
    if chosen is not None:
        allowed[chosen] = next(slot.types for slot in form.operator.outputs if slot.variable == chosen)
        base = (*dict(base).items(), *(() if chosen in dict(base) else ((chosen, _first_of(allowed[chosen], "")),)))
    names = tuple(allowed)
    total = math.prod(len(allowed[name]) for name in names)
    if total > (MOST_PAIRS if len(names) < 3 else MOST_TRIPLES):
        few = _near(dict(base), allowed)
        return few, total - len(few)
    listed = itertools.product(*(_ordered(allowed[name]) for name in names))
    return [tuple(zip(names, types, strict=True)) for types in listed], 0


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


def _output_variable(form: Form, of_inputs: Mapping[str, Any]) -> str | None:
    """The type variable of the first output, if no input has it and an attribute sets it."""
    slot = form.operator.output(0)
    if slot is None or slot.variable in of_inputs or len(slot.types) < 2 or _type_attribute(form) is None:
        return None
    return slot.variable


def _type_attribute(form: Form) -> str | None:
    """The attribute that sets the output type: a known name, or a tensor value."""
    for name in OUTPUT_TYPES:
        if name in form.operator.attributes:
            return name
    tensors = [name for name, entry in form.operator.attributes.items() if entry.kind == "tensor"]
    return tensors[0] if len(tensors) == 1 else None


def _chosen_output(form: Form, types: Mapping[str, str]) -> str | None:
    """The type of the first output, if it is not that of an input."""
    named = {slot.variable for index in range(len(form.inputs)) if (slot := form.operator.input(index)) is not None}
    slot = form.operator.output(0)
    return types.get(slot.variable) if slot is not None and slot.variable not in named else None


def _attributes(form: Form, types: Mapping[str, str]) -> Iterator[onnx.AttributeProto]:
    """The attributes of a form, adapted to the types."""
    import onnx

    chosen, chooser = _chosen_output(form, types), _type_attribute(form)
    for name, value in form.attributes.items():
        if name != chooser or chosen is None:
            yield _made_attribute(name, value, form.operator.attributes[name].kind)
    if chooser is not None and chosen is not None:
        element = dtypes.dtype_named(chosen.rpartition("tensor(")[2].rstrip(")"))  # also of seq(tensor(float))
        kind = form.operator.attributes[chooser].kind
        if kind == "tensor":
            value = form.attributes.get(chooser)
            shape = value["shape"] if isinstance(value, dict) else [1]
            yield onnx.helper.make_attribute(chooser, _tensor("", element, shape, None))
        else:
            yield onnx.helper.make_attribute(chooser, element.onnx_name if kind == "string" else element.number)


def _made_attribute(name: str, value: Any, kind: str) -> onnx.AttributeProto:
    """An attribute of the schema's kind; also for an empty list."""
    import onnx

    if isinstance(value, dict):
        element = dtypes.find(value["type"])
        assert element is not None
        return onnx.helper.make_attribute(name, _tensor("", element, value["shape"], value["values"]))
    number = getattr(onnx.AttributeProto, kind.upper())
    if kind in ("float", "floats"):
        value = [float(entry) for entry in value] if isinstance(value, list) else float(value)
    return onnx.helper.make_attribute(name, value, attr_type=number)


def _tensor(
    name: str, element: dtypes.ElementType, shape: Sequence[int], values: Sequence[Any] | None
) -> onnx.TensorProto:
    """A tensor of any type; values that the type cannot hold become zeros."""
    import onnx

    count = math.prod(shape)
    if element.bits is None:
        made = onnx.TensorProto(name=name, data_type=element.number, dims=list(shape))
        texts = values if values is not None and all(isinstance(value, str) for value in values) else [""] * count
        made.string_data.extend(str(text).encode() for text in texts)
        return made
    if values is not None and element.kind != "complex":
        try:
            given: onnx.TensorProto = onnx.helper.make_tensor(name, element.number, list(shape), list(values))
        except (ValueError, TypeError, OverflowError):
            pass
        else:
            return given
    return onnx.TensorProto(
        name=name, data_type=element.number, dims=list(shape), raw_data=bytes(dtypes.size_bytes(element.name, shape))
    )
