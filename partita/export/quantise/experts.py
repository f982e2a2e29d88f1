"""Replace MoE by QMoE, ONNX Runtime's operator on quantised experts.

    y = QMoE(x [T, H], scores [T, E], up [E, F, bytes], its scales [E, F, M], bias [E, F], down [E, H, bytes], ...)

Only the chosen experts are computed. The byte layout is that of MatMulNBits, with the matrices of a stack concatenated.
One block size is used for both stacks and divides H and I. On the CPU provider of ONNX Runtime 1.31.1 all activations
of MoE are correct; 4-bit weights are multiplied in float32 at accuracy level 0, and 8-bit weights with quantised
activations at every level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from partita.export.quantise.forms import Place, Weight
from partita.export.target import Kernels
from partita.export.weights.origins import FlattenedOrigin
from partita.export.weights.sources import FloatSource, weight_part

OPERATOR, PLAIN, DOMAIN = "QMoE", "MoE", "com.microsoft"
EXACT_LEVEL = 0
"""The accuracy level without quantised activations, for 4-bit weights."""
ZEROS_UP, ZEROS_DOWN, INPUTS = 11, 12, 13
"""Input indices of the zero points, and the number of inputs."""


def stacks(node: ir.Node) -> tuple[FloatSource, FloatSource] | None:
    """The weights [E * F, H] and [E * H, I] of a MoE node; None for other nodes."""
    if (node.domain, node.op_type) != (DOMAIN, PLAIN) or any(value is not None for value in node.inputs[6:]):
        return None
    found = [_flat(node.inputs[index]) for index in (2, 4)]
    up, down = found
    return None if up is None or down is None else (up, down)


def _flat(value: ir.Value | None) -> FloatSource | None:
    """A stack of the checkpoint as concatenated matrices."""
    weight = weight_part(value)
    if weight is None or weight.shape.rank() != 3 or weight.is_reshaped or not isinstance(weight.source, FloatSource):
        return None
    return flatten_stack(weight.source)


def flatten_stack(plain: FloatSource) -> FloatSource:
    """A stack [E, N, K] as [E * N, K]."""
    return replace(plain, origin=FlattenedOrigin(plain.origin))


def stack_tensors(models: Iterable[ir.Model]) -> frozenset[str]:
    """Tensors of stacks from which a graph selects matrices with Gather: unquantised, to be stored once."""
    found: set[str] = set()
    for model in models:
        for node in model.graph:
            weight = weight_part(node.inputs[0]) if node.op_type == "Gather" and node.inputs else None
            if weight is not None and weight.shape.rank() > 2:
                found |= weight.source.tensors
    return frozenset(found)


def write(place: Place, node: ir.Node, up: Weight, down: Weight) -> ir.Value:
    """Write the operator that computes a MoE node with quantised weights. Returns the output [T, H]."""
    given = [*node.inputs, *[None] * (6 - len(node.inputs))]
    hidden, scores, stack, up_bias, down_bias = given[0], given[1], given[2], given[3], given[5]
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
    return place.node(OPERATOR, inputs, dtype=hidden.dtype, shape=hidden.shape, domain=DOMAIN, attributes=attributes)


def _per_expert(place: Place, weight: Weight, count: int) -> list[ir.Value | None]:
    """The parts of a quantised weight, with one matrix per expert."""
    found: list[ir.Value | None] = []
    for value in weight.values:
        assert value.shape is not None
        width = int(np.prod(value.shape.numpy()[1:]))
        found.append(place.reshaped(value, (count, weight.rows // count, width), f"{value.name}.stack"))
    return found


def make_exact(model: ir.Model) -> None:
    """Make every QMoE multiply in floats: at level 0 with 4 bits, as MoE over dequantised weights with 8."""
    for node in [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)]:
        if node.attributes.get_int("expert_weight_bits", 4) == 4:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT_LEVEL)
        else:
            _replace_by_moe(model.graph, node)


def _replace_by_moe(graph: ir.Graph, node: ir.Node) -> None:
    """Replace an 8-bit QMoE by MoE."""
    place = Place(graph, node, Kernels())
    given = [*node.inputs, *[None] * (INPUTS - len(node.inputs))]
    up = _restored(place, node, given[2], given[3], given[ZEROS_UP])
    down = _restored(place, node, given[5], given[6], given[ZEROS_DOWN])
    own = ("expert_weight_bits", "block_size", "accuracy_level")
    attributes = {name: attribute.value for name, attribute in node.attributes.items() if name not in own}
    before = node.outputs[0]
    made = place.node(
        PLAIN,
        [given[0], given[1], up, given[4], down, given[7]],
        dtype=before.dtype,
        shape=before.shape,
        domain=DOMAIN,
        attributes=attributes,
    )
    before.replace_all_uses_with(made)
    graph.remove(node, safe=True)


def _restored(
    place: Place, node: ir.Node, data: ir.Value | None, scales: ir.Value | None, zeros: ir.Value | None
) -> ir.Value:
    """(q - z) * s of an 8-bit stack, [E, N, K]."""
    assert data is not None and scales is not None and data.shape is not None and scales.dtype is not None
    kind, size = scales.dtype, node.attributes.get_int("block_size", 0)
    sizes = [int(each) for each in data.shape.numpy()]
    blocks = [sizes[0] * sizes[1] * sizes[2] // size, size]

    def in_blocks(value: ir.Value, width: int) -> ir.Value:
        shape = place.constant(np.array([-1, width], np.int64), f"experts.blocks.{width}")
        return place.node("Reshape", [value, shape], dtype=value.dtype, shape=[blocks[0], width])

    def as_numbers(value: ir.Value) -> ir.Value:
        return place.node("Cast", [value], dtype=kind, shape=value.shape, attributes={"to": int(kind)})

    middle = place.constant(np.array(128, kind.numpy()), f"experts.middle.{kind.name.lower()}")
    zero = middle if zeros is None else as_numbers(in_blocks(zeros, 1))
    steps = place.node("Sub", [as_numbers(in_blocks(data, size)), zero], dtype=kind, shape=blocks)
    numbers = place.node("Mul", [steps, in_blocks(scales, 1)], dtype=kind, shape=blocks)
    shape = place.constant(np.array(sizes, np.int64), f"{data.name}.shape")
    return place.node("Reshape", [numbers, shape], dtype=kind, shape=sizes)
