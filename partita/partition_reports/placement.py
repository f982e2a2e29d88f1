"""Nodes of the final plan with their providers, partitions, copies between devices with their causes, and conflicts.

Copies are Memcpy nodes, and graph inputs and outputs in other memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partita.diagnosis import naming, sources
from partita.diagnosis.graphs import COMPILED, MEMCPY_OPS, OptimisedGraph
from partita.diagnosis.session_index import SessionIndex
from partita.diagnosis.sources import HOST_DEVICE
from partita.observations.facts import AssignedNode, PortFact, SessionFacts
from partita.observations.names import CPU
from partita.observations.records import PhaseName, Source
from partita.partition_reports.cost import NodeTimes
from partita.partition_reports.groups import is_copy, provider_of
from partita.partition_reports.phase_records import (
    Copy,
    NodePlacement,
    Partition,
    SubgraphNode,
    Subgraphs,
)
from partita.partition_reports.records import SourceConflict

TO_HOST = "MemcpyToHost"
MEMCPY: Mapping[str, str] = {"MemcpyFromHost": "host_to_device", TO_HOST: "device_to_host"}
Cause = tuple[tuple[str, ...], str]
"""The plan nodes that require a copy, or why they are unknown."""


def place_nodes(index: SessionIndex, times: NodeTimes, causes: Mapping[str, Cause]) -> tuple[NodePlacement, ...]:
    """One record per node, in execution order, with the facts of all sources. `causes`: of the Memcpy nodes."""
    nodes = []
    for position, name in enumerate(index.order):
        op_type, replaces = index.op_type(name), index.replaces(name)
        works_for = (*causes.get(name, ((), ""))[0], *(replaces[:1] if op_type == COMPILED else ()))
        layers = (naming.layer_of(index.module(each)) for each in (name, *works_for))
        known: list[Source] = ["plan_file"] if index.order_source == "plan_file" else []
        known += ["model_file"] if name in index.file_nodes else []
        known += ["optimised_model"] if index.optimised is not None and name in index.optimised.nodes else []
        node = NodePlacement(
            position=position,
            name=name,
            op_type=op_type,
            provider=index.provider(name),
            module=index.module(name),
            layer=next((layer for layer in layers if layer is not None), None),
            host_us_per_run=times.host_us.get(name),
            output_bytes=times.output_bytes.get(name),
            replaces=replaces,
            added=index.is_added(name),
            sources=(*known, *index.providers_by_source[name]),
        )
        nodes.append(node)
    return tuple(nodes)


def find_conflicts(index: SessionIndex, phase: PhaseName) -> Iterator[SourceConflict]:
    """Nodes with conflicting sources.

    Either sources name different providers, or none; or a node is in one of two graphs only; or an experiment
    contradicts its log line.
    """

    def conflict(node: str, detail: str, *between: Source) -> SourceConflict:
        return SourceConflict(phase=phase, node=node, detail=detail, sources=between)

    for name in index.order:
        known = index.providers_by_source[name]
        if len(frozenset[str]().union(*known.values())) != 1:
            detail = "; ".join(f"{source}: {' and '.join(sorted(providers))}" for source, providers in known.items())
            detail = detail or "no source names a provider for this node"
            yield conflict(name, detail, *(known or (index.order_source,)))
    if index.order_source == "plan_file" and index.optimised is not None:
        for name in (*index.order, *index.optimised.nodes):
            if name not in index.optimised.nodes:
                yield conflict(name, "in the plan but not in the optimised graph", "plan_file", "optimised_model")
            elif name not in index.present:
                yield conflict(name, "in the optimised graph but not in the plan", "plan_file", "optimised_model")
    for name, provider, line in _contradicted_lines(index):
        detail = f"native_log: {line.strip()}; probe: {provider} supports the unchanged node in isolation"
        yield conflict(name, detail, "native_log", "probe")


def _contradicted_lines(index: SessionIndex) -> Iterator[tuple[str, str, str]]:
    """Nodes for which a provider logs that it has no kernel, and which it supports unchanged in an experiment."""
    for provider, known in index.facts.providers.items():
        patterns = [each for each in known.patterns if each.reason == "no_kernel_op" and each.names_node]
        for name, probe in known.probes.items():
            first = next(iter(probe.variants), None)
            if first is None or first.outcome != "supported" or first.function_inlined or name in index.same_name_nodes:
                continue
            found = (line for line in index.log.get(name, ()) if any(each.is_about(line, name) for each in patterns))
            yield from ((name, provider, line) for line in itertools.islice(found, 1))


# Control-flow subgraphs


def find_subgraphs(index: SessionIndex) -> Subgraphs | None:
    """Nodes and copies in control-flow subgraphs; None without control flow."""
    listed, facts = index.in_subgraphs(), index.facts
    if listed is None:
        return None
    nodes = []
    for node in listed:
        same_name = node.name in index.same_name_nodes
        module = index.module(node.name, in_subgraph=same_name) if node.name else None
        replaces = index.replaces(node.name, in_subgraph=same_name) if node.name else ()
        nodes.append(SubgraphNode.copy_of(node, module=module, replaces=replaces))
    # Copies in the branches of an If may have equal lines.
    inserted = sum(sources.MEMCPY_ADDED.search(line) is not None for line in facts.log)
    in_plan = sum(is_copy(name, index.op_type(name)) for name in index.order)
    logged = any(line.startswith("[I:") for line in facts.log)
    return Subgraphs(
        nodes=len(listed),
        is_known=facts.assigned is not None or not index.has_subgraphs,
        on_cpu=tuple(node for node in nodes if node.provider == CPU),
        function_nodes=tuple(node for node in nodes if any(each in index.file_nodes for each in node.replaces)),
        copies=max(inserted - in_plan, 0) if logged else None,
        may_have_more_copies=index.has_subgraphs and _reads_around(facts) and _spans_devices(index, listed),
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


# Partitions and copies


def find_partitions(nodes: Sequence[NodePlacement]) -> tuple[Partition, ...]:
    """Maximal runs of consecutive nodes on one provider."""
    found: list[Partition] = []
    for provider, group in itertools.groupby(nodes, provider_of):
        members = list(group)
        part = Partition(index=len(found), provider=provider, first_position=members[0].position, nodes=len(members))
        found.append(part)
    return tuple(found)


def find_copies(
    index: SessionIndex, phase: PhaseName, nodes: Sequence[NodePlacement], causes: Mapping[str, Cause]
) -> tuple[Copy, ...]:
    """Every copy between devices in one run of `phase`. `causes`: of the Memcpy nodes."""
    found = []
    for node in nodes:
        if node.name in causes:
            logged, (caused_by, missing_reason) = index.memcpy.get(node.name), causes[node.name]
            copy = Copy.copy_of(
                node,
                kind="memcpy_node",
                direction=MEMCPY.get(node.op_type or "", "unknown"),
                tensor=logged.tensor if logged else None,
                bytes_per_run=node.output_bytes,
                caused_by=caused_by,
                cause_missing_reason=missing_reason,
                source="profile" if "profile" in node.sources else "plan_file",
            )
            found.append(copy)
    return (*found, *(_port_copy(port, phase) for port in index.facts.ports if _is_copied(port)))


def _is_copied(port: PortFact) -> bool:
    """Whether ONNX Runtime copies the buffer bound to a graph input or output.

    An output in another host memory is not copied, but an input is, when it is bound (measured with the OpenVINO plugin
    for ONNX Runtime 1.31 and its memory OpenVINO_shared_CPU).
    """
    if port.required_memory == port.bound_memory:
        return False
    return port.direction == "input" or not (_is_host(port.required_memory) and _is_host(port.bound_memory))


def _port_copy(port: PortFact, phase: PhaseName) -> Copy:
    """The copy outside the graph for a buffer in other memory than the graph expects."""
    is_input = port.direction == "input"
    memories = (port.bound_memory, port.required_memory)[:: 1 if is_input else -1]
    # In prefill the sizes of other buffers than states depend on the prompt.
    is_known = phase != "prefill" or port.role == "state"
    return Copy.copy_of(
        port,
        kind="session_input" if is_input else "session_output",
        direction="_to_".join("host" if _is_host(memory) else "device" for memory in memories),
        bytes_per_run=port.bytes_per_decode_step if is_known else None,
        host_us_per_run=None,
        source="memory_info",
    )


def _is_host(memory: str) -> bool:
    """Whether it is host memory: Cpu, pinned (CudaPinned) or shared memory (OpenVINO_shared_CPU)."""
    return memory.lower() == "cpu" or memory.lower().endswith(("pinned", "_cpu"))


def find_causes(index: SessionIndex) -> dict[str, Cause]:
    """Memcpy node of the order -> its cause."""
    names = [name for name in index.order if is_copy(name, index.op_type(name))]
    runs_as = {each: name for name, file_nodes in index.file_nodes_of.items() for each in file_nodes}
    runs_as |= {name: name for name in index.order}
    graph = index.optimised
    if graph is not None and all(name in graph.nodes for name in names):
        return {name: _cause_in_graph(index, graph, runs_as, name) for name in names}
    return {name: _cause_in_file(index, runs_as, name) for name in names}


def _cause_in_graph(index: SessionIndex, graph: OptimisedGraph, runs_as: Mapping[str, str], name: str) -> Cause:
    """The cause by the edges of the optimised graph, which contains the Memcpy node.

    A layout transpose of ONNX Runtime stands for the node that it was added for.
    """
    node = graph.nodes[name]
    to_host = node.op_type == TO_HOST
    tensor = next(iter(node.outputs if to_host else node.inputs), None)
    if tensor is None:
        return (), "the optimised graph does not name its tensor"
    readers = [each for each in graph.readers.get(tensor, ()) if graph.nodes[each].op_type not in MEMCPY_OPS]
    found = [graph.makers[tensor]] if not to_host and tensor in graph.makers else readers
    if not found:
        kind = "a session output" if to_host else "a graph input or a constant"
        return (), f"no node reads {graph.original(tensor)} in host memory; it is {kind}"
    added = index.rewritten_with
    own = [each for each in found if each not in added]
    own += [runs_as[each] for added_node in found for each in added.get(added_node, ()) if each in runs_as]
    return tuple(dict.fromkeys(own)), ""


def _cause_in_file(index: SessionIndex, runs_as: Mapping[str, str], name: str) -> Cause:
    """The cause by the edges of the exported graph and the tensor in the log.

    `runs_as`: file node -> the plan node that executes it.
    """
    line = index.memcpy.get(name)
    if line is None:
        return (), "no source names its tensor"
    maker = runs_as.get(index.file.makers.get(line.tensor, ""))
    if line.op_type != TO_HOST and maker is not None:
        return (maker,), ""
    found = dict.fromkeys(runs_as[each] for each in index.file.readers.get(line.tensor, ()) if each in runs_as)
    others = tuple(each for each in found if index.provider(each) != index.provider(name))
    missing = f"no node of the ONNX file on another provider reads or produces {line.tensor}"
    return others, "" if others else missing
