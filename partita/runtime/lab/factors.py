"""The factors that experiments vary, one at a time and two at once. Reports show their names (`factors`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from partita.observations.facts import AS_IS, Substitution
from partita.observations.text_format import listing
from partita.runtime.lab.change import (
    Change,
    Generator,
    Variation,
    fixed_feed,
    operator_of,
    optional_inputs,
    optional_outputs,
    variations,
    vary,
)
from partita.runtime.lab.forms import Form, forms
from partita.runtime.lab.node_factors import attribute_text, may_omit, other_attributes, other_types
from partita.runtime.lab.schema import OLDEST_OPSET, Operator, Slot, element_in, history
from partita.runtime.lab.variant import ExperimentInput, Variant, variant_model, zeros
from partita.runtime.place.tensor_types import (
    element_of,
    is_fixed,
    padded_sizes,
    rank_of,
    sizes_of,
    tensor_type,
    tensor_types,
)

if TYPE_CHECKING:
    import onnx

MOST_COMBINED = 36
"""Maximum number of two-factor changes per node."""
AXES = "axes"
"""Without this input, a node uses all axes of its first input."""
USUAL_RANK = 4
MOST_VERSIONS = 6
FIXED = Change(fixed=True)


def unchanged(variant: Variant) -> Variation:
    """The unchanged node."""
    return Variation(AS_IS, "", variant)


def single_changes(variant: Variant) -> tuple[Variation, ...]:
    """Variations of one factor, in the order of the factors."""
    return tuple(variation for generate in factors().values() for variation in generate(variant))


def combine_factors(variant: Variant) -> tuple[Variation, ...]:
    """Variations of two factors at once."""
    found = [unchanged(variant)]
    for generate in (last_static_shape, other_types, reduced_versions):
        found = [each for before in found for each in (before, *before.with_change(generate))]
    return tuple(each for each in found if len(each.factors) > 1)


def factors() -> Mapping[str, Generator]:
    """The variations of every factor, in the order of testing."""
    return {
        "rank": known_ranks,
        "static_shape": static_shapes,
        "output_shape": declared_outputs,
        "type": other_types,
        "opset": other_versions,
        "attribute": other_attributes,
        "input": other_inputs,
    }


def known_ranks(variant: Variant) -> Iterator[Variation]:
    """The rank of the run for every input without a rank in the file."""
    open_feeds = [feed for feed in variant.feeds if feed.constant is None and rank_of(feed.kind) is None]
    ranks = {feed.name: rank for feed in open_feeds if (rank := rank_of(variant.fixed.get(feed.name))) is not None}
    if ranks:
        yield from variations(
            variant, "rank", Change(ranks=ranks), substitution=Substitution("a known rank", "an unknown rank")
        )


def static_shapes(variant: Variant) -> Iterator[Variation]:
    """All sizes as in the run; then, if some are 0 or unknown, with 1 instead."""
    if not variant.folded and all(is_fixed(feed.kind) for feed in variant.feeds):
        return
    yield from variations(variant, "static_shape", FIXED, "all sizes fixed")
    if others := _other_sizes(variant):
        yield from variations(
            variant,
            "static_shape",
            Change(fixed=True, sizes=others),
            "all sizes fixed, to 1 where the run has 0 or none",
        )


def last_static_shape(variant: Variant) -> Iterator[Variation]:
    """The fixed sizes that are combined with other changes."""
    yield from list(static_shapes(variant))[-1:]


def _other_sizes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Sizes without a 0, for every input with a known rank and an unknown or zero size in the run."""
    fixed = (fixed_feed(variant, feed) for feed in variant.feeds)
    open_feeds = [feed for feed in fixed if feed.constant is None and 0 in (sizes_of(feed.kind) or (0,))]
    padded = {feed.name: padded_sizes(feed.kind) for feed in open_feeds}
    return {name: sizes for name, sizes in padded.items() if sizes}


def declared_outputs(variant: Variant) -> Iterator[Variation]:
    """Sizes of the run for all outputs whose sizes cannot be inferred; symbolic inputs are fixed as well."""
    fixed = vary(variant, FIXED) or variant
    wanted = variant.output_types.keys() - variant.declared.keys()
    known = tensor_types(variant_model(fixed)) if wanted else {}
    open_outputs = [name for name in variant.output_types if name in wanted and not is_fixed(known.get(name))]
    sizes = {name: padded_sizes(variant.output_types[name]) for name in open_outputs}
    if not sizes:
        return
    written = listing([f"[{','.join(map(str, each))}]" for each in sizes.values()])
    words = f"the declared output sizes {written}"
    if fixed == variant:
        yield from variations(variant, "output_shape", Change(declared=sizes), words)
    else:
        both = FIXED | Change(declared=sizes)
        yield from variations(
            variant, "output_shape", both, f"all sizes fixed and {words}", factors=("static_shape", "output_shape")
        )


def _versions(variant: Variant) -> Iterator[tuple[Operator, Change, Substitution]]:
    """Older and newer versions of the operator, the change for each, and its description."""
    node = variant.node
    current = operator_of(variant)
    if node.domain or current is None:
        return
    others = [
        operator
        for operator in history(node.domain, node.op_type)
        if operator is not current and (operator.until is None or operator.until >= OLDEST_OPSET)
    ]
    older = [operator for operator in others if operator.since < current.since][::-1]
    newer = [operator for operator in others if operator.since > current.since]
    for operator in islice((*older, *newer), MOST_VERSIONS):
        substitution = Substitution(f"{node.op_type} of opset {operator.since}", str(current.since))
        yield operator, Change(opset=max(operator.since, OLDEST_OPSET)), substitution


def other_versions(variant: Variant) -> Iterator[Variation]:
    """Older and newer versions of the operator."""
    for _, change, substitution in _versions(variant):
        yield from variations(variant, "opset", change, substitution=substitution)


def reduced_versions(variant: Variant) -> Iterator[Variation]:
    """Other versions; without optional parts if a version does not define them."""
    for operator, change, substitution in _versions(variant):
        if vary(variant, change) is not None:
            yield from variations(variant, "opset", change, substitution=substitution)
            continue
        current = operator_of(variant)
        unknown = {
            entry.name: attribute_text(entry)
            for entry in variant.node.attribute
            if entry.name not in operator.attributes and may_omit(entry, current)
        }
        optional = optional_inputs(variant, current)
        surplus = {position: name for position, name in optional.items() if operator.input(position) is None}
        if unknown or surplus:
            less = Change(attributes=dict.fromkeys(unknown), omitted_inputs=frozenset(surplus))
            going = [*unknown.values(), *(f"the optional input {name}" for name in surplus.values())]
            parts = ("opset", *("attribute" for _ in unknown), *("input" for _ in surplus))
            yield from variations(
                variant, "opset", less | change, f"{substitution} and without {listing(going)}", factors=parts
            )


def other_inputs(variant: Variant) -> Iterator[Variation]:
    """Each optional input or output omitted or added, each input as a constant, and other ranks."""
    operator = operator_of(variant)
    inputs, outputs = optional_inputs(variant, operator), optional_outputs(variant, operator)
    for position, name in inputs.items():
        yield from variations(
            variant, "input", Change(omitted_inputs=frozenset({position})), f"the optional input {name}", removes=True
        )
    for position, name in outputs.items():
        yield from variations(
            variant, "input", Change(omitted_outputs=frozenset({position})), f"the optional output {name}", removes=True
        )
    yield from added_inputs(variant)
    yield from _constants(variant, operator)
    yield from _other_ranks(variant)
    yield from _without_empty_axes(variant)


def _constants(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """Each input as a constant, and all but the first together: values of the run if known, else zeros, then ones."""
    fed = {
        name: _input_name(operator, position)
        for position, name in enumerate(variant.node.input)
        if position
        and (feed := variant.feed(name)) is not None
        and feed.constant is None
        and is_fixed(variant.fixed.get(name) or feed.kind)
    }
    for name, called in {**fed, **_first(variant, operator)}.items():
        default = ", and no default of a graph input" if name in variant.run_values else ""
        yield from variations(variant, "input", Change(constants={name: None}), f"{called} as a constant{default}")
        if (value := _ones(variant, name)) is not None:
            yield from variations(variant, "input", Change(constants={name: value}), f"{called} as a constant of ones")
    if len(fed) > 1:
        yield from variations(
            variant, "input", Change(constants=dict.fromkeys(fed)), f"{listing(fed.values())} as constants"
        )
        values = {name: _ones(variant, name) for name in fed}
        if any(value is not None for value in values.values()):
            yield from variations(
                variant, "input", Change(constants=values), f"{listing(fed.values())} as constants of ones"
            )


def _first(variant: Variant, operator: Operator | None) -> dict[str, str]:
    """The first input by its schema name, e.g. a lookup table; None if it is the only input."""
    feed = variant.feed(variant.node.input[0]) if variant.node.input and variant.node.input[0] else None
    others = [each for each in variant.feeds if each.constant is None and feed is not None and each.name != feed.name]
    if (
        feed is None
        or feed.constant is not None
        or not others
        or not is_fixed(variant.fixed.get(feed.name) or feed.kind)
    ):
        return {}
    return {feed.name: _input_name(operator, 0)}


def _ones(variant: Variant, name: str) -> onnx.TensorProto | None:
    """A constant of ones for a small integer input with unknown values; None for others."""
    import numpy as np
    import onnx

    feed = variant.feed(name)
    if feed is None or name in variant.run_values or name in variant.folded:
        return None
    kind = variant.fixed.get(name) or feed.kind
    sizes, element = sizes_of(kind), element_of(kind)
    if sizes is None or element is None or len(sizes) > 1:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    return onnx.numpy_helper.from_array(np.ones(sizes, dtype), name) if np.issubdtype(dtype, np.integer) else None


def _without_empty_axes(variant: Variant) -> Iterator[Variation]:
    """Size 1 instead of 0, because some providers support no empty tensors."""
    sizes = {feed.name: sizes_of(feed.kind) for feed in variant.feeds if feed.constant is None}
    empty = {name: tuple(size or 1 for size in known) for name, known in sizes.items() if known and 0 in known}
    if empty:
        yield from variations(variant, "input", Change(sizes=empty), substitution=Substitution("1", "a size of 0"))


def _input_name(operator: Operator | None, position: int) -> str:
    """The schema name of an input."""
    slot = operator.input(position) if operator is not None else None
    return f"input {slot.name}" if slot is not None else f"input {position}"


def _other_ranks(variant: Variant) -> Iterator[Variation]:
    """Inputs of one shape with fewer or more dimensions, because some providers support only some ranks."""
    shapes = {feed.name: sizes_of(variant.fixed.get(feed.name)) for feed in variant.feeds if feed.constant is None}
    known = {sizes for sizes in shapes.values() if sizes is not None}
    if len(known) > 1:
        known.discard(())  # a scalar operand stays a scalar
    if len(known) != 1 or None in shapes.values() or len(shapes) != len(variant.feeds):
        return
    (sizes,) = known
    for rank in dict.fromkeys((USUAL_RANK, USUAL_RANK - 1, USUAL_RANK - 2)):
        if len(sizes) != rank:
            other = sizes[-rank:] if len(sizes) > rank else (1,) * (rank - len(sizes)) + sizes
            change = Change(sizes={name: other for name, own in shapes.items() if own == sizes})
            yield from variations(
                variant, "input", change, substitution=Substitution(f"{rank} dimensions", str(len(sizes)))
            )


# --- optional inputs that a node lacks, with type and sizes as in an example of its operator ---


def added_inputs(variant: Variant) -> Iterator[Variation]:
    """Each optional input that the node lacks, as a constant."""
    operator = operator_of(variant)
    for position, slot in enumerate(operator.inputs if operator is not None else ()):
        absent = position >= len(variant.node.input) or not variant.node.input[position]
        if operator is not None and slot.optional and absent:
            value = next(_values(variant, operator, position, slot), None)
            if value is not None:
                feed = ExperimentInput(value.name, tensor_type(value.data_type, value.dims), value)
                yield from variations(
                    variant, "input", Change(added={position: feed}), f"the optional input {slot.name}"
                )


def _values(variant: Variant, operator: Operator, position: int, slot: Slot) -> Iterator[onnx.TensorProto]:
    """Possible values of an absent input: zeros, then those of examples."""
    import numpy as np
    import onnx

    name = f"added{position}"
    for form in forms(operator):
        port = form.inputs[position] if position < len(form.inputs) else None
        kind = element_in(port.kind) if port is not None else None
        if port is None or kind is None or form.kind != "form" or form.node:
            continue
        element = _bound(variant, operator, slot) or kind.number
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
        if slot.name == AXES:
            first = variant.feed(variant.node.input[0])
            rank = rank_of(variant.fixed.get(first.name) or first.kind) if first is not None else None
            if rank:
                yield onnx.numpy_helper.from_array(np.arange(rank, dtype=dtype), name)
            return
        for sizes in _sizes(variant, form, port.shape):
            yield zeros(name, element, sizes)
        if port.values:
            yield onnx.numpy_helper.from_array(np.array(port.values).astype(dtype).reshape(port.shape), name)


def _bound(variant: Variant, operator: Operator, slot: Slot) -> int | None:
    """Element type of an input that has the type variable of the slot."""
    for position, name in enumerate(variant.node.input):
        other, feed = operator.input(position), variant.feed(name)
        if other is not None and feed is not None and other.variable == slot.variable:
            return element_of(feed.kind)
    return None


def _sizes(variant: Variant, form: Form, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The shape of the example with the node's sizes in place of equal sizes of the example's inputs."""
    pairs: list[tuple[int, int]] = []
    for port, name in zip(form.inputs, variant.node.input, strict=False):
        feed = variant.feed(name)
        sizes = sizes_of(variant.fixed.get(name) or feed.kind) if feed is not None else None
        if port is not None and sizes is not None and len(sizes) == len(port.shape):
            pairs += zip(port.shape, sizes, strict=True)
    for ordered in (pairs[::-1], pairs):
        known = dict(reversed(ordered)) | {1: 1}
        yield tuple(known.get(size, size) for size in shape)
