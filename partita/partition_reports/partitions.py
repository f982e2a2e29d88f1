"""Partitions and copies between devices, with their causes.

A partition is a maximal run of consecutive nodes on one provider. Tensors that cross its borders come from the
optimised graph, else from the exported graph, without tensors that exist only after fusion. Copies are Memcpy nodes,
and graph inputs and outputs in other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partita import dtypes
from partita.diagnosis.graphs import MEMCPY_OPS, OptimisedGraph, edges
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import NodeEvent, PortFact
from partita.observations.records import PhaseName
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import BoundaryTensor, Copy, CopyDirection, NodePlacement, Partition, Phase
from partita.partition_reports.timing import NodeTimes

SESSION = "session"


def find_partitions(
    index: SessionIndex, phase: PhaseName, nodes: tuple[NodePlacement, ...], times: NodeTimes
) -> tuple[Partition, ...]:
    """The partitions, with the tensors that enter and leave each."""
    spans = _cut(nodes)
    part_of = {position: number for number, (start, end) in enumerate(spans) for position in range(start, end)}
    boundaries: list[list[BoundaryTensor]] = [[] for _ in spans]
    sizes = _tensor_sizes(index, times)
    names = index.optimised.other_names if index.optimised is not None else {}
    makers, readers = _parts_of_tensors(index, nodes, part_of)

    def add(part: int, name: str, direction: Literal["in", "out"], other_side: object, size: int | None) -> None:
        tensor = BoundaryTensor(name=name, direction=direction, other_side=str(other_side), size_bytes=size)
        boundaries[part].append(tensor)

    for tensor, source in makers.items():  # once out and once in, for each other partition that reads it
        for target in readers.get(tensor, ()):
            if target != source:
                size, name = sizes.get(tensor), names.get(tensor, tensor)
                add(source, name, "out", target, size)
                add(target, name, "in", source, size)
    for port in index.facts.ports:
        size = sizes.get(port.name, port_bytes(port, phase))
        if port.direction == "input":
            for target in readers.get(port.name, ()):
                add(target, port.name, "in", SESSION, size)
        elif port.name in makers:
            add(makers[port.name], port.name, "out", SESSION, size)
    return tuple(
        Partition(
            index=number,
            provider=provider_of(nodes[start]),
            first_position=start,
            nodes=end - start,
            boundary=tuple(sorted(boundaries[number], key=lambda tensor: tensor.direction)),
        )
        for number, (start, end) in enumerate(spans)
    )


def _cut(nodes: tuple[NodePlacement, ...]) -> list[tuple[int, int]]:
    """Half-open ranges of positions whose nodes share a provider."""
    spans: list[tuple[int, int]] = []
    for position, node in enumerate(nodes):
        if spans and provider_of(node) == provider_of(nodes[position - 1]):
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return spans


def _parts_of_tensors(
    index: SessionIndex, nodes: tuple[NodePlacement, ...], part_of: Mapping[int, int]
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Tensor -> the partition that produces it, and tensor -> the partitions that read it.

    Without the optimised graph a fused node has the edges of its parts.
    """
    parts = {node.name: part_of[node.position] for node in nodes}
    if index.optimised is None:
        parts |= {name: part_of[node.position] for node in nodes for name in node.replaces}
    graph = index.file_nodes if index.optimised is None else index.optimised.nodes
    makers, readers = edges({name: node for name, node in graph.items() if name in parts})
    return (
        {tensor: parts[name] for tensor, name in makers.items()},
        {tensor: list(dict.fromkeys(parts[name] for name in names)) for tensor, names in readers.items()},
    )


def port_bytes(port: PortFact, phase: PhaseName) -> int | None:
    """Bytes of a graph input or output; in prefill known for states only, because others depend on the prompt."""
    return port.bytes_per_decode_step if phase != "prefill" or port.role == "state" else None


def _tensor_sizes(index: SessionIndex, times: NodeTimes) -> dict[str, int]:
    """Bytes of tensors, from their node's outputs in the last observed run; both tensors of a copy have one size."""
    sizes: dict[str, int] = {}
    for name, event in times.last_events.items():
        node = index.optimised.nodes.get(name) if index.optimised is not None else index.file_nodes.get(name)
        if node is not None:
            made = _output_sizes(tuple(tensor for tensor in node.outputs if tensor), event)
            copied = node.inputs if name in index.memcpy else ()
            sizes.update(made)
            sizes.update((tensor, size) for tensor in copied for size in made.values())
        elif name in index.compiled:
            sizes.update(_output_sizes(_outputs_of(index, name), event))
    return sizes


def _outputs_of(index: SessionIndex, name: str) -> tuple[str, ...]:
    """The output of a compiled subgraph if it has exactly one; the order of several outputs is unknown."""
    inside = index.replaces(name)
    made = {tensor for each in inside for tensor in index.file_nodes[each].outputs if tensor}
    graph_outputs = {port.name for port in index.facts.ports if port.direction == "output"}
    others = index.file_nodes.keys() - set(inside)
    read = {tensor for each in others for tensor in index.file_nodes[each].inputs}
    outputs = tuple(made & (graph_outputs | read))
    return outputs if len(outputs) == 1 else ()


def _output_sizes(outputs: tuple[str, ...], event: NodeEvent) -> dict[str, int]:
    """Bytes per output of one execution: all bytes for a single output, else from the shapes. Outputs without a shape
    are not tensors and have no size.
    """
    if len(outputs) == 1:
        return {outputs[0]: event.output_bytes} if event.output_shapes else {}
    if len(outputs) != len(event.output_shapes):
        return {}
    sizes = zip(outputs, map(_shape_bytes, event.output_shapes), strict=True)
    return {name: size for name, size in sizes if size is not None}


def _shape_bytes(text: str) -> int | None:
    """Bytes of a tensor written as float32[1,12,256]; None if the text cannot be parsed."""
    dtype, bracket, rest = text.partition("[")
    dimensions = [part.strip() for part in rest.rstrip("]").split(",")] if rest.rstrip("]") else []
    if not bracket or dtypes.bits_of(dtype) is None or not all(part.isdecimal() for part in dimensions):
        return None
    return dtypes.size_bytes(dtype, map(int, dimensions))


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
