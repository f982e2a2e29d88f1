"""Optional inputs and outputs left out, inputs as constants, and inputs of another rank or without empty sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partita.observations.facts import Swap
from partita.observations.text_format import listing
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.schemas import Schema
from partita.runtime.probes.variants import Change, optional_inputs, optional_outputs, schema_of
from partita.runtime.tensor_types import element_of, is_fixed, sizes_of

if TYPE_CHECKING:
    import onnx

NAME = "input"
USUAL_RANK = 4


def _other_inputs(case: Case) -> Iterator[Idea]:
    """Each optional input or output left out, each input made a constant, and shapes of the usual rank."""
    schema = schema_of(case)
    inputs, outputs = optional_inputs(case, schema), optional_outputs(case, schema)
    for position, name in inputs.items():
        yield Idea(NAME, Change(inputs_left_out=frozenset({position})), f"the optional input {name}", removes=True)
    for position, name in outputs.items():
        yield Idea(NAME, Change(outputs_left_out=frozenset({position})), f"the optional output {name}", removes=True)
    if len(inputs) + len(outputs) > 1:  # some go together, such as past and present
        bare = Change(inputs_left_out=frozenset(inputs), outputs_left_out=frozenset(outputs))
        yield Idea(NAME, bare, "any optional input or output", removes=True)
    yield from _constants(case, schema)
    yield from _other_ranks(case)
    yield from _filled(case)


def _constants(case: Case, schema: Schema | None) -> Iterator[Idea]:
    """Each input as a constant, the first where others are left, and all but the first together, for some go together.

    Of the run's own values where they are known; else of zeros, and of ones, for zero sizes and axes are not always
    admissible.
    """
    fed = {
        name: _input_name(schema, position)
        for position, name in enumerate(case.node.input)
        if position
        and (feed := case.feed(name)) is not None
        and feed.constant is None
        and is_fixed(case.fixed.get(name) or feed.kind)
    }
    for name, called in {**fed, **_first(case, schema)}.items():
        default = ", and no default of a graph input" if name in case.given else ""
        yield Idea(NAME, Change(constants={name: None}), f"{called} as a constant{default}")
        if (value := _ones(case, name)) is not None:
            yield Idea(NAME, Change(constants={name: value}), f"{called} as a constant of ones")
    if len(fed) > 1:
        yield Idea(NAME, Change(constants=dict.fromkeys(fed)), f"{listing(fed.values())} as constants")
        values = {name: _ones(case, name) for name in fed}
        if any(value is not None for value in values.values()):
            yield Idea(NAME, Change(constants=values), f"{listing(fed.values())} as constants of ones")


def _first(case: Case, schema: Schema | None) -> dict[str, str]:
    """The first input, as the operator calls it: a table that is looked up, say. None where it is all that is fed."""
    feed = case.feed(case.node.input[0]) if case.node.input and case.node.input[0] else None
    others = [each for each in case.feeds if each.constant is None and feed is not None and each.name != feed.name]
    if feed is None or feed.constant is not None or not others or not is_fixed(case.fixed.get(feed.name) or feed.kind):
        return {}
    return {feed.name: _input_name(schema, 0)}


def _ones(case: Case, name: str) -> onnx.TensorProto | None:
    """A constant of ones for a small input of whole numbers whose values nobody knows; None for others."""
    import numpy as np
    import onnx

    feed = case.feed(name)
    if feed is None or name in case.given or name in case.folded:
        return None
    kind = case.fixed.get(name) or feed.kind
    sizes, element = sizes_of(kind), element_of(kind)
    if sizes is None or element is None or len(sizes) > 1:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    return onnx.numpy_helper.from_array(np.ones(sizes, dtype), name) if np.issubdtype(dtype, np.integer) else None


def _filled(case: Case) -> Iterator[Idea]:
    """With a size of 1 where a tensor has none: some providers take no empty ones."""
    sizes = {feed.name: sizes_of(feed.kind) for feed in case.feeds if feed.constant is None}
    empty = {name: tuple(size or 1 for size in known) for name, known in sizes.items() if known and 0 in known}
    if empty:
        yield Idea(NAME, Change(sizes=empty), swap=Swap("1", "a size of 0"))


def _input_name(schema: Schema | None, position: int) -> str:
    """An input as the operator calls it."""
    slot = schema.slot(position) if schema is not None else None
    return f"input {slot.name}" if slot is not None else f"input {position}"


def _other_ranks(case: Case) -> Iterator[Idea]:
    """Inputs of one shape, with fewer dimensions or with more: some providers know only some ranks."""
    shapes = {feed.name: sizes_of(case.fixed.get(feed.name)) for feed in case.feeds if feed.constant is None}
    known = {sizes for sizes in shapes.values() if sizes is not None}
    if len(known) > 1:
        known.discard(())  # a scalar stays one beside a tensor
    if len(known) != 1 or None in shapes.values() or len(shapes) != len(case.feeds):
        return
    (sizes,) = known
    for rank in dict.fromkeys((USUAL_RANK, USUAL_RANK - 1, USUAL_RANK - 2)):
        if len(sizes) != rank:
            other = sizes[-rank:] if len(sizes) > rank else (1,) * (rank - len(sizes)) + sizes
            change = Change(sizes={name: other for name, own in shapes.items() if own == sizes})
            yield Idea(NAME, change, swap=Swap(f"{rank} dimensions", str(len(sizes))))


FACTOR = Factor(NAME, kind="other inputs", rank=5, vary=_other_inputs)
