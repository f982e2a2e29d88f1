"""The factors that experiments vary, one at a time and two at once. Reports show their names (`factors`).

A generator yields the changes of one factor, most likely supported first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from partita.observations.facts import COMBINED, ProbeRun, Substitution
from partita.observations.text_format import listing
from partita.runtime.lab.change import (
    Variation,
    at_opset,
    described,
    fixed_feed,
    with_constants,
    with_feeds,
    with_input,
    with_sizes,
    without,
)
from partita.runtime.lab.forms import forms
from partita.runtime.lab.node_factors import other_attributes, other_types
from partita.runtime.lab.schema import OLDEST_OPSET, Operator, element_in, history
from partita.runtime.lab.variant import Variant, variant_model, zeros
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


def single_changes(variant: Variant) -> tuple[Variation, ...]:
    """Variations of one factor, in the order of the factors."""
    return tuple(variation for factor in FACTORS for variation in variations(variant, factor))


def variations(variant: Variant, factor: str) -> Iterator[Variation]:
    """The possible variations of one factor; a variation equal to the node, or without outputs, is left out."""
    for trial, changed in FACTORS[factor](variant):
        if changed.node.output and changed != variant:
            yield replace(trial, factor=factor), changed


def combine_factors(variant: Variant) -> tuple[Variation, ...]:
    """Variations of two factors: versions without a part that they do not define, then shape, type and opset."""
    versions = {trial.change for trial, _ in variations(variant, "opset")}
    removals = [each for factor in ("attribute", "input") for each in variations(variant, factor) if each[0].removes]
    found = [
        _pair(version, removal, changed)
        for removal, removed in removals
        for version, changed in variations(removed, "opset")
        if version.change not in versions
    ]
    static, types = list(variations(variant, "static_shape"))[-1:], list(variations(variant, "type"))
    for factor, others in (("type", static), ("opset", [*static, *types])):
        found += [_pair(one, two, both) for one, first in others for two, both in variations(first, factor)]
    return tuple(found)


def _pair(one: ProbeRun, two: ProbeRun, variant: Variant) -> Variation:
    """Two changes as one variation."""
    words, parts = f"{one.change} and {two.change}", (*one.parts, *two.parts)
    return ProbeRun(COMBINED, words, "invalid", "", factors=parts), variant


# --- sizes -----------------------------------------------------------------------------------------------------------


def known_ranks(variant: Variant) -> Iterator[Variation]:
    """The rank of the run for every input without a rank in the file."""
    open_feeds = [feed for feed in variant.feeds if feed.constant is None and rank_of(feed.kind) is None]
    sizes = {feed.name: [None] * rank for feed in open_feeds if (rank := rank_of(feed.fixed)) is not None}
    if sizes:
        yield described(Substitution("a known rank", "an unknown rank"), with_sizes(variant, sizes))


def static_shapes(variant: Variant) -> Iterator[Variation]:
    """All sizes as in the run; then, if some are 0 or unknown, with 1 instead."""
    if all(feed.folded is None and is_fixed(feed.kind) for feed in variant.feeds):
        return
    fixed = with_feeds(variant, fixed_feed)
    yield described("all sizes fixed", fixed)
    open_feeds = [feed for feed in fixed.feeds if feed.constant is None and 0 in (sizes_of(feed.kind) or (0,))]
    others = {feed.name: sizes for feed in open_feeds if (sizes := padded_sizes(feed.kind))}
    if others:
        yield described("all sizes fixed, to 1 where the run has 0 or none", with_sizes(fixed, others))


def declared_outputs(variant: Variant) -> Iterator[Variation]:
    """Sizes of the run for all outputs whose sizes cannot be inferred; symbolic inputs are fixed as well."""
    fixed = with_feeds(variant, fixed_feed)
    missing = {name: kind for name, kind in variant.output_types.items() if name not in variant.declared}
    known = tensor_types(variant_model(fixed)) if missing else {}
    sizes = {name: padded_sizes(kind) for name, kind in missing.items() if not is_fixed(known.get(name))}
    if not sizes:
        return
    kinds = {name: tensor_type(missing[name].tensor_type.elem_type, each) for name, each in sizes.items()}
    written = listing([f"[{','.join(map(str, each))}]" for each in sizes.values()])
    change = f"the declared output sizes {written}"
    declared = replace(fixed, declared={**variant.declared, **kinds})
    if fixed == variant:
        yield described(change, declared)
    else:
        yield described(f"all sizes fixed and {change}", declared, factors=("static_shape", "output_shape"))


# --- opsets ----------------------------------------------------------------------------------------------------------


def other_versions(variant: Variant) -> Iterator[Variation]:
    """Older and newer versions of the operator."""
    node, current = variant.node, variant.operator
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
        changed = at_opset(variant, max(operator.since, OLDEST_OPSET))
        if changed is not None:
            yield described(Substitution(f"{node.op_type} of opset {operator.since}", str(current.since)), changed)


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def other_inputs(variant: Variant) -> Iterator[Variation]:
    """Each optional input or output omitted or added, each input as a constant, and other ranks."""
    operator, node = variant.operator, variant.node
    for position, name in enumerate(node.input):
        slot = operator.input(position) if operator is not None else None
        if name and slot is not None and slot.optional:
            yield described(f"the optional input {slot.name}", without(variant, inputs=[position]), removes=True)
    for position, slot in operator.optional_outputs(node).items() if operator is not None else ():
        yield described(f"the optional output {slot.name}", without(variant, outputs=[position]), removes=True)
    yield from _added_inputs(variant, operator)
    yield from _constants(variant, operator)
    yield from _other_ranks(variant)
    sizes = {feed.name: sizes_of(feed.kind) for feed in variant.feeds if feed.constant is None}
    empty = {name: tuple(size or 1 for size in known) for name, known in sizes.items() if known and 0 in known}
    if empty:  # some providers support no empty tensors
        yield described(Substitution("1", "a size of 0"), with_sizes(variant, empty))


def _constants(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """Each input as a constant, and all but the first together: values of the run if known, else zeros, then ones."""
    feeds = {feed.name: feed for feed in variant.feeds if feed.constant is None}
    called: dict[str, str] = {}
    for position, name in enumerate(variant.node.input):
        slot = operator.input(position) if operator is not None else None
        if name in feeds and is_fixed(feeds[name].run_kind):
            called.setdefault(name, f"input {slot.name if slot is not None else position}")
    later = [name for name in dict.fromkeys(variant.node.input[1:]) if name in called]
    # The first input, e.g. a lookup table, but not if it is the only one.
    first = [name for name in variant.node.input[:1] if name in called and len(feeds) > 1]
    for chosen in (*([name] for name in dict.fromkeys((*later, *first))), *([later] if len(later) > 1 else [])):
        zero, one = (with_constants(variant, chosen, ones=ones) for ones in (False, True))
        text = f"{listing([called[name] for name in chosen])} as {'a constant' if len(chosen) == 1 else 'constants'}"
        default = ", and no default of a graph input" if len(chosen) == 1 and feeds[chosen[0]].run_value else ""
        yield described(f"{text}{default}", zero)
        if one != zero:
            yield described(f"{text} of ones", one)


def _other_ranks(variant: Variant) -> Iterator[Variation]:
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
            yield described(Substitution(f"{rank} dimensions", str(len(sizes))), with_sizes(variant, changed))


def _added_inputs(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """Each optional input that the node lacks, as a constant."""
    for position, slot in enumerate(operator.inputs if operator is not None else ()):
        absent = position >= len(variant.node.input) or not variant.node.input[position]
        if operator is not None and slot.optional and absent:
            value = _absent_input(variant, operator, position)
            if value is not None:
                yield described(f"the optional input {slot.name}", with_input(variant, position, value))


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


Generator = Callable[[Variant], Iterator[Variation]]
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
