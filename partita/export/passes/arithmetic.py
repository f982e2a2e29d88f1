"""Evaluate a few nodes in float64, for passes that identify a subgraph by its values; and the nodes between two values.

Casts between floats are skipped. Weights are not read: the caller supplies values for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from partita.export.weights.sources import weight_part

Array = npt.NDArray[Any]
Compute = Callable[[ir.Node, list[Array]], Array | list[Array]]
LARGE = 1 << 16
"""Constants with more elements are indexed and never converted as a whole."""


class UnknownError(Exception):
    """The result of a node cannot be computed here."""


def compute_values(nodes: Sequence[ir.Node], given: Mapping[ir.Value, Array]) -> dict[ir.Value, Array]:
    """The values that `nodes`, in order, compute from `given` and constants. Raises UnknownError."""
    known = dict(given)
    for node in nodes:
        operator = OPERATORS.get(node.op_type) if node.domain == "" else None
        if operator is None:
            raise UnknownError(f"{node.domain or 'ai.onnx'}::{node.op_type}")
        inputs = [_value_of(value, known) for value in node.inputs if value is not None]
        try:
            with np.errstate(all="ignore"):
                result = operator(node, inputs)
        except (ValueError, IndexError, TypeError) as error:
            raise UnknownError(f"{node.op_type}: {error}") from error
        known.update(zip(node.outputs, result if isinstance(result, list) else [result], strict=False))
    return known


def _value_of(value: ir.Value, known: Mapping[ir.Value, Array]) -> Array:
    if value in known:
        return known[value]
    if value.const_value is None or weight_part(value) is not None:
        raise UnknownError(f"{value.name} is not known")
    return _wide(value.const_value.numpy())


def _wide(array: Array) -> Array:
    """Floats as float64; integers and large arrays unchanged."""
    return array if array.dtype.kind in "iub" or array.size > LARGE else array.astype(np.float64)


def _elementwise(function: Callable[..., Any]) -> Compute:
    return lambda node, inputs: np.asarray(function(*inputs))


def _cast(node: ir.Node, inputs: list[Array]) -> Array:
    to = ir.DataType(node.attributes.get_int("to", 0))
    if to.is_floating_point():
        return _wide(inputs[0]).astype(np.float64)
    if inputs[0].dtype.kind not in "iub":
        raise UnknownError("a Cast that rounds")
    return inputs[0].astype(to.numpy())


def _axes(node: ir.Node, inputs: list[Array]) -> tuple[int, ...]:
    """Axes of a Reduce, Squeeze or Unsqueeze: an input since opset 13 or 18, an attribute before."""
    found = inputs[1].tolist() if len(inputs) > 1 else node.attributes.get_ints("axes", [])
    if not found:
        raise UnknownError("no axes")
    return tuple(int(axis) for axis in found)


def _reduced(function: Callable[..., Any]) -> Compute:
    def reduce(node: ir.Node, inputs: list[Array]) -> Array:
        keep = bool(node.attributes.get_int("keepdims", 1))
        return np.asarray(function(inputs[0], axis=_axes(node, inputs), keepdims=keep))

    return reduce


def _clip(node: ir.Node, inputs: list[Array]) -> Array:
    """`inputs` has only the limits that exist, the lower first."""
    given = iter(inputs[1:])
    for place, limit in ((1, np.maximum), (2, np.minimum)):
        if len(node.inputs) > place and node.inputs[place] is not None:
            inputs[0] = np.asarray(limit(inputs[0], next(given)))
    return inputs[0]


def _expand(node: ir.Node, inputs: list[Array]) -> Array:
    """Broadcast to both shapes, as in an addition."""
    sizes = np.broadcast_shapes(inputs[0].shape, tuple(int(size) for size in inputs[1]))
    return np.asarray(np.broadcast_to(inputs[0], sizes))


def _shape(node: ir.Node, inputs: list[Array]) -> Array:
    sizes = inputs[0].shape[node.attributes.get_int("start", 0) :]
    if "end" in node.attributes:
        raise UnknownError("a part of a Shape")
    return np.array(sizes, np.int64)


def _reshape(node: ir.Node, inputs: list[Array]) -> Array:
    data, wanted = inputs
    keeps_zero = node.attributes.get_int("allowzero", 0)
    sizes = [data.shape[i] if n == 0 and not keeps_zero else int(n) for i, n in enumerate(wanted.tolist())]
    return data.reshape(sizes)


def _slice(node: ir.Node, inputs: list[Array]) -> Array:
    data, starts, stops = inputs[:3]
    axes = inputs[3].tolist() if len(inputs) > 3 else range(len(starts))
    steps = inputs[4].tolist() if len(inputs) > 4 else [1] * len(starts)
    cut = [slice(None)] * data.ndim
    for axis, start, stop, step in zip(axes, starts.tolist(), stops.tolist(), steps, strict=True):
        if step < 1:
            raise UnknownError("a Slice that runs backwards")
        cut[axis] = slice(start, stop, step)
    return np.asarray(data[tuple(cut)])


def _split(node: ir.Node, inputs: list[Array]) -> list[Array]:
    axis = node.attributes.get_int("axis", 0)
    if len(inputs) > 1:
        return list(np.split(inputs[0], np.cumsum(inputs[1])[:-1], axis))
    size, parts = inputs[0].shape[axis], len(node.outputs)
    if size % parts:
        raise UnknownError  # ONNX makes the last part smaller, numpy makes the first ones larger
    return list(np.split(inputs[0], parts, axis))


def _gather(node: ir.Node, inputs: list[Array]) -> Array:
    found = np.take(inputs[0], inputs[1].astype(np.int64), node.attributes.get_int("axis", 0))
    return found if found.dtype.kind in "iub" else found.astype(np.float64)


def erf(x: Array) -> Array:
    """The error function, to 1e-15."""
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


OPERATORS: dict[str, Compute] = {
    "Abs": _elementwise(np.abs),
    "Add": _elementwise(np.add),
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda node, inputs: np.concatenate(inputs, node.attributes.get_int("axis", 0)),
    "Cos": _elementwise(np.cos),
    "Div": _elementwise(np.divide),
    "Erf": _elementwise(erf),
    "Expand": _expand,
    "Exp": _elementwise(np.exp),
    "Gather": _gather,
    "Identity": _elementwise(np.asarray),
    "Max": _elementwise(lambda *terms: functools.reduce(np.maximum, terms)),
    "Min": _elementwise(lambda *terms: functools.reduce(np.minimum, terms)),
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Pow": _elementwise(np.power),
    "Reciprocal": _elementwise(np.reciprocal),
    "ReduceL2": _reduced(lambda x, **how: np.sqrt((x * x).sum(**how))),
    "ReduceMean": _reduced(np.mean),
    "ReduceSum": _reduced(np.sum),
    "Relu": _elementwise(lambda x: np.maximum(x, 0)),
    "Reshape": _reshape,
    "Shape": _shape,
    "Sigmoid": _elementwise(sigmoid),
    "Sin": _elementwise(np.sin),
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _elementwise(np.sqrt),
    "Squeeze": lambda node, inputs: np.squeeze(inputs[0], _axes(node, inputs)),
    "Sub": _elementwise(np.subtract),
    "Sum": _elementwise(lambda *terms: sum(terms[1:], start=terms[0])),
    "Tanh": _elementwise(np.tanh),
    "Transpose": lambda node, inputs: inputs[0].transpose(
        node.attributes.get_ints("perm", range(inputs[0].ndim)[::-1])
    ),
    "Unsqueeze": lambda node, inputs: np.expand_dims(inputs[0], _axes(node, inputs)),
}
"""The supported operators, with attributes as in the operator sets since 17."""


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
