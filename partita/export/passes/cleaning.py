"""Clean up a traced graph: exact structural rewrites, names of symbolic sizes, and names of nodes.

onnxscript's `optimize` also drops `x + c` for |c| <= 1e-8 and `x * c` for c within 1e-5 of 1, e.g. the epsilon of a
norm. Only structural rewrites run here.
"""

from __future__ import annotations

import re

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules import common as rules

EXACT_RULES = (
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.no_op_transpose_rule,
    rules.reshape_reshape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
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


AXES = {
    "input_ids": (1, "sequence_length"),
    "logits_indices": (0, "logits_rows"),
    "attention_mask": (1, "total_sequence_length"),
}
"""Input -> the axis with a symbolic size, and its name in the manifest."""
PAST = 2, "past_sequence_length"
"""Axis and name for every growing state."""


def name_axes(model: ir.Model) -> None:
    """Rename every symbolic size of `model`, in expressions (`2*s70`), too."""
    from torch.onnx._internal.exporter._ir_passes import rename_axis

    names: dict[str | ir.SymbolicDim, str] = {}
    for value in model.graph.inputs:
        if value.shape is not None and (value.name in AXES or len(value.shape) == 4):
            axis, name = AXES.get(value.name or "", PAST)
            size = value.shape[axis]
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names[str(size.value)] = name
    rename_axis(model, names)


MODULE, CLASS, SOURCE = "partita.module", "partita.class", "partita.source"
"""Node metadata keys: module path, module class, file:line of the modelling code."""
ROOT = "hf"
"""Attribute of the model inside the traced wrapper; stripped from every name."""


def name_nodes(model: ir.Model) -> None:
    """Name every node `<module path>/<Op>[_n]`, and its outputs after it. Module and source become metadata."""
    seen: dict[str, int] = {}
    keep = {v.name for v in (*model.graph.inputs, *model.graph.outputs)} | set(model.graph.initializers)
    for node in model.graph:
        module = _settle_metadata(node)
        base = f"{module or 'graph'}/{node.op_type}"
        number = seen.get(base, 0)
        seen[base] = number + 1
        node.name = f"{base}_{number}" if number else base
        for index, value in enumerate(node.outputs):
            if value.name not in keep:
                value.name = f"{node.name}_output_{index}"


def _settle_metadata(node: ir.Node) -> str:
    """Replace torch's metadata by three short entries. Returns the module path, "" at the top."""
    properties = node.metadata_props
    if MODULE in properties:
        return properties[MODULE]
    # torch's lists are Python literals of plain strings
    scopes, classes = (
        re.findall(r"'([^']*)'", properties.get(f"pkg.torch.onnx.{name}", ""))
        for name in ("name_scopes", "class_hierarchy")
    )
    paths = [s.removeprefix(ROOT).removeprefix(".") for s in scopes[:-1] if s == ROOT or s.startswith(f"{ROOT}.")]
    source = _source_line(properties.get("pkg.torch.onnx.stack_trace", ""))
    properties.clear()
    properties[MODULE] = paths[-1] if paths else ""
    if len(classes) >= len(scopes) - 1 and len(scopes) > 1:
        properties[CLASS] = classes[len(scopes) - 2].rpartition(".")[2]
    if source:
        properties[SOURCE] = source
    return properties[MODULE]


def _source_line(stack: str) -> str:
    """file:line of the innermost frame of modelling code, relative to site-packages."""
    for path, line in reversed(re.findall(r'File "([^"]+)", line (\d+)', stack)):
        if "modeling_" in path or "/transformers/" in path:
            return f"{path.rpartition('site-packages/')[2]}:{line}"
    return ""
