"""Probe the target with nodes that passes would write, in one batch for all passes.

A provider answers in a separate process, which takes seconds to start. Therefore passes run on a copy of the graph with
every answer assumed to be yes; then all assumed nodes are probed. If one is rejected, the passes run again on a new
copy with the known answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from partita.export.passes.base import PassContext
from partita.export.target import Question, TakesEach
from partita.export.weights.sources import stored

IR_VERSION = 10
SMALL = 64
"""Constants with at most this number of elements are part of a probe: sizes and axes decide which kernel is used."""
Run = Callable[[ir.Model, PassContext], dict[str, int]]
"""Runs passes in place; returns the number of changes per pass."""


@dataclass(slots=True)
class Supposing:
    """Answers for passes: known results, and an assumed yes for other nodes, which are recorded."""

    opset: int
    known: Mapping[bytes, bool]
    supposed: dict[bytes, Question] = field(default_factory=dict)

    def __call__(self, node: ir.Node) -> bool:
        """Whether the target supports `node`, whose inputs have types and shapes."""
        asked = question(node, self.opset)
        if asked is None:
            return False
        if asked[0] in self.known:
            return self.known[asked[0]]
        self.supposed[asked[0]] = asked
        return True


def rewritten(
    model: ir.Model, context: PassContext, run: Run, takes: TakesEach | None
) -> tuple[ir.Model, dict[str, int]]:
    """Run passes on a copy of `model`. Returns the copy, and the number of changes per pass.

    `takes`: probes the provider; None without one, in which case no pass may assume support.
    """
    known: dict[bytes, bool] = {}
    while True:
        supposing = Supposing(context.spec.opset, known)
        attempt = model.clone()
        counts = run(attempt, context if takes is None else replace(context, takes=supposing))
        if takes is None or not supposing.supposed:
            return attempt, counts
        answers = takes(list(supposing.supposed.values()))
        known |= dict(zip(supposing.supposed, answers, strict=True))
        if all(answers):
            return attempt, counts


def question(node: ir.Node, opset: int) -> Question | None:
    """A model of the node alone, and its input sizes for a one-token step; None without input types."""
    inputs: list[ir.Value] = []
    constants: list[ir.Value] = []
    sizes: dict[str, tuple[int, ...]] = {}
    made: dict[ir.Value, ir.Value] = {}
    for value in dict.fromkeys(value for value in node.inputs if value is not None):
        if value.type is None or value.shape is None:
            return None
        name = f"x{len(made)}"
        made[value] = new = ir.Value(name=name, shape=value.shape, type=value.type)
        if value.const_value is None:
            inputs.append(new)
            sizes[name] = tuple(size if isinstance(size, int) else 1 for size in value.shape)
        else:
            new.const_value = _light(value, name)
            constants.append(new)
    alone = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else made[value] for value in node.inputs],
        list(node.attributes.values()),
        outputs=[ir.Value(name=f"y{i}" if _exists(out) else "") for i, out in enumerate(node.outputs)],
        name="asked",
    )
    opsets = {"": opset} | ({node.domain: 1} if node.domain else {})
    outputs = [out for out in alone.outputs if out.name]
    graph = ir.Graph(inputs, outputs, nodes=[alone], initializers=constants, opset_imports=opsets, name="asked")
    return bytes(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()), sizes


def _exists(output: ir.Value) -> bool:
    """Whether an output exists; an omitted output has an empty name."""
    return output.name != ""


def _light(value: ir.Value, name: str) -> ir.TensorProtocol:
    """A constant with its values where they are few, else a reference to a file that does not exist."""
    tensor = value.const_value
    assert tensor is not None
    if stored(value) is None and tensor.size <= SMALL:
        return ir.tensor(np.asarray(tensor.numpy()), dtype=tensor.dtype, name=name)
    return ir.ExternalTensor(
        "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
    )
