"""Helpers shared by passes: constants, consumers, node replacement, removal of dead nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir


def constant(value: ir.Value | None) -> list[Any] | None:
    """Elements of a small constant as a flat list; None for other values."""
    if value is None or value.const_value is None or value.const_value.size > 64:
        return None
    return list(value.const_value.numpy().reshape(-1).tolist())


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The only consumer of `value`; None with several or for a graph output."""
    uses = tuple(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def take_names(new: ir.Node, old: ir.Node) -> None:
    """Copy the metadata of `old` (module, class and source line) to `new`."""
    new.metadata_props.update(old.metadata_props)


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node, dead: tuple[ir.Node, ...] = ()) -> None:
    """Replace `old` with `new`, and remove `old` and the nodes of `dead` that are no longer read."""
    graph.insert_before(old, new)
    for before, after in zip(old.outputs, new.outputs, strict=True):
        after.shape, after.type = before.shape, before.type
        if before.is_graph_output():
            name = before.name
            before.name = f"{name}_replaced"
            after.name = name
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    for node in (old, *dead):
        if node.graph is graph and not any(o.uses() or o.is_graph_output() for o in node.outputs):
            graph.remove(node, safe=True)


def remove_unread(graph: ir.Graph, nodes: Iterable[ir.Node | None]) -> None:
    """Remove nodes that are no longer read, and their inputs that only they read."""
    for node in nodes:
        if node is None or node.graph is not graph or any(o.uses() or o.is_graph_output() for o in node.outputs):
            continue
        before = [v.producer() for v in node.inputs if v is not None]
        graph.remove(node, safe=True)
        remove_unread(graph, before)


def discard(node: ir.Node) -> None:
    """Disconnect the inputs of an unused node, so that values do not list it as a consumer."""
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)


def stand_in(graph: ir.Graph, value: ir.Value, new: ir.Node, index: int = 0) -> None:
    """Insert `new` where `value` is computed, and replace `value` with its output `index`. Remove dead nodes.

    `value` is not a graph output.
    """
    old = value.producer()
    assert old is not None
    take_names(new, old)
    after = new.outputs[index]
    after.shape, after.type = value.shape, value.type
    graph.insert_before(old, new)
    value.replace_all_uses_with(after)
    remove_unread(graph, [old])


def added(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """An initializer with this tensor; an existing one of that name is reused."""
    if name not in graph.initializers:
        kind = ir.TensorType(tensor.dtype)
        shape = ir.Shape(tensor.shape.numpy())
        graph.initializers[name] = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
    return graph.initializers[name]


def drop_unused_initializers(graph: ir.Graph) -> None:
    """Remove initializers that no node reads."""
    for name in [n for n, v in graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
        del graph.initializers[name]
