"""Which nodes make a Memcpy node necessary: those that read or write its tensor in host memory. Pure.

A copy to the host is there for its readers, a copy from the host because of the node that made the tensor. A graph
input or constant that both sides read lies on the host because of the readers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.diagnosis.graphs import MEMCPY_OPS, OptimisedGraph, edges
from partita.diagnosis.session_index import SessionIndex, choose_provider

TO_HOST = "MemcpyToHost"


@dataclass(frozen=True, slots=True)
class Cause:
    """The nodes, or why none can be named."""

    nodes: tuple[str, ...]
    unknown: str = ""


def find_causes(index: SessionIndex, names: Sequence[str]) -> dict[str, Cause]:
    """Nodes of the plan that make each of these Memcpy nodes necessary."""
    graph = index.optimised
    if graph is not None and all(name in graph.nodes for name in names):
        return {name: _that_work(index, _cause_in_graph(graph, name)) for name in names}
    edges = _file_edges(index) if names else Edges({}, {}, {})
    return {name: _cause_in_file(index, edges, name) for name in names}


def _that_work(index: SessionIndex, cause: Cause) -> Cause:
    """The cause with nodes that do the file's work in place of what ONNX Runtime put around them in another layout."""
    if not any(name in index.beside for name in cause.nodes):
        return cause
    works = {each: name for name, behind in index.stands_for.items() for each in behind}
    works |= {name: name for name in index.order}
    found = (works[each] for name in cause.nodes for each in index.beside.get(name, ()) if each in works)
    own = (name for name in cause.nodes if name not in index.beside)
    return Cause(tuple(dict.fromkeys((*own, *found))), cause.unknown)


def _cause_in_graph(graph: OptimisedGraph, name: str) -> Cause:
    """The cause by the edges of the graph as it runs, which has the Memcpy node itself."""
    node = graph.nodes[name]
    tensors = node.outputs if node.op_type == TO_HOST else node.inputs
    if not tensors:
        return Cause((), "the optimised graph has no tensor for it")
    tensor = tensors[0]
    if node.op_type != TO_HOST and tensor in graph.makers:
        return Cause((graph.makers[tensor],))
    readers = tuple(each for each in graph.readers.get(tensor, ()) if graph.nodes[each].op_type not in MEMCPY_OPS)
    if readers:
        return Cause(readers)
    what = "the session outputs it" if node.op_type == TO_HOST else "it is a graph input or a constant"
    return Cause((), f"no node reads {graph.original(tensor)} in host memory; {what}")


@dataclass(frozen=True, slots=True)
class Edges:
    """The exported graph, and where its nodes are in the plan."""

    makers: dict[str, str]
    readers: dict[str, list[str]]
    runs_as: dict[str, str]
    """The node of the plan that does the work of an exported one."""


def _file_edges(index: SessionIndex) -> Edges:
    """Sort the exported graph of a session for look-up."""
    makers, readers = edges(index.exported)
    runs_as = {each: name for name, behind in index.stands_for.items() for each in behind}
    return Edges(makers, readers, runs_as | {name: name for name in index.order})


def _cause_in_file(index: SessionIndex, edges: Edges, name: str) -> Cause:
    """The cause by the edges of the exported graph and the tensor that the log names."""
    line = index.memcpy.get(name)
    if line is None:
        return Cause((), "no source tells which tensor it copies")
    maker = edges.runs_as.get(edges.makers.get(line.tensor, ""))
    if line.op_type != TO_HOST and maker is not None:
        return Cause((maker,))
    readers = dict.fromkeys(edges.runs_as[each] for each in edges.readers.get(line.tensor, ()) if each in edges.runs_as)
    own = choose_provider(index.claims[name])
    elsewhere = tuple(each for each in readers if choose_provider(index.claims[each]) != own)
    if elsewhere:
        return Cause(elsewhere)
    return Cause((), f"the ONNX file shows no node on another provider that reads or produces {line.tensor}")
