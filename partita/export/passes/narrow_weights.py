"""Store weights in 16 bits and compute in float32, for targets without kernels for the 16-bit type.

    x ─ MatMul(W float32) ─ y          before
    W bfloat16 ─ Cast ─┐
    x ─ MatMul ────────┴ y             after
    ids ─ Gather(E bfloat16) ─ Cast    where the target has a 16-bit Gather: only the rows are cast

ONNX Runtime folds the Cast when it loads the graph. The file has half the size, without loss if the checkpoint has that
dtype. Vectors (norms and biases) stay float32. In a quantised package, `--keep MODULE=fp16` or `bf16` stores weights
this way. A package that computes in 16 bits needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from partita.dtypes import PRECISIONS, Precision
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.stored_formats import StoredFloats
from partita.export.passes.base import Pass, TracedGraph, added, drop_unused_initializers, take_names
from partita.export.passes.manager import question as node_question
from partita.export.passes.manager import run as run_passes
from partita.export.quantise.plan import Plan
from partita.export.quantise.rewrite import Narrowed, Outcome, modules_of
from partita.export.target import NodeSupport, Question
from partita.export.weights import of_ir, to_ir
from partita.export.weights.origins import RescaledOrigin, TensorInfo
from partita.export.weights.sources import FloatSource, StoredPart, weight_part
from partita.package.records import HalfPrecisionWeights

WIDE, WIDE_TYPE = "float32", ir.DataType.FLOAT
NARROW_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
OPSET, WIDTH = 21, 64


@dataclass(frozen=True, slots=True)
class Narrow:
    """How weights are stored in 16 bits before a Cast."""

    dtype: str
    gathers: bool
    """The target supports Gather of that dtype."""
    exactly: bool = False
    """Only weights that the checkpoint has in that dtype are stored in it, without rounding."""


def narrow(computing: Precision, takes: NodeSupport | None) -> Narrow | None:
    """How weights are stored; None where they have the dtype of the activations. `takes` probes the provider."""
    return None if computing.stored is None else _narrow_to(computing.stored, takes)


def narrow_floats(checkpoint: Checkpoint, computing: Precision, takes: NodeSupport | None) -> Narrow | None:
    """How floats of a quantised checkpoint are stored: in their own 16 bits, if most have 16; else None."""
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        if _is_float(info) and len(info.shape) > 1:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.size_bytes
    dtype = max(sizes, key=lambda name: sizes[name], default=WIDE)
    if computing.dtype != WIDE or dtype not in (each.dtype for each in PRECISIONS.values()) or dtype == WIDE:
        return None
    return replace(_narrow_to(dtype, takes), exactly=True)


def _narrow_to(dtype: str, takes: NodeSupport | None) -> Narrow:
    return Narrow(dtype, takes is not None and all(takes([question("Gather", dtype)])))


def _is_float(info: TensorInfo) -> bool:
    """Whether a tensor is stored as floats."""
    return info.decoder is None or isinstance(info.decoder, StoredFloats)


def store_narrow(traced: TracedGraph, how: Narrow) -> dict[str, int]:
    """Store every matrix of a graph in 16 bits, in place. Returns the pass name with their number."""

    def choose(value: ir.Value, source: FloatSource) -> Narrow | None:
        return None if how.exactly and is_rounded(source, to_ir(how.dtype)) else how

    return _store(traced, choose)


def keep_narrow(traced: TracedGraph, plan: Plan, outcome: Outcome, takes: NodeSupport | None) -> dict[str, int]:
    """Store the weights that the plan names in 16 bits. Returns pass name -> their number. Raises PassError."""
    ways = {dtype: _narrow_to(dtype, takes) for dtype in {keep.stored for keep in plan.keep} if dtype is not None}

    def choose(value: ir.Value, source: FloatSource) -> Narrow | None:
        modules = [name for use in value.uses() for name in modules_of(use.node, source)]
        setting = plan.setting(modules)
        if setting is None or setting.stored is None:
            return None
        outcome.modules.update(modules)
        return ways[setting.stored]

    return _store(traced, choose) if ways else {}


def _store(traced: TracedGraph, choose: Callable[[ir.Value, FloatSource], Narrow | None]) -> dict[str, int]:
    """Run the pass: every matrix that `choose` has a way for."""

    def run(traced: TracedGraph) -> int:
        graph, found = traced.graph, []
        for value in graph.initializers.values():
            part = weight_part(value)
            if part is None or not value.uses() or len(part.part.shape) < 2 or not isinstance(part.source, FloatSource):
                continue
            source = part.source
            if source.dtype == WIDE_TYPE and not isinstance(source.origin, RescaledOrigin):
                how = choose(value, source)
                found += [] if how is None else [(value, part, source, how)]
        for value, part, source, how in found:  # after all of them are known
            kind = to_ir(how.dtype)
            shape = tuple(part.shape.numpy()) if part.is_reshaped else None
            _behind_cast(graph, value, StoredPart(replace(source, dtype=kind), shape=shape), how)
        drop_unused_initializers(graph)
        return len(found)

    return run_passes(traced, (Pass("narrow_weights", run),))


def half_precision_record(how: Narrow, models: Sequence[ir.Model], *, compared: bool) -> HalfPrecisionWeights:
    """The manifest record. `compared`: the source model gets the weights in rounded form."""
    found = {source.key: source for source, _ in _narrow_weights(models) if source.dtype == to_ir(how.dtype)}
    return HalfPrecisionWeights(
        dtype=how.dtype,
        weights=len(found),
        rounded=sum(is_rounded(source, source.dtype) for source in found.values()),
        compared="rounded" if compared else "model",
    )


def rounded_weights(
    models: Sequence[ir.Model], movable: Callable[[FloatSource], bool], *, partly: bool
) -> dict[object, Narrowed]:
    """The weights that storing rounds, to give the source model; all or none, or with `partly` the movable ones."""
    found: dict[object, Narrowed] = {}
    for source, modules in _narrow_weights(models):
        if not is_rounded(source, source.dtype):
            continue
        if not movable(source):
            if partly:
                continue
            return {}
        known = found[source.key].modules if source.key in found else ()
        found[source.key] = Narrowed(source, tuple(dict.fromkeys([*known, *modules])))
    return found


def _narrow_weights(models: Sequence[ir.Model]) -> Iterator[tuple[FloatSource, list[str]]]:
    """The 16-bit weights of `models`, with their modules."""
    for value in (value for model in models for value in model.graph.initializers.values()):
        part = weight_part(value)
        if part is None or not isinstance(part.source, FloatSource) or part.dtype not in NARROW_TYPES:
            continue
        readers = []
        for node in (use.node for use in value.uses()):
            readers += [use.node for use in node.outputs[0].uses()] if node.op_type == "Cast" else [node]
        yield part.source, [name for node in readers for name in modules_of(node, part.source)]


def is_rounded(source: FloatSource, dtype: ir.DataType) -> bool:
    """Whether storing as `dtype` rounds its values: quantised weights count, even with 16-bit scales."""
    return any(info.dtype != of_ir(dtype) or not _is_float(info) for info in source.origin.tensors())


def _behind_cast(graph: ir.Graph, value: ir.Value, part: StoredPart, how: Narrow) -> None:
    """Replace a weight by `part` and a Cast before its consumers, or after a Gather of its rows."""
    weight, readers = added(graph, part, f"{value.name}.{how.dtype}"), value.uses()
    looked_up = [use for use in readers if how.gathers and use.node.op_type == "Gather" and use.idx == 0]
    for use in looked_up:
        _cast_rows(use.node, weight)
    others = [use for use in readers if use not in looked_up]
    if others:
        cast = _cast(weight, value.shape)
        take_names(cast, others[0].node)
        graph.insert_before(graph[0], cast)
        for use in others:
            use.node.replace_input_with(use.idx, cast.outputs[0])


def _cast_rows(gather: ir.Node, weight: ir.Value) -> None:
    """Gather rows in the stored dtype, and cast them."""
    graph, rows = gather.graph, gather.outputs[0]
    assert graph is not None
    gather.replace_input_with(0, weight)
    cast = _cast(rows, rows.shape)
    take_names(cast, gather)
    graph.insert_after(gather, cast)
    for use in rows.uses():
        if use.node is not cast:
            use.node.replace_input_with(use.idx, cast.outputs[0])
    rows.type = ir.TensorType(weight.dtype or ir.DataType.UNDEFINED)


def _cast(value: ir.Value, shape: ir.Shape | None) -> ir.Node:
    """A Cast to the dtype of the activations."""
    node = ir.node("Cast", inputs=[value], attributes={"to": int(WIDE_TYPE)})
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(WIDE_TYPE), shape
    return node


def question(operator: str, dtype: str) -> Question:
    """A one-node model to probe a MatMul or Gather with a matrix of `dtype`."""
    kind = ir.TensorType(to_ir(dtype))
    matrix = ir.Value(name="w", shape=ir.Shape([WIDTH, WIDTH]), type=kind)
    hidden = ir.Value(name="x", shape=ir.Shape([1, 1, WIDTH]), type=kind)
    ids = ir.Value(name="ids", shape=ir.Shape([1, 1]), type=ir.TensorType(ir.DataType.INT64))
    requested = node_question(ir.node(operator, [matrix, ids] if operator == "Gather" else [hidden, matrix]), OPSET)
    assert requested is not None
    return requested
