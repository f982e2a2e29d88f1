"""Optional inputs that a node lacks, with type and sizes as in an example of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from partita.runtime.lab.change import Change, Idea, operator_of
from partita.runtime.lab.forms import Form, forms
from partita.runtime.lab.schema import Operator, Slot, element_in
from partita.runtime.lab.variant import ExperimentInput, Variant, zeros
from partita.runtime.place.tensor_types import element_of, rank_of, sizes_of, tensor_type

if TYPE_CHECKING:
    import onnx

AXES = "axes"
"""Without this input, a node uses all axes of its first input."""
VALUES = ("the optional input {}", "{} with another value")
"""Text of each value to test of one input."""


def added_inputs(variant: Variant) -> Iterator[Idea]:
    """Each optional input that the node lacks, as a constant."""
    operator = operator_of(variant)
    for position, slot in enumerate(operator.inputs if operator is not None else ()):
        absent = position >= len(variant.node.input) or not variant.node.input[position]
        if operator is not None and slot.optional and absent:
            values = dict.fromkeys(value.SerializeToString() for value in _values(variant, operator, position, slot))
            for words, raw in zip(VALUES, values, strict=False):
                yield Idea("input", Change(added={position: _constant(raw)}), words.format(slot.name))


def _constant(raw: bytes) -> ExperimentInput:
    """A constant input from its serialised value."""
    import onnx

    value = onnx.TensorProto.FromString(raw)
    return ExperimentInput(value.name, tensor_type(value.data_type, value.dims), value)


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
