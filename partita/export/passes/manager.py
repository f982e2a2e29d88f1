"""Runs passes one after the other, says which one failed over which node, and holds each to what every pass promises.

A pass changes nodes and weights, and nodes are put in order after it. It keeps the graph's inputs and outputs, with
their types and shapes; it leaves no value that is read and never made, and no name that two things have. Looking at
that costs milliseconds beside a trace, so it is done after every pass of every export, not in tests alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from partita.errors import PartitaError
from partita.export.graph.node_names import MODULE
from partita.export.passes.base import OverNodeError, Pass, PassContext

Face = tuple[tuple[str | None, str, str], ...]
"""Name, type and shape of every input and every output of a graph."""


class PassError(PartitaError):
    """A pass failed, or did not keep what it promises."""

    def __init__(self, name: str, what: str, node: ir.Node | None = None) -> None:
        over = "" if node is None else f" over node {_called(node)!r} ({node.op_type})"
        super().__init__(
            f"pass {name} failed{over}: {what}; this is a bug in Partita; please report the model and the traceback"
        )
        self.name = name
        self.node = None if node is None else _called(node)
        """The node it failed over, by name; None when that is not known."""


def _called(node: ir.Node) -> str | None:
    """What a user knows a node by: a pass before may have made it, and names come last of all."""
    module = node.metadata_props.get(MODULE, "")
    return node.name if (node.name or "").startswith(module) else f"{module}/{node.op_type}"


def run(model: ir.Model, passes: Sequence[Pass], context: PassContext) -> dict[str, int]:
    """Run `passes` in order; returns how many places each changed. Raises PassError."""
    counts: dict[str, int] = {}
    face = _face_of(model.graph)
    for each in passes:
        counts[each.name] = _run_one(model, each, context)
        _put_in_order(model.graph, each.name)
        for broken in _promises_broken(model.graph, face):
            raise PassError(each.name, broken)
    return counts


def _run_one(model: ir.Model, each: Pass, context: PassContext) -> int:
    """Run one pass. What it refuses by name is its own error; everything else becomes PassError."""
    try:
        return each.run(model, context)
    except PartitaError:
        raise
    except OverNodeError as error:
        cause = error.__cause__
        assert cause is not None
        raise PassError(each.name, _told(cause), error.node) from error
    except Exception as error:
        raise PassError(each.name, _told(error)) from error


def _put_in_order(graph: ir.Graph, name: str) -> None:
    """Have every node come after those that it reads, and otherwise stay where it is.

    An operator that takes the place of several reads what each of them read; some of that may be made between them, as
    the weight of a norm that the model computes is. Raises PassError where nodes read each other in a circle.
    """
    made: set[ir.Node] = set()
    for node in graph:
        producers = (value.producer() for value in node.inputs if value is not None)
        if any(each is not None and each.graph is graph and each not in made for each in producers):
            break
        made.add(node)
    else:
        return
    try:
        graph.sort()
    except ValueError as error:
        raise PassError(name, "its nodes read each other in a circle") from error


def _told(error: BaseException) -> str:
    """An exception in one line."""
    return ": ".join(text for text in (type(error).__name__, " ".join(str(error).split())) if text)


def _face_of(graph: ir.Graph) -> Face:
    """What others see of a graph."""
    return tuple((value.name, str(value.type), str(value.shape)) for value in (*graph.inputs, *graph.outputs))


def _promises_broken(graph: ir.Graph, face: Face) -> Iterator[str]:
    """What is wrong with a graph after a pass, a sentence each; `face`: its inputs and outputs before."""
    now = _face_of(graph)
    for before, after in zip(face, now, strict=False):
        if before != after:
            yield f"input or output {' '.join(map(str, before))} changed to {' '.join(map(str, after))}"
    if len(face) != len(now):
        yield f"the graph had {len(face)} inputs and outputs and has {len(now)}"
    yield from _dangling(graph, set())
    yield from _named_twice(graph)


def _dangling(graph: ir.Graph, outside: set[ir.Value]) -> Iterator[str]:
    """Values that are read or given out, and that nothing has made before. `outside`: what a subgraph may read, too."""
    made = outside | {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in made:
                yield f"node {node.name!r} ({node.op_type}) reads {value.name!r}, which no earlier node produces"
        for inner in _subgraphs(node):
            yield from _dangling(inner, made)
        made.update(node.outputs)
    for value in graph.outputs:
        if value not in made:
            yield f"no node produces the output {value.name!r}"
    for value in graph.initializers.values():
        if value.const_value is None and value not in graph.inputs:
            yield f"the constant {value.name!r} has no value"


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Graphs among the attributes of a node."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()


def _named_twice(graph: ir.Graph) -> Iterator[str]:
    """Names that two values have, or two nodes. What has no name yet gets one when all passes are done."""
    values = {*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)}
    yield from (f"{count} values are called {name!r}" for name, count in _twice(value.name for value in values))
    yield from (f"{count} nodes are called {name!r}" for name, count in _twice(node.name for node in graph))
    for name, value in graph.initializers.items():
        if name != value.name:
            yield f"the constant {value.name!r} is listed as {name!r}"


def _twice(names: Iterable[str | None]) -> list[tuple[str, int]]:
    """Names that are there more than once, and how often."""
    return [(name, count) for name, count in Counter(filter(None, names)).items() if count > 1]
