"""Make the batch size of a traced graph symbolic, so that it also runs smaller batches.

A trace for B sequences has B as a number in shapes. A Reshape with B takes the first size of its input, or that of the
tokens:

    x [B, S, 64] ─ Reshape to [B, -1, 4, 16]  becomes  x [batch_size, S, 64] ─ Reshape to [0, -1, 4, 16]

Rewrites are exact for B sequences. Smaller batches are verified by running the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from partita.export.passes.base import constant, drop_unused_initializers, integers
from partita.package.contract import Port, State

BATCH = "batch_size"
"""The symbolic size."""


_Sizes = tuple[ir.Node, int | None, list[int]]
"""A node with its new target shape: the first size (None: the batch size of the tokens), and the rest."""


def freeing(
    model: ir.Model, inputs: Sequence[Port], outputs: Sequence[Port], states: Sequence[State], *, asks: bool
) -> Callable[[], None] | None:
    """A function that lets a graph of B sequences run fewer, or None. `asks`: Shape nodes are allowed."""
    tokens = next(port for port in inputs if port.role == "tokens")
    batch = tokens.shape[0]
    assert isinstance(batch, int)
    by_row = {port.name for port in (*inputs, *outputs) if port.role != "logits_rows" and port.shape[:1] == (batch,)}
    named = frozenset(by_row).union(*((state.past, state.present) for state in states))
    sizes: list[_Sizes] = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        found = _new_sizes(node, batch)
        if found is None:
            continue
        if found[1] is None and (not asks or node.graph is not model.graph):
            return None
        sizes.append(found)

    def apply() -> None:
        graph = model.graph
        for entry in sizes:
            _write(graph, *entry, tokens.name)
        drop_unused_initializers(graph)
        for value in _by_row(model, named):
            value.shape = None if value.shape is None else _without_batch(value.shape, batch)
        for value in (*graph.inputs, *graph.outputs):
            if value.name in named and value.shape is not None:
                value.shape = ir.Shape([BATCH, *value.shape[1:]])

    return apply


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
        return node, 1 if same else None, sizes[1:]
    copies = node.attributes.get_int("allowzero", 0) == 0 or 0 not in sizes
    if same and copies:
        return node, 0, sizes[1:]
    return node, None if -1 in sizes else -1, sizes[1:]


def _write(graph: ir.Graph, node: ir.Node, first: int | None, rest: list[int], tokens: str) -> None:
    """Set the new target shape of a node."""
    if first is not None:
        node.replace_input_with(1, integers(graph, [first, *rest]))
        if first == 0:
            node.attributes.pop("allowzero", None)  # zero means the size of the input
        return
    name = f"{BATCH}.{'.'.join(map(str, rest))}"
    joined = _named(graph, name)
    if joined is None:
        rows = _named(graph, BATCH)
        if rows is None:
            fed = next(value for value in graph.inputs if value.name == tokens)
            rows = _added(graph, ir.node("Shape", [fed], attributes={"start": 0, "end": 1}), BATCH, 1)
        concat = ir.node("Concat", [rows, integers(graph, rest)], attributes={"axis": 0})
        joined = _added(graph, concat, name, len(rest) + 1)
    node.replace_input_with(1, joined)


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
