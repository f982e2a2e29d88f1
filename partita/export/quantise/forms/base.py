"""What a form of packed weights is: which operators read them, how they lie in the file, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from partita.export.passes.rewriting import added, take_names
from partita.export.quantise.write.kernels import Kernels
from partita.export.quantise.write.layouts import Layout
from partita.export.quantise.write.packed import Packing
from partita.export.weights.sources import stored


@dataclass(frozen=True, slots=True)
class Weight:
    """A packed weight [N, K] as nodes read it."""

    values: tuple[ir.Value, ...]
    """The parts of its layout."""
    rows: int
    width: int
    packing: Packing


@dataclass(slots=True)
class Place:
    """Where a form writes its nodes: before a node, or at the end of a graph."""

    graph: ir.Graph
    before: ir.Node | None
    kernels: Kernels
    shared: dict[tuple[str, object], tuple[ir.Value, ...]] = field(default_factory=dict)
    """What was made of a value for one product and serves others, by a word and the value."""

    def node(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        *,
        dtype: ir.DataType | None,
        shape: ir.Shape | Sequence[int | ir.SymbolicDim] | None,
        domain: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> ir.Value:
        """Write a node with one output of that type and shape."""
        new = ir.node(operator, inputs=inputs, domain=domain, attributes=dict(attributes or {}))
        (value,) = new.outputs
        value.type = None if dtype is None else ir.TensorType(dtype)
        value.shape = None if shape is None else ir.Shape(list(shape))
        if self.before is None:
            self.graph.append(new)
        else:
            take_names(new, self.before)
            self.graph.insert_before(self.before, new)
        return value

    def constant(self, array: Any, name: str) -> ir.Value:
        """A small constant; one of that name that is there already is the same."""
        return added(self.graph, ir.tensor(np.asarray(array), name=name), name)

    def reshaped(self, value: ir.Value, shape: tuple[int, ...], name: str) -> ir.Value:
        """The same bytes of a weight as a constant of another shape."""
        part = stored(value)
        if part is not None:
            return added(self.graph, part.reshaped(shape), name)
        assert value.const_value is not None
        return added(self.graph, ir.tensor(value.const_value.numpy().reshape(shape), name=name), name)


def last(value: ir.Value, size: int) -> list[int | ir.SymbolicDim] | None:
    """The shape of `value` with another last size; None where its shape is not known."""
    return None if value.shape is None else [*value.shape[:-1], size]


@dataclass(frozen=True, slots=True)
class Product:
    """x W^T of packed weights."""

    operator: str
    """The one that a target has to have a kernel for, as errors say it: MatMulNBits (com.microsoft)."""
    layout: Layout
    write: Callable[[Place, ir.Value, ir.Value | None, Weight], ir.Value]
    """(place, x [..., K], bias [N] or None, weight) -> [..., N]."""
    exact: Callable[[ir.Model], object]
    """Change a model, in place, so that it multiplies without rounding activations; for verification only."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of packed weights, for an embedding."""

    layout: Layout
    write: Callable[[Place, ir.Value, Weight], ir.Value]
    """(place, ids [B, S], weight) -> [B, S, K]."""
    symmetric: bool = False
    """It takes no zero points, and 8 bits alone; False: what products take."""


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """The experts of one layer, E of them, as an operator on stacks is given them."""

    hidden: ir.Value
    """[T, H]."""
    scores: ir.Value
    """[T, E]."""
    count: int
    """E."""
    up: Weight
    """[E * F, H]."""
    up_bias: ir.Value | None
    down: Weight
    """[E * H, I]."""
    down_bias: ir.Value | None
    attributes: Mapping[str, Any]
    """Of the MoE operator."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts with packed weights, of which only the chosen ones are computed."""

    operator: str
    layout: Layout
    write: Callable[[Place, ExpertsCall], ir.Value]
    """(place, call) -> [T, H]."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write packed weights; a file in `forms/` has it as FORM."""

    name: str
    summary: str
    """What is written, in a line."""
    product: Product
    look_up: LookUp
    experts: PackedExperts | None = None
    """None: stacks that one operator on experts reads stay as they are."""
    opset: int = 1
    """The oldest operator set of ONNX that it can be written in."""
    domains: tuple[str, ...] = ()
    """Operator sets besides ONNX's."""
    bits: tuple[int, ...] = (4, 8)
    """Widths that it has operators for."""
    one_scale: bool = False
    """A row has one scale and no zero point; False: blocks."""
    fills_up: bool = False
    """The last block of a row may be shorter than the others."""
