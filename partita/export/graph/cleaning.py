"""Exact clean-up of torch's graph.

onnxscript's `optimize` also drops `x + c` for |c| <= 1e-8 and `x * c` for c within 1e-5 of 1, e.g. the epsilon of a
norm. Only structural rewrites run here.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    cast_constant_of_shape_rule,
    cast_constant_of_shape_without_value_rule,
    collapse_slice2_rule,
    collapse_slice_rule,
    materialize_reshape_shape_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)

EXACT_RULES = (
    cast_constant_of_shape_rule,
    cast_constant_of_shape_without_value_rule,
    collapse_slice_rule,
    collapse_slice2_rule,
    materialize_reshape_shape_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)
"""Rewrites of shapes and casts that change no values."""
ROUNDS = 2


def clean(model: ir.Model) -> None:
    """Inline functions, fold constants, remove redundant nodes and name constants, in place. Needs no weight data."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True)
        rewrite(model, pattern_rewrite_rules=EXACT_RULES)
        common.RemoveUnusedNodesPass()(model)
    for last in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        last(model)
