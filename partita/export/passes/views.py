"""One Reshape, or none, for a chain of operators that only change the view of a tensor.

    x [B, S, H*D] ─ Reshape [B, S, H, D] ─ Transpose ─ Transpose ─ Reshape [B, S, H*D] ─ y          before
    x ─ y                                                                                           after

The chain must keep the order of elements for every symbolic size: it is run on element indices for two sets of sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from partita.export.passes.arithmetic import Array, UnknownError, compute_values
from partita.export.passes.base import TracedGraph, integers, node_pass, remove_unread, stand_in

VIEWS = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity"})
CHOICES = ((2, 3), (5, 7))
"""Values of symbolic sizes, in order of occurrence; distinct within one choice."""
MOST_ELEMENTS = 1 << 20
"""Larger tensors are not changed; tests with few tokens stay far below."""


def _shortened(graph: ir.Graph, last: ir.Node, traced: TracedGraph) -> bool:
    """Shorten the chain that ends with `last`; False where it is minimal, or continues."""
    result = last.outputs[0]
    if result.is_graph_output() or all(use.node.op_type in VIEWS for use in result.uses()):
        return False
    chain: list[ir.Node] = []
    target = _target(result)
    found: tuple[ir.Value, str] | None = None
    node: ir.Node | None = last
    while node is not None and node.op_type in VIEWS and node.domain == "":
        chain.insert(0, node)
        source = node.inputs[0]
        if source is None or source.const_value is not None:
            break
        kept = _keeps(chain, source, result)
        if kept == "all" or (kept == "order" and len(chain) > 1 and target is not None):
            found = source, kept
        node = source.producer()
    if found is None:
        return False
    source, kept = found
    if kept == "all":
        result.replace_all_uses_with(source)
        remove_unread(graph, [last])
    else:
        assert target is not None
        stand_in(graph, result, ir.node("Reshape", [source, integers(graph, target)]))
    return True


def _keeps(chain: Sequence[ir.Node], source: ir.Value, result: ir.Value) -> str:
    """The invariant of the chain: `all` (shape and order), the `order` of the elements, or an empty string."""
    same = True
    for choice in CHOICES:
        sizes = _sizes(source, choice)
        if sizes is None or np.prod(sizes) > MOST_ELEMENTS:
            return ""
        numbers: Array = np.arange(np.prod(sizes)).reshape(sizes)
        try:
            seen = compute_values(chain, {source: numbers})[result]
        except UnknownError:
            return ""
        if not np.array_equal(seen.ravel(), numbers.ravel()):
            return ""
        same &= seen.shape == numbers.shape
    return "all" if same else "order"


def _sizes(value: ir.Value, choice: Sequence[int]) -> list[int] | None:
    """The sizes of a value, symbolic ones as in `choice`; None where unknown."""
    if value.shape is None:
        return None
    left = iter(choice)
    sizes = [size if isinstance(size, int) else next(left, None) for size in value.shape]
    return None if None in sizes else [size for size in sizes if size is not None]


def _target(value: ir.Value) -> list[int] | None:
    """The target of a Reshape to the shape of `value`; None with several symbolic sizes."""
    if value.shape is None:
        return None
    sizes = [size if isinstance(size, int) else -1 for size in value.shape]
    return sizes if sizes.count(-1) <= 1 else None


PASS = node_pass("views", VIEWS, _shortened)
