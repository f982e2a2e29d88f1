"""Rename the symbolic sizes of a traced graph (s70, s66) to the names in the manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

AXES = {
    "input_ids": (1, "sequence_length"),
    "logits_indices": (0, "logits_rows"),
    "attention_mask": (1, "total_sequence_length"),
}
"""Input -> the axis with a symbolic size, and its name in the manifest."""
PAST = 2, "past_sequence_length"
"""Axis and name for every growing state."""


def name_axes(model: ir.Model) -> None:
    """Rename every symbolic size of `model`, in expressions (`2*s70`), too."""
    names = {}
    for value in model.graph.inputs:
        if value.shape is not None and (value.name in AXES or len(value.shape) == 4):
            axis, name = AXES.get(value.name or "", PAST)
            size = value.shape[axis]
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names[str(size.value)] = name
    if not names:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    for value in _values(model):
        if value.shape is not None and any(isinstance(size, ir.SymbolicDim) for size in value.shape):
            value.shape = ir.Shape([_renamed(size, names, pattern) for size in value.shape])


def _renamed(size: int | ir.SymbolicDim, names: dict[str, str], pattern: re.Pattern[str]) -> int | str | None:
    """The new name of one size."""
    if isinstance(size, int):
        return size
    return None if size.value is None else pattern.sub(lambda found: names[found.group(1)], str(size.value))


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Every value with a shape, in subgraphs too."""
    yield from model.graph.inputs
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs
