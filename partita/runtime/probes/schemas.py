"""What the operator set says of an operator: its versions, its attributes, and which types go together.

ONNX's own operators are described by the onnx package, ONNX Runtime's by ONNX Runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from partita import dtypes
from partita.runtime.ort.registry import operator_schemas

if TYPE_CHECKING:
    import onnx

PREFIX, SUFFIX = "tensor(", ")"
RANK = re.compile(r"\b(\d)-?D\b", re.IGNORECASE)
SHAPE = re.compile(
    r"(?<!broadcastable to )\b(?P<rank>\d)-?D (?:tensor|input|feature map) (?:of|with) shape `?\((?P<sizes>[^)]*)\)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """One input or output of an operator."""

    name: str
    variable: str
    """Slots with the same type variable have the same type; a fixed type stands for itself."""
    types: tuple[int, ...]
    """Allowed element types, as ONNX numbers them."""
    optional: bool
    variadic: bool
    rank: int | None
    """The only rank that its description allows; None where it names none or several."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of an operator."""

    since: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attributes: Mapping[str, bool]
    """Whether each attribute is required."""
    defaults: Mapping[str, bytes]
    """Default values, as serialised AttributeProto; attributes without one are missing."""

    def slot(self, index: int) -> Slot | None:
        """The slot of the input at `index`; the last slot of a variadic operator takes all that follow."""
        if index < len(self.inputs):
            return self.inputs[index]
        return self.inputs[-1] if self.inputs and self.inputs[-1].variadic else None

    def outputs_of(self, node: onnx.NodeProto, elements: Mapping[str, int]) -> dict[str, int]:
        """Element types of a node's outputs that follow from those of its inputs: they share a type variable."""
        bound = {
            slot.variable: elements[name]
            for position, name in enumerate(node.input)
            if (slot := self.slot(position)) is not None and elements.get(name)
        }
        found = {}
        for position, name in enumerate(node.output):
            slot = self.outputs[min(position, len(self.outputs) - 1)] if self.outputs else None
            if slot is not None and name:
                only = slot.types[0] if len(slot.types) == 1 else None
                element = bound.get(slot.variable, only)
                if element is not None:
                    found[name] = element
        return found


def find_schema(domain: str, op_type: str, version: int) -> Schema | None:
    """The schema that is in force in this version of the operator set; None for an unknown operator."""
    fitting = [schema for schema in history(domain, op_type) if schema.since <= version]
    return fitting[-1] if fitting else None


@cache
def history(domain: str, op_type: str) -> tuple[Schema, ...]:
    """Every version of an operator, oldest first."""
    import onnx

    known = [
        schema
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name == op_type and schema.domain == domain and not schema.deprecated
    ]
    found = {schema.since_version: read(schema) for schema in known or operator_schemas(domain, op_type)}
    return tuple(found[since] for since in sorted(found))


def read(schema: Any) -> Schema:
    """A schema as plain data; onnx and ONNX Runtime describe theirs in nearly the same words."""
    allowed = {entry.type_param_str: _numbers(entry.allowed_type_strs) for entry in schema.type_constraints}
    attributes = dict(schema.attributes)
    return Schema(
        since=int(schema.since_version),
        inputs=tuple(_read_slot(entry, allowed) for entry in schema.inputs),
        outputs=tuple(_read_slot(entry, allowed) for entry in schema.outputs),
        attributes={name: bool(entry.required) for name, entry in attributes.items()},
        defaults={name: raw for name, entry in attributes.items() if (raw := _default_of(entry))},
    )


def _read_slot(entry: Any, allowed: Mapping[str, tuple[int, ...]]) -> Slot:
    """One formal parameter."""
    variable = str(getattr(entry, "type_str", None) or getattr(entry, "typeStr", ""))
    option = str(entry.option).rpartition(".")[2].lower()
    return Slot(
        name=str(entry.name),
        variable=variable,
        types=allowed.get(variable, _numbers([variable])),
        optional=option == "optional",
        variadic=option == "variadic",
        rank=_only_rank(str(getattr(entry, "description", ""))),
    )


def _only_rank(description: str) -> int | None:
    """The rank in descriptions like `4-D tensor of shape (N, C, H, W)`."""
    ranks, shape = set(RANK.findall(description)), SHAPE.search(description)
    if shape is None or len(ranks) != 1:
        return None
    rank, sizes = int(shape["rank"]), [size for size in shape["sizes"].split(",") if size.strip()]
    return rank if rank == len(sizes) else None


def _default_of(attribute: Any) -> bytes:
    """The default of an attribute, serialised; empty when it has none."""
    raw = getattr(attribute, "_default_value", None)
    if isinstance(raw, bytes):
        return raw
    value = getattr(attribute, "default_value", None)
    return bytes(value.SerializeToString()) if value is not None and value.name else b""


def _numbers(texts: Any) -> tuple[int, ...]:
    """Element types of `tensor(float)` and the like; what is no tensor is left out."""
    inner = [text[len(PREFIX) : -len(SUFFIX)] for text in texts if text.startswith(PREFIX) and text.endswith(SUFFIX)]
    return tuple(sorted({found.number for found in map(dtypes.find, inner) if found is not None}))
