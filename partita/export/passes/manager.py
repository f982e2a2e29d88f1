"""Runs passes in order, and names the pass of an error.

The target is probed with nodes that passes would write, in one batch for all passes, because a provider answers in a
separate process, which takes seconds to start: passes run on a copy of the graph with every answer assumed to be yes;
if one is then rejected, they run again on a new copy with the known answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from partita.errors import PartitaError
from partita.export.passes.base import Pass, TracedGraph
from partita.export.target import NodeSupport, Question
from partita.export.weights.sources import weight_part


class PassError(PartitaError):
    """A pass failed."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"pass {name} failed: {what}; this is a bug in Partita; please report the model and the traceback"
        )


def run(traced: TracedGraph, passes: Sequence[Pass]) -> dict[str, int]:
    """Run `passes` in order; returns the number of changes per pass. Raises PassError."""
    counts: dict[str, int] = {}
    for each in passes:
        try:
            counts[each.name] = each.run(traced)
            traced.graph.sort()
        except PartitaError:
            raise
        except Exception as error:
            what = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
            raise PassError(each.name, what) from error
    return counts


IR_VERSION = 10
SMALL = 64
"""Constants with at most this number of elements are part of a probe: sizes and axes decide which kernel is used."""


def run_on_copy(
    traced: TracedGraph, passes: Sequence[Pass], takes: NodeSupport | None
) -> tuple[TracedGraph, dict[str, int]]:
    """Run passes on a copy: the copy, and changes per pass. `takes`: probes the provider; None: no support."""
    known: dict[bytes, bool] = {}
    while True:
        attempt, supposed = traced.copy(), dict[bytes, Question]()
        if takes is not None:
            attempt = replace(attempt, supports=partial(_supposes, traced.spec.opset, known, supposed))
        counts = run(attempt, passes)
        if takes is None or not supposed:
            return attempt, counts
        answers = takes(list(supposed.values()))
        known |= dict(zip(supposed, answers, strict=True))
        if all(answers):
            return attempt, counts


def _supposes(opset: int, known: Mapping[bytes, bool], supposed: dict[bytes, Question], node: ir.Node) -> bool:
    """Whether the target is known to support a node, whose inputs have types and shapes; else yes, and `supposed`."""
    requested = question(node, opset)
    if requested is None:
        return False
    if requested[0] not in known:
        supposed[requested[0]] = requested
    return known.get(requested[0], True)


def question(node: ir.Node, opset: int) -> Question | None:
    """A model of the node alone, and its input sizes for a one-token step; None without input types."""
    made: dict[ir.Value, ir.Value] = {}
    for value in dict.fromkeys(value for value in node.inputs if value is not None):
        if value.type is None or value.shape is None:
            return None
        made[value] = ir.Value(name=f"x{len(made)}", shape=value.shape, type=value.type)
        if value.const_value is not None:
            made[value].const_value = _light(value, f"x{len(made) - 1}")
    constants = [new for new in made.values() if new.const_value is not None]
    inputs = [new for new in made.values() if new.const_value is None]
    sizes = {new.name or "": tuple(size if isinstance(size, int) else 1 for size in new.shape or ()) for new in inputs}
    alone = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else made[value] for value in node.inputs],
        list(node.attributes.values()),
        outputs=[ir.Value(name="" if out.name == "" else f"y{i}") for i, out in enumerate(node.outputs)],  # "": omitted
        name="asked",
    )
    opsets = {"": opset} | ({node.domain: 1} if node.domain else {})
    outputs = [out for out in alone.outputs if out.name]
    graph = ir.Graph(inputs, outputs, nodes=[alone], initializers=constants, opset_imports=opsets, name="asked")
    return bytes(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()), sizes


def _light(value: ir.Value, name: str) -> ir.TensorProtocol:
    """A constant with its values where they are few, else a reference to a file that does not exist."""
    tensor = value.const_value
    assert tensor is not None
    if weight_part(value) is None and tensor.size <= SMALL:
        return ir.tensor(np.asarray(tensor.numpy()), dtype=tensor.dtype, name=name)
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir="")
