"""Forms of quantised weights: their operators, layouts and node writers.

A module of this folder defines FORMS. `blocks` reads integers with a scale per block; `integers` multiplies 8-bit
integers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from partita.export.passes.base import added, take_names
from partita.export.quantise.quantisers import Packing
from partita.export.quantise.weight_source import Layout
from partita.export.target import Kernels
from partita.export.weights.sources import weight_part


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantised weight [N, K] in a graph."""

    values: tuple[ir.Value, ...]
    """The parts of its layout."""
    rows: int
    width: int
    packing: Packing


@dataclass(slots=True)
class Place:
    """The position where a form inserts nodes: before a node, or at the end of a graph."""

    graph: ir.Graph
    before: ir.Node | None
    kernels: Kernels
    shared: dict[tuple[str, object], tuple[ir.Value, ...]] = field(default_factory=dict)
    """(word, value) -> values that one product computed and others share."""

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
        """Insert a node with one output of that type and shape."""
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
        """A small constant; an existing one of that name is reused."""
        return added(self.graph, ir.tensor(np.asarray(array), name=name), name)

    def reshaped(self, value: ir.Value, shape: tuple[int, ...], name: str) -> ir.Value:
        """The same bytes of a weight as a constant of another shape."""
        part = weight_part(value)
        if part is not None:
            return added(self.graph, part.reshaped(shape), name)
        assert value.const_value is not None
        return added(self.graph, ir.tensor(value.const_value.numpy().reshape(shape), name=name), name)


def last(value: ir.Value, size: int) -> list[int | ir.SymbolicDim] | None:
    """The shape of `value` with another last size; None where its shape is unknown."""
    return None if value.shape is None else [*value.shape[:-1], size]


@dataclass(frozen=True, slots=True)
class Product:
    """x W^T with a quantised weight."""

    operator: str
    """The operator that needs a kernel, for messages: MatMulNBits (com.microsoft)."""
    layout: Layout
    write: Callable[[Place, ir.Value, ir.Value | None, Weight], ir.Value]
    """(place, x [..., K], bias [N] or None, weight) -> [..., N]."""
    exact: Callable[[ir.Model], object]
    """Change a model, in place, to multiply without quantised activations; for verification only."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """Row lookup in a quantised embedding."""

    layout: Layout
    write: Callable[[Place, ir.Value, Weight], ir.Value]
    """(place, ids [B, S], weight) -> [B, S, K]."""
    symmetric: bool = False
    """It requires 8 bits without zero points; False: as products."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write quantised weights."""

    name: str
    summary: str
    """A description in one line."""
    product: Product
    look_up: LookUp
    experts: bool = False
    """QMoE reads stacks of experts in the layout of products; False: they stay floats."""
    opset: int = 1
    """The minimum operator set of ONNX."""
    domains: tuple[str, ...] = ()
    """Operator sets other than ONNX's."""
    bits: tuple[int, ...] = (4, 8)
    """Supported bits."""
    one_scale: bool = False
    """A row has one scale and no zero point; False: blocks."""
    fills_up: bool = False
    """The last block of a row may be shorter."""


def forms() -> dict[str, Form]:
    """Name -> form."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in ("blocks", "integers")]
    return {each.name: each for module in modules for each in module.FORMS}


def form(name: str) -> Form:
    """The form with this name. Raises KeyError where there is none."""
    return forms()[name]


def candidates(*, rounds_activations: bool, standard: bool) -> tuple[Form, ...]:
    """Forms to probe, best first. `rounds_activations`: integer products; `standard`: ONNX operators first."""
    order = ("matmul_nbits", "dequantize_linear")
    if rounds_activations:
        order = ("matmul_integer_to_float", "matmul_integer")
    return tuple(form(name) for name in (reversed(order) if standard else order))
