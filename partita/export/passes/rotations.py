"""Identify a rotary embedding by the values that a subgraph computes.

For head size D and R <= D rotated numbers, with cosines c and sines s of a position, i < R/2 and j its partner (i +
R/2, or the next number where pairs are neighbours):

    y[i] = x[i] * c[i] - x[j] * s[i]        y[j] = x[j] * c[i] + x[i] * s[i]        y[k] = x[k] beyond R

Some models read pairs as neighbours and write them as halves, or the reverse: a rotary embedding of a reordered x. For
an x that is a part of a head, the caller passes the part.

The nodes run in float64 at a few positions on random numbers: once to solve for c and s, once to test them. c and s are
located in the tables that the nodes look up, possibly times one factor, as scaled rope variants use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import (
    Array,
    UnknownError,
    above,
    compute_values,
    last_size,
    nodes_between,
    same_type,
)
from partita.export.passes.base import added
from partita.export.weights.sources import weight_part

PARTS = frozenset(
    (
        *("Add", "Cast", "Concat", "Gather", "Mul", "Neg", "Reshape", "Slice", "Split", "Squeeze", "Sub"),
        *("Transpose", "Unsqueeze"),
    )
)
"""Operators of a rotary embedding, from its input to its output."""
LONGEST = 12
TRIED = 8
"""Number of tested positions."""
TOLERANCE = 1e-9
PAIRINGS = ((False, False), (True, True), (True, False), (False, True))
"""Whether pairs are neighbours in the input, and in the output."""
LARGEST = 1 << 24
"""Maximum elements of a computed tensor (128 MiB in float64); larger graphs are not changed."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding of `source` [B, H, S, D], or [B, S, H, D], into `result`."""

    source: ir.Value
    result: ir.Value
    axis: int
    """The axis of S."""
    interleaved: bool
    """Pairs are neighbours in the result."""
    cos: Array
    sin: Array
    """[N, R/2], in the dtype of the graph's tables."""
    order: Array | None
    """[D], the source index of each number before the rotation; None without reordering."""


def rotation_of(result: ir.Value, positions: ir.Value, length: int) -> Rotation | None:
    """The rotary embedding that ends with `result`; None without one. `length`: N."""
    for source in above(result, PARTS, LONGEST)[1:]:
        if not same_type(source, result) or source.shape is None or source.shape.rank() != 4:
            continue
        nodes = nodes_between({source, positions}, result)
        if nodes is None:
            continue
        if math.prod(size if isinstance(size, int) else TRIED for size in source.shape) > LARGEST:
            return None
        tables = list(_tables(nodes, positions, length))
        if not tables:
            continue  # the input is multiplied by a number
        inner = without_factor(source)
        if inner is not None and same_type(inner, source) and all(use.node in nodes for use in source.uses()):
            scaled = nodes_between({inner, positions}, result)
            found = scaled and _recognised(scaled, inner, result, positions, length, tables)
            if found:
                return found
        return _recognised(nodes, source, result, positions, length, tables)
    return None


def without_factor(value: ir.Value) -> ir.Value | None:
    """The other factor of a product with one number; None where `value` is no such product."""
    node = value.producer()
    if node is None or node.op_type != "Mul":
        return None
    moving = [each for each in node.inputs if each is not None and each.const_value is None]
    known = [each.const_value for each in node.inputs if each is not None and each.const_value is not None]
    return moving[0] if len(moving) == 1 and len(known) == 1 and known[0].size == 1 else None


def _tables(nodes: Sequence[ir.Node], positions: ir.Value, length: int) -> Iterator[Array]:
    """Constants [N, ...] whose rows are looked up by position."""
    for node in nodes:
        table = node.inputs[0]
        if is_looked_up(node, positions) and table is not None and table.const_value is not None:
            array = table.const_value.numpy()
            if array.ndim == 2 and array.shape[0] == length:
                yield array


def is_looked_up(node: ir.Node, positions: ir.Value) -> bool:
    """Whether a node looks up rows of a constant by position; a checkpoint weight does not count."""
    if node.op_type != "Gather" or node.inputs[1] is not positions or node.attributes.get_int("axis", 0) != 0:
        return False
    table = node.inputs[0]
    return table is not None and table.const_value is not None and weight_part(table) is None


def _drawn(
    nodes: Sequence[ir.Node], source: ir.Value, result: ir.Value, positions: ir.Value, axis: int, length: int
) -> tuple[Array, list[tuple[Array, Array]]] | None:
    """Positions [B, S'], and two random inputs with their results, with S' positions along `axis`; None on an error."""
    assert source.shape is not None
    sizes = [size if isinstance(size, int) else TRIED for size in source.shape]
    rounds = -(-TRIED // sizes[axis])
    where = np.random.default_rng(7).integers(0, length, (sizes[0], rounds * sizes[axis]))
    where.flat[0] = length - 1
    random, draws = np.random.default_rng(3), []
    for _ in range(2):
        x = random.standard_normal([rounds * size if i == axis else size for i, size in enumerate(sizes)])
        parts = zip(np.split(x, rounds, axis), np.split(where, rounds, 1), strict=True)
        try:
            y = [compute_values(nodes, {source: part, positions: at})[result] for part, at in parts]
        except (UnknownError, ValueError):
            return None
        if any(list(each.shape) != sizes for each in y):
            return None
        draws.append((x, np.concatenate(y, axis)))
    return where, draws


def _recognised(
    nodes: Sequence[ir.Node],
    source: ir.Value,
    result: ir.Value,
    positions: ir.Value,
    length: int,
    tables: Sequence[Array],
) -> Rotation | None:
    width = last_size(source)
    if width is None or width % 2:
        return None
    for axis in (2, 1):
        drawn = _drawn(nodes, source, result, positions, axis, length)
        if drawn is None:
            continue
        where, draws = drawn
        for interleaved, cosines, sines, order in _rotations(draws, axis):
            cos, sin = (_looked_up(each, where, tables) for each in (cosines, sines))
            if cos is not None and sin is not None:
                return Rotation(source, result, axis, interleaved, cos, sin, order)
    return None


def _rotations(draws: Sequence[tuple[Array, Array]], axis: int) -> Iterator[tuple[bool, Array, Array, Array | None]]:
    """Interleaving, cosines and sines [B, S', R/2] and order of every rotation that explains both draws."""
    (x, y), (other, expected) = draws
    width = x.shape[-1]
    changed = np.flatnonzero((x != y).any(axis=(0, 1, 2)))
    last = int(changed[-1]) + 1 if changed.size else 0
    for turned in filter(None, dict.fromkeys((width, last + last % 2))):
        for taken, interleaved in PAIRINGS:
            first, second = _pairs(turned, interleaved=interleaved)
            order = np.arange(width)  # the source index of each number
            order[first], order[second] = _pairs(turned, interleaved=taken)
            pairs = x[..., order[first]], x[..., order[second]], y[..., first], y[..., second]
            a, b, p, q = (each.take(0, axis=3 - axis) for each in pairs)  # of the first head
            square = a * a + b * b
            cos, sin = (a * p + b * q) / square, (a * q - b * p) / square
            computed = rotary_embedding(other[..., order], cos, sin, axis, interleaved=interleaved)
            if np.abs(computed - expected).max() <= TOLERANCE:
                yield interleaved, cos, sin, None if taken == interleaved else order


def _pairs(turned: int, *, interleaved: bool) -> tuple[Array, Array]:
    """Indices of the first and the second number of each pair."""
    if interleaved:
        return np.arange(0, turned, 2), np.arange(1, turned, 2)
    return np.arange(turned // 2), np.arange(turned // 2, turned)


def rotary_embedding(x: Array, cos: Array, sin: Array, axis: int, *, interleaved: bool) -> Array:
    """The rotary embedding of x, 4-D with positions along `axis`; cosines and sines [B, S, R/2]."""
    first, second = _pairs(2 * cos.shape[-1], interleaved=interleaved)
    cos, sin = (np.expand_dims(each, 3 - axis) for each in (cos, sin))
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _looked_up(shown: Array, where: Array, tables: Sequence[Array]) -> Array | None:
    """The columns [N, R/2] of the tables, times one number, that equal `shown` [B, S', R/2] at `where`, or None."""
    table, shown = np.concatenate(tables, 1), shown.reshape(-1, shown.shape[-1])
    at = table[where.reshape(-1)].astype(np.float64)
    for factor in _factors(shown, at):
        distance = np.abs(factor * at[:, None, :] - shown[:, :, None]).max(0)
        columns = distance.argmin(1)
        if (distance[np.arange(len(columns)), columns] <= TOLERANCE).all():
            picked = table[:, columns]
            return np.ascontiguousarray(picked if factor == 1 else (factor * picked.astype(float)).astype(table.dtype))
    return None


def _factors(shown: Array, at: Array) -> Iterator[float]:
    """Possible factors between the columns `at` [K, C] and `shown`."""
    yield 1.0
    largest = shown[:, (shown * shown).sum(0).argmax()]
    squares = (at * at).sum(0)
    factors = np.divide(largest @ at, squares, out=np.zeros_like(squares), where=squares > 0)
    distance = np.abs(factors * at - largest[:, None]).max(0)
    yield from (float(factors[column]) for column in distance.argsort() if distance[column] <= TOLERANCE)


def table_in(graph: ir.Graph, label: str, array: Array, rotation: Rotation) -> ir.Value:
    """A table as a graph constant in the dtype of the rotated value; equal tables share one constant."""
    dtype = rotation.source.dtype
    assert dtype is not None
    tensor = ir.tensor(array.astype(dtype.numpy()), dtype=dtype)
    number = 0
    while (other := graph.initializers.get(f"rotary.{label}.{number}")) is not None:
        assert other.const_value is not None
        if np.array_equal(other.const_value.numpy(), tensor.numpy()):
            break
        number += 1
    return added(graph, tensor, f"rotary.{label}.{number}")
