"""Partitions and copies between devices, with their causes.

Copies are Memcpy nodes, and graph inputs and outputs in other memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis.graphs import MEMCPY_OPS, OptimisedGraph, edges
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import PortFact
from partita.observations.records import PhaseName
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import Copy, CopyDirection, NodePlacement, Partition, Phase


def find_partitions(nodes: Sequence[NodePlacement]) -> tuple[Partition, ...]:
    """Maximal runs of consecutive nodes on one provider."""
    found: list[Partition] = []
    for provider, group in itertools.groupby(nodes, provider_of):
        members = list(group)
        part = Partition(index=len(found), provider=provider, first_position=members[0].position, nodes=len(members))
        found.append(part)
    return tuple(found)


def port_bytes(port: PortFact, phase: PhaseName) -> int | None:
    """Bytes of a graph input or output; in prefill known for states only, because others depend on the prompt."""
    return port.bytes_per_decode_step if phase != "prefill" or port.role == "state" else None


TO_HOST = "MemcpyToHost"
MEMCPY: Mapping[str, CopyDirection] = {"MemcpyFromHost": "host_to_device", TO_HOST: "device_to_host"}


DIRECTIONS: Mapping[tuple[bool, bool], CopyDirection] = {
    (True, False): "host_to_device",
    (False, True): "device_to_host",
    (True, True): "host_to_host",
    (False, False): "device_to_device",
}
"""Whether origin and target are in host memory -> direction."""


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
    return Copy(
        kind="memcpy_node",
        direction=MEMCPY.get(node.op_type or "", "unknown"),
        name=node.name,
        tensor=logged.tensor if logged else None,
        bytes_per_run=node.output_bytes,
        host_us_per_run=node.host_us_per_run,
        caused_by=cause.nodes,
        cause_missing_reason=cause.unknown_reason,
        source="profile" if "profile" in node.sources else "plan_file",
    )


def _port_copy(port: PortFact, phase: PhaseName) -> Copy:
    """The copy outside the graph for a buffer in other memory than the graph expects."""
    is_input = port.direction == "input"
    origin, target = (port.bound_memory, port.required_memory)[:: 1 if is_input else -1]
    return Copy(
        kind="session_input" if is_input else "session_output",
        direction=DIRECTIONS[_is_host(origin), _is_host(target)],
        name=port.name,
        bytes_per_run=port_bytes(port, phase),
        host_us_per_run=None,
        source="memory_info",
    )


def _is_host(memory: str) -> bool:
    """Whether it is host memory: Cpu, pinned (CudaPinned) or shared memory (OpenVINO_shared_CPU)."""
    return memory.lower() == "cpu" or memory.lower().endswith(("pinned", "_cpu"))


@dataclass(frozen=True, slots=True)
class Cause:
    """The nodes, or why they are unknown."""

    nodes: tuple[str, ...]
    unknown_reason: str = ""


def find_causes(index: SessionIndex, names: Sequence[str]) -> dict[str, Cause]:
    """Memcpy node -> plan nodes that require it."""
    graph, file = index.optimised, edges(index.file_nodes) if names else ({}, {})
    runs_as = {each: name for name, file_nodes in index.file_nodes_of.items() for each in file_nodes}
    runs_as |= {name: name for name in index.order}
    if graph is None or not all(name in graph.nodes for name in names):
        return {name: _cause_in_file(index, *file, runs_as, name) for name in names}
    return {name: _without_transposes(index, _cause_in_graph(graph, name), runs_as) for name in names}


def _without_transposes(index: SessionIndex, cause: Cause, runs_as: Mapping[str, str]) -> Cause:
    """The cause, with layout transposes of ONNX Runtime replaced by the node that they were added for."""
    added = index.rewritten_with
    own = (name for name in cause.nodes if name not in added)
    found = (runs_as[each] for name in cause.nodes for each in added.get(name, ()) if each in runs_as)
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


def _cause_in_file(
    index: SessionIndex,
    makers: Mapping[str, str],
    readers: Mapping[str, Sequence[str]],
    runs_as: Mapping[str, str],
    name: str,
) -> Cause:
    """The cause by the edges of the exported graph and the tensor in the log.

    `runs_as`: file node -> the plan node that executes it.
    """
    line = index.memcpy.get(name)
    if line is None:
        return Cause((), "no source names its tensor")
    maker = runs_as.get(makers.get(line.tensor, ""))
    if line.op_type != TO_HOST and maker is not None:
        return Cause((maker,))
    found = dict.fromkeys(runs_as[each] for each in readers.get(line.tensor, ()) if each in runs_as)
    own = index.provider(name)
    others = tuple(each for each in found if index.provider(each) != own)
    if others:
        return Cause(others)
    return Cause((), f"no node of the ONNX file on another provider reads or produces {line.tensor}")
