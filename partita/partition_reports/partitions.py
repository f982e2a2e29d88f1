"""Partitions: maximal runs of consecutive nodes on one provider, with the tensors that cross their borders.

Tensors come from the optimised graph, else from the exported graph, without tensors that exist only after fusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita import dtypes
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import NodeEvent, PortFact
from partita.observations.records import PhaseName
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import BoundaryTensor, NodePlacement, Partition
from partita.partition_reports.timing import NodeTimes

SESSION = "session"


@dataclass(frozen=True, slots=True)
class Edges:
    """Producer and readers of each tensor, as positions in the execution order."""

    producers: dict[str, int]
    readers: dict[str, tuple[int, ...]]


def find_partitions(
    index: SessionIndex, phase: PhaseName, nodes: tuple[NodePlacement, ...], times: NodeTimes
) -> tuple[Partition, ...]:
    """The partitions, with the tensors that enter and leave each."""
    spans = _cut(nodes)
    part_of = {position: number for number, (start, end) in enumerate(spans) for position in range(start, end)}
    boundaries: list[list[BoundaryTensor]] = [[] for _ in spans]
    edges = _find_edges(index, nodes)
    sizes = _tensor_sizes(index, times)
    names = index.optimised.other_names if index.optimised is not None else {}
    _add_inner_tensors(boundaries, edges, part_of, sizes, names)
    _add_session_tensors(boundaries, index, phase, edges, part_of, sizes)
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


def _find_edges(index: SessionIndex, nodes: tuple[NodePlacement, ...]) -> Edges:
    """Edges between nodes; without the optimised graph a fused node has the edges of its parts."""
    position_of = {node.name: node.position for node in nodes}
    graph = index.file_nodes if index.optimised is None else index.optimised.nodes
    if index.optimised is None:
        position_of |= {name: node.position for node in nodes for name in node.replaces}
    maker: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for name, node in graph.items():
        position = position_of.get(name)
        if position is None:
            continue
        maker.update((tensor, position) for tensor in node.outputs if tensor)
        for tensor in dict.fromkeys(node.inputs):
            readers.setdefault(tensor, []).append(position)
    return Edges(maker, {tensor: tuple(positions) for tensor, positions in readers.items()})


def _add_inner_tensors(
    boundaries: list[list[BoundaryTensor]],
    edges: Edges,
    part_of: dict[int, int],
    sizes: dict[str, int],
    names: Mapping[str, str],
) -> None:
    """Add tensors written in one partition and read in another: once out, once in, for each reading partition.

    `names`: renamed tensor -> its name in the ONNX file.
    """
    for tensor, position in edges.producers.items():
        source = part_of[position]
        targets = dict.fromkeys(part_of[reader] for reader in edges.readers.get(tensor, ()))
        for target in targets:
            if target != source:
                size, name = sizes.get(tensor), names.get(tensor, tensor)
                boundaries[source].append(_crossing(name, "out", str(target), size))
                boundaries[target].append(_crossing(name, "in", str(source), size))


def _add_session_tensors(
    boundaries: list[list[BoundaryTensor]],
    index: SessionIndex,
    phase: PhaseName,
    edges: Edges,
    part_of: dict[int, int],
    sizes: dict[str, int],
) -> None:
    """Add graph inputs to partitions that read them, and graph outputs to the partition that writes them."""
    for port in index.facts.ports:
        size = sizes.get(port.name, port_bytes(port, phase))
        if port.direction == "input":
            for target in dict.fromkeys(part_of[reader] for reader in edges.readers.get(port.name, ())):
                boundaries[target].append(_crossing(port.name, "in", SESSION, size))
        elif port.name in edges.producers:
            boundaries[part_of[edges.producers[port.name]]].append(_crossing(port.name, "out", SESSION, size))


def _crossing(name: str, direction: str, other_side: str, size: int | None) -> BoundaryTensor:
    """One tensor at one border."""
    fields = {"name": name, "direction": direction, "other_side": other_side, "size_bytes": size}
    return BoundaryTensor.model_validate(fields)


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
