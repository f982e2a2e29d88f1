"""What a subgraph does to the rows of a tensor by their positions, if that is a rotary embedding.

For head size D and R <= D of its numbers turned, with cosines c and sines s of a position, i < R/2 and j its partner
(i + R/2, or the next one where pairs are neighbours):

    y[i] = x[i] * c[i] - x[j] * s[i]        y[j] = x[j] * c[i] + x[i] * s[i]        y[k] = x[k] beyond R

Some models take pairs that are neighbours and put their halves one behind the other (or the other way round): that is
such an embedding of x in another order. Where x is a part of a head, whoever asks asks about the part.

That is found by running the nodes in float64 at a few positions: on ones and zeros, which shows c and s, and then on
random numbers. Where c and s come from is found in the tables that the nodes look up, or in those times one number:
models whose rope is stretched multiply cosines and sines by a factor, or what is turned, before or after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import Array, UnknownError, computed
from partita.export.passes.regions import above, last_size, nodes_between, same_type
from partita.export.passes.rewriting import added
from partita.export.weights.sources import stored

PARTS = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "Gather",
        "Mul",
        "Neg",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that a rotary embedding is written with, from what is turned to what comes out."""
LONGEST = 12
TRIED = 8
"""Positions that are tried."""
TOLERANCE = 1e-9
PAIRINGS = ((False, False), (True, True), (True, False), (False, True))
"""Whether pairs are neighbours in what is turned, and in what comes out."""
LARGEST = 1 << 24
"""Numbers of a tensor that are computed with at most, 128 MiB of them: sizes are those of the graph, which fixes batch
and chunk. What is larger stays as it is.
"""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding of `source` [B, H, S, D], or [B, S, H, D], into `result`."""

    source: ir.Value
    result: ir.Value
    axis: int
    """Of S."""
    interleaved: bool
    """Pairs are neighbours in the result."""
    cos: Array
    sin: Array
    """[N, R/2], in the type of the tables of the graph."""
    order: Array | None
    """[D], where the number at each place is taken from before it is turned; None: they stay where they are."""


def rotation_of(result: ir.Value, positions: ir.Value, length: int) -> Rotation | None:
    """The rotary embedding that ends with `result`; None when there is none. `length`: N."""
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
            continue  # what was turned is multiplied by a number
        inner = unscaled(source)
        if inner is not None and same_type(inner, source) and all(use.node in nodes for use in source.uses()):
            scaled = nodes_between({inner, positions}, result)
            found = scaled and _recognised(_Trial(scaled, inner, result, positions, length), tables)
            if found:
                return found
        return _recognised(_Trial(nodes, source, result, positions, length), tables)
    return None


def unscaled(value: ir.Value) -> ir.Value | None:
    """What a value is a product of with one number; None when it is no such product."""
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
    """Whether a node looks rows of a constant up by position; a weight of the checkpoint is none."""
    if node.op_type != "Gather" or node.inputs[1] is not positions or node.attributes.get_int("axis", 0) != 0:
        return False
    table = node.inputs[0]
    return table is not None and table.const_value is not None and stored(table) is None


@dataclass(slots=True)
class _Trial:
    """Runs of the nodes at positions that were drawn once."""

    nodes: Sequence[ir.Node]
    source: ir.Value
    result: ir.Value
    positions: ir.Value
    length: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of what is turned, with `TRIED` positions where their number is symbolic."""
        assert self.source.shape is not None
        return tuple(size if isinstance(size, int) else TRIED for size in self.source.shape)

    def drawn(self, count: int) -> Array:
        """Positions [B, count]; the first and the last there are among them."""
        random = np.random.default_rng(7)
        numbers = random.integers(0, self.length, (self.sizes[0], count))
        numbers.flat[0] = self.length - 1
        return numbers

    def run(self, x: Array, where: Array) -> Array:
        """The result for x, whose positions are `where` [B, S]."""
        return computed(self.nodes, {self.source: x, self.positions: where})[self.result]


def _recognised(trial: _Trial, tables: Sequence[Array]) -> Rotation | None:
    sizes = trial.sizes
    for axis in (2, 1):
        rounds = -(-TRIED // sizes[axis])
        places = np.split(trial.drawn(rounds * sizes[axis]), rounds, 1)
        try:
            found = _at_axis(trial, axis, places, tables)
        except (UnknownError, ValueError):
            continue
        if found is not None:
            return found
    return None


def _at_axis(trial: _Trial, axis: int, places: Sequence[Array], tables: Sequence[Array]) -> Rotation | None:
    """The rotation when `axis` is that of the positions; `places`: positions [B, S] of several runs."""
    width = last_size(trial.source)
    if width is None or width % 2:
        return None
    x = np.random.default_rng(3).standard_normal(trial.sizes)
    shown = [trial.run(x, where) for where in places]
    if any(each.shape != x.shape for each in shown):
        return None
    changed = np.flatnonzero(np.any([each != x for each in shown], axis=tuple(range(x.ndim))))
    last = int(changed[-1]) + 1 if changed.size else 0
    for turned in dict.fromkeys((width, last + last % 2)):
        for taken, interleaved in PAIRINGS:
            order = _order(width, turned, taken=taken, interleaved=interleaved)
            first, second = _pairs(turned, interleaved=interleaved)
            ones = np.zeros(trial.sizes)
            ones[..., order[first]] = 1.0
            waves = [_by_position(trial.run(ones, where), axis) for where in places]
            pairs = [(wave[..., first], wave[..., second]) for wave in waves]
            expected = [turn(x[..., order], *pair, axis, interleaved=interleaved) for pair in pairs]
            if not turned or not all(np.abs(a - b).max() <= TOLERANCE for a, b in zip(expected, shown, strict=True)):
                continue
            where = np.concatenate([each.reshape(-1) for each in places])
            cos, sin = (
                _looked_up(np.concatenate([pair[i].reshape(-1, turned // 2) for pair in pairs]), where, tables)
                for i in (0, 1)
            )
            if cos is not None and sin is not None:
                moved = None if taken == interleaved else order
                return Rotation(trial.source, trial.result, axis, interleaved, cos, sin, moved)
    return None


def _order(width: int, turned: int, *, taken: bool, interleaved: bool) -> Array:
    """Where each of `width` numbers comes from when pairs of the first `turned` are `taken` from one form to the other;
    True is neighbours.
    """
    order = np.arange(width)
    for place, source in zip(_pairs(turned, interleaved=interleaved), _pairs(turned, interleaved=taken), strict=True):
        order[place] = source
    return order


def _by_position(wave: Array, axis: int) -> Array:
    """[B, S, D] of the first head."""
    return np.asarray(wave.take(0, axis=3 - axis))


def _pairs(turned: int, *, interleaved: bool) -> tuple[Array, Array]:
    """Places of the first and of the second number of each pair."""
    if interleaved:
        return np.arange(0, turned, 2), np.arange(1, turned, 2)
    return np.arange(turned // 2), np.arange(turned // 2, turned)


def turn(x: Array, cos: Array, sin: Array, axis: int, *, interleaved: bool) -> Array:
    """The rotary embedding of x, 4-D with positions along `axis`; cosines and sines [B, S, R/2]."""
    first, second = _pairs(2 * cos.shape[-1], interleaved=interleaved)
    cos, sin = (np.expand_dims(each, 3 - axis) for each in (cos, sin))
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _looked_up(shown: Array, where: Array, tables: Sequence[Array]) -> Array | None:
    """The columns [N, R/2] of the tables, times one number, that are `shown` [K, R/2] at the positions `where` [K].

    None without such.
    """
    table = np.concatenate(tables, 1)
    at = table[where].astype(np.float64)
    for factor in _factors(shown, at):
        distance = np.abs(factor * at[:, None, :] - shown[:, :, None]).max(0)
        columns = distance.argmin(1)
        if (distance[np.arange(len(columns)), columns] <= TOLERANCE).all():
            picked = table[:, columns]
            return np.ascontiguousarray(picked if factor == 1 else (factor * picked.astype(float)).astype(table.dtype))
    return None


def _factors(shown: Array, at: Array) -> Iterator[float]:
    """What the columns `at` [K, C] may have been multiplied by to be those `shown`: by nothing, else by what makes one
    of them the largest that is shown, the nearest first.
    """
    yield 1.0
    largest = shown[:, (shown * shown).sum(0).argmax()]
    squares = (at * at).sum(0)
    factors = np.divide(largest @ at, squares, out=np.zeros_like(squares), where=squares > 0)
    distance = np.abs(factors * at - largest[:, None]).max(0)
    yield from (float(factors[column]) for column in distance.argsort() if distance[column] <= TOLERANCE)


def table_in(graph: ir.Graph, label: str, array: Array, rotation: Rotation) -> ir.Value:
    """A table as a constant of the graph, in the type of what is turned; equal tables are one constant."""
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
