"""Products with weights that may be quantised, and detection of routers.

Packing of weights that keep their stored integers, and the reordering of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from partita.errors import UnsupportedModelError, UsageError
from partita.export.passes.base import only_consumer
from partita.export.quantise.forms import Place
from partita.export.quantise.plan import Plan, supports_stored_lookup
from partita.export.quantise.write import experts
from partita.export.quantise.write.stored_integers import AsStored, NotAsStoredError, StoredPacking
from partita.export.weights.origins import ReorderedOrigin
from partita.export.weights.sources import FloatSource, StoredPart, weight_part

ROUTER_STEPS = 12
"""Maximum nodes between a router's product and the choice of experts."""
BEST = frozenset({"TopK", "ArgMax"})
CHOOSING = BEST | {"MoE", "QMoE"}
"""Operators that select by scores."""
SCORING = frozenset(
    {
        *("Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Tanh", "Exp", "Sqrt", "Clip", "Relu"),
        *("Cast", "Add", "Mul", "Div", "Sub", "Neg", "Where", "ReduceMax", "ReduceSum", "Max", "Min"),
        *("Reshape", "Identity", "Squeeze", "Unsqueeze", "Expand", "Slice", "Split", "Transpose", "Concat"),
        *("Gather", "ScatterElements"),
    }
)
"""Operators on a router's scores before the selection. Other products have a norm or product before any selection."""


def weight_of_product(node: ir.Node) -> FloatSource | None:
    """The weight [N, K] of a product x W^T; None for other nodes."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = weight_part(node.inputs[1])
    plain = None if weight is None else _matrix(weight)
    if plain is None:
        return None
    turned = False
    if node.op_type == "Gemm":
        numbers = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        fits = bias is None or (bias.shape is not None and bias.shape.rank() == 1)
        if numbers != [1.0, 1.0] or node.attributes.get_int("transA", 0) != 0 or not fits:
            return None
        turned = bool(node.attributes.get_int("transB", 0))
    return plain if turned else replace(plain, origin=plain.origin.permuted((1, 0)))


def views_around(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The Reshapes around a Gemm that flatten and restore the token axes; None unless both exist."""
    hidden, last = node.inputs[0], only_consumer(node.outputs[0])
    first = None if hidden is None else hidden.producer()
    if node.op_type != "Gemm" or first is None or last is None or {first.op_type, last.op_type} != {"Reshape"}:
        return None
    given, flat, made = first.inputs[0], first.outputs[0].shape, last.outputs[0].shape
    if given is None or given.shape is None or flat is None or made is None or node.outputs[0].shape is None:
        return None
    sizes, becomes = list(given.shape), list(made)
    known = all(isinstance(size, int) or size.value is not None for size in sizes)
    widths = sizes[-1] == flat[-1] and becomes[-1] == node.outputs[0].shape[-1]
    return (first, last) if known and widths and sizes[:-1] == becomes[:-1] else None


def _matrix(weight: StoredPart) -> FloatSource | None:
    """A matrix as stored, or a stack as one; None for other weights."""
    if weight.shape.rank() != 2 or not isinstance(weight.source, FloatSource):
        return None
    if not weight.is_reshaped:
        return weight.source
    shape = weight.part.shape
    as_one = len(shape) == 3 and tuple(weight.shape.numpy()) == (shape[0] * shape[1], shape[2])
    return experts.flatten_stack(weight.source) if as_one else None


def routes(node: ir.Node) -> bool:
    """Whether the output of `node` chooses experts: a TopK or an operator on experts follows shortly."""
    near = {node}
    for _ in range(ROUTER_STEPS):
        uses = (use for each in near for output in each.outputs for use in output.uses())
        # of the inputs of an operator on experts, only the scores decide
        near = {use.node for use in uses if use.node.op_type in SCORING | BEST or use.idx == 1}
        if any(each.op_type in CHOOSING for each in near):
            return True
        near = {each for each in near if each.op_type in SCORING}
    return False


ORDERED = "ordered"
INSTEAD = (
    "add `requantise=True` to quantise the weights a second time, or set `precision` to fp16 or bf16 to keep "
    "their values"
)
"""The remedy for a weight that cannot be packed as stored."""
PACKED_ATTENTION = "packed_attention"
"""The pass that joins the query, key and value projections."""


def taken_by_product(plan: Plan, modules: Iterable[str], plain: FloatSource) -> StoredPacking:
    """The packing of a product's weight as stored. Raises UnsupportedModelError, UsageError for a setting."""
    stored, form = _of(plan), plan.form
    try:
        taken = stored.take([plain.origin], whole_rows=form.one_scale)
        grid = taken.packing.grid
        if form.one_scale and not (grid.symmetric and grid.bits in form.bits):
            raise NotAsStoredError(f"{form.summary} supports only 8 bits without zero points")
    except NotAsStoredError as error:
        apart = ""
        if len(plain.tensors) > 1:
            apart = f"; `without_pass={PACKED_ATTENTION}` keeps queries, keys and values apart"
        raise UnsupportedModelError(
            f"{plain.checkpoint.location}: {plain.name} cannot be stored unchanged: {error}{apart}; {INSTEAD}"
        ) from error
    _check_said(plan, modules, plain, taken)
    return taken


def _check_said(plan: Plan, modules: Iterable[str], plain: FloatSource, taken: StoredPacking) -> None:
    """Raise UsageError where a setting requests other bits than the stored ones."""
    setting, bits = plan.setting(modules), taken.packing.grid.bits
    if setting is not None and setting.bits not in (None, bits):
        raise UsageError(
            f"`keep`: {plain.name} is stored in {bits} bits, and would be quantised a second time; add "
            "`requantise=True`, or omit it"
        )


def taken_by_look_up(plan: Plan, modules: Iterable[str], plain: FloatSource) -> StoredPacking | None:
    """The packing of an embedding; None where it stays floats, because its form does not look up these integers."""
    try:
        taken = _of(plan).take([plain.origin])
    except NotAsStoredError:
        return None
    _check_said(plan, modules, plain, taken)
    reordered_rows = any(isinstance(origin, ReorderedOrigin) for origin in taken.origins)
    return None if reordered_rows or not supports_stored_lookup(plan.form, taken.packing) else taken


def taken_by_experts(plan: Plan, modules: Iterable[str], weights: Sequence[FloatSource]) -> StoredPacking | None:
    """The packing of one layer's stacks for one operator; None where it does not support them."""
    if plan.form.experts is None or not plan.kernels.experts:
        return None
    try:
        taken = _of(plan).take([plain.origin for plain in weights])
    except NotAsStoredError as error:
        raise UnsupportedModelError(
            f"{weights[0].checkpoint.location}: {weights[0].name} and {weights[1].name} cannot be stored "
            f"unchanged: {error}; {INSTEAD}"
        ) from error
    _check_said(plan, modules, weights[0], taken)
    return None if any(isinstance(origin, ReorderedOrigin) for origin in taken.origins) else taken


def reordered(place: Place, hidden: ir.Value, order: tuple[int, ...]) -> ir.Value:
    """Activations [..., K] with column `order[i]` at i; shared by all products with that order."""
    key = (ORDERED, (hidden, order))
    if key not in place.shared:
        number = sum(1 for word, _ in place.shared if word == ORDERED)
        index = place.constant(np.array(order, np.int64), f"columns.{number}")
        made = place.node("Gather", [hidden, index], dtype=hidden.dtype, shape=hidden.shape, attributes={"axis": -1})
        place.shared[key] = (made,)
    return place.shared[key][0]


def _of(plan: Plan) -> AsStored:
    assert plan.stored is not None
    return plan.stored
