"""Copies between devices: Memcpy nodes, and graph inputs and outputs in other memory; and their causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.diagnosis.graphs import MEMCPY_OPS, OptimisedGraph, edges
from partita.diagnosis.session_index import SessionIndex, choose_provider
from partita.observations.facts import PortFact
from partita.observations.records import PhaseName
from partita.partition_reports.partitions import port_bytes
from partita.partition_reports.records import Copy, NodePlacement, Phase

MEMCPY = {"MemcpyFromHost": "host_to_device", "MemcpyToHost": "device_to_host"}


def is_memcpy(node: NodePlacement) -> bool:
    """Whether ONNX Runtime inserted the node as a copy; without a profile by its name."""
    if node.op_type is None:
        return node.name == "Memcpy" or node.name.startswith("Memcpy_token_")
    return node.op_type in MEMCPY


def subgraph_copies(phase: Phase) -> int | None:
    """Copies in control-flow subgraphs in one run; None if there may be more than the sources show."""
    if phase.subgraphs is None:
        return 0
    return None if phase.subgraphs.may_have_more_copies else phase.subgraphs.copies


def find_copies(index: SessionIndex, phase: PhaseName, nodes: tuple[NodePlacement, ...]) -> tuple[Copy, ...]:
    """Every copy between devices in one run of `phase`."""
    memcpy = [node for node in nodes if is_memcpy(node)]
    causes = find_causes(index, [node.name for node in memcpy])
    inside = tuple(_memcpy_copy(index, node, causes[node.name]) for node in memcpy)
    return (*inside, *(_port_copy(port, phase) for port in index.facts.ports if _is_copied(port)))


def _is_copied(port: PortFact) -> bool:
    """Whether ONNX Runtime copies the buffer bound to a graph input or output.

    An output in another host memory is not copied, but an input is, when it is bound (measured with the OpenVINO plugin
    for ONNX Runtime 1.31 and its memory OpenVINO_shared_CPU).
    """
    if port.required_memory == port.bound_memory:
        return False
    return port.direction == "input" or not (_is_host(port.required_memory) and _is_host(port.bound_memory))


def _memcpy_copy(index: SessionIndex, node: NodePlacement, cause: Cause) -> Copy:
    """The copy of a Memcpy node."""
    logged = index.memcpy.get(node.name)
    return Copy.model_validate(
        {
            "kind": "memcpy_node",
            "direction": MEMCPY.get(node.op_type or "", "unknown"),
            "name": node.name,
            "tensor": logged.tensor if logged else None,
            "bytes_per_run": node.output_bytes,
            "host_us_per_run": node.host_us_per_run,
            "caused_by": cause.nodes,
            "cause_missing_reason": cause.unknown_reason,
            "source": "profile" if "profile" in node.sources else "plan_file",
        }
    )


def _port_copy(port: PortFact, phase: PhaseName) -> Copy:
    """The copy outside the graph for a buffer in other memory than the graph expects."""
    is_input = port.direction == "input"
    origin, target = (port.bound_memory, port.required_memory)[:: 1 if is_input else -1]
    return Copy.model_validate(
        {
            "kind": "session_input" if is_input else "session_output",
            "direction": _direction(origin, target),
            "name": port.name,
            "bytes_per_run": port_bytes(port, phase),
            "host_us_per_run": None,
            "source": "memory_info",
        }
    )


def _direction(origin: str, target: str) -> str:
    """Direction of a copy between two memories, by their names."""
    return "_to_".join("host" if _is_host(memory) else "device" for memory in (origin, target))


def _is_host(memory: str) -> bool:
    """Whether it is host memory: Cpu, pinned (CudaPinned) or shared memory (OpenVINO_shared_CPU)."""
    return memory.lower() == "cpu" or memory.lower().endswith(("pinned", "_cpu"))


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
    makers, readers = edges(index.file_nodes)
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
