"""Nodes of a placement that prevent capture into one CUDA graph. Pure."""

from __future__ import annotations

from partita.diagnosis.session_index import CONTROL_FLOW
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.dry_run import BY_VALUES
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import NodePlacement, Phase
from partita.partition_reports.request_records import BlockingCause, BlockingNode

WHY: dict[BlockingCause, str] = {
    "control_flow": "control flow: the host decides which subgraph runs",
    "copy": "a copy between host and device waits for the host",
    "other_provider": "it runs on another provider, so it cannot be captured",
    "size": "the host reads the size of its output during the run",
}


def blocking_nodes(phase: Phase, device_provider: str) -> tuple[BlockingNode, ...]:
    """Nodes of `phase` that block a capture on `device_provider`, in execution order."""
    found = []
    for node in phase.nodes:
        cause = _cause_of(node, device_provider)
        if cause is not None:
            found.append(
                BlockingNode(
                    node=node.name, op_type=node.op_type, provider=provider_of(node), cause=cause, cause_text=WHY[cause]
                )
            )
    return tuple(found)


def _cause_of(node: NodePlacement, device_provider: str) -> BlockingCause | None:
    """Why a node blocks the capture; None if it does not."""
    if node.op_type in CONTROL_FLOW:
        return "control_flow"
    if is_memcpy(node):
        return "copy"
    if node.provider != device_provider:
        return "other_provider"
    return "size" if node.op_type in BY_VALUES else None
