"""Products with weights that may be quantised, and detection of routers."""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.rewriting import only_consumer
from partita.export.quantise.write import experts
from partita.export.weights.sources import Plain, StoredPart, stored

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


def weight_of_product(node: ir.Node) -> Plain | None:
    """The weight [N, K] of a product x W^T; None for other nodes."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = stored(node.inputs[1])
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
    return plain if turned else plain.permuted((1, 0))


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


def _matrix(weight: StoredPart) -> Plain | None:
    """A matrix as stored, or a stack as one; None for other weights."""
    if weight.shape.rank() != 2 or not isinstance(weight.source, Plain):
        return None
    if not weight.is_reshaped:
        return weight.source
    shape = weight.part.shape
    as_one = len(shape) == 3 and tuple(weight.shape.numpy()) == (shape[0] * shape[1], shape[2])
    return experts.flattened(weight.source) if as_one else None


def routes(node: ir.Node) -> bool:
    """Whether the output of `node` chooses experts: a TopK or an operator on experts follows shortly."""
    near = {node}
    for _ in range(ROUTER_STEPS):
        uses = (use for each in near for output in each.outputs for use in output.uses())
        near = {use.node for use in uses if _leads_to_choice(use.node, use.idx)}
        if any(each.op_type in CHOOSING for each in near):
            return True
        near = {each for each in near if each.op_type in SCORING}
    return False


def _leads_to_choice(node: ir.Node, index: int) -> bool:
    """Whether input `index` of `node` may decide which experts are chosen.

    For an operator on experts, only its scores do.
    """
    return node.op_type in SCORING or node.op_type in BEST or (node.op_type in CHOOSING and index == 1)
