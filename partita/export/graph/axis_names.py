"""The symbolic sizes of a graph, named as the manifest names them: a trace calls them s70 and s66."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

AXES = {
    "input_ids": (1, "sequence_length"),
    "logits_indices": (0, "logits_rows"),
    "attention_mask": (1, "total_sequence_length"),
}
"""Input whose axis a size is, and the name that the manifest has for it."""
PAST = 2, "past_sequence_length"
"""The same of every state that grows."""


def name_axes(model: ir.Model) -> None:
    """Rename every symbolic size of `model`, also where others are computed from it (`2*s70`)."""
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
    """One size under its new name."""
    if isinstance(size, int):
        return size
    return None if size.value is None else pattern.sub(lambda found: names[found.group(1)], str(size.value))


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Every value that has a shape, those of subgraphs included."""
    yield from model.graph.inputs
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs
