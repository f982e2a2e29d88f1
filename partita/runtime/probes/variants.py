"""Variants of a node: what could be different about it, as data, and many of them beside each other in one model.

A case says what a node is; a `Change` says what a variant has instead; `vary` makes the case of the variant. `sheets`
writes any number of cases into one model per operator set, in which no node reads what another makes: one session
answers for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from partita.runtime.model_file import reads
from partita.runtime.probes.cases import NODE, Case, Feed, case_graph, case_model, finish, is_signed, size_of, zeros
from partita.runtime.probes.constants import constant_of
from partita.runtime.probes.names import copy_node, inner_names, rename
from partita.runtime.probes.schemas import Schema, Slot, find_schema
from partita.runtime.tensor_types import (
    SMALL_BYTES,
    element_of,
    is_fixed,
    rank_of,
    sizes_of,
    tensor_type,
    tensor_types,
    with_element,
)

if TYPE_CHECKING:
    import onnx
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer  # type: ignore[import-untyped]

OLDEST_OPSET = 7
"""ONNX Runtime supports operator sets from 7 on."""
TYPE_ATTRIBUTES = frozenset({"to", "dtype"})
"""Attributes that hold an element type."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a variant has in place of what the node has; empty: nothing. Inputs go by their names in the case."""

    elements: Mapping[str, int] = field(default_factory=dict)
    """Element types of inputs; the values of constants are cast."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes of inputs; constants keep theirs."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Numbers of dimensions of inputs, all of which stay open."""
    fixed: bool = False
    """All sizes are those of the run, and what follows from them is a constant."""
    constants: Mapping[str, onnx.TensorProto | None] = field(default_factory=dict)
    """Inputs that become constants of these values; None: of those in the run where they are known, else of zeros."""
    fed: frozenset[str] = frozenset()
    """Constants that become inputs."""
    attributes: Mapping[str, onnx.AttributeProto | None] = field(default_factory=dict)
    """Attributes with another value; None: left out."""
    inputs_left_out: frozenset[int] = frozenset()
    """Positions: one tensor can be read at several."""
    outputs_left_out: frozenset[int] = frozenset()
    opset: int | None = None
    """Of the operator's domain."""
    declared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes of outputs that are declared."""

    def __or__(self, other: Change) -> Change:
        """Both changes; where both change one thing, it is the other's."""
        return Change(
            elements={**self.elements, **other.elements},
            sizes={**self.sizes, **other.sizes},
            ranks={**self.ranks, **other.ranks},
            fixed=self.fixed or other.fixed,
            constants={**self.constants, **other.constants},
            fed=self.fed | other.fed,
            attributes={**self.attributes, **other.attributes},
            inputs_left_out=self.inputs_left_out | other.inputs_left_out,
            outputs_left_out=self.outputs_left_out | other.outputs_left_out,
            opset=self.opset if other.opset is None else other.opset,
            declared={**self.declared, **other.declared},
        )


def vary(case: Case, change: Change) -> Case | None:
    """The case of a variant; None when no output would be left, or the operator set has no such form of the node."""
    node = copy_node(case.node)
    attributes = {**{entry.name: entry for entry in case.node.attribute}, **change.attributes}
    del node.attribute[:]
    node.attribute.extend(entry for entry in attributes.values() if entry is not None)
    _leave_out(node.input, change.inputs_left_out)
    _leave_out(node.output, change.outputs_left_out)
    if not node.output:
        return None
    left = set(reads(node))  # bodies read, too
    feeds = tuple(_vary_feed(case, feed, change) for feed in case.feeds if feed.name in left)
    varied = replace(case, node=node, feeds=feeds)
    if change.elements or change.attributes or change.outputs_left_out:
        varied = replace(varied, signed_output=_signed_output(varied))
    if change.declared or case.declared:
        varied = replace(varied, declared=_declared(varied, change))
    return varied if change.opset is None else _at_opset(varied, change.opset)


def _leave_out(names: RepeatedScalarFieldContainer[str], positions: Collection[int]) -> None:
    """Leave out inputs or outputs: none at the end, and an empty name where others follow."""
    for position in positions:
        names[position] = ""
    while names and not names[-1] and positions:
        names.pop()


def _vary_feed(case: Case, feed: Feed, change: Change) -> Feed:
    """One input of a variant."""
    if change.fixed:
        feed = fixed_feed(case, feed)
    element = change.elements.get(feed.name)
    if element is not None and element_of(feed.kind) not in (None, element):
        value = cast(feed.constant, element) if feed.constant is not None else None
        feed = Feed(feed.name, with_element(feed.kind, element), value)
    sizes: Sequence[int | None] | None = change.sizes.get(feed.name)
    if sizes is None and feed.name in change.ranks and rank_of(feed.kind) is None:
        sizes = [None] * change.ranks[feed.name]
    element = element_of(feed.kind)
    if sizes is not None and element is not None and feed.constant is None:
        feed = replace(feed, kind=tensor_type(element, sizes))
    if feed.name in change.fed:
        feed = replace(feed, constant=None)
    return constant(case, feed, change.constants[feed.name]) if feed.name in change.constants else feed


def fixed_feed(case: Case, feed: Feed) -> Feed:
    """The feed with the sizes of the run; as a constant when its values follow from them."""
    folded = case.folded.get(feed.name)
    if folded is not None and feed.constant is None and element_of(feed.kind) == folded.data_type:
        return Feed(feed.name, tensor_type(folded.data_type, folded.dims), folded)
    known = feed.name in case.fixed and feed.constant is None
    return replace(feed, kind=case.fixed[feed.name]) if known else feed


def constant(case: Case, feed: Feed, value: onnx.TensorProto | None) -> Feed:
    """The feed as a constant; as it is where its type or its sizes are not known."""
    element = element_of(feed.kind)
    sizes = sizes_of(feed.kind if is_fixed(feed.kind) else case.fixed.get(feed.name))
    if value is None:
        value = case.folded.get(feed.name) or case.given.get(feed.name)
    if value is not None:
        value = value if element in (None, value.data_type) else cast(value, element)
        return Feed(feed.name, tensor_type(value.data_type, value.dims), _named(value, feed.name))
    if element is None or sizes is None:
        return feed
    return Feed(feed.name, tensor_type(element, sizes), zeros(feed.name, element, sizes))


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """The tensor under this name."""
    import onnx

    if tensor.name == name:
        return tensor
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy


def cast(tensor: onnx.TensorProto, new: int) -> onnx.TensorProto:
    """A constant in another element type; values that the type cannot hold become zeros."""
    import numpy as np
    import onnx

    if tensor.external_data or size_of(new, tensor.dims) > SMALL_BYTES:
        return zeros(tensor.name, new, tensor.dims)
    try:
        with np.errstate(all="ignore"):
            values = onnx.numpy_helper.to_array(tensor).astype(onnx.helper.tensor_dtype_to_np_dtype(new))
        made: onnx.TensorProto = onnx.numpy_helper.from_array(values, tensor.name)
    except (TypeError, ValueError, KeyError):
        return zeros(tensor.name, new, tensor.dims)
    return made if made.data_type == new else zeros(tensor.name, new, tensor.dims)


def _declared(case: Case, change: Change) -> dict[str, onnx.TypeProto]:
    """Declared outputs of a variant. With other sizes of inputs nobody knows theirs; their types follow."""
    if change.sizes:
        return {}
    sizes = {name: sizes_of(kind) for name, kind in case.declared.items()} | dict(change.declared)
    known = tensor_types(case_model(replace(case, declared={})))
    elements = {name: element_of(known[name]) for name in case.node.output if name in known}
    return {
        name: tensor_type(element, each)
        for name, each in sizes.items()
        if each is not None and (element := elements.get(name))
    }


def copy_attribute(attribute: onnx.AttributeProto) -> onnx.AttributeProto:
    """A deep copy, so that changes do not reach the node."""
    import onnx

    copy = onnx.AttributeProto()
    copy.CopyFrom(attribute)
    return copy


def _signed_output(case: Case) -> str:
    """An output that can be negated, by the types that follow from those of the inputs; empty when none is known to."""
    types = tensor_types(case_model(case))
    return next((name for name in case.node.output if name in types and is_signed(types[name])), "")


# --- what the operator set says ------------------------------------------------------------------------------------


def schema_of(case: Case) -> Schema | None:
    """The operator's schema in the case's operator set."""
    node = case.node
    return find_schema(node.domain, node.op_type, case.opsets.get(node.domain, 1))


def optional_inputs(case: Case, schema: Schema | None) -> dict[int, str]:
    """Optional inputs that are there: position and what the operator calls them."""
    slots = {position: schema.slot(position) for position, name in enumerate(case.node.input) if name and schema}
    return {position: slot.name for position, slot in slots.items() if slot is not None and slot.optional}


def optional_outputs(case: Case, schema: Schema | None) -> dict[int, str]:
    """Optional outputs that are there, as `optional_inputs` has inputs."""
    slots = zip(case.node.output, schema.outputs if schema is not None else (), strict=False)
    return {position: slot.name for position, (name, slot) in enumerate(slots) if name and slot.optional}


def _at_opset(case: Case, opset: int) -> Case | None:
    """The case in another operator set: as it is if that is legal there, else converted; None where neither works."""
    import onnx

    moved = replace(_said_only(case, opset), opsets={**case.opsets, case.node.domain: opset})
    if _legal(moved):
        return moved
    model = case_model(case)
    del model.functions[:]
    try:
        converted = onnx.version_converter.convert_version(model, opset)
    except Exception:  # noqa: BLE001 - the converter is native code that raises what it likes for what it cannot convert
        return None
    # What was an attribute, the converter makes an input: a constant beside the node.
    made = {node.output[0]: value for node in converted.graph.node if (value := constant_of(node)) is not None}
    nodes = [node for node in converted.graph.node if constant_of(node) is None]
    if [node.op_type for node in nodes] != [case.node.op_type]:
        return None
    (node,) = nodes
    kinds = {port.name: port.type for port in converted.graph.input}
    constants = {tensor.name: tensor for tensor in converted.graph.initializer}
    for name, value in made.items():
        value.name = name
        constants[name] = value
    names = [name for name in dict.fromkeys(node.input) if name]
    if any(name not in kinds and name not in constants for name in names):
        return None
    feeds = tuple(
        Feed(name, kinds.get(name) or tensor_type(constants[name].data_type, constants[name].dims), constants.get(name))
        for name in names
    )
    changed = replace(moved, node=node, feeds=feeds)
    return changed if _legal(changed) else None


def _said_only(case: Case, opset: int) -> Case:
    """The case without attributes that another operator set does not know, where they only say what goes without."""
    now, then = schema_of(case), find_schema(case.node.domain, case.node.op_type, opset)
    if now is None or then is None:
        return case
    node = copy_node(case.node)
    del node.attribute[:]
    node.attribute.extend(
        entry
        for entry in case.node.attribute
        if entry.name in then.attributes or now.defaults.get(entry.name) != entry.SerializeToString()
    )
    return replace(case, node=node)


def _legal(case: Case) -> bool:
    """Whether the node's attributes and number of inputs fit its operator set, and the types its inputs have."""
    schema = schema_of(case)
    if schema is None or any(attribute.name not in schema.attributes for attribute in case.node.attribute):
        return False
    given = {attribute.name for attribute in case.node.attribute}
    if any(required and name not in given for name, required in schema.attributes.items()):
        return False
    needed = sum(not slot.optional for slot in schema.inputs if not slot.variadic)
    slots = [schema.slot(position) for position in range(len(case.node.input))]
    if len(case.node.input) < needed or any(slot is None for slot in slots):
        return False
    return all(_allowed(case, slot, name) for slot, name in zip(slots, case.node.input, strict=True))


def _allowed(case: Case, slot: Slot | None, name: str) -> bool:
    """Whether an input has a type and a rank that its slot takes; what is left out, or is no tensor, does."""
    feed = case.feed(name)
    if slot is None or feed is None:
        return True
    element, rank = element_of(feed.kind), rank_of(feed.kind)
    return (element is None or element in slot.types) and (slot.rank is None or rank in (None, slot.rank))


def complaint(case: Case) -> str:
    """Why the onnx package does not accept the case, in one line; empty when it does, or does not know the operator.

    One variant that is not legal spoils the session of all that are beside it.
    """
    import onnx

    model = case_model(case)
    del model.graph.output[:]  # they have no type, which the checker asks for
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ""


# --- many in one model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sheet:
    """Several variants beside each other in one model."""

    model: onnx.ModelProto
    nodes: Mapping[int, str]
    """Which of the cases are in it, by their places in what was written, and the name of each one's node."""


def sheets(cases: Sequence[Case], *, company: bool = False) -> tuple[Sheet, ...]:
    """All cases, in as few models as their operator sets allow. `company`: each with a Neg, as in `case_model`.

    Every case keeps inputs, constants and outputs of its own. Large constants lie in the file of zeros, as ever.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, case in enumerate(cases):
        functions = tuple(function.SerializeToString(deterministic=True) for function in case.functions)
        groups.setdefault((tuple(sorted(case.opsets.items())), case.ir_version, functions), []).append(place)
    return tuple(_write_sheet({place: cases[place] for place in places}, company) for places in groups.values())


def _write_sheet(cases: Mapping[int, Case], company: bool) -> Sheet:
    """One model of cases with the same operator sets."""
    import onnx

    whole = onnx.GraphProto(name=NODE)
    taken = [name for case in cases.values() for name in inner_names(case.node)]
    mark = "v"
    while any(name.startswith(mark) for name in taken):  # names in bodies stay as they are
        mark += "v"
    for place, case in cases.items():
        graph = case_graph(case, company=company)
        _give_names(graph, f"{mark}{place}.", str(place))
        whole.MergeFrom(graph)
    whole.name = NODE
    first = next(iter(cases.values()))
    model = finish(whole, first.opsets, first.ir_version, first.functions)
    return Sheet(model, {place: f"{NODE}{place}" for place in cases})


def _give_names(graph: onnx.GraphProto, before: str, after: str) -> None:
    """Put `before` in front of the names of all tensors of a case's graph, and `after` behind those of its nodes."""
    ports = (*graph.input, *graph.initializer, *graph.output, *graph.value_info)
    made = [name for node in graph.node for name in node.output if name]
    names = {name: before + name for name in (*(port.name for port in ports), *made)}
    for node in graph.node:
        rename(node, names)
        node.name += after
        node.output[:] = [names.get(name, "") for name in node.output]
    for port in ports:
        port.name = names[port.name]
