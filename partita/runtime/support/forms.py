"""Forms of one version of an operator: its examples, brought to that version, and the ranks and constants to be tried.

An older version of an operator has as attribute what a newer one has as input (the axes of Squeeze), and fewer of
either: that much can be said from the two schemas. Whether what comes out is legal is ONNX Runtime's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from partita.runtime.support.examples import Example, Port, examples
from partita.runtime.support.operators import Operator, operators

TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes that choose the type of an output."""
MOST_RANK = 6
OLDER_FORMS = 8
"""Forms of a version that has no example of its own."""
SIDE_RANK = 1
"""Inputs up to this rank, after the first, are constants as exporters write them: shapes, axes, scales."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write one version of an operator, without its types."""

    operator: Operator
    inputs: tuple[Port | None, ...]
    outputs: tuple[bool, ...]
    attributes: Mapping[str, Any]
    node: str
    constant: frozenset[int]
    """Inputs that are constants."""
    kind: str = "form"
    """form, constants or rank: what it is there to tell."""
    note: str = ""
    """What was changed, in words: rank 5; axes not constant."""
    native: bool = True
    """Its example is of this very version."""
    factors: frozenset[str] = field(default=frozenset())
    """What might decide over it, in words: mode=cubic; rank 4 of X; without B."""

    def name_of(self, index: int) -> str:
        """The name of an input; inputs of a variadic operator have numbers."""
        slot = self.operator.input(index)
        if slot is None:
            return str(index)
        return f"{slot.name}{index}" if slot.variadic else slot.name


def forms(operator: Operator) -> tuple[Form, ...]:
    """Every form of a version, the plainest first; none where there is no example of the operator."""
    found = [
        form for example in examples().get((operator.domain, operator.name), ()) for form in _adapted(operator, example)
    ]
    own = [form for form in found if form.native]
    chosen = own or found[:OLDER_FORMS]
    if not chosen:
        return ()
    base = chosen[0]
    return tuple(_with_factors(form) for form in (*chosen[:1], *constants(base), *chosen[1:]))


def ranks(base: Form) -> Iterator[Form]:
    """The form with inputs of every other rank, where all that are no constants have one shape."""
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
            yield _with_factors(replace(base, inputs=inputs, kind="rank", note=f"rank {rank}"))


def constants(base: Form) -> Iterator[Form]:
    """The form with other inputs as constants: none of them, and all after the first."""
    after = frozenset(index for index, port in enumerate(base.inputs) if index and port is not None and port.is_tensor)
    if base.constant:
        names = ", ".join(base.name_of(index) for index in sorted(base.constant))
        yield replace(base, constant=frozenset(), kind="constants", note=f"{names} not constant")
    if after - base.constant:
        names = ", ".join(base.name_of(index) for index in sorted(after - base.constant))
        yield replace(base, constant=after, kind="constants", note=f"{names} constant")


def _adapted(operator: Operator, example: Example) -> Iterator[Form]:
    """The example as this version writes it; nothing where that cannot be said."""
    newer = _version_of(operator, example.since)
    inputs = (
        list(example.inputs) if newer is None or example.since == operator.since else _by_name(operator, newer, example)
    )
    while inputs and inputs[-1] is None:
        inputs.pop()
    if any(
        port is None and not (slot.optional or slot.variadic)
        for slot, port in zip(operator.inputs, inputs, strict=False)
    ):
        return
    if len(inputs) < sum(not (slot.optional or slot.variadic) for slot in operator.inputs):
        return
    attributes = {name: value for name, value in example.attributes.items() if name in operator.attributes}
    if example.since != operator.since:
        attributes |= _moved(operator, newer, example)
        attributes = {name: _as_kind(value, operator.attributes[name].kind) for name, value in attributes.items()}
    missing = [name for name, entry in operator.attributes.items() if entry.required and name not in attributes]
    if (missing and not example.node) or None in attributes.values():
        return
    outputs = example.outputs
    if not (operator.outputs and operator.outputs[-1].variadic):
        outputs = outputs[: len(operator.outputs)]
    form = Form(
        operator, tuple(inputs), outputs, attributes, example.node, frozenset(), native=example.since == operator.since
    )
    yield replace(form, constant=frozenset(_side_inputs(form)))


def _side_inputs(form: Form) -> Iterator[int]:
    """Inputs that exporters write as constants: small ones after the first that say how, and are no data."""
    first = form.operator.input(0)
    for index, port in enumerate(form.inputs):
        slot = form.operator.input(index)
        if index and port is not None and slot is not None and port.values is not None and port.is_tensor:
            data = first is not None and slot.variable == first.variable and not slot.optional
            if len(port.shape) <= SIDE_RANK and not data:
                yield index


def _by_name(operator: Operator, newer: Operator, example: Example) -> list[Port | None]:
    """The inputs of an example of another version, in the order of this one's: by their names, else by their places."""
    if operator.inputs and operator.inputs[-1].variadic:
        return list(example.inputs)
    there = {slot.name: index for index, slot in enumerate(newer.inputs)}
    ours = {slot.name for slot in operator.inputs}
    found: list[Port | None] = []
    for index, slot in enumerate(operator.inputs):
        at_place = newer.inputs[index].name if index < len(newer.inputs) else ""
        place = there.get(slot.name, index if at_place not in ours else None)
        found.append(example.inputs[place] if place is not None and place < len(example.inputs) else None)
    return found


def _moved(operator: Operator, newer: Operator | None, example: Example) -> dict[str, Any]:
    """Attributes of this version that the example has as inputs, with their values."""
    found: dict[str, Any] = {}
    wanted = {name.lower(): name for name in operator.attributes}
    present = {slot.name.lower() for slot in operator.inputs}
    for index, port in enumerate(example.inputs):
        slot = newer.input(index) if newer is not None else None
        name = wanted.get(slot.name.lower()) if slot is not None else None
        if port is not None and name is not None and port.values is not None and name.lower() not in present:
            found[name] = list(port.values)
    return found


def _version_of(operator: Operator, since: int) -> Operator | None:
    """Another version of the same operator."""
    return next((entry for entry in versions(operator) if entry.since == since), None)


@cache
def all_versions() -> dict[tuple[str, str], tuple[Operator, ...]]:
    """Every version of every operator, by domain and name."""
    found: dict[tuple[str, str], tuple[Operator, ...]] = {}
    for entry in operators():
        found[entry.domain, entry.name] = (*found.get((entry.domain, entry.name), ()), entry)
    return found


def versions(operator: Operator) -> tuple[Operator, ...]:
    """All versions of the same operator."""
    return all_versions().get((operator.domain, operator.name), ())


def _as_kind(value: Any, kind: str) -> Any:
    """A value as an attribute of another kind holds it; None where it cannot."""
    if isinstance(value, dict):
        return value if kind == "tensor" else None
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    if kind in ("ints", "floats", "strings"):
        made = [_convert(entry, kind[:-1]) for entry in listed]
        return None if None in made else made
    return _convert(listed[0], kind) if len(listed) == 1 else None


def _convert(value: Any, kind: str) -> Any:
    """One number or text as another kind."""
    if kind == "string":
        return value if isinstance(value, str) else None
    if kind in ("int", "float") and isinstance(value, (int, float)):
        return int(value) if kind == "int" else float(value)
    return None


def _with_factors(form: Form) -> Form:
    """The form with what might decide over it."""
    return replace(form, factors=frozenset(_factors_of(form)))


def _factors_of(form: Form) -> Iterator[str]:
    """Attributes and their values; which inputs are there, constant or not, and of which rank."""
    for name in form.operator.attributes:
        if name in TYPE_ATTRIBUTES:
            continue
        value = form.attributes.get(name)
        if value is not None and not isinstance(value, dict):
            yield f"{name}={_said(value)}"
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


def _said(value: Any) -> str:
    """The value of an attribute in a few characters."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_said, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
