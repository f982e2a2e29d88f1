"""Weights of a quantised checkpoint that are no integers, kept as it stores them, and computed as the graph is opened.

    x ─ MatMul(W float32) ─ y                                                          before
    codes ─ Cast ─ Gather(table) ─ Reshape ─ Mul(scales) ─ Reshape ─ Cast ─ Cast ─┐    after
    x ─ MatMul ────────────────────────────────────────────────────────────────────┴ y

Codes are floats of 8 bits, integers of 4 or 8, or places of 4 bits in a table, which the Gather looks up; the Casts
round to the type that the format's own library rounds to, where it does. Where blocks have a zero that is no integer, a
Sub takes it off after the Mul, and the difference is rounded too. All of it is constant: ONNX Runtime
computes it once, in float32 and so exactly as the library, and what is run is the graph before. So the file has the
size of the checkpoint, memory and speed are those of float32. An operator that reads such codes at every step needs
less memory and is slower by far, as measured (docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.stored_formats import Quantised
from partita.export.checkpoint.stored_formats.base import CodedWeight, Coding
from partita.export.checkpoint.weight_files import Decoder, OpenFiles
from partita.export.graph.element_types import to_ir
from partita.export.passes.base import Pass, PassContext, over
from partita.export.passes.manager import run as run_passes
from partita.export.passes.rewriting import added, drop_unused_initializers, take_names
from partita.export.weights.origins import Every, Origin, Region, blocks, last_axis, seen_as
from partita.export.weights.sources import SLICE_BYTES, Part, Plain, StoredPart, WeightSource, initializers, stored

WIDE, HALF = "float32", "uint4"
OPSET = 21
"""The first with places of 4 bits."""
NAME = "coded_weights"
"""Of the pass."""


def codable(quantised: Quantised | None) -> bool:
    """Whether the quantised weights of a checkpoint are codes, and a package can keep some: the others, whose blocks
    lie in no rows, are the same numbers as floats.
    """
    weights = () if quantised is None else quantised.weights.values()
    codings = [weight.coding if isinstance(weight, CodedWeight) else None for weight in weights]
    return any(codings) and all(isinstance(weight, CodedWeight) for weight in weights)


@dataclass(frozen=True, slots=True)
class _Codes:
    """What is stored of a weight, in place of its numbers: uint8."""

    weight: CodedWeight

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """Bits of floats, or places in the table."""
        return self.weight.codes(region, files)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scale of every number of a weight."""

    weight: CodedWeight

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """float32."""
        return self.weight.scales(region, files)


@dataclass(frozen=True, slots=True)
class _Zeros:
    """The zero of every number of a weight."""

    weight: CodedWeight

    def values(self, region: Region, files: OpenFiles) -> torch.Tensor:
        """float32."""
        return self.weight.zeros(region, files)


@dataclass(frozen=True, slots=True)
class Coded:
    """A weight as its codes and scales, wherever its origin takes them from."""

    checkpoint: Checkpoint
    origin: Origin
    coding: Coding
    axis: int
    """Blocks with one scale lie along this axis."""
    name: str

    @property
    def tensors(self) -> frozenset[str]:
        """The checkpoint tensors that are read."""
        return frozenset(info.name for info in self.origin.tensors())

    @property
    def elements(self) -> int:
        """How many numbers it stands for."""
        return math.prod(self.origin.shape)

    @property
    def key(self) -> Hashable:
        """Where the codes come from."""
        return "coded", self.origin

    @property
    def of_blocks(self) -> dict[str, Origin]:
        """What each block along `axis` has, by its label: scales, and zeros in some formats."""
        kinds: dict[str, Callable[[CodedWeight], Decoder]] = {"scales": _Scales}
        if self.coding.zeros:
            kinds["zeros"] = _Zeros
        return {
            label: Every(seen_as(self.origin, _view(kind)), self.axis, self.coding.block)
            for label, kind in kinds.items()
        }

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes, and what blocks have."""
        codes = Part(self.origin.shape, to_ir(self.coding.dtype))
        return (codes, *(Part(each.shape, to_ir(WIDE), label) for label, each in self.of_blocks.items()))

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Codes in bytes, of two in a byte the first in the low bits; then what blocks have."""
        codes = seen_as(self.origin, _view(_Codes))
        with OpenFiles(self.checkpoint.folder) as files:
            for region in blocks(codes.shape, SLICE_BYTES):
                piece = codes.read(region, files).reshape(-1)
                yield 0, (piece[0::2] | piece[1::2] << 4 if self.coding.dtype == HALF else piece).contiguous()
            for part, origin in enumerate(self.of_blocks.values(), 1):
                for region in blocks(origin.shape, SLICE_BYTES // 4):
                    yield part, origin.read(region, files).contiguous()

    def permuted(self, order: tuple[int, ...]) -> WeightSource | None:
        """Nothing changes it any more."""
        return None

    def interleaved(self, axis: int) -> WeightSource | None:
        """Nothing changes it any more."""
        return None

    def rescaled(self, factor: float, offset: float, dtype: ir.DataType) -> WeightSource | None:
        """Nothing changes it any more."""
        return None

    def joined(self, others: Sequence[WeightSource], axis: int, name: str) -> WeightSource | None:
        """Nothing changes it any more."""
        return None


def _view(kind: Callable[[CodedWeight], Decoder]) -> Callable[[Decoder | None], Decoder]:
    """What reads something else of a coded weight than its numbers."""

    def seen(decoder: Decoder | None) -> Decoder:
        assert isinstance(decoder, CodedWeight)
        return kind(decoder)

    return seen


def _coded(source: WeightSource) -> Coded | None:
    """The codes of a weight that is to be written as floats; None where it has none, or they do not lie in blocks of
    one kind.
    """
    if not isinstance(source, Plain) or source.dtype != to_ir(WIDE):
        return None
    decoders = [info.decoder for info in source.origin.tensors()]
    codings = {each.coding if isinstance(each, CodedWeight) else None for each in decoders}
    (coding,) = codings if len(codings) == 1 else (None,)
    axis = last_axis(source.origin)
    if coding is None or axis is None or (coding.dtype == HALF and source.origin.shape[-1] % 2):
        return None
    return Coded(source.checkpoint, source.origin, coding, axis, source.name)


def store_coded(model: ir.Model, context: PassContext) -> dict[str, int]:
    """Keep the codes of weights, in place; how many weights, by the name of the pass."""

    def run(model: ir.Model, context: PassContext) -> int:
        count = 0
        for value in list(model.graph.initializers.values()):
            part = stored(value)
            found = None if part is None else _coded(part.source)
            if part is not None and found is not None and value.uses():
                with over(next(iter(value.uses())).node):
                    _decode(model.graph, value, part, found)
                count += 1
        drop_unused_initializers(model.graph)
        return count

    if model.graph.opset_imports.get("", 0) < OPSET:
        return {}
    return run_passes(model, (Pass(NAME, run),), context)


def _decode(graph: ir.Graph, value: ir.Value, part: StoredPart, source: Coded) -> None:
    """Let the readers of a weight read what is computed of its codes."""
    coding, shape, axis = source.coding, source.origin.shape, source.axis
    codes, *of_blocks = initializers(source, f"{value.name}.codes")
    grid = [*shape[:axis], shape[axis] // coding.block, coding.block, *shape[axis + 1 :]]
    nodes: list[ir.Node] = []

    def node(operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(operator, inputs=inputs, attributes=attributes))
        return nodes[-1].outputs[0]

    def reshaped(tensor: ir.Value, wanted: Sequence[int]) -> ir.Value:
        sizes = ir.tensor(np.array(wanted, np.int64))
        return node("Reshape", tensor, added(graph, sizes, f"sizes_{'x'.join(map(str, wanted))}"))

    def rounded(tensor: ir.Value) -> ir.Value:
        if not coding.rounded:
            return tensor
        return node("Cast", node("Cast", tensor, to=int(to_ir(coding.rounded))), to=int(to_ir(WIDE)))

    if coding.table:
        places = node("Cast", codes, to=int(ir.DataType.INT32))
        table = ir.tensor(np.array(coding.table, np.float32))
        made = node("Gather", added(graph, table, f"{value.name}.table"), places, axis=0)
    else:
        made = node("Cast", codes, to=int(to_ir(WIDE)))
    if coding.block < shape[axis]:
        one = (*grid[: axis + 1], 1, *grid[axis + 2 :])
        of_blocks = [
            ir.Value(
                name=each.name, shape=ir.Shape(one), type=each.type, const_value=StoredPart(source, part, shape=one)
            )
            for part, each in enumerate(of_blocks, 1)
        ]
        made = reshaped(made, grid)
    scales, *zeros = of_blocks
    made = rounded(node("Mul", made, scales))
    for zero in zeros:
        made = rounded(node("Sub", made, zero))
    target = tuple(part.shape.numpy())
    if coding.block < shape[axis] or target != shape:
        made = reshaped(made, target)
    for weight in (codes, *of_blocks):
        assert weight.name is not None
        graph.initializers[weight.name] = weight
    uses = list(value.uses())
    for each in nodes:
        take_names(each, uses[0].node)
    graph.insert_before(graph[0], nodes)
    made.type, made.shape = value.type, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, made)
