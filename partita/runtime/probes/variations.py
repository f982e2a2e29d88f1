"""Everything that is tried on a node besides the node as it is: one factor at a time, then several together.

A variation that ONNX Runtime does not accept at all is tried all the same and counts for nothing; see `Outcome`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from partita import dtypes
from partita.observations.facts import Factor, Swap
from partita.runtime.probes.cases import Case, Feed, case_model, reads, size_of, zeros
from partita.runtime.probes.schemas import Schema, Slot, find_schema, history
from partita.runtime.probes.tensor_types import SMALL_BYTES, is_fixed, tensor_type

if TYPE_CHECKING:
    import onnx

FLOAT, UINT8, INT8, INT32, INT64, STRING = dtypes.numbers("float32", "uint8", "int8", "int32", "int64", "string")
BOOL, FLOAT16, DOUBLE, UINT32, BFLOAT16 = dtypes.numbers("bool", "float16", "float64", "uint32", "bfloat16")
FLOATS = (FLOAT, FLOAT16, BFLOAT16, DOUBLE)
INTEGERS = (INT32, INT64, UINT32, UINT8, INT8)
OTHERS = (FLOAT, FLOAT16, INT32, INT8, UINT8, INT64)
"""Element types to try, likeliest first, for floats, for integers, and for the rest."""
TYPE_ATTRIBUTES = frozenset({"to", "dtype"})
"""Attributes that hold an element type."""
VALUE_ATTRIBUTES = frozenset({"value"})
"""Attributes that hold a tensor, whose type is that of an output."""
MOST_TYPES, MOST_VERSIONS, MOST_COMBINED = 5, 6, 36
USUAL_RANK = 4
OLDEST_OPSET, NO_VERSION = 7, 1 << 30
"""ONNX Runtime supports operator sets from 7 on."""


@dataclass(frozen=True, slots=True)
class Variation:
    """A node as it could be instead."""

    factor: Factor
    change: str
    case: Case
    parts: tuple[Factor, ...] = ()
    """Of a combined one."""
    swap: Swap | None = None
    """The change, where one thing takes the place of another."""
    removes: bool = False
    """The change leaves something out."""

    @classmethod
    def swapped(cls, factor: Factor, swap: Swap, case: Case) -> Variation:
        """One thing in place of another."""
        return cls(factor, str(swap), case, swap=swap)

    @classmethod
    def without(cls, factor: Factor, what: str, case: Case) -> Variation:
        """Something left out."""
        return cls(factor, f"without {what}", case, removes=True)


def as_it_is(case: Case) -> Variation:
    """Nothing changed."""
    return Variation("as_is", "", case)


def single(case: Case) -> tuple[Variation, ...]:
    """Every variation in one factor."""
    schema = schema_of(case)
    return (
        *static_shapes(case),
        *other_types(case, schema),
        *other_versions(case),
        *other_attributes(case, schema),
        *fewer_operands(case),
        *other_inputs(case, schema),
    )


def combined(case: Case) -> tuple[Variation, ...]:
    """Several factors at once, fewest first: what no single one decides may be decided by two."""
    found = [
        variation
        for start in starting_points(case)
        for kind in (start, *(joined(start, entry) for entry in other_types(start.case, schema_of(start.case))))
        for variation in (kind, *(joined(kind, entry) for entry in other_versions(kind.case)))
        if len(variation.parts) > 1
    ]
    found.sort(key=lambda entry: len(entry.parts))
    return tuple(found[:MOST_COMBINED])


def starting_points(case: Case) -> Iterator[Variation]:
    """The case with sizes fixed or not, and attributes at their defaults or not."""
    plain = with_defaults(case, schema_of(case))
    points = [Variation("combined", "", case)]
    if plain is not None:
        points.append(Variation("combined", "attributes at their defaults", plain, ("attribute", "attribute")))
    for point in points:
        yield point
        yield from (joined(point, entry) for entry in static_shapes(point.case))


def joined(before: Variation, after: Variation) -> Variation:
    """Two changes together; the case of the second has both."""
    change = " and ".join(part for part in (before.change, after.change) if part)
    removes = before.removes if before.change else after.removes
    return Variation("combined", change, after.case, (*before.parts, after.factor), removes=removes)


def schema_of(case: Case) -> Schema | None:
    """The operator's schema in the case's operator set."""
    node = case.node
    return find_schema(node.domain, node.op_type, case.opsets.get(node.domain, 1))


def static_shapes(case: Case) -> Iterator[Variation]:
    """All sizes as they are in the run."""
    if all(is_fixed(feed.kind) for feed in case.feeds) and not case.folded:
        return
    feeds = tuple(fixed_feed(case, feed) for feed in case.feeds)
    if feeds != case.feeds:
        yield Variation("static_shape", "all sizes fixed", replace(case, feeds=feeds))


def fixed_feed(case: Case, feed: Feed) -> Feed:
    """The feed with the sizes of the run; as a constant when its values follow from them."""
    folded = case.folded.get(feed.name)
    if folded is not None and feed.constant is None and element_of(feed.kind) == folded.data_type:
        return Feed(feed.name, tensor_type(folded.data_type, folded.dims), folded)
    return (
        feed if feed.name not in case.fixed or feed.constant is not None else replace(feed, kind=case.fixed[feed.name])
    )


def other_types(case: Case, schema: Schema | None) -> Iterator[Variation]:
    """Each element type of the inputs in place by another, wherever the operator allows it."""
    present = dict.fromkeys(element_of(feed.kind) for feed in case.feeds)
    for old in present:
        if old is None:
            continue
        changes = (
            Variation.swapped("type", types(old, new), replace(case, feeds=feeds))
            for new in candidates(old)
            if (feeds := tuple(changed_feed(case, schema, feed, old, new) for feed in case.feeds)) != case.feeds
        )
        yield from islice(changes, MOST_TYPES)
    yield from other_output_types(case)
    yield from one_variable(case, schema)


def one_variable(case: Case, schema: Schema | None) -> Iterator[Variation]:
    """The type of one type variable alone, where several have the same type."""
    if schema is None:
        return
    groups: dict[str, list[Feed]] = {}
    for position, name in enumerate(case.node.input):
        slot, feed = schema.slot(position), case.feed(name)
        if slot is not None and feed is not None and len(slot.types) > 1:
            groups.setdefault(slot.variable, []).append(feed)
    if len(groups) < 2:
        return
    for feeds in groups.values():
        old = element_of(feeds[0].kind)
        shared = sum(element_of(others[0].kind) == old for others in groups.values())
        if old is None or shared < 2:
            continue
        names = [feed.name for feed in feeds]
        for new in candidates(old)[:MOST_TYPES]:
            changed = case
            for feed in feeds:
                changed = changed.with_feed(changed_feed(case, schema, feed, old, new))
            if changed.feeds != case.feeds:
                yield Variation.swapped(
                    "type", types(old, new, f"in {listed_inputs(case, schema, names)}", partly=True), changed
                )


def listed_inputs(case: Case, schema: Schema, names: Sequence[str]) -> str:
    """Inputs as the operator calls them."""
    slots = [schema.slot(position) for position, name in enumerate(case.node.input) if name in names]
    return " and ".join(dict.fromkeys(slot.name for slot in slots if slot is not None))


def other_output_types(case: Case) -> Iterator[Variation]:
    """Another element type in an attribute that decides the type of an output."""
    for position, attribute in enumerate(case.node.attribute):
        if attribute.name in TYPE_ATTRIBUTES and attribute.i:
            for new in candidates(attribute.i)[:MOST_TYPES]:
                node = copy_node(case.node)
                node.attribute[position].i = new
                yield Variation.swapped(
                    "type", types(attribute.i, new, f"as {attribute.name}"), replace(case, node=node)
                )
        elif attribute.name in VALUE_ATTRIBUTES and attribute.HasField("t") and not attribute.t.external_data:
            for new in candidates(attribute.t.data_type)[:MOST_TYPES]:
                node = copy_node(case.node)
                node.attribute[position].t.CopyFrom(cast(attribute.t, new))
                change = types(attribute.t.data_type, new, f"as {attribute.name}")
                yield Variation.swapped("type", change, replace(case, node=node))


def candidates(old: int) -> tuple[int, ...]:
    """Element types to try in place of one, likeliest first. How many is limited once it is known which of them fit."""
    order: tuple[int, ...] = (
        (*FLOATS, INT32, INT8, UINT8) if old in FLOATS else (INT32, INT64, FLOAT, FLOAT16, INT8, UINT8, UINT32)
    )
    if old not in FLOATS and old not in INTEGERS:
        order = OTHERS
    return tuple(entry for entry in order if entry != old)


def changed_feed(case: Case, schema: Schema | None, feed: Feed, old: int, new: int) -> Feed:
    """The feed in the new type, if it has the old one and the operator allows the new one there."""
    if element_of(feed.kind) != old or not allows(case, schema, feed.name, new):
        return feed
    kind = copy_type(feed.kind)
    kind.tensor_type.elem_type = new
    return Feed(feed.name, kind, cast(feed.constant, new) if feed.constant is not None else None)


def allows(case: Case, schema: Schema | None, name: str, new: int) -> bool:
    """Whether the operator takes the type at every place where the node reads `name`; unknown operators may."""
    places = [position for position, other in enumerate(case.node.input) if other == name]
    if schema is None:
        return True
    slots = [schema.slot(position) for position in places]
    return bool(places) and all(slot is not None and new in slot.types for slot in slots)


def element_of(kind: onnx.TypeProto) -> int | None:
    """Element type; None for what is no tensor."""
    return kind.tensor_type.elem_type if kind.WhichOneof("value") == "tensor_type" else None


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


def other_versions(case: Case) -> Iterator[Variation]:
    """The operator as older and newer operator sets have it."""
    node = case.node
    current = schema_of(case)
    if node.domain or current is None:
        return
    versions = [schema.since for schema in history(node.domain, node.op_type)]
    # A version counts when some operator set that ONNX Runtime supports has it.
    others = [
        since
        for since, after in zip(versions, (*versions[1:], NO_VERSION), strict=True)
        if since != current.since and after > OLDEST_OPSET
    ]
    older = [since for since in others if since < current.since][::-1]
    newer = [since for since in others if since > current.since]
    for since in islice((*older, *newer), MOST_VERSIONS):
        changed = at_version(case, since)
        if changed is not None:
            yield Variation.swapped("opset", Swap(f"{node.op_type} of opset {since}", str(current.since)), changed)


def at_version(case: Case, since: int) -> Case | None:
    """The case in another operator set: as it is if that is legal there, else converted; None where neither works."""
    import onnx

    opset = max(since, OLDEST_OPSET)
    moved = replace(case, opsets={**case.opsets, "": opset})
    if legal(moved):
        return moved
    model = case_model(case)
    del model.functions[:]
    try:
        converted = onnx.version_converter.convert_version(model, opset)
    except Exception:  # noqa: BLE001 - the converter is native code that raises what it likes for what it cannot convert
        return None
    alone = [node for node in converted.graph.node if node.op_type == case.node.op_type]
    if len(alone) != 1 or len(converted.graph.node) != 1:
        return None
    kinds = {port.name: port.type for port in converted.graph.input}
    constants = {tensor.name: tensor for tensor in converted.graph.initializer}
    names = [name for name in dict.fromkeys(alone[0].input) if name]
    if any(name not in kinds and name not in constants for name in names):
        return None
    feeds = tuple(
        Feed(name, kinds.get(name) or tensor_type(constants[name].data_type, constants[name].dims), constants.get(name))
        for name in names
    )
    changed = replace(moved, node=alone[0], feeds=feeds)
    return changed if legal(changed) else None


def legal(case: Case) -> bool:
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
    return all(allowed(case, slot, name) for slot, name in zip(slots, case.node.input, strict=True))


def allowed(case: Case, slot: Slot | None, name: str) -> bool:
    """Whether an input has a type that its slot takes; what is left out, or is no tensor, does."""
    feed = case.feed(name)
    element = element_of(feed.kind) if feed is not None else None
    return slot is None or element is None or element in slot.types


def other_attributes(case: Case, schema: Schema | None) -> Iterator[Variation]:
    """Each attribute that can be left out, left out; and without the optional outputs, which it may have called for."""
    for attribute in case.node.attribute:
        if can_go(attribute, schema):
            node = copy_node(case.node)
            kept = [entry for entry in node.attribute if entry.name != attribute.name]
            del node.attribute[:]
            node.attribute.extend(kept)
            change = f"{attribute.name}={shown(attribute)}"
            yield Variation.without("attribute", change, replace(case, node=node))
            fewer = required_outputs(node, schema)
            if fewer is not None:
                yield Variation.without("attribute", f"{change} and its optional outputs", replace(case, node=fewer))


def fewer_operands(case: Case) -> Iterator[Variation]:
    """An Einsum of its first two operands only: the equation has no default, and many providers know such products."""
    equation = next((entry.s.decode() for entry in case.node.attribute if entry.name == "equation"), "")
    terms = equation.partition("->")[0].replace(" ", "").split(",")
    if case.node.op_type != "Einsum" or case.node.domain or len(terms) < 3 or "." in equation:
        return
    first, second = terms[:2]
    kept = "".join(letter for letter in first + second if (first + second).count(letter) == 1)
    node = copy_node(case.node)
    del node.input[2:]
    for attribute in node.attribute:
        if attribute.name == "equation":
            attribute.s = f"{first},{second}->{kept}".encode()
    left = set(reads(node))
    feeds = tuple(feed for feed in case.feeds if feed.name in left)
    yield Variation.swapped("attribute", Swap("2 operands", str(len(terms))), replace(case, node=node, feeds=feeds))


def required_outputs(node: onnx.NodeProto, schema: Schema | None) -> onnx.NodeProto | None:
    """The node without its optional outputs; None when it has none, or no other."""
    optional = [slot.optional for slot in schema.outputs] if schema is not None else []
    kept = [name for name, may_go in zip(node.output, optional, strict=False) if not may_go]
    if not kept or len(kept) == len(node.output):
        return None
    fewer = copy_node(node)
    del fewer.output[:]
    fewer.output.extend(kept)
    return fewer


def with_defaults(case: Case, schema: Schema | None) -> Case | None:
    """The case without any attribute that can be left out; None when that is nothing new, or one attribute only."""
    going = {attribute.name for attribute in case.node.attribute if can_go(attribute, schema)}
    if len(going) < 2:
        return None
    node = copy_node(case.node)
    kept = [entry for entry in node.attribute if entry.name not in going]
    del node.attribute[:]
    node.attribute.extend(kept)
    return replace(case, node=node)


def can_go(attribute: onnx.AttributeProto, schema: Schema | None) -> bool:
    """Whether an attribute may be left out, and has another value than it would have then."""
    if schema is None or schema.attributes.get(attribute.name, True) or attribute.name in TYPE_ATTRIBUTES:
        return False
    default = schema.defaults.get(attribute.name)
    return default is None or default != attribute.SerializeToString()


def shown(attribute: onnx.AttributeProto) -> str:
    """The value of an attribute, for people."""
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return str(value)
    try:
        texts = [entry.decode("utf-8", errors="replace") if isinstance(entry, bytes) else str(entry) for entry in value]
        return "[" + ",".join(texts) + "]" if len(value) <= 8 else f"{len(value)} values"
    except TypeError:
        return "(a tensor or graph)"


def other_inputs(case: Case, schema: Schema | None) -> Iterator[Variation]:
    """Each optional input or output left out, each input made a constant, and shapes of the usual rank."""
    node = case.node
    for position, name in enumerate(node.input):
        slot = schema.slot(position) if schema is not None else None
        if name and slot is not None and slot.optional:
            changed = copy_node(node)
            changed.input[position] = ""
            while changed.input and not changed.input[-1]:
                changed.input.pop()
            left = set(reads(changed))  # bodies read, too
            feeds = tuple(feed for feed in case.feeds if feed.name in left)
            fewer = replace(case, node=changed, feeds=feeds)
            yield Variation.without("input", f"the optional input {slot.name}", fewer)
    yield from fewer_outputs(case, schema)
    yield from bare(case, schema)
    for position, name in enumerate(node.input):
        feed = case.feed(name)
        if position and feed is not None and feed.constant is None and is_fixed(case.fixed.get(name)):
            yield Variation("input", f"{input_name(schema, position)} as a constant", constant(case, feed))
    yield from other_ranks(case)
    yield from filled(case)


def filled(case: Case) -> Iterator[Variation]:
    """With a size of 1 where a tensor has none: some providers take no empty ones."""
    feeds = tuple(
        replace(feed, kind=tensor_type(element, tuple(size or 1 for size in sizes)))
        if feed.constant is None
        and (sizes := sizes_of(feed.kind))
        and 0 in sizes
        and (element := element_of(feed.kind))
        else feed
        for feed in case.feeds
    )
    if feeds != case.feeds:
        yield Variation.swapped("input", Swap("1", "a size of 0"), replace(case, feeds=feeds))


def fewer_outputs(case: Case, schema: Schema | None) -> Iterator[Variation]:
    """Each optional output left out."""
    for position, slot in enumerate(schema.outputs if schema is not None else ()):
        if slot.optional and position < len(case.node.output) and case.node.output[position]:
            node = copy_node(case.node)
            node.output[position] = ""
            while node.output and not node.output[-1]:
                node.output.pop()
            if node.output:
                yield Variation.without("input", f"the optional output {slot.name}", replace(case, node=node))


def bare(case: Case, schema: Schema | None) -> Iterator[Variation]:
    """Without any optional input or output: some go together, such as past and present."""
    if schema is None:
        return
    slots = [schema.slot(position) for position in range(len(case.node.input))]
    gone = [
        position
        for position, slot in enumerate(slots)
        if slot is not None and slot.optional and case.node.input[position]
    ]
    extra = [
        position
        for position, slot in enumerate(schema.outputs)
        if slot.optional and position < len(case.node.output) and case.node.output[position]
    ]
    if len(gone) + len(extra) < 2 or len(extra) == sum(map(bool, case.node.output)):
        return
    node = copy_node(case.node)
    for position in gone:
        node.input[position] = ""
    for position in extra:
        node.output[position] = ""
    for names in (node.input, node.output):
        while names and not names[-1]:
            names.pop()
    left = set(reads(node))
    feeds = tuple(feed for feed in case.feeds if feed.name in left)
    yield Variation.without("input", "any optional input or output", replace(case, node=node, feeds=feeds))


def input_name(schema: Schema | None, position: int) -> str:
    """An input as the operator calls it."""
    slot = schema.slot(position) if schema is not None else None
    return f"input {slot.name}" if slot is not None else f"input {position}"


def constant(case: Case, feed: Feed) -> Case:
    """The case with a constant in place of an input: its values where they are known, else zeros."""
    if feed.name in case.folded:
        return case.with_feed(fixed_feed(case, feed))
    kind = case.fixed[feed.name]
    sizes = [size.dim_value for size in kind.tensor_type.shape.dim]
    return case.with_feed(Feed(feed.name, kind, zeros(feed.name, kind.tensor_type.elem_type, sizes)))


def other_ranks(case: Case) -> Iterator[Variation]:
    """Inputs of one shape, with fewer dimensions or with more: some providers know only some ranks."""
    shapes = {feed.name: sizes_of(case.fixed.get(feed.name)) for feed in case.feeds if feed.constant is None}
    known = {sizes for sizes in shapes.values() if sizes is not None}
    if len(known) > 1:
        known.discard(())  # a scalar stays one beside a tensor
    if len(known) != 1 or None in shapes.values() or len(shapes) != len(case.feeds):
        return
    (sizes,) = known
    for rank in dict.fromkeys((USUAL_RANK, USUAL_RANK - 1, USUAL_RANK - 2)):
        if len(sizes) == rank:
            continue
        other = sizes[-rank:] if len(sizes) > rank else (1,) * (rank - len(sizes)) + sizes
        feeds = tuple(
            replace(feed, kind=tensor_type(element, other))
            if shapes[feed.name] == sizes and (element := element_of(feed.kind))
            else feed
            for feed in case.feeds
        )
        yield Variation.swapped("input", Swap(f"{rank} dimensions", str(len(sizes))), replace(case, feeds=feeds))


def sizes_of(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """Sizes of a tensor whose every size is known."""
    if kind is None or not is_fixed(kind):
        return None
    return tuple(size.dim_value for size in kind.tensor_type.shape.dim)


def types(old: int, new: int, where: str = "", *, partly: bool = False) -> Swap:
    """`float32 in place of int64`."""
    return Swap(type_name(new), type_name(old), where, partly)


def type_name(element: int) -> str:
    """float32 for FLOAT."""
    return dtypes.numbered(element).name


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """A copy that can be changed."""
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def copy_type(kind: onnx.TypeProto) -> onnx.TypeProto:
    """A copy that can be changed."""
    import onnx

    copy = onnx.TypeProto()
    copy.CopyFrom(kind)
    return copy
