"""Fuse a residual addition with the norm that reads it.

    a, b [B, S, H] ─ Add ─ sum ─┬─ SimplifiedLayerNormalization ─ y             before; LayerNormalization likewise
                                └─ ...
    a, b ─ SkipSimplifiedLayerNormalization ─┬─ y                               after, with gqa
                                             └─ sum ─ ...

A bias [H] of one of the two is included.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.arithmetic import same_type
from partita.export.passes.base import TracedGraph, node_pass, only_consumer, remove_unread, take_names

NORMS = ("SimplifiedLayerNormalization", "LayerNormalization")
SUM = 3
"""Output index of the sum in the fused operators."""


def _rewritten(graph: ir.Graph, norm: ir.Node, traced: TracedGraph) -> bool:
    """Rewrite the sum before a norm; False where there is none, or the target has no fused operator."""
    total = norm.inputs[0]
    add = None if total is None else total.producer()
    if norm.domain or total is None or add is None or add.op_type != "Add" or not _is_over_last_axis(norm, total):
        return False
    parts = [value for value in add.inputs if value is not None and same_type(value, total)]
    if len(parts) != 2 or total.is_graph_output() or norm.outputs[0].is_graph_output():
        return False
    parts, bias = _without_bias(parts)
    weights = list(norm.inputs[1:])
    beta = [] if norm.op_type == "SimplifiedLayerNormalization" else [weights[1] if len(weights) > 1 else None]
    inputs = [*parts, weights[0], *beta, *([bias] if bias is not None else [])]
    wants_sum = len(total.uses()) > 1
    new = ir.Node(
        "com.microsoft",
        f"Skip{norm.op_type}",
        inputs,
        [ir.AttrFloat32("epsilon", norm.attributes.get_float("epsilon", 1e-5))],
        outputs=[ir.Value(), ir.Value(name=""), ir.Value(name=""), ir.Value()][: SUM + 1 if wants_sum else 1],
    )
    if not traced.accepts(new):
        return False
    take_names(new, norm)
    graph.insert_before(add, new)
    for before, after in ((norm.outputs[0], new.outputs[0]), *([(total, new.outputs[SUM])] if wants_sum else [])):
        after.shape, after.type = before.shape, before.type
        before.replace_all_uses_with(after)
    remove_unread(graph, [norm, add])
    return True


def _is_over_last_axis(norm: ir.Node, total: ir.Value) -> bool:
    """Whether a norm of [B, S, H] has the axis, the internal precision and the outputs of the fused operators."""
    return (
        total.shape is not None
        and total.shape.rank() == 3
        and norm.attributes.get_int("axis", -1) in (-1, 2)
        and norm.attributes.get_int("stash_type", 1) == 1
        and not any(out.uses() or out.is_graph_output() for out in norm.outputs[1:])
    )


def _without_bias(parts: list[ir.Value]) -> tuple[list[ir.Value], ir.Value | None]:
    """The two terms without an added bias [H], and the bias."""
    for index, part in enumerate(parts):
        add = part.producer()
        if add is None or add.op_type != "Add" or only_consumer(part) is None or part.shape is None:
            continue
        for value, bias in (add.inputs, add.inputs[::-1]):
            is_bias = bias is not None and bias.const_value is not None and bias.shape == ir.Shape([part.shape[-1]])
            if value is not None and bias is not None and is_bias and same_type(value, part):
                return [value if i == index else other for i, other in enumerate(parts)], bias
    return parts, None


PASS = node_pass("skip_norms", NORMS, _rewritten, "contrib")
