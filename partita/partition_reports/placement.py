"""Nodes of the final plan with their providers, partitions, copies between devices with their causes, and conflicts.

Copies are Memcpy nodes, and graph inputs and outputs in other memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis import naming, sources
from partita.diagnosis.graphs import COMPILED, MEMCPY_OPS, OptimisedGraph
from partita.diagnosis.session_index import SessionIndex
from partita.diagnosis.sources import HOST_DEVICE, ProvidersBySource
from partita.observations.facts import AssignedNode, PortFact, SessionFacts
from partita.observations.names import CPU
from partita.observations.records import PhaseName, Source
from partita.partition_reports.cost import NodeTimes
from partita.partition_reports.groups import is_memcpy, provider_of
from partita.partition_reports.records import (
    Copy,
    CopyDirection,
    NodePlacement,
    Partition,
    Phase,
    SourceConflict,
    SubgraphNode,
    Subgraphs,
)


def place_nodes(index: SessionIndex, times: NodeTimes) -> tuple[NodePlacement, ...]:
    """One record per node, in execution order."""
    return tuple(_place_node(index, times, position, name) for position, name in enumerate(index.order))


def _place_node(index: SessionIndex, times: NodeTimes, position: int, name: str) -> NodePlacement:
    """Merge the facts of all sources about one node."""
    module = index.module(name)
    return NodePlacement(
        position=position,
        name=name,
        op_type=index.op_type(name),
        provider=index.provider(name),
        module=module,
        layer=naming.layer_of(module),
        host_us_per_run=times.host_us.get(name),
        output_bytes=times.output_bytes.get(name),
        replaces=index.replaces(name),
        added=index.is_added(name),
        sources=_sources_of(index, name),
    )


def in_layers(
    index: SessionIndex, nodes: tuple[NodePlacement, ...], copies: Sequence[Copy]
) -> tuple[NodePlacement, ...]:
    """The nodes, with a layer for nodes without a module: for a Memcpy node that of the node that requires it, for a
    compiled node that of its first part.
    """
    layers = {node.name: node.layer for node in nodes}
    works_for = {copy.name: copy.caused_by for copy in copies if copy.kind == "memcpy_node"}

    def layer(node: NodePlacement) -> int | None:
        if node.op_type == COMPILED and node.replaces:
            return naming.layer_of(index.module(node.replaces[0]))
        return next((layers[name] for name in works_for.get(node.name, ()) if layers.get(name) is not None), None)

    return tuple(node if node.layer is not None else node.model_copy(update={"layer": layer(node)}) for node in nodes)


def _sources_of(index: SessionIndex, name: str) -> tuple[Source, ...]:
    """Sources that contain a node of this name."""
    known: list[Source] = ["plan_file"] if index.order_source == "plan_file" else []
    if name in index.file_nodes:
        known.append("model_file")
    if index.optimised is not None and name in index.optimised.nodes:
        known.append("optimised_model")
    return (*known, *(source for source in index.providers_by_source[name]))


def find_conflicts(index: SessionIndex, phase: PhaseName) -> tuple[SourceConflict, ...]:
    """Nodes with conflicting sources.

    Either sources name different providers, or none; or a node is in one of two graphs only; or an experiment
    contradicts its log line.
    """
    found = (*_conflicting_providers(index), *_conflicting_graphs(index), *_conflicting_probes(index))
    return tuple(SourceConflict(phase=phase, node=node, detail=text, sources=sources) for node, text, sources in found)


Conflict = tuple[str, str, tuple[Source, ...]]
"""Node, detail and sources."""


def _conflicting_providers(index: SessionIndex) -> Iterator[Conflict]:
    """Nodes on different providers, or on none."""
    for name in index.order:
        by_source = index.providers_by_source[name]
        providers = frozenset().union(*by_source.values()) if by_source else frozenset()
        if len(providers) != 1:
            detail = _describe(by_source) if by_source else "no source names a provider for this node"
            yield name, detail, tuple(by_source) or (index.order_source,)


def _conflicting_graphs(index: SessionIndex) -> Iterator[Conflict]:
    """Nodes in the plan only, or in the optimised graph only."""
    if index.order_source == "plan_file" and index.optimised is not None:
        for names, others, detail in (
            (index.order, index.optimised.nodes, "in the plan but not in the optimised graph"),
            (index.optimised.nodes, index.present, "in the optimised graph but not in the plan"),
        ):
            yield from ((name, detail, ("plan_file", "optimised_model")) for name in names if name not in others)


def _count_copies(index: SessionIndex) -> tuple[int, int]:
    """Number of inserted copies in the log, and of Memcpy nodes in the order."""
    logged = sum(sources.MEMCPY_ADDED.search(line) is not None for line in index.facts.log)
    return logged, len(sources.inserted_copies(index.order, {name: index.op_type(name) for name in index.order}))


def _conflicting_probes(index: SessionIndex) -> Iterator[Conflict]:
    """Nodes for which a provider logs that it has no kernel, and which it supports unchanged in an experiment."""
    for provider, known in index.facts.providers.items():
        patterns = [each for each in known.patterns if each.reason == "no_kernel_op" and each.names_node]
        for name, probe in known.probes.items():
            first = next(iter(probe.variants), None)
            if first is None or first.outcome != "supported" or first.function_inlined or name in index.same_name_nodes:
                continue
            for line in index.log.get(name, ()):
                if any(each.is_about(line, name) for each in patterns):
                    text = f"native_log: {line.strip()}; probe: {provider} supports the unchanged node in isolation"
                    yield name, text, ("native_log", "probe")
                    break


def _describe(by_source: ProvidersBySource) -> str:
    """Each source with its provider."""
    return "; ".join(f"{source}: {' and '.join(sorted(providers))}" for source, providers in by_source.items())


def find_subgraphs(index: SessionIndex) -> Subgraphs | None:
    """Nodes and copies in control-flow subgraphs; None without control flow."""
    listed = index.in_subgraphs()
    if listed is None:
        return None
    inserted, in_plan = _count_copies(index)  # copies in the branches of an If may have equal lines
    logged = any(line.startswith("[I:") for line in index.facts.log)
    nodes = [_subgraph_node(index, node) for node in listed]
    on_cpu = tuple(node for node in nodes if node.provider == CPU)
    return Subgraphs(
        nodes=len(listed),
        is_known=index.facts.assigned is not None or not index.has_subgraphs,
        on_cpu=on_cpu,
        function_nodes=tuple(node for node in nodes if any(each in index.file_nodes for each in node.replaces)),
        copies=max(inserted - in_plan, 0) if logged else None,
        may_have_more_copies=index.has_subgraphs and _reads_around(index.facts) and _spans_devices(index, listed),
    )


def _subgraph_node(index: SessionIndex, node: AssignedNode) -> SubgraphNode:
    """A listed node with the file nodes that it is part of."""
    same_name = node.name in index.same_name_nodes
    replaces = index.replaces(node.name, in_subgraph=same_name) if node.name else ()
    return SubgraphNode(
        name=node.name,
        op_type=node.op_type,
        provider=node.provider,
        module=index.module(node.name, in_subgraph=same_name) if node.name else None,
        replaces=replaces,
    )


def _reads_around(facts: SessionFacts) -> bool:
    """Whether a node in a control-flow subgraph reads a tensor of the main graph.

    ONNX Runtime inserts no Memcpy node for it: the control-flow kernel copies it (`ProcessDefs` in
    onnxruntime/core/optimizer/transformer_memcpy.cc).
    """
    optimised = facts.optimised or ()
    main = {port.name for port in facts.ports if port.direction == "input"}
    main |= {tensor for node in (*facts.graph, *optimised) for tensor in node.outputs if tensor}
    inside = (*facts.subgraph_nodes, *(each for node in optimised for each in node.subgraph_nodes))
    return any(not main.isdisjoint(node.inputs) for node in inside)


def _spans_devices(index: SessionIndex, listed: Iterable[AssignedNode]) -> bool:
    """Whether nodes of main graph and control-flow subgraphs may be on providers with different memories.

    A provider whose nodes of the main graph are on the CPU device uses CPU memory.
    """
    facts = index.facts
    main = {*map(index.provider, index.order)} - {None}
    inside = {node.provider for node in listed} if facts.assigned is not None else {*facts.registered}
    on_host = {CPU, *(main if set(facts.plan_devices or ()) == {HOST_DEVICE} else ())}
    return len({CPU if provider in on_host else provider for provider in (*main, *inside)}) > 1


TO_HOST = "MemcpyToHost"
MEMCPY: Mapping[str, CopyDirection] = {"MemcpyFromHost": "host_to_device", TO_HOST: "device_to_host"}


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


DIRECTIONS: Mapping[tuple[bool, bool], CopyDirection] = {
    (True, False): "host_to_device",
    (False, True): "device_to_host",
    (True, True): "host_to_host",
    (False, False): "device_to_device",
}
"""Whether origin and target are in host memory -> direction."""


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
    graph = index.optimised
    runs_as = {each: name for name, file_nodes in index.file_nodes_of.items() for each in file_nodes}
    runs_as |= {name: name for name in index.order}
    if graph is None or not all(name in graph.nodes for name in names):
        return {name: _cause_in_file(index, runs_as, name) for name in names}
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
    if node.op_type != TO_HOST and tensor in graph.makers:
        return Cause((graph.makers[tensor],))
    readers = tuple(each for each in graph.readers.get(tensor, ()) if graph.nodes[each].op_type not in MEMCPY_OPS)
    if readers:
        return Cause(readers)
    kind = "a session output" if node.op_type == TO_HOST else "a graph input or a constant"
    return Cause((), f"no node reads {graph.original(tensor)} in host memory; it is {kind}")


def _cause_in_file(index: SessionIndex, runs_as: Mapping[str, str], name: str) -> Cause:
    """The cause by the edges of the exported graph and the tensor in the log.

    `runs_as`: file node -> the plan node that executes it.
    """
    line = index.memcpy.get(name)
    if line is None:
        return Cause((), "no source names its tensor")
    maker = runs_as.get(index.file.makers.get(line.tensor, ""))
    if line.op_type != TO_HOST and maker is not None:
        return Cause((maker,))
    found = dict.fromkeys(runs_as[each] for each in index.file.readers.get(line.tensor, ()) if each in runs_as)
    own = index.provider(name)
    others = tuple(each for each in found if index.provider(each) != own)
    if others:
        return Cause(others)
    return Cause((), f"no node of the ONNX file on another provider reads or produces {line.tensor}")
