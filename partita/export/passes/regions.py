"""The nodes between two values of a graph, which passes try to identify."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from partita.export.weights.sources import stored

MOST = 48
"""Maximum nodes of a region; fused subgraphs are far smaller."""


def nodes_between(sources: Collection[ir.Value], result: ir.Value, most: int = MOST) -> list[ir.Node] | None:
    """The nodes that compute `result` from `sources` and constants, in execution order.

    None where another value is read, or there are more than `most` nodes.
    """
    ordered: list[ir.Node] = []
    seen: set[ir.Node] = set()

    def visit(value: ir.Value) -> bool:
        if value in sources or value.const_value is not None:
            return True
        node = value.producer()
        if node is None:
            return False
        if node in seen:
            return True
        seen.add(node)
        if len(seen) > most or not all(visit(each) for each in node.inputs if each is not None):
            return False
        ordered.append(node)
        return True

    return ordered if visit(result) else None


def weights_in(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """The checkpoint weights that the nodes read, without duplicates."""
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    return [value for value in read if stored(value) is not None]


def numbers_in(nodes: Sequence[ir.Node]) -> Iterator[float]:
    """The scalar float constants that the nodes read."""
    for value in dict.fromkeys(value for node in nodes for value in node.inputs if value is not None):
        tensor = value.const_value
        if tensor is not None and stored(value) is None and tensor.size == 1 and tensor.dtype.is_floating_point():
            yield float(tensor.numpy().reshape(-1)[0])


def above(value: ir.Value, operators: Collection[str], most: int) -> list[ir.Value]:
    """`value` and its ancestors through nodes of these operators, nearest first."""
    found, level = [value], [value]
    for _ in range(most):
        producers = [node for each in level if (node := each.producer()) is not None and node.op_type in operators]
        inputs = (each for node in producers for each in node.inputs if each is not None and each.const_value is None)
        level = [each for each in dict.fromkeys(inputs) if each not in found]
        found += level
    return found


def below(value: ir.Value, operators: Collection[str], most: int) -> list[ir.Value]:
    """`value` and its descendants through nodes of these operators, nearest first."""
    found, level = [value], [value]
    for _ in range(most):
        users = [use.node for each in level for use in each.uses() if use.node.op_type in operators]
        level = [each for each in dict.fromkeys(node.outputs[0] for node in users) if each not in found]
        found += level
    return found


def same_type(one: ir.Value, other: ir.Value) -> bool:
    """Whether two values have the same element type and sizes; symbolic sizes are compared by name."""
    if one.dtype is None or one.dtype != other.dtype or one.shape is None or other.shape is None:
        return False
    return [str(size) for size in one.shape] == [str(size) for size in other.shape]


def last_size(value: ir.Value) -> int | None:
    """The size of the last axis; None where unknown."""
    if value.shape is None or not value.shape.rank():
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None
