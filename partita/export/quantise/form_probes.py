"""Probe which form of quantised weights a target supports, before the model is traced.

A probe contains the nodes that the form would write, with zero weights. A provider that dequantises the whole matrix in
every run, as the CPU provider does at some levels, counts as one without a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from partita.export.passes.base import added
from partita.export.quantise import experts
from partita.export.quantise.forms import Form, Place, Weight
from partita.export.quantise.weight_source import Layout, Packing
from partita.export.target import Kernels, Target
from partita.export.weights import to_ir

PROBED_WIDTH = 256
"""K and N of probed nodes: a multiple of every block size."""
RESTORES = "dequantises the whole matrix in every run on this machine, which is slower than fp32"
EXPERTS = 4
GATED: Mapping[str, str | int | float] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "k": 2,
    "normalize_routing_weights": 1,
}
"""Attributes of probed experts."""
OPSET, IR_VERSION = 21, 10
SIZES: Mapping[str, tuple[int, ...]] = {
    "x": (1, 1, PROBED_WIDTH),
    "ids": (1, 1),
    "hidden": (1, PROBED_WIDTH),
    "scores": (1, EXPERTS),
}
"""Input shapes of the probes."""


def refusal(target: Target, model: bytes, *, restores: bool = False) -> str:
    """Why `target` does not run a probe; empty when it does. `restores`: dequantising a whole matrix is a reason."""
    assert target.ask is not None
    result = target.ask(model, SIZES)
    if result.failure or result.unsupported:
        return result.failure or f"leaves {', '.join(sorted(result.unsupported))} to another provider"
    return RESTORES if restores and target.unpacks is not None and target.unpacks(model, SIZES) else ""


def experts_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with one layer's gated experts for every packing."""
    kind, width = to_ir(dtype), PROBED_WIDTH
    place, hidden = _new_graph("hidden", kind, kernels, SIZES["hidden"])
    scores = ir.Value(name="scores", shape=ir.Shape(SIZES["scores"]), type=ir.TensorType(kind))
    stack = ir.Value(name="stack", shape=ir.Shape([EXPERTS, 2 * width, width]))
    node = ir.node(experts.PLAIN, [hidden, scores, stack], attributes=dict(GATED), domain=experts.DOMAIN)
    place.graph.inputs.append(scores)
    made = []
    for index, packing in enumerate(packings):
        up, down = (
            _zeros(place, f"w{index}.{rows}", form.product.layout, packing, kind, rows, width)
            for rows in (2 * EXPERTS * width, EXPERTS * width)
        )
        made.append(experts.write(place, node, up, down))
    return _serialised(place, made)


def product_model(
    form: Form,
    kernels: Kernels,
    packings: Sequence[Packing],
    dtype: str,
    *,
    tokens: int = 1,
    width: int = PROBED_WIDTH,
) -> bytes:
    """A model with products of x [1, tokens, width] and weights [width, width] of every packing."""
    place, hidden = _new_graph("x", to_ir(dtype), kernels, (1, tokens, width))
    made = []
    for index, packing in enumerate(packings):
        weight = _zeros(place, f"w{index}", form.product.layout, packing, to_ir(dtype), width, width)
        made.append(form.product.write(place, hidden, None, weight))
    return _serialised(place, made)


def lookup_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with a row lookup for every packing."""
    place, ids = _new_graph("ids", ir.DataType.INT64, kernels, SIZES["ids"])
    made = []
    for index, packing in enumerate(packings):
        weight = _zeros(place, f"w{index}", form.look_up.layout, packing, to_ir(dtype), PROBED_WIDTH, PROBED_WIDTH)
        made.append(form.look_up.write(place, ids, weight))
    return _serialised(place, made)


def _new_graph(name: str, dtype: ir.DataType, kernels: Kernels, shape: tuple[int, ...]) -> tuple[Place, ir.Value]:
    """A graph with one input, and a place at its end."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": OPSET, "com.microsoft": 1}, name="packed")
    return Place(graph, None, kernels), value


def _zeros(
    place: Place, name: str, layout: Layout, packing: Packing, dtype: ir.DataType, rows: int, width: int
) -> Weight:
    """A weight of zeros; its scales are 1."""
    values = []
    for part in layout.parts(packing, dtype, rows, width):
        array = np.ones(part.shape) if part.dtype.is_floating_point() else np.zeros(part.shape)
        tensor = ir.tensor(array.astype(part.dtype.numpy()), dtype=part.dtype)
        values.append(added(place.graph, tensor, f"{name}.{part.label}" if part.label else name))
    return Weight(tuple(values), rows, width, packing)


def _serialised(place: Place, outputs: Sequence[ir.Value]) -> bytes:
    """The serialised model, with names for all nodes and values."""
    for index, node in enumerate(place.graph):
        node.name = f"{node.op_type}_{index}"
        for value in node.outputs:
            value.name = f"{node.name}.output"
    place.graph.outputs.extend(outputs)
    return bytes(ir.to_proto(ir.Model(place.graph, ir_version=IR_VERSION)).SerializeToString())
