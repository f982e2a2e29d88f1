"""Forms of quantised weights: their operators, layouts and node writers. Here: integers with a scale per block.

ONNX Runtime's operators on packed integers, which read the same bytes, so that a tied embedding and head are stored
once:

    y = MatMulNBits(x [..., K], W [N, M, bytes], scales [N, M], zero points [N, packed M], bias [N])
    e = GatherBlockQuantized(E [V, bytes], ids, scales [V, M], zero points [V, packed M])
    y = QMoE(x [T, H], scores [T, E], up [E, F, bytes], its scales [E, F, M], bias [E, F], down [E, H, bytes], ...)

QMoE replaces MoE: only the chosen experts are computed. The matrices of a stack are concatenated. One block size is
used for both stacks and divides H and I. On the CPU provider of ONNX Runtime 1.31.1 all activations of MoE are correct.
4-bit weights are multiplied in float32 at accuracy level 0, 8-bit weights with quantised activations at every level.

Standard operators, DequantizeLinear of a constant before MatMul, which compilers fuse:

    y = MatMul(x [..., K], DequantizeLinear(W [K, N], scales [M, N], zero points [M, N], axis=0, block_size=B))
    ids ─ Gather(E uint8 [V, M, B]) ─ DequantizeLinear(1, 128) ─┐
    ids ─ Gather(scales [V, M, 1]) ─────────────────────────── Mul ─ Reshape [B, S, K] ─ e

OpenVINO keeps the weights compressed. ONNX Runtime fuses the two nodes into MatMulNBits for the CPU provider, at
accuracy level 4 (optimizer/qdq_transformer/selectors_actions, DQMatMulToMatMulNBits). Embedding rows are looked up as
integers, because DequantizeLinear before Gather would dequantise the whole embedding in every step. DequantizeLinear
with scale 1 is a Cast and a Sub that compilers support; OpenVINO does not cast 8-bit integers from outside its compiled
part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from partita.export.passes.base import added, integers, replace, take_names
from partita.export.quantise import Packing
from partita.export.quantise.weight_source import InBlocks, InColumns, InRows, Layout
from partita.export.target import Kernels
from partita.export.weights.sources import weight_part

DOMAIN = "com.microsoft"
MATMUL, GATHER = "MatMulNBits", "GatherBlockQuantized"
EXPERTS, PLAIN_EXPERTS = "QMoE", "MoE"
RESTORE, RESTORE_SINCE = "DequantizeLinear", 21
"""The standard operator, and the first operator set in which it has blocks."""
EXACT_LEVEL = 0
"""The accuracy level without quantised activations."""
ZEROS_UP, ZEROS_DOWN, INPUTS = 11, 12, 13
"""Input indices of the zero points of QMoE, and the number of its inputs."""


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
    shared: dict[Hashable, tuple[ir.Value, ...]] = field(default_factory=dict)
    """Values that one product computed and others share."""

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

    def plus(self, value: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Insert an addition where there is a bias."""
        return value if bias is None else self.node("Add", [value, bias], dtype=value.dtype, shape=value.shape)

    def constant(self, array: Any, name: str) -> ir.Value:
        """A small constant; an existing one of that name is reused."""
        return added(self.graph, ir.tensor(np.asarray(array), name=name), name)

    def reshaped(self, value: ir.Value, shape: tuple[int, ...], name: str) -> ir.Value:
        """The same bytes of a weight as a constant of another shape."""
        part = weight_part(value)
        if part is not None:
            return added(self.graph, part.reshaped(shape), name)
        assert value.const_value is not None
        return self.constant(value.const_value.numpy().reshape(shape), name)


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
    one_scale: bool = False
    """Weights have 8 bits, and a row has one scale and no zero point; False: 4 or 8 bits in blocks."""
    fills_up: bool = False
    """The last block of a row may be shorter."""


def _nbits_product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    inputs: list[ir.Value | None] = [hidden, *weight.values]
    if bias is not None and place.kernels.bias:
        inputs += [None] * (5 - len(inputs)) + [bias]
    attributes = {
        "K": weight.width,
        "N": weight.rows,
        "bits": weight.packing.grid.bits,
        "block_size": weight.packing.block_size,
        "accuracy_level": place.kernels.accuracy_level,
    }
    shape = last(hidden, weight.rows)
    made = place.node(MATMUL, inputs, dtype=hidden.dtype, shape=shape, domain=DOMAIN, attributes=attributes)
    return made if place.kernels.bias else place.plus(made, bias)


def _nbits_look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
    data, scales, *zeros = weight.values
    assert data.shape is not None and ids.shape is not None
    flat = place.reshaped(data, (weight.rows, math.prod(data.shape.numpy()[1:])), f"{data.name}.rows")
    attributes = {
        "bits": weight.packing.grid.bits,
        "block_size": weight.packing.block_size,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    shape = [*ids.shape, weight.width]
    inputs = [flat, ids, scales, *zeros]
    return place.node(GATHER, inputs, dtype=scales.dtype, shape=shape, domain=DOMAIN, attributes=attributes)


def write_experts(place: Place, node: ir.Node, up: Weight, down: Weight) -> ir.Value:
    """Write the operator that computes a MoE node with quantised weights. Returns the output [T, H]."""
    hidden, scores, stack, up_bias, _, down_bias = (*node.inputs, *[None] * 3)[:6]
    assert hidden is not None and stack is not None and stack.shape is not None
    count = int(stack.shape[0])  # type: ignore[arg-type]
    up_parts, down_parts = (_per_expert(place, weight, count) for weight in (up, down))
    inputs: list[ir.Value | None] = [None] * INPUTS
    inputs[:8] = [hidden, scores, up_parts[0], up_parts[1], up_bias, down_parts[0], down_parts[1], down_bias]
    inputs[ZEROS_UP:] = [*(up_parts[2:] or [None]), *(down_parts[2:] or [None])]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {
        **{name: attribute.value for name, attribute in node.attributes.items()},
        "expert_weight_bits": up.packing.grid.bits,
        "block_size": up.packing.block_size,
        "accuracy_level": place.kernels.accuracy_level,
    }
    return place.node(EXPERTS, inputs, dtype=hidden.dtype, shape=hidden.shape, domain=DOMAIN, attributes=attributes)


def _per_expert(place: Place, weight: Weight, count: int) -> list[ir.Value | None]:
    """The parts of a quantised weight, with one matrix per expert."""
    found: list[ir.Value | None] = []
    for value in weight.values:
        assert value.shape is not None
        width = int(np.prod(value.shape.numpy()[1:]))
        found.append(place.reshaped(value, (count, weight.rows // count, width), f"{value.name}.stack"))
    return found


def _nbits_exact(model: ir.Model) -> None:
    """Multiply in floats: at level 0, and 8-bit QMoE, which has no such level, as MoE over dequantised weights."""
    for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type in (MATMUL, EXPERTS)]:
        if node.op_type == MATMUL or node.attributes.get_int("expert_weight_bits", 4) == 4:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT_LEVEL)
        else:
            _replace_by_moe(model, node)


def _replace_by_moe(model: ir.Model, node: ir.Node) -> None:
    """Replace an 8-bit QMoE by MoE."""
    opsets = model.opset_imports
    opsets[""] = max(opsets[""], RESTORE_SINCE)
    place = Place(model.graph, node, Kernels())
    given = [*node.inputs, *[None] * (INPUTS - len(node.inputs))]
    size = node.attributes.get_int("block_size", 0)
    up, down = (
        _restored_stack(place, size, given[first : first + 2], given[zeros])
        for first, zeros in ((2, ZEROS_UP), (5, ZEROS_DOWN))
    )
    own = ("expert_weight_bits", "block_size", "accuracy_level")
    kept = [attribute for name, attribute in node.attributes.items() if name not in own]
    inputs = [given[0], given[1], up, given[4], down, given[7]]
    replace(model.graph, node, ir.Node(DOMAIN, PLAIN_EXPERTS, inputs, kept))


def _restored_stack(place: Place, size: int, parts: list[ir.Value | None], zeros: ir.Value | None) -> ir.Value:
    """(q - z) * s of an 8-bit stack, [E, N, K]. `parts`: integers and scales."""
    data, scales = parts
    assert data is not None and scales is not None and data.shape is not None and scales.shape is not None
    if zeros is None:
        zeros = place.constant(np.full(scales.shape.numpy(), 128, np.uint8), f"{data.name}.zero_points")
    attributes = {"axis": -1, "block_size": size}
    return place.node(RESTORE, [data, scales, zeros], dtype=scales.dtype, shape=data.shape, attributes=attributes)


def _dequantised_product(place: Place, hidden: ir.Value, bias: ir.Value | None, weight: Weight) -> ir.Value:
    attributes = {"axis": 0, "block_size": weight.packing.block_size}
    shape = [weight.width, weight.rows]
    restored = place.node(RESTORE, weight.values, dtype=weight.values[1].dtype, shape=shape, attributes=attributes)
    made = place.node("MatMul", [hidden, restored], dtype=hidden.dtype, shape=last(hidden, weight.rows))
    return place.plus(made, bias)


def _dequantised_exact(model: ir.Model) -> None:
    """Count the axis from the end, which prevents the fusion by ONNX Runtime: the product runs in float32."""
    for node in model.graph:
        if node.op_type == RESTORE and "block_size" in node.attributes:
            node.attributes["axis"] = ir.AttrInt64("axis", -2)


def _look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert ids.shape is not None and scales.dtype is not None
    before, kind = list(ids.shape), scales.dtype
    size = weight.packing.block_size
    blocks = [*before, weight.width // size, size]
    rows = place.node("Gather", [data, ids], dtype=data.dtype, shape=blocks)
    one = place.constant(np.array(1, kind.numpy()), f"rows.one.{kind.name.lower()}")
    middle = place.constant(np.array(weight.packing.grid.middle, np.uint8), "rows.middle")
    steps = place.node(RESTORE, [rows, one, middle], dtype=kind, shape=blocks)
    factors = place.node("Gather", [scales, ids], dtype=kind, shape=[*blocks[:-1], 1])
    scaled = place.node("Mul", [steps, factors], dtype=kind, shape=blocks)
    # The batch is constant, the number of tokens may be symbolic.
    sizes = [size if isinstance(size, int) else -1 for size in (*before, weight.width)]
    shape = integers(place.graph, sizes, f"{data.name}.shape")
    return place.node("Reshape", [scaled, shape], dtype=kind, shape=[*before, weight.width])


LOOK_UP = LookUp(InBlocks(), _look_up, symmetric=True)
"""An 8-bit embedding in standard operators."""
FORMS = (
    Form(
        "matmul_nbits",
        "MatMulNBits and GatherBlockQuantized",
        Product(f"{MATMUL} ({DOMAIN})", InRows(), _nbits_product, _nbits_exact),
        LookUp(InRows(), _nbits_look_up),
        experts=True,
        domains=(DOMAIN,),
        fills_up=True,
    ),
    Form(
        "dequantize_linear",
        "DequantizeLinear before MatMul, in standard operators",
        Product(f"{RESTORE} of blocks and MatMul", InColumns(), _dequantised_product, _dequantised_exact),
        LOOK_UP,
        opset=RESTORE_SINCE,
    ),
)
