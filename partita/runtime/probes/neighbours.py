"""A node that is taken when it is alone, tried with the nodes around it: with which of them it no longer is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partita.observations.text_format import name_some
from partita.runtime.model_file import all_nodes, bodies, reads
from partita.runtime.probes.cases import COMPANY, NODE, part_model, zeros_needed
from partita.runtime.probes.graphs import CannotProbeError, Graph

if TYPE_CHECKING:
    import onnx

MOST_SINGLE = 6
"""Most neighbours with which a node is tried one by one."""
FURTHEST = 4
"""Steps along edges of the graph, at most, to the nodes that are tried together with it."""
MOST_TOGETHER = 64
"""Most nodes in one experiment."""
MOST_NAMED = 4
MOST_BYTES = 64 << 20
"""Most weights in one experiment, which a session has to hold: a larger one says nothing of the neighbours."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A node with some of the nodes around it."""

    words: str
    """Who they are: `first (Relu)`."""
    model: onnx.ModelProto


def neighbourhoods(graph: Graph, name: str) -> Iterator[Neighbourhood]:
    """The node with each node next to it, six at most, then with all of them, then with more and more of those around,
    as long as they and their weights are few; a node in a body with the node of the main graph that has the body.
    """
    nodes = {node.name: node for node in graph.proto.graph.node if node.name}
    if name not in nodes:
        yield from _holder(graph, nodes.values(), name)
        return
    beside = _edges(nodes)
    around: list[set[str]] = []
    reached = {name}
    for _ in range(FURTHEST):
        reached = reached | {other for own in reached for other in beside[own]}
        if len(reached) > MOST_TOGETHER or (around and reached == around[-1]):
            break
        around.append(reached)
    singles = [{name, other} for other in list(beside[name])[:MOST_SINGLE]]
    for chosen in (*singles, *(each for each in around if each not in singles)):
        if len(chosen) > 1 and (model := _model(graph, chosen, name)) is not None:
            if zeros_needed([model]) > MOST_BYTES:
                return
            others = [f"{own} ({node.op_type})" for own, node in nodes.items() if own in chosen and own != name]
            yield Neighbourhood(name_some(others, MOST_NAMED), model)


def _holder(graph: Graph, nodes: Iterable[onnx.NodeProto], name: str) -> Iterator[Neighbourhood]:
    """The node of the main graph in whose body a node is, with the whole body; nothing where that is too large."""
    found = graph.find(name)
    for holder in nodes if found is not None else ():
        if any(inner is found for body in bodies(holder) for inner in all_nodes(body)):
            model = _model(graph, [holder.name], found.name if found is not None else name)
            if model is not None and zeros_needed([model]) <= MOST_BYTES:
                yield Neighbourhood(f"{holder.name} ({holder.op_type}), in whose body it is,", model)


def _edges(nodes: Mapping[str, onnx.NodeProto]) -> dict[str, dict[str, None]]:
    """The nodes that feed a node or that it feeds, for each, in the order of the graph."""
    makers = {output: name for name, node in nodes.items() for output in node.output if output}
    found: dict[str, dict[str, None]] = {name: {} for name in nodes}
    for name, node in nodes.items():
        for maker in (makers[read] for read in reads(node) if read in makers):
            found[name][maker] = found[maker][name] = None
    return found


def _model(graph: Graph, chosen: Iterable[str], name: str) -> onnx.ModelProto | None:
    """The nodes as a model in which all but this one are neighbours; None where a type is not known."""
    wanted = set(chosen)
    try:
        model = part_model(graph, [node.name for node in graph.proto.graph.node if node.name in wanted], fixed=False)
    except CannotProbeError:
        return None
    for number, node in enumerate(all_nodes(model.graph)):
        node.name = NODE if node.name == name else f"{COMPANY}{number}"
    return model
