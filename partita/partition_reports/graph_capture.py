"""Which nodes of a placement keep a session from being captured into one CUDA graph. Pure."""

from __future__ import annotations

from partita.diagnosis.session_index import CONTROL_FLOW
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.dry_run import BY_VALUES
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import BlockingNode, Phase

WHY_BODY = "control flow: which body runs is decided on the host"
WHY_COPY = "a copy between host and device waits for the host"
WHY_SIZE = "the host reads the size of its output back while it runs"
WHY_ELSEWHERE = "runs outside the device, so it is not part of what is captured"


def blocking_nodes(phase: Phase, device_provider: str) -> tuple[BlockingNode, ...]:
    """Nodes of `phase` that stand in the way of a capture on `device_provider`, in execution order."""
    found = []
    for node in phase.nodes:
        if node.op_type in CONTROL_FLOW:
            why = WHY_BODY
        elif is_memcpy(node):
            why = WHY_COPY
        elif node.provider != device_provider:
            why = WHY_ELSEWHERE
        elif node.op_type in BY_VALUES:
            why = WHY_SIZE
        else:
            continue
        found.append(BlockingNode(node=node.name, op_type=node.op_type, provider=provider_of(node), why=why))
    return tuple(found)
