"""Skips or caches steps of `torch.onnx.export` without a change of its graph.

- Decomposition traces the program a second time, to replace operators without an ONNX translation. It takes half of the
tracing time, and most decoders do not need it.
- Type promotion runs every operator again on fake tensors, for results that the program has recorded.
- Graph modules compile Python code for every change of their graph. It is compiled when it is called, which is rare.
- The table of ONNX functions is made for every graph, and parses the code of each function: 0.85 s.

ONNX translations of torch operators that its exporter lacks, or writes with operators that providers lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import TracedOnnxFunction
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_index
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen

ALIASES = frozenset({"aten::to", "aten::detach", "aten::detach_", "aten::alias"})
"""Operators that return their input, converted where a dtype is given."""
AND = {True: torch.ops.aten.logical_and.default, False: torch.ops.aten.bitwise_and.Tensor}
"""`a & b` of tensors, by whether they are bool."""

CUTS = torch.ops.aten.chunk.default
"""Has an ONNX translation, but one with a negative axis, which the graph passes do not match."""

_FUNCTIONS: dict[int, dict[Any, Any]] = {}
"""torch's table of ONNX functions by operator set, a cache."""


def skip_decompositions(program: Any) -> None:
    """Make `program.run_decompositions` return the program itself where no decomposition is needed."""
    decompose = program.run_decompositions

    def run(table: Mapping[Any, Any] | None = None, **options: Any) -> Any:
        if table is None or not _has_forms(program, table):
            return decompose(table, **options)
        _respell(program)
        return program

    program.run_decompositions = run


@contextmanager
def quick_export() -> Iterator[None]:
    """Have torch cache its table of ONNX functions, and use traced results."""
    from torch.onnx._internal.exporter import _registration
    from torch.onnx._internal.fx.passes import type_promotion

    registry: Any = _registration.ONNXRegistry
    function: Any = TracedOnnxFunction
    interpreter: Any = type_promotion._TypePromotionInterpreter
    read_table, run_node = vars(registry)["from_torchlib"], interpreter.run_node

    def recorded(self: Any, node: Any) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return run_node(self, node)
        with self._set_current_node(node):
            if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]

    def kept_table(opset_version: int) -> Any:
        if opset_version not in _FUNCTIONS:
            parsed = function.function_ir
            function.function_ir = property(attrgetter("opset"))  # only its domain is read
            try:
                _FUNCTIONS[opset_version] = read_table.__get__(None, registry)(opset_version).functions
            finally:
                function.function_ir = parsed
        table = registry()
        table._opset_version = opset_version
        table.functions = {each: list(found) for each, found in _FUNCTIONS[opset_version].items()}
        return table

    registry.from_torchlib, interpreter.run_node = staticmethod(kept_table), recorded
    try:
        yield
    finally:
        registry.from_torchlib, interpreter.run_node = read_table, run_node


@contextmanager
def graphs_without_code() -> Iterator[None]:
    """Have the graph modules that torch makes in this block compile their Python code when they are called."""
    recompile = GraphModule.recompile

    def later(self: Any) -> None:
        if isinstance(codegen := self._graph._codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            recompile(module)  # replaces this method, too
            return module.forward(*args, **kwargs)

        type(self).forward = forward

    GraphModule.recompile = later  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        GraphModule.recompile = recompile  # type: ignore[method-assign]


def _has_forms(program: Any, table: Mapping[Any, Any]) -> bool:
    """Whether every operator stays as it is: none is in `table`, writes in place or contains a graph."""
    for node in program.graph.nodes:
        if node.op != "call_function" or _name(node) in ALIASES or node.target is torch.ops.aten.__and__.Tensor:
            continue  # as `_respell` rewrites it
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            if isinstance(node.target, HigherOrderOperator):
                return False
        elif node.target in table or node.target is CUTS or schema.is_mutable:
            return False
    return True


def _name(node: Any) -> str:
    """Name of the operator without its overload: `aten::to`."""
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def _respell(program: Any) -> None:
    """Rewrite conversions and `&` as torch's decomposition does."""
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


NEWTON_STEPS = 4


def _erf_inv(x: Any) -> Any:
    """The inverse of the error function in float32: Winitzki's approximation (2008), then Newton's method."""
    two, four, half, one = (op.Constant(value_float=value) for value in (4.33074, 6.802721, 0.5, 1.0))
    log = op.Log(op.Sub(one, op.Mul(x, x)))
    first = op.Add(two, op.Mul(half, log))
    root = op.Sub(op.Sqrt(op.Sub(op.Mul(first, first), op.Mul(log, four))), first)
    y = op.Mul(op.Sign(x), op.Sqrt(root))
    slope = op.Constant(value_float=0.8862269)  # sqrt(pi) / 2
    for _ in range(NEWTON_STEPS):
        error = op.Sub(op.Erf(y), x)
        y = op.Sub(y, op.Mul(op.Mul(error, slope), op.Exp(op.Mul(y, y))))
    return y


def _index(values: Any, indices: Sequence[Any]) -> Any:
    """`values[..., index, ...]` as one Gather, which takes int32; torch writes a GatherND between two Transposes."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype != ir.DataType.BOOL:
        return op.Gather(values, given[0][1], axis=given[0][0])
    return aten_index(values, [_as_int64(index) for index in indices])


def _as_int64(index: Any) -> Any:
    """The index in int64, as GatherND requires."""
    if index is None or index.dtype != ir.DataType.INT32:
        return index
    wide: Any = op.Cast(index, to=int(ir.DataType.INT64))
    wide.shape, wide.dtype = index.shape, ir.DataType.INT64
    return wide


TABLE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.prims.erf_inv.default: _erf_inv,
    torch.ops.aten.erfinv.default: _erf_inv,
    torch.ops.aten.index.Tensor: _index,
}
"""The custom translation table of torch.onnx.export."""
