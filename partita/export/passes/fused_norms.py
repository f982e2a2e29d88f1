"""One operator for a norm, whatever it is written with.

    x ─ Cast ─ Pow ─ ReduceMean ─ Add(eps) ─ Sqrt ─ Reciprocal ─ Mul(x) ─ Mul(1 + w) ─ Cast ─ y     before, for example
    x ─ SimplifiedLayerNormalization(1 + w, written so) ─ y                                        after, beside gqa
    x ─ RMSNormalization(1 + w, written so) ─ y                                                    after, beside onnx24

A subgraph is a norm when it computes one: over the last axis, from x alone, with a scale that is a weight, a weight
times a factor plus an offset, or no weight at all. With the mean taken off it is a LayerNormalization, whose shift is a
weight. That is found by running the nodes on random numbers in float64, with random numbers in the place of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from partita.export.passes.arithmetic import UnknownError, computed
from partita.export.passes.base import Pass, PassContext, over
from partita.export.passes.regions import above, below, last_size, nodes_between, numbers_in, same_type, weights_in
from partita.export.passes.rewriting import added, constant, discard, drop_unused_initializers, stand_in
from partita.export.weight_sources import stored

Array = npt.NDArray[Any]
BEFORE = frozenset({"Abs", "Cast", "Mul", "Pow", "Sub"})
AFTER = frozenset({"Add", "Cast", "Div", "Mul", "Pow", "Reciprocal", "Sqrt", "Sub"})
"""Operators between the input of a norm and its ReduceMean, and from there to its output."""
LONGEST_BEFORE, LONGEST_AFTER, MOST_NODES = 4, 9, 24
LARGEST_EPSILON = 1e-2
NARROWEST = 4
"""The last axis must have so many elements for random numbers to tell a weight, a factor and an offset apart."""
TOLERANCE = 1e-7
"""Of float64 arithmetic with constants that are float32."""


@dataclass(frozen=True, slots=True)
class Norm:
    """What a subgraph computes: (x - mean) / sqrt(variance + epsilon) * scale + shift, or without the mean."""

    centred: bool
    epsilon: float
    weight: ir.Value | None
    factor: float
    offset: float
    """The scale is weight * factor + offset."""
    scale: Array | None
    """[D], where there is no weight."""
    shift: ir.Value | None


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every norm that the target has an operator for; returns how many."""
    if context.fused == "none":
        return 0
    count = 0
    for node in [n for n in model.graph if n.op_type == "ReduceMean"]:
        if node.graph is model.graph:
            with over(node):
                count += _rewritten(model.graph, node, context)
    drop_unused_initializers(model.graph)
    return count


def _rewritten(graph: ir.Graph, reduce: ir.Node, context: PassContext) -> bool:
    """Rewrite the norm around a ReduceMean; False where there is none."""
    for source, result, nodes in _candidates(reduce):
        norm = recognised(nodes, source, result)
        if norm is not None:
            return _put(graph, source, result, norm, context)
    return False


def _candidates(reduce: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, list[ir.Node]]]:
    """Input, output and nodes of what may be a norm, the largest first."""
    first = reduce.inputs[0]
    if first is None or first.shape is None or not _takes_last_axis(reduce, first.shape.rank()):
        return
    sources = above(first, BEFORE, LONGEST_BEFORE)[::-1]
    results = below(reduce.outputs[0], AFTER, LONGEST_AFTER)[::-1]
    for source in sources:
        for result in results:
            if not same_type(source, result) or result.is_graph_output():
                continue
            nodes = nodes_between({source}, result, MOST_NODES)
            if nodes is not None and reduce in nodes:
                yield source, result, nodes


def _takes_last_axis(reduce: ir.Node, rank: int) -> bool:
    axes = constant(reduce.inputs[1]) if len(reduce.inputs) > 1 else list(reduce.attributes.get_ints("axes", []))
    return axes in ([-1], [rank - 1]) and reduce.attributes.get_int("keepdims", 1) == 1


def recognised(nodes: Sequence[ir.Node], source: ir.Value, result: ir.Value) -> Norm | None:
    """The norm that `nodes` compute; None when it is none."""
    width, weights = last_size(source), weights_in(nodes)
    if width is None or width < NARROWEST or any(list(w.shape or ()) != [width] for w in weights):
        return None
    random = np.random.default_rng(0)
    given = {weight: random.uniform(0.5, 2.0, width) for weight in weights}
    assert source.shape is not None
    # Rows of several sizes, down to where an epsilon decides.
    rows = random.standard_normal((6, width)) * np.array([[1.0], [3.0], [1e-1], [1e-2], [1e-3], [1e-4]]) + 1e-3
    rows = rows.reshape(*[1] * (source.shape.rank() - 2), 6, width)
    try:
        found = computed(nodes, {**given, source: rows})[result]
    except UnknownError:
        return None
    if found.shape != rows.shape or not np.isfinite(found).all():
        return None
    epsilons = sorted({0.0, *(number for number in numbers_in(nodes) if 0 < number < LARGEST_EPSILON)})
    for centred in (False, True):
        for epsilon in epsilons:
            normal = _normal(rows, epsilon, centred=centred).reshape(-1, width)
            norm = _with_scale(normal, found.reshape(-1, width), given, centred=centred, epsilon=epsilon)
            if norm is not None:
                return norm
    return None


def _normal(rows: Array, epsilon: float, *, centred: bool) -> Array:
    rows = rows - rows.mean(-1, keepdims=True) if centred else rows
    return np.asarray(rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + epsilon))


def _with_scale(
    normal: Array, found: Array, given: dict[ir.Value, Array], *, centred: bool, epsilon: float
) -> Norm | None:
    """The norm whose normal rows [R, D] become `found` by a scale and a shift of `given`; None when there is none."""
    for shift in (None, *given):
        rest = [weight for weight in given if weight is not shift]
        moved = found if shift is None else found - given[shift]
        scale = (normal * moved).sum(0) / (normal * normal).sum(0)
        if len(rest) > 1 or (shift is not None and not centred) or not _equal(normal * scale, moved):
            continue
        if not rest:
            return Norm(centred, epsilon, None, 0.0, 0.0, scale, shift)
        values = given[rest[0]]
        (factor, offset), *_ = np.linalg.lstsq(np.stack([values, np.ones_like(values)], 1), scale, rcond=None)
        factor, offset = (float(np.float32(round(number, 9))) for number in (factor, offset))
        if _equal(values * factor + offset, scale):
            return Norm(centred, epsilon, rest[0], factor, offset, None, shift)
    return None


def _equal(one: Array, other: Array) -> bool:
    return bool(np.abs(one - other).max() <= TOLERANCE * max(1e-3, np.abs(other).max()))


def _put(graph: ir.Graph, source: ir.Value, result: ir.Value, norm: Norm, context: PassContext) -> bool:
    """Put the operator in the place of the nodes; False where the target does not take it."""
    scale, shift = _scale(source, norm), norm.shift
    if scale is None or (shift is not None and shift.dtype != source.dtype):
        return False
    operator = "SimplifiedLayerNormalization" if context.fused == "contrib" else "RMSNormalization"
    attributes = {"axis": -1, "epsilon": norm.epsilon, "stash_type": 1}
    inputs = [source, scale, *([shift] if shift is not None else [])]
    new = ir.node("LayerNormalization" if norm.centred else operator, inputs, attributes)
    if not context.takes(new):
        discard(new)
        return False
    if scale.const_value is not None and graph.initializers.get(scale.name or "") is not scale:
        new.replace_input_with(1, added(graph, scale.const_value, scale.name or ""))
    stand_in(graph, result, new)
    return True


def _scale(source: ir.Value, norm: Norm) -> ir.Value | None:
    """The scale as a value of the source's type, which may not be in the graph yet; None where it cannot be written."""
    assert source.dtype is not None
    if norm.weight is None:
        assert norm.scale is not None
        plain = bool((np.abs(norm.scale - 1.0) < TOLERANCE).all())
        numbers = np.ones_like(norm.scale) if plain else norm.scale
        name = f"ones.{numbers.size}.{source.dtype.name}" if plain else f"{source.name}.scale"
        return _value(ir.tensor(numbers.astype(source.dtype.numpy()), dtype=source.dtype, name=name), name)
    weight = stored(norm.weight)
    assert weight is not None
    if (norm.factor, norm.offset, weight.dtype) == (1.0, 0.0, source.dtype):
        return norm.weight
    written = weight.rescaled(norm.factor, norm.offset, source.dtype)
    return None if written is None else _value(written, f"{norm.weight.name}.scale")


def _value(tensor: ir.TensorProtocol, name: str) -> ir.Value:
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    return ir.Value(name=name, shape=shape, type=kind, const_value=tensor)


PASS = Pass("fused_norms", run)
