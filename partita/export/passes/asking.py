"""Whether the target takes a node that a pass would write: asked once for all passes, in a model of that node alone.

A provider answers from a process of its own, which takes seconds to start. So the passes run on a copy of the graph
and every answer is supposed to be yes; what was asked on the way is put to the provider in one go. Where it says no to
something, the copy is thrown away and the passes run again, with the answers that are known by then.
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
"""Constants of at most so many elements are part of a question: sizes and axes decide what a kernel takes."""
Run = Callable[[ir.Model, PassContext], dict[str, int]]
"""Runs passes in place; returns how many places each changed."""


@dataclass(slots=True)
class Supposing:
    """Answers to passes: what is known, and yes to the rest, which is kept to be asked."""

    opset: int
    known: Mapping[bytes, bool]
    supposed: dict[bytes, Question] = field(default_factory=dict)

    def __call__(self, node: ir.Node) -> bool:
        """Whether the target takes `node`, whose inputs are values of the graph or of their types."""
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
    """`run` on a copy of `model`: the copy, and how many places each pass changed.

    takes: asks the provider that the package is for; None when nobody can be asked, and no pass may suppose anything.
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
    """The node as a model of its own, and the sizes of its inputs in a step of one token; None without their types."""
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
        outputs=[ir.Value(name=f"y{i}" if _is_wanted(out) else "") for i, out in enumerate(node.outputs)],
        name="asked",
    )
    opsets = {"": opset} | ({node.domain: 1} if node.domain else {})
    outputs = [out for out in alone.outputs if out.name]
    graph = ir.Graph(inputs, outputs, nodes=[alone], initializers=constants, opset_imports=opsets, name="asked")
    return bytes(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()), sizes


def _is_wanted(output: ir.Value) -> bool:
    """Whether an output is there at all: a pass leaves the name of one that it does not want empty."""
    return output.name != ""


def _light(value: ir.Value, name: str) -> ir.TensorProtocol:
    """A constant with its values where they are few, a reference to a file that is not there otherwise."""
    tensor = value.const_value
    assert tensor is not None
    if stored(value) is None and tensor.size <= SMALL:
        return ir.tensor(np.asarray(tensor.numpy()), dtype=tensor.dtype, name=name)
    return ir.ExternalTensor(
        "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
    )
