"""Store weights in 16 bits and compute in float32, for targets without kernels for the 16-bit type.

    x ─ MatMul(W float32) ─ y          before
    W bfloat16 ─ Cast ─┐
    x ─ MatMul ────────┴ y             after
    ids ─ Gather(E bfloat16) ─ Cast    where the target has a 16-bit Gather: only the rows are cast

ONNX Runtime folds the Cast when it loads the graph. The file has half the size, without loss if the checkpoint has that
dtype. Vectors (norms and biases) stay float32.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from partita.dtypes import PRECISIONS, Precision
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.stored_formats import StoredFloats
from partita.export.checkpoint.weight_files import TensorInfo
from partita.export.options import ExportOptions
from partita.export.passes.base import Pass, PassContext, drop_unused_initializers, over, take_names
from partita.export.passes.cleaning import MODULE
from partita.export.passes.manager import run as run_passes
from partita.export.target import Question, TakesEach, Target
from partita.export.weights.element_types import to_ir
from partita.export.weights.origins import Rescaled
from partita.export.weights.sources import Plain, StoredPart, stored
from partita.package.records import NarrowWeights

WIDE, CPU = "float32", "cpu"
X86 = frozenset({"x86_64", "amd64"})
OPSET, IR_VERSION = 21, 10
WIDTH = 64


@dataclass(frozen=True, slots=True)
class Narrow:
    """How weights are stored in 16 bits before a Cast."""

    dtype: str
    gathers: bool
    """The target supports Gather of that dtype."""
    exactly: bool = False
    """Only weights that the checkpoint has in that dtype are stored in it, without rounding."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A weight that is stored in 16 bits and computed in float32."""

    tensors: frozenset[str]
    modules: tuple[str, ...]
    """Modules of the weight: the nodes that read it, and those of its parameters."""
    dtype: str


def in_question(options: ExportOptions, target: Target | None) -> bool:
    """Whether the target must be probed for the activation dtype of a 16-bit package."""
    computing = PRECISIONS[options.named]
    if options.activations is not None or target is None or computing.dtype == WIDE:
        return False
    if computing.twin is not None:
        return target.takes is not None
    return target.provider == CPU and platform.machine().lower() in X86 and not target.by_default


def settled(options: ExportOptions, target: Target | None, told: Callable[[str], object]) -> ExportOptions:
    """The options with `activations` set: as requested, else float32 where the target has no other MatMul kernel.

    The kernel is probed only where the CPU provider cannot run the package either (`Precision.twin`). The CPU provider
    runs float16 MatMul between Casts on x86; that counts only for a target chosen by the user.
    """
    computing = PRECISIONS[options.named]
    if target is None or not in_question(options, target):
        return options
    if target.takes is not None and computing.twin is not None:
        if target.takes([_question("MatMul", computing.dtype)])[0]:
            return options
        why = f"has no MatMul kernel for {computing.dtype}"
    else:
        why = f"has no MatMul kernel for {computing.dtype} on x86 processors"
    told(
        f"{target.provider} {why}: weights are stored in {computing.dtype}, and activations are {WIDE}; "
        f"`activations={options.precision}` writes {computing.dtype} arithmetic"
    )
    return replace(options, activations="fp32")


def narrow(computing: Precision, takes: TakesEach | None) -> Narrow | None:
    """How weights are stored; None where they have the dtype of the activations.

    `takes` probes the provider.
    """
    if computing.stored is None:
        return None
    return Narrow(computing.stored, looks_up(takes, computing.stored))


def looks_up(takes: TakesEach | None, dtype: str) -> bool:
    """Whether the provider supports Gather on a matrix of `dtype`."""
    return takes is not None and all(takes([_question("Gather", dtype)]))


def narrow_floats(checkpoint: Checkpoint, computing: Precision, takes: TakesEach | None) -> Narrow | None:
    """How the float weights of a quantised checkpoint are stored: in their own 16 bits.

    None unless most have 16 bits and the graph computes in float32.
    """
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


def store_narrow(model: ir.Model, context: PassContext, how: Narrow) -> dict[str, int]:
    """Store every matrix of `model` in 16 bits, in place. Returns the pass name with their number."""

    def run(model: ir.Model, context: PassContext) -> int:
        count = 0
        for value in list(model.graph.initializers.values()):
            part = stored(value)
            if part is not None and _fits(part, how):
                with over(next(iter(value.uses())).node):
                    behind_cast(model.graph, value, part, how)
                count += 1
        drop_unused_initializers(model.graph)
        return count

    return run_passes(model, (Pass("narrow_weights", run),), context)


def kept_narrow(how: Narrow, models: Sequence[ir.Model], narrowed: Mapping[object, Narrowed]) -> NarrowWeights:
    """The manifest record. `narrowed`: the weights that the source model gets in rounded form."""
    sources = [source for source, _ in _narrow_parts(how, models)]
    return NarrowWeights(
        dtype=how.dtype,
        weights=len({source.key for source in sources}),
        rounded=len({source.key for source in sources if _is_rounded(source, how)}),
        compared="rounded" if narrowed else "model",
    )


def rounded_weights(
    how: Narrow, models: Sequence[ir.Model], movable: Callable[[Plain], bool]
) -> dict[object, Narrowed]:
    """Weight key -> the weights that the source model can get in rounded form.

    Empty where one of them is not `movable`: then the graph is compared with the model as it is.
    """
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


def _narrow_parts(how: Narrow, models: Sequence[ir.Model]) -> Iterator[tuple[Plain, list[str]]]:
    """The 16-bit weights of `models`, with their modules."""
    for value in (value for model in models for value in model.graph.initializers.values()):
        part = stored(value)
        if part is None or not isinstance(part.source, Plain) or part.dtype != to_ir(how.dtype):
            continue
        readers = [reader for use in value.uses() for reader in _readers(use.node)]
        parameters = [name.rpartition(".")[0] for name in part.source.parameters]
        yield part.source, [*(node.metadata_props.get(MODULE, "") for node in readers), *parameters]


def _readers(node: ir.Node) -> list[ir.Node]:
    """The consumers of a weight: those of the Cast where `node` is one."""
    return [use.node for use in node.outputs[0].uses()] if node.op_type == "Cast" else [node]


def _is_rounded(source: Plain, how: Narrow) -> bool:
    """Whether storing rounds its values: quantised weights count, even with 16-bit scales."""
    return any(info.dtype != how.dtype or not _is_float(info) for info in source.origin.tensors())


def _fits(part: StoredPart, how: Narrow) -> bool:
    """Whether it is to be stored in 16 bits."""
    source = part.source
    if how.exactly and isinstance(source, Plain):
        infos = list(source.origin.tensors())
        if any(info.dtype != how.dtype or not _is_float(info) for info in infos):
            return False
    return is_matrix(part)


def is_matrix(part: StoredPart) -> bool:
    """Whether it is a matrix, or a stack of matrices, as in the checkpoint."""
    source = part.source
    is_plain = isinstance(source, Plain) and source.dtype == to_ir(WIDE) and not isinstance(source.origin, Rescaled)
    return is_plain and len(part.part.shape) >= 2


def behind_cast(graph: ir.Graph, value: ir.Value, part: StoredPart, how: Narrow) -> None:
    """Insert a Cast between a weight and its consumers, or after a Gather of its rows."""
    assert isinstance(part.source, Plain)
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


def _question(operator: str, dtype: str) -> Question:
    """A one-node model to probe a MatMul or Gather with a matrix of `dtype`."""
    kind = ir.TensorType(to_ir(dtype))
    matrix = ir.Value(name="w", shape=ir.Shape([WIDTH, WIDTH]), type=kind)
    hidden = ir.Value(name="x", shape=ir.Shape([1, 1, WIDTH]), type=kind)
    ids = ir.Value(name="x", shape=ir.Shape([1, 1]), type=ir.TensorType(ir.DataType.INT64))
    looks_up = operator == "Gather"
    given, inputs = (ids, [matrix, ids]) if looks_up else (hidden, [hidden, matrix])
    node = ir.Node("", operator, inputs, name="asked", outputs=[ir.Value(name="y")])
    graph = ir.Graph([given, matrix], node.outputs, nodes=[node], opset_imports={"": OPSET}, name="asked")
    sizes = {"w": (WIDTH, WIDTH), "x": (1, 1) if looks_up else (1, 1, WIDTH)}
    return bytes(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()), sizes
