"""One operator for a norm.

    x ─ Cast ─ Pow ─ ReduceMean ─ Add(eps) ─ Sqrt ─ Reciprocal ─ Mul(x) ─ Mul(1 + w) ─ Cast ─ y     before, for example
    x ─ SimplifiedLayerNormalization(1 + w, stored) ─ y                                             after, with gqa
    x ─ RMSNormalization(1 + w, stored) ─ y                                                         after, with onnx24

    x ─ partita::RMSNorm(w, offset=1) ─ y                                                           before, likewise

A norm that the trace recognised is a placeholder; others are found by their values. A norm is over the last axis of x.
Its scale is a weight, a weight times a factor plus an offset, or absent. With the mean subtracted it is a
LayerNormalization, whose shift is a weight.

Rows divided by their length are norms, too: x / sqrt(sum(x * x) + eps) has eps / D and the scale 1 / sqrt(D).
x / max(|x|, floor) has floor * floor / D, if the floor is at most 2e-7. Rows longer than 2,000 times the floor are then
equal to 1e-7, zero rows stay zero, and rows between get shorter by at most a third. A scale per head, [H, D], stays
a product after the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from partita.export.passes.arithmetic import (
    UnknownError,
    above,
    below,
    compute_values,
    last_size,
    numbers_in,
    subgraphs_around,
    weights_in,
)
from partita.export.passes.base import TracedGraph, added, constant, node_pass, stand_in
from partita.export.trace import DOMAIN, RMS_NORM
from partita.export.weights.origins import RescaledOrigin
from partita.export.weights.sources import weight_part

Array = npt.NDArray[Any]
REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceL2"})
BEFORE = frozenset({"Abs", "Cast", "Mul", "Pow", "Sub"})
AFTER = frozenset({"Add", "Cast", "Clip", "Div", "Expand", "Max", "Mul", "Pow", "Reciprocal", "Sqrt", "Sub"})
"""Operators between the input of a norm and its reduction, and from there to its output."""
LONGEST_BEFORE, LONGEST_AFTER, MOST_NODES = 4, 9, 24
LARGEST_EPSILON = 1e-2
SMALLEST_EPSILON = float(np.finfo(np.float32).tiny)
NARROWEST = 4
"""Minimum size of the last axis, so that random numbers distinguish weight, factor and offset."""
TOLERANCE = 1e-7
"""For float64 arithmetic with float32 constants."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of a subgraph: (x - mean) / sqrt(variance + epsilon) * scale + shift, or without the mean."""

    is_centred: bool
    epsilon: float
    weight: ir.Value | None
    factor: float
    offset: float
    """The scale is weight * factor + offset."""
    scale: Array | None
    """[D], without a weight."""
    shift: ir.Value | None


def _rewritten(graph: ir.Graph, reduce: ir.Node, traced: TracedGraph) -> bool:
    """Rewrite a placeholder, or the norm around a reduction; False where there is none."""
    if reduce.domain == DOMAIN:
        source, weight = (*reduce.inputs, None)[:2]
        assert source is not None
        epsilon, offset = (reduce.attributes.get_float(name, 0.0) for name in ("epsilon", "offset"))
        ones = None if weight is not None else np.ones(last_size(source) or 1)
        placed = Norm(False, epsilon, weight, 1.0, offset, ones, None)
        return _replace_nodes(graph, source, reduce.outputs[0], placed, traced)
    first = reduce.inputs[0]
    if first is None or first.shape is None or not _takes_last_axis(reduce, first.shape.rank()):
        return False
    sources = above(first, BEFORE, LONGEST_BEFORE)[::-1]
    results = below(reduce.outputs[0], AFTER, LONGEST_AFTER)[::-1]
    for source, result, nodes in subgraphs_around(reduce, sources, results, MOST_NODES):
        norm = match_norm(nodes, source, result)
        if norm is not None:
            return _replace_nodes(graph, source, result, norm, traced)
    return False


def _takes_last_axis(reduce: ir.Node, rank: int) -> bool:
    axes = constant(reduce.inputs[1]) if len(reduce.inputs) > 1 else list(reduce.attributes.get_ints("axes", []))
    return axes in ([-1], [rank - 1]) and reduce.attributes.get_int("keepdims", 1) == 1


def match_norm(nodes: Sequence[ir.Node], source: ir.Value, result: ir.Value) -> Norm | None:
    """The norm that `nodes` compute; None for other functions."""
    width, weights = last_size(source), weights_in(nodes)
    if width is None or width < NARROWEST or any(list(w.shape or ()) != [width] for w in weights):
        return None
    random = np.random.default_rng(0)
    given = {weight: random.uniform(0.5, 2.0, width) for weight in weights}
    assert source.shape is not None
    rows = _rows(random, numbers := [n for n in numbers_in(nodes) if 0 < n < LARGEST_EPSILON], width)
    rows = rows.reshape(*[1] * (source.shape.rank() - 2), *rows.shape)
    try:
        found = compute_values(nodes, {**given, source: rows})[result]
    except UnknownError:
        return None
    if found.shape != rows.shape or not np.isfinite(found[..., :-1, :]).all():
        return None
    if np.isfinite(found[..., -1, :]).all():
        # added to the mean or to the sum of squares, or a floor under the root of the sum
        each = [*numbers, *(number / width for number in numbers), *(number * number / width for number in numbers)]
        epsilons = [epsilon for epsilon in dict.fromkeys(each) if epsilon >= SMALLEST_EPSILON]
    else:
        epsilons, rows, found = [0.0], rows[..., :-1, :], found[..., :-1, :]
    for centred in (False, True):
        x = rows - rows.mean(-1, keepdims=True) if centred else rows
        for epsilon in epsilons:
            normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
            both = normal.reshape(-1, width), found.reshape(-1, width)
            norm = _with_scale(*both, given, centred=centred, epsilon=epsilon)
            if norm is not None:
                return norm
    return None


def _rows(random: np.random.Generator, numbers: Sequence[float], width: int) -> Array:
    """Rows with sizes at which each of `numbers` matters as an epsilon, and a row of zeros."""
    sizes = [1.0, 3.0, 1e-1, 1e-2, *(math.sqrt(each) for number in numbers for each in (number, number / width))]
    centres = [1e-1, 1e-1, 1e-2, 1e-3, *[0.0] * 2 * len(numbers)]
    drawn = random.standard_normal((len(sizes), width)) * np.array(sizes)[:, None] + np.array(centres)[:, None]
    return np.concatenate([drawn, np.zeros((1, width))])


def _with_scale(
    normal: Array, found: Array, given: dict[ir.Value, Array], *, centred: bool, epsilon: float
) -> Norm | None:
    """The norm whose normalised rows [R, D] become `found` with a scale and a shift of `given`; None without one."""
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


def _replace_nodes(graph: ir.Graph, source: ir.Value, result: ir.Value, norm: Norm, traced: TracedGraph) -> bool:
    """Replace the nodes by the operator; False where the target does not support it."""
    scale, shift = _scale(graph, source, norm), norm.shift
    if scale is None or (shift is not None and shift.dtype != source.dtype):
        return False
    operator = "SimplifiedLayerNormalization" if traced.fused == "contrib" else "RMSNormalization"
    attributes = {"axis": -1, "epsilon": norm.epsilon, "stash_type": 1}
    inputs = [source, scale, *([shift] if shift is not None else [])]
    new = ir.node("LayerNormalization" if norm.is_centred else operator, inputs, attributes)
    if not traced.accepts(new):
        return False
    stand_in(graph, result, new)
    return True


def _scale(graph: ir.Graph, source: ir.Value, norm: Norm) -> ir.Value | None:
    """The scale as a constant of the source's dtype; None where it cannot be stored."""
    assert source.dtype is not None
    if norm.weight is None:
        assert norm.scale is not None
        number, size = float(np.float32(norm.scale.mean())), norm.scale.size
        number = 1.0 if abs(number - 1.0) < TOLERANCE else number
        if not (np.abs(norm.scale - number) < TOLERANCE * abs(number)).all():
            return None
        name = f"{'ones' if number == 1.0 else f'all.{number:.8g}'}.{size}.{source.dtype.name}"
        numbers = np.full(size, number).astype(source.dtype.numpy())
        return added(graph, ir.tensor(numbers, dtype=source.dtype, name=name), name)
    weight = weight_part(norm.weight)
    if weight is None:
        return None
    if (norm.factor, norm.offset, weight.dtype) == (1.0, 0.0, source.dtype):
        return norm.weight
    same = (norm.factor, norm.offset) == (1.0, 0.0)
    written = weight.changed(
        lambda origin: origin if same else RescaledOrigin(origin, norm.factor, norm.offset), source.dtype
    )
    return None if written is None else added(graph, written, f"{norm.weight.name}.scale")


PASS = node_pass("fused_norms", {*REDUCTIONS, RMS_NORM}, _rewritten, "contrib", "standard")
