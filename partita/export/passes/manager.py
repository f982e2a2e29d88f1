"""Runs passes in order, names the pass of an error, and checks the invariants after every pass.

A pass may change nodes and weights. Inputs and outputs keep their types and shapes, every read value has a producer,
and names are unique. The checks take milliseconds.

The target is probed with nodes that passes would write, in one batch for all passes, because a provider answers in a
separate process, which takes seconds to start: passes run on a copy of the graph with every answer assumed to be yes;
if one is then rejected, they run again on a new copy with the known answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from partita.errors import PartitaError
from partita.export.passes.base import Pass, TracedGraph
from partita.export.target import NodeSupport, Question
from partita.export.weights.sources import weight_part

Face = tuple[tuple[str | None, str, str], ...]
"""Name, type and shape of every input and output of a graph."""


class PassError(PartitaError):
    """A pass failed or broke an invariant."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"pass {name} failed: {what}; this is a bug in Partita; please report the model and the traceback"
        )


def run(traced: TracedGraph, passes: Sequence[Pass]) -> dict[str, int]:
    """Run `passes` in order; returns the number of changes per pass. Raises PassError."""
    counts: dict[str, int] = {}
    graph = traced.graph
    face = _face_of(graph)
    for each in passes:
        try:
            counts[each.name] = each.run(traced)
            graph.sort()
        except PartitaError:
            raise
        except Exception as error:
            what = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
            raise PassError(each.name, what) from error
        broken = next(_broken_invariants(graph, face), None)
        if broken is not None:
            raise PassError(each.name, broken)
    return counts


def _face_of(graph: ir.Graph) -> Face:
    """Name, type and shape of inputs and outputs."""
    return tuple((value.name, str(value.type), str(value.shape)) for value in (*graph.inputs, *graph.outputs))


def _broken_invariants(graph: ir.Graph, face: Face) -> Iterator[str]:
    """The broken invariants of a graph after a pass, in sentences; `face`: its inputs and outputs before."""
    now = _face_of(graph)
    for before, after in zip(face, now, strict=False):
        if before != after:
            yield f"input or output {' '.join(map(str, before))} changed to {' '.join(map(str, after))}"
    if len(face) != len(now):
        yield f"the number of inputs and outputs changed from {len(face)} to {len(now)}"
    yield from _dangling(graph, set())
    yield from _named_twice(graph)


def _dangling(graph: ir.Graph, outside: set[ir.Value]) -> Iterator[str]:
    """Values that are read or are outputs, and have no earlier producer. `outside`: values of the outer graphs."""
    made = outside | {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in made:
                yield f"node {node.name!r} ({node.op_type}) reads {value.name!r}, which no earlier node produces"
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _dangling(attribute.as_graph(), made)
        made.update(node.outputs)
    for value in graph.outputs:
        if value not in made:
            yield f"no node produces the output {value.name!r}"
    for value in graph.initializers.values():
        if value.const_value is None and value not in graph.inputs:
            yield f"the constant {value.name!r} has no value"


def _named_twice(graph: ir.Graph) -> Iterator[str]:
    """Names shared by two values or two nodes. Unnamed ones get names after all passes."""
    values = {*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)}
    for kind, names in (("values", [value.name for value in values]), ("nodes", [node.name for node in graph])):
        counts = Counter(filter(None, names)).items()
        yield from (f"{count} {kind} have the name {name!r}" for name, count in counts if count > 1)
    for name, value in graph.initializers.items():
        if name != value.name:
            yield f"the constant {value.name!r} is listed as {name!r}"


IR_VERSION = 10
SMALL = 64
"""Constants with at most this number of elements are part of a probe: sizes and axes decide which kernel is used."""


@dataclass(slots=True)
class Supposing:
    """Answers for passes: known results, and an assumed yes for other nodes, which are recorded."""

    opset: int
    known: Mapping[bytes, bool]
    supposed: dict[bytes, Question] = field(default_factory=dict)

    def __call__(self, node: ir.Node) -> bool:
        """Whether the target supports `node`, whose inputs have types and shapes."""
        requested = question(node, self.opset)
        if requested is None:
            return False
        if requested[0] in self.known:
            return self.known[requested[0]]
        self.supposed[requested[0]] = requested
        return True


def run_on_copy(
    traced: TracedGraph, passes: Sequence[Pass], takes: NodeSupport | None
) -> tuple[TracedGraph, dict[str, int]]:
    """Run passes on a copy: the copy, and changes per pass. `takes`: probes the provider; None: no support."""
    known: dict[bytes, bool] = {}
    while True:
        supposing = Supposing(traced.spec.opset, known)
        attempt = traced.copy()
        counts = run(attempt if takes is None else replace(attempt, supports=supposing), passes)
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
    return ir.ExternalTensor(
        "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
    )
