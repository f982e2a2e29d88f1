"""One operator for an activation.

    x ─┬─ Sigmoid ─┬─ Mul ─ y                                           before, for example
       └───────────┘
    x ─ QuickGelu(alpha=1) ─ y                                          after, with gqa
    x ─ Swish ─ y                                                       after, with onnx24, where there is a kernel

The result depends on x alone, element by element, and equals the activation on a grid of numbers. Supported: SiLU,
GELU by the error function or tanh, and x * sigmoid(1.702 x).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import Array, UnknownError, above, below, compute_values, subgraphs_around
from partita.export.passes.base import TracedGraph, node_pass, stand_in

CURVES = frozenset({"Sigmoid", "Tanh", "Erf"})
"""Every known activation contains one of these."""
PLAIN = frozenset({"Add", "Cast", "Div", "Mul", "Neg", "Pow", "Sub"})
LONGEST_BEFORE, LONGEST_AFTER, MOST_NODES = 6, 5, 14
GRID = np.concatenate([np.linspace(-12.0, 12.0, 961), np.linspace(-0.1, 0.1, 101)])
TOLERANCE, HALF_TOLERANCE = 2e-6, 4e-4
"""Maximum difference on the grid. `HALF_TOLERANCE` is for graphs with constants rounded to 16 bits; it is below the
difference between the two forms of GELU (4.7e-4)."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of one number, and its fused nodes in order of preference, given the operator set."""

    function: Callable[[Array], Array]
    contrib: Callable[[int], ir.Node]
    standard: Callable[[int], ir.Node | None]


def _quick(alpha: float) -> Callable[[int], ir.Node]:
    return lambda opset: ir.Node("com.microsoft", "QuickGelu", [None], [ir.AttrFloat32("alpha", alpha)])


def _gelu(approximate: str, before: str) -> Callable[[int], ir.Node]:
    """Gelu of ONNX since operator set 20, of ONNX Runtime before."""
    return lambda opset: (
        ir.node("Gelu", [None], {"approximate": approximate})
        if opset >= 20
        else ir.Node("com.microsoft", before, [None])
    )


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


KNOWN = (
    Activation(lambda x: x * _sigmoid(x), _quick(1.0), lambda opset: ir.node("Swish", [None])),
    Activation(
        lambda x: x * _sigmoid(1.702 * x), _quick(1.702), lambda opset: ir.node("Swish", [None], {"alpha": 1.702})
    ),
    Activation(
        lambda x: 0.5 * x * (1.0 + np.vectorize(math.erf)(x / np.sqrt(2.0))),
        _gelu("none", "Gelu"),
        _gelu("none", "Gelu"),
    ),
    Activation(
        lambda x: 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))),
        _gelu("tanh", "FastGelu"),
        _gelu("tanh", "FastGelu"),
    ),
)


def _rewritten(graph: ir.Graph, curve: ir.Node, traced: TracedGraph) -> bool:
    """Rewrite the activation around a node; False where there is none."""
    if curve.inputs[0] is None:
        return False
    results = below(curve.outputs[0], PLAIN, LONGEST_AFTER)[:0:-1]  # the largest first, without the curve's own
    sources = above(curve.inputs[0], PLAIN, LONGEST_BEFORE)
    for source, result, nodes in subgraphs_around(curve, sources, results, MOST_NODES):
        found = match_activation(nodes, source, result)
        if found is None:
            continue
        new = (found.contrib if traced.fused == "contrib" else found.standard)(traced.spec.opset)
        if new is None:
            return False
        new.replace_input_with(0, source)
        if not traced.accepts(new):
            return False
        stand_in(graph, result, new)
        return True
    return False


def match_activation(nodes: list[ir.Node], source: ir.Value, result: ir.Value) -> Activation | None:
    """The known activation that `nodes` compute; None for other functions."""
    try:
        found = compute_values(nodes, {source: GRID})[result]
    except UnknownError:
        return None
    if found.shape != GRID.shape:
        return None
    half = source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    differences = [float(np.abs(found - each.function(GRID)).max()) for each in KNOWN]
    best = int(np.argmin(differences))
    return KNOWN[best] if differences[best] <= (HALF_TOLERANCE if half else TOLERANCE) else None


PASS = node_pass("activations", CURVES, _rewritten, "contrib", "standard")
