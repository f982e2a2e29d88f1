"""Make the batch size of a traced graph symbolic, so that it also runs smaller batches.

A trace for B sequences has B as a number in shapes. A Reshape with B takes the first size of its input, or that of the
tokens:

    x [B, S, 64] ─ Reshape to [B, -1, 4, 16]  becomes  x [batch_size, S, 64] ─ Reshape to [0, -1, 4, 16]

Rewrites are exact for B sequences. Smaller batches are verified by running the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir

from partita.export.passes.base import TracedGraph, constant, drop_unused_initializers, integers

BATCH = "batch_size"
"""The symbolic size."""


_Sizes = tuple[ir.Node, int | None, list[int]]
"""A node with its new target shape: the first size (None: the batch size of the tokens), and the rest."""


def free_batch(graphs: Sequence[TracedGraph], *, asks: bool) -> list[TracedGraph] | None:
    """Let graphs of B sequences run fewer, in place; None where one cannot. `asks`: Shape nodes are allowed."""
    every = []
    for traced in graphs:
        nodes = ir.traversal.RecursiveGraphIterator(traced.graph)
        sizes = [found for node in nodes if (found := _new_sizes(node, traced.spec.batch)) is not None]
        if any(first is None and (not asks or node.graph is not traced.graph) for node, first, _ in sizes):
            return None
        every.append(sizes)
    return [_freed(traced, sizes) for traced, sizes in zip(graphs, every, strict=True)]


def _freed(traced: TracedGraph, sizes: Sequence[_Sizes]) -> TracedGraph:
    """A graph with the new shapes and a symbolic batch axis, and its ports with this axis."""
    graph, batch, tokens = traced.graph, traced.spec.batch, traced.input("tokens")
    assert tokens is not None
    inputs, outputs = (
        tuple(
            port.model_copy(update={"shape": (BATCH, *port.shape[1:])})
            if port.role != "logits_rows" and port.shape[:1] == (batch,)
            else port
            for port in ports
        )
        for ports in (traced.inputs, traced.outputs)
    )
    named = {port.name for port in (*inputs, *outputs) if port.shape[:1] == (BATCH,)}
    named.update(name for state in traced.states for name in (state.past, state.present))
    _write_sizes(graph, sizes, tokens)
    drop_unused_initializers(graph)
    for value in _by_row(traced.model, named):
        value.shape = None if value.shape is None else _without_batch(value.shape, batch)
    for value in (*graph.inputs, *graph.outputs):
        if value.name in named and value.shape is not None:
            value.shape = ir.Shape([BATCH, *value.shape[1:]])
    return replace(traced, inputs=inputs, outputs=outputs)


def _new_sizes(node: ir.Node, batch: int) -> _Sizes | None:
    """The new shape of a Reshape or Expand that contains B; None for other nodes."""
    if node.domain != "" or node.op_type not in ("Reshape", "Expand"):
        return None
    sizes, given = constant(node.inputs[1]), node.inputs[0]
    if not sizes or sizes[0] != batch or given is None:
        return None
    before = [] if given.shape is None else list(given.shape)
    same = before[:1] == [batch]
    if node.op_type == "Expand":
        return node, 1 if same and len(before) == len(sizes) else None, sizes[1:]
    if same and (node.attributes.get_int("allowzero", 0) == 0 or 0 not in sizes):
        return node, 0, sizes[1:]
    return node, None if -1 in sizes else -1, sizes[1:]


def _write_sizes(graph: ir.Graph, sizes: Sequence[_Sizes], tokens: ir.Value) -> None:
    """Set the new target shapes. Nodes that compute the batch size come first in the graph."""
    begin, computed = graph[0], dict[str, ir.Value]()

    def compute(name: str, length: int, operator: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        if name not in computed:
            node = ir.node(operator, inputs, attributes, name=name)
            value = node.outputs[0]
            value.name, value.shape, value.dtype = name, ir.Shape([length]), ir.DataType.INT64
            graph.insert_before(begin, node)
            computed[name] = value
        return computed[name]

    for node, first, rest in sizes:
        if first is None:
            rows = compute(BATCH, 1, "Shape", [tokens], start=0, end=1)
            name = f"{BATCH}.{'.'.join(map(str, rest))}"
            target = compute(name, len(rest) + 1, "Concat", [rows, integers(graph, rest)], axis=0)
        else:
            target = integers(graph, [first, *rest])
        node.replace_input_with(1, target)
        if first == 0:
            node.attributes.pop("allowzero", None)  # zero means the size of the input


def _by_row(model: ir.Model, named: set[str]) -> Iterator[ir.Value]:
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
