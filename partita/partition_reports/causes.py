"""Which nodes make a Memcpy node necessary: those that read or write its tensor in host memory. Pure.

A copy to the host is there for its readers, a copy from the host because of the node that made the tensor. A graph
input or constant that both sides read lies on the host because of the readers there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partita.partition_reports.optimised_graph import MEMCPY_OPS, OptimisedGraph
from partita.partition_reports.placement import choose_provider
from partita.partition_reports.session_index import SessionIndex

TO_HOST = "MemcpyToHost"


@dataclass(frozen=True, slots=True)
class Cause:
    """The nodes, or why none can be named."""

    nodes: tuple[str, ...]
    unknown: str = ""


def find_cause(index: SessionIndex, name: str) -> Cause:
    """Nodes of the plan that make the Memcpy node `name` necessary."""
    if index.optimised is not None and name in index.optimised.nodes:
        return cause_in_graph(index.optimised, name)
    return cause_in_file(index, name)


def cause_in_graph(graph: OptimisedGraph, name: str) -> Cause:
    """The cause by the edges of the graph as it runs, which has the Memcpy node itself."""
    node = graph.nodes[name]
    tensors = node.outputs if node.op_type == TO_HOST else node.inputs
    if not tensors:
        return Cause((), "the optimised graph shows no tensor of it")
    tensor = tensors[0]
    if node.op_type != TO_HOST and tensor in graph.makers:
        return Cause((graph.makers[tensor],))
    readers = tuple(each for each in graph.readers.get(tensor, ()) if graph.nodes[each].op_type not in MEMCPY_OPS)
    if readers:
        return Cause(readers)
    what = "the session hands it out" if node.op_type == TO_HOST else "it is a graph input or a constant"
    return Cause((), f"no node reads {graph.original(tensor)} in host memory; {what}")


def cause_in_file(index: SessionIndex, name: str) -> Cause:
    """The cause by the edges of the exported graph and the tensor that the log names."""
    line = index.memcpy.get(name)
    if line is None:
        return Cause((), "no source tells which tensor it copies")
    if line.op_type != TO_HOST:
        makers = in_plan(index, (node.name for node in index.facts.graph if line.tensor in node.outputs))
        if makers:
            return Cause(makers)
    readers = in_plan(index, (node.name for node in index.facts.graph if line.tensor in node.inputs))
    own = choose_provider(index.claims[name])
    elsewhere = tuple(each for each in readers if choose_provider(index.claims[each]) != own)
    if elsewhere:
        return Cause(elsewhere)
    return Cause((), f"the ONNX file shows no node on another provider that reads or makes {line.tensor}")


def in_plan(index: SessionIndex, exported: Iterable[str]) -> tuple[str, ...]:
    """The nodes of the plan that do the work of exported ones, each once."""
    wanted = frozenset(exported)
    return tuple(name for name in index.order if name in wanted or not wanted.isdisjoint(index.replaces(name)))
