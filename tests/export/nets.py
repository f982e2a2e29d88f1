"""Small graphs in a few lines, for tests of passes: their values know types and shapes, as those of a trace do.

A pass is tried beside a provider that takes all operators, or all but some; both graphs run in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort

from partita.export.checkpoint.description import Checkpoint
from partita.export.passes import manager
from partita.export.passes.base import Pass, TracedGraph
from partita.export.trace.attention import Fused
from partita.export.trace.ports import TraceSpec
from partita.export.weights.origins import Origin
from partita.export.weights.sources import FloatSource
from partita.package.contract import Port

Array = npt.NDArray[Any]
LENGTH = 32
"""N of the graphs."""
LATEST = {"contrib": 21, "standard": 24, "none": 21}
"""Operator set of the graphs, by the operators that a pass may write."""


EMPTY = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)


def run_passes(model: ir.Model, passes: Sequence[Pass], told: TracedGraph) -> dict[str, int]:
    """Run `passes` on `model`, of which `told` has the facts: the number of changes per pass."""
    return manager.run(replace(told, model=model), passes)


def float_source(checkpoint: Checkpoint, source: str | Origin, dtype: ir.DataType = ir.DataType.FLOAT) -> FloatSource:
    """A weight of a tensor or origin."""
    origin = checkpoint.tensors[source] if isinstance(source, str) else source
    name = min(info.name for info in origin.tensors())
    return FloatSource(checkpoint, origin, dtype, name, (name,))


class Net:
    """A graph that grows by `op`, from its inputs to its outputs."""

    def __init__(self, opset: int = 21) -> None:
        self.opset = opset
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.constants: dict[str, ir.Value] = {}

    def input(self, name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """A graph input."""
        self.inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)))
        return self.inputs[-1]

    def constant(self, array: Any, dtype: type = np.float32) -> ir.Value:
        """Numbers that are known."""
        return self.weight(ir.tensor(np.asarray(array, dtype), name=f"c{len(self.constants)}"))

    def numbers(self, values: Any) -> ir.Value:
        """Integers that are known: sizes, axes, indices."""
        return self.constant(values, np.int64)

    def weight(self, part: ir.TensorProtocol) -> ir.Value:
        """A weight of a checkpoint."""
        value = ir.Value(
            name=part.name, shape=ir.Shape(part.shape.numpy()), type=ir.TensorType(part.dtype), const_value=part
        )
        return self.constants.setdefault(part.name or "", value)

    def op(self, operator: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: Any) -> Any:
        """The output of a node, or its outputs; `operator` may have a domain before two colons."""
        domain, _, name = operator.rpartition("::")
        made = [ir.convenience.convert_attribute(key, value) for key, value in attributes.items()]
        node = ir.Node(domain, name, list(inputs), made, num_outputs=outputs, name=f"{name}.{len(self.nodes)}")
        for index, value in enumerate(node.outputs):
            value.name = f"v{len(self.nodes)}.{index}"
        node.metadata_props["partita.module"] = f"module.{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def give(self, value: ir.Value, name: str = "out", dtype: ir.DataType = ir.DataType.FLOAT) -> None:
        """Let `value` be a graph output, through a node of its own."""
        out = self.op("Identity", value)
        out.name, out.type = name, ir.TensorType(dtype)
        self.outputs.append(out)

    def model(self) -> ir.Model:
        """The graph with types and shapes of all its values."""
        opsets = {"": self.opset, "com.microsoft": 1}
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.constants.values()),
            opset_imports=opsets,
            name="g",
        )
        model = ir.Model(graph, ir_version=10)
        return common.ShapeInferencePass()(model).model


def attention(
    net: Net, three: Sequence[ir.Value], heads: int, kv_heads: int, width: int, length: int = 8, **attributes: Any
) -> None:
    """GroupQueryAttention of [1, s, heads * width] queries, keys and values; all it computes are graph outputs."""
    cache = [net.input(name, [1, kv_heads, length, width]) for name in ("pk", "pv")]
    cursors = [net.input("last", [1], ir.DataType.INT32), net.input("total", [], ir.DataType.INT32)]
    output, *present = net.op(
        "com.microsoft::GroupQueryAttention",
        *three,
        *cache,
        *cursors,
        outputs=3,
        num_heads=heads,
        kv_num_heads=kv_heads,
        **attributes,
    )
    net.give(output)
    for name, each in zip(("present key", "present value"), present, strict=True):
        net.give(each, name)


def attention_feed(kv_heads: int, width: int, start: int, tokens: int, length: int = 8) -> dict[str, Array]:
    """The cache and cursors of `attention`, for some tokens after `start` others."""
    return {
        "last": np.array([start + tokens - 1], np.int32),
        "total": np.array(start + tokens, np.int32),
        "pk": random(1, kv_heads, length, width, seed=3),
        "pv": random(1, kv_heads, length, width, seed=4),
    }


def context(
    fused: Fused,
    *,
    refused: Collection[str] = (),
    refuses: Callable[[ir.Node], bool] = lambda node: False,
) -> TracedGraph:
    """What a pass is told beside a provider that takes every operator but those that are `refused`, and every node but
    those that it `refuses`. The input `positions` has the role.
    """

    def takes(node: ir.Node) -> bool:
        return node.op_type not in refused and not refuses(node)

    spec = TraceSpec(1, LENGTH, None, LATEST[fused], "contrib")
    ports = (Port(name="positions", role="positions", shape=(1, "s"), dtype="int32"),)
    return TracedGraph(EMPTY, ports, (), (), spec, fused, takes)


def run(model: ir.Model, folder: Path, feed: dict[str, Array]) -> list[Array]:
    """All outputs, computed by ONNX Runtime on the CPU. Inputs that the graph has not are left out."""
    path = folder / "graph.onnx"
    ir.save(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [np.asarray(out) for out in session.run(None, {k: v for k, v in feed.items() if k in names})]


def rewritten(
    make: Callable[[], Net],
    tested: Pass,
    folder: Path,
    feed: dict[str, Array],
    told: TracedGraph,
    tolerance: float = 2e-5,
) -> ir.Model:
    """The model of `make` after the pass, which has changed one place, kept its promises and no value."""
    before = run(make().model(), folder, feed)
    model = make().model()
    assert run_passes(model, [tested], told) == {tested.name: 1}
    for one, other in zip(before, run(model, folder, feed), strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    return model


def left_alone(make: Callable[[], Net], tested: Pass, told: TracedGraph) -> None:
    """The pass changes nothing in the model of `make`, and no value believes that anything else reads it."""
    model = make().model()
    before = operators(model)
    uses = [len(value.uses()) for node in model.graph for value in node.outputs]
    assert run_passes(model, [tested], told) == {tested.name: 0}
    assert operators(model) == before
    assert [len(value.uses()) for node in model.graph for value in node.outputs] == uses


def operators(model: ir.Model) -> list[str]:
    """Operators of the nodes in their order, without the nodes that only give a value out."""
    return [node.op_type for node in model.graph if node.op_type != "Identity"]


def random(*shape: int, seed: int = 0, dtype: type = np.float32) -> Array:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
