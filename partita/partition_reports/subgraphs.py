"""Nodes in control-flow subgraphs, which are not in the plan: from ONNX Runtime's assignment list and log. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from partita.diagnosis import native_log
from partita.diagnosis.session_index import HOST_DEVICE, SessionIndex, choose_provider
from partita.observations.facts import AssignedNode
from partita.observations.names import CPU
from partita.partition_reports.records import SubgraphNode, Subgraphs


def find_subgraphs(index: SessionIndex) -> Subgraphs | None:
    """Nodes and copies in control-flow subgraphs; None without control flow."""
    listed = index.in_subgraphs()
    if listed is None:
        return None
    # Copies in the branches of an If may have equal lines.
    inserted = sum(native_log.MEMCPY_ADDED.search(line) is not None for line in index.facts.log)
    in_plan = len(native_log.inserted_copies(index.order, {name: index.op_type(name) for name in index.order}))
    logged = native_log.is_at_info(index.facts.log)
    nodes = [_subgraph_node(index, node) for node in listed]
    on_cpu = tuple(node for node in nodes if node.provider == CPU)
    return Subgraphs(
        nodes=len(listed),
        is_known=index.facts.assigned is not None or not index.has_subgraphs,
        on_cpu=on_cpu,
        function_nodes=tuple(node for node in nodes if any(each in index.exported for each in node.replaces)),
        copies=max(inserted - in_plan, 0) if logged else None,
        may_have_more_copies=index.has_subgraphs and _reads_around(index) and _spans_devices(index, listed),
    )


def _subgraph_node(index: SessionIndex, node: AssignedNode) -> SubgraphNode:
    """A listed node with the file nodes that it is part of."""
    same_name = node.name in index.same_name_nodes
    own = () if same_name else index.function_of.get(node.name, ())
    replaces = (index.replaces(node.name, in_subgraph=same_name) or own) if node.name else ()
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
    main = {choose_provider(providers) for providers in index.providers_by_source.values()} - {None}
    inside = {node.provider for node in listed} if facts.assigned is not None else {*facts.registered}
    on_host = {CPU, *(main if set(facts.plan_devices or ()) == {HOST_DEVICE} else ())}
    return len({CPU if provider in on_host else provider for provider in (*main, *inside)}) > 1
