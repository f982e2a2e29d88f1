"""Provider of every node of the final plan and in control-flow subgraphs, and conflicts between sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from partita.diagnosis import naming, sources
from partita.diagnosis.evidence import name_in, names_a_node
from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.session_index import SessionIndex
from partita.diagnosis.sources import HOST_DEVICE, ProvidersBySource
from partita.observations.facts import AssignedNode
from partita.observations.names import CPU
from partita.observations.records import PhaseName, Source
from partita.partition_reports.records import Copy, NodePlacement, SourceConflict, SubgraphNode, Subgraphs
from partita.partition_reports.timing import NodeTimes


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
        patterns = [each for each in known.patterns if each.reason == "no_kernel_op" and names_a_node(each)]
        for name, probe in known.probes.items():
            first = next(iter(probe.variants), None)
            if first is None or first.outcome != "supported" or first.function_inlined or name in index.same_name_nodes:
                continue
            for line in index.log.get(name, ()):
                if any(name_in(line, each, name) for each in patterns):
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
        may_have_more_copies=index.has_subgraphs and _reads_around(index) and _spans_devices(index, listed),
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


def _reads_around(index: SessionIndex) -> bool:
    """Whether a node in a control-flow subgraph reads a tensor of the main graph.

    ONNX Runtime inserts no Memcpy node for it: the control-flow kernel copies it (`ProcessDefs` in
    onnxruntime/core/optimizer/transformer_memcpy.cc).
    """
    facts = index.facts
    optimised = facts.optimised or ()
    main_tensors = {port.name for port in facts.ports if port.direction == "input"}
    main_tensors |= {tensor for node in (*facts.graph, *optimised) for tensor in node.outputs if tensor}
    inside = (*facts.subgraph_nodes, *(each for node in optimised for each in node.subgraph_nodes))
    return any(tensor in main_tensors for node in inside for tensor in node.inputs)


def _spans_devices(index: SessionIndex, listed: Iterable[AssignedNode]) -> bool:
    """Whether nodes of main graph and control-flow subgraphs may be on providers with different memories.

    A provider whose nodes of the main graph are on the CPU device uses CPU memory.
    """
    facts = index.facts
    main = {*map(index.provider, index.order)} - {None}
    inside = {node.provider for node in listed} if facts.assigned is not None else {*facts.registered}
    on_host = {CPU, *(main if set(facts.plan_devices or ()) == {HOST_DEVICE} else ())}
    return len({CPU if provider in on_host else provider for provider in (*main, *inside)}) > 1
