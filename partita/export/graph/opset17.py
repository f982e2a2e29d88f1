"""Brings a graph from opset 18, the oldest that torch writes, to opset 17, which more compilers take whole.

Opset 18 gave the reductions their axes as an input, and a few operators something that graphs of decoders do not use.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from partita.errors import UnsupportedModelError
from partita.export.passes.rewriting import constant, drop_unused_initializers

OPSET, WRITTEN = 17, 18
AXES_AS_INPUT = frozenset(
    {
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSumSquare",
    }
)


def to_opset17(model: ir.Model) -> None:
    """Rewrite the graph in place. Raises UnsupportedModelError for an operator that opset 17 does not have."""
    for node in list(model.graph):
        if node.domain == "" and _changed_since(node.op_type):
            _convert(node)
    drop_unused_initializers(model.graph)
    model.opset_imports[""] = OPSET


def _changed_since(op_type: str) -> bool:
    """True when opset 18 defines the operator anew."""
    return bool(onnx.defs.get_schema(op_type, WRITTEN, "").since_version > OPSET)


def _convert(node: ir.Node) -> None:
    """Write one node as opset 17 has it."""
    if node.op_type in AXES_AS_INPUT:
        _axes_as_attribute(node)
    elif node.op_type == "Split" and (_has_sizes(node) or _is_even(node)):
        # Without sizes opset 17 cuts in as many equal parts as there are outputs.
        node.attributes.pop("num_outputs", None)
    elif node.op_type == "Pad" and len(node.inputs) < 4:
        pass  # only the input `axes` is new
    elif node.op_type in ("ScatterElements", "ScatterND") and node.attributes.get_string("reduction", "none") == "none":
        pass  # only two kinds of reduction are new
    else:
        raise _refused(node)


def _has_sizes(node: ir.Node) -> bool:
    """True for a Split whose sizes are written out."""
    return len(node.inputs) > 1 and node.inputs[1] is not None


def _is_even(node: ir.Node) -> bool:
    """True for a Split whose parts are known to be of equal size."""
    whole = node.inputs[0]
    if whole is None or whole.shape is None:
        return False
    size = whole.shape[node.attributes.get_int("axis", 0)]
    return isinstance(size, int) and size % len(node.outputs) == 0


def _axes_as_attribute(node: ir.Node) -> None:
    """The axes of a reduction as an attribute, or none at all for all axes."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    keep_as_is = node.attributes.get_int("noop_with_empty_axes", 0)
    node.attributes.pop("noop_with_empty_axes", None)
    if axes is None:
        if keep_as_is:
            raise _refused(node)
        return
    values = constant(axes)
    if not values:
        raise _refused(node)
    node.resize_inputs(1)
    node.attributes["axes"] = ir.AttrInt64s("axes", [int(value) for value in values])


def _refused(node: ir.Node) -> UnsupportedModelError:
    """The error for a node that cannot be written."""
    return UnsupportedModelError(
        f"{node.name or node.op_type}: {node.op_type} cannot be written in opset {OPSET}; use "
        f"`opset={WRITTEN}` or another `attention`",
        option="opset",
    )
