"""The factors that experiments vary, one at a time and two at once. Reports show their names (`factors`).

A generator yields the changes of one factor, most likely supported first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations_with_replacement, islice, product
from operator import itemgetter

import numpy as np
import onnx

from partita.observations.facts import OTHER_FORM, ProbeRun, Substitution
from partita.observations.text_format import listing
from partita.runtime.lab.change import (
    Variation,
    at_opset,
    described,
    fixed_feed,
    other_attributes,
    other_types,
    together,
    with_constants,
    with_feeds,
    with_input,
    with_sizes,
    without,
)
from partita.runtime.lab.forms import Form, assignments, forms, plainest_forms
from partita.runtime.lab.placement import NODE
from partita.runtime.lab.schema import OLDEST_OPSET, Operator, element_in, history, types_of
from partita.runtime.lab.variant import Variant, add_detached, fingerprint, variant_model, zeros
from partita.runtime.place.model_file import subgraphs_of
from partita.runtime.place.tensor_types import (
    element_of,
    is_fixed,
    padded_sizes,
    rank_of,
    sizes_of,
    tensor_type,
    tensor_types,
)

OF_A_VERSION = ("rank", "static_shape", "output_shape", "type", "attribute", "input")
PAIRS: Mapping[bool, Sequence[tuple[str, str]]] = {
    True: [*combinations_with_replacement(OF_A_VERSION, 2)],
    False: [*product(OF_A_VERSION, ["opset"]), ("static_shape", "type")],
}
"""Factors that are changed together, by whether the provider supports another node of this version of the operator."""
MOST_PAIRS = 36
"""Maximum number of pairs of changes per node."""
MOST_PAIRED = 6
"""Maximum number of changes of one factor in pairs."""
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


def pairs(variant: Variant, invalid: Collection[str] = (), *, in_version: bool) -> list[Variation]:
    """Variations of two changes, both possible alone, or one a version that the other makes possible; likeliest first.

    `invalid`: changes that give an invalid node alone, so they come last. `in_version`: see `PAIRS`.
    """

    def likeliest(changed: Variant, factor: str) -> Iterator[tuple[int, Variation]]:
        """The places and the changes of a factor."""
        ranked = sorted(variations(changed, factor), key=lambda each: each[0].change in invalid)
        return enumerate(ranked[:MOST_PAIRED])

    single = single_changes(variant)
    words, known = {trial.change for trial, _ in single}, [variant, *(changed for _, changed in single)]
    found: dict[frozenset[str], tuple[int, Variation]] = {}
    for factor, other in PAIRS[in_version]:
        for place, (one, first) in likeliest(variant, factor):
            for after, (two, both) in likeliest(first, other):
                if both not in known and (two.change in words or other == "opset"):
                    found.setdefault(frozenset((one.change, two.change)), (place + after, (together(one, two), both)))
    return [pair for _, pair in sorted(found.values(), key=itemgetter(0))]


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
    versions = [each for each in history("", node.op_type) if each.until is None or each.until >= OLDEST_OPSET]
    older = [operator for operator in versions if operator.since < current.since][::-1]
    newer = [operator for operator in versions if operator.since > current.since]
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
    if operator is not None:
        for position, slot in operator.optional_outputs(node).items():
            yield described(f"the optional output {slot.name}", without(variant, outputs=[position]), removes=True)
        yield from _added_inputs(variant, operator)
    yield from _constants(variant, operator)
    yield from _other_ranks(variant)
    sizes = {feed.name: sizes_of(feed.kind) for feed in variant.feeds if feed.constant is None}
    empty = {name: tuple(size or 1 for size in known) for name, known in sizes.items() if known and 0 in known}
    if empty:  # some providers support no empty tensors
        yield described(Substitution("1", "a size of 0"), with_sizes(variant, empty))


def _constants(variant: Variant, operator: Operator | None) -> Iterator[Variation]:
    """Each input as a constant, and all but the first together.

    Values are those of the run if known, else zeros, then small integers.
    """
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
        zero, other = (with_constants(variant, chosen, counted=counted) for counted in (False, True))
        text = f"{listing([called[name] for name in chosen])} as {'a constant' if len(chosen) == 1 else 'constants'}"
        default = ", and no default of a graph input" if len(chosen) == 1 and feeds[chosen[0]].run_value else ""
        yield described(f"{text}{default}", zero)
        if other != zero:
            yield described(f"{text} of {'ones' if len(chosen) == 1 else 'small integers'}", other)


def _other_ranks(variant: Variant) -> Iterator[Variation]:
    """Inputs with fewer or more dimensions, because some providers support only some ranks.

    Inputs of one shape have any usual rank, others the sizes of an example of the operator. Constants of at most one
    dimension, e.g. scale and bias, stay.
    """
    shapes = {feed.name: sizes_of(feed.fixed) for feed in variant.feeds if feed.constant is None}
    known = {sizes for sizes in shapes.values() if sizes is not None}
    fixed = any(feed.constant is not None and len(feed.constant.dims) > 1 for feed in variant.feeds)
    if fixed or None in shapes.values():
        return
    if len(known) > 1:
        known.discard(())  # a scalar operand stays a scalar
    if len(known) > 1:
        yield from _example_ranks(variant, {name: len(sizes or ()) for name, sizes in shapes.items()})
    for sizes in known if len(known) == 1 else ():
        for rank in (USUAL_RANK, USUAL_RANK - 1, USUAL_RANK - 2):
            if len(sizes) != rank:
                other = sizes[-rank:] if len(sizes) > rank else (1,) * (rank - len(sizes)) + sizes
                changed = {name: other for name, own in shapes.items() if own == sizes}
                yield described(Substitution(f"{rank} dimensions", str(len(sizes))), with_sizes(variant, changed))


def _example_ranks(variant: Variant, ranks: Mapping[str, int]) -> Iterator[Variation]:
    """Inputs with the sizes of examples of the operator in other ranks. `ranks`: those of all inputs to change."""
    seen = [[*ranks.values()]]
    for form in plainest_forms(variant.operator) if variant.operator is not None else ():
        ports = zip(variant.node.input, form.inputs, strict=False)
        sizes = {name: port.shape for name, port in ports if name in ranks and port is not None}
        if sizes.keys() == ranks.keys() and (other := [len(sizes[name]) for name in ranks]) not in seen:
            seen.append(other)
            after, before = (listing(dict.fromkeys(map(str, each))) for each in (other, seen[0]))
            words = Substitution(f"{after} dimensions (sizes of an example)", before)
            yield described(words, with_sizes(variant, sizes))


def _added_inputs(variant: Variant, operator: Operator) -> Iterator[Variation]:
    """Each optional input that the node lacks, as a constant."""
    for position, slot in enumerate(operator.inputs):
        absent = slot.optional and not any(variant.node.input[position : position + 1])
        if absent and (value := _absent_input(variant, operator, position)) is not None:
            yield described(f"the optional input {slot.name}", with_input(variant, position, value))


def _absent_input(variant: Variant, operator: Operator, position: int) -> onnx.TensorProto | None:
    """Zeros as in an example of the operator, with type and sizes adapted to the node; axes are all axes."""
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


# --- other nodes of the operator ---

MOST_TYPES = 10
"""Maximum number of other types for the plainest form of an operator."""
MOST_COMPILED = 7
"""Maximum number of other nodes of the operator on a compiling provider."""
MOST_NAMED = 3
TENSORS = frozenset({"tensor_type"})
USUAL = frozenset({"tensor(float)", "tensor(float16)", "tensor(int32)", "tensor(int64)", "tensor(uint8)"})


def other_nodes(variant: Variant, *, failed: bool, compiles: bool) -> Iterator[tuple[onnx.ModelProto, ProbeRun]]:
    """Models with other nodes of the operator, in the node's version, and their trials without an outcome.

    Nodes in the types of this node come first. `failed`: the provider fails on this node. `compiles`: see `Lab`.
    """
    operator, node = variant.operator, variant.node
    # Other nodes of the operator do not have the subgraphs on which the provider fails.
    if operator is None or (failed and any(True for _ in subgraphs_of(node))):
        return
    plain = variant_model(variant)
    kinds = {**tensor_types(plain), **{feed.name: feed.kind for feed in variant.feeds}}
    own, values = types_of(node, operator, kinds), _value_kinds(node, kinds)
    bound = {slot.variable for slot, _ in chain(*operator.slots(node)) if len(slot.types) > 1}
    known = {fingerprint(variant_model(each, auxiliary=compiles)) for each in (variant, _inside(variant))}
    found: list[tuple[onnx.ModelProto, ProbeRun]] = []
    cases = [(form, False) for form in _typed_forms(operator, own)]
    cases[1:1] = [(form, True) for form in plainest_forms(operator)[:1]]
    for form, constant in cases:
        built = _inside(form.build())
        later = [name for name in built.node.input[1:] if (feed := built.feed(name)) and feed.constant is None]
        if constant and not later:
            continue
        model = variant_model(with_constants(built, later) if constant else built, auxiliary=compiles)
        if compiles and len(model.graph.node) == 1:
            add_detached(model.graph)
        if (key := fingerprint(model)) not in known:
            known.add(key)
            other, kinds = next(each for each in model.graph.node if each.name == NODE), tensor_types(model)
            types = dict(form.types) | types_of(other, operator, kinds)
            # A subgraph is written for types that no type variable shows: only kinds other than tensors can be equal.
            if form.node:
                same = values > TENSORS and _value_kinds(other, kinds) == values
            else:  # an unknown type is not equal
                same = all(own.get(name) == kind for name, kind in types.items() if name in bound)
            change, factors = _form_text(form, types, node), () if same else ("type",)
            change += "; constants but for the first input" if constant else ""
            neg_added = len(model.graph.node) > 1
            trial = ProbeRun(OTHER_FORM, change, "invalid", "", factors=factors, neg_added=neg_added)
            found.append((model, trial))
    if compiles:
        found = sorted(found[:MOST_COMPILED], key=lambda each: bool(each[1].factors))
    # After a failure only the node's own types are conclusive.
    yield from ((model, trial) for model, trial in found if not trial.factors or not (failed and compiles))


def _inside(variant: Variant) -> Variant:
    """The variant with other nodes behind it: some providers treat a node before a graph output differently."""
    return replace(variant, inner_outputs=frozenset(variant.node.output))


def _value_kinds(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> frozenset[str]:
    """Kinds of the values that a node reads and writes, as ONNX names them: `tensor_type`, `sequence_type`."""
    found = (types[each].WhichOneof("value") for each in (*node.input, *node.output) if each in types)
    return frozenset(filter(None, found))


def _typed_forms(operator: Operator, own: dict[str, str]) -> Iterator[Form]:
    """Forms in the node's types, then in their examples' types, then the plainest form in other types."""
    listed = plainest_forms(operator)
    for form in listed:
        some = {} if form.node else dict(next(iter(assignments(form)[0]), ())) | dict(form.types)
        yield replace(form, types=tuple((name, own.get(name, kind)) for name, kind in some.items())) if some else form
    yield from listed
    for form in listed[:1]:
        usual = (types for types in assignments(form)[0] if all(kind in USUAL for _, kind in types))
        yield from (replace(form, types=types) for types in islice(usual, MOST_TYPES))


def _form_text(form: Form, types: dict[str, str], node: onnx.NodeProto) -> str:
    """`T1 float32, T2 int64; with bias; mode=cubic`: types, optional inputs that only one of the form and the node has,
    then differences from the plainest form.
    """
    named = {name: element.name if (element := element_in(kind)) is not None else kind for name, kind in types.items()}
    kinds = ", ".join(f"{name} {kind}" for name, kind in named.items() if "(" not in name)
    own = form.note or ", ".join(sorted(form.factors - plainest_forms(form.operator)[0].factors)[:MOST_NAMED])
    here = {position for position, name in enumerate(node.input) if name}
    there = {position for position, port in enumerate(form.inputs) if port is not None}
    both = [
        f"{word} {', '.join(form.name_of(position) for position in sorted(positions))}"
        for word, positions in (("with", there - here), ("without", here - there))
        if positions and not form.operator.inputs[-1].variadic
    ]
    return "; ".join(part for part in (kinds, *both, own) if part)
