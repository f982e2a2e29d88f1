"""The factors that experiments vary, one at a time and two at once. Reports show their names (`factors`).

A generator yields the changes of one factor, most likely supported first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from partita.observations.facts import AS_IS, COMBINED, Substitution
from partita.observations.text_format import listing
from partita.runtime.lab.change import Change, fixed_feed, operator_of, vary
from partita.runtime.lab.forms import forms
from partita.runtime.lab.node_factors import other_attributes, other_types
from partita.runtime.lab.schema import OLDEST_OPSET, Operator, element_in, history
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


@dataclass(frozen=True, slots=True)
class Variation:
    """A changed node."""

    factor: str
    change: str
    """The change in words."""
    variant: Variant
    factors: tuple[str, ...] = ()
    """The factors, if it counts as several changes."""
    substitution: Substitution | None = None
    removes: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The factors of all its changes."""
        return self.factors or (self.factor,)


def unchanged(variant: Variant) -> Variation:
    """The unchanged node."""
    return Variation(AS_IS, "", variant)


def single_changes(variant: Variant) -> tuple[Variation, ...]:
    """Variations of one factor, in the order of the factors."""
    return tuple(variation for factor in FACTORS for variation in variations(variant, factor))


def variations(variant: Variant, factor: str) -> Iterator[Variation]:
    """The possible variations of one factor; a variation equal to the node is left out."""
    for change in FACTORS[factor](variant):
        changed = vary(variant, change)
        if changed is not None and changed != variant:
            yield Variation(factor, str(change), changed, change.factors, change.substitution, change.removes)


def combine_factors(variant: Variant) -> tuple[Variation, ...]:
    """Variations of two factors: versions without a part that they do not define, then shape, type and opset."""
    versions = {each.change for each in variations(variant, "opset")}
    removals = [each for factor in ("attribute", "input") for each in variations(variant, factor) if each.removes]
    found = [
        _pair(version, removal, version.variant)
        for removal in removals
        for version in variations(removal.variant, "opset")
        if version.change not in versions
    ]
    static, types = list(variations(variant, "static_shape"))[-1:], list(variations(variant, "type"))
    for factor, others in (("type", static), ("opset", [*static, *types])):
        found += [_pair(each, last, last.variant) for each in others for last in variations(each.variant, factor)]
    return tuple(found)


def _pair(one: Variation, other: Variation, variant: Variant) -> Variation:
    """Two changes as one variation."""
    return Variation(COMBINED, f"{one.change} and {other.change}", variant, (*one.parts, *other.parts))


# --- sizes -----------------------------------------------------------------------------------------------------------


def known_ranks(variant: Variant) -> Iterator[Change]:
    """The rank of the run for every input without a rank in the file."""
    open_feeds = [feed for feed in variant.feeds if feed.constant is None and rank_of(feed.kind) is None]
    ranks = {feed.name: rank for feed in open_feeds if (rank := rank_of(feed.fixed)) is not None}
    if ranks:
        yield Change(substitution=Substitution("a known rank", "an unknown rank"), ranks=ranks)


def static_shapes(variant: Variant) -> Iterator[Change]:
    """All sizes as in the run; then, if some are 0 or unknown, with 1 instead."""
    if all(feed.folded is None and is_fixed(feed.kind) for feed in variant.feeds):
        return
    yield Change("all sizes fixed", fixed=True)
    fixed = map(fixed_feed, variant.feeds)
    open_feeds = [feed for feed in fixed if feed.constant is None and 0 in (sizes_of(feed.kind) or (0,))]
    others = {feed.name: sizes for feed in open_feeds if (sizes := padded_sizes(feed.kind))}
    if others:
        yield Change("all sizes fixed, to 1 where the run has 0 or none", fixed=True, sizes=others)


def declared_outputs(variant: Variant) -> Iterator[Change]:
    """Sizes of the run for all outputs whose sizes cannot be inferred; symbolic inputs are fixed as well."""
    fixed = vary(variant, Change(fixed=True)) or variant
    wanted = variant.output_types.keys() - variant.declared.keys()
    known = tensor_types(variant_model(fixed)) if wanted else {}
    open_outputs = [name for name in variant.output_types if name in wanted and not is_fixed(known.get(name))]
    sizes = {name: padded_sizes(variant.output_types[name]) for name in open_outputs}
    if not sizes:
        return
    written = listing([f"[{','.join(map(str, each))}]" for each in sizes.values()])
    change = Change(f"the declared output sizes {written}", declared=sizes)
    if fixed != variant:
        both = ("static_shape", "output_shape")
        change = replace(change, words=f"all sizes fixed and {change.words}", fixed=True, factors=both)
    yield change


# --- opsets ----------------------------------------------------------------------------------------------------------


def other_versions(variant: Variant) -> Iterator[Change]:
    """Older and newer versions of the operator."""
    node, current = variant.node, operator_of(variant)
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
        yield Change(substitution=substitution, opset=max(operator.since, OLDEST_OPSET))


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def other_inputs(variant: Variant) -> Iterator[Change]:
    """Each optional input or output omitted or added, each input as a constant, and other ranks."""
    operator, node = operator_of(variant), variant.node
    for position, name in enumerate(node.input):
        slot = operator.input(position) if operator is not None else None
        if name and slot is not None and slot.optional:
            yield Change(f"the optional input {slot.name}", removes=True, omitted_inputs=frozenset({position}))
    for position, slot in operator.optional_outputs(node).items() if operator is not None else ():
        yield Change(f"the optional output {slot.name}", removes=True, omitted_outputs=frozenset({position}))
    yield from _added_inputs(variant, operator)
    yield from _constants(variant, operator)
    yield from _other_ranks(variant)
    sizes = {feed.name: sizes_of(feed.kind) for feed in variant.feeds if feed.constant is None}
    empty = {name: tuple(size or 1 for size in known) for name, known in sizes.items() if known and 0 in known}
    if empty:  # some providers support no empty tensors
        yield Change(substitution=Substitution("1", "a size of 0"), sizes=empty)


def _constants(variant: Variant, operator: Operator | None) -> Iterator[Change]:
    """Each input as a constant, and all but the first together: values of the run if known, else zeros, then ones."""

    def name_of(position: int) -> str:
        slot = operator.input(position) if operator is not None else None
        return f"input {slot.name if slot is not None else position}"

    open_feeds = [feed for feed in variant.feeds if feed.constant is None]
    known = {feed.name: feed for feed in open_feeds if is_fixed(feed.run_kind)}
    names = {name: name_of(position) for position, name in reversed(list(enumerate(variant.node.input)))}
    first = variant.node.input[0] if variant.node.input else ""
    fed = {name: names[name] for name in variant.node.input[1:] if name in known}
    # The first input, e.g. a lookup table, but not if it is the only one.
    every = {**fed, first: names[first]} if first in known and len(open_feeds) > 1 else fed
    for name, called in every.items():
        default = ", and no default of a graph input" if known[name].run_value is not None else ""
        yield Change(f"{called} as a constant{default}", constants={name: None})
        if (value := _ones(variant, name)) is not None:
            yield Change(f"{called} as a constant of ones", constants={name: value})
    if len(fed) > 1:
        yield Change(f"{listing(fed.values())} as constants", constants=dict.fromkeys(fed))
        values = {name: _ones(variant, name) for name in fed}
        if any(value is not None for value in values.values()):
            yield Change(f"{listing(fed.values())} as constants of ones", constants=values)


def _ones(variant: Variant, name: str) -> onnx.TensorProto | None:
    """A constant of ones for a small integer input with unknown values; None for others."""
    import numpy as np
    import onnx

    feed = variant.feed(name)
    if feed is None or feed.run_value is not None or feed.folded is not None:
        return None
    sizes, element = sizes_of(feed.run_kind), element_of(feed.run_kind)
    if sizes is None or element is None or len(sizes) > 1:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    return onnx.numpy_helper.from_array(np.ones(sizes, dtype), name) if np.issubdtype(dtype, np.integer) else None


def _other_ranks(variant: Variant) -> Iterator[Change]:
    """Inputs of one shape with fewer or more dimensions, because some providers support only some ranks."""
    shapes = {feed.name: sizes_of(feed.fixed) for feed in variant.feeds if feed.constant is None}
    known = {sizes for sizes in shapes.values() if sizes is not None}
    if len(known) > 1:
        known.discard(())  # a scalar operand stays a scalar
    if len(known) != 1 or None in shapes.values() or len(shapes) != len(variant.feeds):
        return
    (sizes,) = known
    for rank in (USUAL_RANK, USUAL_RANK - 1, USUAL_RANK - 2):
        if len(sizes) != rank:
            other = sizes[-rank:] if len(sizes) > rank else (1,) * (rank - len(sizes)) + sizes
            changed = {name: other for name, own in shapes.items() if own == sizes}
            yield Change(substitution=Substitution(f"{rank} dimensions", str(len(sizes))), sizes=changed)


def _added_inputs(variant: Variant, operator: Operator | None) -> Iterator[Change]:
    """Each optional input that the node lacks, as a constant."""
    for position, slot in enumerate(operator.inputs if operator is not None else ()):
        absent = position >= len(variant.node.input) or not variant.node.input[position]
        if operator is not None and slot.optional and absent:
            value = _absent_input(variant, operator, position)
            if value is not None:
                feed = ExperimentInput(value.name, tensor_type(value.data_type, value.dims), value)
                yield Change(f"the optional input {slot.name}", added={position: feed})


def _absent_input(variant: Variant, operator: Operator, position: int) -> onnx.TensorProto | None:
    """Zeros as in an example of the operator, with type and sizes adapted to the node; axes are all axes."""
    import numpy as np
    import onnx

    examples = (form for form in forms(operator) if form.kind == "form" and not form.node)
    form = next((form for form in examples if any(form.inputs[position : position + 1])), None)
    port = form.inputs[position] if form is not None else None
    kind = element_in(port.kind) if port is not None else None
    if form is None or port is None or kind is None:
        return None
    slot, element, known = operator.inputs[position], kind.number, dict[int, int]()
    for index, name in enumerate(variant.node.input):
        other, feed = operator.input(index), variant.feed(name)
        example = form.inputs[index] if index < len(form.inputs) else None
        sizes = sizes_of(feed.run_kind) if feed is not None else None
        if feed is not None and other is not None and other.variable == slot.variable:
            element = element_of(feed.kind) or element
        if example is not None and sizes is not None and len(sizes) == len(example.shape):
            known |= zip(example.shape, sizes, strict=True)
    if slot.name != AXES:
        return zeros(f"added{position}", element, [known.get(size, size) if size != 1 else 1 for size in port.shape])
    first = variant.feed(variant.node.input[0])
    rank = rank_of(first.run_kind) if first is not None else None
    axes = np.arange(rank or 0, dtype=onnx.helper.tensor_dtype_to_np_dtype(element))
    return onnx.numpy_helper.from_array(axes, f"added{position}") if rank else None


Generator = Callable[[Variant], Iterator[Change]]
FACTORS: Mapping[str, Generator] = {
    "rank": known_ranks,
    "static_shape": static_shapes,
    "output_shape": declared_outputs,
    "type": other_types,
    "opset": other_versions,
    "attribute": other_attributes,
    "input": other_inputs,
}
"""The generator of every factor, in the order of testing."""
