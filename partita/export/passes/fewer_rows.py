"""Make the batch size of a traced graph symbolic, so that it also runs smaller batches.

A trace for B sequences has B as a number in shapes. A Reshape with B takes the first size of its input, or that of the
tokens:

    x [B, S, 64] ─ Reshape to [B, -1, 4, 16]  becomes  x [batch_size, S, 64] ─ Reshape to [0, -1, 4, 16]

Rewrites are exact for B sequences. Smaller batches are verified by running the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from partita.export.passes.base import added, constant, drop_unused_initializers
from partita.package.contract import Port, State

BATCH = "batch_size"
"""The symbolic size."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The new target shape of a node."""

    node: ir.Node
    first: int | None
    """None: the batch size of the tokens."""
    rest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Freeing:
    """The rewrites of one graph."""

    model: ir.Model
    batch: int
    batch_first: frozenset[str]
    """Inputs and outputs whose first axis is the batch."""
    tokens: str
    sizes: tuple[_Sizes, ...]

    def apply(self) -> None:
        """Make the batch size symbolic, in place."""
        graph = self.model.graph
        for entry in self.sizes:
            _write(graph, entry, self.tokens)
        drop_unused_initializers(graph)
        for value in _by_row(self.model, self.batch_first):
            value.shape = None if value.shape is None else _without_batch(value.shape, self.batch)
        for value in (*graph.inputs, *graph.outputs):
            if value.name in self.batch_first and value.shape is not None:
                value.shape = ir.Shape([BATCH, *value.shape[1:]])


def freeing(
    model: ir.Model, inputs: Sequence[Port], outputs: Sequence[Port], states: Sequence[State], *, asks: bool
) -> Freeing | None:
    """The rewrites that let a graph of B sequences run fewer; None where they are known to be insufficient.

    `asks`: Shape nodes on the tokens may be inserted; providers leave those to the CPU.
    """
    tokens = next(port for port in inputs if port.role == "tokens")
    batch = tokens.shape[0]
    assert isinstance(batch, int)
    by_row = {port.name for port in (*inputs, *outputs) if port.role != "logits_rows" and port.shape[:1] == (batch,)}
    named = frozenset(by_row).union(*((state.past, state.present) for state in states))
    sizes = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        told = _new_sizes(node, batch)
        if told is None:
            continue
        if told.first is None and (not asks or node.graph is not model.graph):
            return None
        sizes.append(told)
    return Freeing(model, batch, named, tokens.name, tuple(sizes))


def _new_sizes(node: ir.Node, batch: int) -> _Sizes | None:
    """The new shape of a Reshape or Expand that contains B; None for other nodes."""
    if node.domain != "" or node.op_type not in ("Reshape", "Expand"):
        return None
    sizes = constant(node.inputs[1])
    given = node.inputs[0]
    if not sizes or sizes[0] != batch or given is None:
        return None
    same = given.shape is not None and len(given.shape) > 0 and given.shape[0] == batch
    if node.op_type == "Expand":
        same = same and given.shape is not None and len(given.shape) == len(sizes)
        return _Sizes(node, 1 if same else None, tuple(sizes[1:]))
    copies = node.attributes.get_int("allowzero", 0) == 0 or 0 not in sizes
    if same and copies:
        return _Sizes(node, 0, tuple(sizes[1:]))
    return _Sizes(node, None if -1 in sizes else -1, tuple(sizes[1:]))


def _write(graph: ir.Graph, entry: _Sizes, tokens: str) -> None:
    """Set the new target shape of a node."""
    if entry.first is not None:
        entry.node.replace_input_with(1, _numbers(graph, (entry.first, *entry.rest)))
        if entry.first == 0:
            entry.node.attributes.pop("allowzero", None)  # zero means the size of the input
        return
    joined = _named(graph, f"{BATCH}.{'.'.join(map(str, entry.rest))}")
    if joined is None:
        rows = _named(graph, BATCH) or _rows_of(graph, tokens)
        joined = _added(
            graph,
            ir.node("Concat", [rows, _numbers(graph, entry.rest)], attributes={"axis": 0}),
            f"{BATCH}.{'.'.join(map(str, entry.rest))}",
            len(entry.rest) + 1,
        )
    entry.node.replace_input_with(1, joined)


def _numbers(graph: ir.Graph, sizes: tuple[int, ...]) -> ir.Value:
    """An int64 constant of the graph."""
    name = "shape." + ".".join(map(str, sizes))
    return added(graph, ir.tensor(np.array(sizes, np.int64), name=name), name)


def _rows_of(graph: ir.Graph, tokens: str) -> ir.Value:
    """[1]: the batch size of the input tokens."""
    fed = next(value for value in graph.inputs if value.name == tokens)
    return _added(graph, ir.node("Shape", [fed], attributes={"start": 0, "end": 1}), BATCH, 1)


def _added(graph: ir.Graph, node: ir.Node, name: str, length: int) -> ir.Value:
    """The output of a node inserted at the start of the graph, after earlier insertions."""
    node.name = name
    value = node.outputs[0]
    value.name, value.shape, value.dtype = name, ir.Shape([length]), ir.DataType.INT64
    place = next((other for other in graph if not (other.name or "").startswith(BATCH)), None)
    assert place is not None
    graph.insert_before(place, node)
    return value


def _named(graph: ir.Graph, name: str) -> ir.Value | None:
    """The value of that name inserted at the start of the graph."""
    for node in graph:
        if not (node.name or "").startswith(BATCH):
            return None
        if node.name == name:
            return node.outputs[0]
    return None


def _by_row(model: ir.Model, named: frozenset[str]) -> Iterator[ir.Value]:
    """Every value computed from inputs with a batch axis, and every value in subgraphs."""
    known = {value for value in model.graph.inputs if value.name in named}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        inner = [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
        for body in inner:
            yield from body.inputs
        if inner or node.graph is not model.graph or any(value in known for value in node.inputs):
            known.update(node.outputs)
            yield from node.outputs


def _without_batch(shape: ir.Shape, batch: int) -> ir.Shape:
    """A shape without sizes that may depend on the batch."""
    sizes: list[int | str | None] = []
    for axis, size in enumerate(shape):
        if isinstance(size, int):
            sizes.append(None if size == batch or (axis == 0 and size % batch == 0) else size)
        else:  # an expression (2*sequence_length) may contain the batch
            sizes.append(size.value if size.value is not None and size.value.isidentifier() else None)
    return ir.Shape(sizes)
