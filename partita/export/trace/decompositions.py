"""Skips torch's decomposition of a traced graph where it would change nothing but the spelling of a few operators.

`torch.onnx.export` traces an exported program a second time, to replace operators that have no ONNX form by others.
For most decoders every operator has a form, and the second trace is half of the time that an export spends on tracing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator

ALIASES = frozenset({"aten::to", "aten::detach", "aten::detach_", "aten::alias"})
"""Operators that return their input, converted where a type is given."""
AND = {True: torch.ops.aten.logical_and.default, False: torch.ops.aten.bitwise_and.Tensor}
"""`a & b` of tensors, by whether they are bool."""

CUTS = torch.ops.aten.chunk.default
"""Has an ONNX form, but another than the graph passes know: with a negative axis."""


def skip_decompositions(program: Any) -> None:
    """Let `program.run_decompositions`, which torch.onnx calls, return the program itself where nothing is to be
    decomposed.
    """
    decompose = program.run_decompositions

    def run(table: Mapping[Any, Any] | None = None, **options: Any) -> Any:
        if table is None or not _has_forms(program, table):
            return decompose(table, **options)
        _respell(program)
        return program

    program.run_decompositions = run


def _has_forms(program: Any, table: Mapping[Any, Any]) -> bool:
    """Whether every operator of the graph stays as it is: none is in `table`, writes in place or contains a graph."""
    for node in program.graph.nodes:
        if node.op != "call_function" or _respelled(node):
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            if isinstance(node.target, HigherOrderOperator):
                return False
        elif node.target in table or node.target is CUTS or schema.is_mutable:
            return False
    return True


def _respelled(node: Any) -> bool:
    """Whether `_respell` writes the operator in another way."""
    return _name(node) in ALIASES or node.target is torch.ops.aten.__and__.Tensor


def _name(node: Any) -> str:
    """Name of the operator without its overload: `aten::to`."""
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def _respell(program: Any) -> None:
    """Write conversions and `&` as torch's decomposition does."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _name(node) in ALIASES:
            source, dtype = node.args[0], node.meta["val"].dtype
            if source.meta["val"].dtype != dtype:
                node.target, node.args = torch.ops.aten._to_copy.default, (source,)
                node.kwargs = {"dtype": dtype}
            else:
                node.replace_all_uses_with(source)
                program.graph_signature.replace_all_uses(node.name, source.name)
                graph.erase_node(node)
        elif node.target is torch.ops.aten.__and__.Tensor:
            node.target = AND[node.args[0].meta["val"].dtype == torch.bool]
    graph.eliminate_dead_code()
    program.graph_module.recompile()
