"""Operator schemas of the onnx package and ONNX Runtime, in their spelling of types, and examples of each operator.

`examples.jsonl` is generated from the backend tests of the onnx package (tools/examples.py); `recipes.jsonl` is written
by hand for operators without such tests.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import onnx

from partita import dtypes
from partita.runtime.ort.registry import all_operator_schemas

EXAMPLES = ("examples.jsonl", "recipes.jsonl")
INTERNAL = ("com.ms.", "com.microsoft.", "ai.onnx.preview")
"""Prefixes of domains whose operators do not occur in files."""
NOT_IN_FILES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
ONNX_NAME = "ai.onnx"
"""Alias of the default domain."""
OLDEST_OPSET = 7
"""ONNX Runtime guarantees support from this opset on."""
TYPE_ATTRIBUTES = ("to", "dtype")
"""Attributes that only set the element type of an output."""
OUTPUT_TYPES = (*TYPE_ATTRIBUTES, "output_dtype", "output_datatype")
"""Attributes that also change the computation."""


@dataclass(frozen=True)
class Slot:
    """One formal input or output."""

    name: str
    variable: str
    """Slots with the same type variable have the same type; a fixed type is its own variable."""
    types: tuple[str, ...]
    optional: bool
    variadic: bool

    @cached_property
    def elements(self) -> frozenset[int]:
        """Allowed tensor element types, as ONNX enum values."""
        return frozenset(element.number for text in self.types if (element := element_in(text)) is not None)


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute. `kind`: e.g. ints, tensor, graph. `default`: None without one."""

    kind: str
    required: bool
    default: onnx.AttributeProto | None


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One version of an operator. One object per version, compared by identity."""

    domain: str
    name: str
    since: int
    until: int | None
    """The last opset of this version; None if it is the newest."""
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attributes: Mapping[str, Attribute]

    def input(self, index: int) -> Slot | None:
        """The slot of the input at `index`; the last slot of a variadic operator repeats."""
        return _at(self.inputs, index)

    def output(self, index: int) -> Slot | None:
        """The slot of the output at `index`; the last slot of a variadic operator repeats."""
        return _at(self.outputs, index)

    def optional_outputs(self, node: onnx.NodeProto) -> dict[int, Slot]:
        """Optional outputs that are present, by position."""
        slots = zip(node.output, self.outputs, strict=False)
        return {position: slot for position, (name, slot) in enumerate(slots) if name and slot.optional}

    @property
    def opset(self) -> int:
        """The first opset with this version that ONNX Runtime supports."""
        oldest = max(self.since, min(OLDEST_OPSET, self.until or OLDEST_OPSET))
        return oldest if self.domain == "" else self.since

    def slots(self, node: onnx.NodeProto) -> tuple[list[tuple[Slot, str]], list[tuple[Slot, str]]]:
        """The present inputs and the present outputs of a node, with their slots."""
        inputs = [(self.input(index), name) for index, name in enumerate(node.input) if name]
        outputs = [(self.output(index), name) for index, name in enumerate(node.output) if name]
        return [(slot, name) for slot, name in inputs if slot], [(slot, name) for slot, name in outputs if slot]

    def outputs_of(self, node: onnx.NodeProto, elements: Mapping[str, int]) -> dict[str, int]:
        """Element types of outputs that share a type variable with an input, or have only one possible type."""
        inputs, outputs = self.slots(node)
        known = {slot.variable: element for slot, _ in outputs for element in slot.elements if len(slot.elements) == 1}
        known |= {slot.variable: elements[name] for slot, name in inputs if elements.get(name)}
        return {name: known[slot.variable] for slot, name in outputs if slot.variable in known}


def _at(slots: tuple[Slot, ...], index: int) -> Slot | None:
    """The slot at a position."""
    if index < len(slots):
        return slots[index]
    return slots[-1] if slots and slots[-1].variadic else None


@cache
def operators() -> tuple[Operator, ...]:
    """Every version of every operator that may occur in a file, by domain and name, oldest first."""
    return tuple(
        operator
        for (domain, name) in sorted(_schemas())
        if not domain.startswith(INTERNAL) and name not in NOT_IN_FILES
        for operator in history(domain, name)
    )


@cache
def history(domain: str, op_type: str) -> tuple[Operator, ...]:
    """Every version of an operator that is not deprecated, oldest first; empty for an unknown operator."""
    versions = _schemas().get((plain_domain(domain), op_type), {})
    order = sorted(versions)
    return tuple(
        _read(versions[since], None if after is None else after - 1)
        for since, after in itertools.zip_longest(order, order[1:])
        if not versions[since].deprecated
    )


def find_operator(domain: str, op_type: str, opset: int) -> Operator | None:
    """The version of an operator in this opset of its domain; None for an unknown operator."""
    return next((entry for entry in reversed(history(domain, op_type)) if entry.since <= opset), None)


def plain_domain(domain: str) -> str:
    """The domain as written in most files."""
    return "" if domain == ONNX_NAME else domain


@cache
def _schemas() -> dict[tuple[str, str], dict[int, Any]]:
    """Native schemas by domain and name, then by version."""
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        found.setdefault((plain_domain(schema.domain), schema.name), {})[schema.since_version] = schema
    own = set(found)
    for schema in all_operator_schemas():
        if (key := (plain_domain(schema.domain), schema.name)) not in own:
            found.setdefault(key, {})[schema.since_version] = schema
    return found


def _read(schema: Any, until: int | None) -> Operator:
    """A native schema as plain data; onnx and ONNX Runtime have nearly the same fields."""
    allowed = {entry.type_param_str: tuple(sorted(entry.allowed_type_strs)) for entry in schema.type_constraints}
    return Operator(
        domain=plain_domain(str(schema.domain)),
        name=str(schema.name),
        since=int(schema.since_version),
        until=until,
        inputs=tuple(_read_slot(entry, allowed) for entry in schema.inputs),
        outputs=tuple(_read_slot(entry, allowed) for entry in schema.outputs),
        attributes={name: _read_attribute(entry) for name, entry in dict(schema.attributes).items()},
    )


def _read_slot(entry: Any, allowed: Mapping[str, tuple[str, ...]]) -> Slot:
    """One formal parameter."""
    variable, option = str(getattr(entry, "type_str", None) or entry.typeStr), _last_word(entry.option)
    types = allowed.get(variable, (variable,))
    return Slot(str(entry.name), variable, types, option == "optional", option == "variadic")


def _read_attribute(entry: Any) -> Attribute:
    """One attribute."""
    raw = getattr(entry, "_default_value", b"")
    default = onnx.AttributeProto.FromString(raw) if raw else None
    return Attribute(_last_word(entry.type), bool(entry.required), default)


def _last_word(value: Any) -> str:
    """The last word of an enum value, in lower case."""
    return str(value).rpartition(".")[2].lower()


# --- types as spelled by schemas -----------------------------------------------------------------------------------


def element_in(text: str) -> dtypes.ElementType | None:
    """The element type of tensor(float); None for other types, e.g. a sequence."""
    return dtypes.find(text[len("tensor(") : -1]) if text.startswith("tensor(") else None


def spell_type(kind: onnx.TypeProto) -> str:
    """A type as spelled by schemas; empty for a type that they lack."""
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return f"tensor({onnx.TensorProto.DataType.Name(kind.tensor_type.elem_type).lower()})"
    if which == "sequence_type":
        return f"seq({spell_type(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({spell_type(kind.optional_type.elem_type)})"
    return ""


def parse_type(text: str, shape: Sequence[int]) -> onnx.TypeProto:
    """The type spelled `text` by schemas, with tensors of `shape`. Raises ValueError for an unknown type."""
    outer, _, inner = text.partition("(")
    inner = inner[:-1]
    if outer == "seq":
        return onnx.helper.make_sequence_type_proto(parse_type(inner, shape))
    if outer == "optional":
        return onnx.helper.make_optional_type_proto(parse_type(inner, shape))
    if outer == "map":
        key, _, value = (part.strip() for part in inner.partition(","))
        made = parse_type(value, shape) if "(" in value else parse_type(f"tensor({value})", ())
        return onnx.helper.make_map_type_proto(dtypes.dtype_named(key).number, made)
    if outer != "tensor":
        raise ValueError(f"{text!r} is not a known type")
    return onnx.helper.make_tensor_type_proto(dtypes.dtype_named(inner).number, shape)


def types_of(node: onnx.NodeProto, operator: Operator, kinds: Mapping[str, onnx.TypeProto]) -> dict[str, str]:
    """The known types of a node's type variables, inputs first. `kinds`: known types of its tensors."""
    inputs, outputs = operator.slots(node)
    found: dict[str, str] = {}
    for slot, name in (*inputs, *((slot, name) for slot, name in outputs if len(slot.types) > 1)):
        if name in kinds and (text := spell_type(kinds[name])) in slot.types:
            found.setdefault(slot.variable, text)
    return found


@dataclass(frozen=True, slots=True)
class Port:
    """One input of an example."""

    kind: str
    """As spelled by schemas."""
    shape: tuple[int, ...]
    """Shape of the tensor, or of the tensors in the sequence."""
    values: tuple[Any, ...] | None
    """Values of small tensors, because shapes, axes and scales must be valid."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is no sequence, optional or map."""
        return self.kind.startswith("tensor(")


@cache
def examples() -> Mapping[tuple[str, str], tuple[Mapping[str, Any], ...]]:
    """Every example as in its file, by domain and operator name, newest version first."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for name in EXAMPLES:
        for line in files("partita.runtime.lab").joinpath(name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                example = json.loads(line)
                found.setdefault((example["domain"], example["op"]), []).append(example)
    return {key: tuple(sorted(listed, key=lambda entry: -entry["since"])) for key, listed in found.items()}
