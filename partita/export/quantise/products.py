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
from partita.export.quantise import Packing
from partita.export.quantise.forms import DOMAIN, PLAIN_EXPERTS, Place
from partita.export.quantise.plan import Plan, Use
from partita.export.quantise.stored_integers import NotAsStoredError
from partita.export.weights.origins import FlattenedOrigin, Origin, ReorderedOrigin
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
    transposed = False
    if node.op_type == "Gemm":
        numbers = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        fits = bias is None or (bias.shape is not None and bias.shape.rank() == 1)
        if numbers != [1.0, 1.0] or node.attributes.get_int("transA", 0) != 0 or not fits:
            return None
        transposed = bool(node.attributes.get_int("transB", 0))
    return plain if transposed else replace(plain, origin=plain.origin.permuted((1, 0)))


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
    return flatten_stack(weight.source) if as_one else None


def expert_stacks(node: ir.Node) -> tuple[FloatSource, FloatSource] | None:
    """The weights [E * F, H] and [E * H, I] of a MoE node; None for other nodes."""
    if (node.domain, node.op_type) != (DOMAIN, PLAIN_EXPERTS) or any(value is not None for value in node.inputs[6:]):
        return None
    found = []
    for part in (weight_part(node.inputs[index]) for index in (2, 4)):
        if part is None or part.shape.rank() != 3 or part.is_reshaped or not isinstance(part.source, FloatSource):
            return None
        found.append(flatten_stack(part.source))
    return found[0], found[1]


def flatten_stack(plain: FloatSource) -> FloatSource:
    """A stack [E, N, K] as [E * N, K]."""
    return replace(plain, origin=FlattenedOrigin(plain.origin))


def selected_tensors(models: Iterable[ir.Model]) -> frozenset[str]:
    """Tensors of stacks from which a graph selects matrices with Gather: unquantised, to be stored once."""
    found: set[str] = set()
    for node in (node for model in models for node in model.graph):
        weight = weight_part(node.inputs[0]) if node.op_type == "Gather" and node.inputs else None
        if weight is not None and weight.shape.rank() > 2:
            found |= weight.source.tensors
    return frozenset(found)


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


def stored_packing(
    plan: Plan, modules: Iterable[str], weights: Sequence[FloatSource], use: Use
) -> tuple[Packing, tuple[Origin, ...]] | None:
    """The packing and origins of an operator's weights as stored; None where its form does not read these integers.

    Raises UnsupportedModelError where they cannot be packed, UsageError where a setting requests other bits.
    """
    stored, first = plan.stored, weights[0]
    assert stored is not None
    if use == "experts" and not plan.kernels.experts:
        return None
    try:
        packing, origins = stored.take([plain.origin for plain in weights])
    except NotAsStoredError as error:
        if use == "lookup":
            return None
        joined = use == "product" and len(first.tensors) > 1
        separate = "; `without_pass=packed_attention` keeps queries, keys and values apart" if joined else ""
        raise UnsupportedModelError(
            f"{first.checkpoint.location}: {first.name} cannot be stored unchanged: {error}{separate}; add "
            "`requantise=True` to quantise the weights a second time, or set `precision` to fp16 or bf16 to keep "
            "their values"
        ) from error
    setting = plan.setting(modules)
    if setting is not None and setting.bits not in (None, packing.grid.bits):
        raise UsageError(
            f"`keep`: {first.name} is stored in {packing.grid.bits} bits, and would be quantised a second time; add "
            "`requantise=True`, or omit it"
        )
    in_order = not any(isinstance(origin, ReorderedOrigin) for origin in origins)
    takes = use == "product" or (in_order and (use == "experts" or plan.looks_up(packing)))
    return (packing, origins) if takes else None


def reordered(place: Place, hidden: ir.Value, order: tuple[int, ...]) -> ir.Value:
    """Activations [..., K] with column `order[i]` at i; shared by all products with that order."""
    key = hidden, order
    if key not in place.shared:
        numbers = {name for name in place.graph.initializers if name.startswith("columns.")}
        index = place.constant(np.array(order, np.int64), f"columns.{len(numbers)}")
        made = place.node("Gather", [hidden, index], dtype=hidden.dtype, shape=hidden.shape, attributes={"axis": -1})
        place.shared[key] = (made,)
    return place.shared[key][0]
