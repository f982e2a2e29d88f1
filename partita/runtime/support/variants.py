"""Variants of operators as nodes: a form with types, written into a model beside others that know nothing of it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.runtime.support.examples import Port
from partita.runtime.support.forms import TYPE_ATTRIBUTES, Form
from partita.runtime.support.operators import Operator

if TYPE_CHECKING:
    import onnx

MOST_PAIRS, MOST_TRIPLES = 640, 128
"""Assignments of types up to which all are asked about: with one or two type variables, and with more."""
COMPANY = "company"
"""What the Neg beside a node is called, after the node's own name."""
COMPANIONS = frozenset({"tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)"})
"""Types that nearly every provider can negate."""
ONNX_VERSION, IR_VERSION = 17, 8
"""Of ONNX's own operators beside those of another domain; files that are older than the operators asked about."""
Types = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A form with a type for each of its type variables."""

    form: Form
    types: Types
    """(variable, type), inputs first."""
    kind: str
    """types, form, constants or rank: what it is asked for."""

    @property
    def key(self) -> str:
        """Its name for who asks and who answers."""
        operator = self.form.operator
        told = ",".join(f"{variable}={kind}" for variable, kind in self.types)
        return _hash_of(f"{operator.domain}:{operator.name}:{operator.since}|{_identity(self.form)}|{told}|{self.kind}")


def _identity(form: Form) -> str:
    """What tells forms of one version apart."""
    ports = [None if port is None else (len(port.shape), port.values) for port in form.inputs]
    return (
        f"{sorted(form.attributes.items(), key=str)}{ports}{sorted(form.constant)}{form.outputs}{_hash_of(form.node)}"
    )


def _hash_of(text: str) -> str:
    """A few characters that stand for a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def as_example(form: Form) -> Variant:
    """The form with the types of its example."""
    return Variant(form, _example_types(form), form.kind)


def _example_types(form: Form) -> Types:
    """What the example has for each type variable."""
    found: dict[str, str] = {}
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if port is not None and slot is not None and slot.variable not in found:
            found[slot.variable] = port.kind if port.kind in slot.types else _first_of(slot.types, port.kind)
    chooser = _type_attribute(form)
    if chooser is not None and form.operator.attributes[chooser].kind == "string":
        # Nothing infers a type from a text: it has to be declared.
        chosen = _output_variable(form, found)
        return tuple((found | ({chosen: "tensor(float)"} if chosen is not None else {})).items())
    return tuple(found.items())


def _first_of(allowed: Sequence[str], wanted: str) -> str:
    """A type that an older version allows: float32 where it does, else the first."""
    return "tensor(float)" if "tensor(float)" in allowed else allowed[0] if allowed else wanted


def assignments(form: Form) -> tuple[list[Types], int]:
    """Assignments of types to the type variables of the inputs that are there, and to that of the first output where an
    attribute chooses it; and how many there are that are not among them.

    All of them, unless there are too many: then those in which one variable has another type than in the example, and
    those in which all variables that can have another type have that one.
    """
    base = _example_types(form)
    if form.node:  # bodies are written for their types
        return [base], 0
    allowed: dict[str, tuple[str, ...]] = {}
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if port is not None and slot is not None:
            allowed.setdefault(slot.variable, slot.types)
    chosen = _output_variable(form, allowed)
    if chosen is not None:
        allowed[chosen] = _output_types(form, chosen)
        base = (*dict(base).items(), *(() if chosen in dict(base) else ((chosen, _first_of(allowed[chosen], "")),)))
    names = tuple(allowed)
    total = math.prod(len(allowed[name]) for name in names)
    if total > (MOST_PAIRS if len(names) < 3 else MOST_TRIPLES):
        few = _near(dict(base), allowed)
        return few, total - len(few)
    listed = itertools.product(*(_ordered(allowed[name]) for name in names))
    return [tuple(zip(names, types, strict=True)) for types in listed], 0


def _near(base: Mapping[str, str], allowed: Mapping[str, Sequence[str]]) -> list[Types]:
    """The example's types, with one variable changed, and with all that can be changed alike."""
    found = {tuple(base.items()): None}
    for name, types in allowed.items():
        found |= dict.fromkeys(tuple({**base, name: kind}.items()) for kind in _ordered(types))
    for kind in _ordered({kind for types in allowed.values() for kind in types}):
        found[tuple({name: kind if kind in types else base[name] for name, types in allowed.items()}.items())] = None
    return list(found)


def _ordered(types: Iterable[str]) -> list[str]:
    """Types in the order of ONNX's numbers; sequences and the like come last."""

    def place(text: str) -> tuple[int, str]:
        found = _element_of(text) if text.startswith("tensor(") else None
        return (found.number if found is not None else 1000, text)

    return sorted(types, key=place)


def _element_of(text: str) -> dtypes.ElementType | None:
    """The element type of the innermost tensor of a type."""
    inner = text.rpartition("tensor(")[2].rstrip(")")
    return dtypes.find(inner)


def _output_variable(form: Form, of_inputs: Mapping[str, Any]) -> str | None:
    """The type variable of the first output, where no input has it and an attribute chooses it."""
    slot = form.operator.output(0)
    if slot is None or slot.variable in of_inputs or len(slot.types) < 2 or _type_attribute(form) is None:
        return None
    return slot.variable


def _output_types(form: Form, variable: str) -> tuple[str, ...]:
    """What the output's variable allows."""
    return next(slot.types for slot in form.operator.outputs if slot.variable == variable)


def _type_attribute(form: Form) -> str | None:
    """The attribute that chooses the output's type: one of the well-known names, or a tensor that is the value."""
    for name in TYPE_ATTRIBUTES:
        if name in form.operator.attributes:
            return name
    tensors = [name for name, entry in form.operator.attributes.items() if entry.kind == "tensor"]
    return tensors[0] if len(tensors) == 1 else None


def batch_model(fragments: Sequence[bytes], operator: Operator) -> bytes:
    """A model of independent nodes, one per fragment, which all ask for this operator's version of the operator set."""
    import onnx

    versions = {"": operator.opset} if operator.domain == "" else {"": ONNX_VERSION, operator.domain: operator.since}
    model = onnx.ModelProto(ir_version=ir_version(versions[""]), producer_name="partita")
    model.graph.MergeFromString(b"".join(fragments))
    model.graph.name = "support"
    for domain, version in versions.items():
        model.opset_import.add(domain=domain, version=version)
    return bytes(model.SerializeToString())


def fragment(name: str, variant: Variant, *, company: bool) -> bytes:
    """The node of a variant, called `name`, with its inputs and outputs, as a part of a graph.

    `company`: with a Neg before it, where it has an input that can be negated; a provider that compiles may take no
    partition of a single node.
    """
    import onnx

    graph = onnx.GraphProto()
    _add_variant(graph, name, variant, company=company)
    return bytes(graph.SerializeToString())


def ir_version(opset: int) -> int:
    """The version of the file format: types and operators need a newer one than old runtimes read."""
    return IR_VERSION if opset < 19 else 9 if opset < 21 else 10 if opset < 23 else 11 if opset < 25 else 12


def _add_variant(graph: onnx.GraphProto, name: str, variant: Variant, *, company: bool) -> None:
    """One node with its inputs and outputs, all of whose names begin with its own."""
    import onnx

    form = variant.form
    types = dict(variant.types)
    node = graph.node.add(name=name, op_type=form.operator.name, domain=form.operator.domain)
    accompanied = False
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if port is None or slot is None:
            node.input.append("")
            continue
        kind = types.get(slot.variable, port.kind)
        given = f"{name}_i{index}"
        if index in form.constant and kind.startswith("tensor("):
            graph.initializer.append(constant(given, kind, port))
            node.input.append(given)
            continue
        graph.input.add(name=given, type=type_proto(kind, port.shape))
        if company and not accompanied and kind in COMPANIONS:
            accompanied = True
            graph.node.add(name=f"{name}_{COMPANY}", op_type="Neg", input=[given], output=[f"{given}_n"])
            given = f"{given}_n"
        node.input.append(given)
    for index, there in enumerate(form.outputs):
        node.output.append(f"{name}_o{index}" if there else "")
        if there:
            port = graph.output.add(name=f"{name}_o{index}")
            declared = _chosen_output(form, types) if index == 0 else None
            if (
                declared is not None
                and (element := _element_of(declared)) is not None
                and declared.startswith("tensor(")
            ):
                port.type.tensor_type.elem_type = element.number
    if form.node:
        whole = onnx.NodeProto.FromString(base64.b64decode(form.node))
        node.attribute.extend(entry for entry in whole.attribute if entry.name in form.operator.attributes)
    else:
        node.attribute.extend(_attributes(form, types))


def _chosen_output(form: Form, types: Mapping[str, str]) -> str | None:
    """The type of the first output, where it is not that of an input."""
    named = {slot.variable for index in range(len(form.inputs)) if (slot := form.operator.input(index)) is not None}
    slot = form.operator.output(0)
    return types.get(slot.variable) if slot is not None and slot.variable not in named else None


def _attributes(form: Form, types: Mapping[str, str]) -> Iterator[onnx.AttributeProto]:
    """The attributes of a form, those that choose a type as the types have it."""
    import onnx

    chosen, chooser = _chosen_output(form, types), _type_attribute(form)
    for name, value in form.attributes.items():
        if name != chooser or chosen is None:
            yield _made_attribute(name, value, form.operator.attributes[name].kind)
    if chooser is not None and chosen is not None:
        element = _element_of(chosen)
        assert element is not None
        kind = form.operator.attributes[chooser].kind
        if kind == "tensor":
            value = form.attributes.get(chooser)
            shape = value["shape"] if isinstance(value, dict) else [1]
            yield onnx.helper.make_attribute(chooser, tensor("", element, shape, None))
        else:
            yield onnx.helper.make_attribute(chooser, element.onnx_name if kind == "string" else element.number)


def _made_attribute(name: str, value: Any, kind: str) -> onnx.AttributeProto:
    """One attribute of the kind that the schema asks for, also where its list is empty."""
    import onnx

    if isinstance(value, dict):
        element = dtypes.find(value["type"])
        assert element is not None
        return onnx.helper.make_attribute(name, tensor("", element, value["shape"], value["values"]))
    number = getattr(onnx.AttributeProto, kind.upper())
    if kind in ("float", "floats"):
        value = [float(entry) for entry in value] if isinstance(value, list) else float(value)
    return onnx.helper.make_attribute(name, value, attr_type=number)


def constant(name: str, kind: str, port: Port) -> onnx.TensorProto:
    """An input as a constant: with the values of the example where it has some, else zeros."""
    element = _element_of(kind)
    assert element is not None
    return tensor(name, element, port.shape, port.values)


def tensor(
    name: str, element: dtypes.ElementType, shape: Sequence[int], values: Sequence[Any] | None
) -> onnx.TensorProto:
    """A tensor of any type; values that it cannot hold become zeros."""
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


def type_proto(text: str, shape: Sequence[int]) -> onnx.TypeProto:
    """The type that schemas spell seq(tensor(float)), its tensors of this shape. Maps keep what they map to."""
    import onnx

    kind = onnx.TypeProto()
    outer, _, inner = text.partition("(")
    inner = inner[:-1]
    if outer == "tensor":
        element = dtypes.find(inner)
        if element is None:
            raise ValueError(f"{inner!r} is no element type")
        kind.tensor_type.elem_type = element.number
        kind.tensor_type.shape.SetInParent()
        for size in shape:
            kind.tensor_type.shape.dim.add(dim_value=size)
    elif outer == "seq":
        kind.sequence_type.elem_type.CopyFrom(type_proto(inner, shape))
    elif outer == "optional":
        kind.optional_type.elem_type.CopyFrom(type_proto(inner, shape))
    elif outer == "map":
        key, _, value = inner.partition(",")
        number = dtypes.find(key.strip())
        assert number is not None
        kind.map_type.key_type = number.number
        value = value.strip()
        kind.map_type.value_type.CopyFrom(
            type_proto(value if "(" in value else f"tensor({value})", () if "(" not in value else shape)
        )
    else:
        raise ValueError(f"{text!r} is no type that is known here")
    return kind
