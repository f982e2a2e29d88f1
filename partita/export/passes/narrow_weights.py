"""Store weights in 16 bits and compute in float32, for targets without kernels for the 16-bit type.

    x ─ MatMul(W float32) ─ y          before
    W bfloat16 ─ Cast ─┐
    x ─ MatMul ────────┴ y             after
    ids ─ Gather(E bfloat16) ─ Cast    where the target has a 16-bit Gather: only the rows are cast

ONNX Runtime folds the Cast when it loads the graph. The file has half the size, without loss if the checkpoint has that
dtype. Vectors (norms and biases) stay float32.

`--keep MODULE=fp16` or `bf16` in a quantised package: weights stored in 16 bits and cast on loading.

A package that computes in 16 bits needs no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch

from partita.dtypes import PRECISIONS, Precision
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.checkpoint.stored_formats import StoredFloats
from partita.export.passes.base import Pass, TracedGraph, drop_unused_initializers, take_names
from partita.export.passes.cleaning import MODULE
from partita.export.passes.manager import question as node_question
from partita.export.passes.manager import run as run_passes
from partita.export.quantise.calibrate.reference import parameter_names
from partita.export.quantise.plan import Plan
from partita.export.quantise.rewrite import Narrowed, Outcome, modules_of
from partita.export.target import NodeSupport, Question
from partita.export.weights import to_ir, to_torch
from partita.export.weights.memory_map import let_go
from partita.export.weights.origins import RescaledOrigin, TensorInfo
from partita.export.weights.sources import FloatSource, StoredPart, weight_part
from partita.package.records import HalfPrecisionWeights

WIDE = "float32"
OPSET = 21
WIDTH = 64


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
    if computing.stored is None:
        return None
    return Narrow(computing.stored, looks_up(takes, computing.stored))


def looks_up(takes: NodeSupport | None, dtype: str) -> bool:
    """Whether the provider supports Gather on a matrix of `dtype`."""
    return takes is not None and all(takes([question("Gather", dtype)]))


def narrow_floats(checkpoint: Checkpoint, computing: Precision, takes: NodeSupport | None) -> Narrow | None:
    """How floats of a quantised checkpoint are stored: in their own 16 bits, if most have 16; else None."""
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        if _is_float(info) and len(info.shape) > 1:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.size_bytes
    dtype = max(sizes, key=lambda name: sizes[name], default=WIDE)
    if computing.dtype != WIDE or dtype not in (each.dtype for each in PRECISIONS.values()) or dtype == WIDE:
        return None
    return Narrow(dtype, looks_up(takes, dtype), exactly=True)


def _is_float(info: TensorInfo) -> bool:
    """Whether a tensor is stored as floats."""
    return info.decoder is None or isinstance(info.decoder, StoredFloats)


Found = tuple[ir.Value, StoredPart, Narrow]
"""A weight to store in 16 bits: its value and part, and how."""


def store_narrow(traced: TracedGraph, how: Narrow) -> dict[str, int]:
    """Store every matrix of a graph in 16 bits, in place. Returns the pass name with their number."""

    def find(graph: ir.Graph) -> Iterator[Found]:
        for value in graph.initializers.values():
            part = weight_part(value)
            if part is not None and _fits(part, how):
                yield value, part, how

    return _store(traced, find)


def _store(traced: TracedGraph, find: Callable[[ir.Graph], Iterable[Found]]) -> dict[str, int]:
    """Run the pass over the weights that `find` returns."""

    def run(traced: TracedGraph) -> int:
        found = list(find(traced.graph))  # all of them before the first change
        for value, part, how in found:
            behind_cast(traced.graph, value, part, how)
        drop_unused_initializers(traced.graph)
        return len(found)

    return run_passes(traced, (Pass("narrow_weights", run),))


def kept_narrow(how: Narrow, models: Sequence[ir.Model], narrowed: Mapping[object, Narrowed]) -> HalfPrecisionWeights:
    """The manifest record. `narrowed`: the weights that the source model gets in rounded form."""
    sources = [source for source, _ in _narrow_parts(how, models)]
    return HalfPrecisionWeights(
        dtype=how.dtype,
        weights=len({source.key for source in sources}),
        rounded=len({source.key for source in sources if _is_rounded(source, how)}),
        compared="rounded" if narrowed else "model",
    )


def rounded_weights(
    how: Narrow, models: Sequence[ir.Model], movable: Callable[[FloatSource], bool]
) -> dict[object, Narrowed]:
    """Weights that the source model can get in rounded form; empty where one of them is not `movable`."""
    found: dict[object, Narrowed] = {}
    for source, modules in _narrow_parts(how, models):
        if not _is_rounded(source, how):
            continue
        if not movable(source):
            return {}
        known = found.get(source.key)
        names = dict.fromkeys([*(() if known is None else known.modules), *modules])
        found[source.key] = Narrowed(source.tensors, tuple(names), how.dtype)
    return found


def _narrow_parts(how: Narrow, models: Sequence[ir.Model]) -> Iterator[tuple[FloatSource, list[str]]]:
    """The 16-bit weights of `models`, with their modules."""
    for value in (value for model in models for value in model.graph.initializers.values()):
        part = weight_part(value)
        if part is None or not isinstance(part.source, FloatSource) or part.dtype != to_ir(how.dtype):
            continue
        readers = [reader for use in value.uses() for reader in _readers(use.node)]
        parameters = [name.rpartition(".")[0] for name in part.source.parameters]
        yield part.source, [*(node.metadata_props.get(MODULE, "") for node in readers), *parameters]


def _readers(node: ir.Node) -> list[ir.Node]:
    """The consumers of a weight: those of the Cast where `node` is one."""
    return [use.node for use in node.outputs[0].uses()] if node.op_type == "Cast" else [node]


def _is_rounded(source: FloatSource, how: Narrow) -> bool:
    """Whether storing rounds its values: quantised weights count, even with 16-bit scales."""
    return any(info.dtype != how.dtype or not _is_float(info) for info in source.origin.tensors())


def _fits(part: StoredPart, how: Narrow) -> bool:
    """Whether it is to be stored in 16 bits."""
    rounded = how.exactly and isinstance(part.source, FloatSource) and _is_rounded(part.source, how)
    return is_matrix(part) and not rounded


def is_matrix(part: StoredPart) -> bool:
    """Whether it is a matrix, or a stack of matrices, as in the checkpoint."""
    source = part.source
    is_plain = (
        isinstance(source, FloatSource)
        and source.dtype == to_ir(WIDE)
        and not isinstance(source.origin, RescaledOrigin)
    )
    return is_plain and len(part.part.shape) >= 2


def behind_cast(graph: ir.Graph, value: ir.Value, part: StoredPart, how: Narrow) -> None:
    """Insert a Cast between a weight and its consumers, or after a Gather of its rows."""
    assert isinstance(part.source, FloatSource)
    kind = to_ir(how.dtype)
    kept = StoredPart(replace(part.source, dtype=kind), shape=tuple(part.shape.numpy()) if part.is_reshaped else None)
    name = f"{value.name}.{how.dtype}"
    weight = ir.Value(name=name, shape=value.shape, type=ir.TensorType(kind), const_value=kept)
    graph.initializers[name] = weight
    readers = value.uses()
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
    node = ir.node("Cast", inputs=[value], attributes={"to": int(to_ir(WIDE))})
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(to_ir(WIDE)), shape
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


def keep_narrow(traced: TracedGraph, plan: Plan, outcome: Outcome, takes: NodeSupport | None) -> dict[str, int]:
    """Store the weights that the plan names in 16 bits. Returns pass name -> their number. Raises PassError."""
    kinds = {keep.stored for keep in plan.keep if keep.stored is not None}
    if not kinds:
        return {}
    ways = {kind: Narrow(kind, looks_up(takes, kind)) for kind in kinds}

    def find(graph: ir.Graph) -> Iterator[Found]:
        for value in graph.initializers.values():
            part, nodes = weight_part(value), [use.node for use in value.uses()]
            if part is None or not nodes or not is_matrix(part):
                continue
            assert isinstance(part.source, FloatSource)
            modules = tuple(dict.fromkeys(name for node in nodes for name in modules_of(node, part.source)))
            setting = plan.setting(modules)
            if setting is not None and (kind := setting.stored) is not None:
                outcome.half_precision[part.source.key] = Narrowed(part.source.tensors, modules, kind)
                yield value, part, ways[kind]

    return _store(traced, find)


def round_kept(model: Any, narrowed: Mapping[object, Narrowed], sources: Sources) -> None:
    """Give `model`, a transformers model, these weights rounded to 16 bits, in place."""
    names = parameter_names(model, sources)
    readers = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for each in narrowed.values():
        found = [name for tensor in each.tensors for name in names.single.get(tensor, ())]
        found += [name for name, _ in names.stacked_of(each.tensors)]
        own = [name for name in found if name.rpartition(".")[0] in each.modules]
        given = [model.get_parameter(name) for name in own or found]
        for name, wide in zip(own or found, given, strict=True):
            rounded = wide.detach().to(to_torch(each.dtype)).to(wide.dtype)
            if sum(other is wide for other in given) == readers[id(wide)]:  # in place: it may be memory-mapped
                wide.data.copy_(rounded)
                continue
            readers[id(wide)] -= 1
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, torch.nn.Parameter(rounded, requires_grad=False))
        let_go(model)
