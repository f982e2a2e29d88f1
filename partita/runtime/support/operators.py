"""What the operator sets say of operators: every version, its inputs and outputs, and which types they may have.

ONNX's own operators are described by the onnx package, ONNX Runtime's by ONNX Runtime. Types stay as schemas spell
them, tensor(float) or seq(tensor(int64)), because some operators take nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from partita.runtime.ort.registry import all_operator_schemas

INTERNAL = ("com.ms.", "com.microsoft.", "ai.onnx.preview")
"""Beginnings of domains whose operators no file is meant to have."""
NOT_IN_FILES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
ONNX_NAME = "ai.onnx"
"""The other name of the domain without a name."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One input or output."""

    name: str
    variable: str
    """Slots with the same type variable have the same type; a fixed type stands for itself."""
    types: tuple[str, ...]
    optional: bool
    variadic: bool


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute; `kind` in small letters: ints, tensor, graph."""

    kind: str
    required: bool


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One version of an operator. There is one object for each, so that it can be looked up by itself."""

    domain: str
    name: str
    since: int
    until: int | None
    """The last version of the operator set in which it is in force; None while nothing has replaced it."""
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attributes: Mapping[str, Attribute]

    def input(self, index: int) -> Slot | None:
        """The slot of the input at `index`; the last one of a variadic operator takes all that follow."""
        return _at(self.inputs, index)

    def output(self, index: int) -> Slot | None:
        """The slot of the output at `index`, as for an input."""
        return _at(self.outputs, index)

    @property
    def opset(self) -> int:
        """The version of the operator set in which it is asked about: the first that ONNX Runtime guarantees."""
        return max(self.since, min(OLDEST, self.until or OLDEST)) if self.domain == "" else self.since

    def variables(self, present: int) -> dict[str, tuple[str, ...]]:
        """Type variables of the first inputs, and what each allows."""
        slots = [slot for index in range(present) if (slot := self.input(index)) is not None]
        return {slot.variable: slot.types for slot in slots}


OLDEST = 7
"""ONNX Runtime says that it guarantees support from this version of ONNX's operator set on."""


def _at(slots: tuple[Slot, ...], index: int) -> Slot | None:
    """The slot at a place."""
    if index < len(slots):
        return slots[index]
    return slots[-1] if slots and slots[-1].variadic else None


@cache
def operators() -> tuple[Operator, ...]:
    """Every version of every operator that a file may have, oldest first."""
    import onnx

    histories: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        histories.setdefault((plain(schema.domain), schema.name), {})[schema.since_version] = schema
    own = set(histories)
    for schema in all_operator_schemas():
        key = (plain(schema.domain), schema.name)
        if key not in own and schema.name not in NOT_IN_FILES:
            histories.setdefault(key, {})[schema.since_version] = schema
    return tuple(
        operator
        for (domain, _), versions in sorted(histories.items())
        if not domain.startswith(INTERNAL)
        for operator in _read_history(versions)
    )


def plain(domain: str) -> str:
    """The domain as most files write it."""
    return "" if domain == ONNX_NAME else domain


def _read_history(versions: Mapping[int, Any]) -> Iterator[Operator]:
    """The versions of one operator that are no mere note that it is gone."""
    order = sorted(versions)
    for since, after in zip(order, [*order[1:], None], strict=True):
        if not versions[since].deprecated:
            yield read(versions[since], None if after is None else after - 1)


def read(schema: Any, until: int | None) -> Operator:
    """A schema as plain data; onnx and ONNX Runtime describe theirs in nearly the same words."""
    allowed = {entry.type_param_str: tuple(sorted(entry.allowed_type_strs)) for entry in schema.type_constraints}
    return Operator(
        domain=plain(str(schema.domain)),
        name=str(schema.name),
        since=int(schema.since_version),
        until=until,
        inputs=tuple(_read_slot(entry, allowed) for entry in schema.inputs),
        outputs=tuple(_read_slot(entry, allowed) for entry in schema.outputs),
        attributes={
            name: Attribute(_word(entry.type), bool(entry.required)) for name, entry in schema.attributes.items()
        },
    )


def _read_slot(entry: Any, allowed: Mapping[str, tuple[str, ...]]) -> Slot:
    """One formal parameter."""
    variable = str(getattr(entry, "type_str", None) or getattr(entry, "typeStr", ""))
    option = _word(entry.option)
    return Slot(
        str(entry.name), variable, allowed.get(variable, (variable,)), option == "optional", option == "variadic"
    )


def _word(value: Any) -> str:
    """The last word of a native enumeration's value, in small letters."""
    return str(value).rpartition(".")[2].lower()
