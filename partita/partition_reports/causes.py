"""Nodes that require a Memcpy node, because they read or write its tensor in host memory. Pure.

A copy to the host is caused by its readers, a copy from the host by the producer of the tensor, or by the host readers
of a graph input or constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.diagnosis.graphs import MEMCPY_OPS, OptimisedGraph, edges
from partita.diagnosis.session_index import SessionIndex, choose_provider

TO_HOST = "MemcpyToHost"


@dataclass(frozen=True, slots=True)
class Cause:
    """The nodes, or why they are unknown."""

    nodes: tuple[str, ...]
    unknown_reason: str = ""


def find_causes(index: SessionIndex, names: Sequence[str]) -> dict[str, Cause]:
    """Memcpy node -> plan nodes that require it."""
    graph = index.optimised
    if graph is not None and all(name in graph.nodes for name in names):
        return {name: _without_transposes(index, _cause_in_graph(graph, name)) for name in names}
    edges = _file_edges(index) if names else Edges({}, {}, {})
    return {name: _cause_in_file(index, edges, name) for name in names}


def _without_transposes(index: SessionIndex, cause: Cause) -> Cause:
    """The cause, with layout transposes of ONNX Runtime replaced by the node that they were added for."""
    if not any(name in index.rewritten_with for name in cause.nodes):
        return cause
    runs_as = {each: name for name, file_nodes in index.file_nodes_of.items() for each in file_nodes}
    runs_as |= {name: name for name in index.order}
    found = (runs_as[each] for name in cause.nodes for each in index.rewritten_with.get(name, ()) if each in runs_as)
    own = (name for name in cause.nodes if name not in index.rewritten_with)
    return Cause(tuple(dict.fromkeys((*own, *found))), cause.unknown_reason)


def _cause_in_graph(graph: OptimisedGraph, name: str) -> Cause:
    """The cause by the edges of the optimised graph, which contains the Memcpy node."""
    node = graph.nodes[name]
    tensors = node.outputs if node.op_type == TO_HOST else node.inputs
    if not tensors:
        return Cause((), "the optimised graph does not name its tensor")
    tensor = tensors[0]
    if node.op_type != TO_HOST and tensor in graph.producers:
        return Cause((graph.producers[tensor],))
    readers = tuple(each for each in graph.readers.get(tensor, ()) if graph.nodes[each].op_type not in MEMCPY_OPS)
    if readers:
        return Cause(readers)
    kind = "a session output" if node.op_type == TO_HOST else "a graph input or a constant"
    return Cause((), f"no node reads {graph.original(tensor)} in host memory; it is {kind}")


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges of the exported graph, and the plan nodes that execute its nodes."""

    producers: dict[str, str]
    readers: dict[str, list[str]]
    runs_as: dict[str, str]
    """File node -> plan node that executes it."""


def _file_edges(index: SessionIndex) -> Edges:
    """Edges of a session's exported graph."""
    makers, readers = edges(index.exported)
    runs_as = {each: name for name, file_nodes in index.file_nodes_of.items() for each in file_nodes}
    return Edges(makers, readers, runs_as | {name: name for name in index.order})


def _cause_in_file(index: SessionIndex, edges: Edges, name: str) -> Cause:
    """The cause by the edges of the exported graph and the tensor in the log."""
    line = index.memcpy.get(name)
    if line is None:
        return Cause((), "no source names its tensor")
    maker = edges.runs_as.get(edges.producers.get(line.tensor, ""))
    if line.op_type != TO_HOST and maker is not None:
        return Cause((maker,))
    readers = dict.fromkeys(edges.runs_as[each] for each in edges.readers.get(line.tensor, ()) if each in edges.runs_as)
    own = choose_provider(index.providers_by_source[name])
    others = tuple(each for each in readers if choose_provider(index.providers_by_source[each]) != own)
    if others:
        return Cause(others)
    return Cause((), f"no node of the ONNX file on another provider reads or produces {line.tensor}")
