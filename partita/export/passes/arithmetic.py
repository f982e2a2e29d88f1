"""Evaluate a few nodes in float64, for passes that identify a subgraph by its values; and the nodes between two values.

Casts between floats are skipped. Weights are not read: the caller supplies values for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference.ops import load_op

from partita.export.weights.sources import weight_part

Array = npt.NDArray[Any]
LARGE = 1 << 16
"""Constants with more elements are indexed and never converted as a whole."""
OPERATORS = frozenset(
    (
        *("Abs", "Add", "Cast", "Clip", "Concat", "Cos", "Div", "Erf", "Exp", "Expand", "Gather", "Identity", "Max"),
        *("Min", "Mul", "Neg", "Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Shape"),
        *("Sigmoid", "Sin", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze"),
    )
)
"""The supported operators, which onnx's reference implementation computes."""


class UnknownError(Exception):
    """The result of a node cannot be computed here."""


def compute_values(nodes: Sequence[ir.Node], given: Mapping[ir.Value, Array]) -> dict[ir.Value, Array]:
    """The values that `nodes`, in order, compute from `given` and constants. Raises UnknownError."""
    known = dict(given)
    for node in nodes:
        if node.domain or node.op_type not in OPERATORS:
            raise UnknownError(f"{node.domain or 'ai.onnx'}::{node.op_type}")
        inputs = [None if value is None else _value_of(value, known) for value in node.inputs]
        try:
            with np.errstate(all="ignore"):
                results = _run(node, inputs)
        except (ValueError, IndexError, TypeError, RuntimeError) as error:
            raise UnknownError(f"{node.op_type}: {error}") from error
        known.update(zip(node.outputs, results, strict=False))
    return known


def _run(node: ir.Node, inputs: list[Array | None]) -> list[Array]:
    """The outputs of a node, floats in float64."""
    if node.op_type == "Cast":
        (given,), to = inputs, ir.DataType(node.attributes.get_int("to", 0))
        assert given is not None
        if not to.is_floating_point() and given.dtype.kind not in "iub":
            raise UnknownError("a Cast that rounds")
        return [given.astype(np.float64 if to.is_floating_point() else to.numpy())]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    results = load_op("", node.op_type).eval(*inputs, n_outputs=len(node.outputs), **attributes)
    return [_as_float64(np.asarray(each)) for each in (results if isinstance(results, tuple) else [results])]


def _value_of(value: ir.Value, known: Mapping[ir.Value, Array]) -> Array:
    if value in known:
        return known[value]
    if value.const_value is None or weight_part(value) is not None:
        raise UnknownError(f"{value.name} is not known")
    found = value.const_value.numpy()
    return found if found.size > LARGE else _as_float64(found)


def _as_float64(array: Array) -> Array:
    """Floats as float64; integers unchanged."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


MOST = 48
"""Maximum nodes of a region; fused subgraphs are far smaller."""


def nodes_between(sources: Collection[ir.Value], result: ir.Value, most: int = MOST) -> list[ir.Node] | None:
    """The nodes from `sources` to `result` in order; None where they read other values, or for over `most`."""
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


def subgraphs_around(
    node: ir.Node, sources: Sequence[ir.Value], results: Sequence[ir.Value], most: int
) -> Iterator[tuple[ir.Value, ir.Value, list[ir.Node]]]:
    """Source, result and nodes of every subgraph around `node` whose result has the type of its source."""
    for source in sources:
        for result in results:
            if not same_type(source, result) or result.is_graph_output():
                continue
            nodes = nodes_between({source}, result, most)
            if nodes is not None and node in nodes:
                yield source, result, nodes


def weights_in(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """The checkpoint weights that the nodes read, without duplicates."""
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    return [value for value in read if weight_part(value) is not None]


def numbers_in(nodes: Sequence[ir.Node]) -> Iterator[float]:
    """The scalar float constants that the nodes read."""
    for value in dict.fromkeys(value for node in nodes for value in node.inputs if value is not None):
        tensor = value.const_value
        if tensor is not None and weight_part(value) is None and tensor.size == 1 and tensor.dtype.is_floating_point():
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
